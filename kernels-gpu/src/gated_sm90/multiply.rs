//! The warpgroups that multiply: weights of a stage, decoded in registers, times a buffer of tokens → accumulators → C.

use cuda_std::{
    global::st_global_b32,
    integer::prmt_b32,
    mbarrier::mbarrier_arrive,
    shared::{ld_shared_b16, ld_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
    wgmma::{self, MmaAsync},
};

use super::{
    Sm90, Tiles, WARPS,
    decode::{UNSCALE, decode, scales},
    order::{CHUNK_BYTES, CHUNK_ROWS, LANE_SCALES, LANE_WORDS, ROW_LANES, WORD_PAIRS, lane_offset},
};
use crate::{
    abi::sm90::{CONSUMERS, Group, Launch, PANEL_ROWS, PANELS, SCALE_TILE_BYTES, Tile, WARPGROUP},
    epilogue::{convert, silu},
    ring::Ring,
};

/// Rows of an A fragment: a warp's, a warpgroup's.
const WARP_ROWS: u32 = 16;
const WARPGROUP_ROWS: u32 = wgmma::M;
const _: () = assert!(CONSUMERS * WARPGROUP_ROWS == PANEL_ROWS && WARPS * WARP_ROWS == WARPGROUP_ROWS);

/// Accumulators of a thread for one panel of a product of so many columns.
const fn registers(width: usize) -> usize {
    WARPGROUP_ROWS as usize * width / WARPGROUP as usize
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

/// The sums of a tile's panels.
type Sums<const REGISTERS: usize> = [[f32; REGISTERS]; PANELS as usize];

impl<const MATRICES: u32, const TILE_TOKENS: u32, const STAGES: u32, const BUFFERS: u32>
    Sm90<MATRICES, TILE_TOKENS, STAGES, BUFFERS>
{
    #[inline(always)]
    pub(super) unsafe fn multiply(launch: Launch, shared: u32, consumer: u32) {
        let fragment = Fragment::new(consumer);
        let (mut stages, mut buffers) = (Self::stages(shared), Self::buffers(shared));
        // SAFETY: the whole warpgroup is here, and goes the same way.
        unsafe {
            for (tile, group) in Tiles::new(launch) {
                let width = Self::INSTANCE.width(tile.tokens);
                // wgmma's N is part of the instruction: a main loop for each.
                macro_rules! widths {
                    ($($width:literal)*) => {$(
                        if const { Self::INSTANCE.width($width) == $width && $width <= TILE_TOKENS } && width == $width {
                            let sums = Self::sum::<{ registers($width) }>(group, shared, &fragment, &mut stages, &mut buffers);
                            Self::write(&tile, group, launch.output, &fragment, &sums);
                        }
                    )*};
                }
                widths!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128);
            }
        }
    }

    /// The sums of all products of a tile.
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        group: &Group,
        shared: u32,
        fragment: &Fragment,
        stages: &mut Ring<STAGES>,
        buffers: &mut Ring<BUFFERS>,
    ) -> Sums<REGISTERS>
    where
        [f32; REGISTERS]: MmaAsync,
    {
        let mut sums = [[0.0; REGISTERS]; PANELS as usize];
        // SAFETY: a stage and a buffer are read between "full" and "empty" only: a stage's weights are in registers when it is
        // released, a buffer's products complete.
        unsafe {
            for _ in 0..group.steps() {
                stages.wait_full();
                let stage = Self::stage(shared, *stages);
                let panels = [0, 1].map(|panel| Rows::load(stage + Self::values(panel), stage + Self::scales(panel), fragment));
                arrive(stages.empty());
                stages.advance();

                buffers.wait_full();
                let buffer = Self::buffer(shared, *buffers);
                unroll!(WORD < LANE_WORDS as usize, {
                    let a = [panels[0].decode(WORD), panels[1].decode(WORD)];
                    // Two words' fragments at most are in use: what the oldest had is free again.
                    wgmma::wait_group::<1>();
                    wgmma::fence();
                    for half in 0..2 {
                        let chunk = (WORD * WORD_PAIRS + 2 * half) as u32;
                        let b = wgmma::descriptor(
                            buffer + chunk * Self::CHUNK_BYTES,
                            Self::CHUNK_BYTES,
                            CHUNK_ROWS * CHUNK_BYTES,
                        );
                        sums[0].mma_async(a[0][half], b, true);
                        sums[1].mma_async(a[1][half], b, true);
                    }
                    wgmma::commit_group();
                });
                wgmma::wait_group::<0>();
                sums[0].settle();
                sums[1].settle();
                arrive(buffers.empty());
                buffers.advance();
            }
        }
        sums
    }

    /// Scales, activates and writes a thread's elements of C.
    #[inline(always)]
    unsafe fn write<const REGISTERS: usize>(
        tile: &Tile,
        group: &Group,
        output: u32,
        fragment: &Fragment,
        sums: &Sums<REGISTERS>,
    ) {
        let Group { c, alpha, n, .. } = *group;
        let column = tile.first_column + fragment.first_row;
        let first_token = fragment.lane * 2;
        let store = |token: u32, column: u32, first: f32, second: f32| {
            if token < tile.tokens && column < n {
                let element = u64::from(tile.first_token + token) * u64::from(n) + u64::from(column);
                let pair = prmt_b32(convert(output, first, second), 0, fragment.in_order);
                // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                unsafe { st_global_b32(c + 2 * element, pair) };
            }
        };
        unroll!(EIGHT < REGISTERS / 4, {
            for odd in 0..2 {
                let token = first_token + (8 * EIGHT + odd) as u32;
                let (first, second) = (4 * EIGHT + odd, 4 * EIGHT + 2 + odd);
                let value = |panel: usize, register: usize| {
                    alpha[if MATRICES == 2 { panel } else { 0 }] * (UNSCALE * sums[panel][register])
                };
                if MATRICES == 2 {
                    let gated = |register| silu(value(0, register)) * value(1, register);
                    store(token, column, gated(first), gated(second));
                } else {
                    store(token, column, value(0, first), value(0, second));
                    store(token, column + PANEL_ROWS, value(1, first), value(1, second));
                }
            }
        });
    }
}

/// Arrives once for the warp, behind all that its lanes did.
#[inline(always)]
unsafe fn arrive(mbarrier: u32) {
    // SAFETY: the caller's promise: a barrier, the whole warp.
    unsafe {
        sync_warp(ALL_LANES);
        if lane_id() == 0 {
            mbarrier_arrive(mbarrier);
        }
    }
}

/// Which part of a panel is a thread's: its lane's words of two neighbouring rows.
///
/// The fragment's rows g and g+8 are the panel's rows 2g and 2g+1, neighbouring columns of C, which a thread writes
/// together; where g is odd, the other way round: so a quarter warp's eight loads meet every bank once.
struct Fragment {
    /// Its lane of those that share rows.
    lane: u32,
    /// The even one of its rows.
    first_row: u32,
    /// The fragment's rows, as rows of the panel.
    rows: [u32; 2],
    /// Selects the two rows' halves of a word in the panel's order.
    in_order: u32,
}

impl Fragment {
    #[inline(always)]
    fn new(consumer: u32) -> Self {
        let warp = thread::thread_idx_x() % WARPGROUP / WARP_SIZE;
        let (lane, pair) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let first_row = consumer * WARPGROUP_ROWS + warp * WARP_ROWS + 2 * pair;
        let odd = pair % 2;
        Self {
            lane,
            first_row,
            rows: [first_row + odd, first_row + 1 - odd],
            in_order: if odd == 0 { 0x3210 } else { 0x1032 },
        }
    }
}

/// A thread's words of a stage's panel, and their scales: two rows.
struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [[u32; LANE_SCALES as usize]; 2],
}

impl Rows {
    #[inline(always)]
    unsafe fn load(values_at: u32, scales_at: u32, fragment: &Fragment) -> Self {
        let lane = fragment.lane;
        // SAFETY: the caller's promise: a full stage.
        unsafe {
            Self {
                words: fragment.rows.map(|row| ld_shared_v4_b32(values_at + lane_offset(row, lane))),
                scales: fragment.rows.map(|row| {
                    let tile = lane / 2 * SCALE_TILE_BYTES + lane % 2 * LANE_SCALES;
                    let address = scales_at + tile + row % 32 * 16 + row / 32 * 4;
                    scales(prmt_b32(ld_shared_b16(address).into(), 0, 0x4140))
                }),
            }
        }
    }

    /// The A fragments of the two products of a word.
    #[inline(always)]
    fn decode(&self, word: usize) -> [[u32; 4]; 2] {
        let scale = word / (LANE_WORDS / LANE_SCALES) as usize;
        let [first, second] = [0, 1].map(|row| decode(self.words[row][word], self.scales[row][scale]));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}
