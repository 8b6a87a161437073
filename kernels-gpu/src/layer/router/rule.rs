//! The entry for any rule and up to 1024 experts.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    kernel,
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_reduce_max_u32, warp_reduce_min_u32},
};

use super::abi::{MAX_EXPERTS, RuleLaunch, SCORE_SIGMOID, SCORE_SOFTMAX, THREADS, TOKENS};
use super::lane::{Logits, NUMBER, best, choose, for_lane_experts, of_expert, powers, sum};
use super::score::{LEAST_SUM, key, power, score_of, sigmoid, sqrt_softplus};

/// Number of experts per lane.
const LANE_EXPERTS: usize = (MAX_EXPERTS / WARP_SIZE) as usize;

/// An id that names no expert.
const NO_EXPERT: u32 = u32::MAX;

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
    let RuleLaunch { logits: address, pitch, format, experts, .. } = launch;
    let logits = Logits { address, pitch, format, experts, token, lane: lane_id() };
    let token = Token { launch: &launch, logits };
    // SAFETY: all lanes of the warp are here. The token's logits and id and the numbers of existing experts are read,
    // and only this warp writes the token's ids and weights.
    unsafe {
        let (mut keys, has_nan) = logits.keys(|_, _, logit| logit);
        let largest = score_of(warp_reduce_max_u32(ALL_LANES, best(&keys).0));
        let sum_of_all = if launch.score == SCORE_SOFTMAX { sum(powers(&keys, largest)) } else { 0.0 };
        if launch.bias != 0 {
            token.add_biases(&mut keys, largest, sum_of_all);
        }
        if launch.groups > 1 {
            token.keep_groups(warp, &mut keys);
        }
        let id =
            if launch.table != 0 { token.named() } else { choose(&mut keys, logits.lane, launch.top_k, NO_EXPERT) };
        token.write(id, largest, sum_of_all, has_nan);
    }
}

/// A token, as a lane of its warp handles it.
struct Token<'l> {
    launch: &'l RuleLaunch,
    logits: Logits,
}

impl Token<'_> {
    /// Score of a logit.
    #[inline(always)]
    fn score(&self, logit: f32, largest: f32, sum_of_all: f32) -> f32 {
        match self.launch.score {
            SCORE_SOFTMAX => power(logit, largest) / sum_of_all,
            SCORE_SIGMOID => sigmoid(logit),
            _ => sqrt_softplus(logit),
        }
    }

    /// Replaces the keys of logits by the keys of scores plus biases.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and there are biases.
    #[inline(always)]
    unsafe fn add_biases(&self, keys: &mut [u32; LANE_EXPERTS], largest: f32, sum_of_all: f32) {
        for_lane_experts!(index of LANE_EXPERTS, {
            if index as u32 * WARP_SIZE < self.launch.experts {
                let is_there = keys[index] != 0;
                let expert = index as u32 * WARP_SIZE + self.logits.lane;
                // SAFETY: only existing experts have a key, and each has a bias; otherwise nothing is read.
                let bias = unsafe { of_expert(self.launch.bias, is_there, expert) };
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
            for_lane_experts!(index of LANE_EXPERTS, {
                let expert = index as u32 * WARP_SIZE + self.logits.lane;
                if expert < experts {
                    st_shared_b32(at(expert), keys[index]);
                }
            });
            sync_warp(ALL_LANES);
            let mut group = self.logits.lane;
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
                let (mut own, mut own_group, mut group) = (0, 0, self.logits.lane);
                while group < groups {
                    let key = ld_shared_b32(of_group(group));
                    (own, own_group) = if key > own { (key, group) } else { (own, own_group) };
                    group += WARP_SIZE;
                }
                let greatest = warp_reduce_max_u32(ALL_LANES, own);
                let best = warp_reduce_min_u32(ALL_LANES, if own == greatest { own_group } else { u32::MAX });
                // 0 marks a group that is kept; keys are never 0.
                if best % WARP_SIZE == self.logits.lane {
                    st_shared_b32(of_group(best), 0);
                }
                sync_warp(ALL_LANES);
            }
            for_lane_experts!(index of LANE_EXPERTS, {
                let expert = index as u32 * WARP_SIZE + self.logits.lane;
                if expert < experts && ld_shared_b32(of_group(expert / size)) != 0 {
                    keys[index] = 0;
                }
            });
        }
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
            let id = ld_global_b32_or_zero(true, GlobalAddress::new(token_ids) + u64::from(self.logits.token) * NUMBER);
            let is_there = self.logits.lane < top_k && id < vocabulary;
            let place = (u64::from(id) * u64::from(top_k) + u64::from(self.logits.lane)) * NUMBER;
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
        let is_choice = self.logits.lane < top_k;
        let is_there = is_choice && id < experts;
        // SAFETY: `id` is an expert if `is_there`, so it has a logit and a factor. Only this lane writes its place of
        // ids and weights. The whole warp adds.
        unsafe {
            let logit = self.logits.load(is_there, id);
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
                weight *= of_expert(expert_scale, is_there, id);
            }
            let weight = if has_nan { f32::NAN } else { weight };
            let id = if is_there && id < null_from { id } else { NO_EXPERT };
            let place = (u64::from(self.logits.token) * u64::from(top_k) + u64::from(self.logits.lane)) * NUMBER;
            st_global_b32_where(is_choice, GlobalAddress::new(ids) + place, id);
            st_global_b32_where(is_choice, GlobalAddress::new(weights) + place, weight.to_bits());
        }
    }
}
