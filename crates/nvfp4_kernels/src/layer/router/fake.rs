//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::router::abi::{self, LOGITS_F32, SIGMOID, SIGMOID_SHARES, SOFTMAX, THREADS};

use crate::fake::{out_dtype, slice, slice_mut};
use nvfp4_core::router::{Router, Scoring, route_token};

/// Routes every token by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { token_count, experts, top_k, groups, .. } = parameter;
        assert_eq!((launch.grid, launch.block), ([abi::blocks(token_count) as u32, 1, 1], [THREADS, 1, 1]));
        assert_eq!(launch.shared_bytes, abi::shared_bytes(experts, groups));
        let scoring = match parameter.scoring {
            SIGMOID if parameter.bias == 0 => Scoring::SigmoidTop1,
            SIGMOID | SIGMOID_SHARES => Scoring::SigmoidGroups {
                bias: slice::<f32>(parameter.bias, experts as usize).to_vec(),
                groups: groups as usize,
                top_groups: parameter.top_groups as usize,
                renormalize: parameter.scoring == SIGMOID_SHARES,
                scale: parameter.scale,
            },
            code => Scoring::Softmax { renormalize: code != SOFTMAX },
        };
        let router = Router::new(experts as usize, top_k as usize, scoring).unwrap();
        for token in 0..u64::from(token_count) {
            let (first, count) = (token * parameter.pitch, experts as usize);
            let logits: Vec<f32> = if parameter.format == LOGITS_F32 {
                slice::<f32>(parameter.logits + 4 * first, count).to_vec()
            } else {
                let dtype = out_dtype(parameter.format);
                let bits: &[u16] = slice(parameter.logits + 2 * first, count);
                bits.iter().map(|&bits| dtype.decode(bits) as f32).collect()
            };
            let at = 4 * token * u64::from(top_k);
            let (ids, weights) = (parameter.ids + at, parameter.weights + at);
            route_token(&router, &logits, slice_mut(ids, top_k as usize), slice_mut(weights, top_k as usize));
        }
    }
}
