//! Two parts of K: their k-blocks, and the addition of their sums.
//!
//! In a cluster each CTA sums one part, and writes one half of the tile's tokens. Otherwise a CTA sums one part after
//! the other, and keeps the first part's sums in local memory meanwhile, because registers have no room for both.

// Loops go over indices, not iterators: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::mem::MaybeUninit;

use cuda_std::{cluster::cluster_rank, integer::opaque_pointer, thread};

use super::{Linear, tiles::Tile};
use crate::{
    decoding::{Sums, WARPGROUP, WARPGROUP_ROWS},
    linear::{
        decode::{Decode, Packed},
        part_begin,
        split::Inbox,
    },
    unroll::unroll,
};

/// Tokens of a round of [`Sums`].
const ROUND_TOKENS: u32 = 32;

/// Sums of a thread for a round, in pieces of four.
const ROUND_PIECES: usize = (WARPGROUP_ROWS * ROUND_TOKENS / WARPGROUP) as usize / 4;

/// Four sums, stored together.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Piece([f32; 4]);

/// The first part's sums of a thread, in local memory.
pub(super) struct Kept<const P: usize, const ROUNDS: usize>([[[MaybeUninit<Piece>; ROUND_PIECES]; ROUNDS]; P]);

impl<const P: usize, const ROUNDS: usize> Kept<P, ROUNDS> {
    /// Returns memory without sums.
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self([[[MaybeUninit::uninit(); ROUND_PIECES]; ROUNDS]; P])
    }

    /// Address of the first piece. It is opaque, so that the sums stay in memory.
    #[inline(always)]
    fn pieces(&mut self) -> *mut Piece {
        opaque_pointer((&raw mut self.0).cast())
    }

    /// Stores the sums of the rounds that have some of the tile's `tokens` tokens.
    #[inline(always)]
    pub(super) fn store(&mut self, tokens: u32, sums: &Sums<P, ROUNDS>) {
        let pieces = self.pieces();
        unroll!(ROUND in 0 1 2 3 4 5 6 7, {
            if ROUND < ROUNDS && ROUND as u32 * ROUND_TOKENS < tokens {
                for part in 0..P {
                    unroll!(PIECE in 0 1 2 3, {
                        let four = [0, 1, 2, 3].map(|sum| sums[part][ROUND][4 * PIECE + sum]);
                        // SAFETY: the piece is one of this thread's own.
                        unsafe { *pieces.add((part * ROUNDS + ROUND) * ROUND_PIECES + PIECE) = Piece(four) };
                    });
                }
            }
        });
    }

    /// Returns the stored sums plus `sums`. Rounds without tokens keep `sums`.
    ///
    /// # Safety
    /// [`Self::store`] was called for this number of tokens.
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, tokens: u32, mut sums: Sums<P, ROUNDS>) -> Sums<P, ROUNDS> {
        let pieces = self.pieces();
        unroll!(ROUND in 0 1 2 3 4 5 6 7, {
            if ROUND < ROUNDS && ROUND as u32 * ROUND_TOKENS < tokens {
                for part in 0..P {
                    unroll!(PIECE in 0 1 2 3, {
                        // SAFETY: the piece is one of this thread's own, and was stored.
                        let Piece(first) = unsafe { *pieces.add((part * ROUNDS + ROUND) * ROUND_PIECES + PIECE) };
                        let sums = &mut sums[part][ROUND];
                        unroll!(SUM in 0 1 2 3, {
                            sums[4 * PIECE + SUM] += first[SUM];
                        });
                    });
                }
            }
        });
        sums
    }
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// CTAs per tile.
    pub(super) const CLUSTER: u32 = Self::INSTANCE.cluster();

    /// The memory that receives sums from the cluster's other CTA.
    #[inline(always)]
    pub(super) fn inbox(&self) -> Inbox {
        Inbox::new(self.shared + Self::INBOX, WARPGROUP, Self::INSTANCE.pieces())
    }

    /// First k-block of this CTA's part of K, and the part's end. Without a cluster, a CTA has all parts.
    #[inline(always)]
    pub(super) fn k_range(&self) -> [u32; 2] {
        let part = if Self::CLUSTER > 1 { cluster_rank() } else { 0 };
        [part, part + 1].map(|part| part_begin(part, Self::CLUSTER, self.launch.k))
    }
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// Sends the sums of one half of a tile's tokens to the cluster's other CTA, and writes the other half's sums, with
    /// the other CTA's added, to C. Runs in one warpgroup.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the inbox is open. The whole warpgroup calls this together,
    /// once, with the CTA's part of the tile's sums.
    #[inline(always)]
    pub(super) unsafe fn write_half(&self, tile: &Tile, sums: Sums<P>) {
        const {
            let pieces = Self::INSTANCE.pieces() as usize;
            assert!(Self::CLUSTER == 1 || (P == 1 && pieces == Self::HALF_ROUNDS * ROUND_PIECES));
            assert!(ROUND_PIECES == 4 && (Self::CLUSTER == 1 || Self::HALF_ROUNDS <= 2));
        }
        let (inbox, thread) = (self.inbox(), thread::thread_idx_x() % WARPGROUP);
        let piece = |half: u32, round: usize, piece: usize| {
            let of = |round: usize| [0, 1, 2, 3].map(|sum| sums[0][round][4 * piece + sum]);
            let (first, second) = (of(round), of(round + Self::HALF_ROUNDS));
            if half == 0 { first } else { second }
        };
        let mut whole: Sums<P> = bytemuck::Zeroable::zeroed();
        // SAFETY: the inbox is open; each thread sends and receives its own pieces, the latter after the wait for them.
        // The sums are whole then, and only this CTA writes these tokens.
        unsafe {
            inbox.wait_open();
            unroll!(ROUND in 0 1, {
                unroll!(PIECE in 0 1 2 3, {
                    if ROUND < Self::HALF_ROUNDS {
                        inbox.send(thread, (ROUND * ROUND_PIECES + PIECE) as u32, piece(inbox.rank ^ 1, ROUND, PIECE));
                    }
                });
            });
            inbox.wait_full();
            unroll!(ROUND in 0 1, {
                unroll!(PIECE in 0 1 2 3, {
                    if ROUND < Self::HALF_ROUNDS {
                        let received = inbox.received(thread, (ROUND * ROUND_PIECES + PIECE) as u32);
                        let own = piece(inbox.rank, ROUND, PIECE);
                        unroll!(SUM in 0 1 2 3, {
                            whole[0][ROUND][4 * PIECE + SUM] = own[SUM] + received[SUM];
                        });
                    }
                });
            });
            let before = inbox.rank * Self::INSTANCE.half_tokens();
            let tokens = tile.tokens.saturating_sub(before).min(Self::INSTANCE.half_tokens());
            self.write(&Tile { first_row: tile.first_row + before, tokens, ..*tile }, whole);
        }
    }

    /// Rounds of the sums of half of a tile's tokens.
    const HALF_ROUNDS: usize = (Self::INSTANCE.half_tokens() / ROUND_TOKENS) as usize;
}
