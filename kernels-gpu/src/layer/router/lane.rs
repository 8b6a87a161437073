//! A lane's experts and logits, for both entries. Lane L has the experts L, L + 32, and so on, as keys in registers, and
//! the L-th chosen expert.

use cuda_std::{
    convert::cvt_f32_f16,
    global::{GlobalAddress, ld_global_b32_or_zero, ld_global_nc_b16_or_zero},
    warp::{ALL_LANES, WARP_SIZE, warp_reduce_max_u32, warp_reduce_min_u32, warp_shuffle_xor, warp_vote_ballot},
};

use super::abi::LOGITS_F32;
use super::score::{key, power, score_of};
use crate::format::OUTPUT_BF16;

/// Bytes of a 32-bit number.
pub const NUMBER: u64 = 4;

/// Repeats a block for each of the `$experts` experts of a lane. Keys stay in registers only if their indices are
/// constants, and LLVM does not unroll loops of this length.
macro_rules! for_lane_experts {
    ($index:ident of $experts:expr, $block:block) => {
        for_lane_experts!(
            $index of $experts,
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31, $block
        )
    };
    ($index:ident of $experts:expr, $($value:literal)*, $block:block) => {{
        const { assert!($experts <= [$($value),*].len()) };
        $(if const { $value < $experts } {
            let $index: usize = $value;
            $block
        })*
    }};
}
pub(super) use for_lane_experts;

/// The logits of a launch, as a lane reads them for its token.
#[derive(Clone, Copy)]
pub struct Logits {
    /// Address of the first token's logits.
    pub address: u64,
    /// Elements from one token to the next.
    pub pitch: u64,
    /// [`LOGITS_F32`], or the format of 16-bit logits.
    pub format: u32,
    /// Number of experts.
    pub experts: u32,
    /// The warp's token.
    pub token: u32,
    /// This lane.
    pub lane: u32,
}

impl Logits {
    /// Loads the logit of an expert if `is_there`.
    ///
    /// # Safety
    /// If `is_there`, the expert exists.
    #[inline(always)]
    pub unsafe fn load(&self, is_there: bool, expert: u32) -> f32 {
        let element = u64::from(self.token) * self.pitch + u64::from(expert);
        let at = |bytes: u64| GlobalAddress::new(self.address) + element * bytes;
        // SAFETY: if `is_there`, the address is of a logit of the token; otherwise nothing is read.
        unsafe {
            if self.format == LOGITS_F32 {
                f32::from_bits(ld_global_b32_or_zero(is_there, at(NUMBER)))
            } else if self.format == OUTPUT_BF16 {
                f32::from_bits(u32::from(ld_global_nc_b16_or_zero(is_there, at(NUMBER / 2))) << 16)
            } else {
                cvt_f32_f16(ld_global_nc_b16_or_zero(is_there, at(NUMBER / 2)))
            }
        }
    }

    /// Returns the keys of the scores of the lane's experts, 0 for missing experts, and whether a logit of the token is
    /// NaN. `score` gets whether the expert exists, its number and its logit.
    ///
    /// # Safety
    /// The logits of the token are readable, and the whole warp calls this together.
    #[inline(always)]
    pub unsafe fn keys<const EXPERTS: usize>(&self, score: impl Fn(bool, u32, f32) -> f32) -> ([u32; EXPERTS], bool) {
        let (mut keys, mut has_nan) = ([0; EXPERTS], false);
        for_lane_experts!(index of EXPERTS, {
            // All lanes follow the same path.
            if index as u32 * WARP_SIZE < self.experts {
                let expert = index as u32 * WARP_SIZE + self.lane;
                let is_there = expert < self.experts;
                // SAFETY: if `is_there`, the expert exists, with its logit; otherwise nothing is read.
                let logit = unsafe { self.load(is_there, expert) };
                has_nan |= is_there && logit.is_nan();
                let score = score(is_there, expert, logit);
                keys[index] = if is_there { key(score) } else { 0 };
            }
        });
        // SAFETY: the whole warp is here.
        let has_nan = unsafe { warp_vote_ballot(ALL_LANES, has_nan) } != 0;
        (keys, has_nan)
    }
}

/// Loads the number of an expert from a list if `is_there`.
///
/// # Safety
/// If `is_there`, the address is of a list with a number for this expert.
#[inline(always)]
pub unsafe fn of_expert(list: u64, is_there: bool, expert: u32) -> f32 {
    let address = GlobalAddress::new(list) + u64::from(expert) * NUMBER;
    // SAFETY: if `is_there`, the list has this number; otherwise nothing is read.
    f32::from_bits(unsafe { ld_global_b32_or_zero(is_there, address) })
}

/// Returns the greatest of a lane's keys, and its index. Of equal keys the first one counts.
#[inline(always)]
pub fn best<const EXPERTS: usize>(keys: &[u32; EXPERTS]) -> (u32, u32) {
    let mut best = (0, 0);
    for_lane_experts!(index of EXPERTS, {
        best = if keys[index] > best.0 { (keys[index], index as u32) } else { best };
    });
    best
}

/// Selects the best `top_k` experts, one after another. Lane L returns the L-th expert, or `none`
/// if L is at least `top_k`.
///
/// # Safety
/// The whole warp calls this together. There are at least `top_k` experts.
#[inline(always)]
pub unsafe fn choose<const EXPERTS: usize>(keys: &mut [u32; EXPERTS], lane: u32, top_k: u32, none: u32) -> u32 {
    let mut id = none;
    for choice in 0..top_k {
        let (own, index) = best(keys);
        // SAFETY: the whole warp is here.
        let expert = unsafe {
            let greatest = warp_reduce_max_u32(ALL_LANES, own);
            let expert = index * WARP_SIZE + lane;
            warp_reduce_min_u32(ALL_LANES, if own == greatest { expert } else { u32::MAX })
        };
        for_lane_experts!(index of EXPERTS, {
            let is_taken = index as u32 * WARP_SIZE + lane == expert;
            keys[index] = if is_taken { 0 } else { keys[index] };
        });
        id = if lane == choice { expert } else { id };
    }
    id
}

/// Returns the sum of the powers of a lane's experts.
#[inline(always)]
pub fn powers<const EXPERTS: usize>(keys: &[u32; EXPERTS], largest: f32) -> f32 {
    let mut sum = 0.0;
    for_lane_experts!(index of EXPERTS, {
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
pub unsafe fn sum(number: f32) -> f32 {
    let (mut sum, mut distance) = (number, WARP_SIZE / 2);
    while distance > 0 {
        // SAFETY: the caller guarantees that all 32 lanes execute the shuffle together.
        let (other, _) = unsafe { warp_shuffle_xor(ALL_LANES, sum.to_bits(), distance, WARP_SIZE) };
        sum += f32::from_bits(other);
        distance /= 2;
    }
    sum
}
