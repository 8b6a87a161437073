//! The list of instances. The other definitions that host and `linear_sm80` share are in [`linear`](crate::linear) and
//! [`mma_sync::linear`](crate::mma_sync::linear).

use crate::{
    instances::table,
    mma_sync::{
        SHARED_BYTES,
        linear::{Instance, tokens},
    },
    units::OperandType,
};

/// Passes the list of instances to `$each!`. Per token type, instances with fewer tokens per tile come first.
///
/// Up to 16 tokens, tiles have few columns, so that even a small N gives many CTAs, and a CTA is so small that several
/// CTAs share an SM. From 32 tokens on, the tokens of a stage have more bytes than its weights, so a tile has more
/// columns, which share the tokens.
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
        assert!(of.by_pieces && of.shared_bytes() <= SHARED_BYTES, "the stages do not fit in shared memory");
        assert!(of.stages == 3 || of.stages == 4 || of.stages == 6, "the kernel has waits for 3, 4 and 6 stages only");
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_names_state_type_and_tile_size() {
        for instance in INSTANCES {
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            assert_eq!(instance.entry, std::format!("linear_sm80_{operand_type}_t{}", instance.tile_tokens));
        }
    }

    extern crate std;
}
