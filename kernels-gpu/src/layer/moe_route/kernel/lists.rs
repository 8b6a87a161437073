//! Lists of each expert's rows, made by counting.
//!
//! Each warp of the cluster has a segment of the choices. First it counts its choices per expert, which also gives each
//! choice its rank among the choices of the same segment and expert. Then each thread takes its experts (one, or two with
//! more experts than threads), and adds up the counts of the preceding warps; CTAs exchange their totals. A scan over
//! experts gives the first row of each expert. Finally, a choice's row is the first row of its segment and expert, plus
//! its rank. So rows are in the order of choices, and the result does not depend on timing.
//!
//! An SM stores scattered words one by one. So a CTA sorts its choices by expert in shared memory, if they fit, and
//! neighbors are stored to neighboring rows.

mod many;

use core::hint::assert_unchecked;

use cuda_std::{
    cluster::{arrive_cluster_relaxed, cluster_rank, cluster_size, mapa, wait_cluster},
    cp_async::{cp_async_4_or_zero, cp_async_commit_group, cp_async_wait_group},
    fence::fence_mbarrier_init,
    global::{GlobalAddress, ld_global_b32_or_zero, prefetch_l1, st_global_b32_where},
    griddepcontrol::griddepcontrol_wait,
    integer::opaque_b32,
    mbarrier::{
        Mbarrier, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity_cluster, st_async_shared_cluster_b32,
    },
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{
        ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_reduce_add_u32, warp_shuffle_idx, warp_shuffle_up,
        warp_vote_ballot, warp_vote_same_bit,
    },
};

use crate::{
    layer::moe_route::abi::Route,
    lists::{Lists, MAX_TOP_K, NO_ROW, SMALL_EXPERTS},
};

/// Number of rounds that are processed together. In a round, each lane has one choice.
const PAIR: usize = 2;

/// Choices per pair of rounds.
const PAIR_CHOICES: u32 = PAIR as u32 * WARP_SIZE;

/// Number of experts if each thread has `X`.
const fn experts(x: usize) -> u32 {
    Route::THREADS * x as u32
}

/// Bits of an expert's index if each thread has `X` experts.
const fn expert_bits(x: usize) -> u32 {
    experts(x).trailing_zeros()
}

const _: () = assert!(1 << expert_bits(1) == SMALL_EXPERTS && 1 << expert_bits(2) == experts(2));
const _: () = assert!(Route::WARP_CHOICES.is_multiple_of(PAIR_CHOICES));
const _: () = assert!(Route::LARGE_WARP_CHOICES.is_multiple_of(PAIR_CHOICES));

/// Number of sums over experts: rows of the CTA, rows of all CTAs, and tiles.
const SUMS: usize = 3;

/// Bytes per number in lists and in shared memory.
const NUMBER: u32 = size_of::<u32>() as u32;

/// Bytes of a barrier, padded to a multiple of 16.
const BARRIER_BYTES: u32 = 16;

/// Numbers per line of the L1 cache.
const LINE_NUMBERS: u32 = 128 / NUMBER;

/// Bits of a choice's index in a CTA, which is stored together with its expert.
const CHOICE_BITS: u32 = 16;

/// Makes the lists, in a CTA of the first cluster, whose threads have `X` experts each.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds. All threads of the first cluster call this, in whole warps.
#[inline(always)]
pub(super) unsafe fn make<const X: usize>(route: &Route)
where
    for<'a> Maker<'a, X>: Experts,
{
    let (blocks, block, thread) = (cluster_size(), cluster_rank(), thread::thread_idx_x());
    // SAFETY: tiles have tokens, tokens name experts, and a cluster has CTAs. All lanes are here.
    let warp = unsafe {
        assert_unchecked(route.tile_tokens > 0 && route.top_k > 0 && blocks > 0 && blocks <= Route::MAX_CLUSTER);
        // The value is the same in all lanes; the shuffle shows this to the compiler.
        warp_shuffle_idx(ALL_LANES, thread / WARP_SIZE, 0, WARP_SIZE).0
    };
    let segment = Segment::new(route, blocks * Route::WARPS, block * Route::WARPS + warp);
    let most_choices = const { Route::warp_choices(X as u32) };
    let warp_choices = segment.length.next_multiple_of(PAIR_CHOICES).min(most_choices);
    let shared = Shared { experts: route.experts, warp_choices };
    let counts = shared.count(warp, 0);
    let lists = Lists::filled(u64::from(segment.choices), route.experts, route.row_multiple);
    let [rows, places] = [lists.rows, lists.places].map(|offset| GlobalAddress::new(route.lists) + offset);
    let maker: Maker<'_, X> = Maker { route, shared, counts, lists, rows, places, blocks, block, thread, warp };
    let tokens = Tokens::new(segment.block_begin, route.top_k);
    let tile_reciprocal = Reciprocal::of(route.tile_tokens);
    let lane = opaque_b32(lane_id());
    let mut group: Group<X> = Group {
        first: segment.begin,
        end: segment.end,
        choices: shared.choices(warp),
        lane,
        below: opaque_b32((1 << lane) - 1),
    };
    // SAFETY: every thread reaches every barrier, with the group of its warp and the counts of its expert. Before the
    // first barrier, only one warp accesses its counts; from there to the barrier after `assign`, only one thread
    // accesses the counts of an expert. `write_sorted` is two barriers after `count_rows`.
    unsafe {
        maker.prepare(lane);
        maker.rank(&mut group);
        thread::sync_threads();
        let counted = maker.count_rows();
        // Warps with experts. The others have nothing to add.
        let expert_warps = route.experts.div_ceil(const { WARP_SIZE * X as u32 });
        maker.assign(&counted, expert_warps, &tile_reciprocal);
        thread::sync_threads();
        if segment.length <= most_choices {
            maker.write_sorted(&group, &segment, expert_warps, &tokens);
        } else {
            maker.write_in_order(&mut group, &segment);
        }
    }
}

/// A thread of the first cluster, and what it needs in every step.
pub(super) struct Maker<'a, const X: usize> {
    route: &'a Route,
    shared: Shared,
    /// Address of the warp's counts.
    counts: SharedAddress,
    lists: Lists,
    /// Addresses of the list of rows and of the list of places.
    rows: GlobalAddress,
    places: GlobalAddress,
    /// Number of CTAs of the cluster, and the index of this CTA.
    blocks: u32,
    block: u32,
    /// Indices of this thread and of its warp in the CTA. Thread t has the experts from X·t on.
    thread: u32,
    warp: u32,
}

/// The steps of threads with experts.
pub(super) trait Experts {
    /// Numbers of rows of a thread's experts.
    type Counted;

    /// Adds up the rows of the thread's experts.
    ///
    /// # Safety
    /// All threads of the cluster call this, after [`Maker::rank`] and a barrier.
    unsafe fn count_rows(&self) -> Self::Counted;

    /// Assigns rows and tiles to experts: replaces the counts by first places, stores the shift of each expert, and
    /// writes the lists of first rows and tiles.
    ///
    /// # Safety
    /// All threads of the CTA call this, with the result of [`Self::count_rows`]. Until the next barrier, nobody else
    /// accesses the counts and the shifts of the thread's experts.
    unsafe fn assign(&self, counted: &Self::Counted, expert_warps: u32, tile_reciprocal: &Reciprocal);
}

/// Numbers of rows of one of a thread's experts, or zeros if there is no such expert.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    is_expert: bool,
    /// Number of rows of each warp of the CTA.
    of_warps: [u32; Route::WARPS as usize],
    here: u32,
    /// Rows of the CTAs before this one, and of all CTAs.
    before: u32,
    all: u32,
    /// Rows of all CTAs with padding.
    filled: u32,
}

impl<const X: usize> Maker<'_, X> {
    /// Clears the counts of this warp, and announces the totals of all CTAs to the barrier of this one. Waits for the
    /// previous grid.
    ///
    /// # Safety
    /// All threads of the first cluster call this, in whole warps, before anything else. `lane` is the thread's lane.
    #[inline(always)]
    unsafe fn prepare(&self, lane: u32) {
        let &Self { route, shared, counts, blocks, thread, .. } = self;
        // SAFETY: the counts belong to the warp, and one thread initializes the barrier before the CTA arrives at the
        // cluster's. The map has a number per named expert. All lanes are here.
        unsafe {
            let mut expert = lane;
            while expert < route.experts {
                st_shared_b32(counts + expert * NUMBER, 0);
                expert += WARP_SIZE;
            }
            sync_warp(ALL_LANES);
            if blocks > 1 {
                if thread == 0 {
                    mbarrier_init(shared.barrier(), 1);
                    fence_mbarrier_init();
                    mbarrier_arrive_expect_tx(shared.barrier(), blocks * route.experts * NUMBER);
                }
                arrive_cluster_relaxed();
            }
            if route.map != 0 && thread * LINE_NUMBERS < route.named_experts {
                prefetch_l1(GlobalAddress::new(route.map) + u64::from(thread * LINE_NUMBERS * NUMBER));
            }
            griddepcontrol_wait();
        }
    }

    /// Counts the choices of the warp's segment per expert, and gives each choice its rank. Ends with the last group in
    /// shared memory, and the others in the list of places.
    ///
    /// # Safety
    /// The whole warp calls this together with the first group of its segment, after [`Self::prepare`]. Until the next
    /// barrier, nobody else accesses the warp's counts.
    #[inline(always)]
    unsafe fn rank(&self, group: &mut Group<X>) {
        // SAFETY: the previous grid has written the ids, one per choice, and each choice has a place in the list. No
        // other warp has the segment.
        unsafe {
            loop {
                group.load(GlobalAddress::new(self.route.ids));
                group.rank(self.route, self.counts);
                if group.is_last() {
                    break;
                }
                group.keep(self.places);
                group.first += Group::<X>::MOST;
            }
        }
    }

    /// Writes the rows of the CTA's choices by way of shared memory, sorted by expert.
    ///
    /// # Safety
    /// All threads of the CTA call this with the only group of their segment, after [`Experts::assign`] and a barrier. No
    /// thread accesses the totals any more, whose memory the sorted choices overwrite.
    #[inline(always)]
    unsafe fn write_sorted(&self, group: &Group<X>, segment: &Segment, expert_warps: u32, tokens: &Tokens) {
        let &Self { shared, rows, .. } = self;
        // SAFETY: the counts and shifts are complete. Each choice has its own place in shared memory, which is read
        // after a barrier that every thread reaches, and its own row and place in the lists.
        unsafe {
            group.place(self.counts, shared.shift(0), self.places, |choice, expert, place, _| {
                let of_block = group.first - segment.block_begin + choice;
                st_shared_b32(shared.sorted(place), expert << CHOICE_BITS | of_block);
            });
            thread::sync_threads();
            let here = sum_of_warps(shared.sums(0), expert_warps);
            let mut place = self.thread;
            while place < here {
                let choice = ld_shared_b32(shared.sorted(place));
                let row = place.wrapping_add(ld_shared_b32(shared.shift(choice >> CHOICE_BITS)));
                let token = tokens.of(choice % (1 << CHOICE_BITS));
                st_global_b32_where(true, rows + u64::from(row) * u64::from(NUMBER), token);
                place += Route::THREADS;
            }
        }
    }

    /// Writes the rows of the segment's choices in their order, from the last group to the first one.
    ///
    /// # Safety
    /// The whole warp calls this with the last group of its segment, after [`Experts::assign`] and a barrier.
    #[inline(always)]
    unsafe fn write_in_order(&self, group: &mut Group<X>, segment: &Segment) {
        let &Self { route, shared, rows, .. } = self;
        // SAFETY: the counts and shifts are complete, and each choice has its own row and place in the lists. The place
        // of a choice of an earlier group contains what `keep` stored.
        unsafe {
            loop {
                let tokens = Tokens::new(group.first, route.top_k);
                group.place(self.counts, shared.shift(0), self.places, |choice, _, _, row| {
                    st_global_b32_where(true, rows + u64::from(row) * u64::from(NUMBER), tokens.of(choice));
                });
                if group.first <= segment.begin {
                    break;
                }
                group.first -= Group::<X>::MOST;
                group.load(self.places);
            }
        }
    }
}

impl Experts for Maker<'_, 1> {
    type Counted = Counted;

    #[inline(always)]
    unsafe fn count_rows(&self) -> Counted {
        let &Self { shared, blocks, block, thread, .. } = self;
        let (is_expert, mut here, mut of_warps) = (thread < self.route.experts, 0, [0; Route::WARPS as usize]);
        // SAFETY: all warps have counted, and the thread reads the counts of its expert. Totals are written after all
        // CTAs have started, each by one thread, and read after a barrier of the cluster, after which nobody accesses
        // another CTA's memory.
        unsafe {
            if is_expert {
                for warp in 0..of_warps.len() {
                    of_warps[warp] = ld_shared_b32(shared.count(warp as u32, thread));
                }
                for warp in 0..of_warps.len() {
                    here += of_warps[warp];
                }
            }
            let (mut before, mut all) = (0, here);
            if blocks > 1 {
                wait_cluster();
                if is_expert {
                    for other in 0..blocks {
                        let total = mapa(shared.total(block, thread), other);
                        st_async_shared_cluster_b32(total, here, shared.barrier().in_block(other));
                    }
                }
                mbarrier_wait_parity_cluster(shared.barrier(), 0);
                if is_expert {
                    all = 0;
                    for other in 0..blocks {
                        let total = ld_shared_b32(shared.total(other, thread));
                        before += if other < block { total } else { 0 };
                        all += total;
                    }
                }
            }
            Counted { is_expert, of_warps, here, before, all, filled: filled(all, self.route.row_multiple) }
        }
    }

    #[inline(always)]
    unsafe fn assign(&self, counted: &Counted, expert_warps: u32, tile_reciprocal: &Reciprocal) {
        let &Self { route, shared, thread, warp, .. } = self;
        let mut in_warp = [0; SUMS];
        // SAFETY: whole warps scan, and read the sums after a barrier that every thread reaches. The counts and the
        // shift of an expert belong to its thread.
        unsafe {
            if warp < expert_warps {
                let tiles = tile_reciprocal.quotient(counted.filled + route.tile_tokens - 1);
                in_warp = scan_warp([counted.here, counted.filled, tiles], shared, warp);
            }
            thread::sync_threads();
            if warp < expert_warps {
                let mut place = in_warp[0] - counted.here + sum_of_warps(shared.sums(0), warp);
                let end = in_warp[1] + sum_of_warps(shared.sums(1), warp);
                let begin = end - counted.filled;
                if counted.is_expert {
                    st_shared_b32(shared.shift(thread), (begin + counted.before).wrapping_sub(place));
                    for warp in 0..counted.of_warps.len() {
                        st_shared_b32(shared.count(warp as u32, thread), place);
                        place += counted.of_warps[warp];
                    }
                }
                if self.block == 0 {
                    let tiles_end = in_warp[2] + sum_of_warps(shared.sums(2), warp);
                    self.write_experts(counted.is_expert, begin + counted.all, end, tiles_end);
                }
            }
        }
    }
}

impl Maker<'_, 1> {
    /// Writes the numbers of the thread's expert to the lists: the ends of its rows and tiles, and [`NO_ROW`] from
    /// `padding`, the end of its rows without padding. The first threads write the beginnings of the lists.
    ///
    /// # Safety
    /// The lists are valid for these numbers, and only this CTA writes them. A thread without an expert has no padding.
    #[inline(always)]
    unsafe fn write_experts(&self, is_expert: bool, padding: u32, end: u32, tiles_end: u32) {
        let &Self { ref lists, thread, .. } = self;
        let list = |offset: u64| GlobalAddress::new(self.route.lists) + offset;
        let number = |offset: u64, index: u32| list(offset) + u64::from(index * NUMBER);
        // SAFETY: the lists have a number for each of these indices, and no other thread writes it.
        unsafe {
            st_global_b32_where(thread < Lists::TICKETS, number(lists.tickets, thread), 0);
            st_global_b32_where(thread == 0, number(lists.firsts, 0), 0);
            st_global_b32_where(thread == 0, number(lists.tile_firsts, 0), 0);
            st_global_b32_where(is_expert, number(lists.firsts, thread + 1), end);
            st_global_b32_where(is_expert, number(lists.tile_firsts, thread + 1), tiles_end);
            for row in padding..end {
                st_global_b32_where(true, number(lists.rows, row), NO_ROW);
            }
        }
    }
}

/// Returns the inclusive prefix sums of the lanes' numbers. Writes the sums over all lanes to the warp's places in
/// shared memory.
///
/// # Safety
/// The whole warp calls this together. Nobody reads its sums before the next barrier.
#[inline(always)]
unsafe fn scan_warp(mut numbers: [u32; SUMS], shared: Shared, warp: u32) -> [u32; SUMS] {
    // SAFETY: the whole warp is here. One thread writes the warp's places.
    unsafe {
        for step in 0..WARP_SIZE.ilog2() {
            for index in 0..SUMS {
                let (other, is_there) = warp_shuffle_up(ALL_LANES, numbers[index], 1 << step, WARP_SIZE);
                numbers[index] += if is_there { other } else { 0 };
            }
        }
        if lane_id() == WARP_SIZE - 1 {
            for index in 0..SUMS {
                st_shared_b32(shared.sums(index as u32) + warp * NUMBER, numbers[index]);
            }
        }
    }
    numbers
}

/// Returns the sum of the results of [`scan_warp`] of the first `warps` warps.
///
/// # Safety
/// The whole warp calls this together, with the same number. These warps have called [`scan_warp`], and a barrier of
/// the CTA followed.
#[inline(always)]
unsafe fn sum_of_warps(sums: SharedAddress, warps: u32) -> u32 {
    let lane = lane_id();
    // SAFETY: the sums of these warps are complete, and nobody writes them any more.
    unsafe {
        let sum = if lane < warps { ld_shared_b32(sums + lane * NUMBER) } else { 0 };
        warp_reduce_add_u32(ALL_LANES, sum)
    }
}

/// Returns, for each round of a pair, the lanes that have the same expert as this lane, among the lanes that have one.
///
/// The warp votes on each bit of the expert's index. `match.any` does the same in one instruction, but takes longer on
/// an H200 (benches/lab/experiments.md).
///
/// # Safety
/// The whole warp calls this together.
#[inline(always)]
unsafe fn lanes_with<const X: usize>(chosen: [u32; PAIR], experts: u32) -> [u32; PAIR] {
    let mut same = [0; PAIR];
    // SAFETY: the whole warp is here, with the same number of experts.
    unsafe {
        for round in 0..PAIR {
            same[round] = warp_vote_ballot(ALL_LANES, chosen[round] != NO_ROW);
        }
        macro_rules! vote {
            ($($bit:literal)*) => {$(
                for round in 0..PAIR {
                    same[round] = warp_vote_same_bit::<$bit>(ALL_LANES, chosen[round], same[round]);
                }
            )*};
        }
        vote!(0 1 2 3 4 5 6);
        if experts > 1 << 7 {
            vote!(7);
        }
        if experts > 1 << 8 {
            vote!(8);
        }
        if const { X > 1 } && experts > 1 << 9 {
            vote!(9);
        }
    }
    same
}

/// Layout of a CTA's shared memory.
#[derive(Clone, Copy)]
struct Shared {
    experts: u32,
    /// Number of choices per warp that the memory has room for.
    warp_choices: u32,
}

impl Shared {
    /// Sums of warps, three per warp; at multiples of 16.
    #[inline(always)]
    fn sums(self, index: u32) -> SharedAddress {
        dynamic_shared_address() + index * (Route::WARPS * NUMBER)
    }

    /// Barrier for the totals of the cluster's CTAs.
    #[inline(always)]
    fn barrier(self) -> Mbarrier {
        Mbarrier::at(self.sums(SUMS as u32))
    }

    /// Number of rows of a warp and expert; later the place of the first of them among the CTA's choices sorted by
    /// expert.
    #[inline(always)]
    fn count(self, warp: u32, expert: u32) -> SharedAddress {
        self.sums(SUMS as u32) + BARRIER_BYTES + (warp * self.experts + expert) * NUMBER
    }

    /// Distance of the CTA's rows of an expert from their places among the CTA's sorted choices.
    #[inline(always)]
    fn shift(self, expert: u32) -> SharedAddress {
        self.count(Route::WARPS, expert)
    }

    /// Choices of a warp.
    #[inline(always)]
    fn choices(self, warp: u32) -> SharedAddress {
        self.shift(self.experts) + warp * self.warp_choices * NUMBER
    }

    /// Sorted choices of the CTA.
    #[inline(always)]
    fn sorted(self, place: u32) -> SharedAddress {
        self.choices(Route::WARPS) + place * NUMBER
    }

    /// Number of rows of a CTA of the cluster and an expert; used before choices are sorted.
    #[inline(always)]
    fn total(self, block: u32, expert: u32) -> SharedAddress {
        self.sorted(block * self.experts + expert)
    }
}

/// A warp's part of the choices.
struct Segment {
    /// First choice of the segment.
    begin: u32,
    /// End of the segment: the choice after its last one.
    end: u32,
    /// Number of choices per segment, except the last segments.
    length: u32,
    /// First choice of the CTA's first segment.
    block_begin: u32,
    /// Number of choices of all segments.
    choices: u32,
}

impl Segment {
    /// Returns the `index`-th of `segments` segments.
    #[inline(always)]
    fn new(route: &Route, segments: u32, index: u32) -> Self {
        let choices = route.token_count * route.top_k;
        let length = choices.div_ceil(segments).next_multiple_of(WARP_SIZE);
        let begin = (index * length).min(choices);
        let block_begin = (index / Route::WARPS * Route::WARPS * length).min(choices);
        Self { begin, end: (begin + length).min(choices), length, block_begin, choices }
    }
}

/// Some choices of a segment, in shared memory: one choice per lane in each round. A thread has `X` experts.
struct Group<const X: usize> {
    /// First choice of the group.
    first: u32,
    /// End of the segment: the choice after its last one.
    end: u32,
    /// Address of a word per choice: at first the id of its expert, later its expert with its rank in the bits above,
    /// or [`NO_ROW`].
    choices: SharedAddress,
    /// This lane, and the bit mask of the lanes below it.
    lane: u32,
    below: u32,
}

impl<const X: usize> Group<X> {
    /// Maximum number of choices of a group.
    const MOST: u32 = Route::warp_choices(X as u32);

    /// Bits of an expert's index.
    const EXPERT_BITS: u32 = expert_bits(X);

    /// Number of choices of the group; 0 for an empty segment.
    #[inline(always)]
    fn length(&self) -> u32 {
        (self.end - self.first).min(Self::MOST)
    }

    #[inline(always)]
    fn is_last(&self) -> bool {
        self.end - self.first <= Self::MOST
    }

    /// Address of a choice of the group.
    #[inline(always)]
    fn choice(&self, choice: u32) -> SharedAddress {
        self.choices + choice * NUMBER
    }

    /// Address of the number of a choice of the group in an array.
    #[inline(always)]
    fn place_in(&self, numbers: GlobalAddress, choice: u32) -> GlobalAddress {
        numbers + u64::from(self.first + choice) * u64::from(NUMBER)
    }

    /// Loads the numbers of the group's choices from an array. Each lane waits for its own loads.
    ///
    /// # Safety
    /// The array is complete, and has a number for each choice of the group.
    #[inline(always)]
    unsafe fn load(&self, numbers: GlobalAddress) {
        let (mut choice, length) = (self.lane, self.length());
        while choice < length.next_multiple_of(PAIR_CHOICES) {
            // SAFETY: only this lane writes these places of shared memory; the predicate disables the read of a missing
            // choice.
            unsafe { cp_async_4_or_zero(choice < length, self.choice(choice), self.place_in(numbers, choice)) };
            choice += WARP_SIZE;
        }
        cp_async_commit_group();
        cp_async_wait_group::<0>();
    }

    /// Counts the choices per expert, and gives each choice its rank.
    ///
    /// # Safety
    /// The whole warp calls this together. The counts belong to this warp, and the ids are loaded.
    #[inline(always)]
    unsafe fn rank(&self, route: &Route, counts: SharedAddress) {
        let (mut first, length) = (0, self.length());
        while first < length {
            let choice = |round: usize| first + round as u32 * WARP_SIZE + self.lane;
            let mut experts = [NO_ROW; PAIR];
            // SAFETY: the choices belong to the lane, the experts are below the number of named or local experts, and
            // the counts belong to the warp. All lanes run the same rounds.
            unsafe {
                for round in 0..PAIR {
                    let id = ld_shared_b32(self.choice(choice(round)));
                    // Negative ids are large here, as unsigned numbers.
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
                let same = lanes_with::<X>(experts, route.experts);
                for round in 0..PAIR {
                    let (expert, same) = (experts[round], same[round]);
                    let count = counts + if expert == NO_ROW { 0 } else { expert * NUMBER };
                    let (before, rank) = (ld_shared_b32(count), (same & self.below).count_ones());
                    sync_warp(ALL_LANES);
                    // The first lane of those with the same expert counts for all of them.
                    if expert != NO_ROW && rank == 0 {
                        st_shared_b32(count, before + same.count_ones());
                    }
                    sync_warp(ALL_LANES);
                    let known = expert + ((before + rank) << Self::EXPERT_BITS);
                    st_shared_b32(self.choice(choice(round)), if expert == NO_ROW { NO_ROW } else { known });
                }
            }
            first += PAIR_CHOICES;
        }
    }

    /// Stores the experts and ranks of the choices in the list of places, so that the warp can continue with its next
    /// group.
    ///
    /// # Safety
    /// The list of places is valid for the choices, and nobody else accesses their places.
    #[inline(always)]
    unsafe fn keep(&self, places: GlobalAddress) {
        let mut choice = self.lane;
        while choice < self.length() {
            // SAFETY: the choice has its own place in the list.
            unsafe { st_global_b32_where(true, self.place_in(places, choice), ld_shared_b32(self.choice(choice))) };
            choice += WARP_SIZE;
        }
    }

    /// Gives the choices their places among the CTA's sorted choices, and writes the row of each choice. Calls `write`
    /// for each choice of the group that has a row, with the choice, its expert, its place and its row.
    ///
    /// # Safety
    /// The counts are the warp's first places, and `shift` has the distance of the CTA's rows from their places for
    /// each expert. The list of places is valid for the choices, and nobody else writes their places.
    #[inline(always)]
    unsafe fn place(
        &self,
        counts: SharedAddress,
        shift: SharedAddress,
        places: GlobalAddress,
        mut write: impl FnMut(u32, u32, u32, u32),
    ) {
        let (mut first, length) = (0, self.length());
        while first < length {
            for round in 0..PAIR as u32 {
                let choice = first + round * WARP_SIZE + self.lane;
                // SAFETY: the choice belongs to the lane, the expert has a count and a shift, and the choice has its
                // own place in the list.
                unsafe {
                    let known = ld_shared_b32(self.choice(choice));
                    let has_row = known != NO_ROW;
                    let expert = if has_row { known % const { experts(X) } } else { 0 };
                    let place = ld_shared_b32(counts + expert * NUMBER) + (known >> Self::EXPERT_BITS);
                    let row = place.wrapping_add(ld_shared_b32(shift + expert * NUMBER));
                    let number = if has_row { row } else { NO_ROW };
                    st_global_b32_where(choice < length, self.place_in(places, choice), number);
                    if has_row {
                        write(choice, expert, place, row);
                    }
                }
            }
            first += PAIR_CHOICES;
        }
    }
}

/// Tokens of choices that follow a first choice, without a division per choice.
struct Tokens {
    /// Token of the first choice, and the index of the choice in its token.
    first: u32,
    choice: u32,
    /// Reciprocal of k.
    reciprocal: u32,
}

impl Tokens {
    /// Number of fractional bits of the reciprocal.
    const BITS: u32 = 18;

    #[inline(always)]
    fn new(first: u32, top_k: u32) -> Self {
        // SAFETY: a token names at least one expert.
        unsafe { assert_unchecked(top_k > 0) };
        Self { first: first / top_k, choice: first % top_k, reciprocal: (1u32 << Self::BITS).div_ceil(top_k) }
    }

    /// Returns the token of the choice that follows the first one by `choice`, which is at most the number of choices that
    /// a CTA sorts.
    #[inline(always)]
    fn of(&self, choice: u32) -> u32 {
        // Rounding the reciprocal up increases the quotient by less than 1/k, so its integer part is exact. The product stays
        // below 2³².
        const {
            let most = Route::WARPS * Route::WARP_CHOICES;
            assert!((most + MAX_TOP_K) * (MAX_TOP_K - 1) < 1 << Self::BITS && (most as u64) << Self::BITS < 1 << 32);
        }
        self.first + (((self.choice + choice) * self.reciprocal) >> Self::BITS)
    }
}

/// A divisor with its precomputed reciprocal.
pub(super) struct Reciprocal {
    divisor: u32,
    /// (2³² − 1) / divisor, rounded down.
    reciprocal: u32,
}

impl Reciprocal {
    /// Returns the reciprocal of `divisor`, which is greater than 1.
    #[inline(always)]
    fn of(divisor: u32) -> Self {
        // For a dividend of 2³² − 1, the result is at most 1 too small. Then the quotient of any number is at most 1
        // too small, which `quotient` corrects.
        Self { divisor, reciprocal: u32::MAX / divisor }
    }

    #[inline(always)]
    fn quotient(&self, number: u32) -> u32 {
        let quotient = ((u64::from(number) * u64::from(self.reciprocal)) >> 32) as u32;
        quotient + (number - quotient * self.divisor >= self.divisor) as u32
    }
}

/// Returns `rows`, rounded up to a multiple of a power of two.
#[inline(always)]
pub(super) fn filled(rows: u32, row_multiple: u32) -> u32 {
    (rows + row_multiple - 1) & !(row_multiple - 1)
}
