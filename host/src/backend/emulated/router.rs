//! Routers in the emulator: the launch that `backend::cuda` would queue.

use super::gpu::{Emulated, OUTPUT, TOKENS, WEIGHTS};
use crate::Error;
use crate::router::{Logits, Router, Routes};
use nvfp4_kernels::layer::router::{RouterArguments, launch};

/// The experts of each token and their weights.
pub(super) fn route(gpu: &Emulated, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
    let token_count = logits.tokens(router)?;
    router.check_token_ids(token_count, token_ids)?;
    let mut routes = Routes {
        ids: vec![i32::MIN; token_count * router.top_k()],
        weights: vec![f32::NAN; token_count * router.top_k()],
    };
    let mut device = gpu.memory();
    let numbers = device.upload(logits.bytes());
    let rule = router.rule();
    let lists = [&rule.bias, &rule.expert_scale].map(|list| (!list.is_empty()).then(|| device.upload(list)));
    let of_table = rule.table.as_ref().map(|table| [device.upload(&table.ids), device.upload(token_ids)]);
    let (ids, weights) = (device.upload(&routes.ids), device.upload(&routes.weights));
    let named = [(numbers, TOKENS), (ids, OUTPUT), (weights, OUTPUT)].into_iter();
    let of_rule = lists.into_iter().flatten().chain(of_table.into_iter().flatten());
    for (buffer, name) in named.chain(of_rule.map(|buffer| (buffer, WEIGHTS))) {
        device.name(buffer, name);
    }
    let arguments = RouterArguments {
        token_count,
        logits: numbers.address,
        logit_type: logits.logit_type(),
        logits_stride: router.experts(),
        bias: lists[0].map_or(0, |list| list.address),
        expert_scale: lists[1].map_or(0, |list| list.address),
        table: of_table.map_or(0, |[table, _]| table.address),
        token_ids: of_table.map_or(0, |[_, ids]| ids.address),
        ids: ids.address,
        weights: weights.address,
    };
    if let Some(launch) = launch(router, &arguments)? {
        gpu.launch(&mut device, &launch, &mut Vec::new())?;
        (routes.ids, routes.weights) = (device.download(ids), device.download(weights));
    }
    Ok(routes)
}
