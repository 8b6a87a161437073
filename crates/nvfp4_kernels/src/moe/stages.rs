//! Stages that the launches of a chunk have left in its workspace, brought to a step's rows and to the natural order of
//! columns.

use std::ops::Range;

use kernels_gpu::sorted::{bits16_bytes, bits16_place};

use super::MoeArguments;
use super::kernels::{MoeKernels, RowPlan};
use super::quantized_parts::RowParts;
use super::workspace::{Read, RowMemory, Workspace};
use crate::group::Address;
use crate::layer::moe_pack::row_order::columns_of_k;
use nvfp4_core::Error;
use nvfp4_core::moe::{MoeSizes, MoeStep, QuantizedStages, Rows, Stages};

/// Stages in a workspace, as numbers.
pub struct StageParts {
    sizes: MoeSizes,
    tokens: usize,
    /// Row of each choice of the chunk, from the device's lists. `None`: a chain of two launches, in which each choice has its
    /// own row.
    places: Option<Vec<u32>>,
    routed: ExpertParts,
    /// Stages of the shared expert.
    shared: Option<ExpertParts>,
}

/// Stages of the rows of experts.
struct ExpertParts {
    /// Number of columns of the intermediate, I.
    width: usize,
    /// Intermediate `[rows, I]`: columns in the order of K, or in their natural order if the operands are quantized.
    intermediate: Vec<u16>,
    /// Rows of down, `[rows, H]`.
    partial: Vec<u16>,
    /// Quantized operands of both products, for FP8 and NVFP4 tokens.
    quantized: Option<[RowParts; 2]>,
}

impl StageParts {
    /// Reads the stages that launches of these kernels have left. `read` reads bytes from an address.
    ///
    /// # Errors
    /// Errors of `read`.
    pub fn read(
        sizes: &MoeSizes,
        chunk: &MoeArguments,
        workspace: &Workspace,
        kernels: &MoeKernels,
        mut read: impl FnMut(Address, usize) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let tokens = chunk.token_count;
        let plan = RowPlan::new(sizes, tokens, kernels);
        let (hidden, routed) = (sizes.hidden, &workspace.routed);
        let places = if kernels.few(sizes, chunk).is_none() {
            let places = routed.lists.at + routed.lists.offsets(plan.row_multiple).places;
            Some(bytemuck::pod_collect_to_vec(&read(places, size_of::<u32>() * tokens * sizes.top_k)?))
        } else {
            None
        };
        let routed = ExpertParts::read(routed, hidden, plan.routed.are_sorted, &mut read)?;
        let shared = workspace.shared.as_ref().map(|memory| {
            let mut parts = ExpertParts::read(memory, hidden, plan.shared.are_sorted, &mut read)?;
            parts.intermediate.truncate(tokens * parts.width);
            parts.partial.truncate(tokens * hidden);
            Ok::<_, Error>(parts)
        });
        Ok(Self { sizes: *sizes, tokens, places, routed, shared: shared.transpose()? })
    }

    /// Writes the stages of the chunk, whose first token is `first_token` of the step. A row with an invalid place in the lists
    /// stays unchanged.
    pub fn write(&self, step: &MoeStep<'_>, first_token: usize, stages: &mut Stages) {
        let (MoeSizes { hidden, top_k, .. }, parts) = (self.sizes, &self.routed);
        let (width, rows) = (parts.width, parts.partial.len() / hidden);
        let from_order = self.column_order(parts);
        let Stages { quantized, .. } = stages;
        for choice in 0..self.tokens * top_k {
            let place = match &self.places {
                Some(places) => places[choice] as usize,
                None => first_of_expert(step.rows(), first_token * top_k + choice, top_k) - first_token * top_k,
            };
            let row = step.rows().place(first_token * top_k + choice);
            let Some((to, from)) = row.zip(Some(place).filter(|place| *place < rows)) else { continue };
            let part = |row: usize, width: usize| -> Range<usize> { row * width..(row + 1) * width };
            let ordered = &parts.intermediate[part(from, width)];
            reorder(ordered, &from_order, &mut stages.intermediate[part(to, width)]);
            stages.partial[part(to, hidden)].copy_from_slice(&parts.partial[part(from, hidden)]);
            if let Some(([of_tokens, of_intermediate], to_stages)) = parts.quantized.as_ref().zip(quantized.as_mut()) {
                of_tokens.write_row(from, &mut to_stages.tokens, to);
                of_intermediate.write_row(from, &mut to_stages.intermediate, to);
            }
        }
        self.write_shared(first_token, stages);
    }

    /// Writes the shared expert's stages.
    fn write_shared(&self, first_token: usize, stages: &mut Stages) {
        let Some(parts) = &self.shared else { return };
        let (hidden, width) = (self.sizes.hidden, parts.width);
        let (from_order, ordered) = (self.column_order(parts), &parts.intermediate);
        let to = &mut stages.shared_intermediate[first_token * width..][..ordered.len()];
        for (ordered, to) in ordered.chunks_exact(width.max(1)).zip(to.chunks_exact_mut(width.max(1))) {
            reorder(ordered, &from_order, to);
        }
        stages.shared_partial[first_token * hidden..][..parts.partial.len()].copy_from_slice(&parts.partial);
        if let Some(([of_tokens, of_intermediate], to)) = parts.quantized.as_ref().zip(stages.quantized.as_mut()) {
            let QuantizedStages { shared_tokens, shared_intermediate, .. } = to;
            for token in 0..self.tokens {
                of_tokens.write_row(token, shared_tokens, first_token + token);
                of_intermediate.write_row(token, shared_intermediate, first_token + token);
            }
        }
    }

    /// Returns the column of each position in a row of the intermediate.
    fn column_order(&self, parts: &ExpertParts) -> Vec<usize> {
        let is_natural = parts.quantized.is_some() || self.places.is_none();
        if is_natural { (0..parts.width).collect() } else { columns_of_k(parts.width as u32) }
    }
}

impl ExpertParts {
    /// Reads all rows of experts.
    fn read(memory: &RowMemory, hidden: usize, are_sorted: bool, read: &mut Read<'_>) -> Result<Self, Error> {
        let (rows, width) = (memory.capacity, memory.width);
        let quantized = RowParts::read(memory, hidden, read)?;
        let mut numbers = |address: Address, count: usize| -> Result<Vec<u16>, Error> {
            Ok(bytemuck::pod_collect_to_vec(&read(address, size_of::<u16>() * count)?))
        };
        let intermediate = if are_sorted {
            let sorted = numbers(memory.intermediate, bits16_bytes(rows.into(), width) as usize / size_of::<u16>())?;
            let place = |row, position| bits16_place(rows, width, row, position) as usize / size_of::<u16>();
            let of_row = |row| (0..width).map(move |position| place(row, position));
            (0..rows).flat_map(of_row).map(|place| sorted[place]).collect()
        } else {
            numbers(memory.intermediate, rows as usize * width as usize)?
        };
        let partial = numbers(memory.rows, rows as usize * hidden)?;
        Ok(Self { width: width as usize, intermediate, partial, quantized })
    }
}

/// Returns the first choice of the same token with the same expert. In a chain of two launches, its row serves both
/// choices.
fn first_of_expert(rows: &Rows, choice: usize, top_k: usize) -> usize {
    let expert = |choice: usize| {
        let row = rows.place(choice)? as u32;
        Some(rows.firsts().partition_point(|first| *first <= row))
    };
    let mut of_token = choice / top_k * top_k..choice;
    of_token.find(|&other| expert(other) == expert(choice)).unwrap_or(choice)
}

/// Writes each number to its column.
fn reorder(ordered: &[u16], order: &[usize], to: &mut [u16]) {
    for (&number, &column) in ordered.iter().zip(order) {
        to[column] = number;
    }
}
