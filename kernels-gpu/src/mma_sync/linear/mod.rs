//! Products of a single warp for linear layers. The instances of several kernels are built from this source.
//!
//! `strip.rs` computes with one stage. `kernel.rs` fills stages by bulk copies.
//! [`linear_sm80`](crate::mma_sync::linear_sm80) fills them by other copies.
//!
//! A tile is a number of strips of 16 columns of C, for up to a fixed number of tokens. Each warp has one strip, with
//! all or a part of the tile's tokens.

#[cfg(any(feature = "linear_sm90", feature = "linear_sm120"))]
pub(crate) mod kernel;
#[cfg(feature = "linear")]
pub(crate) mod strip;

use crate::{
    decoding::{BARRIER_BYTES, K_BLOCK, SHARED_BYTES},
    linear::{PANEL_ROWS, ROW_BYTES, ROW_SCALES},
    units::OperandType,
};

/// Columns of C that a warp has: the M of its products.
pub const STRIP_ROWS: u32 = 16;

/// Tokens of a product.
pub const PRODUCT_TOKENS: u32 = 8;

/// Bytes that a lane gives the address of to `ldmatrix`: the swizzle moves such pieces.
pub const CHUNK_BYTES: u32 = 16;

/// Bytes of a strip's values in a k-block.
pub const STRIP_VALUES: u32 = STRIP_ROWS * ROW_BYTES;

/// Bytes of a strip's scales in a k-block.
pub const STRIP_SCALES: u32 = STRIP_ROWS * ROW_SCALES;

/// The most k-blocks of a span: the main loop has code for each of them.
pub const MAX_SPAN: u32 = 8;

/// One way to build the kernel, and what it takes of the hardware.
///
/// Shared memory of a block: tokens of all stages, weights of all stages (the values of the tile's strips, then their scales), barriers if
/// there are any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The entry's name.
    pub entry: &'static str,
    /// The type of tokens and C.
    pub operand_type: OperandType,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Warps that share a strip, each with a part of the tokens.
    pub sharing: u32,
    /// Strips of a tile.
    pub strips: u32,
    /// Whether every warp copies tokens and weights, 16 bytes a thread; if not, one warp more loads them by bulk copies, which cards before
    /// sm_90 do not have.
    pub by_pieces: bool,
    /// K-blocks of a *span*: what the warp that loads and those that multiply hand over at a time.
    pub span: u32,
    /// Stages of the pipeline that brings weights and tokens to shared memory, a k-block each; whole spans.
    pub stages: u32,
}

/// An [`Instance`] that lacks its stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The kernel for tokens of this type, with up to so many of them a tile.
pub const fn tokens(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance {
        entry: "",
        operand_type,
        tile_tokens,
        sharing: 1,
        strips: 0,
        by_pieces: false,
        span: 1,
        stages: 0,
    })
}

impl Builder {
    /// Sets [`Instance::sharing`].
    pub const fn shared_by(self, sharing: u32) -> Self {
        Self(Instance { sharing, ..self.0 })
    }

    /// Sets [`Instance::strips`].
    pub const fn strips(self, strips: u32) -> Self {
        Self(Instance { strips, ..self.0 })
    }

    /// Sets [`Instance::by_pieces`].
    pub const fn by_pieces(self) -> Self {
        Self(Instance { by_pieces: true, ..self.0 })
    }

    /// Sets [`Instance::span`].
    pub const fn span(self, span: u32) -> Self {
        Self(Instance { span, ..self.0 })
    }

    /// The instance with so many stages.
    ///
    /// # Panics
    /// If it asks for more than there is, or for what the kernel cannot do.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.strips * STRIP_ROWS
    }

    /// Panels that a tile's columns lie in.
    pub const fn panels(self) -> u32 {
        self.columns().div_ceil(PANEL_ROWS)
    }

    /// Strips of a panel that a tile has.
    pub const fn panel_strips(self) -> u32 {
        self.strips / self.panels()
    }

    /// Warps that multiply.
    pub const fn multiplying_warps(self) -> u32 {
        self.strips * self.sharing
    }

    /// Threads of a block, in one dimension: the warps that multiply, and perhaps one that loads.
    pub const fn threads(self) -> u32 {
        (self.multiplying_warps() + !self.by_pieces as u32) * 32
    }

    /// Tokens of a warp.
    pub const fn warp_tokens(self) -> u32 {
        self.tile_tokens / self.sharing
    }

    /// Products of a warp for 16 columns of K.
    pub const fn products(self) -> usize {
        (self.warp_tokens() / PRODUCT_TOKENS) as usize
    }

    /// Bytes of the values of a stage's weights, which their scales lie behind.
    pub const fn value_bytes(self) -> u32 {
        self.strips * STRIP_VALUES
    }

    /// Bytes of a stage's weights.
    pub const fn weight_bytes(self) -> u32 {
        self.value_bytes() + self.strips * STRIP_SCALES
    }

    /// Bytes of a stage's tokens.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * 2 * K_BLOCK
    }

    /// Spans that the stages have room for.
    pub const fn spans(self) -> u32 {
        self.stages / self.span
    }

    /// Dynamic shared memory of a block, in bytes: stages, and if bulk copies fill them, barriers for full and empty of each span.
    pub const fn shared_bytes(self) -> u32 {
        let barriers = if self.by_pieces { 0 } else { self.spans() * 2 * BARRIER_BYTES };
        self.stages * (self.weight_bytes() + self.token_bytes()) + barriers
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        let is_part = self.strips > 0 && PANEL_ROWS.is_multiple_of(self.columns());
        assert!(is_part || self.columns().is_multiple_of(PANEL_ROWS), "a tile is a part of a panel, or whole ones");
        assert!(self.warp_tokens() > 0 && self.warp_tokens().is_multiple_of(PRODUCT_TOKENS));
        assert!(self.span > 0 && self.span <= MAX_SPAN && self.stages.is_multiple_of(self.span));
        assert!(
            self.spans() > 1 && self.stages > 2,
            "one stage is multiplied, the next one is full, and one is being filled"
        );
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages do not fit shared memory");
    }
}
