//! Operations of the 32 threads (lanes) of a warp together.
//!
//! A `mask` has one bit per participating lane. Every lane of the mask must make the same call with the same mask, and
//! a lane that makes the call must be in the mask. PTX ISA, "Parallel Synchronization and Communication Instructions".

use crate::ptx;

/// Number of lanes in a warp.
pub const WARP_SIZE: u32 = 32;

/// The mask of a whole warp.
pub const ALL_LANES: u32 = u32::MAX;

/// Index of the thread in its warp, 0 to 31 (`%laneid`).
#[inline(always)]
pub fn lane_id() -> u32 {
    let lane: u32;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u32 {}, %laneid;", out(reg32) lane, options(pure, nomem, nostack, preserves_flags)) };
    lane
}

/// Waits for the lanes of `mask` and orders their memory accesses (`bar.warp.sync`).
///
/// # Safety
/// All lanes of `mask` make the same call.
#[inline(always)]
pub unsafe fn sync_warp(mask: u32) {
    // SAFETY: the caller guarantees that all lanes of `mask` execute this.
    unsafe { ptx!("bar.warp.sync {};", in(reg32) mask, options(nostack, preserves_flags)) };
}

macro_rules! shuffles {
    ($($(#[$doc:meta])* $name:ident = $instruction:literal, $clamp:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// The warp is divided into sections of `width` lanes (a power of two up to 32). Returns the source lane's
        /// value and `true`, or this lane's own value and `false` if the source is outside of its section.
        ///
        /// # Safety
        /// All lanes of `mask` make the same call; the source lane is in `mask`.
        #[inline(always)]
        pub unsafe fn $name(mask: u32, value: u32, lane: u32, width: u32) -> (u32, bool) {
            let control = (WARP_SIZE - width) << 8 | $clamp;
            let shuffled: u32;
            let inside: u32;
            // SAFETY: the caller guarantees that all lanes of `mask` execute this, and that the source lane is in
            // `mask`.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .pred p;",
                    concat!($instruction, ".b32 {shuffled}|p, {value}, {lane}, {control}, {mask};"),
                    "selp.u32 {inside}, 1, 0, p;",
                    "}}",
                    shuffled = out(reg32) shuffled, inside = out(reg32) inside, value = in(reg32) value,
                    lane = in(reg32) lane, control = in(reg32) control, mask = in(reg32) mask,
                    options(nomem, nostack, preserves_flags)
                )
            };
            (shuffled, inside != 0)
        }
    )*};
}

shuffles! {
    /// Value of lane number `lane` of this lane's section (`shfl.sync.idx`).
    warp_shuffle_idx = "shfl.sync.idx", 0x1f;
    /// Value of the lane `lane` places below this lane (`shfl.sync.up`).
    warp_shuffle_up = "shfl.sync.up", 0;
    /// Value of the lane `lane` places above this lane (`shfl.sync.down`).
    warp_shuffle_down = "shfl.sync.down", 0x1f;
    /// Value of the lane whose number is this lane's number XOR `lane` (`shfl.sync.bfly`).
    warp_shuffle_xor = "shfl.sync.bfly", 0x1f;
}

/// Returns a bit for each lane of `mask`: 1 if its `predicate` is true (`vote.sync.ballot`).
///
/// # Safety
/// All lanes of `mask` make the same call.
#[inline(always)]
pub unsafe fn warp_vote_ballot(mask: u32, predicate: bool) -> u32 {
    let ballot: u32;
    // SAFETY: the caller guarantees that all lanes of `mask` execute this.
    unsafe {
        ptx!(
            "{{",
            ".reg .pred p;",
            "setp.ne.u32 p, {predicate}, 0;",
            "vote.sync.ballot.b32 {ballot}, p, {mask};",
            "}}",
            ballot = out(reg32) ballot, predicate = in(reg32) u32::from(predicate), mask = in(reg32) mask,
            options(nomem, nostack, preserves_flags)
        )
    };
    ballot
}

/// Returns the lanes of `lanes` whose bit `BIT` of `value` equals this lane's bit (`vote.sync.ballot`).
///
/// # Safety
/// All lanes of `mask` make the same call.
#[inline(always)]
pub unsafe fn warp_vote_same_bit<const BIT: u32>(mask: u32, value: u32, lanes: u32) -> u32 {
    let same: u32;
    // SAFETY: the caller guarantees that all lanes of `mask` execute this.
    unsafe {
        // With a separate vote, the compiler spends three more instructions to turn the bit into a mask.
        ptx!(
            "{{",
            ".reg .pred p;",
            ".reg .b32 bit, ballot;",
            "and.b32 bit, {value}, {select};",
            "setp.ne.u32 p, bit, 0;",
            "vote.sync.ballot.b32 ballot, p, {mask};",
            "@!p not.b32 ballot, ballot;",
            "and.b32 {lanes}, {lanes}, ballot;",
            "}}",
            value = in(reg32) value, select = const 1 << BIT, mask = in(reg32) mask, lanes = inout(reg32) lanes => same,
            options(nomem, nostack, preserves_flags)
        )
    };
    same
}

/// Returns a bit for each lane of `mask`: 1 if its `value` equals this lane's value (`match.any.sync.b32`).
///
/// # Safety
/// All lanes of `mask` make the same call.
#[inline(always)]
pub unsafe fn warp_match_any(mask: u32, value: u32) -> u32 {
    let same: u32;
    // SAFETY: the caller guarantees that all lanes of `mask` execute this.
    unsafe {
        ptx!(
            "match.any.sync.b32 {}, {}, {};", out(reg32) same, in(reg32) value, in(reg32) mask,
            options(nomem, nostack, preserves_flags)
        )
    };
    same
}

macro_rules! reductions {
    ($($(#[$doc:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// All lanes of `mask` make the same call.
        #[inline(always)]
        pub unsafe fn $name(mask: u32, value: u32) -> u32 {
            let result: u32;
            // SAFETY: the caller guarantees that all lanes of `mask` execute this.
            unsafe {
                ptx!(
                    concat!($instruction, " {}, {}, {};"), out(reg32) result, in(reg32) value, in(reg32) mask,
                    options(nomem, nostack, preserves_flags)
                )
            };
            result
        }
    )*};
}

reductions! {
    /// Maximum of `value` over the lanes of `mask` (`redux.sync.max.u32`, sm_80 and up).
    warp_reduce_max_u32 = "redux.sync.max.u32";
    /// Minimum of `value` over the lanes of `mask` (`redux.sync.min.u32`, sm_80 and up).
    warp_reduce_min_u32 = "redux.sync.min.u32";
    /// Wrapping sum of `value` over the lanes of `mask` (`redux.sync.add.u32`, sm_80 and up).
    warp_reduce_add_u32 = "redux.sync.add.u32";
}

/// Returns `true` in one lane of `mask`. The hardware picks the lane, and picks the same lane at each call
/// (`elect.sync`, sm_90 and up).
///
/// # Safety
/// All lanes of `mask` make the same call.
#[inline(always)]
pub unsafe fn elect_sync(mask: u32) -> bool {
    let elected: u32;
    // SAFETY: the caller guarantees that all lanes of `mask` execute this.
    unsafe {
        ptx!(
            "{{",
            ".reg .pred p;",
            "elect.sync _|p, {mask};",
            "selp.u32 {elected}, 1, 0, p;",
            "}}",
            elected = out(reg32) elected, mask = in(reg32) mask,
            options(nomem, nostack, preserves_flags)
        )
    };
    elected != 0
}
