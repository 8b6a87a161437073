//! Layout of the kernels' operands: weights in panels, packed once, and tokens as integers or f32, converted in every
//! step. The tokens of a product are ordered by chunk of K and, within a chunk, by row, so data that is used together
//! is contiguous.
//!
//! K is reordered within a block of 16, so that weights need no shuffle: a byte of a packed matrix holds two
//! neighboring elements, so unpacking four bytes gives the four even elements of eight, then the four odd ones. NVFP4
//! tokens are stored in this order.

use std::cell::RefCell;

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use rayon::prelude::*;

use super::pages::Pages;
use crate::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};
use crate::moe::oracle::WINDOW;
use crate::problem::TokenDtype;

/// Rows of weights in a panel: 16 rows of gate and the same 16 rows of up, or 32 rows of the only projection.
pub(super) const PANEL_ROWS: usize = 32;

/// Number of quads (four elements of K) in a block. The byte dot product instructions multiply one quad at a time.
pub(super) const QUADS: usize = BLOCK / 4;

/// A kind of tokens, and the type that weights are decoded to for it.
pub(super) trait Tokens: Sized + 'static {
    /// A block of 16 elements of a token.
    type Block16: Copy + Send + Sync + 'static;
    /// A decoded block of 16 elements of K, for all rows of a panel.
    type Block: Copy + 'static;
    /// Blocks of K per chunk. The decoded weights of a panel's chunk stay in the L1 cache of a core.
    const CHUNK_BLOCKS: usize;
    /// Number of blocks per sum that starts from zero. Divides `CHUNK_BLOCKS`.
    const SUM_BLOCKS: usize;
    /// A block of weights that are all zero.
    const ZERO_BLOCK: Self::Block;
    /// A block of a token that is all zeros.
    const ZERO: Self::Block16;

    /// `true` if all instructions that can compute this kind of tokens give the same sums of these numbers.
    fn are_ordinary(_numbers: &[Self::Block16]) -> bool {
        true
    }

    /// Calls `run` with the working memory of this thread.
    fn with_scratch(run: impl FnOnce(&mut Scratch<Self>));

    /// Number of blocks that the `m` tokens of a product take, in whole chunks of K.
    fn len(m: usize, k: usize) -> usize {
        m * k.div_ceil(BLOCK * Self::CHUNK_BLOCKS) * Self::CHUNK_BLOCKS
    }
}

/// Maximum number of tokens per tile.
pub(super) const TILE_TOKENS: usize = 256;

/// Maximum number of panels per tile. Each panel reads a chunk of the tile's tokens from the L2 cache once.
pub(super) const TILE_PANELS: usize = 4;

/// Sums of one panel for the tokens of a tile.
pub(super) type PanelSums = [[f32; PANEL_ROWS]; TILE_TOKENS];

/// Working memory of a thread.
pub(super) struct Scratch<T: Tokens> {
    pub panel: Vec<T::Block>,
    pub sums: Box<[PanelSums]>,
}

impl<T: Tokens> Scratch<T> {
    pub fn new() -> Self {
        Self {
            panel: vec![T::ZERO_BLOCK; T::CHUNK_BLOCKS],
            sums: vec![[[0.0; PANEL_ROWS]; TILE_TOKENS]; TILE_PANELS].into(),
        }
    }
}

/// NVFP4 tokens. Weights become integers, and their scales become f32. A chunk is 20 KiB.
pub(super) enum Nvfp4 {}

impl Tokens for Nvfp4 {
    type Block16 = TokenBlock;
    type Block = Integers;
    const CHUNK_BLOCKS: usize = 32;
    const SUM_BLOCKS: usize = Self::CHUNK_BLOCKS;
    const ZERO_BLOCK: Integers = Integers { quads: [[[0; 4]; PANEL_ROWS]; QUADS], scales: [0.0; PANEL_ROWS] };
    const ZERO: TokenBlock = TokenBlock { quads: [0; QUADS], bias: 0, scale: 0.0 };

    fn with_scratch(run: impl FnOnce(&mut Scratch<Self>)) {
        thread_local!(static SCRATCH: RefCell<Scratch<Nvfp4>> = RefCell::new(Scratch::new()));
        SCRATCH.with_borrow_mut(run);
    }
}

/// 16-bit tokens.
pub(super) trait Tokens16: Tokens {
    /// Writes the columns of a token that belong to one chunk. Blocks after the last column are either zeroed or never
    /// read.
    fn unpack(dtype: TokenDtype, columns: &[u16], out: &mut [Self::Block16]);
}

/// Tokens in f16 or bf16. Tokens and weights become f32. A chunk is 16 KiB and has as many columns as a window of
/// [`crate::moe::oracle`].
pub(super) enum Bits16 {}

impl Tokens for Bits16 {
    type Block16 = [f32; BLOCK];
    type Block = Numbers;
    const CHUNK_BLOCKS: usize = WINDOW / BLOCK;
    const SUM_BLOCKS: usize = SUM_COLUMNS / BLOCK;
    const ZERO_BLOCK: Numbers = Numbers([[0.0; PANEL_ROWS]; BLOCK]);
    const ZERO: [f32; BLOCK] = [0.0; BLOCK];

    fn with_scratch(run: impl FnOnce(&mut Scratch<Self>)) {
        thread_local!(static SCRATCH: RefCell<Scratch<Bits16>> = RefCell::new(Scratch::new()));
        SCRATCH.with_borrow_mut(run);
    }
}

impl Tokens16 for Bits16 {
    fn unpack(dtype: TokenDtype, columns: &[u16], out: &mut [[f32; BLOCK]]) {
        convert(dtype, columns, &mut out.as_flattened_mut()[..columns.len()]);
    }
}

/// bf16 tokens for instructions that multiply bf16. Weights become bf16 too, which holds them exactly.
pub(super) trait TokensBf16: Tokens<Block16 = TokenPairs, Block = Pairs> {
    /// Pairs of columns, of eight columns. The order within a pair is the order in memory.
    const PAIRS: [[usize; 2]; 4];
}

/// A block of 16 elements of a token in bf16, in pairs.
pub(super) type TokenPairs = [[u16; 2]; BLOCK / 2];

impl<T: TokensBf16> Tokens16 for T {
    fn unpack(_dtype: TokenDtype, columns: &[u16], out: &mut [TokenPairs]) {
        let (numbers, zeros) = out.as_flattened_mut().split_at_mut(columns.len() / 2);
        for (columns, pairs) in columns.as_chunks::<8>().0.iter().zip(numbers.as_chunks_mut().0) {
            *pairs = T::PAIRS.map(|pair| pair.map(|column| columns[column]));
        }
        zeros.fill([0; 2]);
    }
}

/// Pairs for AMX: an even column and the odd column after it. A chunk is 32 KiB.
pub(super) enum Bf16 {}

impl TokensBf16 for Bf16 {
    const PAIRS: [[usize; 2]; 4] = [[0, 1], [2, 3], [4, 5], [6, 7]];
}

impl Tokens for Bf16 {
    type Block16 = TokenPairs;
    type Block = Pairs;
    const CHUNK_BLOCKS: usize = 512 / BLOCK;
    const SUM_BLOCKS: usize = SUM_COLUMNS / BLOCK;
    const ZERO_BLOCK: Pairs = Pairs([[[0; 2]; PANEL_ROWS]; BLOCK / 2]);
    const ZERO: TokenPairs = [[0; 2]; BLOCK / 2];

    fn are_ordinary(numbers: &[TokenPairs]) -> bool {
        are_ordinary(numbers)
    }

    fn with_scratch(run: impl FnOnce(&mut Scratch<Self>)) {
        thread_local!(static SCRATCH: RefCell<Scratch<Bf16>> = RefCell::new(Scratch::new()));
        SCRATCH.with_borrow_mut(run);
    }
}

/// Pairs for AVX-512 BF16: two even columns, or two odd columns. The instruction adds both products of a pair to one
/// sum, the second product first. A chunk is 16 KiB.
pub(super) enum Bf16ByParity {}

impl TokensBf16 for Bf16ByParity {
    const PAIRS: [[usize; 2]; 4] = [[2, 0], [3, 1], [6, 4], [7, 5]];
}

impl Tokens for Bf16ByParity {
    type Block16 = TokenPairs;
    type Block = Pairs;
    const CHUNK_BLOCKS: usize = 256 / BLOCK;
    const SUM_BLOCKS: usize = SUM_COLUMNS / BLOCK;
    const ZERO_BLOCK: Pairs = Bf16::ZERO_BLOCK;
    const ZERO: TokenPairs = Bf16::ZERO;

    fn are_ordinary(numbers: &[TokenPairs]) -> bool {
        are_ordinary(numbers)
    }

    fn with_scratch(run: impl FnOnce(&mut Scratch<Self>)) {
        thread_local!(static SCRATCH: RefCell<Scratch<Bf16ByParity>> = RefCell::new(Scratch::new()));
        SCRATCH.with_borrow_mut(run);
    }
}

/// Instructions that multiply bf16 read subnormal numbers as zero and flush subnormal sums to zero. Neither happens if
/// every number is 0 or at least 2⁻¹⁰⁹: weights are multiples of 2⁻¹⁰, so products are multiples of 2⁻¹²⁶. Infinities
/// and NaN are not ordinary either.
fn are_ordinary(numbers: &[TokenPairs]) -> bool {
    const EXPONENTS: u16 = 0x7F80;
    const LEAST: u16 = (127 - 109) << 7;
    let is_ordinary = |&number: &u16| number & 0x7FFF == 0 || (LEAST..EXPONENTS).contains(&(number & 0x7FFF));
    // No early exit, so that the compiler can use vectors.
    numbers.as_flattened().as_flattened().iter().fold(true, |all, number| all & is_ordinary(number))
}

/// Columns per sum that starts from zero, with 16-bit tokens. The even and the odd columns have one sum each.
const SUM_COLUMNS: usize = 32;

/// A block of a panel as integers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Integers {
    /// Weights in the order that the dot product instruction expects: four bytes of a row, then four of the next row.
    /// `smmla` expects eight bytes of a row, then eight of the next. The weights have [`WEIGHT_BIAS`] added if the
    /// instruction needs an unsigned operand.
    pub quads: [[[u8; 4]; PANEL_ROWS]; QUADS],
    pub scales: [f32; PANEL_ROWS],
}

/// A block of a panel as f32 numbers with the block scale applied: one column of all rows, then the next column.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Numbers(pub [[f32; PANEL_ROWS]; BLOCK]);

/// A block of a panel as bf16: one pair of columns of all rows, then the next pair, in the order of
/// [`TokensBf16::PAIRS`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Pairs(pub [[[u16; 2]; PANEL_ROWS]; BLOCK / 2]);

/// Added to the doubled value of a weight to make it unsigned, since x86 dot product instructions take one unsigned
/// operand.
pub(super) const WEIGHT_BIAS: i32 = 12;

/// Biased weight of each value code, for byte shuffles.
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) const BIASED: [u8; 16] = {
    let mut biased = [0; 16];
    let mut code = 0;
    while code < 16 {
        biased[code] = (e2m1::DOUBLED[code] as i32 + WEIGHT_BIAS) as u8;
        code += 1;
    }
    biased
};

/// A block of 16 elements of K for the rows of a panel, packed as in the matrix. The first half of the block comes
/// first: four bytes of a row, then four bytes of the next row. The second half follows in the same order.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct PackedBlock(pub [[[u8; 4]; PANEL_ROWS]; 2]);

/// Scales of a block of 16 elements of K for the rows of a panel.
pub(super) type PackedScales = [u8; PANEL_ROWS];

/// The weights of an expert: panel after panel, each with all blocks of K.
pub(super) struct Panels {
    pub n: usize,
    pub k: usize,
    /// Output features per panel: 16 if gated, 32 if plain.
    pub features: usize,
    values: Pages<PackedBlock>,
    scales: Pages<PackedScales>,
}

impl Panels {
    /// Packs one matrix `[N, K]`, or gate and up, which have the same sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if memory for the panels cannot be allocated.
    pub fn new(projections: &[&Matrix<'_>]) -> Result<Self, Error> {
        let (n, k) = (projections[0].rows(), projections[0].k());
        let features = PANEL_ROWS / projections.len();
        let blocks = k / BLOCK;
        // Rows from N on are zeros. Their sums are computed and dropped.
        let row = |panel: usize, lane: usize| {
            let row = panel * features + lane % features;
            (row < n).then_some((projections[lane / features], row))
        };
        let places = || (0..n.div_ceil(features) * blocks).into_par_iter().with_min_len(blocks);
        let values = places().map(|at| {
            let mut packed = PackedBlock([[[0; 4]; PANEL_ROWS]; 2]);
            for lane in 0..PANEL_ROWS {
                if let Some((matrix, row)) = row(at / blocks, lane) {
                    let halves = matrix.row_values(row)[at % blocks * (BLOCK / 2)..].as_chunks::<4>().0;
                    packed.0[0][lane] = halves[0];
                    packed.0[1][lane] = halves[1];
                }
            }
            packed
        });
        let scales = places().map(|at| {
            std::array::from_fn(|lane| {
                row(at / blocks, lane).map_or(0, |(matrix, row)| matrix.row_scales(row)[at % blocks])
            })
        });
        Ok(Self { n, k, features, values: Pages::collect(values)?, scales: Pages::collect(scales)? })
    }

    /// Number of panels.
    pub fn len(&self) -> usize {
        self.n.div_ceil(self.features)
    }

    /// Returns blocks `first..first + count` of K of a panel, up to the end of K, and their scales.
    pub fn blocks(&self, panel: usize, first: usize, count: usize) -> (&[PackedBlock], &[PackedScales]) {
        let blocks = self.k / BLOCK;
        let range = panel * blocks + first..panel * blocks + blocks.min(first + count);
        (&self.values[range.clone()], &self.scales[range])
    }
}

/// A block of 16 elements of a token in NVFP4.
#[derive(Clone, Copy)]
pub(super) struct TokenBlock {
    /// Doubled values, four signed bytes per element.
    pub quads: [i32; QUADS],
    /// Corrects the dot product for [`WEIGHT_BIAS`]: −12 · the sum of the doubled values.
    pub bias: i32,
    pub scale: f32,
}

impl TokenBlock {
    pub fn new(values: [u8; BLOCK / 2], scale: u8) -> Self {
        let quad = |quad: usize| {
            let shift = quad % 2 * 4;
            std::array::from_fn(|i| e2m1::DOUBLED[usize::from(values[quad / 2 * 4 + i] >> shift & 0xF)])
        };
        let quads: [[i8; 4]; QUADS] = std::array::from_fn(quad);
        let sum: i32 = quads.iter().flatten().map(|&value| i32::from(value)).sum();
        Self {
            quads: quads.map(|quad| i32::from_le_bytes(quad.map(|value| value as u8))),
            bias: -WEIGHT_BIAS * sum,
            scale: e4m3::VALUES[usize::from(scale)],
        }
    }
}

/// Writes one chunk of K of a row of NVFP4 tokens. If K ends inside the chunk, the rest of `out` is not written, and
/// the kernel does not read it.
pub(super) fn unpack_nvfp4(matrix: &Matrix<'_>, row: usize, chunk: usize, out: &mut [TokenBlock]) {
    let start = chunk * Nvfp4::CHUNK_BLOCKS;
    let values = matrix.row_values(row).as_chunks().0[start..].iter();
    for ((out, values), &scale) in out.iter_mut().zip(values).zip(&matrix.row_scales(row)[start..]) {
        *out = TokenBlock::new(*values, scale);
    }
}

/// Returns the columns of a token that belong to a chunk of K.
pub(super) fn columns_of_chunk<T: Tokens>(token: &[u16], chunk: usize) -> &[u16] {
    let columns = T::CHUNK_BLOCKS * BLOCK;
    &token[chunk * columns..token.len().min((chunk + 1) * columns)]
}

/// Converts f16 or bf16 to f32.
pub(super) fn convert(dtype: TokenDtype, bits: &[u16], numbers: &mut [f32]) {
    match dtype {
        TokenDtype::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(numbers),
        // bf16 is the upper half of an f32. `half` converts bf16 one by one, because of signaling NaN.
        TokenDtype::Bf16 => {
            numbers.iter_mut().zip(bits).for_each(|(number, &bits)| *number = f32::from_bits(u32::from(bits) << 16));
        }
    }
}
