//! Arguments by name; an error says which names there are.

use nvfp4::generate::Generator;
use nvfp4::plan::roofline::{GPUS, Gpu};
use nvfp4::problem::{Op, OutDtype};

/// An operation.
pub fn op(name: &str) -> Result<Op, String> {
    [Op::Gated, Op::Plain].into_iter().find(|op| op.name() == name).ok_or("gated or plain".into())
}

/// A type of output.
pub fn out_dtype(name: &str) -> Result<OutDtype, String> {
    [OutDtype::F16, OutDtype::Bf16].into_iter().find(|dtype| dtype.name() == name).ok_or("f16 or bf16".into())
}

/// A way to make inputs.
pub fn generator(name: &str) -> Result<Generator, String> {
    let names = Generator::ALL.map(Generator::name).join(", ");
    Generator::ALL.into_iter().find(|generator| generator.name() == name).ok_or(format!("one of {names}"))
}

/// A GPU to plan for.
pub fn gpu(name: &str) -> Result<Gpu, String> {
    let names: Vec<_> = GPUS.iter().map(|gpu| gpu.name).collect();
    let known = || format!("known are {}", names.join(", "));
    GPUS.iter().copied().find(|gpu| gpu.name == name).ok_or_else(known)
}
