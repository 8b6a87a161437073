//! A layer on the CPU: quantize weights, prepare them once, run steps of tokens, check every element against the oracle.
//!
//! ```sh
//! cargo run --release -p nvfp4 --example cpu_layer
//! ```

use nvfp4::backend::{self, Backend, cpu::Cpu};
use nvfp4::compare::compare;
use nvfp4::format::Matrix;
use nvfp4::oracle::Reference;
use nvfp4::problem::{Expert, Op, Step, TokenDtype, Weights};
use nvfp4::{Error, Output, quantize::quantize};

const EXPERTS: usize = 4;
const N: usize = 256;
const K: usize = 512;

/// A matrix `[rows, K]` of made-up numbers.
fn matrix(rows: usize, seed: usize) -> Result<Matrix<'static>, Error> {
    let numbers: Vec<f32> = (0..rows * K).map(|i| ((i * 31 + seed * 17) % 29) as f32 / 14.0 - 1.0).collect();
    quantize(&numbers, rows, K)
}

fn main() -> Result<(), Error> {
    let expert = |index| Ok(Expert::Gated { gate: matrix(N, index)?, up: matrix(N, index + 100)? });
    let weights = Weights::new(Op::Gated, (0..EXPERTS).map(expert).collect::<Result<_, Error>>()?)?;
    let cpu = Cpu::new();
    let mut layer = cpu.prepare(&weights)?; // once

    // Each step brings other numbers of tokens; an expert may have none.
    for tokens in [[1, 0, 3, 2], [40, 7, 0, 129]] {
        let activations = tokens.iter().map(|&rows| matrix(rows, rows)).collect::<Result<_, Error>>()?;
        let step = Step::new(&weights, activations, TokenDtype::F16)?;
        let mut output = Output::new(step.problem());
        let time = backend::run(layer.as_mut(), &step, &mut output)?;
        let found = compare(&output, &Reference::new(&weights, &step), &step);
        println!("{tokens:?} tokens: {time:?}, {} of {} elements wrong", found.mismatches, found.checked);
        assert!(found.passed());
    }
    Ok(())
}
