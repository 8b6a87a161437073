//! Common parts of the kernels that decode weights into registers and multiply them on the tensor cores of one
//! warpgroup or one warp. Host and device share the sizes.
//!
//! A and B are swapped: weights are on the tensor core's M, tokens on its N. Weights are decoded in registers, directly
//! into the A fragments of `wgmma`; tokens are its B, in shared memory, as rows of core matrices without swizzle. A
//! tile of C takes two *panels* of weights: gate and up of the same columns of C, or neighboring columns of a plain C.
//! Each warpgroup has 64 rows of both panels. In a narrow tile, it has 32 rows of gate and the same 32 rows of up, or
//! 64 rows of one panel. Kernels in which each warp multiplies by itself (`mma.sync`) use the same parts on other GPUs
//! than Hopper.

#[cfg(feature = "decoding")]
pub mod decode;
#[cfg(feature = "decoding")]
mod fragment;
#[cfg(feature = "decoding")]
mod rows;
#[cfg(feature = "decoding")]
mod tiles;
#[cfg(feature = "decoding")]
mod write;

#[cfg(feature = "decoding")]
pub use self::{
    fragment::Fragment,
    rows::{Decode, Packed, Rows, StagedRows},
    tiles::{Tile, TileLists, from_first_lane},
    write::{Alpha, BIAS_BYTES, Placing, Sums, Target, Written, pad, registers},
};

/// Threads per warpgroup.
pub const WARPGROUP: u32 = 128;

/// Warps per warpgroup.
pub const WARPS: u32 = WARPGROUP / 32;

/// Rows of a panel that a warpgroup multiplies: the tensor core's M.
pub const WARPGROUP_ROWS: u32 = 64;

/// Panels of weights per tile.
pub const PANELS: usize = 2;

/// Rows of a core matrix (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Canonical Layouts").
pub const CORE_MATRIX_ROWS: u32 = 8;

/// Bytes of a core matrix, 8 rows of 16 bytes.
pub const CORE_MATRIX_BYTES: u32 = CORE_MATRIX_ROWS * 16;

/// Elements of K in a stage of weights and in a buffer of tokens.
pub const K_BLOCK: u32 = 128;

/// Bytes of a strip: a k-block of [`CORE_MATRIX_ROWS`] tokens, a row of core matrices.
pub const STRIP_BYTES: u32 = CORE_MATRIX_ROWS * K_BLOCK * 2;

/// Words of weights that a lane decodes per row and k-block.
pub const LANE_WORDS: usize = 4;

/// Registers that a word decodes to, two elements each.
pub const WORD_PAIRS: usize = 4;

/// Maximum number of tokens per tile. There are mainloops for products of up to this N.
pub const MAX_TILE_TOKENS: u32 = 256;

/// Products with more tokens than this have an N in steps of [`WIDE_STEP`], other products in steps of
/// [`CORE_MATRIX_ROWS`]: a few more tokens cost a wide tile little.
const WIDE_TOKENS: u32 = 128;
const WIDE_STEP: u32 = 16;

/// Maximum shared memory of a CTA on compute capability 9.0, in bytes (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 227 << 10;

/// Bytes of shared memory of an SM, and bytes that the system reserves per CTA (same source).
const MULTIPROCESSOR_SHARED_BYTES: u32 = 228 << 10;
const RESERVED_SHARED_BYTES: u32 = 1 << 10;

/// Registers of an SM of compute capability 9.0 (same source).
const MULTIPROCESSOR_REGISTERS: u32 = 65_536;

/// Bytes of a barrier.
pub const BARRIER_BYTES: u32 = 8;

/// Number of barriers by which two warpgroups pass the turn to each other.
pub const TURN_BARRIERS: u32 = 2;

/// Number of places for descriptions of tiles in a CTA: the CTA knows this many tiles ahead.
pub const TILE_SLOTS: u32 = 4;

/// Bytes of a tile's description.
pub const TILE_BYTES: u32 = 32;

/// Parameters for which the mainloop and the epilogue are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Smallest N of the tensor core's products. There is a mainloop for each N from there to `tile_tokens`.
    pub least_n: u32,
    /// Number of warpgroups that multiply: one, two that take turns, or four without turns.
    pub consumers: u32,
    /// `true` if a warpgroup has 64 rows of a tile's two panels together, `false` if it has 64 rows of each. Narrow
    /// tiles distribute little work over as many CTAs as possible.
    pub narrow: bool,
}

impl Shape {
    /// Whether two warpgroups take turns: one multiplies while the other decodes.
    pub const fn ping_pong(self) -> bool {
        self.consumers == 2
    }

    /// Threads per CTA, in one dimension: one warpgroup that loads, and the warpgroups that multiply.
    pub const fn threads(self) -> u32 {
        (1 + self.consumers) * WARPGROUP
    }

    /// Number of CTAs that fit in an SM.
    pub const fn resident_blocks(self) -> u32 {
        resident_blocks(self.consumers)
    }

    /// Maximum shared memory per CTA, in bytes, with [`Self::resident_blocks`] CTAs per SM.
    pub const fn shared_bytes(self) -> u32 {
        most_shared_bytes(self.resident_blocks())
    }

    /// Rows per panel.
    pub const fn panel_rows(self) -> u32 {
        self.consumers * WARPGROUP_ROWS / if self.narrow { PANELS as u32 } else { 1 }
    }

    /// Parts of a stage per thread: one of each panel or, in a narrow tile, one of both panels together.
    pub const fn parts(self) -> usize {
        if self.narrow { 1 } else { PANELS }
    }

    /// Registers that `setmaxnreg` gives to threads.
    pub const fn registers(self) -> Registers {
        match self.consumers {
            1 => Registers::OF_ONE_CONSUMER,
            2 => Registers::OF_TWO_CONSUMERS,
            _ => Registers::OF_FOUR_CONSUMERS,
        }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        PANELS as u32 / self.matrices * self.panel_rows()
    }

    /// Rounds of the epilogue for which a tile's sums are kept: 4 for up to 128 tokens, 8 for up to 256.
    pub const fn rounds(self) -> usize {
        if self.tile_tokens > WIDE_TOKENS { 8 } else { 4 }
    }

    /// Bytes of a buffer: the strips of a tile's tokens.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens / CORE_MATRIX_ROWS * STRIP_BYTES
    }

    /// The N of the tensor core's products for a tile of `tokens` tokens: a multiple of [`CORE_MATRIX_ROWS`], at least
    /// [`Self::least_n`].
    pub const fn mma_n(self, tokens: u32) -> u32 {
        let tokens = if tokens < self.least_n { self.least_n } else { tokens };
        tokens.next_multiple_of(if tokens > WIDE_TOKENS { WIDE_STEP } else { CORE_MATRIX_ROWS })
    }

    /// Fails compilation if there is no code for this shape.
    pub const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(
            self.least_n > 0 && self.least_n.is_multiple_of(CORE_MATRIX_ROWS),
            "the smallest N must be a multiple of a core matrix's rows"
        );
        let most = MAX_TILE_TOKENS / self.parts() as u32;
        assert!(
            self.tile_tokens > 0 && self.tile_tokens <= most,
            "a tile must have 1 to 128 tokens, or 1 to 256 with one part per thread"
        );
        match self.consumers {
            1 => assert!(self.narrow, "with one multiplying warpgroup, the tile must be narrow"),
            2 | 4 => {}
            _ => panic!("1, 2 or 4 warpgroups must multiply"),
        }
        self.registers().check(self.consumers);
    }
}

/// Maximum shared memory per CTA, in bytes, with `resident_blocks` CTAs per SM.
pub const fn most_shared_bytes(resident_blocks: u32) -> u32 {
    MULTIPROCESSOR_SHARED_BYTES / resident_blocks - RESERVED_SHARED_BYTES
}

/// Number of CTAs that fit in an SM, by their number of multiplying warpgroups. A single warpgroup waits for its own
/// products, so a second CTA fills the time; two warpgroups fill it themselves.
const fn resident_blocks(consumers: u32) -> u32 {
    if consumers == 1 { 2 } else { 1 }
}

/// Registers per thread after `setmaxnreg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Registers per thread of the warpgroup that loads.
    pub producer: u32,
    /// Registers per thread of each warpgroup that multiplies.
    pub consumer: u32,
}

impl Registers {
    /// Registers with one multiplying warpgroup, and two CTAs per SM.
    pub const OF_ONE_CONSUMER: Self = Self { producer: 40, consumer: 208 };

    /// Registers with two multiplying warpgroups.
    pub const OF_TWO_CONSUMERS: Self = Self { producer: 24, consumer: 240 };

    /// Registers with four multiplying warpgroups.
    pub const OF_FOUR_CONSUMERS: Self = Self { producer: 32, consumer: 112 };

    /// Fails compilation if `setmaxnreg` does not take these numbers, or if a CTA with this number of consumers is
    /// launched with fewer registers.
    pub const fn check(self, consumers: u32) {
        let Self { producer, consumer } = self;
        assert!(
            producer.is_multiple_of(8) && consumer.is_multiple_of(8),
            "numbers of registers must be multiples of 8"
        );
        assert!(producer >= 24 && consumer <= 256, "`setmaxnreg` takes 24 to 256 registers only");
        // At launch, each thread of a CTA gets an equal share of the SM's registers, rounded down to a multiple of 8.
        // `setmaxnreg` redistributes them.
        let threads = resident_blocks(consumers) * (1 + consumers) * WARPGROUP;
        let launched = MULTIPROCESSOR_REGISTERS / threads / 8 * 8 * (1 + consumers);
        assert!(
            producer + consumers * consumer <= launched,
            "the warpgroups take more registers than the CTA is launched with"
        );
    }
}
