//! Definitions that host and `moe_sm100` share in addition to [`routed`](crate::routed): the list of instances.

use crate::{
    instances::table,
    nvfp4_rows::TILE_TOKENS,
    tcgen05::gated_sm100::abi::{Instance, gated, plain},
};

/// Passes the list of instances to `$each!`. The argument of `gated` or `plain` is the maximum number of tokens per
/// tile, `stages` the number of stages, which hold one k-block each.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_sm100_gated_t16 = gated(16).stages(5);
            moe_sm100_gated_t16_curves = gated(16).curves().stages(5);
            moe_sm100_gated_t64 = gated(64).stages(4);
            moe_sm100_gated_t64_curves = gated(64).curves().stages(4);
            moe_sm100_gated_t128 = gated(128).stages(4);
            moe_sm100_gated_t128_curves = gated(128).curves().stages(4);
            moe_sm100_gated_t16_early = gated(16).early().stages(5);
            moe_sm100_gated_t64_early = gated(64).early().stages(4);
            moe_sm100_plain_t16 = plain(16).stages(9);
            moe_sm100_plain_t64 = plain(64).stages(7);
            moe_sm100_plain_t128 = plain(128).stages(6);
            moe_sm100_plain_t16_early = plain(16).early().stages(9);
            moe_sm100_plain_t64_early = plain(64).early().stages(7);
        }
    };
}
#[cfg(feature = "moe_sm100")]
pub(super) use instances;
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        assert!(
            INSTANCES[index].tile_tokens <= TILE_TOKENS,
            "a tile must not have more tokens than a scale tile has rows"
        );
        assert!(INSTANCES[index].token_scale_tiles() == 1 && INSTANCES[index].blocks == 1);
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn instances_are_named_after_their_parameters() {
        for instance in INSTANCES {
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let curves = if instance.curves { "_curves" } else { "" };
            let early = if instance.early { "_early" } else { "" };
            let expected = std::format!("moe_sm100_{operation}_t{}{curves}{early}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }
}
