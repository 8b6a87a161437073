//! What the launches of a chunk have left in its workspace, brought back to a step's rows and to the natural order of columns.

use std::ops::Range;

use kernels_gpu::lists::tile_size;
use kernels_gpu::nvfp4_rows::{row_bytes, token_scale, token_scale_bytes, value_bytes};
use kernels_gpu::sorted::{LINE_BYTES, bits16_bytes, bits16_place};
use kernels_gpu::units::k_blocks;

use super::MoeArguments;
use super::kernels::{MoeKernels, RowPlan};
use super::workspace::{Nvfp4Rows, PlacedLists, SharedWorkspace, SortedRows, Workspace};
use crate::error::Error;
use crate::format::BLOCK;
use crate::fp8::QuantizedRows;
use crate::kernels::group::Address;
use crate::kernels::layer::moe_pack::row_order::columns_of_k;
use crate::kernels::layer::moe_quantize::code_places;
use crate::moe::{MoeSizes, MoeStep, QuantizedStages, Rows, Stages};

/// The parts of a workspace that hold stages, as numbers.
pub(crate) struct StageParts {
    sizes: MoeSizes,
    tokens: usize,
    /// The row of each choice of the chunk, as the device's lists have it; none where tokens are few, and choices have rows of their own.
    places: Option<Vec<u32>>,
    /// `[rows, I]`, columns in the order of K, or in their own where tokens are quantized.
    intermediate: Vec<u16>,
    /// `[rows, H]`.
    partial: Vec<u16>,
    /// The tokens of both products, if they are in FP8 or NVFP4.
    quantized: Option<[RowParts; 2]>,
    /// The shared expert's.
    shared: Option<SharedParts>,
}

/// What the shared expert's launches have left, as in [`StageParts`].
struct SharedParts {
    width: usize,
    intermediate: Vec<u16>,
    partial: Vec<u16>,
    quantized: Option<[RowParts; 2]>,
}

/// QuantizedRows rows as they lie in the workspace.
enum RowParts {
    Fp8(SortedParts),
    Nvfp4(Nvfp4Parts),
}

/// Rows in NVFP4.
struct Nvfp4Parts {
    values: Vec<u8>,
    scales: Vec<u8>,
    globals: Vec<f32>,
    /// The first row of each expert, and the first tile of tokens, as the device's lists have them.
    firsts: Vec<u32>,
    tile_firsts: Vec<u32>,
    /// Columns of a row.
    k: usize,
}

/// Rows in e4m3.
struct SortedParts {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Columns of a row.
    k: usize,
}

impl StageParts {
    /// Reads them, each by its address and its bytes, as launches of these kernels leave them.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read(
        sizes: &MoeSizes,
        chunk: &MoeArguments,
        workspace: &Workspace,
        kernels: MoeKernels,
        mut read: impl FnMut(Address, usize) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let tokens = chunk.token_count;
        let choices = tokens * sizes.top_k;
        let RowPlan { are_sorted, shared_are_sorted, row_multiple, .. } = RowPlan::new(sizes, tokens, kernels);
        let mut rows = |fp8: Option<[SortedRows; 2]>,
                        nvfp4: Option<[Nvfp4Rows; 2]>,
                        lists: PlacedLists,
                        experts: usize,
                        widths: [usize; 2]|
         -> Result<_, Error> {
            if let Some([first, second]) = fp8 {
                let part = |rows, k, read: &mut _| SortedParts::read(rows, k, read).map(RowParts::Fp8);
                return Ok(Some([part(first, widths[0], &mut read)?, part(second, widths[1], &mut read)?]));
            }
            let Some([first, second]) = nvfp4 else { return Ok(None) };
            let part = |rows, k, read: &mut _| Nvfp4Parts::read(rows, lists, experts, k, read).map(RowParts::Nvfp4);
            Ok(Some([part(first, widths[0], &mut read)?, part(second, widths[1], &mut read)?]))
        };
        let Workspace { fp8, nvfp4, lists, .. } = *workspace;
        let quantized = rows(fp8, nvfp4, lists, sizes.experts, [sizes.hidden, sizes.intermediate])?;
        let shared_quantized = match workspace.shared {
            Some(SharedWorkspace { fp8, nvfp4, lists, width, .. }) => {
                rows(fp8, nvfp4, lists, 1, [sizes.hidden, width as usize])?
            }
            None => None,
        };
        let mut numbers = |address: Address, count: usize| -> Result<Vec<u16>, Error> {
            Ok(bytemuck::pod_collect_to_vec(&read(address, size_of::<u16>() * count)?))
        };
        // Rows of so many columns, one behind the other.
        let mut rows = |address: Address, rows: u32, width: usize, is_sorted: bool| -> Result<Vec<u16>, Error> {
            if !is_sorted {
                return numbers(address, rows as usize * width);
            }
            let sorted = numbers(address, bits16_bytes(rows.into(), width as u32) as usize / size_of::<u16>())?;
            let place = |row, position| bits16_place(rows, width as u32, row, position) as usize / size_of::<u16>();
            let of_row = |row| (0..width as u32).map(move |position| place(row, position));
            Ok((0..rows).flat_map(of_row).map(|place| sorted[place]).collect())
        };
        let intermediate = rows(workspace.intermediate, workspace.row_capacity, sizes.intermediate, are_sorted)?;
        let partial = rows(workspace.rows, workspace.row_capacity, sizes.hidden, false)?;
        let shared = workspace.shared.map(|shared| {
            let width = shared.width as usize;
            let mut intermediate = rows(shared.intermediate, shared.row_capacity, width, shared_are_sorted)?;
            let mut partial = rows(shared.rows, shared.row_capacity, sizes.hidden, false)?;
            intermediate.truncate(tokens * width);
            partial.truncate(tokens * sizes.hidden);
            Ok::<_, Error>(SharedParts { width, intermediate, partial, quantized: shared_quantized })
        });
        let shared = shared.transpose()?;
        let places = if kernels.few(sizes, chunk).is_none() {
            let places = workspace.lists.at + workspace.lists.offsets(row_multiple).places;
            Some(bytemuck::pod_collect_to_vec(&read(places, size_of::<u32>() * choices)?))
        } else {
            None
        };
        Ok(Self { sizes: *sizes, tokens, places, intermediate, partial, quantized, shared })
    }

    /// Writes the part of the stages that the chunk has computed, which begins with this token of the step. A row whose place in
    /// the lists is wrong stays as it was.
    pub fn write(&self, step: &MoeStep<'_>, first_token: usize, stages: &mut Stages) {
        let MoeSizes { hidden, intermediate, top_k, .. } = self.sizes;
        let is_natural = self.quantized.is_some() || self.places.is_none();
        let from_order = |width: usize| if is_natural { (0..width).collect() } else { columns_of_k(width as u32) };
        let (from_order_of_rows, rows) = (from_order(intermediate), self.partial.len() / hidden);
        let Stages { quantized, .. } = stages;
        for choice in 0..self.tokens * top_k {
            let place = match &self.places {
                Some(places) => places[choice] as usize,
                None => first_of_expert(step.rows(), first_token * top_k + choice, top_k) - first_token * top_k,
            };
            let row = step.rows().place(first_token * top_k + choice);
            let Some((to, from)) = row.zip(Some(place).filter(|place| *place < rows)) else { continue };
            let part = |row: usize, width: usize| -> Range<usize> { row * width..(row + 1) * width };
            let ordered = &self.intermediate[part(from, intermediate)];
            reorder(ordered, &from_order_of_rows, &mut stages.intermediate[part(to, intermediate)]);
            stages.partial[part(to, hidden)].copy_from_slice(&self.partial[part(from, hidden)]);
            if let Some(([of_tokens, of_intermediate], to_stages)) = self.quantized.as_ref().zip(quantized.as_mut()) {
                of_tokens.write_row(from, &mut to_stages.tokens, to);
                of_intermediate.write_row(from, &mut to_stages.intermediate, to);
            }
        }
        let Some(SharedParts { width, intermediate: ordered, partial, quantized: parts }) = &self.shared else {
            return;
        };
        let to = &mut stages.shared_intermediate[first_token * width..][..ordered.len()];
        let from_order = from_order(*width);
        for (ordered, to) in ordered.chunks_exact(*width.max(&1)).zip(to.chunks_exact_mut(*width.max(&1))) {
            reorder(ordered, &from_order, to);
        }
        stages.shared_partial[first_token * hidden..][..partial.len()].copy_from_slice(partial);
        if let Some(([of_tokens, of_intermediate], to)) = parts.as_ref().zip(quantized.as_mut()) {
            let QuantizedStages { shared_tokens, shared_intermediate, .. } = to;
            for token in 0..self.tokens {
                of_tokens.write_row(token, shared_tokens, first_token + token);
                of_intermediate.write_row(token, shared_intermediate, first_token + token);
            }
        }
    }
}

/// The first choice of the same token that has the same expert: where tokens are few, the row of that one is the other one's too.
fn first_of_expert(rows: &Rows, choice: usize, top_k: usize) -> usize {
    let expert = |choice: usize| {
        let row = rows.place(choice)? as u32;
        Some(rows.firsts().partition_point(|first| *first <= row))
    };
    let mut of_token = choice / top_k * top_k..choice;
    of_token.find(|&other| expert(other) == expert(choice)).unwrap_or(choice)
}

/// Reads bytes of the device's memory.
type Read<'r> = dyn FnMut(Address, usize) -> Result<Vec<u8>, Error> + 'r;

impl RowParts {
    /// Writes a row, columns in their natural order, as another one.
    fn write_row(&self, row: usize, to: &mut QuantizedRows, to_row: usize) {
        match self {
            Self::Fp8(parts) => parts.write_row(row, to, to_row),
            Self::Nvfp4(parts) => parts.write_row(row, to, to_row),
        }
    }
}

impl Nvfp4Parts {
    fn read(rows: Nvfp4Rows, lists: PlacedLists, experts: usize, k: usize, read: &mut Read<'_>) -> Result<Self, Error> {
        let numbers = (rows.rows as usize, size_of::<u32>() * (experts + 1));
        let offsets = lists.offsets(1);
        let mut list = |offset| Ok::<_, Error>(bytemuck::pod_collect_to_vec(&read(lists.at + offset, numbers.1)?));
        let (firsts, tile_firsts) = (list(offsets.firsts)?, list(offsets.tile_firsts)?);
        Ok(Self {
            values: read(rows.values, value_bytes(rows.rows, k as u32) as usize)?,
            scales: read(rows.scales, (rows.tiles * token_scale_bytes(k as u32)) as usize)?,
            globals: bytemuck::pod_collect_to_vec(&read(rows.globals, size_of::<f32>() * numbers.0)?),
            firsts,
            tile_firsts,
            k,
        })
    }

    /// As [`RowParts::write_row`]. A row that the lists do not have stays as it was.
    fn write_row(&self, row: usize, to: &mut QuantizedRows, to_row: usize) {
        let Some(expert) = self.firsts.partition_point(|&first| first as usize <= row).checked_sub(1) else { return };
        let two = |list: &[u32]| Some((*list.get(expert)?, *list.get(expert + 1)?));
        let Some(((first, next), (first_tile, next_tile))) = two(&self.firsts).zip(two(&self.tile_firsts)) else {
            return;
        };
        let Some(tiles) = next_tile.checked_sub(first_tile).filter(|tiles| *tiles > 0) else { return };
        let (size, in_expert, k) = (tile_size(next - first, tiles), row as u32 - first, self.k as u32);
        let codes = &mut to.codes[to_row * self.k..][..self.k];
        let values = &self.values[row * row_bytes(k) as usize..][..self.k / 2];
        for (codes, value) in codes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *codes = [value & 0xF, value >> 4];
        }
        let blocks = self.k / BLOCK;
        for (block, to) in (0..).zip(&mut to.block_scales[to_row * blocks..][..blocks]) {
            let place = token_scale(first_tile + in_expert / size, in_expert % size, block, k);
            self.scales.get(place as usize).inspect(|scale| *to = **scale);
        }
        to.scales[to_row] = self.globals[row];
    }
}

impl SortedParts {
    fn read(rows: SortedRows, k: usize, read: &mut Read<'_>) -> Result<Self, Error> {
        let capacity = rows.capacity as usize;
        let codes = read(rows.codes, capacity * (k_blocks(k as u32) * LINE_BYTES) as usize)?;
        let scales = bytemuck::pod_collect_to_vec(&read(rows.scales, size_of::<f32>() * capacity)?);
        Ok(Self { codes, scales, k })
    }

    /// Writes a row, columns in their natural order, as another one.
    fn write_row(&self, row: usize, to: &mut QuantizedRows, to_row: usize) {
        let codes = &mut to.codes[to_row * self.k..][..self.k];
        for (column, place) in code_places(self.scales.len() as u32, row as u32, self.k as u32) {
            codes[column] = self.codes[place];
        }
        to.scales[to_row] = self.scales[row];
    }
}

fn reorder(ordered: &[u16], order: &[usize], to: &mut [u16]) {
    for (&number, &column) in ordered.iter().zip(order) {
        to[column] = number;
    }
}
