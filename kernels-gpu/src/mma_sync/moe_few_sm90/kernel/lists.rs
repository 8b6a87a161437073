//! A CTA's lists of choices in shared memory. One warp makes them by votes, two choices per lane.

// Loops go over the indices of a lane's choices: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::hint::assert_unchecked;

use cuda_std::{
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    shared::{SharedAddress, ld_shared_b32, st_shared_b32},
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_vote_ballot},
};

use crate::{
    decoding::from_first_lane,
    lists::NO_ROW,
    mma_sync::moe_few_sm90::abi::{Choices, MAX_CHOICES, MAX_TOKENS},
};

/// Choices per lane.
const LANE_CHOICES: usize = (MAX_CHOICES / WARP_SIZE) as usize;

/// Bytes of a number.
const NUMBER: u32 = 4;

/// Bits per half of a word that holds two numbers.
const HALF: u32 = 16;

/// The lists, by their address.
#[derive(Clone, Copy)]
pub(super) struct Lists(SharedAddress);

/// A named expert.
#[derive(Clone, Copy)]
pub(super) struct Named {
    /// Number of the expert in the layer.
    pub(super) expert: u32,
    /// Number of the expert's rows.
    pub(super) rows: u32,
}

/// A row: a choice and its token.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) choice: u32,
    pub(super) token: u32,
}

impl Lists {
    /// The lists at an address in this CTA's shared memory.
    pub(super) const fn at(address: SharedAddress) -> Self {
        Self(address)
    }

    #[inline(always)]
    fn experts(self, index: u32) -> SharedAddress {
        self.0 + index * NUMBER
    }

    #[inline(always)]
    fn rows(self, index: u32) -> SharedAddress {
        self.experts(MAX_CHOICES + index)
    }

    #[inline(always)]
    fn places(self, choice: u32) -> SharedAddress {
        self.rows(MAX_CHOICES * MAX_TOKENS + choice)
    }

    #[inline(always)]
    fn weights(self, choice: u32) -> SharedAddress {
        self.places(MAX_CHOICES + choice)
    }

    #[inline(always)]
    fn count_place(self) -> SharedAddress {
        self.weights(MAX_CHOICES)
    }

    /// Number of named experts.
    ///
    /// # Safety
    /// The lists are made. The whole warp makes this call together.
    #[inline(always)]
    pub(super) unsafe fn count(self) -> u32 {
        // SAFETY: the lists are made, so their count lies in shared memory; the whole warp executes the shuffle
        // together.
        unsafe { from_first_lane(ld_shared_b32(self.count_place())) }
    }

    /// The `index`-th named expert.
    ///
    /// # Safety
    /// The lists are made and name more than `index` experts. The whole warp makes this call together, with the same
    /// index.
    #[inline(always)]
    pub(super) unsafe fn named(self, index: u32) -> Named {
        // SAFETY: the lists are made and name more than `index` experts; the whole warp executes the shuffle together.
        let both = unsafe { from_first_lane(ld_shared_b32(self.experts(index))) };
        Named { expert: both & 0xffff, rows: both >> HALF }
    }

    /// The `row`-th row of the `index`-th named expert.
    ///
    /// # Safety
    /// The lists are made, name more than `index` experts, and the expert has more than `row` rows.
    #[inline(always)]
    pub(super) unsafe fn row(self, index: u32, row: u32) -> Row {
        // SAFETY: the lists are made, and the expert has more than `row` rows.
        let both = unsafe { ld_shared_b32(self.rows(index * MAX_TOKENS + row)) };
        Row { choice: both & 0xffff, token: both >> HALF }
    }

    /// Returns the choice whose row this choice uses, or [`NO_ROW`]. A choice that repeats an expert of its token uses the
    /// row of the first choice of that expert.
    ///
    /// # Safety
    /// The lists are made, and there are more than `choice` choices.
    #[inline(always)]
    pub(super) unsafe fn place(self, choice: u32) -> u32 {
        // SAFETY: the lists are made, and there are more than `choice` choices.
        unsafe { ld_shared_b32(self.places(choice)) }
    }

    /// Weight of a choice.
    ///
    /// # Safety
    /// The lists are made with weights, and there are more than `choice` choices.
    #[inline(always)]
    pub(super) unsafe fn weight(self, choice: u32) -> f32 {
        // SAFETY: the lists are made with weights, and there are more than `choice` choices.
        f32::from_bits(unsafe { ld_shared_b32(self.weights(choice)) })
    }

    /// Makes the lists, and copies the choices' weights from `weights` unless that address is 0.
    ///
    /// # Safety
    /// Ids, map and weights are complete. One warp of the CTA makes this call together, and no thread reads the lists
    /// during the call.
    #[inline(always)]
    pub(super) unsafe fn make(self, of: &Choices, weights: u64) {
        let all = of.token_count * of.top_k;
        let choice = |index: usize| lane_id() + index as u32 * WARP_SIZE;
        let number = |list: u64, index: u32| GlobalAddress::new(list) + u64::from(index) * u64::from(NUMBER);
        // SAFETY: the loads read choices below T·k, and the map at ids below its length. The lists are this CTA's
        // shared memory, and no thread reads them during this call.
        unsafe {
            let mut experts = [NO_ROW; LANE_CHOICES];
            for index in 0..LANE_CHOICES {
                if choice(index) < all {
                    experts[index] = ld_relaxed_gpu_global_b32(number(of.ids, choice(index)));
                    if weights != 0 {
                        let weight = ld_relaxed_gpu_global_b32(number(weights, choice(index)));
                        st_shared_b32(self.weights(choice(index)), weight);
                    }
                }
            }
            for index in 0..LANE_CHOICES {
                // A negative id is large as a u32.
                if experts[index] >= of.named_experts {
                    experts[index] = NO_ROW;
                } else if of.map != 0 {
                    experts[index] = ld_relaxed_gpu_global_b32(number(of.map, experts[index]));
                }
                if experts[index] >= of.experts {
                    experts[index] = NO_ROW;
                }
            }
            // One bit per choice of both halves: set if the condition holds for it.
            let votes = |holds: [bool; LANE_CHOICES]| {
                let [low, high] = holds.map(|holds| warp_vote_ballot(ALL_LANES, holds));
                u64::from(low) | u64::from(high) << WARP_SIZE
            };
            // The choices with the same expert.
            let mut same = [votes(experts.map(|expert| expert != NO_ROW)); LANE_CHOICES];
            let mut bit = 1;
            while bit < of.experts {
                let with_bit = votes(experts.map(|expert| expert & bit != 0));
                for index in 0..LANE_CHOICES {
                    same[index] &= if experts[index] & bit != 0 { with_bit } else { !with_bit };
                }
                bit *= 2;
            }
            assert_unchecked(of.top_k > 0);
            let below = |index: usize| (1 << choice(index)) - 1;
            let token = [0, 1].map(|index| choice(index) / of.top_k);
            // The choices with the same token and expert.
            let of_token = [0, 1].map(|index| {
                let first = token[index] * of.top_k;
                let behind = first + of.top_k;
                let until = |choice: u32| if choice < MAX_CHOICES { (1 << choice) - 1 } else { u64::MAX };
                same[index] & until(behind) & !until(first)
            });
            let is_there = [0, 1].map(|index| experts[index] != NO_ROW);
            let has_row = [0, 1].map(|index| is_there[index] && of_token[index] & below(index) == 0);
            let rows = votes(has_row);
            let is_first = [0, 1].map(|index| has_row[index] && same[index] & rows & below(index) == 0);
            let firsts = votes(is_first);
            for index in 0..LANE_CHOICES {
                let of_expert = same[index] & rows;
                if has_row[index] {
                    let first: u64 = 1 << of_expert.trailing_zeros();
                    let named = (firsts & (first - 1)).count_ones();
                    let rank = (of_expert & below(index)).count_ones();
                    st_shared_b32(self.rows(named * MAX_TOKENS + rank), choice(index) | token[index] << HALF);
                    if is_first[index] {
                        st_shared_b32(self.experts(named), experts[index] | of_expert.count_ones() << HALF);
                    }
                }
                let place = if is_there[index] { of_token[index].trailing_zeros() } else { NO_ROW };
                st_shared_b32(self.places(choice(index)), place);
            }
            if lane_id() == 0 {
                st_shared_b32(self.count_place(), firsts.count_ones());
            }
        }
    }
}
