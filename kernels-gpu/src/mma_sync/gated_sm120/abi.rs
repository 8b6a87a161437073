//! Definitions that host and `gated_sm120` share: descriptors, tiles, the packing of weights, sizes of shared memory,
//! and the list of instances.
//!
//! A and B are swapped: weights are on the tensor core's M, 16 rows per product; tokens on its N, 8 per product. A CTA
//! goes through K in *k-blocks* of up to four *steps*; a step is the K of one product. A stage holds one k-block of a
//! tile's weights and tokens.
//!
//! # Weights
//!
//! Weights of grouped GEMMs lie in *slabs*. A slab is 64 rows of one k-block, contiguous in memory, with every byte
//! where the lane that multiplies it loads it. Slabs of the same rows follow one another along K. The last k-block has
//! as many steps as it needs.
//!
//! ```text
//! slab   = values, then scales
//! values = step × strip of 16 rows × lane × 16 bytes       (register i of A: bytes 4i …)
//! scales = pair of steps × strip × lane × 4 bytes          (a word: four scales of a row and a step)
//! ```
//!
//! [`value_place`] and [`scale_place`] define which lane has which bytes. Rows 2g and 2g + 1 of a strip are rows g and
//! g + 8 of the product, so that a lane has neighboring columns of C.
//!
//! Weights of MoE layers ([`Weights::Rows`]) lie in rows, as documented in [`nvfp4_rows`](crate::nvfp4_rows).

use bytemuck::{Pod, Zeroable};

pub use crate::nvfp4_rows::{K_BLOCK, K_BLOCK_BYTES};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS},
    instances::table,
    mma_sync::SHARED_BYTES,
};

/// Rows per slab.
pub const SLAB_ROWS: u32 = 64;

/// Rows per strip: the M of a product.
pub const STRIP_ROWS: u32 = 16;

/// Strips per slab, one warp per strip; two warps per strip with many tokens ([`Instance::token_warps`]).
pub const STRIPS: u32 = SLAB_ROWS / STRIP_ROWS;

/// Slabs per tile: gate and up, or two slabs of the only matrix, one below the other.
pub const SLABS: u32 = 2;

/// The tensor core's N.
pub const N_STEP: u32 = 8;

/// Elements of K per product: the K of a tile of the scale layout.
pub const MMA_K: u32 = SCALE_TILE_K;

/// Steps of a full k-block.
pub const STEPS: u32 = K_BLOCK / MMA_K;

/// K is a multiple of this number, because a tensor map needs rows of a multiple of 16 bytes.
pub const K_ALIGNMENT: u32 = 32;

/// Bytes of a lane's values of a strip and a step: the four registers of A.
pub const LANE_BYTES: u32 = 16;

/// Bytes of a strip's values of a step.
pub const STRIP_BYTES: u32 = 32 * LANE_BYTES;

/// Bytes of a strip's scales of two steps: one word per lane.
pub const STRIP_SCALE_BYTES: u32 = 32 * 4;

/// Number of 16-byte rows in a tile of the scale layout. Tokens this far apart share a row.
pub const TOKEN_SCALE_ROWS: u32 = 32;

/// Bytes of the values of a slab with `steps` steps.
pub const fn slab_value_bytes(steps: u32) -> u32 {
    steps * STRIPS * STRIP_BYTES
}

/// Bytes of a slab with `steps` steps.
pub const fn slab_bytes(steps: u32) -> u32 {
    slab_value_bytes(steps) + steps.div_ceil(2) * STRIPS * STRIP_SCALE_BYTES
}

/// Bytes of all slabs of the same rows.
pub const fn slab_row_bytes(k: u32) -> u64 {
    let rest = (k % K_BLOCK).div_ceil(MMA_K);
    (k / K_BLOCK) as u64 * slab_bytes(STEPS) as u64 + slab_bytes(rest) as u64
}

/// Offset in a slab of byte `byte` (0 to 31), two values, of a step of row `row`.
pub const fn value_place(row: u32, step: u32, byte: u32) -> u32 {
    let (strip, row) = (row / STRIP_ROWS, row % STRIP_ROWS);
    // A's registers 0 and 2 belong to row g of the product, 1 and 3 to row g + 8. Registers 2 and 3 lie half of K
    // further on.
    let lane = row / 2 * 4 + byte % 16 / 4;
    let register = row % 2 + byte / 16 * 2;
    (step * STRIPS + strip) * STRIP_BYTES + lane * LANE_BYTES + register * 4 + byte % 4
}

/// Offset, from the end of a slab's values, of the first of the four scales of a step of row `row`. Thread selector 0
/// of A takes the scales of even steps, selector 1 the scales of odd steps.
pub const fn scale_place(row: u32, step: u32) -> u32 {
    let (strip, row) = (row / STRIP_ROWS, row % STRIP_ROWS);
    let lane = row / 2 * 4 + step % 2 * 2 + row % 2;
    (step / 2 * STRIPS + strip) * STRIP_SCALE_BYTES + lane * 4
}

/// A group of a grouped problem. An array of groups lies in global memory.
///
/// `C = silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, gate first. A plain kernel computes `alpha[0]·A·B[0]ᵀ` and reads
/// index 1 of no field.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of the tensor map of A's values: u8, `[m, k/2]`, 128-byte swizzle, zeros outside, a box of
    /// [`K_BLOCK_BYTES`] × [`Instance::tile_tokens`].
    pub a_map: u64,
    /// Address of A's scales in the blocked layout, padded to whole tiles; a multiple of 16.
    pub a_scales: u64,
    /// Addresses of the slabs of gate and up, multiples of 16. Their rows are padded with zeros to whole slabs.
    pub b: [u64; 2],
    /// Address of C [m, n], row-major, two bytes per element; a multiple of 16.
    pub c: u64,
    /// Products of the global scales: A's and gate's, A's and up's.
    pub alpha: [f32; 2],
    /// Rows of A and C: tokens.
    pub m: u32,
    /// Rows of each B, columns of C; a multiple of 8.
    pub n: u32,
    /// Number of elements that are summed; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// A tile of C. An array of tiles lies in global memory.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tile {
    /// Index of its group.
    pub group: u32,
    /// First column of C; a multiple of [`Instance::tile_columns`].
    pub first_column: u32,
    /// First token; a multiple of [`Instance::tile_tokens`].
    pub first_token: u32,
    /// Number of tokens, from 1 to [`Instance::tile_tokens`].
    pub tokens: u32,
}

/// The kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Group`].
    pub groups: u64,
    /// Address of the array of [`Tile`]. With B CTAs, CTA b computes tiles b, b + B, b + 2·B and so on.
    pub tiles: u64,
    /// Number of tiles.
    pub tile_count: u32,
    /// Output format: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
}

/// Passes the list of instances to `$each!`: `gated(tokens)` and `plain(tokens)` with up to `tokens` tokens per tile,
/// and their number of stages, one k-block per stage.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            gated_sm120_t8 = gated(8).stages(5);
            gated_sm120_t16 = gated(16).stages(4);
            gated_sm120_t32 = gated(32).stages(4);
            gated_sm120_t64 = gated(64).stages(3);
            gated_sm120_t128 = gated(128).stages(2);
            plain_sm120_t8 = plain(8).stages(5);
            plain_sm120_t16 = plain(16).stages(4);
            plain_sm120_t32 = plain(32).stages(4);
            plain_sm120_t64 = plain(64).stages(3);
            plain_sm120_t128 = plain(128).stages(2);
        }
    };
}
#[cfg(feature = "gated_sm120")]
pub(super) use instances;
instances!(table);

/// Layout of weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Slabs. A stage holds them unchanged.
    Slabs,
    /// Rows with scales in the blocked layout: [`nvfp4_rows`](crate::nvfp4_rows). A stage has 64 rows of gate and 64 of
    /// up, or 128 of the only matrix, with the 128-byte swizzle. The scale tiles of each matrix follow, one per step.
    Rows,
}

/// An instance of the kernel, and the resources that it takes.
///
/// Layout of a CTA's shared memory: the tokens of all stages, the weights of all stages, the tokens' scales of all
/// stages, then barriers.
///
/// An instance that does not fit does not compile:
///
/// ```
/// # use kernels_gpu::mma_sync::gated_sm120::abi::{Instance, gated};
/// const _: Instance = gated(64).stages(3);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::mma_sync::gated_sm120::abi::{Instance, gated};
/// const _: Instance = gated(64).stages(4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Whether a gated product has a [`Curve`](crate::curve::Curve) as its activation. Other instances have the other
    /// activations.
    pub curves: bool,
    /// Layout of weights in memory.
    pub weights: Weights,
    /// Stages of the pipeline from global memory to registers.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel with up to `tile_tokens` tokens per tile.
pub const fn gated(tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, tile_tokens, curves: false, weights: Weights::Slabs, stages: 0 })
}

/// The plain kernel with up to `tile_tokens` tokens per tile.
pub const fn plain(tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Selects weights in [`Weights::Rows`].
    pub const fn rows(self) -> Self {
        Self(Instance { weights: Weights::Rows, ..self.0 })
    }

    /// The instance with this number of stages.
    ///
    /// # Panics
    /// If the instance takes more resources than there are, or is one that the kernel does not implement.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Bytes of weights per stage.
    pub const fn weight_bytes(self) -> u32 {
        match self.weights {
            Weights::Slabs => SLABS * slab_bytes(STEPS),
            Weights::Rows => SLABS * slab_value_bytes(STEPS) + self.matrices * STEPS * SCALE_TILE_BYTES,
        }
    }

    /// Number of warps that multiply the same strips, each with its own tokens.
    pub const fn token_warps(self) -> u32 {
        if self.tile_tokens > TOKEN_SCALE_ROWS { 2 } else { 1 }
    }

    /// Number of warps that multiply. They are the CTA's first warps.
    pub const fn consumer_warps(self) -> u32 {
        STRIPS * self.token_warps()
    }

    /// Threads per CTA, in one dimension: the warps that multiply, and one warp that loads.
    pub const fn threads(self) -> u32 {
        (self.consumer_warps() + 1) * 32
    }

    /// Columns of C per tile.
    pub const fn tile_columns(self) -> u32 {
        SLABS / self.matrices * SLAB_ROWS
    }

    /// Tokens per multiplying warp.
    pub const fn warp_tokens(self) -> u32 {
        self.tile_tokens / self.token_warps()
    }

    /// Number of columns of a warp's products, eight tokens each.
    pub const fn warp_columns(self) -> usize {
        (self.warp_tokens() / N_STEP) as usize
    }

    /// Bytes of token values per stage.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * K_BLOCK_BYTES
    }

    /// Bytes of the tokens' scales per step: the rows of a tile of the scale layout that hold them, 16 bytes each.
    pub const fn step_scale_bytes(self) -> u32 {
        let rows = if self.tile_tokens < TOKEN_SCALE_ROWS { self.tile_tokens } else { TOKEN_SCALE_ROWS };
        rows * (SCALE_TILE_ROWS / TOKEN_SCALE_ROWS * 4)
    }

    /// Bytes per stage.
    pub const fn stage_bytes(self) -> u32 {
        self.token_bytes() + self.weight_bytes() + STEPS * self.step_scale_bytes()
    }

    /// Dynamic shared memory per CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        // Two barriers per stage.
        self.stages * (self.stage_bytes() + 2 * 8)
    }

    /// Fails compilation if an instance takes more resources than there are.
    const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(
            self.tile_tokens >= N_STEP && self.tile_tokens <= SCALE_TILE_ROWS && self.tile_tokens.is_power_of_two(),
            "the tokens of a tile must be a power of two, at least N_STEP and at most the rows of a scale tile"
        );
        assert!(self.stages > 0, "a pipeline needs at least 1 stage");
        assert!(self.shared_bytes() <= SHARED_BYTES, "the stages do not fit in shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

    #[test]
    fn instances_fit_and_have_distinct_names() {
        let names: BTreeSet<_> = INSTANCES.iter().map(|instance| instance.entry).collect();
        assert_eq!(names.len(), INSTANCES.len());
        INSTANCES.iter().for_each(|instance| instance.check());
    }

    #[test]
    fn every_byte_of_a_slab_is_one_value_or_one_scale() {
        for steps in [1, 2, 3, 4] {
            let mut used = BTreeSet::new();
            for row in 0..SLAB_ROWS {
                for step in 0..steps {
                    assert!((0..32).all(|byte| used.insert(value_place(row, step, byte))));
                    let scales = slab_value_bytes(steps) + scale_place(row, step);
                    assert!((scales..scales + 4).all(|byte| used.insert(byte)));
                }
            }
            assert!(*used.last().unwrap() < slab_bytes(steps));
            // An odd step takes the space of a pair.
            let unused = steps % 2 * SLAB_ROWS * 4;
            assert_eq!(used.len() as u32 + unused, slab_bytes(steps), "{steps} steps");
        }
    }

    #[test]
    fn sizes_match_manual_counts() {
        assert_eq!((slab_bytes(4), slab_bytes(1), slab_row_bytes(2880)), (9216, 2560, 11 * 9216 + 2560));
        assert_eq!([8, 32, 128].map(|tokens| gated(tokens).stages(1).stage_bytes()), [19_968, 24_576, 36_864]);
        let rows = [gated(16).rows().stages(1), plain(16).rows().stages(1)].map(|instance| instance.stage_bytes());
        assert_eq!(rows, [2048 + 20_480 + 1024, 2048 + 18_432 + 1024]);
        assert_eq!([32, 64].map(|tokens| plain(tokens).stages(1).threads()), [160, 288]);
        assert_eq!((gated(8).stages(1).tile_columns(), plain(8).stages(1).tile_columns()), (64, 128));
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn stages_beyond_shared_memory_are_refused() {
        gated(64).stages(4);
    }
}
