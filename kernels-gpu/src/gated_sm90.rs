//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * Computes what [`Group`] says for every group of the array, in one launch of at most as many blocks as the groups
//!   have tiles ([`sm90::Tile::count`]), [`sm90::THREADS`] threads each, [`sm90::Tile::shared_bytes`] of dynamic
//!   shared memory. Some group has rows. M and N may end anywhere in a tile, K at any multiple of [`sm90::K_ALIGNMENT`].
//! * Addresses of values and scales are multiples of 16, the others as [`Group`] says; scales are finite (never 0x7f)
//!   and have no sign; padding of the scale layout may hold anything.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Products are exact; the tensor core adds them up in f32. α·sum must be finite in f32. Overflow of the output
//!   format gives ±inf.
//!
//! # How
//!
//! Hopper has no FP4 unit, but f16 holds every e2m1 × e4m3 (`decode`). A block's first warpgroup fills stages of shared
//! memory, each [`sm90::STEP`] elements of K: it copies the weights as they are, and decodes the tokens. The two others
//! decode the weights in registers, straight into the A fragments of `wgmma`, and multiply, each 64 rows of both
//! panels. While one decodes, the other's products run. A block takes one tile after the other; tiles that share
//! weights are computed at the same time.
//!
//! A product sums over K in any order, so A and B permute it alike ("Order of K"), and no element ever changes its thread.

// Indices, not iterators: a loop over indices unrolls, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_mbarrier_arrive_noinc},
    fence::fence_proxy_async_shared,
    float::mul_rn_f16x2,
    global::{ld_global_nc_b32_or_zero, st_global_b32},
    integer::prmt_b32,
    kernel,
    mbarrier::{MBARRIER_BYTES, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity},
    setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc},
    shared::{dynamic_shared_address, ld_shared_b16, ld_shared_v4_b32, st_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx},
    wgmma::{self, MmaAsync},
};

use crate::{
    abi::{
        BLOCK, Group, Launch, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, scale_word_offset,
        sm90::{
            BARRIER_BYTES, CONSUMERS, K_ALIGNMENT, PANEL_BYTES, PANEL_ROWS, PANEL_SCALE_BYTES, PANELS,
            SCALE_TILE_BYTES, STEP, STEP_SCALE_TILES, THREADS, TILES, Tile, WARPGROUP, columns,
        },
    },
    epilogue::{convert, silu},
    schedule::find_group,
};

/// Registers of a thread after `setmaxnreg`, which shares out what the block was launched with: as many for each thread
/// as a multiprocessor's 65,536 allow, in eights.
const PRODUCER_REGISTERS: u32 = 88;
const CONSUMER_REGISTERS: u32 = 208;
const _: () =
    assert!(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65_536 / THREADS / 8 * 8 * (1 + CONSUMERS));

const WARPS: u32 = WARPGROUP / WARP_SIZE;

/// Rows of an A fragment: a warp's, a warpgroup's.
const WARP_ROWS: u32 = 16;
const WARPGROUP_ROWS: u32 = wgmma::M;
const _: () = assert!(CONSUMERS * WARPGROUP_ROWS == PANEL_ROWS && WARPS * WARP_ROWS == WARPGROUP_ROWS);

// Order of K.
//
// Of a row's 64 packed bytes in a stage, the fragment's lanes 0 to 3 take 16 each: four words of 8 elements. Word t
// serves products 2t and 2t+1. Elements i and i+4 of a word, i = 0 to 3, decode into one register, a pair of neighbouring
// columns of the product: i = 0, 1 are the pairs of product 2t's left and right half, i = 2, 3 those of product 2t+1's.
// So chunk 4t+i of B, 8 columns, has the pairs i of the words t of lanes 0 to 3.

/// Lanes that share a row of a fragment.
const ROW_LANES: u32 = 4;

/// Words of a row that a lane decodes a stage.
const LANE_WORDS: u32 = 4;

/// Elements of a word, and registers that they decode to.
const WORD_ELEMENTS: u32 = 8;
const WORD_PAIRS: usize = 4;

/// Bytes of a lane's words.
const LANE_BYTES: u32 = LANE_WORDS * 4;

/// Bytes of a row of values.
const ROW_BYTES: u32 = STEP / 2;

/// Scale factors of a lane's words.
const LANE_SCALES: u32 = LANE_WORDS * WORD_ELEMENTS / BLOCK;

const _: () = assert!(ROW_LANES * LANE_BYTES == ROW_BYTES && LANE_BYTES * 2 == K_ALIGNMENT && LANE_SCALES == 2);

/// Bytes of a token in a chunk of B, and the rows that lie together ("Canonical Layouts", no swizzle).
const CHUNK_BYTES: u32 = 16;
const CHUNK_ROWS: u32 = 8;

macro_rules! entries {
    ($($index:literal $gated:ident $plain:ident;)*) => {
        $(
            /// Gated, of as many tokens a tile as its name says.
            ///
            /// # Safety
            /// The module's contract.
            #[kernel(threads = THREADS, min_blocks = 1)]
            pub unsafe fn $gated(launch: Launch) {
                // SAFETY: the caller's promise.
                unsafe { Sm90::<2, { registers(TILES[$index]) }>::run(launch) }
            }

            /// Plain, of as many tokens a tile as its name says.
            ///
            /// # Safety
            /// The module's contract.
            #[kernel(threads = THREADS, min_blocks = 1)]
            pub unsafe fn $plain(launch: Launch) {
                // SAFETY: the caller's promise.
                unsafe { Sm90::<1, { registers(TILES[$index]) }>::run(launch) }
            }
        )*

        #[cfg(test)]
        const ENTRIES: &[(usize, &str, &str)] = &[$(($index, stringify!($gated), stringify!($plain))),*];
    };
}

entries! {
    0 gated_sm90_8 plain_sm90_8;
    1 gated_sm90_16 plain_sm90_16;
    2 gated_sm90_32 plain_sm90_32;
    3 gated_sm90_64 plain_sm90_64;
    4 gated_sm90_96 plain_sm90_96;
    5 gated_sm90_128 plain_sm90_128;
}

/// Accumulators of a thread for one panel.
const fn registers(tile: Tile) -> usize {
    (WARPGROUP_ROWS * tile.tokens / WARPGROUP) as usize
}

/// The tile of so many accumulators.
const fn tile_of(registers_of_it: usize) -> Tile {
    let mut index = 0;
    while registers(TILES[index]) != registers_of_it {
        index += 1;
    }
    TILES[index]
}

/// A loop of at most 16 turns as straight-line code, its index a constant: an array stays in registers only if all its
/// indices are constants.
macro_rules! unroll {
    ($index:ident < $count:expr, $body:block) => {
        unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $index:ident, $count:expr, $body:block, $($value:literal)*) => {$(
        if $value < $count {
            const $index: usize = $value;
            $body
        }
    )*};
}

/// The kernel: MATRICES is 2 for gated and 1 for plain, REGISTERS the accumulators of a thread and panel.
struct Sm90<const MATRICES: u32, const REGISTERS: usize>;

/// What a block computes next.
struct Work<'a> {
    group: &'a Group,
    first_token: u32,
    first_column: u32,
}

/// A place in the ring of stages, and the parity of its phase.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    parity: u32,
}

impl<const MATRICES: u32, const REGISTERS: usize> Sm90<MATRICES, REGISTERS>
where
    [f32; REGISTERS]: MmaAsync,
{
    const TILE: Tile = tile_of(REGISTERS);
    const TOKENS: u32 = Self::TILE.tokens;
    const STAGES: u32 = Self::TILE.stages();
    const STAGE_BYTES: u32 = Self::TILE.stage_bytes();

    const CHECK: () = {
        assert!(MATRICES == 1 || MATRICES == 2);
        assert!(<[f32; REGISTERS]>::N == Self::TOKENS);
        assert!(Self::TOKENS.is_multiple_of(CHUNK_ROWS));
        // Four of these make two fours of neighbouring columns; see `unroll`.
        assert!(REGISTERS / 4 <= 16 && Self::UNITS <= MAX_UNITS);
    };

    // Shared memory: the stages, each values of both panels, their scales, B; then a barrier for each stage that it is
    // full, then one for each that it is empty.
    const SCALES: u32 = PANELS * PANEL_BYTES;
    const B: u32 = Self::SCALES + PANELS * PANEL_SCALE_BYTES;
    const FULL: u32 = Self::STAGES * Self::STAGE_BYTES;
    const EMPTY: u32 = Self::FULL + Self::STAGES * MBARRIER_BYTES;
    const END: u32 = Self::EMPTY + Self::STAGES * MBARRIER_BYTES;

    /// Bytes of a chunk of B: 8 columns of every token.
    const B_CHUNK_BYTES: u32 = Self::TOKENS * CHUNK_BYTES;

    /// Quarters of a token's stage that a producer thread decodes.
    const UNITS: usize = (Self::TOKENS * LANE_WORDS).div_ceil(WARPGROUP) as usize;

    /// Arrivals that fill a stage: of each producer thread, one when its copies are complete and one when its tokens are
    /// decoded.
    const FULL_ARRIVALS: u32 = 2 * WARPGROUP;

    /// Arrivals that empty it: of each consumer warp.
    const EMPTY_ARRIVALS: u32 = CONSUMERS * WARPS;

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        const { assert!(Self::END == Self::TILE.shared_bytes() && BARRIER_BYTES == 2 * MBARRIER_BYTES) };
        let shared = dynamic_shared_address();
        // SAFETY: barriers are initialised before anyone uses them; every thread takes part in what the block does
        // together, every thread of a warpgroup in what that does.
        unsafe {
            if thread::thread_idx_x() == 0 {
                for stage in 0..Self::STAGES {
                    mbarrier_init(shared + Self::FULL + stage * MBARRIER_BYTES, Self::FULL_ARRIVALS);
                    mbarrier_init(shared + Self::EMPTY + stage * MBARRIER_BYTES, Self::EMPTY_ARRIVALS);
                }
            }
            thread::sync_threads();
            // The same in all lanes, and known to be.
            let (warpgroup, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARPGROUP, 0, WARP_SIZE);
            if warpgroup == 0 {
                setmaxnreg_dec::<PRODUCER_REGISTERS>();
                Self::produce(launch, shared);
            } else {
                setmaxnreg_inc::<CONSUMER_REGISTERS>();
                Self::consume(launch, shared, warpgroup - 1);
            }
        }
    }

    // Schedule.

    /// Tiles of all groups.
    #[inline(always)]
    unsafe fn tiles(launch: Launch) -> u32 {
        // SAFETY: there is a last group.
        let last = unsafe { &*(launch.groups as *const Group).add(launch.group_count as usize - 1) };
        last.first_tile + Self::TILE.count(last.m, last.n, MATRICES) as u32
    }

    #[inline(always)]
    unsafe fn work<'a>(launch: Launch, tile: u32) -> Work<'a> {
        // SAFETY: one of the groups' tiles.
        let group = unsafe { find_group(launch, tile) };
        // Blocks that share weights are neighbours, so that they are read from memory once.
        let token_tiles = group.m.div_ceil(Self::TOKENS);
        // SAFETY: a group that has tiles has rows.
        unsafe { core::hint::assert_unchecked(token_tiles > 0) };
        let tile = tile - group.first_tile;
        Work {
            group,
            first_token: tile % token_tiles * Self::TOKENS,
            first_column: tile / token_tiles * columns(MATRICES),
        }
    }

    #[inline(always)]
    fn advance(place: &mut Place) {
        place.stage += 1;
        if place.stage == Self::STAGES {
            *place = Place { stage: 0, parity: place.parity ^ 1 };
        }
    }

    // Producer: global memory → stages.

    #[inline(always)]
    unsafe fn produce(launch: Launch, shared: u32) {
        // Of a fresh barrier, the phase before the first is complete: every stage starts empty.
        let mut place = Place { stage: 0, parity: 1 };
        // SAFETY: a stage is written between "empty" and "full" only.
        unsafe {
            let tiles = Self::tiles(launch);
            let mut tile = thread::block_idx_x();
            while tile < tiles {
                let work = Self::work(launch, tile);
                let mut weights = Weights::new::<MATRICES>(&work);
                let mut tokens = Tokens::new(&work, Self::TOKENS);
                let mut left = work.group.k as i32;
                while left > 0 {
                    let words = Self::fetch(&mut tokens, left);
                    let stage = shared + place.stage * Self::STAGE_BYTES;
                    let full = shared + Self::FULL + place.stage * MBARRIER_BYTES;
                    mbarrier_wait_parity(shared + Self::EMPTY + place.stage * MBARRIER_BYTES, place.parity);
                    weights.copy(stage, stage + Self::SCALES, left);
                    cp_async_mbarrier_arrive_noinc(full);
                    Self::store(&tokens, words, stage + Self::B);
                    // wgmma reads B past the generic proxy.
                    fence_proxy_async_shared();
                    mbarrier_arrive(full);
                    Self::advance(&mut place);
                    left -= STEP as i32;
                }
                tile += thread::grid_dim_x();
            }
        }
    }

    /// Loads a step of this thread's tokens, of which `left` elements of K are left, and moves on.
    #[inline(always)]
    unsafe fn fetch(tokens: &mut Tokens, left: i32) -> [Unit; MAX_UNITS] {
        let mut units = [Unit { words: [0; ROW_LANES as usize], scales: [0; STEP_SCALE_TILES as usize] }; MAX_UNITS];
        unroll!(UNIT < Self::UNITS, {
            // SAFETY: the caller's promise.
            units[UNIT % MAX_UNITS] = unsafe { tokens.fetch(UNIT as u32, left) };
        });
        tokens.values += u64::from(ROW_BYTES);
        tokens.scale_tile += STEP_SCALE_TILES;
        units
    }

    /// Decodes a step of this thread's tokens into B.
    #[inline(always)]
    unsafe fn store(tokens: &Tokens, units: [Unit; MAX_UNITS], b: u32) {
        unroll!(UNIT < Self::UNITS, {
            let token = tokens.token + UNIT as u32 * UNIT_TOKENS;
            if token < Self::TOKENS {
                let chunks = units[UNIT % MAX_UNITS].decode(tokens.word);
                let address = b + tokens.word * WORD_PAIRS as u32 * Self::B_CHUNK_BYTES + token * CHUNK_BYTES;
                for pair in 0..WORD_PAIRS {
                    // SAFETY: inside of B, 16 bytes that are this thread's.
                    unsafe { st_shared_v4_b32(address + pair as u32 * Self::B_CHUNK_BYTES, chunks[pair]) };
                }
            }
        });
    }

    // Consumer: stages → accumulators → C.

    #[inline(always)]
    unsafe fn consume(launch: Launch, shared: u32, consumer: u32) {
        let fragment = Fragment::new(consumer);
        let mut place = Place { stage: 0, parity: 0 };
        // SAFETY: a stage is read between "full" and "empty" only.
        unsafe {
            let tiles = Self::tiles(launch);
            let mut tile = thread::block_idx_x();
            while tile < tiles {
                let work = Self::work(launch, tile);
                let mut sums = ([0.0; REGISTERS], [0.0; REGISTERS]);
                let mut left = work.group.k as i32;
                while left > 0 {
                    mbarrier_wait_parity(shared + Self::FULL + place.stage * MBARRIER_BYTES, place.parity);
                    Self::multiply(shared + place.stage * Self::STAGE_BYTES, &fragment, &mut sums);
                    sync_warp(ALL_LANES);
                    if lane_id() == 0 {
                        mbarrier_arrive(shared + Self::EMPTY + place.stage * MBARRIER_BYTES);
                    }
                    Self::advance(&mut place);
                    left -= STEP as i32;
                }
                Self::epilogue(&work, launch.output, &fragment, &sums);
                tile += thread::grid_dim_x();
            }
        }
    }

    /// Adds a stage's products.
    #[inline(always)]
    unsafe fn multiply(stage: u32, fragment: &Fragment, sums: &mut ([f32; REGISTERS], [f32; REGISTERS])) {
        // SAFETY: inside of the stage, which nobody writes now; the whole warpgroup is here.
        unsafe {
            let panels = [0, 1].map(|panel| {
                let values = stage + panel * PANEL_BYTES + fragment.values;
                Rows::load(values, stage + Self::SCALES + panel * PANEL_SCALE_BYTES + fragment.scales)
            });
            unroll!(WORD < LANE_WORDS as usize, {
                let a = [panels[0].decode(WORD), panels[1].decode(WORD)];
                // Two words' fragments at most are in use: what the oldest had is free again.
                wgmma::wait_group::<1>();
                wgmma::fence();
                for half in 0..2 {
                    let chunk = (WORD * WORD_PAIRS + 2 * half) as u32;
                    let b = wgmma::descriptor(
                        stage + Self::B + chunk * Self::B_CHUNK_BYTES,
                        Self::B_CHUNK_BYTES,
                        CHUNK_ROWS * CHUNK_BYTES,
                    );
                    sums.0.mma_async(a[0][half], b, true);
                    sums.1.mma_async(a[1][half], b, true);
                }
                wgmma::commit_group();
            });
            wgmma::wait_group::<0>();
            sums.0.settle();
            sums.1.settle();
        }
    }

    /// Scales, activates and writes a thread's elements of C.
    #[inline(always)]
    unsafe fn epilogue(work: &Work<'_>, output: u32, fragment: &Fragment, sums: &([f32; REGISTERS], [f32; REGISTERS])) {
        let Group { c, alpha, m, n, .. } = *work.group;
        let column = work.first_column + fragment.row;
        let first_token = work.first_token + fragment.lane * 2;
        let store = |token: u32, column: u32, low: f32, high: f32| {
            if token < m && column < n {
                let element = u64::from(token) * u64::from(n) + u64::from(column);
                // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                unsafe { st_global_b32(c + 2 * element, convert(output, low, high)) };
            }
        };
        unroll!(EIGHT < REGISTERS / 4, {
            for odd in 0..2 {
                let token = first_token + (8 * EIGHT + odd) as u32;
                let (low, high) = (4 * EIGHT + odd, 4 * EIGHT + 2 + odd);
                let first = |register: usize| alpha[0] * (UNSCALE * sums.0[register]);
                if MATRICES == 2 {
                    let second = |register: usize| alpha[1] * (UNSCALE * sums.1[register]);
                    let gated = |register| silu(first(register)) * second(register);
                    store(token, column, gated(low), gated(high));
                } else {
                    let second = |register: usize| alpha[0] * (UNSCALE * sums.1[register]);
                    store(token, column, first(low), first(high));
                    store(token, column + PANEL_ROWS, second(low), second(high));
                }
            }
        });
    }
}

// Copying weights.

/// Rows that the producer copies at once, 16 bytes of each by a thread.
const COPY_ROWS: u32 = WARPGROUP / ROW_LANES;

/// Where a row of 16 lies in a stage: first the even ones. A thread of a fragment has rows g and g+8 of its 16, and so
/// rows 2g and 2g+1 of the matrix: neighbouring columns of C, which it writes together.
const fn slot(row: u32) -> u32 {
    row / WARP_ROWS * WARP_ROWS + row % 2 * (WARP_ROWS / 2) + row % WARP_ROWS / 2
}

/// What a producer thread copies, and how far it has come.
struct Weights {
    /// Addresses of this thread's first 16 bytes of each panel's values.
    values: [u64; PANELS as usize],
    /// From them to the same of the next [`COPY_ROWS`].
    stride: u64,
    /// Where they go in a panel.
    target: u32,
    /// Rows from this thread's first to the end of each panel's matrix; none if 0 or less.
    rows: [i32; PANELS as usize],
    /// Of a row, its first element in a step.
    element: i32,
    /// Address of this thread's 16 bytes of scales: four rows' of one panel.
    scales: u64,
    /// Where they go.
    scale_target: u32,
    /// Its first element of K in a step; past all K if the panel is outside of the matrix.
    scale_element: i32,
}

impl Weights {
    #[inline(always)]
    fn new<const MATRICES: u32>(work: &Work<'_>) -> Self {
        let Group { n, k, .. } = *work.group;
        let thread = thread::thread_idx_x();
        let (row, chunk) = (thread / ROW_LANES, thread % ROW_LANES);
        let row_bytes = u64::from(k / 2);
        // Panel 1 is another matrix, or further on in the same.
        let matrix = |panel: usize| if MATRICES == 2 { panel } else { 0 };
        let first_row = |panel: usize| work.first_column + if MATRICES == 2 { 0 } else { panel as u32 * PANEL_ROWS };
        let values = |panel: usize| {
            let row = u64::from(first_row(panel) + row);
            work.group.b[matrix(panel)] + row * row_bytes + u64::from(chunk * LANE_BYTES)
        };
        let rows = |panel: usize| n as i32 - (first_row(panel) + row) as i32;

        // 16 bytes of scales are one of 32 units of a tile; the producer has a thread for each unit of each tile.
        const UNITS: u32 = SCALE_TILE_BYTES / 16;
        const { assert!(PANELS * STEP_SCALE_TILES * UNITS == WARPGROUP) };
        let (panel, tile, unit) =
            (thread / (STEP_SCALE_TILES * UNITS), thread / UNITS % STEP_SCALE_TILES, thread % UNITS);
        let tiles = k.div_ceil(BLOCK * SCALE_TILE_COLUMNS);
        let base = if panel == 0 { work.group.b_scales[0] } else { work.group.b_scales[matrix(1)] };
        let first = if panel == 0 { first_row(0) } else { first_row(1) };
        let inside = first < n;
        Self {
            values: [values(0), values(1)],
            stride: u64::from(COPY_ROWS) * row_bytes,
            target: slot(row) * ROW_BYTES + chunk * LANE_BYTES,
            rows: [rows(0), rows(1)],
            element: (chunk * LANE_BYTES * 2) as i32,
            scales: base + scale_word_offset(first, tile, tiles) + u64::from(unit * 16),
            scale_target: panel * PANEL_SCALE_BYTES + tile * SCALE_TILE_BYTES + slot(unit) * 16,
            scale_element: if inside { (tile * BLOCK * SCALE_TILE_COLUMNS) as i32 } else { i32::MAX },
        }
    }

    /// Starts a step's copies, of which `left` elements of K are left, and moves on. What is outside becomes 0.
    #[inline(always)]
    unsafe fn copy(&mut self, values: u32, scales: u32, left: i32) {
        // SAFETY: inside of the stage; inside of the matrix, or not read.
        unsafe {
            for panel in 0..PANELS as usize {
                for part in 0..PANEL_ROWS / COPY_ROWS {
                    let inside = ((part * COPY_ROWS) as i32) < self.rows[panel] && self.element < left;
                    let target = values + panel as u32 * PANEL_BYTES + self.target + part * COPY_ROWS * ROW_BYTES;
                    cp_async_16_or_zero(inside, target, self.values[panel] + u64::from(part) * self.stride);
                }
                self.values[panel] += u64::from(ROW_BYTES);
            }
            cp_async_16_or_zero(self.scale_element < left, scales + self.scale_target, self.scales);
        }
        self.scales += u64::from(PANEL_SCALE_BYTES);
    }
}

// Slots keep 32 rows together, so that a thread's rows, 32 apart, have slots 32 apart.
const _: () = assert!(COPY_ROWS.is_multiple_of(WARP_ROWS));

// Decoding tokens.

/// Most units of a producer thread.
const MAX_UNITS: usize = 4;

/// Tokens from one unit of a thread to the next.
const UNIT_TOKENS: u32 = WARPGROUP / LANE_WORDS;

/// What a producer thread decodes, and how far it has come: of a token, word `word` of each of the four lanes that will
/// multiply with it. A quarter warp has eight neighbouring tokens, whose chunks lie side by side.
struct Tokens {
    /// Address of the first unit's first word.
    values: u64,
    /// From a unit to the next.
    stride: u64,
    /// Address of A's scales, and tiles of a row.
    scales: u64,
    scale_tiles: u32,
    /// The next tile of scales.
    scale_tile: u32,
    /// The first unit's token: in the tile, and in the group.
    token: u32,
    row: u32,
    /// Tokens that the tile and the group have.
    end: u32,
    word: u32,
}

/// One token's words of a step, and its scales.
#[derive(Clone, Copy)]
struct Unit {
    words: [u32; ROW_LANES as usize],
    scales: [u32; STEP_SCALE_TILES as usize],
}

impl Tokens {
    #[inline(always)]
    fn new(work: &Work<'_>, tokens: u32) -> Self {
        let Group { m, k, a, a_scales, .. } = *work.group;
        let thread = thread::thread_idx_x();
        let token = thread / WARP_SIZE * CHUNK_ROWS + thread % CHUNK_ROWS;
        let word = thread % WARP_SIZE / CHUNK_ROWS;
        let row = work.first_token + token;
        Self {
            values: a + u64::from(row) * u64::from(k / 2) + u64::from(word * 4),
            stride: u64::from(UNIT_TOKENS) * u64::from(k / 2),
            scales: a_scales,
            scale_tiles: k.div_ceil(BLOCK * SCALE_TILE_COLUMNS),
            scale_tile: 0,
            token,
            row,
            end: if m - work.first_token < tokens { m - work.first_token } else { tokens },
            word,
        }
    }

    #[inline(always)]
    unsafe fn fetch(&self, unit: u32, left: i32) -> Unit {
        let inside = self.token + unit * UNIT_TOKENS < self.end;
        let values = self.values + u64::from(unit) * self.stride;
        Unit {
            // SAFETY: inside of the matrix, or not read.
            words: core::array::from_fn(|lane| unsafe {
                let inside = inside && ((lane as u32 * LANE_BYTES * 2) as i32) < left;
                ld_global_nc_b32_or_zero(inside, values + lane as u64 * u64::from(LANE_BYTES))
            }),
            // SAFETY: inside of the scales, which are padded to whole tiles, or not read.
            scales: core::array::from_fn(|tile| unsafe {
                let inside = inside && ((tile as u32 * BLOCK * SCALE_TILE_COLUMNS) as i32) < left;
                let tile = self.scale_tile + tile as u32;
                let offset = scale_word_offset(self.row + unit * UNIT_TOKENS, tile, self.scale_tiles);
                ld_global_nc_b32_or_zero(inside, self.scales + offset)
            }),
        }
    }
}

impl Unit {
    /// A token's chunks of the products of a word: pair by pair, the pairs of all lanes.
    #[inline(always)]
    fn decode(self, word: u32) -> [[u32; ROW_LANES as usize]; WORD_PAIRS] {
        let block = word / (BLOCK / WORD_ELEMENTS);
        let lanes: [_; ROW_LANES as usize] = core::array::from_fn(|lane| {
            let (tile, column) = (lane / 2, lane as u32 % 2 * LANE_SCALES + block);
            decode(self.words[lane], scale(self.scales[tile], column))
        });
        core::array::from_fn(|pair| core::array::from_fn(|lane| lanes[lane][pair]))
    }
}

// Decoding weights.

/// Where a consumer thread's part of a panel lies.
struct Fragment {
    /// Its lane of those that share rows.
    lane: u32,
    /// Its first row in the panel, which is even; the second follows.
    row: u32,
    /// Offsets of the first row's words and scales in a stage's panel.
    values: u32,
    scales: u32,
}

/// A thread's words of a stage's panel, and their scales: two rows.
struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [u32; 2],
}

impl Fragment {
    #[inline(always)]
    fn new(consumer: u32) -> Self {
        let warp = thread::thread_idx_x() % WARPGROUP / WARP_SIZE;
        let (lane, pair) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let first = consumer * WARPGROUP_ROWS + warp * WARP_ROWS;
        let row = first + 2 * pair;
        // Four neighbouring scales of rows that are equal modulo 32 are 16 bytes, in the order of rows.
        let unit = slot(row % 32) * 16 + row / 32 * 4;
        Self {
            lane,
            row,
            values: slot(row) * ROW_BYTES + lane * LANE_BYTES,
            scales: lane / 2 * SCALE_TILE_BYTES + unit + lane % 2 * LANE_SCALES,
        }
    }
}

impl Rows {
    #[inline(always)]
    unsafe fn load(values: u32, scales: u32) -> Self {
        const SECOND: u32 = slot(1);
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                words: [ld_shared_v4_b32(values), ld_shared_v4_b32(values + SECOND * ROW_BYTES)],
                scales: [scales, scales + SECOND * 16].map(|address| u32::from(ld_shared_b16(address))),
            }
        }
    }

    /// The A fragments of the two products of a word.
    #[inline(always)]
    fn decode(&self, word: usize) -> [[u32; 4]; 2] {
        let block = word as u32 / (BLOCK / WORD_ELEMENTS);
        let [first, second] = [0, 1].map(|row| decode(self.words[row][word], scale(self.scales[row], block)));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

// e2m1 × e4m3 → f16.

/// What [`decode`] leaves out of a value: 2⁷, in A and in B.
const UNSCALE: f32 = (1 << 14) as f32;

/// Eight e2m1 codes times a scale of [`scale`], as f16: register i has elements i and i+4, in its low and its high half.
///
/// e2m1's exponent and mantissa in the places of f16's are the value times 2⁻¹⁴, subnormal ones too, since the exponents'
/// biases are 1 and 15. So the product is the value times the scale times 2⁻⁷: up to 6 bits that are a multiple of
/// 2⁻¹⁷ and below 32, which f16 has.
#[inline(always)]
fn decode(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    const SIGNS: u32 = 0x8000_8000;
    const MAGNITUDES: u32 = 0x0e00_0e00;
    let signed = |signs: u32, magnitudes: u32| mul_rn_f16x2(signs & SIGNS | magnitudes & MAGNITUDES, scale);
    [
        signed(codes << 12, codes << 9),
        signed(codes << 8, codes << 5),
        signed(codes << 4, codes << 1),
        signed(codes, codes >> 3),
    ]
}

/// Byte `index` of `scales`, an e4m3, times 2⁷, in both halves.
///
/// Its bits in the places of f16's are the scale times 2⁻⁸, since the biases are 7 and 15. Whatever the byte is, the result
/// is finite: padding times the zeros that stand in for what is outside is 0.
#[inline(always)]
fn scale(scales: u32, index: u32) -> u32 {
    /// 2¹⁵, twice.
    const UNBIAS: u32 = 0x7800_7800;
    let both = prmt_b32(scales, 0, 0x4040 | index << 8 | index);
    mul_rn_f16x2(both << 7 & 0x3f80_3f80, UNBIAS)
}

const _: () = assert!(SCALE_TILE_ROWS == PANEL_ROWS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_has_the_entries_that_it_names() {
        assert_eq!(ENTRIES.len(), TILES.len());
        for &(index, gated, plain) in ENTRIES {
            assert_eq!((TILES[index].gated, TILES[index].plain), (gated, plain));
        }
    }

    #[test]
    fn slots_permute_sixteen_rows_at_a_time() {
        let mut slots: [u32; 16] = core::array::from_fn(|row| slot(row as u32));
        assert_eq!((slots[0], slots[1], slots[2], slot(33)), (0, 8, 1, 40));
        slots.sort_unstable();
        assert!(slots.iter().zip(0..).all(|(&slot, row)| slot == row));
    }
}
