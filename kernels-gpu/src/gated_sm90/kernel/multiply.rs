//! The warpgroups that multiply: weights of a stage, decoded in registers, times a buffer of tokens → accumulators → C.

use cuda_std::{
    global::st_global_b32_where,
    integer::prmt_b32,
    mbarrier::{MBARRIER_BYTES, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity},
    shared::{ld_shared_b16, ld_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
    wgmma::{self, MmaAsync},
};

use super::{
    Sm90, Tiles, WARPS,
    decode::{Scales, UNSCALE, decode_weights},
    order::{CHUNK_STRIDE, LANE_SCALES, LANE_WORDS, WORD_PAIRS},
};
use crate::{
    epilogue::{convert, silu},
    format::{OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_BYTES, scale_row},
    gated_sm90::abi::{
        Group, PANELS, ROW_LANES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, STRIP_BYTES, Tile, WARPGROUP,
        WARPGROUP_ROWS, lane_offset,
    },
    ring::Ring,
};

/// Rows of a warp's A fragment.
const WARP_ROWS: u32 = 16;
const _: () = assert!(WARPGROUP_ROWS == wgmma::M && WARPS * WARP_ROWS == WARPGROUP_ROWS);

/// Accumulators of a thread for one panel of a product of so many columns.
const fn registers(width: usize) -> usize {
    WARPGROUP_ROWS as usize * width / WARPGROUP as usize
}

/// A loop as straight-line code, its index a constant: an array stays in registers only if all its indices are constants.
macro_rules! unroll {
    ($index:ident in $($value:literal)*, $body:block) => {$({
        const $index: usize = $value;
        $body
    })*};
}

/// Eights of tokens that are written by the same instructions, round after round.
const ROUND_EIGHTS: usize = 4;
const _: () = assert!(ROUND_EIGHTS == 4, "`write` names each");

/// Accumulators of a thread for one panel of a round.
const ROUND_REGISTERS: usize = registers(8 * ROUND_EIGHTS);

/// Rounds that the widest product takes.
const ROUNDS: usize = 4;

/// The sums of a tile's panels, round by round. Behind its last token, anything.
type Sums = [[[f32; ROUND_REGISTERS]; ROUNDS]; PANELS as usize];

/// Sums of so many registers a panel as those of any width.
#[inline(always)]
fn pad<const REGISTERS: usize>(sums: &[[f32; REGISTERS]; PANELS as usize]) -> Sums {
    let mut padded = [[[0.0; ROUND_REGISTERS]; ROUNDS]; PANELS as usize];
    for panel in 0..PANELS as usize {
        padded[panel].as_flattened_mut()[..REGISTERS].copy_from_slice(&sums[panel]);
    }
    padded
}

impl<const INDEX: usize> Sm90<INDEX> {
    #[inline(always)]
    pub(super) unsafe fn multiply(output: u32, mut tiles: Tiles, shared: u32, consumer: u32) {
        let fragment = Fragment::new(consumer);
        let (mut stages, mut buffers) = (Self::stages(shared), Self::buffers(shared));
        let mut turn = PingPong::new(shared + Self::TURN_BARRIERS, consumer);
        // SAFETY: the whole warpgroup is here, and goes the same way.
        unsafe {
            loop {
                let sums = Self::sum_of_width(&tiles.read(), shared, &fragment, &mut stages, &mut buffers, &mut turn);
                let tile = tiles.read();
                if output == OUTPUT_BF16 {
                    Self::write::<OUTPUT_BF16>(&tile, &fragment, sums);
                } else {
                    Self::write::<OUTPUT_F16>(&tile, &fragment, sums);
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }

    /// The sums of all products of a tile: wgmma's N is part of the instruction, so there is a main loop for each.
    #[inline(always)]
    unsafe fn sum_of_width(
        tile: &Tile,
        shared: u32,
        fragment: &Fragment,
        stages: &mut Ring,
        buffers: &mut Ring,
        turn: &mut PingPong,
    ) -> Sums {
        let width = Self::INSTANCE.mma_n(tile.tokens);
        macro_rules! widths {
            ($($width:literal)*) => {$(
                if const { Self::INSTANCE.mma_n($width) == $width && $width <= Self::INSTANCE.tile_tokens } && width == $width {
                    let sums =
                        // SAFETY: the caller's promise.
                        unsafe { Self::sum::<{ registers($width) }>(&tile.group, shared, fragment, stages, buffers, turn) };
                    return pad(&sums);
                }
            )*};
        }
        widths!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128);
        // SAFETY: a width is one of these.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// The sums of all products of a tile.
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        group: &Group,
        shared: u32,
        fragment: &Fragment,
        stages: &mut Ring,
        buffers: &mut Ring,
        turn: &mut PingPong,
    ) -> [[f32; REGISTERS]; PANELS as usize]
    where
        [f32; REGISTERS]: MmaAsync,
    {
        let mut sums = [[0.0; REGISTERS]; PANELS as usize];
        let steps = group.steps();
        // SAFETY: the whole warpgroup is here. A buffer is read while it is full, and released when its products are complete.
        unsafe {
            let decode = |panels: &Panels, word| [panels[0].decode(word), panels[1].decode(word)];
            let mut panels = Self::take(shared, fragment, stages);
            let mut a = [decode(&panels, 0), decode(&panels, 1), decode(&panels, 2), decode(&panels, 3)];
            for step in 0..steps {
                buffers.wait_full();
                let b = wgmma::descriptor(Self::buffer(shared, *buffers), CHUNK_STRIDE, STRIP_BYTES);
                if Self::PING_PONG {
                    turn.wait();
                }
                wgmma::fence();
                macro_rules! products_of_words {
                    ($($word:literal)*) => {
                        $(for half in 0..2 {
                            let b = wgmma::advance(b, ($word * WORD_PAIRS + 2 * half) as u32 * CHUNK_STRIDE);
                            sums[0].mma_async(a[$word][0][half], b, true);
                            sums[1].mma_async(a[$word][1][half], b, true);
                        })*
                        wgmma::commit_group();
                    };
                }
                products_of_words!(0 1);
                products_of_words!(2 3);
                if Self::PING_PONG {
                    turn.pass(fragment);
                }
                // The next step's fragments take the registers of those that have been multiplied: of the first group of
                // products while the second still runs.
                let more = step + 1 < steps;
                if more {
                    // Four warpgroups have no registers for both at once.
                    if Self::PING_PONG {
                        panels = Self::take(shared, fragment, stages);
                        wgmma::wait_group::<1>();
                    } else {
                        wgmma::wait_group::<1>();
                        panels = Self::take(shared, fragment, stages);
                    }
                    a[0] = decode(&panels, 0);
                    a[1] = decode(&panels, 1);
                }
                wgmma::wait_group::<0>();
                sums[0].settle();
                sums[1].settle();
                fragment.arrive(buffers.empty());
                buffers.advance();
                if more {
                    a[2] = decode(&panels, 2);
                    a[3] = decode(&panels, 3);
                }
            }
        }
        sums
    }

    /// A thread's part of a stage's weights, which it takes to registers, so that the stage is free for the next.
    #[inline(always)]
    unsafe fn take(shared: u32, fragment: &Fragment, stages: &mut Ring) -> Panels {
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
    /// A block waits for these instructions to be loaded, once a tile and after much else: so there are few, the same ones for
    /// every width and every round.
    #[inline(always)]
    unsafe fn write<const OUTPUT: u32>(tile: &Tile, fragment: &Fragment, mut sums: Sums) {
        let Group { c, alpha, n, .. } = tile.group;
        let [first, second] = fragment.rows;
        let column = tile.first_column + first.min(second);
        // Selects the two rows' halves of a word in the panel's order.
        let in_order = if first < second { 0x3210 } else { 0x1032 };
        let mut token = fragment.lane * 2;
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let element = u64::from(tile.first_token + token) * u64::from(n) + u64::from(column);
        // The addresses of the even tokens and of the odd.
        let mut rows = [c + element * ELEMENT_BYTES, c + element * ELEMENT_BYTES + row_bytes];
        // Of N = 8 and more, a panel may have none.
        let panels = [0, 1].map(|panel| column + panel * Self::INSTANCE.panel_rows() < n);
        let alpha = alpha.map(|alpha| UNSCALE * alpha);
        if !panels[0] {
            return;
        }
        while token < tile.tokens {
            let round = sums.map(|panel| panel[0]);
            unroll!(CORE in 0 1 2 3, {
                for odd in 0..2 {
                    let present =
                        const { 8 * (CORE as u32) < Self::INSTANCE.tile_tokens } && token + ((8 * CORE + odd) as u32) < tile.tokens;
                    let (first, second) = (4 * CORE + odd, 4 * CORE + 2 + odd);
                    // Branches would make each element wait for the last one's.
                    // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                    let store = |present: bool, address: u64, first: f32, second: f32| unsafe {
                        let elements = prmt_b32(convert(OUTPUT, first, second), 0, in_order);
                        st_global_b32_where(present, address, elements);
                    };
                    if Self::INSTANCE.matrices == 2 {
                        let gated =
                            |register: usize| silu(alpha[0] * round[0][register]) * (alpha[1] * round[1][register]);
                        store(present, rows[odd], gated(first), gated(second));
                    } else {
                        let panel_bytes = u64::from(Self::INSTANCE.panel_rows()) * ELEMENT_BYTES;
                        store(present, rows[odd], alpha[0] * round[0][first], alpha[0] * round[0][second]);
                        let (first, second) = (alpha[0] * round[1][first], alpha[0] * round[1][second]);
                        store(present && panels[1], rows[odd] + panel_bytes, first, second);
                    }
                    rows[odd] += 8 * row_bytes;
                }
            });
            token += 8 * ROUND_EIGHTS as u32;
            sums = sums.map(|[_, second, third, fourth]| [second, third, fourth, fourth]);
        }
    }
}

/// Whose turn it is to multiply, of two warpgroups: while the products of one run, the other decodes. Left to themselves
/// both would decode, and then both wait for the tensor core.
pub(super) struct PingPong {
    /// The barriers of this warpgroup's turns, and of the other's.
    barriers: [u32; 2],
    /// The parity of the phase after which it is this one's.
    parity: u32,
}

impl PingPong {
    /// Warpgroup 0 is the first: it waits for the phase before the first, which is complete.
    #[inline(always)]
    const fn new(barriers: u32, consumer: u32) -> Self {
        let mine = barriers + consumer * MBARRIER_BYTES;
        let other = barriers + (consumer ^ 1) * MBARRIER_BYTES;
        Self { barriers: [mine, other], parity: consumer ^ 1 }
    }

    /// Makes both barriers.
    #[inline(always)]
    pub(super) unsafe fn init(barriers: u32) {
        for consumer in 0..2 {
            // SAFETY: the caller's promise: nobody else's place, and nobody uses them yet.
            unsafe { mbarrier_init(barriers + consumer * MBARRIER_BYTES, WARPS) };
        }
    }

    #[inline(always)]
    unsafe fn wait(&mut self) {
        // SAFETY: the barriers are made; the other is at most one turn ahead.
        unsafe { mbarrier_wait_parity(self.barriers[0], self.parity) };
        self.parity ^= 1;
    }

    #[inline(always)]
    unsafe fn pass(&self, fragment: &Fragment) {
        // SAFETY: the barriers are made; the whole warp is here.
        unsafe { fragment.arrive(self.barriers[1]) };
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
    /// The fragment's rows, as rows of the panel.
    rows: [u32; 2],
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
        Self { lane, rows: [first_row + odd, first_row + 1 - odd], leads: lane == 0 && pair == 0 }
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

/// A thread's part of a stage.
type Panels = [Rows; PANELS as usize];

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
                    Scales::new(ld_shared_b16(scale_row(tile, row) + lane % 2 * LANE_SCALES))
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
