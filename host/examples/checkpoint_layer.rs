//! A layer of a checkpoint: open it, read one layer's experts, run tokens through them.
//!
//! ```sh
//! cargo run --release -p nvfp4 --example checkpoint_layer -- model-nvfp4/ 3
//! ```

use std::path::Path;

use nvfp4::backend::{self, Backend, cpu::Cpu};
use nvfp4::checkpoint::Checkpoint;
use nvfp4::generate::{self, Generator};
use nvfp4::problem::{Group, Op, Step, TokenDtype};
use nvfp4::{Error, Output};

fn run(path: &Path, number: usize) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(path)?;
    // Weights point into the file: nothing is copied.
    let layer = checkpoint.layer(number, Op::Gated)?;
    let experts = layer.weights.experts();
    println!("{} experts of {} × {}", experts.len(), experts[0].n(), experts[0].k());

    let cpu = Cpu::new();
    let mut prepared = cpu.prepare(&layer.weights)?;
    let groups: Vec<_> = experts.iter().map(|expert| Group { m: 8, n: expert.n(), k: expert.k() }).collect();
    let tokens = generate::activations(Generator::Gaussian, &groups, 0)?;
    let step = Step::new(&layer.weights, tokens, TokenDtype::Bf16)?;
    let mut output = Output::new(step.problem());
    println!("8 tokens an expert: {:?}", backend::run(prepared.as_mut(), &step, &mut output)?);
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, layer] = &arguments[..] else {
        eprintln!("usage: checkpoint_layer CHECKPOINT LAYER");
        std::process::exit(2);
    };
    let done = match layer.parse() {
        Ok(number) => run(Path::new(path), number),
        Err(_) => Err(Error::Invalid(format!("`{layer}` is not a layer number"))),
    };
    if let Err(error) = done {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}
