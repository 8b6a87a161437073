//! What the launches of a chunk have left in its workspace, brought back to a step's rows and to the natural order of columns.

use std::ops::Range;

use kernels_gpu::units::{block_columns, block_start, element_at, k_blocks};

use super::workspace::Workspace;
use crate::error::Error;
use crate::kernels::group::Address;
use crate::moe::{MoeSizes, MoeStep, Stages};

/// The parts of a workspace that hold stages, as numbers.
pub(crate) struct StageParts {
    sizes: MoeSizes,
    tokens: usize,
    /// The row of each choice of the chunk, as the device's lists have it.
    places: Vec<u32>,
    /// `[T·k, I]`, columns in the order of K.
    intermediate: Vec<u16>,
    /// `[T·k, H]`.
    partial: Vec<u16>,
    /// The shared expert's.
    shared: Option<(Vec<u16>, Vec<u16>)>,
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
        let mut numbers = |address: Address, count: usize| -> Result<Vec<u16>, Error> {
            Ok(bytemuck::pod_collect_to_vec(&read(address, size_of::<u16>() * count)?))
        };
        let intermediate = numbers(workspace.intermediate, choices * sizes.intermediate)?;
        let partial = numbers(workspace.rows, choices * sizes.hidden)?;
        let shared = workspace.shared.map(|shared| {
            let intermediate = numbers(shared.intermediate, tokens * shared.width as usize)?;
            Ok::<_, Error>((intermediate, numbers(shared.rows, tokens * sizes.hidden)?))
        });
        let shared = shared.transpose()?;
        let places = read(workspace.lists.at + workspace.lists.offsets.places, size_of::<u32>() * choices)?;
        Ok(Self { sizes: *sizes, tokens, places: bytemuck::pod_collect_to_vec(&places), intermediate, partial, shared })
    }

    /// Writes the part of the stages that the chunk has computed, which begins with this token of the step. A row whose place in
    /// the lists is wrong stays as it was.
    pub fn write(&self, step: &MoeStep<'_>, first_token: usize, stages: &mut Stages) {
        let MoeSizes { hidden, intermediate, top_k, .. } = self.sizes;
        let from_order = order(intermediate);
        for (choice, &place) in self.places.iter().enumerate() {
            let row = step.rows().place(first_token * top_k + choice);
            let Some((to, from)) = row.zip(usize::try_from(place).ok().filter(|place| *place < self.places.len()))
            else {
                continue;
            };
            let part = |row: usize, width: usize| -> Range<usize> { row * width..(row + 1) * width };
            let ordered = &self.intermediate[part(from, intermediate)];
            reorder(ordered, &from_order, &mut stages.intermediate[part(to, intermediate)]);
            stages.partial[part(to, hidden)].copy_from_slice(&self.partial[part(from, hidden)]);
        }
        if let Some((ordered, partial)) = &self.shared {
            let width = ordered.len() / self.tokens.max(1);
            let to = &mut stages.shared_intermediate[first_token * width..][..ordered.len()];
            let from_order = order(width);
            for (ordered, to) in ordered.chunks_exact(width.max(1)).zip(to.chunks_exact_mut(width.max(1))) {
                reorder(ordered, &from_order, to);
            }
            stages.shared_partial[first_token * hidden..][..partial.len()].copy_from_slice(partial);
        }
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
