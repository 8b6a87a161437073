//! Lists of each expert's rows, by counting.
//!
//! Each warp of the cluster has a segment of the choices. First it counts its choices of each expert, which also gives each choice
//! its rank among those of the segment and expert. Then each thread has an expert, and adds up what the warps before have of it;
//! blocks tell each other their totals. A scan over experts says where each one begins. At last a choice's row is the first of its
//! segment and expert, plus its rank. So rows are in the order of choices, and nothing depends on who comes first.

use core::hint::assert_unchecked;

use cuda_std::{
    cluster::{
        arrive_cluster_relaxed, cluster_rank, cluster_size, mapa, st_shared_cluster_b32, sync_cluster, wait_cluster,
    },
    global::{GlobalAddress, ld_global_b32_or_zero, prefetch_l1, st_global_b32_where},
    griddepcontrol::griddepcontrol_wait,
    shared::{
        SharedAddress, atom_shared_add_u32_or, dynamic_shared_address, ld_shared_b32, ld_shared_v4_b32, st_shared_b32,
    },
    thread,
    warp::{
        ALL_LANES, WARP_SIZE, lane_id, lanes_below, sync_warp, warp_shuffle_idx, warp_shuffle_up, warp_vote_ballot,
    },
};

use crate::moe_route::abi::{Lists, MAX_EXPERTS, NO_ROW, Route, token_tiles};

/// Choices of a thread in a group.
const ROUNDS: usize = 16;

/// Rounds that are done or left out together.
const PAIR: usize = 2;

/// Repeats a block for the rounds in which a group has choices, and up to one more.
macro_rules! rounds {
    ($round:ident of $group:ident => $block:block) => {
        unrolled!(pair in [0 1 2 3 4 5 6 7] while (pair * PAIR) as u32 * WARP_SIZE < $group.left => {
            for $round in 0..PAIR {
                let $round = pair * PAIR + $round;
                $block
            }
        })
    };
}

/// Choices of a warp that are in registers at a time.
const GROUP: u32 = ROUNDS as u32 * WARP_SIZE;

/// Bits of an expert's number.
const EXPERT_BITS: u32 = MAX_EXPERTS.trailing_zeros();

const _: () = assert!(1 << EXPERT_BITS == MAX_EXPERTS && Route::THREADS == MAX_EXPERTS && ROUNDS == 8 * PAIR);

/// Warps whose counts are added up together.
const SOME_WARPS: usize = Route::WARPS as usize / 4;

/// Bytes of a number in lists and in shared memory.
const NUMBER: u32 = size_of::<u32>() as u32;

/// Numbers that a line of the first-level cache has.
const LINE_NUMBERS: u32 = 128 / NUMBER;

/// Makes the lists, as a block of the first cluster.
///
/// # Safety
/// The contract in `moe_route/mod.rs`. All threads of the first cluster call it, of whole warps.
#[inline(always)]
pub(super) unsafe fn make(route: &Route) {
    let (blocks, block) = (cluster_size(), cluster_rank());
    let (thread, warp) = (thread::thread_idx_x(), thread::thread_idx_x() / WARP_SIZE);
    let shared = Shared { experts: route.experts };
    let counts = shared.count(warp, 0);
    // SAFETY: tiles have tokens, and a cluster has blocks.
    unsafe { assert_unchecked(route.tile_tokens > 0 && blocks > 0 && blocks <= Route::MAX_CLUSTER) };
    let segment = Segment::new(route, blocks * Route::WARPS, block * Route::WARPS + warp);
    let lists = Lists::filled(u64::from(segment.choices), route.experts, route.row_multiple);
    let list = |offset: u64| GlobalAddress::new(route.lists) + offset;
    let (rows, places) = (list(lists.rows), list(lists.places));
    // SAFETY: every thread comes here, so that all are at each barrier. Until the first one, a warp's counts are its own; until the
    // last one, those of an expert are one thread's. Totals are written when all blocks have begun, each by one thread, and are
    // read behind a barrier of the cluster; nobody reaches another block after it.
    unsafe {
        let mut expert = lane_id();
        while expert < route.experts {
            st_shared_b32(shared.count(warp, expert), expert);
            expert += WARP_SIZE;
        }
        sync_warp(ALL_LANES);
        if blocks > 1 {
            arrive_cluster_relaxed();
        }
        if route.map != 0 && thread * LINE_NUMBERS < route.named_experts {
            prefetch_l1(GlobalAddress::new(route.map) + u64::from(thread * LINE_NUMBERS * NUMBER));
        }
        griddepcontrol_wait();
        let mut first = segment.begin;
        let mut group = loop {
            let mut group = Group::load(&segment, first, route);
            group.rank(counts);
            first += GROUP;
            if first >= segment.end {
                break group;
            }
            group.keep(places);
        };
        thread::sync_threads();

        let (is_expert, mut rows_here) = (thread < route.experts, 0);
        if is_expert {
            // Those that have choices are the first ones.
            unrolled!(some in [0 1 2 3] while (some * SOME_WARPS) as u32 * segment.length < segment.block_choices => {
                let mut rows = [0; SOME_WARPS];
                for warp in 0..SOME_WARPS {
                    rows[warp] = ld_shared_b32(shared.count((some * SOME_WARPS + warp) as u32, thread)) >> EXPERT_BITS;
                }
                for warp in 0..SOME_WARPS {
                    st_shared_b32(shared.count((some * SOME_WARPS + warp) as u32, thread), rows_here);
                    rows_here += rows[warp];
                }
            });
        }
        let (mut rows_before, mut rows_of_all) = (0, rows_here);
        if blocks > 1 {
            wait_cluster();
            if is_expert {
                for other in 0..blocks {
                    st_shared_cluster_b32(mapa(shared.total(block, thread), other), rows_here);
                }
            }
            sync_cluster();
            if is_expert {
                rows_of_all = 0;
                for other in 0..blocks {
                    let total = ld_shared_b32(shared.total(other, thread));
                    rows_before += if other < block { total } else { 0 };
                    rows_of_all += total;
                }
            }
        }
        let sums = shared.sums();
        let rows_filled = filled(rows_of_all, route.row_multiple);
        let rows_in_warp = scan_warp(rows_filled, sums);
        let tiles_in_warp = scan_warp(token_tiles(rows_filled, route.tile_tokens), sums + Route::WARPS * NUMBER);
        thread::sync_threads();
        let end = rows_in_warp + warps_before(sums);
        let begin = end - rows_filled;
        if is_expert {
            st_shared_b32(shared.first(thread), begin + rows_before);
        }
        thread::sync_threads();

        group.place(counts, shared.first(0), rows, places);
        while group.first > segment.begin {
            group = Group::kept(&segment, group.first - GROUP, places);
            group.place(counts, shared.first(0), rows, places);
        }
        if block == 0 {
            let tiles_end = tiles_in_warp + warps_before(sums + Route::WARPS * NUMBER);
            let number = |offset: u64, index: u32| list(offset) + u64::from(index * NUMBER);
            st_global_b32_where(thread < Lists::TICKETS, number(lists.tickets, thread), 0);
            st_global_b32_where(thread == 0, number(lists.firsts, 0), 0);
            st_global_b32_where(thread == 0, number(lists.tile_firsts, 0), 0);
            st_global_b32_where(is_expert, number(lists.firsts, thread + 1), end);
            st_global_b32_where(is_expert, number(lists.tile_firsts, thread + 1), tiles_end);
            for row in begin + rows_of_all..end {
                st_global_b32_where(true, number(lists.rows, row), NO_ROW);
            }
        }
    }
}

/// The sum of a number of each lane over the lanes up to this one. The sum of all is left in `sums` at the warp's place.
///
/// # Safety
/// All threads of the block call it together. There is room for a sum of each warp, which nobody reads before the next barrier.
#[inline(always)]
unsafe fn scan_warp(mut number: u32, sums: SharedAddress) -> u32 {
    // SAFETY: whole warps come here. A warp's place is written by one thread.
    unsafe {
        for step in 0..WARP_SIZE.ilog2() {
            let (other, is_there) = warp_shuffle_up(ALL_LANES, number, 1 << step, WARP_SIZE);
            number += if is_there { other } else { 0 };
        }
        if lane_id() == WARP_SIZE - 1 {
            st_shared_b32(sums + thread::thread_idx_x() / WARP_SIZE * NUMBER, number);
        }
    }
    number
}

/// The sum of what [`scan_warp`] has left for the warps before this one.
///
/// # Safety
/// All threads of the block have called it, and a barrier since then.
#[inline(always)]
unsafe fn warps_before(sums: SharedAddress) -> u32 {
    let (warp, mut before) = (thread::thread_idx_x() / WARP_SIZE, 0);
    for four in 0..Route::WARPS / 4 {
        // SAFETY: nobody writes the sums any more.
        let sums = unsafe { ld_shared_v4_b32(sums + four * 4 * NUMBER) };
        for index in 0..4 {
            before += if four * 4 + index < warp { sums[index as usize] } else { 0 };
        }
    }
    before
}

/// The lanes that have the same expert as this one, of those that have one.
///
/// A vote for each bit of its number: `match.any` does the same in one instruction, which takes an H200 longer
/// (docs/experiments.md).
///
/// # Safety
/// The whole warp calls it together.
#[inline(always)]
unsafe fn lanes_with(expert: u32) -> u32 {
    // SAFETY: the whole warp is here.
    unsafe {
        let mut same = warp_vote_ballot(ALL_LANES, expert != NO_ROW);
        for bit in 0..EXPERT_BITS {
            let has_bit = expert & 1 << bit != 0;
            let with_bit = warp_vote_ballot(ALL_LANES, has_bit);
            same &= if has_bit { with_bit } else { !with_bit };
        }
        same
    }
}

/// Where things lie in a block's shared memory.
#[derive(Clone, Copy)]
struct Shared {
    experts: u32,
}

impl Shared {
    /// Two sums of each warp; a multiple of 16.
    #[inline(always)]
    fn sums(self) -> SharedAddress {
        dynamic_shared_address()
    }

    /// How many rows a warp has of an expert, beside the expert's number; later, how many the warps before have.
    #[inline(always)]
    fn count(self, warp: u32, expert: u32) -> SharedAddress {
        self.sums() + (2 * Route::WARPS + warp * self.experts + expert) * NUMBER
    }

    /// The first row that this block has of an expert.
    #[inline(always)]
    fn first(self, expert: u32) -> SharedAddress {
        self.count(Route::WARPS, expert)
    }

    /// How many rows a block of the cluster has of an expert.
    #[inline(always)]
    fn total(self, block: u32, expert: u32) -> SharedAddress {
        self.count(Route::WARPS + 1 + block, expert)
    }
}

/// A warp's part of the choices.
struct Segment {
    /// Its first choice.
    begin: u32,
    /// The choice behind its last one.
    end: u32,
    /// Choices of each segment but the last ones.
    length: u32,
    /// Choices of this block from its first segment on, and of later blocks.
    block_choices: u32,
    /// Choices of all segments.
    choices: u32,
    top_k: u32,
}

impl Segment {
    /// The `index`-th of so many.
    #[inline(always)]
    fn new(route: &Route, segments: u32, index: u32) -> Self {
        let choices = route.token_count * route.top_k;
        let length = choices.div_ceil(segments).next_multiple_of(WARP_SIZE);
        let begin = (index * length).min(choices);
        let of_block = (index / Route::WARPS * Route::WARPS * length).min(choices);
        Self {
            begin,
            end: (begin + length).min(choices),
            length,
            block_choices: choices - of_block,
            choices,
            top_k: route.top_k,
        }
    }
}

/// Some choices of a segment: in each round a choice of each lane, one after the other.
struct Group {
    /// The first one.
    first: u32,
    /// Choices from the first one to the end of the segment.
    left: u32,
    /// Of this lane's first choice.
    token: Token,
    /// What is known of this lane's choices: the expert, once ranked with the rank above it, or [`NO_ROW`].
    choices: [u32; ROUNDS],
}

impl Group {
    /// The group that begins with a choice, its choices without a row so far.
    #[inline(always)]
    fn at(segment: &Segment, first: u32) -> Self {
        let token = Token::of(first + lane_id(), segment.top_k);
        Self { first, left: segment.end - first, token, choices: [NO_ROW; ROUNDS] }
    }

    /// Whether this lane has a choice in a round.
    #[inline(always)]
    fn has(&self, round: usize) -> bool {
        round as u32 * WARP_SIZE + lane_id() < self.left
    }

    /// Where an array has the number of this lane's choice in a round.
    #[inline(always)]
    fn place_in(&self, numbers: GlobalAddress, round: usize) -> GlobalAddress {
        numbers + u64::from(self.first + lane_id()) * u64::from(NUMBER) + u64::from(round as u32 * WARP_SIZE * NUMBER)
    }

    /// Loads the experts of a group.
    ///
    /// # Safety
    /// The contract, and the grid before has ended.
    #[inline(always)]
    unsafe fn load(segment: &Segment, first: u32, route: &Route) -> Self {
        let mut this = Self::at(segment, first);
        // SAFETY: choices of the segment, and experts that can be named.
        unsafe {
            rounds!(round of this => {
                let id = this.place_in(GlobalAddress::new(route.ids), round);
                this.choices[round] = ld_global_b32_or_zero(this.has(round), id);
            });
            rounds!(round of this => {
                // Negative ones are large here.
                let is_named = this.has(round) && this.choices[round] < route.named_experts;
                this.choices[round] = if is_named { this.choices[round] } else { NO_ROW };
            });
            if route.map != 0 {
                rounds!(round of this => {
                    let id = this.choices[round];
                    let number = GlobalAddress::new(route.map) + u64::from(id) * u64::from(NUMBER);
                    let number = ld_global_b32_or_zero(id != NO_ROW, number);
                    this.choices[round] = if id == NO_ROW { NO_ROW } else { number };
                });
            }
        }
        rounds!(round of this => {
            this.choices[round] = if this.choices[round] < route.experts { this.choices[round] } else { NO_ROW };
        });
        this
    }

    /// Counts the choices of each expert, and gives each its rank.
    ///
    /// # Safety
    /// The whole warp calls it together. The counts are its own.
    #[inline(always)]
    unsafe fn rank(&mut self, counts: SharedAddress) {
        let mut same = [0; ROUNDS];
        // SAFETY: the whole warp has the same rounds.
        unsafe {
            rounds!(round of self => {
                same[round] = lanes_with(self.choices[round]);
            });
            rounds!(round of self => {
                // The first lane of those with the same expert counts for all of them.
                let choice = self.choices[round];
                let is_first = choice != NO_ROW && same[round] & lanes_below() == 0;
                let count = counts + if is_first { choice * NUMBER } else { 0 };
                let more = same[round].count_ones() << EXPERT_BITS;
                self.choices[round] = atom_shared_add_u32_or(is_first, count, more, choice);
                sync_warp(ALL_LANES);
            });
            rounds!(round of self => {
                let first_lane = same[round].trailing_zeros();
                let (first, _) = warp_shuffle_idx(ALL_LANES, self.choices[round], first_lane, WARP_SIZE);
                if self.choices[round] != NO_ROW {
                    self.choices[round] = first + ((same[round] & lanes_below()).count_ones() << EXPERT_BITS);
                }
            });
        }
    }

    /// Leaves the choices in the list of places, while the warp goes on to its next group.
    ///
    /// # Safety
    /// The list is there, and nobody else accesses these places.
    #[inline(always)]
    unsafe fn keep(&self, places: GlobalAddress) {
        rounds!(round of self => {
            // SAFETY: the choice's own place.
            unsafe { st_global_b32_where(self.has(round), self.place_in(places, round), self.choices[round]) };
        });
    }

    /// The group that begins with a choice, as it was left by [`Self::keep`].
    ///
    /// # Safety
    /// It was.
    #[inline(always)]
    unsafe fn kept(segment: &Segment, first: u32, places: GlobalAddress) -> Self {
        let mut this = Self::at(segment, first);
        rounds!(round of this => {
            // SAFETY: this thread has written it.
            this.choices[round] = unsafe { ld_global_b32_or_zero(this.has(round), this.place_in(places, round)) };
        });
        this
    }

    /// Writes the choices' rows.
    ///
    /// # Safety
    /// `before` has the rows of each expert that segments before this one have in the block, `firsts` the block's first rows. The
    /// lists are there, and nobody else writes these places.
    #[inline(always)]
    unsafe fn place(&self, before: SharedAddress, firsts: SharedAddress, rows: GlobalAddress, places: GlobalAddress) {
        let mut token = self.token;
        rounds!(round of self => {
            let known = self.choices[round];
            let has_row = self.has(round) && known != NO_ROW;
            let expert = if has_row { known % MAX_EXPERTS } else { 0 };
            // SAFETY: an expert's count; the choice's own row and place.
            unsafe {
                let first = ld_shared_b32(firsts + expert * NUMBER) + ld_shared_b32(before + expert * NUMBER);
                let row = first + (known >> EXPERT_BITS);
                let place = if has_row { row } else { NO_ROW };
                st_global_b32_where(has_row, rows + u64::from(row) * u64::from(NUMBER), token.index);
                st_global_b32_where(self.has(round), self.place_in(places, round), place);
            }
            token.advance();
        });
    }
}

/// The token of a choice.
#[derive(Clone, Copy)]
struct Token {
    index: u32,
    /// Which of the token's choices it is.
    choice: u32,
    top_k: u32,
}

impl Token {
    #[inline(always)]
    fn of(choice: u32, top_k: u32) -> Self {
        // SAFETY: a token names experts.
        unsafe { assert_unchecked(top_k > 0) };
        Self { index: choice / top_k, choice: choice % top_k, top_k }
    }

    /// Goes to the token of the choice that this lane has in the next round.
    #[inline(always)]
    fn advance(&mut self) {
        // SAFETY: a token names experts.
        unsafe { assert_unchecked(self.top_k > 0) };
        self.index += WARP_SIZE / self.top_k;
        self.choice += WARP_SIZE % self.top_k;
        if self.choice >= self.top_k {
            self.choice -= self.top_k;
            self.index += 1;
        }
    }
}

/// So many rows, filled up to a multiple of a power of two.
#[inline(always)]
pub(super) fn filled(rows: u32, row_multiple: u32) -> u32 {
    (rows + row_multiple - 1) & !(row_multiple - 1)
}
