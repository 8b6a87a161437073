//! The linear layer for few tokens, with products of a warp (`mma.sync`) instead of a warpgroup.
//!
//! With few tokens, `wgmma` would be idle while a warpgroup decodes. Here a warp multiplies each word as soon as it is
//! decoded, and waits for no other warp. The contract is the contract of [`linear_sm90`](super), with separate
//! [`INSTANCES`] and one CTA per tile and part of K. Sums are bit-identical to the sums of `linear_sm90`: an H200 adds the
//! products of both instructions alike.
//!
//! The source of these kernels is [`mma_sync::linear`](crate::mma_sync::linear).

use crate::{
    instances::table,
    mma_sync::linear::{Instance, tokens},
    units::OperandType,
};

/// Passes the list of instances to `$each!`. For each token type, the instances with the fewest tokens come first. The
/// plan takes the last one of several with the same cost.
///
/// A tile has four strips, one warp for each of an SM's schedulers. Spans of four k-blocks are the fastest on an H100. Two
/// CTAs share an SM, except those of the largest tile, which have more stages; `_s8` is this tile with 8 stages, for
/// layers with more tiles than SMs. Instances with two parts of K have names that end in `_k2`.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_mma8_f16 = tokens(OperandType::F16, 8).strips(4).span(4).stages(16);
            linear_mma16_f16 = tokens(OperandType::F16, 16).strips(4).span(4).stages(12);
            linear_mma32_f16_s8 = tokens(OperandType::F16, 32).strips(4).span(4).stages(8);
            linear_mma32_f16 = tokens(OperandType::F16, 32).strips(4).span(4).stages(16);
            linear_mma8_f16_k2 = tokens(OperandType::F16, 8).strips(4).span(4).split().stages(16);
            linear_mma16_f16_k2 = tokens(OperandType::F16, 16).strips(4).span(4).split().stages(12);
            linear_mma32_f16_k2 = tokens(OperandType::F16, 32).strips(4).span(4).split().stages(16);
            linear_mma8_bf16 = tokens(OperandType::Bf16, 8).strips(4).span(4).stages(16);
            linear_mma16_bf16 = tokens(OperandType::Bf16, 16).strips(4).span(4).stages(12);
            linear_mma32_bf16_s8 = tokens(OperandType::Bf16, 32).strips(4).span(4).stages(8);
            linear_mma32_bf16 = tokens(OperandType::Bf16, 32).strips(4).span(4).stages(16);
            linear_mma8_bf16_k2 = tokens(OperandType::Bf16, 8).strips(4).span(4).split().stages(16);
            linear_mma16_bf16_k2 = tokens(OperandType::Bf16, 16).strips(4).span(4).split().stages(12);
            linear_mma32_bf16_k2 = tokens(OperandType::Bf16, 32).strips(4).span(4).split().stages(16);
        }
    };
}
instances!(table);

/// Entries of Hopper's instances.
#[cfg(feature = "linear_sm90")]
mod entries {
    use cuda_std::{kernel, tensor_map_of_parameter};

    use super::{INSTANCES, Index, Instance};
    use crate::{
        linear::Launch,
        mma_sync::linear::kernel::{Built, ByWarp, entries},
        units::OperandType,
    };

    instances!(entries);
}
