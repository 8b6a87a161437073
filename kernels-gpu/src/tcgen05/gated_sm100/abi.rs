//! Definitions that host and `gated_sm100` share: descriptors, tiles, budgets, and the list of instances.
//!
//! A and B are swapped: weights are on the tensor core's M, 128 rows per tile; tokens are on its N, which is as large
//! as a tile needs. A CTA iterates over K in *k-blocks*; a stage holds one k-block of a tile's weights and tokens.

use bytemuck::{Pod, Zeroable};

pub use crate::nvfp4_rows::{K_BLOCK, K_BLOCK_BYTES};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS},
    instances::table,
};

/// Number of quarters of a tile's rows. A warp can read one quarter of the lanes of tensor memory: the quarter with the
/// warp's index modulo 4 (PTX ISA, "tcgen05.ld", "Access restrictions").
pub const QUARTERS: u32 = 4;

/// Rows of weights per tile and CTA: the M of an MMA, or half of it for a pair.
pub const TILE_ROWS: u32 = 128;

/// The tensor core's N is a multiple of this, and for a pair a multiple of twice this (PTX ISA, "Matrix Shape",
/// `tcgen05.mma`).
pub const N_STEP: u32 = 8;

/// Number of tokens whose scales share a column of tensor memory. Tiles start at multiples of this.
pub const TOKEN_SCALE_ROWS: u32 = 32;

/// Elements of K per MMA: the elements that a tile of the scale layout covers.
pub const MMA_K: u32 = SCALE_TILE_K;

/// Number of MMAs along a full k-block.
pub const MMAS_PER_K_BLOCK: u32 = K_BLOCK / MMA_K;

/// K is a multiple of this, because a tensor map requires rows that are multiples of 16 bytes.
pub const K_ALIGNMENT: u32 = 32;

/// Columns of C per store by tensor map: the columns of an epilogue warp.
pub const BOX_COLUMNS: u32 = TILE_ROWS / QUARTERS;

/// Bytes of these columns.
pub const BOX_BYTES: u32 = BOX_COLUMNS * 2;

/// Tokens per store by tensor map.
pub const BOX_TOKENS: u32 = 32;

/// Number of an epilogue warp's slots for sums of the other CTA of a pair, used in turn. A warp sends a step, receives
/// it and finishes it. When it has received step s + 1, the other warp has finished step s, and its slot is free for
/// step s + 2.
pub const SLOTS: u32 = 2;

/// Tokens of an epilogue step that each CTA finishes, if a pair has one matrix per CTA.
pub const HALF_STEP: u32 = N_STEP;

/// Bytes of a slot: a CTA's sums of [`HALF_STEP`] tokens and a warp's columns.
pub const SLOT_BYTES: u32 = BOX_COLUMNS * HALF_STEP * 4;

/// Maximum shared memory of a CTA on a GPU of compute capability 10.0 (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 227 << 10;

/// Number of columns of tensor memory.
pub const TMEM_COLUMNS: u32 = 512;

/// One group of a grouped problem; an element of an array in global memory.
///
/// `C = silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, gate first. A plain kernel computes `alpha[0]·A·B[0]ᵀ` and
/// ignores index 1 of every array. Values are read through tensor maps: u8, `[rows, k/2]`, the 128-byte swizzle, zeros
/// outside, a box of [`K_BLOCK_BYTES`] × rows. Scales lie in the blocked layout, padded to whole tiles.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of the tensor map of A's values; its box has `a_box` rows.
    pub a_map: u64,
    /// Address of A's scales, a multiple of 16.
    pub a_scales: u64,
    /// Addresses of the tensor maps of the values of gate and up; their boxes have [`TILE_ROWS`] rows.
    pub b_maps: [u64; 2],
    /// Addresses of the scales of gate and up, multiples of 16.
    pub b_scales: [u64; 2],
    /// Address of C [m, n], row-major, two bytes per element; a multiple of 16.
    pub c: u64,
    /// Address of the tensor map of C: u8, `[m, 2n]`, no swizzle, a box of [`BOX_COLUMNS`] columns × [`BOX_TOKENS`]
    /// tokens. Read only if the instance has [`Store::Tma`].
    pub c_map: u64,
    /// Products of the global scales: A's times gate's, and A's times up's.
    pub alpha: [f32; 2],
    /// Number of rows of A and C, which are tokens.
    pub m: u32,
    /// Number of rows of each B, and of columns of C; a multiple of 8.
    pub n: u32,
    /// Number of elements that are summed; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Number of a tile's tokens that a CTA loads: [`Instance::box_tokens`] if the tensor map belongs to the group
    /// alone, [`Instance::block_tokens`] if it covers all groups.
    pub a_box: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: [u32; 2],
}

/// One tile of C; an element of an array in global memory.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tile {
    /// Index of the tile's group. A CTA compares it with the preceding tile's index.
    pub group: u32,
    /// First row of the weights, which is a column of C; a multiple of [`Instance::tile_rows`].
    pub first_row: u32,
    /// First token; a multiple of [`TOKEN_SCALE_ROWS`].
    pub first_token: u32,
    /// Number of tokens, from 1 to the instance's [`Instance::tile_tokens`].
    pub tokens: u32,
}

impl Tile {
    /// Returns the tile packed in 8 bytes, or `None` if it does not fit.
    pub fn packed(&self) -> Option<u64> {
        let fields = [self.group, self.tokens, self.first_row / TILE_ROWS, self.first_token / TOKEN_SCALE_ROWS];
        let fits = fields.iter().all(|&field| field <= 0xffff);
        fits.then(|| fields.iter().rev().fold(0, |packed, &field| packed << 16 | u64::from(field)))
    }

    /// Inverse of [`packed`](Self::packed).
    #[inline(always)]
    pub const fn unpacked(packed: u64) -> Self {
        let (low, high) = (packed as u32, (packed >> 32) as u32);
        Self {
            group: low & 0xffff,
            tokens: low >> 16,
            first_row: (high & 0xffff) * TILE_ROWS,
            first_token: (high >> 16) * TOKEN_SCALE_ROWS,
        }
    }
}

/// A tile with its group, which a CTA reads in one load before its first copy; an element of an array in global memory.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Record {
    /// Group of the tile.
    pub group: Group,
    /// Tile.
    pub tile: Tile,
}

/// Maximum number of groups for which the kernel's parameter contains groups and tiles.
pub const GROUPS_AT_HAND: usize = 8;

/// Maximum number of tiles in the parameter: the first tile of each CTA, with one CTA per SM of a B300.
pub const TILES_AT_HAND: usize = 160;

/// The only parameter of a kernel.
///
/// It contains the first tiles where possible, so that no CTA waits for its record before its first copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Record`], one per tile. Of B CTAs, CTA b computes tiles b, b + B, b + 2·B and so on.
    /// If pairs compute tiles, the same holds for pairs.
    pub records: u64,
    /// Number of records.
    pub tile_count: u32,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Number of the first tiles that are also in `tiles`: up to [`TILES_AT_HAND`], or 0.
    pub at_hand: u32,
    /// Aligns the following fields.
    pub unused: [u32; 3],
    /// Groups of the tiles in `tiles`.
    pub groups: [Group; GROUPS_AT_HAND],
    /// These tiles, [`packed`](Tile::packed).
    pub tiles: [u64; TILES_AT_HAND],
}

impl Launch {
    /// Returns the parameter for these tiles in this order. `tiles[i].group` is an index in `groups`. The records lie
    /// at `records`.
    pub fn new(records: u64, output: u32, groups: &[Group], tiles: &[Tile]) -> Self {
        let tile_count = tiles.len() as u32;
        let mut launch = Self { records, tile_count, output, ..Self::zeroed() };
        let Some(at_hand) = launch.groups.get_mut(..groups.len()) else { return launch };
        at_hand.copy_from_slice(groups);
        for (place, packed) in launch.tiles.iter_mut().zip(tiles.iter().map_while(Tile::packed)) {
            *place = packed;
            launch.at_hand += 1;
        }
        launch
    }
}

/// Passes the list of instances to `$each!`. The argument of `gated` or `plain` is the maximum number of tokens per
/// tile, `stages` the number of stages, which hold one k-block each.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            gated_sm100_t8 = gated(8).stages(5);
            gated_sm100_t16 = gated(16).stages(5);
            gated_sm100_t32 = gated(32).stages(5);
            gated_sm100_t64 = gated(64).stages(4);
            gated_sm100_t96 = gated(96).stages(4);
            gated_sm100_t128 = gated(128).stages(4);
            gated_sm100_t192 = gated(192).stages(3);
            gated_sm100_t64_s1 = gated(64).stages(1);
            gated_sm100_t64_s2 = gated(64).stages(2);
            gated_sm100_t64_tma = gated(64).tma_store().stages(4);
            gated_sm100_t128_tma = gated(128).tma_store().stages(3);
            gated_sm100_t64_serial = gated(64).serial().stages(1);
            gated_sm100_t64_serial_s3 = gated(64).serial().stages(3);
            gated_sm100_t64_pair = gated(64).pair().stages(5);
            gated_sm100_t128_pair = gated(128).pair().stages(4);
            gated_sm100_t64_apart = gated(64).apart().stages(7);
            gated_sm100_t128_apart = gated(128).apart().stages(6);
            gated_sm100_t192_apart = gated(192).apart().stages(5);
            gated_sm100_t256_apart = gated(256).apart().stages(4);
            gated_sm100_t256_split = gated(256).apart().split().stages(5);
            gated_sm100_t64_apart_release = gated(64).apart().releases().stages(7);
            gated_sm100_t128_apart_release = gated(128).apart().releases().stages(6);
            gated_sm100_t192_apart_release = gated(192).apart().releases().stages(5);
            gated_sm100_t256_apart_release = gated(256).apart().releases().stages(4);
            gated_sm100_t256_split_release = gated(256).apart().split().releases().stages(5);
            gated_sm100_t64_one_set = gated(64).one_set().stages(4);
            plain_sm100_t8 = plain(8).stages(10);
            plain_sm100_t16 = plain(16).stages(9);
            plain_sm100_t32 = plain(32).stages(9);
            plain_sm100_t64 = plain(64).stages(7);
            plain_sm100_t96 = plain(96).stages(6);
            plain_sm100_t128 = plain(128).stages(6);
            plain_sm100_t192 = plain(192).stages(4);
            plain_sm100_t64_tma = plain(64).tma_store().stages(6);
            plain_sm100_t64_serial = plain(64).serial().stages(1);
            plain_sm100_t64_pair = plain(64).pair().stages(8);
            plain_sm100_t128_pair = plain(128).pair().stages(7);
            plain_sm100_t192_pair = plain(192).pair().stages(6);
            plain_sm100_t256_pair = plain(256).pair().stages(5);
            plain_sm100_t192_split = plain(192).pair().split().stages(6);
            plain_sm100_t64_pair_release = plain(64).pair().releases().stages(8);
            plain_sm100_t128_pair_release = plain(128).pair().releases().stages(7);
            plain_sm100_t192_pair_release = plain(192).pair().releases().stages(6);
            plain_sm100_t256_pair_release = plain(256).pair().releases().stages(5);
            plain_sm100_t192_split_release = plain(192).pair().split().releases().stages(6);
            plain_sm100_t64_one_set = plain(64).one_set().stages(7);
        }
    };
}
#[cfg(feature = "gated_sm100")]
pub(super) use instances;
instances!(table);

/// How a CTA stores C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Each lane stores 16 bytes, except outside of C.
    Direct,
    /// One lane stores a box of a tensor map, which excludes elements outside of C.
    Tma,
}

/// Part of a tile's weights that each CTA of a pair has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halves {
    /// Half of the rows of each matrix.
    Rows,
    /// One of two matrices: gate in the first CTA and up in the second. Each CTA finishes half of the tokens; the CTAs
    /// exchange the sums of these.
    Matrices,
}

/// Assignment of loads, MMAs and epilogue to warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roles {
    /// One warp loads, one warp issues MMAs, and the other warps run the epilogue, all at the same time.
    Specialized,
    /// The first epilogue warp loads and issues MMAs, then all warps run the epilogue. Tiles do not overlap. Within a
    /// tile, loads overlap with MMAs if there is more than one stage.
    Serial,
}

/// A compiled form of the kernel, and the hardware resources that it uses.
///
/// A CTA's shared memory has the stages (at the end reused for sums of other CTAs), then two buffers per epilogue warp,
/// then slots, then barriers. A stage has a tile of each matrix of weights, a tile of tokens, the scales of each
/// matrix, and the scales of the tokens.
///
/// An instance that does not fit the hardware does not compile:
///
/// ```
/// # use kernels_gpu::tcgen05::gated_sm100::abi::{Instance, gated};
/// const _: Instance = gated(64).stages(4);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::tcgen05::gated_sm100::abi::{Instance, gated};
/// const _: Instance = gated(64).stages(5);
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
    /// Number of stages of the pipeline from global memory to the tensor core.
    pub stages: u32,
    /// How a CTA stores C.
    pub store: Store,
    /// Assignment of work to warps.
    pub roles: Roles,
    /// Number of CTAs that compute a tile together: 1, or 2 for a pair whose tensor cores share the tokens
    /// (`cta_group::2`).
    pub blocks: u32,
    /// Part of the weights that each CTA of a pair has. [`Halves::Rows`] for a single CTA, which has all weights.
    pub halves: Halves,
    /// Number of parts of K. Each part is multiplied by a separate pair of the cluster.
    pub splits: u32,
    /// Whether the weights of the first stages are loaded before the wait for earlier grids, which write the tokens.
    pub early: bool,
    /// Whether the CTAs of a pair report to each other by releasing arrivals (`Ring::releasing`).
    pub releases: bool,
    /// Whether the scales of all k-blocks have the same columns of tensor memory. Copies then overwrite scales of MMAs
    /// that were issued before, without a wait for these MMAs.
    pub one_set: bool,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of a gated instance with up to `tile_tokens` tokens per tile: a single CTA, specialized warps, direct
/// stores.
pub const fn gated(tile_tokens: u32) -> Builder {
    let (store, roles, halves) = (Store::Direct, Roles::Specialized, Halves::Rows);
    Builder(Instance {
        entry: "",
        matrices: 2,
        tile_tokens,
        curves: false,
        stages: 0,
        store,
        roles,
        blocks: 1,
        halves,
        splits: 1,
        early: false,
        releases: false,
        one_set: false,
    })
}

/// Returns a builder like [`gated`], for a plain instance.
pub const fn plain(tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Sets [`Store::Tma`].
    pub const fn tma_store(self) -> Self {
        Self(Instance { store: Store::Tma, ..self.0 })
    }

    /// Sets [`Roles::Serial`].
    pub const fn serial(self) -> Self {
        Self(Instance { roles: Roles::Serial, ..self.0 })
    }

    /// Uses a pair of CTAs.
    pub const fn pair(self) -> Self {
        Self(Instance { blocks: 2, ..self.0 })
    }

    /// Uses a pair of CTAs with one matrix each.
    pub const fn apart(self) -> Self {
        Self(Instance { blocks: 2, halves: Halves::Matrices, ..self.0 })
    }

    /// Uses two pairs of CTAs with half of K each.
    pub const fn split(self) -> Self {
        Self(Instance { splits: 2, ..self.0 })
    }

    /// Loads the weights of the first stages before the wait for earlier grids.
    pub const fn early(self) -> Self {
        Self(Instance { early: true, ..self.0 })
    }

    /// Sets [`Instance::releases`].
    pub const fn releases(self) -> Self {
        Self(Instance { releases: true, ..self.0 })
    }

    /// Sets [`Instance::one_set`].
    pub const fn one_set(self) -> Self {
        Self(Instance { one_set: true, ..self.0 })
    }

    /// Returns the instance with `stages` stages.
    ///
    /// # Panics
    /// If the instance exceeds the hardware's resources, or is not supported by the kernel.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Bytes of a CTA's tile of weights in a stage.
    pub const WEIGHT_BYTES: u32 = TILE_ROWS * K_BLOCK_BYTES;

    /// Bytes of the scales of 128 rows in a stage.
    pub const SCALE_BYTES: u32 = MMAS_PER_K_BLOCK * SCALE_TILE_BYTES;

    /// Number of epilogue warps per quarter. They take a tile's tokens in turn: each step is a chain of slow
    /// instructions, and this many chains run at the same time.
    pub const fn parts(self) -> u32 {
        2 * self.blocks
    }

    /// Number of warps that run the epilogue, which are the CTA's first warps.
    pub const fn epilogue_warps(self) -> u32 {
        self.parts() * QUARTERS
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        let warps = match self.roles {
            Roles::Specialized => self.epilogue_warps() + 2,
            Roles::Serial => self.epilogue_warps(),
        };
        warps * 32
    }

    /// CTAs per cluster, or 0 for no cluster.
    pub const fn cluster(self) -> u32 {
        if self.blocks > 1 { self.blocks_of_tile() } else { 0 }
    }

    /// Number of CTAs that compute a tile together, over all parts of K.
    pub const fn blocks_of_tile(self) -> u32 {
        self.blocks * self.splits
    }

    /// Whether the instance is right by the letter of the manual: it relies neither on relaxed arrivals of a pair nor on
    /// the order of an MMA and a copy of scales behind it.
    pub const fn follows_manual(self) -> bool {
        (self.blocks == 1 || self.releases) && !self.one_set
    }

    /// Number of CTAs that have sums of the same elements of C. Each of them finishes every `finishers`-th [`N_STEP`]
    /// tokens.
    pub const fn finishers(self) -> u32 {
        match self.halves {
            Halves::Rows => self.splits,
            Halves::Matrices => self.blocks_of_tile(),
        }
    }

    /// Number of matrices of weights that a CTA loads.
    pub const fn block_matrices(self) -> u32 {
        match self.halves {
            Halves::Rows => self.matrices,
            Halves::Matrices => 1,
        }
    }

    /// Number of rows of each matrix of weights per tile, which are columns of C.
    pub const fn tile_rows(self) -> u32 {
        match self.halves {
            Halves::Rows => self.mma_rows(),
            Halves::Matrices => TILE_ROWS,
        }
    }

    /// M of the tensor core's products: [`TILE_ROWS`] per CTA.
    pub const fn mma_rows(self) -> u32 {
        self.blocks * TILE_ROWS
    }

    /// Number of tokens that a CTA loads of a full tile. Each CTA of a pair loads half of the tile's tokens.
    pub const fn block_tokens(self) -> u32 {
        self.tile_tokens / self.blocks
    }

    /// Number of tokens that a CTA loads of the largest tile of a group of `m` tokens. With a larger box, the first CTA
    /// of a pair would also load tokens of the second CTA.
    pub const fn box_tokens(self, m: u32) -> u32 {
        self.mma_n(if m < self.tile_tokens { m } else { self.tile_tokens }) / self.blocks
    }

    /// N of the tensor core's products for a tile of `tokens` tokens. If CTAs finish parts of the tile, N is a multiple
    /// of an epilogue step.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        let blocks = if self.finishers() > self.blocks { self.finishers() } else { self.blocks };
        tokens.next_multiple_of(blocks * N_STEP)
    }

    /// Whether tiles of a group of `m` tokens can start at multiples of [`TOKEN_SCALE_ROWS`], as they must.
    pub const fn allows(self, m: u32) -> bool {
        m <= self.tile_tokens || self.tile_tokens.is_multiple_of(TOKEN_SCALE_ROWS)
    }

    /// Bytes of a CTA's tokens in a stage.
    pub const fn token_bytes(self) -> u32 {
        self.block_tokens() * K_BLOCK_BYTES
    }

    /// Maximum number of scale tiles that contain a tile's tokens. A tile may start in the middle of a scale tile.
    pub const fn token_scale_tiles(self) -> u32 {
        if !self.tile_tokens.is_multiple_of(TOKEN_SCALE_ROWS) {
            return 1;
        }
        let (mut most, mut first) = (0, 0);
        while first < SCALE_TILE_ROWS * self.tile_tokens {
            let tiles = (first % SCALE_TILE_ROWS + self.tile_tokens).div_ceil(SCALE_TILE_ROWS);
            if tiles > most {
                most = tiles;
            }
            first += self.tile_tokens;
        }
        most
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        self.block_matrices() * Self::WEIGHT_BYTES
            + self.token_bytes()
            + (self.block_matrices() + self.token_scale_tiles()) * Self::SCALE_BYTES
    }

    /// Number of tokens that an epilogue warp collects in one of its buffers before it stores them.
    pub const fn store_tokens(self) -> u32 {
        match self.store {
            Store::Direct => N_STEP,
            Store::Tma => BOX_TOKENS,
        }
    }

    /// Bytes of one of an epilogue warp's two buffers.
    pub const fn store_bytes(self) -> u32 {
        self.store_tokens() * BOX_BYTES
    }

    /// Columns of tensor memory for the scales of a k-block: each MMA needs one column per 32 rows.
    pub const fn scale_columns(self) -> u32 {
        MMAS_PER_K_BLOCK * (SCALE_TILE_ROWS / TOKEN_SCALE_ROWS) * (self.block_matrices() + self.token_scale_tiles())
    }

    /// Columns of tensor memory for the accumulators of a tile.
    pub const fn accumulator_columns(self) -> u32 {
        self.block_matrices() * self.tile_tokens
    }

    /// Number of accumulators: 2 if they fit in addition to the scales of two k-blocks, so that the epilogue of a tile
    /// overlaps with the MMAs of the next tile.
    pub const fn accumulators(self) -> u32 {
        let scale_sets = if self.stages > 1 { 2 } else { 1 };
        let fit = 2 * self.accumulator_columns() + scale_sets * self.scale_columns() <= TMEM_COLUMNS;
        match self.roles {
            Roles::Specialized if fit => 2,
            _ => 1,
        }
    }

    /// Number of sets of columns of tensor memory for the scales of a k-block: the number of stages, or the number that
    /// fits if it is smaller. 1 with [`Instance::one_set`].
    pub const fn scale_sets(self) -> u32 {
        if self.one_set {
            return 1;
        }
        let left = TMEM_COLUMNS.saturating_sub(self.accumulators() * self.accumulator_columns());
        let fit = left / self.scale_columns();
        if fit < self.stages { fit } else { self.stages }
    }

    /// Columns of tensor memory in use.
    pub const fn tmem_columns(self) -> u32 {
        self.accumulators() * self.accumulator_columns() + self.scale_sets() * self.scale_columns()
    }

    /// Number of full and empty barriers of stages and accumulators.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.accumulators())
    }

    /// Number of slots for sums of the other CTA: [`SLOTS`] per epilogue warp if a pair has one matrix per CTA.
    pub const fn slots(self) -> u32 {
        match self.halves {
            Halves::Matrices if self.splits == 1 => self.epilogue_warps() * SLOTS,
            _ => 0,
        }
    }

    /// Bytes of an epilogue warp's inbox, where other CTAs send sums of the last tile. The inbox reuses the memory of
    /// the stages.
    pub const fn inbox_bytes(self) -> u32 {
        let steps = self.tile_tokens.div_ceil(self.parts() * self.finishers() * N_STEP);
        steps * (self.finishers() - 1) * SLOT_BYTES
    }

    /// Number of barriers of inboxes.
    pub const fn inboxes(self) -> u32 {
        if self.finishers() > 1 { self.epilogue_warps() } else { 0 }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        // The address of the tensor memory takes the size of one barrier.
        let barriers = self.barriers() + self.slots() + self.inboxes() + 1;
        let buffers = self.epilogue_warps() * 2 * self.store_bytes() + self.slots() * SLOT_BYTES;
        self.stages * self.stage_bytes() + buffers + 8 * barriers
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(self.blocks == 1 || self.blocks == 2, "a tile must belong to one CTA or to a pair");
        let apart = matches!(self.halves, Halves::Matrices);
        assert!(
            !apart || (self.blocks == 2 && self.matrices == 2 && matches!(self.store, Store::Direct)),
            "`apart` requires a pair, two matrices and direct stores"
        );
        assert!(self.tile_tokens > 0 && self.tile_tokens <= 256, "the tensor core's N is at most 256");
        assert!(
            self.mma_n(self.tile_tokens) == self.tile_tokens,
            "the tensor core's N must be a multiple of 8, or of 16 for a pair"
        );
        assert!(
            self.tile_tokens.is_multiple_of(self.store_tokens()),
            "with stores by tensor map, a tile's tokens must be a multiple of a box's tokens"
        );
        assert!(self.stages > 0, "a pipeline needs at least 1 stage");
        let alone = self.blocks == 1 || matches!(self.roles, Roles::Specialized);
        assert!(
            alone,
            "serial roles require a single CTA: in a pair, no thread of the second CTA would report its stages"
        );
        assert!(self.splits == 1 || self.blocks == 2, "`split` requires pairs");
        assert!(!self.releases || self.blocks == 2, "`releases` requires pairs");
        let alone = self.blocks == 1 && matches!(self.roles, Roles::Specialized);
        assert!(!self.early || alone, "`early` requires a single CTA with a warp that loads");
        assert!(
            self.inboxes() * self.inbox_bytes() <= self.stages * self.stage_bytes(),
            "inboxes of the last tile must fit in the memory of the stages"
        );
        assert!(self.scale_sets() > 0, "accumulators and scales do not fit in tensor memory");
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
    fn budgets_match_hand_counts() {
        assert_eq!([8, 128].map(|tokens| gated(tokens).stages(1).stage_bytes()), [39_936, 55_296]);
        assert_eq!([32, 64, 96, 128, 192].map(|tokens| gated(tokens).stages(1).token_scale_tiles()), [1, 1, 2, 1, 2]);
        assert_eq!([64, 96, 128, 192].map(|tokens| gated(tokens).stages(1).accumulators()), [2, 2, 1, 1]);
        assert_eq!(gated(128).stages(1).tmem_columns(), 256 + 48);
        let of_four_stages = |tokens| Instance { stages: 4, ..gated(tokens).stages(1) };
        assert_eq!([64, 96, 128, 192].map(|tokens| of_four_stages(tokens).scale_sets()), [4, 2, 4, 2]);
        assert_eq!([64, 96, 128, 192].map(|tokens| of_four_stages(tokens).tmem_columns()), [448, 512, 448, 512]);
        let (pair, single) = (gated(128).pair().stages(1), gated(128).stages(1));
        assert_eq!(single.stage_bytes() - pair.stage_bytes(), 64 * 128);
        assert_eq!((pair.tile_rows(), pair.mma_n(9), single.mma_n(9)), (256, 16, 16));
        let apart = gated(128).apart().stages(6);
        assert_eq!((apart.stage_bytes(), apart.tile_rows(), apart.mma_rows(), apart.slots()), (28_672, 128, 256, 32));
        assert_eq!([apart, gated(192).apart().stages(5)].map(Instance::scale_sets), [6, 2]);
        assert_eq!([192, 256].map(|tokens| gated(tokens).apart().stages(4).accumulators()), [2, 1]);
        let split = gated(256).apart().split().stages(5);
        assert_eq!((split.cluster(), split.finishers(), split.mma_n(33), split.slots()), (4, 4, 64, 0));
        assert_eq!([split, apart, plain(192).pair().split().stages(6)].map(Instance::inbox_bytes), [6144, 2048, 3072]);
        assert_eq!([40, 72, 192, 248].map(|m| plain(192).pair().stages(6).box_tokens(m)), [24, 40, 96, 96]);
        assert_eq!((split.box_tokens(33), single.box_tokens(33)), (32, 40));
    }

    #[test]
    fn parameter_contains_first_tiles_of_few_groups() {
        let group = |k| Group { k, ..Group::zeroed() };
        let groups: std::vec::Vec<_> = (0..GROUPS_AT_HAND as u32 + 1).map(group).collect();
        let tile = |n| Tile { group: n % 8, first_row: n * 128, first_token: n * 32, tokens: 1 + n };
        let tiles: std::vec::Vec<_> = (0..TILES_AT_HAND as u32 + 1).map(tile).collect();
        let few = Launch::new(7, 1, &groups[..GROUPS_AT_HAND], &tiles);
        assert_eq!((few.tile_count, few.at_hand), (tiles.len() as u32, TILES_AT_HAND as u32));
        assert_eq!(few.groups[..], groups[..GROUPS_AT_HAND]);
        assert!(few.tiles.iter().zip(&tiles).all(|(&packed, tile)| Tile::unpacked(packed) == *tile));
        assert_eq!(Launch::new(7, 1, &groups, &tiles).at_hand, 0);

        let far = Tile { first_token: 0x10000 * TOKEN_SCALE_ROWS, ..tile(2) };
        assert_eq!(Launch::new(7, 1, &groups[..1], &[tile(0), far, tile(1)]).at_hand, 1);
    }

    #[test]
    #[should_panic(expected = "tensor memory")]
    fn columns_beyond_tensor_memory_are_refused() {
        gated(224).stages(1);
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn stages_beyond_shared_memory_are_refused() {
        gated(64).stages(5);
    }
}
