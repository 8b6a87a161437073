//! One way to compute a product: what a launch and the plan know of it.

use kernels_gpu::lists::token_tiles;
use kernels_gpu::mma_sync::linear as of_warps;
use kernels_gpu::units::OperandType;
use kernels_gpu::wgmma::linear_sm90::abi as of_warpgroups;

/// One way to compute a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instance {
    /// With the products of a warp. A block has one tile.
    OfWarps(&'static of_warps::Instance),
    /// With those of a warpgroup. A block on each multiprocessor computes one tile after the other.
    OfWarpgroups(&'static of_warpgroups::Instance),
}

impl Instance {
    /// The entry's name.
    pub fn entry(self) -> &'static str {
        match self {
            Self::OfWarps(of) => of.entry,
            Self::OfWarpgroups(of) => of.entry,
        }
    }

    /// The type of tokens and C.
    pub fn operand_type(self) -> OperandType {
        match self {
            Self::OfWarps(of) => of.operand_type,
            Self::OfWarpgroups(of) => of.operand_type,
        }
    }

    /// The most tokens of a tile.
    pub fn tile_tokens(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.tile_tokens,
            Self::OfWarpgroups(of) => of.tile_tokens,
        }
    }

    /// Columns of C of a tile.
    pub fn columns(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.columns(),
            Self::OfWarpgroups(of) => of.columns(),
        }
    }

    /// Threads of a block.
    pub fn threads(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.threads(),
            Self::OfWarpgroups(of) => of.threads(),
        }
    }

    /// Dynamic shared memory of a block, in bytes.
    pub fn shared_bytes(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.shared_bytes(),
            Self::OfWarpgroups(of) => of.shared_bytes(),
        }
    }

    /// Whether tokens are copied by their address, and not by a map; then the grid before must have ended.
    pub fn by_pieces(self) -> bool {
        matches!(self, Self::OfWarps(of) if of.by_pieces)
    }

    /// The ways to cut `m` tokens into tiles, largest tiles last: some more tiles than need be may share a card more evenly.
    pub fn cuts(self, m: u32) -> impl Iterator<Item = Cut> {
        /// Where there are more, one more makes little difference.
        const MOST_FURTHER: u32 = 8;
        let least = token_tiles(m, self.tile_tokens());
        let most = match self {
            Self::OfWarps(_) => least,
            Self::OfWarpgroups(of) => token_tiles(m, of.shape().least_n).clamp(least, least + MOST_FURTHER),
        };
        (least..=most).rev().map(move |token_tiles| Cut { instance: self, m, token_tiles })
    }

    /// Blocks of a grid with so many tiles.
    pub fn blocks(self, tiles: u32, sms: u32) -> u32 {
        match self {
            Self::OfWarps(_) => tiles,
            Self::OfWarpgroups(_) => tiles.min(sms),
        }
    }
}

/// An instance, and in how many tiles it takes so many tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub instance: Instance,
    /// Tokens, not 0.
    pub m: u32,
    /// Tiles along the tokens.
    pub token_tiles: u32,
}

impl Cut {
    /// Tokens of a box of the token map.
    pub fn box_tokens(self) -> u32 {
        match self.instance {
            Instance::OfWarps(of) => of.tile_tokens,
            Instance::OfWarpgroups(of) => of.box_tokens(self.m, self.token_tiles),
        }
    }

    /// Tiles of C with n columns.
    pub fn tiles(self, n: u32) -> u64 {
        u64::from(self.token_tiles) * u64::from(n.div_ceil(self.instance.columns()))
    }
}

/// About how many cycles a multiprocessor takes for a k-block of all its tiles, measured on an H200. A warp's products wait for one
/// another; what warps issue counts where a scheduler has several. There is room for so many blocks on a multiprocessor.
fn warp_cycles(instance: &of_warps::Instance, tiles: u64, sms: u64, room: u64) -> u64 {
    /// Of a warp alone, and more for each further product of a word.
    const ALONE: u64 = 300;
    const ALONE_FOR_PRODUCT: u64 = 130;
    /// What a warp issues.
    const ISSUED: u64 = 220;
    const ISSUED_FOR_PRODUCT: u64 = 24;
    /// Threads of the warps that a multiprocessor's four schedulers issue at a time.
    const AT_A_TIME: u64 = 4 * 32;
    let resident = tiles.div_ceil(sms).min(room);
    let warps = (resident * u64::from(instance.threads())).div_ceil(AT_A_TIME);
    let further = instance.products() as u64 - 1;
    let alone = ALONE + ALONE_FOR_PRODUCT * further;
    tiles.div_ceil(sms * resident) * alone.max(warps * (ISSUED + ISSUED_FOR_PRODUCT * further))
}

/// About how many cycles a multiprocessor takes for a k-block of all its tiles of C with n columns, where every instance has the products of a
/// warp: as on an H200, whose warps run the same code, but for room and for the tensor cores. Where many tokens keep these busy, they take
/// longer here. No such card has been measured.
///
/// # Panics
/// If the instance has the products of a warpgroup.
pub(in crate::kernels) fn cycles_of_warps_alone(cut: Cut, n: u32, sms: u32) -> u64 {
    /// What a multiprocessor has of shared memory on RTX 30, 40, 50 and PRO, and what it takes for itself for each block (CUDA programming
    /// guide, "Technical Specifications per Compute Capability").
    const SHARED_BYTES: u32 = 100 << 10;
    const RESERVED_BYTES: u32 = 1 << 10;
    /// Cycles of a scheduler's tensor core for the products of 8 tokens with 16 columns of a k-block, at the rate of RTX PRO 6000.
    const PRODUCT: u64 = 8 * 16;
    let Instance::OfWarps(of) = cut.instance else { unreachable!("all instances are of warps") };
    let (tiles, sms) = (cut.tiles(n), u64::from(sms));
    let room = u64::from(SHARED_BYTES / (of.shared_bytes() + RESERVED_BYTES));
    let resident = tiles.div_ceil(sms).min(room);
    let warps = (resident * u64::from(of.multiplying_warps())).div_ceil(4);
    let in_tensor_cores = tiles.div_ceil(sms * resident) * warps * of.products() as u64 * PRODUCT;
    warp_cycles(of, tiles, sms, room).max(in_tensor_cores)
}
