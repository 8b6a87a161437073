//! The entry for the usual rules and up to 512 experts.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{GlobalAddress, st_global_b32_where},
    kernel,
    shared::{dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_reduce_max_u32, warp_reduce_min_u32},
};

use super::abi::{Launch, SIGMOID, SMALL_EXPERTS, SOFTMAX, SOFTMAX_OF_CHOSEN, THREADS, TOKENS};
use super::lane::{Logits, NUMBER, best, choose, for_lane_experts, of_expert, powers, sum};
use super::score::{LEAST_SUM, key, power, score_of, sigmoid};

/// Number of experts per lane.
const LANE_EXPERTS: usize = (SMALL_EXPERTS / WARP_SIZE) as usize;

/// Selects the experts of each token.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = THREADS)]
pub unsafe fn router(launch: Launch) {
    let warp = thread::thread_idx_x() / WARP_SIZE;
    let token = thread::block_idx_x() * TOKENS + warp;
    // All lanes of a warp have the same token.
    if token >= launch.token_count {
        return;
    }
    let Launch { logits: address, pitch, format, experts, .. } = launch;
    let logits = Logits { address, pitch, format, experts, token, lane: lane_id() };
    let token = Token { launch: &launch, logits };
    // SAFETY: all lanes of the warp are here. The token's logits and the biases of existing experts are read, and only
    // this warp writes the token's ids and weights.
    unsafe {
        let (mut keys, has_nan) = logits.keys(|is_there, expert, logit| match launch.bias {
            0 => logit,
            bias => sigmoid(logit) + of_expert(bias, is_there, expert),
        });
        if launch.groups > 1 {
            token.keep_groups(warp, &mut keys);
        }
        let largest = warp_reduce_max_u32(ALL_LANES, best(&keys).0);
        let sum_of_all = if launch.scoring == SOFTMAX { sum(powers(&keys, score_of(largest))) } else { 0.0 };
        let id = choose(&mut keys, logits.lane, launch.top_k, 0);
        token.write(id, score_of(largest), sum_of_all, has_nan);
    }
}

/// A token, as a lane of its warp handles it.
struct Token<'l> {
    launch: &'l Launch,
    logits: Logits,
}

impl Token<'_> {
    /// Removes the experts of all but the best groups: the groups with the greatest sum of their two best scores.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn keep_groups(&self, warp: u32, keys: &mut [u32; LANE_EXPERTS]) {
        let Launch { experts, groups, top_groups, .. } = *self.launch;
        // SAFETY: there is at least one group, and each group has experts.
        let size = unsafe {
            assert_unchecked(groups > 0);
            let size = experts / groups;
            assert_unchecked(size > 0);
            size
        };
        let at = |expert: u32| dynamic_shared_address() + (warp * experts + expert) * NUMBER as u32;
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
            let mut group = 0;
            if self.logits.lane < groups {
                let (mut first, mut second) = (0, 0);
                // Each lane begins at a different expert, so that lanes access different banks of shared memory.
                let mut member = self.logits.lane % size;
                for _ in 0..size {
                    let key = ld_shared_b32(at(self.logits.lane * size + member));
                    (first, second) = if key > first { (key, first) } else { (first, second.max(key)) };
                    member = if member + 1 == size { 0 } else { member + 1 };
                }
                group = key(score_of(first) + score_of(second));
            }
            let mut kept = 0u32;
            for _ in 0..top_groups {
                let greatest = warp_reduce_max_u32(ALL_LANES, group);
                let best = warp_reduce_min_u32(ALL_LANES, if group == greatest { self.logits.lane } else { u32::MAX });
                group = if self.logits.lane == best { 0 } else { group };
                kept |= 1 << best;
            }
            for_lane_experts!(index of LANE_EXPERTS, {
                let of_group = (index as u32 * WARP_SIZE + self.logits.lane) / size;
                let is_kept = of_group < groups && kept >> of_group & 1 != 0;
                keys[index] = if is_kept { keys[index] } else { 0 };
            });
        }
    }

    /// Writes the lane's choice with its weight.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn write(&self, id: u32, largest: f32, sum_of_all: f32, has_nan: bool) {
        let Launch { ids, weights, top_k, scoring, scale, .. } = *self.launch;
        let is_choice = self.logits.lane < top_k;
        // SAFETY: `id` is a chosen expert, so it has a logit. Only this lane writes its place of ids and weights.
        unsafe {
            let logit = self.logits.load(is_choice, id);
            let of_choice = |number: f32| if is_choice { number } else { 0.0 };
            let weight = if scoring == SOFTMAX || scoring == SOFTMAX_OF_CHOSEN {
                let power = of_choice(power(logit, largest));
                power / if scoring == SOFTMAX { sum_of_all } else { sum(power) }
            } else {
                let sigmoid = of_choice(sigmoid(logit));
                let share = if scoring == SIGMOID { sigmoid } else { sigmoid / (sum(sigmoid) + LEAST_SUM) };
                share * scale
            };
            let weight = if has_nan { f32::NAN } else { weight };
            let place = (u64::from(self.logits.token) * u64::from(top_k) + u64::from(self.logits.lane)) * NUMBER;
            st_global_b32_where(is_choice, GlobalAddress::new(ids) + place, id);
            st_global_b32_where(is_choice, GlobalAddress::new(weights) + place, weight.to_bits());
        }
    }
}
