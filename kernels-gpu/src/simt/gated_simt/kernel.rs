//! The device code of the portable kernel.
//!
//! Threads decode e2m1 values to signed bytes of twice the values on the way from global to shared memory, so that
//! `dp4a` multiplies four of them at a time. Two fused multiply-adds apply the two scales of 16 products; the first one
//! also removes the bias from the integer sum in a biased float (`BIAS`). A k-block is the part of K that a scale tile
//! covers, 64 elements. While one k-block is multiplied, the next one is loaded.
//!
//! Here, as in [`crate::format`], a *block* is the [`BLOCK`] elements along K that share a scale.

// Loops go over indices, not iterators: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::hint::assert_unchecked;

use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_nc_b32_or_zero, ld_global_nc_b64_or_zero, st_global_b16, st_global_b64},
    integer::{dp4a_s32_s32, prmt_b32},
    kernel,
    shared::{SharedAddress, dynamic_shared_address, ld_shared_f32, ld_shared_v4_b32, st_shared_f32, st_shared_v4_b32},
    thread,
};

use crate::{
    epilogue::{convert, silu},
    format::{BLOCK, SCALE_TILE_BYTES, SCALE_TILE_COLUMNS, scale_word_offset},
    schedule::last_begun,
    simt::gated_simt::abi::{Group, INSTANCES, Index, Instance, Launch, Panel, Tile, instances},
};

const THREADS: u32 = Instance::THREADS;

/// Minimum number of CTAs per SM. It limits a thread to 128 registers.
const MIN_BLOCKS: u32 = 2;

/// Bytes of the packed values of a block.
const PACKED_BLOCK: u32 = BLOCK / 2;

/// 1.5·2²³. From 2²³ to 2²⁴ the last bit of a float counts 1, so that adding an integer to the bits adds it to the
/// value.
const BIAS: f32 = 12_582_912.0;

// The biased float stays between 2²³ and 2²⁴ with the largest sum of a block: 16 products of two doubled 6s.
const _: () = assert!(BLOCK * 12 * 12 < 1 << 22);

/// Maximum number of one operand's blocks that a thread copies per k-block.
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
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { Kernel::run(launch) }
        }
    )*};
}
instances!(entries);

/// The kernel as one of [`INSTANCES`]. The other parameters follow from it: MATRICES of weights, and TOKENS × COLUMNS
/// neighboring elements of C per thread.
struct Simt<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>;

/// One thread's sums, by matrix, token and column.
type Sums<const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize> = [[[f32; COLUMNS]; TOKENS]; MATRICES];

impl<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>
    Simt<INDEX, MATRICES, TOKENS, COLUMNS>
{
    const INSTANCE: Instance = INSTANCES[INDEX];
    const TILE: Tile = Self::INSTANCE.tile;

    // Layout of shared memory: two stages, each with a panel of A, one of gate and one of up (`Panel`).
    const A: Panel = Self::TILE.a_panel();
    const B: Panel = Self::TILE.b_panel();
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const fn b_offset(matrix: usize) -> u32 {
        Self::A.bytes() + matrix as u32 * Self::B.bytes()
    }

    /// Number of threads side by side along the tile's columns.
    const THREAD_COLUMNS: u32 = Self::TILE.columns / COLUMNS as u32;

    const CHECK: () = {
        assert!(MATRICES == Self::INSTANCE.matrices as usize);
        assert!(TOKENS == Self::TILE.tokens_per_thread as usize && COLUMNS == Self::TILE.columns_per_thread as usize);
        assert!(Self::A.units() <= MAX_UNITS && Self::B.units() <= MAX_UNITS);
    };

    /// One thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let tile = thread::block_idx_x();
        // SAFETY: by the contract, the grid has one CTA per tile of the groups.
        let group = unsafe { find_group(launch, tile) };
        // SAFETY: a group that has a tile has rows.
        unsafe { assert_unchecked(group.m > 0) };
        // CTAs that share a panel of weights are neighbors, so that the panel is read from memory once.
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
        // SAFETY: by the contract, the operands' addresses point to the group's matrices. The dynamic shared memory has
        // two stages. A stage is written while no thread reads it: every thread has passed a barrier since its last
        // read of the stage, and passes another barrier before its next read.
        unsafe {
            let mut fetch = |blocks| (a.fetch(Self::A, blocks), b.each_mut().map(|b| b.fetch(Self::B, blocks)));
            let store = |stage, (a, b): (Fetched, [Fetched; MATRICES])| {
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
                // Past the end of K this loads nothing and gives zeros.
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

/// The group that a tile belongs to.
///
/// # Safety
/// `launch` is valid as its fields say. The groups have more than `tile` tiles.
#[inline(always)]
unsafe fn find_group<'a>(launch: Launch, tile: u32) -> &'a Group {
    let groups = launch.groups as *const Group;
    // SAFETY: the indices are below `group_count`, and the array does not change while the kernel runs.
    unsafe {
        &*groups.add(last_begun(launch.group_count, tile, |index| (*groups.add(index as usize)).first_tile) as usize)
    }
}

// Global memory → registers.

/// One operand's copies by one thread, with their progress along K.
///
/// A k-block is 4 blocks of each row of a panel. The threads take the blocks row by row, so that the 32 bytes of a row
/// are one memory access. Thread r also takes the 4 scales of row r.
struct Operand {
    /// Address of this thread's first block.
    values: GlobalAddress,
    /// Bytes from there to this thread's next block of the same k-block.
    unit_stride: u64,
    /// Address of this thread's four scales.
    scales: GlobalAddress,
    /// For each of this thread's blocks: `true` if the block's row is inside the matrix and the panel.
    units_inside: [bool; MAX_UNITS],
    /// `true` if the row of the scales is inside the matrix and the panel.
    scales_inside: bool,
}

/// One thread's part of a k-block of one operand, on its way from global to shared memory.
#[derive(Clone, Copy)]
struct Fetched {
    values: [u64; MAX_UNITS],
    scales: u32,
    /// Number of blocks of each row that are inside K.
    blocks: i32,
}

impl Panel {
    /// Number of blocks that a thread copies per k-block.
    const fn units(self) -> usize {
        (self.rows * SCALE_TILE_COLUMNS).div_ceil(THREADS) as usize
    }

    /// Row and column of a thread's `unit`-th block in the panel.
    #[inline(always)]
    const fn unit(self, thread: u32, unit: usize) -> (u32, u32) {
        let index = thread + unit as u32 * THREADS;
        (index / SCALE_TILE_COLUMNS, index % SCALE_TILE_COLUMNS)
    }
}

impl Operand {
    /// The rows from `first` on of a matrix [rows, k] at these addresses of values and scales, as a panel.
    #[inline(always)]
    fn new(values: u64, scales: u64, first: u32, rows: u32, k: u32, panel: Panel) -> Self {
        let thread = thread::thread_idx_x();
        let blocks = k / BLOCK;
        let row_bytes = u64::from(blocks * PACKED_BLOCK);
        let inside = |row| row < panel.rows && first + row < rows;
        let (row, column) = panel.unit(thread, 0);
        Self {
            values: GlobalAddress::new(values) + u64::from(first + row) * row_bytes + u64::from(column * PACKED_BLOCK),
            unit_stride: u64::from(THREADS / SCALE_TILE_COLUMNS) * row_bytes,
            scales: GlobalAddress::new(scales)
                + scale_word_offset(first + thread, 0, blocks.div_ceil(SCALE_TILE_COLUMNS)),
            units_inside: core::array::from_fn(|unit| inside(panel.unit(thread, unit).0)),
            scales_inside: inside(thread),
        }
    }

    /// Loads a k-block, which has `blocks` blocks of each row inside of K, and moves on. Blocks outside are 0.
    ///
    /// # Safety
    /// The matrix lies at the operand's addresses as documented in [`Group`], and nothing writes it. The rows have at
    /// least `blocks` blocks from here on, or `blocks` is not positive.
    #[inline(always)]
    unsafe fn fetch(&mut self, panel: Panel, blocks: i32) -> Fetched {
        let column = panel.unit(thread::thread_idx_x(), 0).1;
        let mut values = [0; MAX_UNITS];
        for unit in 0..panel.units() {
            let inside = self.units_inside[unit] && (column as i32) < blocks;
            let address = self.values + unit as u64 * self.unit_stride;
            // SAFETY: the address is inside of the matrix if `inside`; otherwise nothing is read.
            values[unit] = unsafe { ld_global_nc_b64_or_zero(inside, address) };
        }
        // SAFETY: the address is inside of the scales, which are padded to whole words, if the predicate holds;
        // otherwise nothing is read.
        let scales = unsafe { ld_global_nc_b32_or_zero(self.scales_inside && blocks > 0, self.scales) };
        self.values = self.values + u64::from(SCALE_TILE_COLUMNS * PACKED_BLOCK);
        self.scales = self.scales + u64::from(SCALE_TILE_BYTES);
        Fetched { values, scales, blocks }
    }
}

// Registers → shared memory.

impl Fetched {
    /// Decodes into a panel of shared memory.
    ///
    /// # Safety
    /// The panel lies at `address`, a multiple of 16, in shared memory that no thread reads now.
    #[inline(always)]
    unsafe fn store(self, address: SharedAddress, panel: Panel) {
        let thread = thread::thread_idx_x();
        for unit in 0..panel.units() {
            let (row, column) = panel.unit(thread, unit);
            if row < panel.rows {
                let block = address + panel.block_offset(row, column);
                // SAFETY: the block is inside of the panel, and no other thread stores it.
                unsafe { st_shared_v4_b32(block, decode_block(self.values[unit])) };
            }
        }
        if thread < panel.rows {
            // Decoded here and not in `fetch`, where the decoding would wait for the load.
            let scales = decode_scales(self.scales & scale_mask(self.blocks));
            for column in 0..SCALE_TILE_COLUMNS {
                // SAFETY: the scale is inside of the panel, and no other thread stores it.
                unsafe { st_shared_f32(address + panel.scale_offset(thread, column), scales[column as usize]) };
            }
        }
    }
}

/// Mask of the first `blocks` scales of a word of four. The rest is padding, which may be NaN in e4m3. NaN times the
/// zeros that stand for the values there would be NaN.
#[inline(always)]
fn scale_mask(blocks: i32) -> u32 {
    !u32::MAX.unbounded_shl(8 * blocks.max(0) as u32)
}

/// Decodes 16 e2m1 codes to 16 signed bytes of twice their values, in the order of K.
#[inline(always)]
fn decode_block(codes: u64) -> [u32; 4] {
    let [a, b] = decode_word(codes as u32);
    let [c, d] = decode_word((codes >> 32) as u32);
    [a, b, c, d]
}

/// Decodes 8 e2m1 codes to 8 signed bytes of twice their values.
#[inline(always)]
fn decode_word(codes: u32) -> [u32; 2] {
    // Twice the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, and their negatives. `prmt` looks them up by three bits.
    const POSITIVE: [u32; 2] = [0x0302_0100, 0x0c08_0604];
    const NEGATIVE: [u32; 2] = [0xfdfe_ff00, 0xf4f8_fafc];
    let look_up = |table: [u32; 2], codes| prmt_b32(table[0], table[1], codes);
    let select = |signs: u32, codes| (look_up(NEGATIVE, codes) & signs) | (look_up(POSITIVE, codes) & !signs);

    // Bytes of 0xff for negative codes. The sign of an odd code is the highest bit of a byte; an even code needs a
    // shift. `prmt` replicates the sign of a byte if 8 is added to the byte's number.
    let even = codes << 4;
    let (low_signs, high_signs) = (prmt_b32(even, codes, 0xd9c8), prmt_b32(even, codes, 0xfbea));
    let magnitudes = codes & 0x7777_7777;
    [select(low_signs, magnitudes), select(high_signs, magnitudes >> 16)]
}

/// Decodes four e4m3 scales to f32, halved because the values are doubled, in A and in B.
#[inline(always)]
fn decode_scales(scales: u32) -> [f32; 4] {
    // Exponent and mantissa go to their places in an f32, whose exponent has a bias of 127 instead of 7. Subnormal
    // scales are subnormal there too. The product is exact.
    const HALF_OF_BIAS_CHANGE: f32 = f32::from_bits((127 + 127 - 7 - 1) << 23);
    scales.to_le_bytes().map(|scale| f32::from_bits(u32::from(scale) << 20) * HALF_OF_BIAS_CHANGE)
}

// Shared memory → sums.

impl<const INDEX: usize, const MATRICES: usize, const TOKENS: usize, const COLUMNS: usize>
    Simt<INDEX, MATRICES, TOKENS, COLUMNS>
{
    /// Adds a stage's products to the sums of the elements from `row` and `column` of the tile on.
    ///
    /// # Safety
    /// The stage is filled, and no thread writes it now. The elements are inside of the tile.
    #[inline(always)]
    unsafe fn multiply(stage: SharedAddress, row: u32, column: u32, sums: &mut Sums<MATRICES, TOKENS, COLUMNS>) {
        for block in 0..SCALE_TILE_COLUMNS {
            // SAFETY: the loads read the stage, which is filled and which no thread writes now.
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

/// Loads N neighboring scales from shared memory.
///
/// # Safety
/// N scales lie at `address`, a multiple of 4 · N, in shared memory that no thread writes now.
#[inline(always)]
unsafe fn load_scales<const N: usize>(address: SharedAddress) -> [f32; N] {
    // SAFETY: the caller guarantees N scales at `address`, a multiple of 4 · N, that nothing writes now.
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
    ///
    /// # Safety
    /// `group` fulfills the contract. The elements from `token` and `column` on are this thread's alone; the columns
    /// are inside of C.
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
                let address = GlobalAddress::new(c) + 2 * element;
                // SAFETY: the elements of C are this thread's alone. N and the column are multiples of COLUMNS, the
                // number of stored elements, so the address is aligned.
                unsafe { store_output(address, output, values) }
            }
        }
    }
}

/// Converts and stores N neighboring elements of C.
///
/// # Safety
/// The elements lie at `address`, a multiple of their size, in global memory that no other thread accesses during the
/// launch.
#[inline(always)]
unsafe fn store_output<const N: usize>(address: GlobalAddress, output: u32, values: [f32; N]) {
    const { assert!(N == 1 || N == 4) };
    // SAFETY: the caller guarantees N 16-bit numbers at `address`, a multiple of their size, that no other thread
    // accesses.
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
    fn codes_decode_to_twice_their_values_in_every_place() {
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
    fn block_dot_products_are_exact_in_biased_floats() {
        let extreme = decode_block(0x7777_7777_7777_7777);
        let negative = decode_block(0xffff_ffff_ffff_ffff);
        assert_eq!(biased_dot(extreme, extreme) - BIAS, 2304.0);
        assert_eq!(biased_dot(extreme, negative) - BIAS, -2304.0);
        // 500 pairs of blocks from a linear congruential generator.
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
    fn a_tile_finds_its_group_after_empty_groups() {
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
        // SAFETY: `groups` is the address of an array of `group_count` groups.
        let found = [0, 1, 2, 3].map(|tile| unsafe { find_group(launch, tile) }.m);
        assert_eq!(found, [100, 100, 64, 1]);
    }
}
