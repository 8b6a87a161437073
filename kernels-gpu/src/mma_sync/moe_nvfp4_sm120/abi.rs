//! Definitions that host and `moe_nvfp4_sm120` share: [`moe_sm100`](crate::tcgen05::moe_sm100)'s parameter, and the
//! list of instances.

pub use crate::routed::Launch;
use crate::{
    instances::table,
    mma_sync::gated_sm120::abi::{Instance, gated, plain},
    nvfp4_rows::TILE_TOKENS,
};

/// Passes the list of instances to `$each!`: `gated(tokens)` and `plain(tokens)` with up to `tokens` tokens per tile,
/// and their number of stages, one k-block per stage.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_nvfp4_sm120_gated_t16 = gated(16).rows().stages(4);
            moe_nvfp4_sm120_gated_t16_curves = gated(16).curves().rows().stages(4);
            moe_nvfp4_sm120_gated_t64 = gated(64).rows().stages(3);
            moe_nvfp4_sm120_gated_t64_curves = gated(64).curves().rows().stages(3);
            moe_nvfp4_sm120_gated_t128 = gated(128).rows().stages(2);
            moe_nvfp4_sm120_gated_t128_curves = gated(128).curves().rows().stages(2);
            moe_nvfp4_sm120_plain_t16 = plain(16).rows().stages(4);
            moe_nvfp4_sm120_plain_t64 = plain(64).rows().stages(3);
            moe_nvfp4_sm120_plain_t128 = plain(128).rows().stages(2);
        }
    };
}
#[cfg(feature = "moe_nvfp4_sm120")]
pub(super) use instances;
instances!(table);

const _: () = {
    let mut index = 0;
    while index < INSTANCES.len() {
        assert!(INSTANCES[index].tile_tokens <= TILE_TOKENS, "a tile must not have more tokens than a scale tile");
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn entry_names_state_operation_and_tile_size() {
        for instance in INSTANCES {
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let curves = if instance.curves { "_curves" } else { "" };
            assert_eq!(instance.entry, std::format!("moe_nvfp4_sm120_{operation}_t{}{curves}", instance.tile_tokens));
        }
    }

    #[test]
    fn operations_and_tile_sizes_match_moe_sm100() {
        let sizes = |entry: &str, tokens: u32| {
            (std::string::String::from(&entry[entry.find("_gated_").or(entry.find("_plain_")).unwrap()..]), tokens)
        };
        let here: std::vec::Vec<_> =
            INSTANCES.iter().map(|instance| sizes(instance.entry, instance.tile_tokens)).collect();
        let there = crate::tcgen05::moe_sm100::abi::INSTANCES
            .iter()
            .filter(|instance| !instance.early)
            .map(|instance| sizes(instance.entry, instance.tile_tokens));
        assert_eq!(here, there.collect::<std::vec::Vec<_>>());
    }
}
