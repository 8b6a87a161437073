//! The warpgroups that multiply: weights of a stage, decoded in registers, times a buffer of tokens → accumulators → C.

use cuda_std::{
    global::st_global_b32_where,
    integer::prmt_b32,
    mbarrier::mbarrier_arrive,
    shared::{ld_shared_b16, ld_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
    wgmma::{self, MmaAsync},
};

use super::{
    Sm90, Tiles, WARPS,
    decode::{Scales, UNSCALE, decode_weights},
    order::{CHUNK_BYTES, CHUNK_ROWS, LANE_SCALES, LANE_WORDS, WORD_PAIRS},
};
use crate::{
    abi::{
        OUTPUT_BF16, OUTPUT_F16,
        sm90::{
            Group, Launch, PANELS, ROW_LANES, SCALE_TILE_BYTES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, Tile,
            WARPGROUP, WARPGROUP_ROWS, lane_offset,
        },
    },
    epilogue::{convert, silu},
    ring::Ring,
};

/// Rows of a warp's A fragment.
const WARP_ROWS: u32 = 16;
const _: () = assert!(WARPGROUP_ROWS == wgmma::M && WARPS * WARP_ROWS == WARPGROUP_ROWS);

/// Accumulators of a thread for one panel of a product of so many columns.
const fn registers(width: usize) -> usize {
    WARPGROUP_ROWS as usize * width / WARPGROUP as usize
}

/// The most accumulators of a panel that leave registers for the next step's words beside this one's fragments.
const ROOMY: usize = registers(112);

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

impl<const MATRICES: u32, const TILE_TOKENS: u32> Sm90<MATRICES, TILE_TOKENS> {
    #[inline(always)]
    pub(super) unsafe fn multiply(launch: Launch, shared: u32, consumer: u32) {
        let fragment = Fragment::new(consumer);
        let (mut stages, mut buffers) = (Self::stages(shared), Self::buffers(shared));
        // SAFETY: the whole warpgroup is here, and goes the same way.
        unsafe {
            let mut tiles = Tiles::new(launch);
            while tiles.more() {
                let (tile, group) = tiles.read();
                let width = Self::INSTANCE.width(tile.tokens);
                // wgmma's N is part of the instruction: a main loop for each.
                macro_rules! widths {
                    ($($width:literal)*) => {$(
                        if const { Self::INSTANCE.width($width) == $width && $width <= TILE_TOKENS } && width == $width {
                            let sums = Self::sum::<{ registers($width) }>(group, shared, &fragment, &mut stages, &mut buffers);
                            let (tile, group) = tiles.read();
                            if launch.output == OUTPUT_BF16 {
                                Self::write::<{ registers($width) }, OUTPUT_BF16>(&tile, group, &fragment, &sums);
                            } else {
                                Self::write::<{ registers($width) }, OUTPUT_F16>(&tile, group, &fragment, &sums);
                            }
                        }
                    )*};
                }
                widths!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128);
                tiles.advance();
            }
        }
    }

    /// The sums of all products of a tile.
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        group: &Group,
        shared: u32,
        fragment: &Fragment,
        stages: &mut Ring,
        buffers: &mut Ring,
    ) -> Sums<REGISTERS>
    where
        [f32; REGISTERS]: MmaAsync,
    {
        let mut sums = [[0.0; REGISTERS]; PANELS as usize];
        let steps = group.steps();
        // SAFETY: the whole warpgroup is here. A buffer is read while it is full, and released when its products are complete.
        unsafe {
            let mut panels = Self::take(shared, fragment, stages);
            let mut a = panels.map(|rows| rows.decode(0));
            for step in 0..steps {
                buffers.wait_full();
                let b = wgmma::descriptor(Self::buffer(shared, *buffers), Self::CHUNK_BYTES, CHUNK_ROWS * CHUNK_BYTES);
                unroll!(WORD < LANE_WORDS as usize, {
                    wgmma::fence();
                    for half in 0..2 {
                        let b = wgmma::advance(b, (WORD * WORD_PAIRS + 2 * half) as u32 * Self::CHUNK_BYTES);
                        sums[0].mma_async(a[0][half], b, true);
                        sums[1].mma_async(a[1][half], b, true);
                    }
                    wgmma::commit_group();
                    // While these products run, the next ones' fragments take the registers of those before.
                    wgmma::wait_group::<1>();
                    if WORD + 1 < LANE_WORDS as usize {
                        a = panels.map(|rows| rows.decode(WORD + 1));
                    } else if REGISTERS <= ROOMY {
                        if step + 1 < steps {
                            panels = Self::take(shared, fragment, stages);
                        }
                        // Behind the last step for nothing: registers that are in use must not come out of a choice.
                        a = panels.map(|rows| rows.decode(0));
                    }
                });
                wgmma::wait_group::<0>();
                sums[0].settle();
                sums[1].settle();
                fragment.arrive(buffers.empty());
                buffers.advance();
                if REGISTERS > ROOMY && step + 1 < steps {
                    panels = Self::take(shared, fragment, stages);
                    a = panels.map(|rows| rows.decode(0));
                }
            }
        }
        sums
    }

    /// A thread's part of a stage's weights, which it takes to registers, so that the stage is free for the next.
    #[inline(always)]
    unsafe fn take(shared: u32, fragment: &Fragment, stages: &mut Ring) -> [Rows; PANELS as usize] {
        // SAFETY: a stage is read between "full" and "empty".
        unsafe {
            stages.wait_full();
            let stage = Self::stage(shared, *stages);
            let panels = [0, 1].map(|panel| Rows::load(stage + Self::panel(panel), fragment));
            fragment.arrive(stages.empty());
            stages.advance();
            panels
        }
    }

    /// Scales, activates and writes a thread's elements of C.
    ///
    /// Straight-line code that runs once a tile: it waits for its instructions, so there are as few as can be.
    #[inline(always)]
    unsafe fn write<const REGISTERS: usize, const OUTPUT: u32>(
        tile: &Tile,
        group: &Group,
        fragment: &Fragment,
        sums: &Sums<REGISTERS>,
    ) {
        let Group { c, alpha, n, .. } = *group;
        let column = tile.first_column + fragment.first_row;
        let first_token = fragment.lane * 2;
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let element = u64::from(tile.first_token + first_token) * u64::from(n) + u64::from(column);
        // The addresses of the even tokens and of the odd.
        let mut rows = [c + element * ELEMENT_BYTES, c + element * ELEMENT_BYTES + row_bytes];
        // Of N = 8 and more, a panel may have none.
        let panels = [0, 1].map(|panel| column + panel * Self::INSTANCE.panel_rows() < n);
        let alpha = alpha.map(|alpha| UNSCALE * alpha);
        if !panels[0] {
            return;
        }
        unroll!(EIGHT < REGISTERS / 4, {
            for odd in 0..2 {
                let present = first_token + ((8 * EIGHT + odd) as u32) < tile.tokens;
                let (first, second) = (4 * EIGHT + odd, 4 * EIGHT + 2 + odd);
                // Branches would make each element wait for the last one's.
                // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                let store = |present: bool, address: u64, first: f32, second: f32| unsafe {
                    let elements = prmt_b32(convert(OUTPUT, first, second), 0, fragment.in_order);
                    st_global_b32_where(present, address, elements);
                };
                if MATRICES == 2 {
                    let gated = |register: usize| silu(alpha[0] * sums[0][register]) * (alpha[1] * sums[1][register]);
                    store(present, rows[odd], gated(first), gated(second));
                } else {
                    let panel_bytes = u64::from(Self::INSTANCE.panel_rows()) * ELEMENT_BYTES;
                    store(present, rows[odd], alpha[0] * sums[0][first], alpha[0] * sums[0][second]);
                    let (first, second) = (alpha[0] * sums[1][first], alpha[0] * sums[1][second]);
                    store(present && panels[1], rows[odd] + panel_bytes, first, second);
                }
                rows[odd] += 8 * row_bytes;
            }
        });
    }
}

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

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
    /// Whether the thread arrives at barriers for its warp.
    leads: bool,
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
            leads: lane == 0 && pair == 0,
        }
    }

    /// Arrives once for the warp, behind all that its lanes did.
    #[inline(always)]
    unsafe fn arrive(&self, mbarrier: u32) {
        // SAFETY: the caller's promise: a barrier, the whole warp.
        unsafe {
            sync_warp(ALL_LANES);
            if self.leads {
                mbarrier_arrive(mbarrier);
            }
        }
    }
}

/// A thread's words of a stage's panel, and their scales: two rows.
#[derive(Clone, Copy)]
struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [Scales; 2],
}

impl Rows {
    #[inline(always)]
    unsafe fn load(panel: u32, fragment: &Fragment) -> Self {
        let lane = fragment.lane;
        let slab = |row: u32| panel + row / SLAB_ROWS * SLAB_BYTES;
        // SAFETY: the caller's promise: a full stage.
        unsafe {
            Self {
                words: fragment.rows.map(|row| ld_shared_v4_b32(slab(row) + lane_offset(row % SLAB_ROWS, lane))),
                scales: fragment.rows.map(|row| {
                    let tile = slab(row) + SLAB_VALUE_BYTES + lane / 2 * SCALE_TILE_BYTES;
                    let address = tile + row % 32 * 16 + row % SLAB_ROWS / 32 * 4 + lane % 2 * LANE_SCALES;
                    Scales::new(ld_shared_b16(address))
                }),
            }
        }
    }

    /// The A fragments of the two products of a word.
    #[inline(always)]
    fn decode(&self, word: usize) -> [[u32; 4]; 2] {
        let scale = word / (LANE_WORDS / LANE_SCALES) as usize;
        let [first, second] = [0, 1].map(|row| decode_weights(self.words[row][word], self.scales[row].twice(scale)));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}
