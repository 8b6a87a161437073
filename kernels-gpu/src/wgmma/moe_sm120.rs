//! The products of an MoE layer on GeForce RTX 50, RTX PRO and DGX Spark: `moe_sm90`'s source with other instances.
//!
//! In these instances each warp multiplies by itself (`mma.sync`), because sm_120 and sm_121 have no `wgmma`, and a CTA
//! has 99 KB of shared memory.
//!
//! # Contract
//!
//! The contract of [`moe_sm90`](crate::wgmma::moe_sm90), with the threads and the shared memory of these instances. A
//! row has the same bits as on Hopper if the GPU's tensor core adds like Hopper's, which was not verified on any GPU.

use crate::{
    instances::table,
    mma_sync::SHARED_BYTES,
    units::OperandType,
    wgmma::moe_sm90::abi::{Instance, gated, plain},
};

/// Passes the list of instances to `$each!`, like the list of [`moe_sm90`](crate::wgmma::moe_sm90::abi).
///
/// Decoding is not the limit on these GPUs: an SM gets a quarter of the weight bytes per cycle of a Hopper SM. Four
/// warps keep up with the memory, and eight warps have a margin.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_sm120_gated_f16_t16_narrow = gated(OperandType::F16, 16).consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_gated_f16_t16_narrow_curves = gated(OperandType::F16, 16).curves().consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_gated_f16_t16 = gated(OperandType::F16, 16).consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_gated_f16_t16_curves = gated(OperandType::F16, 16).curves().consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_gated_f16_t64 = gated(OperandType::F16, 64).consumers(2).by_warps().buffers(3).stages(5);
            moe_sm120_gated_f16_t64_curves = gated(OperandType::F16, 64).curves().consumers(2).by_warps().buffers(3).stages(5);
            moe_sm120_plain_f16_t16_narrow = plain(OperandType::F16, 16).consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_plain_f16_t16 = plain(OperandType::F16, 16).consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_plain_f16_t64 = plain(OperandType::F16, 64).consumers(2).by_warps().buffers(3).stages(5);
            moe_sm120_gated_bf16_t16_narrow = gated(OperandType::Bf16, 16).consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_gated_bf16_t16_narrow_curves = gated(OperandType::Bf16, 16).curves().consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_gated_bf16_t16 = gated(OperandType::Bf16, 16).consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_gated_bf16_t16_curves = gated(OperandType::Bf16, 16).curves().consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_gated_bf16_t64 = gated(OperandType::Bf16, 64).consumers(2).by_warps().buffers(3).stages(5);
            moe_sm120_gated_bf16_t64_curves = gated(OperandType::Bf16, 64).curves().consumers(2).by_warps().buffers(3).stages(5);
            moe_sm120_plain_bf16_t16_narrow = plain(OperandType::Bf16, 16).consumers(1).by_warps().buffers(6).stages(16);
            moe_sm120_plain_bf16_t16 = plain(OperandType::Bf16, 16).consumers(2).by_warps().buffers(6).stages(8);
            moe_sm120_plain_bf16_t64 = plain(OperandType::Bf16, 64).consumers(2).by_warps().buffers(3).stages(5);
        }
    };
}
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        assert!(INSTANCES[index].by_warps, "sm_120 has no `wgmma`: build each instance with `by_warps`");
        assert!(INSTANCES[index].shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit in shared memory");
        index += 1;
    }
};

#[cfg(feature = "moe_sm120")]
mod entries {
    use cuda_std::kernel;

    use super::{INSTANCES, Index};
    use crate::{
        moe::Launch,
        units::OperandType,
        wgmma::moe_sm90::{
            abi::Instance,
            kernel::{Built, Moe, entries},
        },
    };

    instances!(entries);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_named_after_their_parameters() {
        for instance in INSTANCES {
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            let narrow = if instance.consumers == 1 { "_narrow" } else { "" };
            let curves = if instance.curves { "_curves" } else { "" };
            let expected =
                std::format!("moe_sm120_{operation}_{operand_type}_t{}{narrow}{curves}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    extern crate std;
}
