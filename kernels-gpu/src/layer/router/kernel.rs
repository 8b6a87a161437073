//! The kernel. Lane L has the experts L, L + 32, and so on, as keys in registers, and the L-th chosen expert.

use core::hint::assert_unchecked;

use cuda_std::{
    convert::cvt_f32_f16,
    global::{GlobalAddress, ld_global_b32_or_zero, ld_global_nc_b16_or_zero, st_global_b32_where},
    kernel,
    shared::{dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{
        ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_reduce_max_u32, warp_reduce_min_u32, warp_shuffle_xor,
        warp_vote_ballot,
    },
};

use super::abi::{LOGITS_F32, Launch, SIGMOID, SMALL_EXPERTS, SOFTMAX, SOFTMAX_OF_CHOSEN, THREADS, TOKENS};
use super::score::{LEAST_SUM, key, power, score_of, sigmoid};
use crate::format::OUTPUT_BF16;

/// Number of experts per lane.
const LANE_EXPERTS: usize = (SMALL_EXPERTS / WARP_SIZE) as usize;

/// Bytes of a 32-bit number.
const NUMBER: u64 = 4;

/// Repeats a block for each of a lane's experts. Keys stay in registers only if their indices are constants, and LLVM
/// does not unroll loops of this length.
macro_rules! for_lane_experts {
    ($index:ident, $block:block) => {
        for_lane_experts!($index in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15, $block)
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
pub unsafe fn router(launch: Launch) {
    let warp = thread::thread_idx_x() / WARP_SIZE;
    let token = thread::block_idx_x() * TOKENS + warp;
    // All lanes of a warp have the same token.
    if token >= launch.token_count {
        return;
    }
    let token = Token { launch: &launch, token, lane: lane_id() };
    // SAFETY: all lanes of the warp are here. The token's logits and the biases of existing experts are read, and only
    // this warp writes the token's ids and weights.
    unsafe {
        let (mut keys, has_nan) = token.keys();
        if launch.groups > 1 {
            token.keep_groups(warp, &mut keys);
        }
        let largest = warp_reduce_max_u32(ALL_LANES, best(&keys).0);
        let sum_of_all = if launch.scoring == SOFTMAX { sum(powers(&keys, score_of(largest))) } else { 0.0 };
        let id = token.choose(&mut keys);
        token.write(id, score_of(largest), sum_of_all, has_nan);
    }
}

/// A token, as a lane of its warp handles it.
struct Token<'l> {
    launch: &'l Launch,
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
        let Launch { logits, pitch, format, .. } = *self.launch;
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

    /// Returns the keys of the lane's experts, 0 for missing experts, and whether a logit of the token is NaN.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn keys(&self) -> ([u32; LANE_EXPERTS], bool) {
        let Launch { bias, experts, .. } = *self.launch;
        let (mut keys, mut has_nan) = ([0; LANE_EXPERTS], false);
        for_lane_experts!(index, {
            // All lanes follow the same path.
            if index as u32 * WARP_SIZE < experts {
                let expert = index as u32 * WARP_SIZE + self.lane;
                let is_there = expert < experts;
                // SAFETY: if `is_there`, the expert exists, with its logit and its bias; otherwise nothing is read.
                unsafe {
                    let logit = self.logit(is_there, expert);
                    has_nan |= is_there && logit.is_nan();
                    let score = if bias != 0 {
                        let address = GlobalAddress::new(bias) + u64::from(expert) * NUMBER;
                        sigmoid(logit) + f32::from_bits(ld_global_b32_or_zero(is_there, address))
                    } else {
                        logit
                    };
                    keys[index] = if is_there { key(score) } else { 0 };
                }
            }
        });
        // SAFETY: the whole warp is here.
        let has_nan = unsafe { warp_vote_ballot(ALL_LANES, has_nan) } != 0;
        (keys, has_nan)
    }

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
            for_lane_experts!(index, {
                let expert = index as u32 * WARP_SIZE + self.lane;
                if expert < experts {
                    st_shared_b32(at(expert), keys[index]);
                }
            });
            sync_warp(ALL_LANES);
            let mut group = 0;
            if self.lane < groups {
                let (mut first, mut second) = (0, 0);
                // Each lane begins at a different expert, so that lanes access different banks of shared memory.
                let mut member = self.lane % size;
                for _ in 0..size {
                    let key = ld_shared_b32(at(self.lane * size + member));
                    (first, second) = if key > first { (key, first) } else { (first, second.max(key)) };
                    member = if member + 1 == size { 0 } else { member + 1 };
                }
                group = key(score_of(first) + score_of(second));
            }
            let mut kept = 0u32;
            for _ in 0..top_groups {
                let greatest = warp_reduce_max_u32(ALL_LANES, group);
                let best = warp_reduce_min_u32(ALL_LANES, if group == greatest { self.lane } else { u32::MAX });
                group = if self.lane == best { 0 } else { group };
                kept |= 1 << best;
            }
            for_lane_experts!(index, {
                let of_group = (index as u32 * WARP_SIZE + self.lane) / size;
                let is_kept = of_group < groups && kept >> of_group & 1 != 0;
                keys[index] = if is_kept { keys[index] } else { 0 };
            });
        }
    }

    /// Selects the best experts, one after another. Lane L returns the L-th one.
    ///
    /// # Safety
    /// The whole warp calls this together. There are at least `top_k` experts.
    #[inline(always)]
    unsafe fn choose(&self, keys: &mut [u32; LANE_EXPERTS]) -> u32 {
        let mut id = 0;
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

    /// Writes the lane's choice with its weight.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the whole warp calls this together.
    #[inline(always)]
    unsafe fn write(&self, id: u32, largest: f32, sum_of_all: f32, has_nan: bool) {
        let Launch { ids, weights, top_k, scoring, scale, .. } = *self.launch;
        let is_choice = self.lane < top_k;
        // SAFETY: `id` is a chosen expert, so it has a logit. Only this lane writes its place of ids and weights.
        unsafe {
            let logit = self.logit(is_choice, id);
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

/// Returns the sum of all lanes' numbers, with the same bits in all lanes.
///
/// # Safety
/// The whole warp calls this together.
#[inline(always)]
pub(super) unsafe fn sum(number: f32) -> f32 {
    let (mut sum, mut distance) = (number, WARP_SIZE / 2);
    while distance > 0 {
        // SAFETY: the caller guarantees that all 32 lanes execute the shuffle together.
        let (other, _) = unsafe { warp_shuffle_xor(ALL_LANES, sum.to_bits(), distance, WARP_SIZE) };
        sum += f32::from_bits(other);
        distance /= 2;
    }
    sum
}
