//! Lists of each expert's rows, by counting.
//!
//! Each warp of the cluster has a segment of the choices. First it counts its choices of each expert, which also gives each choice
//! its rank among those of the segment and expert. Then each thread has an expert, and adds up what the warps before have of it;
//! blocks tell each other their totals. A scan over experts says where each one begins. At last a choice's row is the first of its
//! segment and expert, plus its rank. So rows are in the order of choices, and nothing depends on who comes first.
//!
//! A multiprocessor stores scattered words one by one. So a block sorts its choices by expert in shared memory, where they fit, and
//! neighbours go to neighbouring rows.

use core::hint::assert_unchecked;

use cuda_std::{
    cluster::{
        arrive_cluster_relaxed, cluster_rank, cluster_size, mapa, st_shared_cluster_b32, sync_cluster, wait_cluster,
    },
    cp_async::{cp_async_4_or_zero, cp_async_commit_group, cp_async_wait_group},
    global::{GlobalAddress, ld_global_b32_or_zero, prefetch_l1, st_global_b32_where},
    griddepcontrol::griddepcontrol_wait,
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, ld_shared_v4_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, lanes_below, sync_warp, warp_shuffle_up, warp_vote_ballot},
};

use crate::moe_route::abi::{Lists, MAX_EXPERTS, NO_ROW, Route, token_tiles};

/// Rounds that are done together: in a round a lane has a choice.
const PAIR: usize = 2;

/// Choices of a pair of rounds.
const PAIR_CHOICES: u32 = PAIR as u32 * WARP_SIZE;

/// Bits of an expert's number.
const EXPERT_BITS: u32 = MAX_EXPERTS.trailing_zeros();

/// Bits of the number of an expert of a layer with up to [`FEW_EXPERTS`].
const FEW_BITS: u32 = FEW_EXPERTS.trailing_zeros();
const FEW_EXPERTS: u32 = 128;

const _: () = assert!(1 << EXPERT_BITS == MAX_EXPERTS && Route::THREADS == MAX_EXPERTS);
const _: () = assert!(Route::WARP_CHOICES.is_multiple_of(PAIR_CHOICES));

/// Warps whose counts are added up together.
const SOME_WARPS: usize = Route::WARPS as usize / 4;

/// Bytes of a number in lists and in shared memory.
const NUMBER: u32 = size_of::<u32>() as u32;

/// Numbers that a line of the first-level cache has.
const LINE_NUMBERS: u32 = 128 / NUMBER;

/// Bits of a token's number in a block, beside its expert.
const TOKEN_BITS: u32 = 16;

/// Makes the lists, as a block of the first cluster.
///
/// # Safety
/// The contract in `moe_route/mod.rs`. All threads of the first cluster call it, of whole warps.
#[inline(always)]
pub(super) unsafe fn make(route: &Route) {
    let (blocks, block) = (cluster_size(), cluster_rank());
    let (thread, warp) = (thread::thread_idx_x(), thread::thread_idx_x() / WARP_SIZE);
    // SAFETY: tiles have tokens, tokens name experts, and a cluster has blocks.
    unsafe {
        assert_unchecked(route.tile_tokens > 0 && route.top_k > 0 && blocks > 0 && blocks <= Route::MAX_CLUSTER);
    }
    let segment = Segment::new(route, blocks * Route::WARPS, block * Route::WARPS + warp);
    let warp_choices = segment.length.next_multiple_of(PAIR_CHOICES).min(Route::WARP_CHOICES);
    let shared = Shared { experts: route.experts, warp_choices };
    let counts = shared.count(warp, 0);
    let lists = Lists::filled(u64::from(segment.choices), route.experts, route.row_multiple);
    let list = |offset: u64| GlobalAddress::new(route.lists) + offset;
    let (rows, places) = (list(lists.rows), list(lists.places));
    // SAFETY: every thread comes here, so that all are at each barrier. Until the first one, a warp's counts are its own; then until the
    // last but one, those of an expert are one thread's. Totals are written when all blocks have begun, each by one thread, and are
    // read behind a barrier of the cluster; nobody reaches another block after it. Sorted choices take the place of totals behind a
    // barrier.
    unsafe {
        let mut expert = lane_id();
        while expert < route.experts {
            st_shared_b32(counts + expert * NUMBER, 0);
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
        let mut group = Group { first: segment.begin, end: segment.end, choices: shared.choices(warp) };
        loop {
            group.load(GlobalAddress::new(route.ids));
            group.rank(route, counts);
            if group.is_last() {
                break;
            }
            group.keep(places);
            group.first += Route::WARP_CHOICES;
        }
        thread::sync_threads();

        let (is_expert, mut rows_here, mut rows_of_warps) = (thread < route.experts, 0, [0; Route::WARPS as usize]);
        if is_expert {
            // Those that have choices are the first ones.
            unrolled!(some in [0 1 2 3] while (some * SOME_WARPS) as u32 * segment.length < segment.block_choices => {
                for warp in some * SOME_WARPS..(some + 1) * SOME_WARPS {
                    rows_of_warps[warp] = ld_shared_b32(shared.count(warp as u32, thread));
                }
                for warp in some * SOME_WARPS..(some + 1) * SOME_WARPS {
                    rows_here += rows_of_warps[warp];
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
        let rows_filled = filled(rows_of_all, route.row_multiple);
        let here_in_warp = scan_warp(rows_here, shared.sums(0));
        let rows_in_warp = scan_warp(rows_filled, shared.sums(1));
        let tiles_in_warp = scan_warp(token_tiles(rows_filled, route.tile_tokens), shared.sums(2));
        thread::sync_threads();
        let (here_before, here) = warps_before(shared.sums(0));
        let end = rows_in_warp + warps_before(shared.sums(1)).0;
        let begin = end - rows_filled;
        if is_expert {
            let mut place = here_in_warp + here_before - rows_here;
            st_shared_b32(shared.shift(thread), (begin + rows_before).wrapping_sub(place));
            unrolled!(some in [0 1 2 3] while (some * SOME_WARPS) as u32 * segment.length < segment.block_choices => {
                for warp in some * SOME_WARPS..(some + 1) * SOME_WARPS {
                    st_shared_b32(shared.count(warp as u32, thread), place);
                    place += rows_of_warps[warp];
                }
            });
        }
        thread::sync_threads();

        let first_token = segment.block_begin / route.top_k;
        let place = Place { counts, shift: shared.shift(0), rows, places, top_k: route.top_k, first_token };
        if segment.length <= Route::WARP_CHOICES {
            group.place::<true>(&place, shared.sorted(0));
            thread::sync_threads();
            let mut sorted = thread;
            while sorted < here {
                let choice = ld_shared_b32(shared.sorted(sorted));
                let row = sorted.wrapping_add(ld_shared_b32(shared.shift(choice >> TOKEN_BITS)));
                let token = first_token + choice % (1 << TOKEN_BITS);
                st_global_b32_where(true, rows + u64::from(row) * u64::from(NUMBER), token);
                sorted += Route::THREADS;
            }
        } else {
            group.place::<false>(&place, shared.sorted(0));
            while group.first > segment.begin {
                group.first -= Route::WARP_CHOICES;
                group.load(places);
                group.place::<false>(&place, shared.sorted(0));
            }
        }
        if block == 0 {
            let tiles_end = tiles_in_warp + warps_before(shared.sums(2)).0;
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

/// The sum of what [`scan_warp`] has left for the warps before this one, and for all.
///
/// # Safety
/// All threads of the block have called it, and a barrier since then.
#[inline(always)]
unsafe fn warps_before(sums: SharedAddress) -> (u32, u32) {
    let (warp, mut before, mut all) = (thread::thread_idx_x() / WARP_SIZE, 0, 0);
    for four in 0..Route::WARPS / 4 {
        // SAFETY: nobody writes the sums any more.
        let sums = unsafe { ld_shared_v4_b32(sums + four * 4 * NUMBER) };
        for index in 0..4 {
            before += if four * 4 + index < warp { sums[index as usize] } else { 0 };
            all += sums[index as usize];
        }
    }
    (before, all)
}

/// The lanes that have the same expert as this one, of those that have one, in each round of a pair.
///
/// A vote for each bit of its number: `match.any` does the same in one instruction, which takes an H200 longer
/// (docs/experiments.md).
///
/// # Safety
/// The whole warp calls it together.
#[inline(always)]
unsafe fn lanes_with(chosen: [u32; PAIR], experts: u32) -> [u32; PAIR] {
    let mut same = [0; PAIR];
    // SAFETY: the whole warp is here, with the same number of experts.
    unsafe {
        for round in 0..PAIR {
            same[round] = warp_vote_ballot(ALL_LANES, chosen[round] != NO_ROW);
        }
        let mut vote = |bit: u32| {
            for round in 0..PAIR {
                let has_bit = chosen[round] & 1 << bit != 0;
                let with_bit = warp_vote_ballot(ALL_LANES, has_bit);
                same[round] &= if has_bit { with_bit } else { !with_bit };
            }
        };
        for bit in 0..FEW_BITS {
            vote(bit);
        }
        if experts > FEW_EXPERTS {
            for bit in FEW_BITS..EXPERT_BITS {
                vote(bit);
            }
        }
    }
    same
}

/// Where things lie in a block's shared memory.
#[derive(Clone, Copy)]
struct Shared {
    experts: u32,
    /// Choices of a warp that there is room for.
    warp_choices: u32,
}

impl Shared {
    /// A sum of each warp, three times; at multiples of 16.
    #[inline(always)]
    fn sums(self, index: u32) -> SharedAddress {
        dynamic_shared_address() + index * (Route::WARPS * NUMBER)
    }

    /// How many rows a warp has of an expert; later, the place of the first of them among the block's choices sorted by expert.
    #[inline(always)]
    fn count(self, warp: u32, expert: u32) -> SharedAddress {
        self.sums(3) + (warp * self.experts + expert) * NUMBER
    }

    /// How far the rows that the block has of an expert lie behind these places.
    #[inline(always)]
    fn shift(self, expert: u32) -> SharedAddress {
        self.count(Route::WARPS, expert)
    }

    /// A warp's choices.
    #[inline(always)]
    fn choices(self, warp: u32) -> SharedAddress {
        self.shift(self.experts) + warp * self.warp_choices * NUMBER
    }

    /// The block's choices, sorted.
    #[inline(always)]
    fn sorted(self, place: u32) -> SharedAddress {
        self.choices(Route::WARPS) + place * NUMBER
    }

    /// How many rows a block of the cluster has of an expert; before choices are sorted.
    #[inline(always)]
    fn total(self, block: u32, expert: u32) -> SharedAddress {
        self.sorted(block * self.experts + expert)
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
    /// The first choice of the block's first segment.
    block_begin: u32,
    /// Choices from there on, also of later blocks.
    block_choices: u32,
    /// Choices of all segments.
    choices: u32,
}

impl Segment {
    /// The `index`-th of so many.
    #[inline(always)]
    fn new(route: &Route, segments: u32, index: u32) -> Self {
        let choices = route.token_count * route.top_k;
        let length = choices.div_ceil(segments).next_multiple_of(WARP_SIZE);
        let begin = (index * length).min(choices);
        let block_begin = (index / Route::WARPS * Route::WARPS * length).min(choices);
        Self {
            begin,
            end: (begin + length).min(choices),
            length,
            block_begin,
            block_choices: choices - block_begin,
            choices,
        }
    }
}

/// Some choices of a segment, in shared memory: in each round a choice of each lane.
struct Group {
    /// The first one.
    first: u32,
    /// The choice behind the segment's last one.
    end: u32,
    /// Where they lie: their experts' ids, then what is known of them: the expert with the rank above it, or [`NO_ROW`].
    choices: SharedAddress,
}

/// Where choices find their rows, and where they write them.
struct Place {
    /// Of each expert, the place of the warp's first row.
    counts: SharedAddress,
    /// Of each expert, how far the block's rows lie behind their places.
    shift: SharedAddress,
    rows: GlobalAddress,
    places: GlobalAddress,
    top_k: u32,
    /// The token of the block's first choice.
    first_token: u32,
}

impl Group {
    /// Choices of the group; none of a segment that has none.
    #[inline(always)]
    fn length(&self) -> u32 {
        (self.end - self.first).min(Route::WARP_CHOICES)
    }

    #[inline(always)]
    fn is_last(&self) -> bool {
        self.end - self.first <= Route::WARP_CHOICES
    }

    /// Where a choice of the group lies.
    #[inline(always)]
    fn choice(&self, choice: u32) -> SharedAddress {
        self.choices + choice * NUMBER
    }

    /// Where an array has the number of a choice of the group.
    #[inline(always)]
    fn place_in(&self, numbers: GlobalAddress, choice: u32) -> GlobalAddress {
        numbers + u64::from(self.first + choice) * u64::from(NUMBER)
    }

    /// Loads what an array has of the group's choices. Each lane waits for its own.
    ///
    /// # Safety
    /// The array is complete, and has them.
    #[inline(always)]
    unsafe fn load(&self, numbers: GlobalAddress) {
        let (mut choice, length) = (lane_id(), self.length());
        while choice < length.next_multiple_of(PAIR_CHOICES) {
            // SAFETY: the lane's own places.
            unsafe { cp_async_4_or_zero(choice < length, self.choice(choice), self.place_in(numbers, choice)) };
            choice += WARP_SIZE;
        }
        cp_async_commit_group();
        cp_async_wait_group::<0>();
    }

    /// Counts the choices of each expert, and gives each its rank.
    ///
    /// # Safety
    /// The whole warp calls it together. The counts are its own, and ids are loaded.
    #[inline(always)]
    unsafe fn rank(&self, route: &Route, counts: SharedAddress) {
        let (mut first, length) = (0, self.length());
        while first < length {
            let choice = |round: usize| first + round as u32 * WARP_SIZE + lane_id();
            let mut experts = [NO_ROW; PAIR];
            // SAFETY: the lane's own choices, experts that can be named, and counts. All lanes have the same rounds.
            unsafe {
                for round in 0..PAIR {
                    let id = ld_shared_b32(self.choice(choice(round)));
                    // Negative ones are large here.
                    let is_named = choice(round) < length && id < route.named_experts;
                    experts[round] = if is_named { id } else { NO_ROW };
                }
                if route.map != 0 {
                    for round in 0..PAIR {
                        let id = experts[round];
                        let number = GlobalAddress::new(route.map) + u64::from(id) * u64::from(NUMBER);
                        let number = ld_global_b32_or_zero(id != NO_ROW, number);
                        experts[round] = if id != NO_ROW && number < route.experts { number } else { NO_ROW };
                    }
                }
                let same = lanes_with(experts, route.experts);
                for round in 0..PAIR {
                    let (expert, same) = (experts[round], same[round]);
                    let count = counts + if expert == NO_ROW { 0 } else { expert * NUMBER };
                    let (before, rank) = (ld_shared_b32(count), (same & lanes_below()).count_ones());
                    sync_warp(ALL_LANES);
                    // The first lane of those with the same expert counts for all of them.
                    if expert != NO_ROW && rank == 0 {
                        st_shared_b32(count, before + same.count_ones());
                    }
                    sync_warp(ALL_LANES);
                    let known = expert + ((before + rank) << EXPERT_BITS);
                    st_shared_b32(self.choice(choice(round)), if expert == NO_ROW { NO_ROW } else { known });
                }
            }
            first += PAIR_CHOICES;
        }
    }

    /// Leaves what is known of the choices in the list of places, while the warp goes on to its next group.
    ///
    /// # Safety
    /// The list is there, and nobody else accesses these places.
    #[inline(always)]
    unsafe fn keep(&self, places: GlobalAddress) {
        let mut choice = lane_id();
        while choice < self.length() {
            // SAFETY: the choice's own place.
            unsafe { st_global_b32_where(true, self.place_in(places, choice), ld_shared_b32(self.choice(choice))) };
            choice += WARP_SIZE;
        }
    }

    /// Gives the choices their places, and writes which row each one has. Their tokens go to this address to be sorted, or
    /// to their rows.
    ///
    /// # Safety
    /// The lists are there, nobody else writes these places, and there is room for sorted choices.
    #[inline(always)]
    unsafe fn place<const SORTED: bool>(&self, place: &Place, sorted: SharedAddress) {
        let (mut first, length) = (0, self.length());
        let mut token = Token::of(self.first + lane_id(), place.top_k);
        while first < length {
            for round in 0..PAIR as u32 {
                let choice = first + round * WARP_SIZE + lane_id();
                // SAFETY: the lane's own choice, an expert's numbers; the choice's own row and place.
                unsafe {
                    let known = ld_shared_b32(self.choice(choice));
                    let has_row = choice < length && known != NO_ROW;
                    let expert = if has_row { known % MAX_EXPERTS } else { 0 };
                    let at = ld_shared_b32(place.counts + expert * NUMBER) + (known >> EXPERT_BITS);
                    let row = at.wrapping_add(ld_shared_b32(place.shift + expert * NUMBER));
                    let number = if has_row { row } else { NO_ROW };
                    st_global_b32_where(choice < length, self.place_in(place.places, choice), number);
                    if !SORTED {
                        st_global_b32_where(has_row, place.rows + u64::from(row) * u64::from(NUMBER), token.index);
                    } else if has_row {
                        let of_block = expert << TOKEN_BITS | (token.index - place.first_token);
                        st_shared_b32(sorted + at * NUMBER, of_block);
                    }
                }
                token.advance();
            }
            first += PAIR_CHOICES;
        }
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
