//! What the launches of a chunk have left in its workspace, brought back to a step's rows and to the natural order of columns.

use std::ops::Range;

use kernels_gpu::sorted::LINE_BYTES;
use kernels_gpu::units::{block_columns, block_start, element_at, k_blocks};

use super::workspace::{SortedRows, Workspace};
use crate::error::Error;
use crate::fp8::Quantised;
use crate::kernels::group::Address;
use crate::kernels::moe_quantize::code_places;
use crate::moe::{MoeSizes, MoeStep, QuantisedStages, Stages};

/// The parts of a workspace that hold stages, as numbers.
pub(crate) struct StageParts {
    sizes: MoeSizes,
    tokens: usize,
    /// The row of each choice of the chunk, as the device's lists have it.
    places: Vec<u32>,
    /// `[rows, I]`, columns in the order of K, or with tokens in FP8 in their own.
    intermediate: Vec<u16>,
    /// `[rows, H]`.
    partial: Vec<u16>,
    /// The tokens of both products, if they are in FP8.
    fp8: Option<[SortedParts; 2]>,
    /// The shared expert's.
    shared: Option<SharedParts>,
}

/// What the shared expert's launches have left, as in [`StageParts`].
struct SharedParts {
    width: usize,
    intermediate: Vec<u16>,
    partial: Vec<u16>,
    fp8: Option<[SortedParts; 2]>,
}

/// Rows in e4m3 as they lie in the workspace.
struct SortedParts {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Columns of a row.
    k: usize,
}

impl StageParts {
    /// Reads them, each by its address and its bytes.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read(
        sizes: &MoeSizes,
        tokens: usize,
        workspace: &Workspace,
        mut read: impl FnMut(Address, usize) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let choices = tokens * sizes.top_k;
        let mut sorted = |rows: Option<[SortedRows; 2]>, widths: [usize; 2]| -> Result<_, Error> {
            let Some([first, second]) = rows else { return Ok(None) };
            let mut part = |rows: SortedRows, k: usize| {
                let capacity = rows.capacity as usize;
                let codes = read(rows.codes, capacity * (k_blocks(k as u32) * LINE_BYTES) as usize)?;
                let scales = bytemuck::pod_collect_to_vec(&read(rows.scales, size_of::<f32>() * capacity)?);
                Ok::<_, Error>(SortedParts { codes, scales, k })
            };
            Ok(Some([part(first, widths[0])?, part(second, widths[1])?]))
        };
        let fp8 = sorted(workspace.fp8, [sizes.hidden, sizes.intermediate])?;
        let shared_fp8 = match workspace.shared {
            Some(shared) => sorted(shared.fp8, [sizes.hidden, shared.width as usize])?,
            None => None,
        };
        let mut numbers = |address: Address, count: usize| -> Result<Vec<u16>, Error> {
            Ok(bytemuck::pod_collect_to_vec(&read(address, size_of::<u16>() * count)?))
        };
        let rows = workspace.fp8.map_or(choices, |[rows, _]| rows.capacity as usize);
        let intermediate = numbers(workspace.intermediate, rows * sizes.intermediate)?;
        let partial = numbers(workspace.rows, rows * sizes.hidden)?;
        let shared = workspace.shared.map(|shared| {
            let width = shared.width as usize;
            let intermediate = numbers(shared.intermediate, tokens * width)?;
            let partial = numbers(shared.rows, tokens * sizes.hidden)?;
            Ok::<_, Error>(SharedParts { width, intermediate, partial, fp8: shared_fp8 })
        });
        let shared = shared.transpose()?;
        let places = read(workspace.lists.at + workspace.lists.offsets.places, size_of::<u32>() * choices)?;
        let places = bytemuck::pod_collect_to_vec(&places);
        Ok(Self { sizes: *sizes, tokens, places, intermediate, partial, fp8, shared })
    }

    /// Writes the part of the stages that the chunk has computed, which begins with this token of the step. A row whose place in
    /// the lists is wrong stays as it was.
    pub fn write(&self, step: &MoeStep<'_>, first_token: usize, stages: &mut Stages) {
        let MoeSizes { hidden, intermediate, top_k, .. } = self.sizes;
        let from_order = |width: usize| if self.fp8.is_some() { (0..width).collect() } else { order(width) };
        let (from_order_of_rows, rows) = (from_order(intermediate), self.partial.len() / hidden);
        let Stages { quantised, .. } = stages;
        for (choice, &place) in self.places.iter().enumerate() {
            let row = step.rows().place(first_token * top_k + choice);
            let Some((to, from)) = row.zip(usize::try_from(place).ok().filter(|place| *place < rows)) else {
                continue;
            };
            let part = |row: usize, width: usize| -> Range<usize> { row * width..(row + 1) * width };
            let ordered = &self.intermediate[part(from, intermediate)];
            reorder(ordered, &from_order_of_rows, &mut stages.intermediate[part(to, intermediate)]);
            stages.partial[part(to, hidden)].copy_from_slice(&self.partial[part(from, hidden)]);
            if let Some(([of_tokens, of_intermediate], to_stages)) = self.fp8.as_ref().zip(quantised.as_mut()) {
                of_tokens.write_row(from, &mut to_stages.tokens, to);
                of_intermediate.write_row(from, &mut to_stages.intermediate, to);
            }
        }
        let Some(SharedParts { width, intermediate: ordered, partial, fp8 }) = &self.shared else { return };
        let to = &mut stages.shared_intermediate[first_token * width..][..ordered.len()];
        let from_order = from_order(*width);
        for (ordered, to) in ordered.chunks_exact(*width.max(&1)).zip(to.chunks_exact_mut(*width.max(&1))) {
            reorder(ordered, &from_order, to);
        }
        stages.shared_partial[first_token * hidden..][..partial.len()].copy_from_slice(partial);
        if let Some(([of_tokens, of_intermediate], to)) = fp8.as_ref().zip(quantised.as_mut()) {
            let QuantisedStages { shared_tokens, shared_intermediate, .. } = to;
            for token in 0..self.tokens {
                of_tokens.write_row(token, shared_tokens, first_token + token);
                of_intermediate.write_row(token, shared_intermediate, first_token + token);
            }
        }
    }
}

impl SortedParts {
    /// Writes a row, columns in their natural order, as another one.
    fn write_row(&self, row: usize, to: &mut Quantised, to_row: usize) {
        let codes = &mut to.codes[to_row * self.k..][..self.k];
        for (column, place) in code_places(self.scales.len() as u32, row as u32, self.k as u32) {
            codes[column] = self.codes[place];
        }
        to.scales[to_row] = self.scales[row];
    }
}

/// The column that stands at each place of the order of K, of so many.
fn order(columns: usize) -> Vec<usize> {
    let k = columns as u32;
    let block = |block| {
        let (start, columns) = (block_start(k, block), block_columns(k, block));
        (0..columns).map(move |position| (start + element_at(columns, position)) as usize)
    };
    (0..k_blocks(k)).flat_map(block).collect()
}

fn reorder(ordered: &[u16], order: &[usize], to: &mut [u16]) {
    for (&number, &column) in ordered.iter().zip(order) {
        to[column] = number;
    }
}
