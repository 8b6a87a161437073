//! What host and `linear_sm90` agree on: how weights lie in memory, the parameters, budgets, and the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N.
//!
//! # Panels
//!
//! A *panel* is [`PANEL_ROWS`] rows of one k-block: what a warpgroup multiplies at a time. A matrix `[n, k]` is its panels, those of
//! the first rows along K, then those of the next rows; rows and columns that the matrix lacks are zeros. Tokens stay in their
//! natural order: 16 bytes of a token, eight columns, are a row of a core matrix, and each of the four lanes that share a row of
//! `wgmma`'s A (PTX ISA, "Register Fragments for wgmma.mma_async") has two neighboring ones of each core matrix.
//!
//! * First come the values, row by row, [`ROW_BYTES`] each: for each lane its four *words*. Nibble j of word t of lane L is column
//!   `32t + 8·(j%4) + 2L + j/4` ([`column()`]), so that the nibbles i and i+4, which decode into one register, are neighbors.
//! * Then the scales, row by row, [`ROW_SCALES`] each, in their order. Words have two: registers 0 and 1 have scale 2t, the other
//!   two have scale 2t+1.
//!
//! Words and scales are those of [`OperandType::pack`] and [`OperandType::pack_scale`].
//!
//! [`moe_sm90`](crate::wgmma::moe_sm90) permutes K instead, which saves a sixth of the decoding, but takes a launch for the tokens.

use bytemuck::{Pod, Zeroable};

use crate::{
    decoding::{
        BARRIER_BYTES, K_BLOCK, LANE_WORDS, PANELS, SHARED_BYTES, Shape, TURN_BARRIERS, WARPGROUP, WARPGROUP_ROWS,
    },
    format::BLOCK,
    instances::table,
    layer::moe_route::abi::tile_size,
    units::OperandType,
};

/// Rows of a panel.
pub const PANEL_ROWS: u32 = WARPGROUP_ROWS;

/// Lanes that share a row of a fragment.
pub const ROW_LANES: u32 = 4;

/// Bytes of a lane's words of a row.
pub const LANE_BYTES: u32 = 4 * LANE_WORDS as u32;

/// Bytes of a row's values in a panel.
pub const ROW_BYTES: u32 = ROW_LANES * LANE_BYTES;

/// Scales, of a byte each, of a row in a panel.
pub const ROW_SCALES: u32 = K_BLOCK / BLOCK;

/// Where scales begin in a panel.
pub const PANEL_SCALES: u32 = PANEL_ROWS * ROW_BYTES;

/// Bytes of a panel.
pub const PANEL_BYTES: u32 = PANEL_SCALES + PANEL_ROWS * ROW_SCALES;

/// K-blocks of so many columns, the last one perhaps not whole.
#[inline(always)]
pub const fn k_blocks(k: u32) -> u32 {
    k.div_ceil(K_BLOCK)
}

/// Bytes of the panels of a matrix `[n, k]`.
#[inline(always)]
pub const fn matrix_bytes(n: u32, k: u32) -> u64 {
    panel_offset(n.div_ceil(PANEL_ROWS), 0, k)
}

/// Where the panel of a k-block begins, of the rows from `64·panel` on of a matrix with k columns.
#[inline(always)]
pub const fn panel_offset(panel: u32, k_block: u32, k: u32) -> u64 {
    (panel as u64 * k_blocks(k) as u64 + k_block as u64) * PANEL_BYTES as u64
}

/// The column of a k-block that is a nibble of a lane's word.
#[inline(always)]
pub const fn column(lane: u32, word: u32, nibble: u32) -> u32 {
    32 * word + 8 * (nibble % 4) + 2 * lane + nibble / 4
}

/// A tensor map, which the driver has encoded: the tokens `[m, k]` as bytes. A box is a row of 128 bytes of each token of a tile, with the
/// 128-byte swizzle.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TokenMap(pub [u64; 16]);

/// Bytes of a token in a box of its [`TokenMap`].
pub const BOX_BYTES: u32 = 128;

/// The one parameter of a product: `C = α·A·Bᵀ + bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Launch {
    /// What tokens are copied by. It comes first: the kernel passes on its address, not its bytes.
    pub token_map: TokenMap,
    /// Address of the first token, a multiple of 16.
    pub tokens: u64,
    /// Bytes from one token to the next one, a multiple of 16.
    pub token_pitch: u64,
    /// Address of the panels of B, a multiple of 16.
    pub panels: u64,
    /// Address of C `[m, n]`, 16-bit numbers of the tokens' type, rows without gaps; a multiple of 16.
    pub c: u64,
    /// Address of α, an f32 for each column of C: the global scale of that row of B. Projections that are one matrix keep their own.
    pub alpha: u64,
    /// Address of the bias, an f32 for each column of C; 0 if there is none.
    pub bias: u64,
    /// Tokens, rows of C.
    pub m: u32,
    /// Rows of B, columns of C; a multiple of 16, not 0.
    pub n: u32,
    /// Elements summed over; a multiple of 16, not 0.
    pub k: u32,
    /// Tiles along the tokens: `m` in tiles of [`Instance::tile_tokens`].
    pub token_tiles: u32,
}

/// The entry that packs.
pub const PACK_ENTRY: &str = "linear_pack";

/// The one parameter of [`PACK_ENTRY`]: a matrix from a checkpoint's layout into panels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Pack {
    /// Address of the values, `[n, k/2]` bytes without gaps, two codes a byte, the element of even K low; a multiple of 8.
    pub values: u64,
    /// Address of the scales, `[n, k/16]`, e4m3.
    pub scales: u64,
    /// Address of the panels, a multiple of 16.
    pub panels: u64,
    /// Address of a `u64` that becomes the place of the first scale that is NaN or has a sign, if there is one, by an atomic
    /// minimum. `u64::MAX` before.
    pub invalid: u64,
    /// Rows; a multiple of 16, not 0.
    pub n: u32,
    /// Columns; a multiple of 16, not 0.
    pub k: u32,
    /// [`OperandType`] as a number.
    pub operand_type: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Pack {
    /// Threads of a block. A thread packs a row of a k-block.
    pub const THREADS: u32 = 128;

    /// Blocks of a grid.
    pub const fn blocks(n: u32, k: u32) -> u64 {
        (n.div_ceil(PANEL_ROWS) as u64 * PANEL_ROWS as u64 * k_blocks(k) as u64).div_ceil(Self::THREADS as u64)
    }
}

/// Bytes of a buffer of decoded weights: a k-block of a panel, 16 bits each.
pub const DECODED_BYTES: u32 = PANEL_ROWS * K_BLOCK * 2;

/// Passes the list of instances to `$each!`: of a type of tokens, those with fewest columns and tokens first.
///
/// A tile has up to so many tokens; `consumers` warpgroups multiply; `buffers` hold tokens; `stages` hold weights. For few tiles, one
/// warpgroup has tiles of 64 columns, which others decode for it. Two take turns, with 64 columns each or with 128. Decoding is what keeps
/// them from multiplying: with 256 tokens there is half as much of it for a product.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_f16_t64_decoded = tokens(OperandType::F16, 64).decoders(3).buffers(4).stages(12);
            linear_f16_t128_decoded = tokens(OperandType::F16, 128).decoders(2).buffers(4).stages(6);
            linear_f16_t128_c128 = tokens(OperandType::F16, 128).consumers(2).narrow().buffers(4).stages(8);
            linear_f16_t128_c256 = tokens(OperandType::F16, 128).consumers(2).buffers(4).stages(4);
            linear_f16_t256_c128 = tokens(OperandType::F16, 256).consumers(2).narrow().buffers(3).stages(3);
            linear_bf16_t64_decoded = tokens(OperandType::Bf16, 64).decoders(3).buffers(4).stages(12);
            linear_bf16_t128_decoded = tokens(OperandType::Bf16, 128).decoders(2).buffers(4).stages(6);
            linear_bf16_t128_c128 = tokens(OperandType::Bf16, 128).consumers(2).narrow().buffers(4).stages(8);
            linear_bf16_t128_c256 = tokens(OperandType::Bf16, 128).consumers(2).buffers(4).stages(4);
            linear_bf16_t256_c128 = tokens(OperandType::Bf16, 256).consumers(2).narrow().buffers(3).stages(3);
        }
    };
}
#[cfg(feature = "linear_sm90")]
pub(super) use instances;
instances!(table);

/// One way to build the kernel that multiplies, and what it takes of the hardware.
///
/// Shared memory of a block: buffers of tokens, then those of decoded weights, then stages, then barriers. A stage: the panels of a
/// tile's columns. A buffer: the first 64 columns of the tile's tokens, then the others; of decoded weights, core matrices.
///
/// What does not fit does not compile:
///
/// ```
/// # use kernels_gpu::{wgmma::linear_sm90::abi::{Instance, tokens}, units::OperandType};
/// const _: Instance = tokens(OperandType::Bf16, 128).consumers(2).narrow().buffers(4).stages(8);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::{wgmma::linear_sm90::abi::{Instance, tokens}, units::OperandType};
/// const _: Instance = tokens(OperandType::Bf16, 128).consumers(2).narrow().buffers(4).stages(16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The entry's name.
    pub entry: &'static str,
    /// The type of tokens and C.
    pub operand_type: OperandType,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Warpgroups that multiply.
    pub consumers: u32,
    /// Whether a warpgroup has 64 columns of a tile, and not 128.
    pub narrow: bool,
    /// Warpgroups that decode weights to shared memory for the one that multiplies, a k-block each in turn; 0 where those that multiply
    /// decode in registers.
    pub decoders: u32,
    /// Buffers of tokens.
    pub buffers: u32,
    /// Stages of the pipeline that brings weights from global to shared memory.
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
        consumers: 0,
        narrow: false,
        decoders: 0,
        buffers: 0,
        stages: 0,
    })
}

impl Builder {
    /// Sets [`Instance::decoders`], and that one warpgroup multiplies.
    pub const fn decoders(self, decoders: u32) -> Self {
        Self(Instance { decoders, ..self.consumers(1).narrow().0 })
    }

    /// Sets [`Instance::consumers`].
    pub const fn consumers(self, consumers: u32) -> Self {
        Self(Instance { consumers, ..self.0 })
    }

    /// Sets [`Instance::narrow`].
    pub const fn narrow(self) -> Self {
        Self(Instance { narrow: true, ..self.0 })
    }

    /// Sets [`Instance::buffers`].
    pub const fn buffers(self, buffers: u32) -> Self {
        Self(Instance { buffers, ..self.0 })
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
    /// What the main loop is compiled for.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: 1,
            tile_tokens: self.tile_tokens,
            // Tiles of 128 tokens have instances of their own.
            least_n: if self.tile_tokens > 128 { 144 } else { self.tile_tokens / 2 },
            consumers: self.consumers,
            narrow: self.narrow,
        }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads() + self.decoders * WARPGROUP
    }

    /// Tokens of a box of the token map, for `m` tokens in so many tiles.
    pub const fn box_tokens(self, m: u32, token_tiles: u32) -> u32 {
        self.shape().mma_n(tile_size(m, token_tiles))
    }

    /// Panels of a stage.
    pub const fn panels(self) -> u32 {
        self.columns() / PANEL_ROWS
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        self.panels() * PANEL_BYTES
    }

    /// Bytes of all buffers of decoded weights: one goes with each buffer of tokens.
    pub const fn decoded_bytes(self) -> u32 {
        if self.decoders > 0 { self.buffers * DECODED_BYTES } else { 0 }
    }

    /// Barriers: one for full and one for empty of each stage and of each buffer, and those of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers) + TURN_BARRIERS
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes()
            + self.decoded_bytes()
            + self.buffers * self.shape().buffer_bytes()
            + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        self.shape().check();
        assert!(self.shape().parts() <= PANELS && self.columns().is_multiple_of(PANEL_ROWS));
        assert!(self.stages > 1, "with one stage, filling it would wait for emptying it");
        assert!(self.buffers > 2, "one buffer is multiplied, one is being filled, and one is not yet known to be full");
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

    #[test]
    fn every_instance_fits_and_is_called_what_it_is() {
        for instance in INSTANCES {
            instance.check();
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            let columns = match (instance.columns(), instance.decoders) {
                (_, 1..) => "_decoded".into(),
                (columns, 0) => std::format!("_c{columns}"),
            };
            let expected = std::format!("linear_{operand_type}_t{}{columns}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    #[test]
    fn nibbles_and_columns_are_one_to_one_and_a_register_has_one_scale() {
        let mut found = BTreeSet::new();
        for (lane, word) in (0..ROW_LANES).flat_map(|lane| (0..LANE_WORDS as u32).map(move |word| (lane, word))) {
            for nibble in 0..8 {
                assert!(found.insert(column(lane, word, nibble)));
                assert_eq!(column(lane, word, nibble) / BLOCK, 2 * word + nibble % 4 / 2);
            }
            for register in 0..4 {
                assert_eq!(column(lane, word, register) + 1, column(lane, word, register + 4));
            }
        }
        assert!(found.into_iter().eq(0..K_BLOCK));
    }

    #[test]
    fn panels_lie_one_behind_the_other() {
        for (n, k) in [(16_u32, 16_u32), (64, 128), (80, 144), (4096, 2880)] {
            let panels =
                (0..n.div_ceil(PANEL_ROWS)).flat_map(|panel| (0..k_blocks(k)).map(move |block| (panel, block)));
            let end = panels.fold(0, |end, (panel, block)| {
                assert_eq!(panel_offset(panel, block, k), end);
                end + u64::from(PANEL_BYTES)
            });
            assert_eq!(end, matrix_bytes(n, k));
        }
    }
}
