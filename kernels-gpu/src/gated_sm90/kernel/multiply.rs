//! The warpgroups that multiply: stages of weights, decoded in registers, times buffers of tokens → accumulators → C.

use cuda_std::{
    global::{GlobalAddress, st_global_b32_where},
    integer::prmt_b32,
    mbarrier::{Mbarrier, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity},
    shared::{SharedAddress, ld_shared_b16, ld_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
    wgmma::{self, MatrixDescriptor, MmaAsync},
};

use super::{
    Sm90, Tiles, WARPS,
    decode::{Scales, UNSCALE, decode_weights},
    order::{CORE_MATRIX_BYTES, LANE_SCALES, LANE_WORDS, WORD_PAIRS},
};
use crate::{
    epilogue::{convert, silu},
    format::{OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_BYTES, scale_row},
    gated_sm90::abi::{
        CORE_MATRIX_ROWS, Group, MAX_TILE_TOKENS, PANELS, ROW_LANES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES,
        STRIP_BYTES, Tile, WARPGROUP, WARPGROUP_ROWS, lane_offset,
    },
    ring::Ring,
};

/// Rows of a warp's A fragment.
const WARP_ROWS: u32 = 16;
const _: () = assert!(WARPGROUP_ROWS == wgmma::M && WARPS * WARP_ROWS == WARPGROUP_ROWS);

/// Accumulators of a thread for one panel of a product with this N.
const fn registers(n: usize) -> usize {
    WARPGROUP_ROWS as usize * n / WARPGROUP as usize
}

/// A loop as straight-line code. Its index is a constant, since an array stays in registers only if all its indices are.
macro_rules! unroll {
    ($index:ident in $($value:literal)*, $body:block) => {$({
        const $index: usize = $value;
        $body
    })*};
}

/// Tokens that the same instructions write to C, round after round.
const ROUND_TOKENS: usize = 32;

/// Tokens of a core matrix: a thread has two neighbouring ones of each in its accumulators.
const CORE_TOKENS: usize = CORE_MATRIX_ROWS as usize;
const _: () =
    assert!(ROUND_TOKENS == 4 * CORE_TOKENS, "`write` has a copy of its body for each core matrix of a round");

/// Accumulators of a thread for one core matrix of one panel.
const CORE_REGISTERS: usize = registers(CORE_TOKENS);

/// Accumulators of a thread for one panel of a round.
const ROUND_REGISTERS: usize = registers(ROUND_TOKENS);

/// Rounds of the largest tile.
const ROUNDS: usize = MAX_TILE_TOKENS as usize / ROUND_TOKENS;
const _: () = assert!(ROUNDS == 4, "`write` names each round");

/// The sums of a tile's panels, round by round. After the tile's last token they may be anything.
type Sums = [[[f32; ROUND_REGISTERS]; ROUNDS]; PANELS as usize];

/// The sums of a product as those of the largest tile.
#[inline(always)]
fn pad<const REGISTERS: usize>(sums: &[[f32; REGISTERS]; PANELS as usize]) -> Sums {
    let mut padded = [[[0.0; ROUND_REGISTERS]; ROUNDS]; PANELS as usize];
    for panel in 0..PANELS as usize {
        padded[panel].as_flattened_mut()[..REGISTERS].copy_from_slice(&sums[panel]);
    }
    padded
}

impl<const INDEX: usize> Sm90<INDEX> {
    /// Multiplies and writes the block's tiles. One warpgroup, the `consumer`-th of those that multiply.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warpgroup calls it together, and
    /// so does every other one that multiplies, with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(output: u32, mut tiles: Tiles, shared: SharedAddress, consumer: u32) {
        let fragment = Fragment::new(consumer);
        let (mut stages, mut buffers) = (Self::stages(shared), Self::buffers(shared));
        let mut turns = PingPong::new(Self::turn_barriers(shared), consumer);
        // SAFETY: the whole warpgroup is here and takes the same way. The tile is the block's.
        unsafe {
            loop {
                let sums = Self::sum_tile(&tiles.read(), shared, &fragment, &mut stages, &mut buffers, &mut turns);
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

    /// The sums of all products of a tile. `wgmma`'s N is part of the instruction, so that there is a main loop for each N.
    ///
    /// # Safety
    /// As [`Self::sum`].
    #[inline(always)]
    unsafe fn sum_tile(
        tile: &Tile,
        shared: SharedAddress,
        fragment: &Fragment,
        stages: &mut Ring,
        buffers: &mut Ring,
        turns: &mut PingPong,
    ) -> Sums {
        let n = Self::INSTANCE.mma_n(tile.tokens);
        macro_rules! main_loops {
            ($($n:literal)*) => {$(
                if const { Self::INSTANCE.mma_n($n) == $n && $n <= Self::INSTANCE.tile_tokens } && n == $n {
                    // SAFETY: what `# Safety` above asks.
                    let sums = unsafe {
                        Self::sum::<{ registers($n) }>(&tile.group, shared, fragment, stages, buffers, turns)
                    };
                    return pad(&sums);
                }
            )*};
        }
        main_loops!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128);
        // SAFETY: a tile has no more tokens than its instance, which has no more than `MAX_TILE_TOKENS`.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// The main loop: the sums of all products of a tile.
    ///
    /// # Safety
    /// The barriers have been initialised. The whole warpgroup calls it together, with its own fragment, rings and turns, for
    /// each of the block's tiles in order.
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        group: &Group,
        shared: SharedAddress,
        fragment: &Fragment,
        stages: &mut Ring,
        buffers: &mut Ring,
        turns: &mut PingPong,
    ) -> [[f32; REGISTERS]; PANELS as usize]
    where
        [f32; REGISTERS]: MmaAsync,
    {
        let mut sums = [[0.0; REGISTERS]; PANELS as usize];
        let k_blocks = group.k_blocks();
        // SAFETY: the whole warpgroup is here. A buffer is read while it is full, and released when its products are complete.
        unsafe {
            let decode = |panels: &Panels, word| [panels[0].decode(word), panels[1].decode(word)];
            let mut panels = Self::take(shared, fragment, stages);
            let mut a = [decode(&panels, 0), decode(&panels, 1), decode(&panels, 2), decode(&panels, 3)];
            for k_block in 0..k_blocks {
                buffers.wait_full();
                let b = MatrixDescriptor::new(Self::buffer(shared, *buffers), CORE_MATRIX_BYTES, STRIP_BYTES);
                if Self::PING_PONG {
                    turns.wait();
                }
                wgmma::fence();
                macro_rules! products_of_words {
                    ($($word:literal)*) => {
                        $(for half in 0..2 {
                            let b = b.advance(($word * WORD_PAIRS + 2 * half) as u32 * CORE_MATRIX_BYTES);
                            sums[0].mma_async(a[$word][0][half], b, true);
                            sums[1].mma_async(a[$word][1][half], b, true);
                        })*
                        wgmma::commit_group();
                    };
                }
                products_of_words!(0 1);
                products_of_words!(2 3);
                if Self::PING_PONG {
                    turns.pass(fragment);
                }
                // The next k-block's fragments take the registers of those that have been multiplied: first those of the first
                // group of products, while the second group still runs.
                let more = k_block + 1 < k_blocks;
                if more {
                    // Four warpgroups lack the registers to load before the first group is complete.
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

    /// Takes a thread's part of the next stage's weights to registers, so that the stage is free again.
    ///
    /// # Safety
    /// As [`Self::sum`].
    #[inline(always)]
    unsafe fn take(shared: SharedAddress, fragment: &Fragment, stages: &mut Ring) -> Panels {
        // SAFETY: the stage is read after it is full and before this warp says that it is empty.
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
    /// These instructions run once a tile, after so many others that they have left the instruction cache. So there are few of
    /// them: the same ones for every N and for every round.
    ///
    /// # Safety
    /// The contract holds of `tile`. `sums` are its sums, and `fragment` says which of them are this thread's.
    #[inline(always)]
    unsafe fn write<const OUTPUT: u32>(tile: &Tile, fragment: &Fragment, mut sums: Sums) {
        let Group { c, alpha, n, .. } = tile.group;
        let [first, second] = fragment.rows;
        let column = tile.first_column + first.min(second);
        // For `prmt`: the halves of a word, one for each row, in the order in which the rows lie in the panel.
        let in_order = if first < second { 0x3210 } else { 0x1032 };
        let mut token = fragment.lane * 2;
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let element = u64::from(tile.first_token + token) * u64::from(n) + u64::from(column);
        // The addresses of this thread's even token and of its odd one, which is the next.
        let even = GlobalAddress::new(c) + element * ELEMENT_BYTES;
        let mut rows = [even, even + row_bytes];
        // Whether C has the columns of each panel. A panel may lie outside of C, since N may be as small as 8.
        let panels = [0, 1].map(|panel| column + panel * Self::INSTANCE.panel_rows() < n);
        let alpha = alpha.map(|alpha| UNSCALE * alpha);
        if !panels[0] {
            return;
        }
        while token < tile.tokens {
            let round = sums.map(|panel| panel[0]);
            unroll!(CORE in 0 1 2 3, {
                for odd in 0..2 {
                    let in_round = CORE * CORE_TOKENS + odd;
                    let present = const { Self::INSTANCE.tile_tokens > (CORE * CORE_TOKENS) as u32 }
                        && token + (in_round as u32) < tile.tokens;
                    let (first, second) = (CORE * CORE_REGISTERS + odd, CORE * CORE_REGISTERS + 2 + odd);
                    // Predicated, because with branches each element would wait for the one before it.
                    // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                    let store = |present: bool, address: GlobalAddress, first: f32, second: f32| unsafe {
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
                    rows[odd] = rows[odd] + CORE_TOKENS as u64 * row_bytes;
                }
            });
            token += ROUND_TOKENS as u32;
            sums = sums.map(|[_, second, third, fourth]| [second, third, fourth, fourth]);
        }
    }
}

/// Ping-pong of two warpgroups: while the products of one run, the other decodes. Left to themselves, both would decode at the
/// same time, and then both would wait for the tensor core.
pub(super) struct PingPong {
    /// The barriers of this warpgroup's turns, and of the other's.
    barriers: [Mbarrier; 2],
    /// The parity of the phase after which it is this one's turn.
    parity: u32,
}

impl PingPong {
    /// Warpgroup 0 has the first turn: it waits for the phase before the first, which is complete.
    #[inline(always)]
    const fn new(barriers: Mbarrier, consumer: u32) -> Self {
        Self { barriers: [barriers.nth(consumer), barriers.nth(consumer ^ 1)], parity: consumer ^ 1 }
    }

    /// Initialises both barriers.
    ///
    /// # Safety
    /// Nothing else uses their place in shared memory. Other threads use them only after a barrier of the block.
    #[inline(always)]
    pub(super) unsafe fn init(barriers: Mbarrier) {
        for consumer in 0..2 {
            // SAFETY: what `# Safety` above asks.
            unsafe { mbarrier_init(barriers.nth(consumer), WARPS) };
        }
    }

    /// Waits for this warpgroup's turn.
    ///
    /// # Safety
    /// The barriers have been initialised. The warpgroup waits and passes alternately.
    #[inline(always)]
    unsafe fn wait(&mut self) {
        // SAFETY: the phase is the current one or the one before, since the other warpgroup is at most one turn ahead.
        unsafe { mbarrier_wait_parity(self.barriers[0], self.parity) };
        self.parity ^= 1;
    }

    /// Gives the turn to the other warpgroup.
    ///
    /// # Safety
    /// As [`Self::wait`]; every warp of the warpgroup passes, all of its lanes together.
    #[inline(always)]
    unsafe fn pass(&self, fragment: &Fragment) {
        // SAFETY: a phase of the barrier takes an arrival of each warp of this warpgroup.
        unsafe { fragment.arrive(self.barriers[1]) };
    }
}

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

/// Which part of a panel is a thread's: words of two rows, and which words of them.
///
/// A thread has rows g and g+8 of its warp's 16 rows of `wgmma`'s A (PTX ISA, "Register Fragments for wgmma.mma_async"). They are
/// the panel's rows 2g and 2g+1: neighbouring columns of C, which a thread writes together. Where g is odd they are exchanged,
/// so that the eight loads of a quarter warp meet every bank of shared memory once.
struct Fragment {
    /// The thread's place among the lanes that share its rows.
    lane: u32,
    /// Rows g and g+8, as rows of the panel.
    rows: [u32; 2],
    /// Whether the thread arrives at barriers for its warp.
    leads: bool,
}

impl Fragment {
    /// This thread's, in the `consumer`-th warpgroup that multiplies.
    #[inline(always)]
    fn new(consumer: u32) -> Self {
        let warp = thread::thread_idx_x() % WARPGROUP / WARP_SIZE;
        let (lane, pair) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let first_row = consumer * WARPGROUP_ROWS + warp * WARP_ROWS + 2 * pair;
        let odd = pair % 2;
        Self { lane, rows: [first_row + odd, first_row + 1 - odd], leads: lane == 0 && pair == 0 }
    }

    /// Arrives once for the warp, after all that its lanes have done.
    ///
    /// # Safety
    /// The barrier has been initialised, and its phase lacks an arrival. The whole warp calls it together.
    #[inline(always)]
    unsafe fn arrive(&self, mbarrier: Mbarrier) {
        // SAFETY: what `# Safety` above asks.
        unsafe {
            sync_warp(ALL_LANES);
            if self.leads {
                mbarrier_arrive(mbarrier);
            }
        }
    }
}

/// A thread's part of a stage, packed.
type Panels = [Rows; PANELS as usize];

/// A thread's words of two rows of a stage's panel, and the scales of these words.
#[derive(Clone, Copy)]
struct Rows {
    words: [[u32; LANE_WORDS as usize]; 2],
    scales: [Scales; 2],
}

impl Rows {
    /// Loads them of the panel at this address.
    ///
    /// # Safety
    /// The panel's stage is full.
    #[inline(always)]
    unsafe fn load(panel: SharedAddress, fragment: &Fragment) -> Self {
        let lane = fragment.lane;
        let slab = |row: u32| panel + row / SLAB_ROWS * SLAB_BYTES;
        // SAFETY: inside of the panel, which is full; a slab lies at a multiple of 16.
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

    /// The A fragments of the two products that a word serves.
    #[inline(always)]
    fn decode(&self, word: usize) -> [[u32; 4]; 2] {
        let scale = word / (LANE_WORDS / LANE_SCALES) as usize;
        let [first, second] = [0, 1].map(|row| decode_weights(self.words[row][word], self.scales[row].twice(scale)));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}
