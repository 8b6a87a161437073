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
    linear::{PANEL_ROWS, ROW_BYTES, ROW_SCALES, inbox_bytes},
    units::OperandType,
};

/// Columns of C per warp: the M of its products.
pub const STRIP_ROWS: u32 = 16;

/// Tokens per product.
pub const PRODUCT_TOKENS: u32 = 8;

/// Bytes per address that a lane passes to `ldmatrix`. The swizzle moves pieces of this size.
pub const CHUNK_BYTES: u32 = 16;

/// Bytes of a strip's values in a k-block.
pub const STRIP_VALUES: u32 = STRIP_ROWS * ROW_BYTES;

/// Bytes of a strip's scales in a k-block.
pub const STRIP_SCALES: u32 = STRIP_ROWS * ROW_SCALES;

/// Maximum number of k-blocks per span: the mainloop has separate code for each of them.
pub const MAX_SPAN: u32 = 4;

/// An instance of the kernel, and the resources that it takes.
///
/// Layout of a CTA's shared memory: tokens of all stages, weights of all stages (the values of the tile's strips, then
/// their scales), barriers if there are any, the sums received from the cluster's other CTA if K has two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Type of tokens and C.
    pub operand_type: OperandType,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Number of warps that share a strip, each with a part of the tokens.
    pub sharing: u32,
    /// Strips per tile.
    pub strips: u32,
    /// `true` if every warp copies tokens and weights, 16 bytes per thread and copy. `false` if one additional warp
    /// loads them by bulk copies, which need sm_90.
    pub by_pieces: bool,
    /// K-blocks of a *span*: the unit in which the loading warp hands stages to the multiplying warps.
    pub span: u32,
    /// Parts of K: 1, or 2 with a cluster of two CTAs per tile, one per part.
    pub parts: u32,
    /// Stages of the pipeline that brings weights and tokens to shared memory, one k-block per stage; a multiple of
    /// `span`.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The kernel for tokens of this type, with up to `tile_tokens` tokens per tile.
pub const fn tokens(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance {
        entry: "",
        operand_type,
        tile_tokens,
        sharing: 1,
        strips: 0,
        by_pieces: false,
        span: 1,
        parts: 1,
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

    /// Sets [`Instance::parts`] to 2.
    pub const fn split(self) -> Self {
        Self(Instance { parts: 2, ..self.0 })
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
    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.strips * STRIP_ROWS
    }

    /// Number of panels that hold a tile's columns.
    pub const fn panels(self) -> u32 {
        self.columns().div_ceil(PANEL_ROWS)
    }

    /// Strips of a tile per panel.
    pub const fn panel_strips(self) -> u32 {
        self.strips / self.panels()
    }

    /// Warps per CTA that multiply.
    pub const fn multiplying_warps(self) -> u32 {
        self.strips * self.sharing
    }

    /// Threads per CTA, in one dimension: the warps that multiply, and the warp that loads by bulk copies.
    pub const fn threads(self) -> u32 {
        (self.multiplying_warps() + !self.by_pieces as u32) * 32
    }

    /// Tokens per warp.
    pub const fn warp_tokens(self) -> u32 {
        self.tile_tokens / self.sharing
    }

    /// Products per warp and 16 columns of K.
    pub const fn products(self) -> usize {
        (self.warp_tokens() / PRODUCT_TOKENS) as usize
    }

    /// Bytes of values in a stage's weights. The scales follow the values.
    pub const fn value_bytes(self) -> u32 {
        self.strips * STRIP_VALUES
    }

    /// Bytes of weights per stage.
    pub const fn weight_bytes(self) -> u32 {
        self.value_bytes() + self.strips * STRIP_SCALES
    }

    /// Bytes of tokens per stage.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * 2 * K_BLOCK
    }

    /// Number of spans that fit in the stages.
    pub const fn spans(self) -> u32 {
        self.stages / self.span
    }

    /// Pieces of sums that a thread sends to the cluster's other CTA: the sums of every second token, two per product.
    pub const fn pieces(self) -> u32 {
        self.products().div_ceil(2) as u32
    }

    /// Threads that multiply.
    pub const fn multiplying_threads(self) -> u32 {
        self.multiplying_warps() * 32
    }

    /// Dynamic shared memory per CTA, in bytes: the stages; if bulk copies fill them, a full and an empty barrier per
    /// span; if K has two parts, the sums of the other part.
    pub const fn shared_bytes(self) -> u32 {
        let barriers = if self.by_pieces { 0 } else { self.spans() * 2 * BARRIER_BYTES };
        let inbox = if self.parts > 1 { inbox_bytes(self.multiplying_threads(), self.pieces()) } else { 0 };
        self.stages * (self.weight_bytes() + self.token_bytes()) + barriers + inbox
    }

    /// Fails compilation if an instance takes more resources than there are.
    const fn check(self) {
        let is_part = self.strips > 0 && PANEL_ROWS.is_multiple_of(self.columns());
        assert!(
            is_part || self.columns().is_multiple_of(PANEL_ROWS),
            "a tile must be a part of a panel, or a multiple of a panel"
        );
        assert!(self.warp_tokens() > 0 && self.warp_tokens().is_multiple_of(PRODUCT_TOKENS));
        assert!(self.span > 0 && self.span <= MAX_SPAN && self.stages.is_multiple_of(self.span));
        assert!(self.spans() > 1 && self.stages > 2, "the pipeline needs at least 2 spans and 3 stages");
        assert!(
            self.parts == 1 || (self.parts == 2 && !self.by_pieces),
            "K must have one part, or two parts where bulk copies fill the stages"
        );
        assert!(self.shared_bytes() <= SHARED_BYTES, "the stages do not fit in shared memory");
    }
}
