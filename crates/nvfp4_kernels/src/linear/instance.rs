//! Instances of the kernels for linear layers, with their tiles, grids and times, as plan and launch need them.

use kernels_gpu::linear::k_blocks;
use kernels_gpu::lists::token_tiles;
use kernels_gpu::mma_sync::linear as of_warps;
use kernels_gpu::units::OperandType;
use kernels_gpu::wgmma::linear_sm90::abi as of_warpgroups;

/// An instance of a kernel for linear layers.
#[derive(Clone, Copy, Debug)]
pub enum Instance {
    /// Each warp multiplies by itself. A CTA computes one tile, or one part of K of a tile.
    OfWarps(&'static of_warps::Instance),
    /// Warpgroups multiply. One CTA per SM computes one tile after the other, or each CTA of a cluster computes one part
    /// of K of one tile.
    OfWarpgroups(&'static of_warpgroups::Instance),
}

impl Instance {
    /// Name of the entry.
    pub fn entry(self) -> &'static str {
        match self {
            Self::OfWarps(of) => of.entry,
            Self::OfWarpgroups(of) => of.entry,
        }
    }

    /// Type of the tokens and C.
    pub fn operand_type(self) -> OperandType {
        match self {
            Self::OfWarps(of) => of.operand_type,
            Self::OfWarpgroups(of) => of.operand_type,
        }
    }

    /// Maximum number of tokens per tile.
    pub fn tile_tokens(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.tile_tokens,
            Self::OfWarpgroups(of) => of.tile_tokens,
        }
    }

    /// Columns of C per tile.
    pub fn columns(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.columns(),
            Self::OfWarpgroups(of) => of.columns(),
        }
    }

    /// Threads per CTA.
    pub fn threads(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.threads(),
            Self::OfWarpgroups(of) => of.threads(),
        }
    }

    /// Dynamic shared memory per CTA, in bytes.
    pub fn shared_bytes(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.shared_bytes(),
            Self::OfWarpgroups(of) => of.shared_bytes(),
        }
    }

    /// Number of parts in which K is summed.
    pub fn parts(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.parts,
            Self::OfWarpgroups(of) => of.parts,
        }
    }

    /// CTAs of a cluster, one per part of K. 1: a CTA sums all parts.
    pub fn cluster(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.parts,
            Self::OfWarpgroups(of) => of.cluster(),
        }
    }

    /// Whether threads copy the tokens by address, without a tensor map. Then the grid must not overlap the previous
    /// one.
    pub fn by_pieces(self) -> bool {
        matches!(self, Self::OfWarps(of) if of.by_pieces)
    }

    /// Returns the ways to cut `m` tokens into tiles, largest tiles last. More tiles than necessary may use the SMs
    /// more evenly.
    pub fn cuts(self, m: u32) -> impl Iterator<Item = Cut> {
        /// Maximum number of additional tiles. Beyond it, one more tile changes the time little.
        const MOST_FURTHER: u32 = 8;
        let least = token_tiles(m, self.tile_tokens());
        let most = match self {
            Self::OfWarps(_) => least,
            Self::OfWarpgroups(of) => token_tiles(m, of.shape().least_n).clamp(least, least + MOST_FURTHER),
        };
        (least..=most).rev().map(move |token_tiles| Cut { instance: self, m, token_tiles })
    }

    /// Returns the number of CTAs of a grid for tiles with `ctas` CTAs in all.
    pub fn blocks(self, ctas: u32, sms: u32) -> u32 {
        match self {
            Self::OfWarpgroups(of) if of.cluster() == 1 => ctas.min(sms),
            _ => ctas,
        }
    }
}

/// An instance, with a number of tokens and the number of tiles that they are cut into.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub instance: Instance,
    /// Number of tokens, not 0.
    pub m: u32,
    /// Number of tiles along the tokens.
    pub token_tiles: u32,
}

impl Cut {
    /// Tokens per box of the token map.
    pub fn box_tokens(self) -> u32 {
        match self.instance {
            Instance::OfWarps(of) => of.tile_tokens,
            Instance::OfWarpgroups(of) => of.box_tokens(self.m, self.token_tiles),
        }
    }

    /// Number of CTAs of all tiles of C with `n` columns: one per tile, or one per tile and part of K.
    pub fn ctas(self, n: u32) -> u64 {
        let tiles = u64::from(self.token_tiles) * u64::from(n.div_ceil(self.instance.columns()));
        tiles * u64::from(self.instance.cluster())
    }

    /// Maximum number of k-blocks that a CTA sums per tile.
    pub fn k_blocks(self, k: u32) -> u64 {
        u64::from(k_blocks(k).div_ceil(self.instance.cluster()))
    }
}

/// Estimates the cycles that an SM takes for one k-block of all its tiles. The constants were measured on an H200. Up
/// to `room` CTAs fit on an SM. A warp alone is bound by the latency of its dependent products. Several warps per
/// scheduler are bound by the instructions that they issue.
fn warp_cycles(instance: &of_warps::Instance, tiles: u64, sms: u64, room: u64) -> u64 {
    /// Latency of a warp alone in cycles, and the addition per product for 16 columns of K after the first.
    const ALONE: u64 = 300;
    const ALONE_FOR_PRODUCT: u64 = 130;
    /// Issue cycles of a warp, and the addition per product for 16 columns of K after the first.
    const ISSUED: u64 = 220;
    const ISSUED_FOR_PRODUCT: u64 = 24;
    /// Threads of the warps that an SM's four schedulers issue at a time.
    const AT_A_TIME: u64 = 4 * 32;
    let resident = tiles.div_ceil(sms).min(room);
    let warps = (resident * u64::from(instance.threads())).div_ceil(AT_A_TIME);
    let further = instance.products() as u64 - 1;
    let alone = ALONE + ALONE_FOR_PRODUCT * further;
    tiles.div_ceil(sms * resident) * alone.max(warps * (ISSUED + ISSUED_FOR_PRODUCT * further))
}

/// Estimates the cycles that an SM takes for one k-block of all its tiles of C with `n` columns, for kernels whose
/// warps multiply by themselves. No GPU of these kernels has been measured, so the estimate is the H200's, whose warps
/// run the same code, with two changes: shared memory limits the resident CTAs, and the slower tensor cores bound the
/// time for many tokens.
///
/// # Panics
/// If the instance multiplies with warpgroups.
pub(crate) fn cycles_of_warps_alone(cut: Cut, n: u32, sms: u32) -> u64 {
    /// Shared memory of an SM on RTX 30, 40, 50 and PRO, and the part that the system reserves per CTA (CUDA
    /// programming guide, "Technical Specifications per Compute Capability").
    const SHARED_BYTES: u32 = 100 << 10;
    const RESERVED_BYTES: u32 = 1 << 10;
    /// Cycles of a scheduler's tensor core for the product of 8 tokens with 16 columns of C over a k-block, at the rate
    /// of RTX PRO 6000.
    const PRODUCT: u64 = 8 * 16;
    let Instance::OfWarps(of) = cut.instance else { unreachable!("all instances are of warps") };
    let (tiles, sms) = (cut.ctas(n), u64::from(sms));
    let room = u64::from(SHARED_BYTES / (of.shared_bytes() + RESERVED_BYTES));
    let resident = tiles.div_ceil(sms).min(room);
    let warps = (resident * u64::from(of.multiplying_warps())).div_ceil(4);
    let in_tensor_cores = tiles.div_ceil(sms * resident) * warps * of.products() as u64 * PRODUCT;
    warp_cycles(of, tiles, sms, room).max(in_tensor_cores)
}
