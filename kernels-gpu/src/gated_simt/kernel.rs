//! How the portable kernel works.
//!
//! e2m1 is doubled to a signed byte on the way from global to shared memory, so that `dp4a` multiplies four at
//! a time. The two scales of a block are applied by two fused multiply-adds, of which the first also takes
//! the integer out of a biased float (`BIAS`).

// Indices, not iterators: a loop over indices unrolls, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::hint::assert_unchecked;

use cuda_std::{
    float::fma_rn_f32,
    global::{ld_global_nc_b32_or_zero, ld_global_nc_b64_or_zero, st_global_b16, st_global_b64},
    integer::{dp4a_s32_s32, prmt_b32},
    kernel,
    shared::{dynamic_shared_address, ld_shared_f32, ld_shared_v4_b32, st_shared_f32, st_shared_v4_b32},
    thread,
};

use crate::{
    epilogue::{convert, silu},
    format::{BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, scale_word_offset},
    gated_simt::abi::{Group, INSTANCES, Index, Instance, Launch, Panel, Tile, instances},
    schedule::last_begun,
};

const THREADS: u32 = Instance::THREADS;

/// Blocks a multiprocessor should hold at once: bounds the registers of a thread at 128.
const MIN_BLOCKS: u32 = 2;

/// Bytes of packed values in a block of K, and their type.
const PACKED_BLOCK: u32 = BLOCK / 2;

/// 1.5·2²³: between 2²³ and 2²⁴ a float's last bit is 1, so an integer added to the bits is added to the value.
const BIAS: f32 = 12_582_912.0;

// The largest sum of a block, 16 products of two doubled 6s, leaves the biased float between 2²³ and 2²⁴.
const _: () = assert!(BLOCK * 12 * 12 < 1 << 22);

/// Most blocks of one operand that a thread copies a step.
const MAX_UNITS: usize = 2;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = Instance::THREADS, min_blocks = MIN_BLOCKS)]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            const TILE: Tile = INSTANCES[INDEX].tile;
            type Kernel = Simt<
                INDEX,
                { INSTANCES[INDEX].matrices as usize },
                { TILE.tokens_per_thread as usize },
                { TILE.columns_per_thread as usize },
            >;
            // SAFETY: the contract is this function's too.
            unsafe { Kernel::run(launch) }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`], from which the other parameters follow: matrices of weights, and the TOKENS × COLUMNS
/// neighbouring elements of C that a thread computes.
struct Simt<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>;

/// One thread's sums, by matrix, token and column.
type Sums<const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize> = [[[f32; COLUMNS]; TOKENS]; MATRICES];

impl<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>
    Simt<INDEX, MATRICES, TOKENS, COLUMNS>
{
    const INSTANCE: Instance = INSTANCES[INDEX];
    const TILE: Tile = Self::INSTANCE.tile;

    // Shared memory: two stages × (panel of A, panel of gate, panel of up); a panel is laid out by `Panel`.
    const A: Panel = Self::TILE.a_panel();
    const B: Panel = Self::TILE.b_panel();
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const fn b_offset(matrix: usize) -> u32 {
        Self::A.bytes() + matrix as u32 * Self::B.bytes()
    }

    /// Threads side by side along the tile's columns.
    const THREAD_COLUMNS: u32 = Self::TILE.columns / COLUMNS as u32;

    const CHECK: () = {
        assert!(MATRICES == Self::INSTANCE.matrices as usize);
        assert!(TOKENS == Self::TILE.tokens_per_thread as usize && COLUMNS == Self::TILE.columns_per_thread as usize);
        assert!(Self::A.units() <= MAX_UNITS && Self::B.units() <= MAX_UNITS);
    };

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let tile = thread::block_idx_x();
        // SAFETY: the grid has no more blocks than the groups have tiles.
        let group = unsafe { find_group(launch, tile) };
        // SAFETY: a group that has tiles has rows.
        unsafe { assert_unchecked(group.m > 0) };
        // Blocks that share a panel of weights are neighbours, so that it is read from memory once.
        let token_tiles = group.m.div_ceil(Self::TILE.tokens);
        let tile = tile - group.first_tile;
        let first_token = tile % token_tiles * Self::TILE.tokens;
        let first_column = tile / token_tiles * Self::TILE.columns;

        let thread = thread::thread_idx_x();
        let row = thread / Self::THREAD_COLUMNS * TOKENS as u32;
        let column = thread % Self::THREAD_COLUMNS * COLUMNS as u32;
        // N is a multiple of 8, so a thread's columns are all inside or all outside.
        let inside = first_token + row < group.m && first_column + column < group.n;
        let mut sums = [[[0.0; COLUMNS]; TOKENS]; MATRICES];

        let mut a = Operand::new(group.a, group.a_scales, first_token, group.m, group.k, Self::A);
        let mut b: [Operand; MATRICES] = core::array::from_fn(|matrix| {
            Operand::new(group.b[matrix], group.b_scales[matrix], first_column, group.n, group.k, Self::B)
        });
        let mut stage = dynamic_shared_address();
        let mut next_stage = stage + Self::STAGE_BYTES;
        // SAFETY: addresses as the contract has them; a stage is written only while nobody reads it, since
        // every thread has passed the barrier after reading it.
        unsafe {
            let mut fetch = |blocks| (a.fetch(Self::A, blocks), b.each_mut().map(|b| b.fetch(Self::B, blocks)));
            let store = |stage, (a, b): (Step, [Step; MATRICES])| {
                a.store(stage, Self::A);
                for matrix in 0..MATRICES {
                    b[matrix].store(stage + Self::b_offset(matrix), Self::B);
                }
            };
            let mut blocks = (group.k / BLOCK) as i32;
            store(stage, fetch(blocks));
            thread::sync_threads();
            while blocks > 0 {
                blocks -= SCALE_TILE_COLUMNS as i32;
                // One step past the end fetches nothing: zeros.
                let next = fetch(blocks);
                if inside {
                    Self::multiply(stage, row, column, &mut sums);
                }
                store(next_stage, next);
                thread::sync_threads();
                (stage, next_stage) = (next_stage, stage);
            }
            if inside {
                Self::epilogue(group, launch.output, first_token + row, first_column + column, &sums);
            }
        }
    }
}

/// The group that a tile belongs to: the last whose first tile is not behind it. Groups without rows have no
/// tiles and are passed over.
///
/// # Safety
/// `launch` is as its fields say; the groups have more tiles than `tile`.
#[inline(always)]
unsafe fn find_group<'a>(launch: Launch, tile: u32) -> &'a Group {
    let groups = launch.groups as *const Group;
    // SAFETY: indices below group_count.
    unsafe {
        &*groups.add(last_begun(launch.group_count, tile, |index| (*groups.add(index as usize)).first_tile) as usize)
    }
}

// Global memory → registers.

/// What one thread copies of one operand, and how far it has come.
///
/// A step is 4 blocks of each row of a panel. The threads take the blocks in order, the 4 of a row first, so
/// that a row's 32 bytes are one memory access; thread r also takes the 4 scales of row r.
struct Operand {
    /// Address of this thread's first block.
    values: u64,
    /// Bytes from it to the next one of the same step.
    unit_stride: u64,
    /// Address of this thread's four scales.
    scales: u64,
    /// Whether each block's row is inside of the matrix and the panel.
    units_inside: [bool; MAX_UNITS],
    /// Whether the scales' row is.
    scales_inside: bool,
}

/// One thread's part of one step, on its way from global to shared memory.
#[derive(Clone, Copy)]
struct Step {
    values: [u64; MAX_UNITS],
    scales: u32,
    /// Blocks of each row that are inside of K.
    blocks: i32,
}

impl Panel {
    /// Blocks that a thread copies a step.
    const fn units(self) -> usize {
        (self.rows * SCALE_TILE_COLUMNS).div_ceil(THREADS) as usize
    }

    /// The row and block column in the panel of a thread's `unit`-th block.
    #[inline(always)]
    const fn unit(self, thread: u32, unit: usize) -> (u32, u32) {
        let index = thread + unit as u32 * THREADS;
        (index / SCALE_TILE_COLUMNS, index % SCALE_TILE_COLUMNS)
    }
}

impl Operand {
    /// Rows `first..` of a matrix of `rows` rows.
    #[inline(always)]
    fn new(values: u64, scales: u64, first: u32, rows: u32, k: u32, panel: Panel) -> Self {
        let thread = thread::thread_idx_x();
        let blocks = k / BLOCK;
        let row_bytes = u64::from(blocks * PACKED_BLOCK);
        let inside = |row| row < panel.rows && first + row < rows;
        let (row, column) = panel.unit(thread, 0);
        Self {
            values: values + u64::from(first + row) * row_bytes + u64::from(column * PACKED_BLOCK),
            unit_stride: u64::from(THREADS / SCALE_TILE_COLUMNS) * row_bytes,
            scales: scales + scale_word_offset(first + thread, 0, blocks.div_ceil(SCALE_TILE_COLUMNS)),
            units_inside: core::array::from_fn(|unit| inside(panel.unit(thread, unit).0)),
            scales_inside: inside(thread),
        }
    }

    /// Loads a step, of which `blocks` blocks of each row are inside of K, and moves on. What is outside is 0.
    #[inline(always)]
    unsafe fn fetch(&mut self, panel: Panel, blocks: i32) -> Step {
        let column = panel.unit(thread::thread_idx_x(), 0).1;
        let mut values = [0; MAX_UNITS];
        for unit in 0..panel.units() {
            let inside = self.units_inside[unit] && (column as i32) < blocks;
            // SAFETY: inside of the matrix, or not loaded.
            values[unit] = unsafe { ld_global_nc_b64_or_zero(inside, self.values + unit as u64 * self.unit_stride) };
        }
        // SAFETY: inside of the scales, which are padded to whole words, or not loaded.
        let scales = unsafe { ld_global_nc_b32_or_zero(self.scales_inside && blocks > 0, self.scales) };
        self.values += u64::from(SCALE_TILE_COLUMNS * PACKED_BLOCK);
        self.scales += u64::from(SCALE_TILE_ROWS * SCALE_TILE_COLUMNS);
        Step { values, scales, blocks }
    }
}

// Registers → shared memory.

impl Step {
    /// Decodes into a panel of shared memory.
    #[inline(always)]
    unsafe fn store(self, address: u32, panel: Panel) {
        let thread = thread::thread_idx_x();
        for unit in 0..panel.units() {
            let (row, column) = panel.unit(thread, unit);
            if row < panel.rows {
                // SAFETY: inside of the panel, a block that is this thread's.
                unsafe { st_shared_v4_b32(address + panel.block_offset(row, column), decode_block(self.values[unit])) };
            }
        }
        if thread < panel.rows {
            // Here and not in `fetch`: it waits for the load.
            let scales = decode_scales(self.scales & scale_mask(self.blocks));
            for column in 0..SCALE_TILE_COLUMNS {
                // SAFETY: inside of the panel, a scale that is this thread's.
                unsafe { st_shared_f32(address + panel.scale_offset(thread, column), scales[column as usize]) };
            }
        }
    }
}

/// Keeps the first `blocks` scales of a word, all from 4 on. What follows them in the padding may be NaN in
/// e4m3, and NaN times the zeros that follow the values would be NaN.
#[inline(always)]
fn scale_mask(blocks: i32) -> u32 {
    !u32::MAX.unbounded_shl(8 * blocks.max(0) as u32)
}

/// 16 e2m1 codes to 16 signed bytes of twice their values, in the order of K.
#[inline(always)]
fn decode_block(codes: u64) -> [u32; 4] {
    let [a, b] = decode_word(codes as u32);
    let [c, d] = decode_word((codes >> 32) as u32);
    [a, b, c, d]
}

/// 8 e2m1 codes to 8 signed bytes of twice their values.
#[inline(always)]
fn decode_word(codes: u32) -> [u32; 2] {
    // Twice the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, and those negated: `prmt` looks them up by three bits.
    const POSITIVE: [u32; 2] = [0x0302_0100, 0x0c08_0604];
    const NEGATIVE: [u32; 2] = [0xfdfe_ff00, 0xf4f8_fafc];
    let look_up = |table: [u32; 2], codes| prmt_b32(table[0], table[1], codes);
    let select = |signs: u32, codes| (look_up(NEGATIVE, codes) & signs) | (look_up(POSITIVE, codes) & !signs);

    // A byte of 0xff for a negative code: odd codes have their sign on top of a byte, even ones after a shift.
    // `prmt` with 8 added to a byte's number spreads its sign.
    let even = codes << 4;
    let (low_signs, high_signs) = (prmt_b32(even, codes, 0xd9c8), prmt_b32(even, codes, 0xfbea));
    let magnitudes = codes & 0x7777_7777;
    [select(low_signs, magnitudes), select(high_signs, magnitudes >> 16)]
}

/// Four e4m3 scales to f32, halved: values are doubled, in A and in B.
#[inline(always)]
fn decode_scales(scales: u32) -> [f32; 4] {
    // Exponent and mantissa in their places in an f32, whose exponent has a bias of 127 and not of 7; subnormals
    // are subnormal there too, and the product is exact.
    const HALF_OF_BIAS_CHANGE: f32 = f32::from_bits((127 + 127 - 7 - 1) << 23);
    scales.to_le_bytes().map(|scale| f32::from_bits(u32::from(scale) << 20) * HALF_OF_BIAS_CHANGE)
}

// Shared memory → sums.

impl<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>
    Simt<INDEX, MATRICES, TOKENS, COLUMNS>
{
    /// Adds a stage's products to the sums of the elements from `row` and `column` of the tile on.
    #[inline(always)]
    unsafe fn multiply(stage: u32, row: u32, column: u32, sums: &mut Sums<MATRICES, TOKENS, COLUMNS>) {
        for block in 0..SCALE_TILE_COLUMNS {
            // SAFETY: inside of the stage, which nobody writes now.
            unsafe {
                let a: [[u32; 4]; TOKENS] =
                    core::array::from_fn(|i| ld_shared_v4_b32(stage + Self::A.block_offset(row + i as u32, block)));
                let a_scales: [f32; TOKENS] = load_scales(stage + Self::A.scale_offset(row, block));
                let unbias = a_scales.map(|scale| -BIAS * scale);
                for matrix in 0..MATRICES {
                    let panel = stage + Self::b_offset(matrix);
                    let b_scales: [f32; COLUMNS] = load_scales(panel + Self::B.scale_offset(column, block));
                    for j in 0..COLUMNS {
                        let b = ld_shared_v4_b32(
                            panel + Self::B.block_offset(column, block) + j as u32 * Self::B.plane_rows() * BLOCK,
                        );
                        for i in 0..TOKENS {
                            // Exact: the integer has 12 bits, a scale 4.
                            let scaled = fma_rn_f32(biased_dot(a[i], b), a_scales[i], unbias[i]);
                            sums[matrix][i][j] = fma_rn_f32(scaled, b_scales[j], sums[matrix][i][j]);
                        }
                    }
                }
            }
        }
    }
}

/// N neighbouring scales of shared memory.
#[inline(always)]
unsafe fn load_scales<const N: usize>(address: u32) -> [f32; N] {
    // SAFETY: the caller's promise; four scales of a thread start at a multiple of four.
    unsafe {
        if N == 4 {
            let scales = ld_shared_v4_b32(address);
            core::array::from_fn(|index| f32::from_bits(scales[index]))
        } else {
            core::array::from_fn(|index| ld_shared_f32(address + 4 * index as u32))
        }
    }
}

/// The dot product of 16 signed bytes, plus [`BIAS`], as a float.
#[inline(always)]
fn biased_dot(a: [u32; 4], b: [u32; 4]) -> f32 {
    let mut sum = BIAS.to_bits() as i32;
    for word in 0..4 {
        sum = dp4a_s32_s32(a[word], b[word], sum);
    }
    f32::from_bits(sum as u32)
}

// Sums → C.

impl<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>
    Simt<INDEX, MATRICES, TOKENS, COLUMNS>
{
    /// Scales, activates and writes one thread's elements of C.
    #[inline(always)]
    unsafe fn epilogue(group: &Group, output: u32, token: u32, column: u32, sums: &Sums<MATRICES, TOKENS, COLUMNS>) {
        let Group { c, alpha, m, n, .. } = *group;
        for i in 0..TOKENS {
            let token = token + i as u32;
            let values: [f32; COLUMNS] = core::array::from_fn(|j| {
                let gate = alpha[0] * sums[0][i][j];
                if MATRICES == 2 { silu(gate) * (alpha[1] * sums[MATRICES - 1][i][j]) } else { gate }
            });
            if token < m {
                let element = u64::from(token) * u64::from(n) + u64::from(column);
                // SAFETY: an element of C that is this thread's alone, aligned since N and the column are
                // multiples of as many elements as are stored.
                unsafe { store_output(c + 2 * element, output, values) }
            }
        }
    }
}

/// Converts and stores N neighbouring elements of C.
#[inline(always)]
unsafe fn store_output<const N: usize>(address: u64, output: u32, values: [f32; N]) {
    const { assert!(N == 1 || N == 4) };
    // SAFETY: the caller's promise.
    unsafe {
        if N == 4 {
            let low = convert(output, values[0], values[1 % N]);
            let high = convert(output, values[2 % N], values[3 % N]);
            st_global_b64(address, u64::from(high) << 32 | u64::from(low));
        } else {
            st_global_b16(address, convert(output, values[0], 0.0) as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    fn e2m1(code: u32) -> f32 {
        let magnitude = E2M1[(code & 7) as usize];
        if code & 8 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_code_decodes_to_twice_its_value_in_every_place() {
        for code in 0..16_u32 {
            for place in 0..16 {
                for around in 0..16_u64 {
                    let codes = around * 0x1111_1111_1111_1111;
                    let codes = codes & !(15 << (4 * place)) | u64::from(code) << (4 * place);
                    let block = decode_block(codes);
                    for element in 0..16 {
                        let byte = block[element / 4].to_le_bytes()[element % 4] as i8;
                        let code = (codes >> (4 * element)) as u32 & 15;
                        assert_eq!(f32::from(byte), 2.0 * e2m1(code), "code {code} at {element} of {codes:#x}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_finite_scale_decodes_to_half_its_value() {
        for code in 0..0x7f_u32 {
            let (exponent, mantissa) = ((code >> 3) as i32, (code & 7) as f32);
            let value = match exponent {
                0 => mantissa / 8.0 / 64.0,
                _ => (1.0 + mantissa / 8.0) * f32::from_bits(((exponent - 7 + 127) as u32) << 23),
            };
            let word = code | 0x38 << 8 | code << 16;
            assert_eq!(decode_scales(word), [value / 2.0, 0.5, value / 2.0, 0.0], "{code:#x}");
        }
    }

    #[test]
    fn the_dot_product_of_a_block_is_exact_in_a_biased_float() {
        let extreme = decode_block(0x7777_7777_7777_7777);
        let negative = decode_block(0xffff_ffff_ffff_ffff);
        assert_eq!(biased_dot(extreme, extreme) - BIAS, 2304.0);
        assert_eq!(biased_dot(extreme, negative) - BIAS, -2304.0);
        // A few hundred pairs of blocks from a linear congruential generator.
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.rotate_left(32)
        };
        for _ in 0..500 {
            let (a, b) = (random(), random());
            let products = (0..64).step_by(4).map(|at| e2m1((a >> at) as u32 & 15) * e2m1((b >> at) as u32 & 15));
            assert_eq!(biased_dot(decode_block(a), decode_block(b)) - BIAS, 4.0 * products.sum::<f32>());
        }
    }

    #[test]
    fn only_scales_inside_of_k_are_kept() {
        let masks = [1, 2, 3, 4, 5, 65536].map(scale_mask);
        assert_eq!(masks, [0xff, 0xffff, 0xff_ffff, u32::MAX, u32::MAX, u32::MAX]);
    }

    #[test]
    fn a_tile_finds_its_group_past_empty_ones() {
        let group = |m, first_tile| Group {
            a: 0,
            a_scales: 0,
            b: [0; 2],
            b_scales: [0; 2],
            c: 0,
            alpha: [1.0; 2],
            m,
            n: 8,
            k: 16,
            first_tile,
        };
        let groups = [group(0, 0), group(100, 0), group(0, 2), group(0, 2), group(64, 2), group(1, 3), group(0, 4)];
        let launch = Launch { groups: groups.as_ptr() as u64, group_count: groups.len() as u32, output: 0 };
        // SAFETY: an array of as many groups.
        let found = [0, 1, 2, 3].map(|tile| unsafe { find_group(launch, tile) }.m);
        assert_eq!(found, [100, 100, 64, 1]);
    }
}
