//! The list of instances. All else that host and `linear_sm120` agree on stands in [`linear_sm90::abi`](crate::wgmma::linear_sm90::abi) and
//! [`by_warp::abi`](crate::wgmma::linear_sm90::by_warp::abi).

use crate::{
    instances::table,
    mma_sync::gated_sm120::abi::SHARED_BYTES,
    units::OperandType,
    wgmma::linear_sm90::by_warp::abi::{Instance, tokens},
};

/// Passes the list of instances to `$each!`: of a type of tokens, those with fewest tokens first.
///
/// Up to 16 tokens, tiles have few columns, so that few columns are many blocks, and two blocks share a multiprocessor: between them they
/// have 45 KB of weights on their way at one token. From there on the tokens of a stage have more bytes than its weights, so more columns
/// share them.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_sm120_f16_t8 = tokens(OperandType::F16, 8).strips(2).stages(11);
            linear_sm120_f16_t16 = tokens(OperandType::F16, 16).strips(2).stages(7);
            linear_sm120_f16_t32 = tokens(OperandType::F16, 32).shared_by(2).strips(4).stages(7);
            linear_sm120_f16_t64 = tokens(OperandType::F16, 64).strips(8).stages(3);
            linear_sm120_bf16_t8 = tokens(OperandType::Bf16, 8).strips(2).stages(11);
            linear_sm120_bf16_t16 = tokens(OperandType::Bf16, 16).strips(2).stages(7);
            linear_sm120_bf16_t32 = tokens(OperandType::Bf16, 32).shared_by(2).strips(4).stages(7);
            linear_sm120_bf16_t64 = tokens(OperandType::Bf16, 64).strips(8).stages(3);
        }
    };
}
#[cfg(feature = "linear_sm120")]
pub(super) use instances;
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        assert!(INSTANCES[index].shared_bytes() <= SHARED_BYTES, "stages do not fit shared memory");
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instance_is_called_what_it_is() {
        for instance in INSTANCES {
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            assert_eq!(instance.entry, std::format!("linear_sm120_{operand_type}_t{}", instance.tile_tokens));
        }
    }

    extern crate std;
}
