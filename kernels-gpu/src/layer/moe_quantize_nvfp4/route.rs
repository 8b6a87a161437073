//! Few tokens whose lists nobody has made yet: each CTA counts the choices of each expert in its own shared memory, and
//! finds its row. So no launch comes before, and no CTA waits for another one.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{GlobalAddress, ld_global_b32, st_global_b32, st_global_b32_where},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel,
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, red_shared_add_u32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_up, warp_vote_ballot},
};

use super::{
    abi::{Quantize, ROUTE_EXPERTS_AT, ROUTE_FIRSTS_AT, ROUTE_SUMS_AT, RouteQuantize},
    few::store,
    kernel::{NUMBER, Row, Token, number},
};
use crate::{
    format::{BLOCK, OUTPUT_BF16, OUTPUT_F16},
    lists::{NO_ROW, token_tiles},
};

/// Bits of a half of a word. The low half holds a number of rows, the high half a number of tiles.
const HALF: u32 = 16;

/// Bytes of a number in shared memory.
const WORD: u32 = size_of::<u32>() as u32;

/// Makes lists and quantizes few tokens of f16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::FEW_THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_route_f16(launch: RouteQuantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_F16>(&launch) }
}

/// Makes lists and quantizes few tokens of bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::FEW_THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_route_bf16(launch: RouteQuantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_BF16>(&launch) }
}

/// A thread's part of the kernel, for tokens of format `FORMAT`.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this.
#[inline(always)]
unsafe fn run<const FORMAT: u32>(route: &RouteQuantize) {
    let launch = &route.quantize;
    let pieces = launch.few_pieces();
    let choice = thread::block_idx_x().checked_div(pieces).unwrap_or(0);
    let piece = thread::block_idx_x() - choice * pieces;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    // SAFETY: the previous grids have ended. The grid has one CTA per choice and piece. All threads of the CTA are here
    // at each barrier. Each block of a row belongs to one thread, each place to a thread of the choice's first CTA.
    unsafe {
        let token = Token::<FORMAT>::new(launch, choice.checked_div(launch.top_k).unwrap_or(0));
        let block = piece * Quantize::FEW_THREADS + thread::thread_idx_x();
        let lists = Lists { shared: dynamic_shared_address(), experts: launch.experts };
        lists.count(route);
        let numbers = token.block(block, block < launch.k / BLOCK);
        lists.add_up(route.tile_tokens);
        if thread::block_idx_x() == 0 {
            lists.write(launch);
        }
        let row = lists.row(launch, choice);
        let of_choice = GlobalAddress::new(launch.places) + u64::from(choice) * NUMBER;
        st_global_b32_where(block == 0, of_choice, row.index);
        if row.index != NO_ROW {
            store(launch, &token, row, block, &numbers);
        }
    }
}

/// The CTA's lists in shared memory.
#[derive(Clone, Copy)]
struct Lists {
    shared: SharedAddress,
    experts: u32,
}

impl Lists {
    /// Place of a choice's expert.
    #[inline(always)]
    fn expert(self, choice: u32) -> SharedAddress {
        self.shared + (ROUTE_EXPERTS_AT + choice * WORD)
    }

    /// Place of an expert's first row and first tile; of the number of its rows until they are added up.
    #[inline(always)]
    fn first(self, expert: u32) -> SharedAddress {
        self.shared + (ROUTE_FIRSTS_AT + expert * WORD)
    }

    /// Place of the sum of a warp's experts.
    #[inline(always)]
    fn sum(self, warp: u32) -> SharedAddress {
        self.shared + (ROUTE_SUMS_AT + warp * WORD)
    }

    /// Writes the expert of each choice, and counts each expert's choices.
    ///
    /// # Safety
    /// Ids and map are complete, and T·k fits. All threads of the CTA call this.
    #[inline(always)]
    unsafe fn count(self, route: &RouteQuantize) {
        let Quantize { token_count, top_k, experts, .. } = route.quantize;
        // SAFETY: the loads read choices below T·k, and the map at ids below its length. Each thread has its own
        // places, and the barriers are between the zeros, the counts and their readers.
        unsafe {
            let mut place = thread::thread_idx_x();
            while place <= self.experts {
                st_shared_b32(self.first(place), 0);
                place += Quantize::FEW_THREADS;
            }
            thread::sync_threads();
            let mut choice = thread::thread_idx_x();
            while choice < token_count * top_k {
                let mut expert = number(route.ids, choice);
                // A negative id is large as a u32.
                if expert >= route.named_experts {
                    expert = NO_ROW;
                } else if route.map != 0 {
                    expert = ld_global_b32(GlobalAddress::new(route.map) + u64::from(expert) * NUMBER);
                }
                if expert < experts {
                    red_shared_add_u32(self.first(expert), 1);
                } else {
                    expert = NO_ROW;
                }
                st_shared_b32(self.expert(choice), expert);
                choice += Quantize::FEW_THREADS;
            }
            thread::sync_threads();
        }
    }

    /// Adds up the numbers of rows and of tiles of the experts before each one. Each thread has a few experts.
    ///
    /// # Safety
    /// [`Self::count`] was called. All threads of the CTA call this.
    #[inline(always)]
    unsafe fn add_up(self, tile_tokens: u32) {
        let (thread, warp) = (thread::thread_idx_x(), thread::thread_idx_x() / WARP_SIZE);
        let per_thread = self.experts / Quantize::FEW_THREADS + 1;
        let of_thread =
            || (thread * per_thread..(thread + 1) * per_thread).take_while(|&expert| expert <= self.experts);
        // SAFETY: each thread has its own experts' places, and the barriers are between writes and reads. Tiles have
        // tokens.
        unsafe {
            assert_unchecked(tile_tokens > 0);
            let mut all = 0;
            for expert in of_thread() {
                let rows = ld_shared_b32(self.first(expert));
                let both = rows | token_tiles(rows, tile_tokens) << HALF;
                st_shared_b32(self.first(expert), both);
                all += both;
            }
            let mut sum = all;
            let mut lanes = 1;
            while lanes < WARP_SIZE {
                let (before, is_there) = warp_shuffle_up(ALL_LANES, sum, lanes, WARP_SIZE);
                sum += if is_there { before } else { 0 };
                lanes *= 2;
            }
            if lane_id() == WARP_SIZE - 1 {
                st_shared_b32(self.sum(warp), sum);
            }
            thread::sync_threads();
            let mut first = sum - all;
            for before in 0..warp {
                first += ld_shared_b32(self.sum(before));
            }
            for expert in of_thread() {
                let both = ld_shared_b32(self.first(expert));
                st_shared_b32(self.first(expert), first);
                first += both;
            }
            thread::sync_threads();
        }
    }

    /// Writes the first rows and tiles of all experts to the lists in memory.
    ///
    /// # Safety
    /// [`Self::add_up`] was called. All threads of one CTA of the grid call this.
    #[inline(always)]
    unsafe fn write(self, launch: &Quantize) {
        let mut expert = thread::thread_idx_x();
        while expert <= self.experts {
            // SAFETY: both lists have one number per expert and one more, and only this thread writes this one.
            unsafe {
                let both = ld_shared_b32(self.first(expert));
                let place = |list: u64| GlobalAddress::new(list) + u64::from(expert) * NUMBER;
                st_global_b32(place(launch.firsts), both & 0xffff);
                st_global_b32(place(launch.tile_firsts), both >> HALF);
            }
            expert += Quantize::FEW_THREADS;
        }
    }

    /// Returns the row of a choice. Its place among its expert's rows is the number of earlier choices of the same
    /// expert.
    ///
    /// # Safety
    /// [`Self::add_up`] was called. The choice exists, and there is one input scale per expert. The whole warp calls
    /// this together.
    #[inline(always)]
    unsafe fn row(self, launch: &Quantize, choice: u32) -> Row {
        // SAFETY: the loads read choices up to this one and experts of the layer. The whole warp is here.
        unsafe {
            let own = ld_shared_b32(self.expert(choice));
            if own == NO_ROW {
                return Row::NONE;
            }
            let (mut earlier, mut start) = (0, 0);
            while start < choice {
                let other = start + lane_id();
                let is_same = other < choice && ld_shared_b32(self.expert(other)) == own;
                earlier += warp_vote_ballot(ALL_LANES, is_same).count_ones();
                start += WARP_SIZE;
            }
            let both = [0, 1].map(|after| ld_shared_b32(self.first(own + after)));
            let (rows, tiles) = (both.map(|both| both & 0xffff), both.map(|both| both >> HALF));
            Row::of_lists(rows[0] + earlier, rows, tiles, f32::from_bits(number(launch.input_scales, own)))
        }
    }
}
