//! Routers in the emulator: the launch that `backend::cuda` would queue.

use super::gpu::{Emulated, OUTPUT, TOKENS, WEIGHTS};
use crate::Error;
use crate::router::{Logits, Router, Routes};
use nvfp4_kernels::layer::router::{RouterArguments, launch};

/// The experts of each token and their weights.
pub(super) fn route(gpu: &Emulated, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
    let token_count = logits.tokens(router)?;
    let mut routes = Routes {
        ids: vec![i32::MIN; token_count * router.top_k()],
        weights: vec![f32::NAN; token_count * router.top_k()],
    };
    let mut device = gpu.memory();
    let numbers = device.upload(logits.bytes());
    let bias = router.bias().map(|bias| device.upload(bias));
    let (ids, weights) = (device.upload(&routes.ids), device.upload(&routes.weights));
    for (buffer, name) in
        [(numbers, TOKENS), (ids, OUTPUT), (weights, OUTPUT)].into_iter().chain(bias.map(|bias| (bias, WEIGHTS)))
    {
        device.name(buffer, name);
    }
    let arguments = RouterArguments {
        token_count,
        logits: numbers.address,
        logit_type: logits.logit_type(),
        logits_stride: router.experts(),
        bias: bias.map_or(0, |bias| bias.address),
        ids: ids.address,
        weights: weights.address,
    };
    if let Some(launch) = launch(router, &arguments)? {
        gpu.launch(&mut device, &launch, &mut Vec::new())?;
        (routes.ids, routes.weights) = (device.download(ids), device.download(weights));
    }
    Ok(routes)
}
