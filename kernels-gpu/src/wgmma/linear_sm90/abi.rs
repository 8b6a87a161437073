//! What host and `linear_sm90` agree on beside [`linear`](crate::linear): budgets, and the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N.

use crate::{
    decoding::{BARRIER_BYTES, K_BLOCK, PANELS, SHARED_BYTES, Shape, TURN_BARRIERS, WARPGROUP},
    instances::table,
    linear::{PANEL_BYTES, PANEL_ROWS},
    lists::tile_size,
    units::OperandType,
};

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
}
