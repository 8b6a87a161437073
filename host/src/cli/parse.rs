//! Arguments by name. The names are shown in `--help` and complete in shells.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use nvfp4::generate::Generator;
use nvfp4::plan::roofline::{GPUS, Gpu};
use nvfp4::problem::{Op, OutDtype};

/// A parser of the names of some values.
pub fn named<T, const N: usize>(values: [T; N], name: fn(&T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let names = values.each_ref().map(name);
    PossibleValuesParser::new(names).map(move |chosen| {
        let value = values.iter().find(|value| name(value) == chosen);
        value.expect("the parser lets no other name pass").clone()
    })
}

/// An operation.
pub fn op() -> impl TypedValueParser<Value = Op> {
    named([Op::Gated, Op::Plain], |op| op.name())
}

/// A type of output.
pub fn out_dtype() -> impl TypedValueParser<Value = OutDtype> {
    named([OutDtype::F16, OutDtype::Bf16], |dtype| dtype.name())
}

/// A way to make inputs.
pub fn generator() -> impl TypedValueParser<Value = Generator> {
    named(Generator::ALL, |generator| generator.name())
}

/// A GPU to plan for.
pub fn gpu() -> impl TypedValueParser<Value = Gpu> {
    named(GPUS, |gpu| gpu.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_possible_and_means_its_value() {
        let command = || clap::Command::new("x").arg(clap::Arg::new("op").long("op").value_parser(op()));
        let parse = |name: &str| command().try_get_matches_from(["x", "--op", name]);
        assert_eq!(parse("plain").unwrap().get_one::<Op>("op"), Some(&Op::Plain));
        let message = parse("Plain").unwrap_err().to_string();
        assert!(message.contains("[possible values: gated, plain]"), "{message}");
    }
}
