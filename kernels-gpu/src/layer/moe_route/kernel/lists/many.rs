//! Numbers of rows, and places of experts, where each thread has several experts.

use cuda_std::{
    cluster::{mapa, wait_cluster},
    global::{GlobalAddress, st_global_b32_where},
    mbarrier::{mbarrier_wait_parity_cluster, st_async_shared_cluster_b32},
    shared::{ld_shared_b32, st_shared_b32},
    thread,
};

use super::{Counted, Experts, Maker, NUMBER, Reciprocal, SUMS, filled, scan_warp, sum_of_warps};
use crate::{
    layer::moe_route::abi::Route,
    lists::{Lists, NO_ROW},
};

/// Number of experts of a thread.
const MANY: usize = 2;

impl Maker<'_, MANY> {
    /// The thread's expert of this index. It may not exist.
    #[inline(always)]
    fn expert(&self, index: usize) -> u32 {
        self.thread * MANY as u32 + index as u32
    }

    /// Writes the numbers of a thread's expert to the lists: the ends of its rows and tiles, and [`NO_ROW`] from
    /// `padding`, the end of its rows without padding. The first threads write the beginnings of the lists.
    ///
    /// # Safety
    /// The lists are valid for these numbers, and only this CTA writes them. A missing expert has no padding.
    #[inline(always)]
    unsafe fn write_expert(&self, index: usize, is_expert: bool, padding: u32, end: u32, tiles_end: u32) {
        let &Self { ref lists, thread, .. } = self;
        let list = |offset: u64| GlobalAddress::new(self.route.lists) + offset;
        let number = |offset: u64, index: u32| list(offset) + u64::from(index * NUMBER);
        // SAFETY: the lists have a number for each of these indices, and no other thread writes it.
        unsafe {
            if index == 0 {
                st_global_b32_where(thread < Lists::TICKETS, number(lists.tickets, thread), 0);
                st_global_b32_where(thread == 0, number(lists.firsts, 0), 0);
                st_global_b32_where(thread == 0, number(lists.tile_firsts, 0), 0);
            }
            let after = self.expert(index) + 1;
            st_global_b32_where(is_expert, number(lists.firsts, after), end);
            st_global_b32_where(is_expert, number(lists.tile_firsts, after), tiles_end);
            for row in padding..end {
                st_global_b32_where(true, number(lists.rows, row), NO_ROW);
            }
        }
    }
}

impl Experts for Maker<'_, MANY> {
    type Counted = [Counted; MANY];

    #[inline(always)]
    unsafe fn count_rows(&self) -> [Counted; MANY] {
        let &Self { shared, blocks, block, .. } = self;
        let of_warps = [0; Route::WARPS as usize];
        let mut counted = [Counted { is_expert: false, of_warps, here: 0, before: 0, all: 0, filled: 0 }; MANY];
        // SAFETY: all warps have counted, and the thread reads the counts of its experts. Totals are written after all
        // CTAs have started, each by one thread, and read after a barrier of the cluster, after which nobody accesses
        // another CTA's memory.
        unsafe {
            for index in 0..MANY {
                let (expert, counted) = (self.expert(index), &mut counted[index]);
                counted.is_expert = expert < self.route.experts;
                if counted.is_expert {
                    for warp in 0..counted.of_warps.len() {
                        counted.of_warps[warp] = ld_shared_b32(shared.count(warp as u32, expert));
                    }
                    for warp in 0..counted.of_warps.len() {
                        counted.here += counted.of_warps[warp];
                    }
                }
                counted.all = counted.here;
            }
            if blocks > 1 {
                wait_cluster();
                for index in 0..MANY {
                    if counted[index].is_expert {
                        for other in 0..blocks {
                            let total = mapa(shared.total(block, self.expert(index)), other);
                            st_async_shared_cluster_b32(total, counted[index].here, shared.barrier().in_block(other));
                        }
                    }
                }
                mbarrier_wait_parity_cluster(shared.barrier(), 0);
                for index in 0..MANY {
                    let (expert, counted) = (self.expert(index), &mut counted[index]);
                    if counted.is_expert {
                        counted.all = 0;
                        for other in 0..blocks {
                            let total = ld_shared_b32(shared.total(other, expert));
                            counted.before += if other < block { total } else { 0 };
                            counted.all += total;
                        }
                    }
                }
            }
        }
        for index in 0..MANY {
            counted[index].filled = filled(counted[index].all, self.route.row_multiple);
        }
        counted
    }

    #[inline(always)]
    unsafe fn assign(&self, counted: &[Counted; MANY], expert_warps: u32, tile_reciprocal: &Reciprocal) {
        let &Self { route, shared, warp, .. } = self;
        let (mut in_warp, mut of_thread, mut tiles) = ([0; SUMS], [0; SUMS], [0; MANY]);
        // SAFETY: whole warps scan, and read the sums after a barrier that every thread reaches. The counts and the
        // shift of an expert belong to its thread.
        unsafe {
            if warp < expert_warps {
                for index in 0..MANY {
                    let Counted { here, filled, .. } = counted[index];
                    tiles[index] = tile_reciprocal.quotient(filled + route.tile_tokens - 1);
                    of_thread[0] += here;
                    of_thread[1] += filled;
                    of_thread[2] += tiles[index];
                }
                in_warp = scan_warp(of_thread, shared, warp);
            }
            thread::sync_threads();
            if warp < expert_warps {
                let mut place = in_warp[0] - of_thread[0] + sum_of_warps(shared.sums(0), warp);
                let mut end = in_warp[1] + sum_of_warps(shared.sums(1), warp) - of_thread[1];
                let mut begins = [0; MANY];
                for index in 0..MANY {
                    let Counted { is_expert, of_warps, before, filled, .. } = counted[index];
                    let begin = end;
                    end += filled;
                    begins[index] = begin;
                    if is_expert {
                        let expert = self.expert(index);
                        st_shared_b32(shared.shift(expert), (begin + before).wrapping_sub(place));
                        for warp in 0..of_warps.len() {
                            st_shared_b32(shared.count(warp as u32, expert), place);
                            place += of_warps[warp];
                        }
                    }
                }
                if self.block == 0 {
                    let mut tiles_end = in_warp[2] + sum_of_warps(shared.sums(2), warp) - of_thread[2];
                    for index in 0..MANY {
                        let Counted { is_expert, all, filled, .. } = counted[index];
                        tiles_end += tiles[index];
                        self.write_expert(index, is_expert, begins[index] + all, begins[index] + filled, tiles_end);
                    }
                }
            }
        }
    }
}
