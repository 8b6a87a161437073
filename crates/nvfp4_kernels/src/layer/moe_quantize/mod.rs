//! Quantization of an MoE layer's tokens to e4m3 rows with one scale each, sorted by expert,
//! `kernels-gpu/src/layer/moe_quantize/`.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::layer::moe_quantize::abi::{ENTRIES, Quantize};
use kernels_gpu::sorted::{CHUNK_BYTES, chunk, line};
use kernels_gpu::units::{
    ROW_LANES, WORD_ELEMENTS, block_columns, block_start, e4m3_position, element, k_blocks, lane_words,
};

use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, entry_of};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// The kernel.
pub struct MoeQuantize;

impl Kernel for MoeQuantize {
    fn name(&self) -> &'static str {
        "moe_quantize"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |name| Entry { name, op: None, threads: Quantize::THREADS, shared_bytes: 0 };
        ENTRIES.into_iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeQuantize {
    /// Returns the launch that quantizes tokens of type `dtype`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch(&self, quantize: Quantize, dtype: TokenDtype) -> Result<Launch, Error> {
        let entry = entry_of(ENTRIES, dtype);
        let blocks = Grid::blocks(quantize.blocks())?;
        let grid = Grid { overlaps: true, ..Grid::linear(entry, blocks, Quantize::THREADS) };
        Ok(Launch::of_parameter(self.name(), grid, quantize))
    }
}

/// Returns each column of row `row` with the offset of its code, in bytes from the first code of `capacity` rows.
pub(crate) fn code_places(capacity: u32, row: u32, k: u32) -> impl Iterator<Item = (usize, usize)> {
    let words = (0..k_blocks(k)).flat_map(move |k_block| {
        let words = lane_words(block_columns(k, k_block));
        (0..ROW_LANES).flat_map(move |lane| (0..words).map(move |word| (k_block, lane, word)))
    });
    let nibbles = words.flat_map(|of| (0..WORD_ELEMENTS).map(move |nibble| (of, nibble)));
    nibbles.filter_map(move |((k_block, lane, word), nibble)| {
        let column = block_start(k, k_block) + element(block_columns(k, k_block), lane, word, nibble)?;
        let position = e4m3_position(lane, word, nibble);
        let in_line = chunk(row, position / CHUNK_BYTES) + position % CHUNK_BYTES;
        Some((column as usize, line(capacity, k_block, row) as usize + in_line as usize))
    })
}
