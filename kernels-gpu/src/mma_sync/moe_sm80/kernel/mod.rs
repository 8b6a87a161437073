//! The device code of an MoE layer's products for any GPU that has `mma.sync` and `cp.async`.
//!
//! All warps of a CTA do the same: they copy a k-block's tokens and weights to the next stage, then decode and multiply
//! the oldest stage. A barrier of the CTA per k-block ensures that the oldest stage is full and the stage before it is
//! empty. CTAs take tiles by tickets, so that no tile waits for a CTA that starts late. While the CTA multiplies, its
//! first warp finds the next tile.

mod copies;
mod moe;
mod multiply;

use cuda_std::{
    global::{GlobalAddress, atom_global_add_u32},
    kernel,
    shared::{SharedAddress, dynamic_shared_address},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use self::{copies::Copies, moe::Moe};
use super::abi::{INSTANCES, Index, Instance, instances};
use crate::{
    decoding::{Decode, Fragment, Packed, TILE_BYTES, Tile, TileLists, from_first_lane},
    moe::Launch,
    units::OperandType,
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(),
            min_blocks = INSTANCES[Index::$entry as usize].min_blocks()
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { Moe::<{ Index::$entry as usize }, IS_BF16, { INSTANCE.shape().parts() }>::run(launch) }
        }
    )*};
}
instances!(entries);

impl<const INDEX: usize, const BF16: bool, const P: usize> Moe<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// One thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { assert!(Self::END == Self::INSTANCE.shared_bytes()) };
        // SAFETY: all threads of the CTA take the same branches, in whole warps. A tile's description is written to one
        // slot while the other slot is read; a barrier lies between reading a slot and overwriting it. Stages are empty
        // when a tile's copies begin.
        unsafe {
            // All lanes hold the same value. The shuffle lets the compiler know that.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            let this = Self { launch, shared: dynamic_shared_address(), warp };
            let (mut slot, mut asked) = (this.shared + Self::TILES, 0);
            if warp == 0 {
                let first = this.ask();
                asked = this.find(first, slot);
            }
            thread::sync_threads();
            let mut tile = Tile::read(slot);
            let mut copies = Copies::of(&this, &tile);
            while tile.tokens > 0 {
                slot = this.other_slot(slot);
                if warp == 0 {
                    asked = this.find(asked, slot);
                }
                let fragment = this.fragment();
                let sums = this.sum_tile(&mut copies, &fragment, tile.tokens);
                thread::sync_threads();
                let next = Tile::read(slot);
                copies = Copies::of(&this, &next);
                this.write(&tile, &fragment, sums);
                tile = next;
            }
        }
    }

    /// Takes a ticket: the index of a tile. Only the first lane gets it.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, so `ticket` is the address of a u32.
    #[inline(always)]
    unsafe fn ask(&self) -> u32 {
        if lane_id() > 0 {
            return 0;
        }
        // SAFETY: `ticket` is the address of a u32 in global memory; only atomics access it during the launch.
        unsafe { atom_global_add_u32(GlobalAddress::new(self.launch.ticket), 1) }
    }

    /// Writes the description of the tile with this ticket, and takes the next ticket if the tile exists.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The whole first warp makes this call together. No thread reads the
    /// slot before the CTA's next barrier.
    #[inline(always)]
    unsafe fn find(&self, asked: u32, slot: SharedAddress) -> u32 {
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, .. } = self.launch;
        let Instance { matrices, tile_tokens, .. } = Self::INSTANCE;
        let columns = Self::INSTANCE.columns();
        let lists =
            TileLists { rows: 0, tile_tokens, ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: the previous grid has ended, so the lists are complete. The whole first warp is here, and no thread
        // reads the slot before the next barrier.
        unsafe {
            let tile = lists.find(from_first_lane(asked));
            if lane_id() == 0 {
                tile.write(slot);
            }
            if tile.tokens > 0 { self.ask() } else { 0 }
        }
    }

    /// The other slot for a tile's description.
    #[inline(always)]
    fn other_slot(&self, slot: SharedAddress) -> SharedAddress {
        let (first, second) = (self.shared + Self::TILES, self.shared + (Self::TILES + TILE_BYTES));
        if slot == first { second } else { first }
    }

    /// The thread's part of a tile.
    #[inline(always)]
    fn fragment(&self) -> Fragment {
        let fragment = Fragment::of(lane_id(), self.warp);
        if Self::ROW_OF_BOTH { fragment.narrow() } else { fragment }
    }
}
