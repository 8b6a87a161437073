//! The list of instances. All else that host and `linear_sm80` agree on stands in [`linear`](crate::linear) and
//! [`mma_sync::linear`](crate::mma_sync::linear).

use crate::{
    instances::table,
    mma_sync::{
        SHARED_BYTES,
        linear::{Instance, tokens},
    },
    units::OperandType,
};

/// Passes the list of instances to `$each!`: of a type of tokens, those with fewest tokens first.
///
/// Up to 16 tokens, tiles have few columns, so that few columns are many blocks, and blocks are small enough for several of them to share a
/// multiprocessor. From there on the tokens of a stage have more bytes than its weights, so more columns share them.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            linear_sm80_f16_t8 = tokens(OperandType::F16, 8).by_pieces().strips(2).stages(6);
            linear_sm80_f16_t16 = tokens(OperandType::F16, 16).by_pieces().strips(2).stages(4);
            linear_sm80_f16_t32 = tokens(OperandType::F16, 32).by_pieces().shared_by(2).strips(4).stages(4);
            linear_sm80_f16_t64 = tokens(OperandType::F16, 64).by_pieces().strips(8).stages(3);
            linear_sm80_bf16_t8 = tokens(OperandType::Bf16, 8).by_pieces().strips(2).stages(6);
            linear_sm80_bf16_t16 = tokens(OperandType::Bf16, 16).by_pieces().strips(2).stages(4);
            linear_sm80_bf16_t32 = tokens(OperandType::Bf16, 32).by_pieces().shared_by(2).strips(4).stages(4);
            linear_sm80_bf16_t64 = tokens(OperandType::Bf16, 64).by_pieces().strips(8).stages(3);
        }
    };
}
#[cfg(feature = "linear_sm80")]
pub(super) use instances;
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        let of = INSTANCES[index];
        assert!(of.by_pieces && of.shared_bytes() <= SHARED_BYTES, "stages do not fit shared memory");
        assert!(
            of.stages == 3 || of.stages == 4 || of.stages == 6,
            "the kernel waits for the oldest of so many stages"
        );
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
            assert_eq!(instance.entry, std::format!("linear_sm80_{operand_type}_t{}", instance.tile_tokens));
        }
    }

    extern crate std;
}
