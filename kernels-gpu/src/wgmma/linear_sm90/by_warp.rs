//! The linear layer for few tokens: the products of a warp, `mma.sync`, and not of a warpgroup.
//!
//! Few tokens leave `wgmma` idle while a warpgroup decodes for it: a warp multiplies each word as soon as it is decoded, and waits for no
//! other warp. The contract is that of [`linear_sm90`](super), with [`INSTANCES`] of its own and a block for each tile. Sums are the
//! same bit by bit: an H200 adds up the products of either instruction alike.
//!
//! Their source is [`mma_sync::linear`](crate::mma_sync::linear).

use crate::{
    instances::table,
    mma_sync::linear::{Instance, tokens},
    units::OperandType,
};

/// Passes the list of instances to `$each!`: of a type of tokens, those with fewest tokens first.
///
/// A tile has four strips, a warp for each of a multiprocessor's schedulers. Long spans are worth most where a block is alone; those of 16
/// tokens are shorter, so that two blocks share a multiprocessor.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_mma8_f16 = tokens(OperandType::F16, 8).strips(4).span(8).stages(16);
            linear_mma16_f16 = tokens(OperandType::F16, 16).strips(4).span(4).stages(12);
            linear_mma32_f16 = tokens(OperandType::F16, 32).strips(4).span(8).stages(16);
            linear_mma8_bf16 = tokens(OperandType::Bf16, 8).strips(4).span(8).stages(16);
            linear_mma16_bf16 = tokens(OperandType::Bf16, 16).strips(4).span(4).stages(12);
            linear_mma32_bf16 = tokens(OperandType::Bf16, 32).strips(4).span(8).stages(16);
        }
    };
}
instances!(table);

/// The entries of Hopper's instances.
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
