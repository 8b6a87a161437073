//! Quantized operands of products in a workspace, brought to the natural order of columns.

use kernels_gpu::lists::tile_size;
use kernels_gpu::nvfp4_rows::{row_bytes, token_scale, token_scale_bytes, value_bytes};
use kernels_gpu::sorted::LINE_BYTES;
use kernels_gpu::units::k_blocks;

use super::tokens::{Nvfp4Rows, SortedRows, Tokens};
use super::workspace::{PlacedLists, Read, RowMemory};
use crate::layer::moe_quantize::code_places;
use nvfp4_core::Error;
use nvfp4_core::format::BLOCK;
use nvfp4_core::quantized::QuantizedRows;

/// Quantized rows as they lie in the workspace.
pub(super) enum RowParts {
    Fp8(SortedParts),
    Nvfp4(Nvfp4Parts),
}

/// Rows in NVFP4.
pub(super) struct Nvfp4Parts {
    values: Vec<u8>,
    scales: Vec<u8>,
    globals: Vec<f32>,
    /// First row of each expert, from the device's lists.
    firsts: Vec<u32>,
    /// First tile of tokens of each expert, from the device's lists.
    tile_firsts: Vec<u32>,
    /// Columns of a row.
    k: usize,
}

/// Rows in e4m3.
pub(super) struct SortedParts {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Columns of a row.
    k: usize,
}

impl RowParts {
    /// Reads the operands of both products, if they are quantized.
    pub fn read(memory: &RowMemory, hidden: usize, read: &mut Read<'_>) -> Result<Option<[Self; 2]>, Error> {
        let widths = [hidden, memory.width as usize];
        Ok(Some(match memory.tokens {
            Tokens::Bits16 { .. } | Tokens::Bits16Sorted { .. } => return Ok(None),
            Tokens::Fp8([first, second]) => [
                Self::Fp8(SortedParts::read(first, widths[0], read)?),
                Self::Fp8(SortedParts::read(second, widths[1], read)?),
            ],
            Tokens::Nvfp4([first, second]) => [
                Self::Nvfp4(Nvfp4Parts::read(first, memory.lists, widths[0], read)?),
                Self::Nvfp4(Nvfp4Parts::read(second, memory.lists, widths[1], read)?),
            ],
        }))
    }

    /// Writes row `row` to row `to_row` of `to`, with columns in their natural order.
    pub fn write_row(&self, row: usize, to: &mut QuantizedRows, to_row: usize) {
        match self {
            Self::Fp8(parts) => parts.write_row(row, to, to_row),
            Self::Nvfp4(parts) => parts.write_row(row, to, to_row),
        }
    }
}

impl Nvfp4Parts {
    fn read(rows: Nvfp4Rows, lists: PlacedLists, k: usize, read: &mut Read<'_>) -> Result<Self, Error> {
        let list_bytes = size_of::<u32>() * (lists.experts as usize + 1);
        let offsets = lists.offsets(1);
        let mut list = |offset| Ok::<_, Error>(bytemuck::pod_collect_to_vec(&read(lists.at + offset, list_bytes)?));
        let (firsts, tile_firsts) = (list(offsets.firsts)?, list(offsets.tile_firsts)?);
        Ok(Self {
            values: read(rows.values, value_bytes(rows.rows, k as u32) as usize)?,
            scales: read(rows.scales, (rows.tiles * token_scale_bytes(k as u32)) as usize)?,
            globals: bytemuck::pod_collect_to_vec(&read(rows.globals, size_of::<f32>() * rows.rows as usize)?),
            firsts,
            tile_firsts,
            k,
        })
    }

    /// Does the same as [`RowParts::write_row`]. A row outside the lists stays unchanged.
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

    /// Does the same as [`RowParts::write_row`].
    fn write_row(&self, row: usize, to: &mut QuantizedRows, to_row: usize) {
        let codes = &mut to.codes[to_row * self.k..][..self.k];
        for (column, place) in code_places(self.scales.len() as u32, row as u32, self.k as u32) {
            codes[column] = self.codes[place];
        }
        to.scales[to_row] = self.scales[row];
    }
}
