//! Compares a whole MoE layer with bf16 tokens on the CPU with dequantizing every expert that is hit and the `gemm`
//! crate.
//!
//! The two run in turns, and the ratio is the median of the turns' ratios, so that other load on the machine affects
//! both.

mod common;

use common::rival::LayerRival;
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::generate::Generator;
use nvfp4::moe::compare::compare_sample;
use nvfp4::moe::generate::Routing;
use nvfp4::moe::{self, MoeOutput, MoeStep};
use nvfp4::problem::TokenDtype;
use nvfp4_benches::{in_turns, median};

/// Layers, their number of experts, and numbers of tokens. The model has more experts, but not every machine has memory
/// for all.
const STEPS: [(&str, usize, &[usize]); 2] =
    [("qwen3-30b-a3b", 16, &[1, 8, 32, 128, 512]), ("mixtral-8x7b", 2, &[1, 16, 128])];

/// Measured turns, after one warm-up turn.
const TURNS: usize = 5;

fn main() {
    let dtype = TokenDtype::Bf16;
    println!("median ms                tokens   rows/expert   cpu backend   dequantize + gemm");
    for (name, experts, tokens) in STEPS {
        let mut shape = moe::shape::find(name).expect("a built-in layer");
        shape.experts = experts;
        let weights = moe::generate::weights(&shape, Generator::Gaussian, dtype, 1, &|| ()).expect("valid sizes");
        let mut layer = Cpu::new().prepare_moe(&weights).expect("memory for the weights");
        let mut rival = LayerRival::new(&weights);
        for &tokens in tokens {
            let inputs = moe::generate::inputs(&shape, Generator::Gaussian, Routing::Uniform, dtype, tokens, 2);
            let step = MoeStep::new(&weights, inputs.expect("valid sizes")).expect("inputs of this layer");
            let mut checked = MoeOutput::with_stages(&step);
            layer.execute(&step, &mut checked).expect("a step of this layer");
            let found = compare_sample(&weights, &step, &checked, 64, 1);
            assert!(found.passed() && found.checked() > 0, "{name}: {:?}", found.first());
            rival.check(&step, &checked.hidden);

            let mut output = MoeOutput::new(&step);
            let [backend, dequantize] = in_turns(
                TURNS,
                [&mut || _ = layer.execute(&step, &mut output).expect("a step of this layer"), &mut || {
                    _ = rival.run(&step)
                }],
            );
            let ratios = backend.iter().zip(&dequantize).map(|(backend, dequantize)| dequantize / backend).collect();
            let rows = step.rows().count() as f64 / step.rows().hit_experts().max(1) as f64;
            let [a, b] = [backend, dequantize].map(|seconds| median(seconds) * 1e3);
            println!("{name:20} {tokens:10} {rows:13.1} {a:13.2} {b:11.1} {:5.1} x", median(ratios));
        }
    }
}
