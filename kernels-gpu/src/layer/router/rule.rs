//! The entry for any rule and up to 1024 experts. Lane L has the experts L, L + 32, and so on, as keys in registers, and
//! the L-th chosen expert. `kernel.rs` has the entry for the usual rules and up to 512 experts.

use core::hint::assert_unchecked;

use cuda_std::{
    convert::cvt_f32_f16,
    global::{GlobalAddress, ld_global_b32_or_zero, ld_global_nc_b16_or_zero, st_global_b32_where},
    kernel,
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_reduce_max_u32, warp_reduce_min_u32, warp_vote_ballot},
};

use super::abi::{LOGITS_F32, MAX_EXPERTS, RuleLaunch, SCORE_SIGMOID, SCORE_SOFTMAX, THREADS, TOKENS};
use super::kernel::sum;
use super::score::{LEAST_SUM, key, power, score_of, sigmoid, sqrt_softplus};
use crate::format::OUTPUT_BF16;

/// Number of experts per lane.
const LANE_EXPERTS: usize = (MAX_EXPERTS / WARP_SIZE) as usize;

/// Bytes of a 32-bit number.
const NUMBER: u64 = 4;

/// An id that names no expert.
const NO_EXPERT: u32 = u32::MAX;

/// Repeats a block for each of a lane's experts, as `for_lane_experts!` in `kernel.rs`.
macro_rules! for_lane_experts {
    ($index:ident, $block:block) => {
        for_lane_experts!(
            $index in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31, $block
        )
    };
    ($index:ident in $($value:literal)*, $block:block) => {{
        const _: () = assert!([$($value),*].len() == LANE_EXPERTS);
        $({
            let $index: usize = $value;
            $block
        })*
    }};
}

/// Selects the experts of each token.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = THREADS)]
pub unsafe fn router_rule(launch: RuleLaunch) {
    let warp = thread::thread_idx_x() / WARP_SIZE;
    let token = thread::block_idx_x() * TOKENS + warp;
    // All lanes of a warp have the same token.
    if token >= launch.token_count {
        return;
    }
    let token = Token { launch: &launch, token, lane: lane_id() };
    // SAFETY: all lanes of the warp are here. The token's logits and id and the numbers of existing experts are read,
    // and only this warp writes the token's ids and weights.
    unsafe {
        let (mut keys, has_nan) = token.logits();
        let largest = score_of(warp_reduce_max_u32(ALL_LANES, best(&keys).0));
        let sum_of_all = if launch.score == SCORE_SOFTMAX { sum(powers(&keys, largest)) } else { 0.0 };
        if launch.bias != 0 {
            token.add_biases(&mut keys, largest, sum_of_all);
        }
        if launch.groups > 1 {
            token.keep_groups(warp, &mut keys);
        }
        let id = if launch.table != 0 { token.named() } else { token.choose(&mut keys) };
        token.write(id, largest, sum_of_all, has_nan);
    }
}

/// A token, as a lane of its warp handles it.
struct Token<'l> {
    launch: &'l RuleLaunch,
    token: u32,
    lane: u32,
}

impl Token<'_> {
    /// Loads the logit of an expert if `is_there`.
    ///
    /// # Safety
    /// If `is_there`, the expert exists.
    #[inline(always)]
    unsafe fn logit(&self, is_there: bool, expert: u32) -> f32 {
        let RuleLaunch { logits, pitch, format, .. } = *self.launch;
        let element = u64::from(self.token) * pitch + u64::from(expert);
        let at = |bytes: u64| GlobalAddress::new(logits) + element * bytes;
        // SAFETY: if `is_there`, the address is of a logit of the token; otherwise nothing is read.
        unsafe {
            if format == LOGITS_F32 {
                f32::from_bits(ld_global_b32_or_zero(is_there, at(NUMBER)))
            } else if format == OUTPUT_BF16 {
                f32::from_bits(u32::from(ld_global_nc_b16_or_zero(is_there, at(NUMBER / 2))) << 16)
            } else {
                cvt_f32_f16(ld_global_nc_b16_or_zero(is_there, at(NUMBER / 2)))
            }
        }
    }

    /// Loads the number of an expert from a list if `is_there`.
    ///
    /// # Safety
    /// If `is_there`, the address is of a list with a number for this expert.
    #[inline(always)]
    unsafe fn of_expert(list: u64, is_there: bool, expert: u32) -> f32 {
        let address = GlobalAddress::new(list) + u64::from(expert) * NUMBER;
        // SAFETY: if `is_there`, the list has this number; otherwise nothing is read.
        f32::from_bits(unsafe { ld_global_b32_or_zero(is_there, address) })
    }

    /// Score of a logit.
    #[inline(always)]
    fn score(&self, logit: f32, largest: f32, sum_of_all: f32) -> f32 {
        match self.launch.score {
            SCORE_SOFTMAX => power(logit, largest) / sum_of_all,
            SCORE_SIGMOID => sigmoid(logit),
            _ => sqrt_softplus(logit),
        }
    }

    /// Returns the keys of the logits of the lane's experts, 0 for missing experts, and whether a logit of the token is
    /// NaN.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn logits(&self) -> ([u32; LANE_EXPERTS], bool) {
        let experts = self.launch.experts;
        let (mut keys, mut has_nan) = ([0; LANE_EXPERTS], false);
        for_lane_experts!(index, {
            // All lanes follow the same path.
            if index as u32 * WARP_SIZE < experts {
                let expert = index as u32 * WARP_SIZE + self.lane;
                let is_there = expert < experts;
                // SAFETY: if `is_there`, the expert exists, with its logit; otherwise nothing is read.
                let logit = unsafe { self.logit(is_there, expert) };
                has_nan |= is_there && logit.is_nan();
                keys[index] = if is_there { key(logit) } else { 0 };
            }
        });
        // SAFETY: the whole warp is here.
        let has_nan = unsafe { warp_vote_ballot(ALL_LANES, has_nan) } != 0;
        (keys, has_nan)
    }

    /// Replaces the keys of logits by the keys of scores plus biases.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and there are biases.
    #[inline(always)]
    unsafe fn add_biases(&self, keys: &mut [u32; LANE_EXPERTS], largest: f32, sum_of_all: f32) {
        for_lane_experts!(index, {
            if index as u32 * WARP_SIZE < self.launch.experts {
                let is_there = keys[index] != 0;
                let expert = index as u32 * WARP_SIZE + self.lane;
                // SAFETY: only existing experts have a key, and each has a bias; otherwise nothing is read.
                let bias = unsafe { Self::of_expert(self.launch.bias, is_there, expert) };
                let score = self.score(score_of(keys[index]), largest, sum_of_all) + bias;
                keys[index] = if is_there { key(score) } else { 0 };
            }
        });
    }

    /// Removes the experts of all but the best groups.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn keep_groups(&self, warp: u32, keys: &mut [u32; LANE_EXPERTS]) {
        let RuleLaunch { experts, groups, top_groups, best_two, .. } = *self.launch;
        // SAFETY: there is at least one group, and each group has experts.
        let size = unsafe {
            assert_unchecked(groups > 0);
            let size = experts / groups;
            assert_unchecked(size > 0);
            size
        };
        let of_warp = dynamic_shared_address() + warp * (experts + groups) * NUMBER as u32;
        let at = |place: u32| -> SharedAddress { of_warp + place * NUMBER as u32 };
        let of_group = |group: u32| at(experts + group);
        // SAFETY: this part of shared memory belongs to the warp, and is written before it is read. The whole warp is
        // here.
        unsafe {
            for_lane_experts!(index, {
                let expert = index as u32 * WARP_SIZE + self.lane;
                if expert < experts {
                    st_shared_b32(at(expert), keys[index]);
                }
            });
            sync_warp(ALL_LANES);
            let mut group = self.lane;
            while group < groups {
                let (mut first, mut second) = (0, 0);
                for member in 0..size {
                    let key = ld_shared_b32(at(group * size + member));
                    (first, second) = if key > first { (key, first) } else { (first, second.max(key)) };
                }
                let of_two = key(score_of(first) + score_of(second));
                st_shared_b32(of_group(group), if best_two != 0 { of_two } else { first });
                group += WARP_SIZE;
            }
            sync_warp(ALL_LANES);
            for _ in 0..top_groups {
                let (mut own, mut own_group, mut group) = (0, 0, self.lane);
                while group < groups {
                    let key = ld_shared_b32(of_group(group));
                    (own, own_group) = if key > own { (key, group) } else { (own, own_group) };
                    group += WARP_SIZE;
                }
                let greatest = warp_reduce_max_u32(ALL_LANES, own);
                let best = warp_reduce_min_u32(ALL_LANES, if own == greatest { own_group } else { u32::MAX });
                // 0 marks a group that is kept; keys are never 0.
                if best % WARP_SIZE == self.lane {
                    st_shared_b32(of_group(best), 0);
                }
                sync_warp(ALL_LANES);
            }
            for_lane_experts!(index, {
                let expert = index as u32 * WARP_SIZE + self.lane;
                if expert < experts && ld_shared_b32(of_group(expert / size)) != 0 {
                    keys[index] = 0;
                }
            });
        }
    }

    /// Selects the best experts, one after another. Lane L returns the L-th one.
    ///
    /// # Safety
    /// The whole warp calls this together. There are at least `top_k` experts.
    #[inline(always)]
    unsafe fn choose(&self, keys: &mut [u32; LANE_EXPERTS]) -> u32 {
        let mut id = NO_EXPERT;
        for choice in 0..self.launch.top_k {
            let (own, index) = best(keys);
            // SAFETY: the whole warp is here.
            let expert = unsafe {
                let greatest = warp_reduce_max_u32(ALL_LANES, own);
                let expert = index * WARP_SIZE + self.lane;
                warp_reduce_min_u32(ALL_LANES, if own == greatest { expert } else { u32::MAX })
            };
            for_lane_experts!(index, {
                let is_taken = index as u32 * WARP_SIZE + self.lane == expert;
                keys[index] = if is_taken { 0 } else { keys[index] };
            });
            id = if self.lane == choice { expert } else { id };
        }
        id
    }

    /// Returns the expert of lane L that the table gives to the token's id as the L-th one, or [`NO_EXPERT`].
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and there is a table.
    #[inline(always)]
    unsafe fn named(&self) -> u32 {
        let RuleLaunch { table, token_ids, top_k, experts, vocabulary, .. } = *self.launch;
        // SAFETY: each token has an id, and the table has `top_k` experts for each id below `vocabulary`; nothing else is
        // read.
        unsafe {
            let id = ld_global_b32_or_zero(true, GlobalAddress::new(token_ids) + u64::from(self.token) * NUMBER);
            let is_there = self.lane < top_k && id < vocabulary;
            let place = (u64::from(id) * u64::from(top_k) + u64::from(self.lane)) * NUMBER;
            let expert = ld_global_b32_or_zero(is_there, GlobalAddress::new(table) + place);
            if is_there && expert < experts { expert } else { NO_EXPERT }
        }
    }

    /// Writes the lane's choice with its weight.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn write(&self, id: u32, largest: f32, sum_of_all: f32, has_nan: bool) {
        let RuleLaunch { ids, weights, expert_scale, top_k, experts, score, renormalize, null_from, scale, .. } =
            *self.launch;
        let is_choice = self.lane < top_k;
        let is_there = is_choice && id < experts;
        // SAFETY: `id` is an expert if `is_there`, so it has a logit and a factor. Only this lane writes its place of
        // ids and weights. The whole warp adds.
        unsafe {
            let logit = self.logit(is_there, id);
            // The score without its division, which follows.
            let number = self.score(logit, largest, 1.0);
            let number = if is_there { number } else { 0.0 };
            let of_chosen = sum(number) + LEAST_SUM;
            let share = if renormalize != 0 {
                number / of_chosen
            } else if score == SCORE_SOFTMAX {
                number / sum_of_all
            } else {
                number
            };
            let mut weight = share * scale;
            if expert_scale != 0 {
                weight *= Self::of_expert(expert_scale, is_there, id);
            }
            let weight = if has_nan { f32::NAN } else { weight };
            let id = if is_there && id < null_from { id } else { NO_EXPERT };
            let place = (u64::from(self.token) * u64::from(top_k) + u64::from(self.lane)) * NUMBER;
            st_global_b32_where(is_choice, GlobalAddress::new(ids) + place, id);
            st_global_b32_where(is_choice, GlobalAddress::new(weights) + place, weight.to_bits());
        }
    }
}

/// Returns the greatest of a lane's keys and its index, the first one of equal keys.
#[inline(always)]
fn best(keys: &[u32; LANE_EXPERTS]) -> (u32, u32) {
    let mut best = (0, 0);
    for_lane_experts!(index, {
        best = if keys[index] > best.0 { (keys[index], index as u32) } else { best };
    });
    best
}

/// Returns the sum of the powers of a lane's experts.
#[inline(always)]
fn powers(keys: &[u32; LANE_EXPERTS], largest: f32) -> f32 {
    let mut sum = 0.0;
    for_lane_experts!(index, {
        let power = power(score_of(keys[index]), largest);
        sum += if keys[index] == 0 { 0.0 } else { power };
    });
    sum
}
