//! How a warpgroup multiplies on Hopper: what the kernels for its tensor cores share. Host and device both know the sizes.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N. Weights are decoded in registers, straight into the A
//! fragments of `wgmma`; tokens are its B, in shared memory, as rows of core matrices without swizzle. A tile of C takes two
//! *panels* of weights: gate and up of the same columns of C, or neighboring columns of a plain C. Each warpgroup has 64 rows of
//! both panels; in a narrow tile it has 32 rows of gate and the same of up, or 64 of one panel. Where each warp multiplies by itself
//! (`mma.sync`), nothing here is for Hopper alone.

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

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Warps of a warpgroup.
pub const WARPS: u32 = WARPGROUP / 32;

/// Rows of a panel that a warpgroup multiplies: the tensor core's M.
pub const WARPGROUP_ROWS: u32 = 64;

/// Panels of weights of a tile.
pub const PANELS: usize = 2;

/// Rows of a core matrix (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Canonical Layouts").
pub const CORE_MATRIX_ROWS: u32 = 8;

/// Bytes of a core matrix, 8 rows of 16 bytes.
pub const CORE_MATRIX_BYTES: u32 = CORE_MATRIX_ROWS * 16;

/// Elements of K that a stage of weights and a buffer of tokens hold.
pub const K_BLOCK: u32 = 128;

/// Bytes of a strip: a k-block of [`CORE_MATRIX_ROWS`] tokens, a row of core matrices.
pub const STRIP_BYTES: u32 = CORE_MATRIX_ROWS * K_BLOCK * 2;

/// Words of weights that a lane decodes of a row in a k-block.
pub const LANE_WORDS: usize = 4;

/// Registers, of two elements each, that a word decodes to.
pub const WORD_PAIRS: usize = 4;

/// The most tokens of a tile: there are main loops for products of up to as many columns.
pub const MAX_TILE_TOKENS: u32 = 256;

/// Products with more tokens than this have an N in steps of [`WIDE_STEP`], others in steps of [`CORE_MATRIX_ROWS`]: a wide tile loses
/// little by a few more tokens.
const WIDE_TOKENS: u32 = 128;
const WIDE_STEP: u32 = 16;

/// What a block may have of shared memory on a card of compute capability 9.0 (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 227 << 10;

/// What a multiprocessor has of it, and what it takes for itself for each block (as there).
const MULTIPROCESSOR_SHARED_BYTES: u32 = 228 << 10;
const RESERVED_SHARED_BYTES: u32 = 1 << 10;

/// Registers of a multiprocessor of compute capability 9.0 (as there).
const MULTIPROCESSOR_REGISTERS: u32 = 65_536;

/// Bytes of a barrier.
pub const BARRIER_BYTES: u32 = 8;

/// Barriers by which two warpgroups pass the turn to each other.
pub const TURN_BARRIERS: u32 = 2;

/// Tiles that a block knows of ahead, and where it writes down what a tile is.
pub const TILE_SLOTS: u32 = 4;

/// Bytes of what is written down of a tile.
pub const TILE_BYTES: u32 = 32;

/// What the main loop and the epilogue are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// The least N of the tensor core's products: there is a main loop for each N from there to `tile_tokens`.
    pub least_n: u32,
    /// Warpgroups that multiply: two that take turns, or four or one that do not.
    pub consumers: u32,
    /// Whether a warpgroup has 64 rows of a tile's two panels together, and not of each: for few tiles, which as many blocks as
    /// can be are to share.
    pub narrow: bool,
}

impl Shape {
    /// Whether two warpgroups take turns to multiply, while the other decodes.
    pub const fn ping_pong(self) -> bool {
        self.consumers == 2
    }

    /// Threads of a block, in one dimension: a warpgroup that loads, and those that multiply.
    pub const fn threads(self) -> u32 {
        (1 + self.consumers) * WARPGROUP
    }

    /// Blocks that a multiprocessor has room for.
    pub const fn resident_blocks(self) -> u32 {
        resident_blocks(self.consumers)
    }

    /// The most shared memory of a block, if as many share a multiprocessor.
    pub const fn shared_bytes(self) -> u32 {
        most_shared_bytes(self.resident_blocks())
    }

    /// Rows of a panel.
    pub const fn panel_rows(self) -> u32 {
        self.consumers * WARPGROUP_ROWS / if self.narrow { PANELS as u32 } else { 1 }
    }

    /// Parts of a stage that a thread has: one of each panel, or one alone.
    pub const fn parts(self) -> usize {
        if self.narrow { 1 } else { PANELS }
    }

    /// What `setmaxnreg` gives to threads.
    pub const fn registers(self) -> Registers {
        match self.consumers {
            1 => Registers::OF_ONE_CONSUMER,
            2 => Registers::OF_TWO_CONSUMERS,
            _ => Registers::OF_FOUR_CONSUMERS,
        }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        PANELS as u32 / self.matrices * self.panel_rows()
    }

    /// Rounds of the epilogue for which a tile's sums are kept: those of 128 tokens, or of 256.
    pub const fn rounds(self) -> usize {
        if self.tile_tokens > WIDE_TOKENS { 8 } else { 4 }
    }

    /// Bytes of a buffer: the strips of a tile's tokens.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens / CORE_MATRIX_ROWS * STRIP_BYTES
    }

    /// The N of the tensor core's products for a tile of so many tokens: a multiple of [`CORE_MATRIX_ROWS`], and
    /// [`Self::least_n`] at least.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        let tokens = if tokens < self.least_n { self.least_n } else { tokens };
        tokens.next_multiple_of(if tokens > WIDE_TOKENS { WIDE_STEP } else { CORE_MATRIX_ROWS })
    }

    /// Stops the compiler where a kernel asks for what there is no code for.
    pub const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(self.least_n > 0 && self.least_n.is_multiple_of(CORE_MATRIX_ROWS), "a product has whole core matrices");
        let most = MAX_TILE_TOKENS / self.parts() as u32;
        assert!(
            self.tile_tokens > 0 && self.tile_tokens <= most,
            "there are main loops up to N = 128, of one part up to N = 256"
        );
        match self.consumers {
            1 => assert!(self.narrow, "one warpgroup has both panels of a narrow tile"),
            2 | 4 => {}
            _ => panic!("two warpgroups take turns, or four or one do not"),
        }
        self.registers().check(self.consumers);
    }
}

/// The most shared memory of a block, if so many are to share a multiprocessor.
pub const fn most_shared_bytes(resident_blocks: u32) -> u32 {
    MULTIPROCESSOR_SHARED_BYTES / resident_blocks - RESERVED_SHARED_BYTES
}

/// Blocks of so many consumers that a multiprocessor has room for: one that multiplies alone waits for itself, two do not.
const fn resident_blocks(consumers: u32) -> u32 {
    if consumers == 1 { 2 } else { 1 }
}

/// Registers of a thread after `setmaxnreg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// In the warpgroup that loads.
    pub producer: u32,
    /// In each warpgroup that multiplies.
    pub consumer: u32,
}

impl Registers {
    /// If one warpgroup multiplies: of two blocks a multiprocessor.
    pub const OF_ONE_CONSUMER: Self = Self { producer: 40, consumer: 208 };

    /// If two warpgroups multiply.
    pub const OF_TWO_CONSUMERS: Self = Self { producer: 24, consumer: 240 };

    /// If four warpgroups multiply.
    pub const OF_FOUR_CONSUMERS: Self = Self { producer: 32, consumer: 112 };

    /// Stops the compiler if `setmaxnreg` does not take these counts, or if a block with so many consumers is launched with
    /// fewer registers.
    pub const fn check(self, consumers: u32) {
        let Self { producer, consumer } = self;
        assert!(producer.is_multiple_of(8) && consumer.is_multiple_of(8), "registers are allotted in eights");
        assert!(producer >= 24 && consumer <= 256, "`setmaxnreg` takes 24 to 256 registers");
        // A block is launched with as many registers for each thread as the multiprocessor has, in eights. `setmaxnreg` shares
        // these out again.
        let threads = resident_blocks(consumers) * (1 + consumers) * WARPGROUP;
        let launched = MULTIPROCESSOR_REGISTERS / threads / 8 * 8 * (1 + consumers);
        assert!(producer + consumers * consumer <= launched, "the block has fewer registers");
    }
}
