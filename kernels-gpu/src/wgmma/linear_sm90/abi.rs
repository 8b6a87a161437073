//! Definitions that host and `linear_sm90` share in addition to [`linear`](crate::linear): budgets and the list of
//! instances.
//!
//! A and B are swapped: weights are on the tensor core's M, tokens on its N.

use crate::{
    decoding::{
        BARRIER_BYTES, CORE_MATRIX_ROWS, K_BLOCK, PANELS, SHARED_BYTES, Shape, TURN_BARRIERS, WARPGROUP, WARPGROUP_ROWS,
    },
    instances::table,
    linear::{PANEL_BYTES, PANEL_ROWS, inbox_bytes},
    lists::tile_size,
    units::OperandType,
};

/// Bytes of a buffer of decoded weights: one k-block of a panel, 16 bits per element.
pub const DECODED_BYTES: u32 = PANEL_ROWS * K_BLOCK * 2;

/// Passes the list of instances to `$each!`. For each token type, the instances with the fewest columns and tokens come
/// first.
///
/// The argument of `tokens` is the maximum number of tokens per tile, `consumers` the number of warpgroups that
/// multiply, `buffers` the number of buffers of tokens, `stages` the number of stages of weights. For few tiles, one
/// warpgroup multiplies tiles of 64 columns that other warpgroups decode. Otherwise two warpgroups take turns, with 64
/// or 128 columns each. Decoding limits their throughput: with 256 tokens there is half as much decoding per product.
/// Instances with two parts of K have names that end in `_k2`.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_f16_t64_decoded = tokens(OperandType::F16, 64).decoders(3).buffers(4).stages(12);
            linear_f16_t128_decoded = tokens(OperandType::F16, 128).decoders(2).buffers(4).stages(6);
            linear_f16_t128_c128 = tokens(OperandType::F16, 128).consumers(2).narrow().buffers(4).stages(8);
            linear_f16_t128_c256 = tokens(OperandType::F16, 128).consumers(2).buffers(4).stages(4);
            linear_f16_t256_c128 = tokens(OperandType::F16, 256).consumers(2).narrow().buffers(3).stages(3);
            linear_f16_t64_decoded_k2 = tokens(OperandType::F16, 64).decoders(3).buffers(4).split().stages(12);
            linear_f16_t128_decoded_k2 = tokens(OperandType::F16, 128).decoders(2).buffers(4).split().stages(4);
            linear_f16_t128_c128_k2 = tokens(OperandType::F16, 128).consumers(2).narrow().buffers(4).split().stages(8);
            linear_f16_t256_c128_k2 = tokens(OperandType::F16, 256).consumers(2).narrow().buffers(3).split().stages(3);
            linear_bf16_t64_decoded = tokens(OperandType::Bf16, 64).decoders(3).buffers(4).stages(12);
            linear_bf16_t128_decoded = tokens(OperandType::Bf16, 128).decoders(2).buffers(4).stages(6);
            linear_bf16_t128_c128 = tokens(OperandType::Bf16, 128).consumers(2).narrow().buffers(4).stages(8);
            linear_bf16_t128_c256 = tokens(OperandType::Bf16, 128).consumers(2).buffers(4).stages(4);
            linear_bf16_t256_c128 = tokens(OperandType::Bf16, 256).consumers(2).narrow().buffers(3).stages(3);
            linear_bf16_t64_decoded_k2 = tokens(OperandType::Bf16, 64).decoders(3).buffers(4).split().stages(12);
            linear_bf16_t128_decoded_k2 = tokens(OperandType::Bf16, 128).decoders(2).buffers(4).split().stages(4);
            linear_bf16_t128_c128_k2 =
                tokens(OperandType::Bf16, 128).consumers(2).narrow().buffers(4).split().stages(8);
            linear_bf16_t256_c128_k2 =
                tokens(OperandType::Bf16, 256).consumers(2).narrow().buffers(3).split().stages(3);
        }
    };
}
#[cfg(feature = "linear_sm90")]
pub(super) use instances;
instances!(table);

/// A compiled form of the kernel that multiplies, and the hardware resources that it uses.
///
/// A CTA's shared memory has the buffers of tokens, then the buffers of decoded weights, then the stages, then the
/// barriers, then the sums received from the other CTA if a cluster has the parts of K. A stage has the panels of a
/// tile's columns. A buffer of tokens has the first 64 columns of the tile's tokens, then the other columns. A buffer of
/// decoded weights has core matrices.
///
/// An instance that does not fit the hardware does not compile:
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
    /// Name of the entry.
    pub entry: &'static str,
    /// Type of tokens and C.
    pub operand_type: OperandType,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Number of warpgroups that multiply.
    pub consumers: u32,
    /// Whether a warpgroup has 64 columns of a tile instead of 128.
    pub narrow: bool,
    /// Number of warpgroups that decode weights to shared memory for the warpgroup that multiplies. They take k-blocks
    /// in turn. 0 if the warpgroups that multiply decode in registers.
    pub decoders: u32,
    /// Number of buffers of tokens.
    pub buffers: u32,
    /// Parts of K: 1 or 2. If other warpgroups decode, two CTAs of a cluster have one part each; otherwise a CTA sums
    /// one part after the other.
    pub parts: u32,
    /// Number of stages of the pipeline that loads weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of an instance for tokens of type `operand_type`, with up to `tile_tokens` tokens per tile.
pub const fn tokens(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance {
        entry: "",
        operand_type,
        tile_tokens,
        consumers: 0,
        narrow: false,
        decoders: 0,
        buffers: 0,
        parts: 1,
        stages: 0,
    })
}

impl Builder {
    /// Sets [`Instance::decoders`], with one warpgroup that multiplies.
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

    /// Sets [`Instance::parts`] to 2.
    pub const fn split(self) -> Self {
        Self(Instance { parts: 2, ..self.0 })
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
    /// Shape that the mainloop is compiled for.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: 1,
            tile_tokens: self.tile_tokens,
            // Tiles of up to 128 tokens have their own instances.
            least_n: if self.tile_tokens > 128 { 144 } else { self.tile_tokens / 2 },
            consumers: self.consumers,
            narrow: self.narrow,
        }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads() + self.decoders * WARPGROUP
    }

    /// Tokens per box of the token map, for `m` tokens in `token_tiles` tiles.
    pub const fn box_tokens(self, m: u32, token_tiles: u32) -> u32 {
        self.shape().mma_n(tile_size(m, token_tiles))
    }

    /// Panels per stage.
    pub const fn panels(self) -> u32 {
        self.columns() / PANEL_ROWS
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        self.panels() * PANEL_BYTES
    }

    /// Bytes of all buffers of decoded weights, one per buffer of tokens.
    pub const fn decoded_bytes(self) -> u32 {
        if self.decoders > 0 { self.buffers * DECODED_BYTES } else { 0 }
    }

    /// CTAs per tile: a cluster with one part of K each, or 1.
    pub const fn cluster(self) -> u32 {
        if self.decoders > 0 { self.parts } else { 1 }
    }

    /// Tokens of a tile that each CTA of a cluster of two writes to C; the second one writes the rest.
    pub const fn half_tokens(self) -> u32 {
        self.tile_tokens / 2
    }

    /// Pieces of sums that a thread sends to the other CTA of a cluster: four of the sums of [`Self::half_tokens`].
    pub const fn pieces(self) -> u32 {
        WARPGROUP_ROWS * self.half_tokens() / WARPGROUP / 4
    }

    /// Bytes of memory in which a CTA receives sums from the cluster's other CTA.
    pub const fn inbox_bytes(self) -> u32 {
        if self.cluster() > 1 { inbox_bytes(WARPGROUP, self.pieces()) } else { 0 }
    }

    /// Number of barriers: a full and an empty barrier per stage and per buffer, and the barriers of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers) + TURN_BARRIERS
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes()
            + self.decoded_bytes()
            + self.buffers * self.shape().buffer_bytes()
            + self.barriers() * BARRIER_BYTES
            + self.inbox_bytes()
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        self.shape().check();
        assert!(self.shape().parts() <= PANELS && self.columns().is_multiple_of(PANEL_ROWS));
        assert!(self.stages > 1, "use at least 2 stages: with one, filling it would wait for emptying it");
        assert!(
            self.buffers > 2,
            "use at least 3 buffers: one is multiplied, one is being filled, and one is not yet known to be full"
        );
        assert!(
            self.parts == 1 || (self.parts == 2 && self.shape().parts() == 1),
            "with two parts of K, a tile must be narrow"
        );
        assert!(
            self.cluster() == 1 || self.half_tokens().is_multiple_of(4 * CORE_MATRIX_ROWS),
            "in a cluster, half of a tile's tokens must be a multiple of four core matrices' rows"
        );
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit in shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn instances_fit_and_are_named_after_their_parameters() {
        for instance in INSTANCES {
            instance.check();
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            let columns = match (instance.columns(), instance.decoders) {
                (_, 1..) => "_decoded".into(),
                (columns, 0) => std::format!("_c{columns}"),
            };
            let parts = if instance.parts == 2 { "_k2" } else { "" };
            let expected = std::format!("linear_{operand_type}_t{}{columns}{parts}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }
}
