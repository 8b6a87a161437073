//! Parsers of named arguments. `--help` lists the names and shells complete them.

use std::error::Error;
use std::ffi::OsStr;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::{Arg, Command};
use nvfp4::generate::Generator;
use nvfp4::moe::generate::Routing;
use nvfp4::plan::roofline::{GPUS, Gpu};
use nvfp4::problem::{Op, TokenDtype, TokenFormat};

/// Returns a parser that maps names to values.
pub fn named<T>(values: &[T], name: fn(&T) -> &'static str) -> impl TypedValueParser<Value = T> + use<T>
where
    T: Clone + Send + Sync + 'static,
{
    let values = values.to_vec();
    PossibleValuesParser::new(values.iter().map(name).collect::<Vec<_>>()).map(move |chosen| {
        let value = values.iter().find(|value| name(value) == chosen);
        value.expect("the parser accepts only these names").clone()
    })
}

/// Parser that accepts all values of `T`, and suggests some names for shell completion. The option hides the names in
/// `--help`, because the list is not complete.
#[derive(Clone)]
pub struct Suggested<T> {
    names: Vec<&'static str>,
    value: std::marker::PhantomData<fn() -> T>,
}

/// Returns the parser of `T` that suggests `names`.
pub fn suggested<T>(names: impl IntoIterator<Item = &'static str>) -> Suggested<T> {
    Suggested { names: names.into_iter().collect(), value: std::marker::PhantomData }
}

impl<T> TypedValueParser for Suggested<T>
where
    T: FromStr<Err: Into<Box<dyn Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        let parse = StringValueParser::new().try_map(|text: String| text.parse());
        parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().map(|&name| PossibleValue::new(name))))
    }
}

/// Parses an operation.
pub fn op() -> impl TypedValueParser<Value = Op> {
    named(&[Op::Gated, Op::Plain], |op| op.name())
}

/// Parses a routing.
pub fn routing() -> impl TypedValueParser<Value = Routing> {
    named(&Routing::ALL, |routing| routing.name())
}

/// Parses a shape of groups: the name of a built-in shape, or a file.
pub fn grouped_shape() -> Suggested<String> {
    suggested(nvfp4::shape::builtin().iter().map(|shape| &shape.name[..]))
}

/// Parses a shape of groups or of a layer: the name of a built-in shape, or a file.
pub fn shape() -> Suggested<String> {
    let layers = nvfp4::moe::shape::builtin().iter().map(|layer| &layer.name[..]);
    suggested(nvfp4::shape::builtin().iter().map(|shape| &shape.name[..]).chain(layers))
}

/// Parses an output type.
pub fn out_dtype() -> impl TypedValueParser<Value = TokenDtype> {
    named(&[TokenDtype::F16, TokenDtype::Bf16], |dtype| dtype.name())
}

/// Parses a token format.
pub fn token_format() -> impl TypedValueParser<Value = TokenFormat> {
    /// Refused format, and the reason.
    const OF_A_BATCH: &str = "nvfp4-per-batch";
    const WHY_NOT: &str = "one global scale for a batch would make a token's result depend on the other tokens; \
                           use nvfp4, with the checkpoint's input scales or one global scale per token";
    let names = TokenFormat::ALL.map(|format| PossibleValue::new(format.name()));
    let all = names.into_iter().chain([PossibleValue::new(OF_A_BATCH).hide(true)]);
    PossibleValuesParser::new(all.collect::<Vec<_>>())
        .try_map(|chosen| TokenFormat::ALL.into_iter().find(|format| format.name() == chosen).ok_or(WHY_NOT))
}

/// Parses a generator of inputs.
pub fn generator() -> impl TypedValueParser<Value = Generator> {
    named(&Generator::ALL, |generator| generator.name())
}

/// Parses a GPU to plan for.
pub fn gpu() -> impl TypedValueParser<Value = Gpu> {
    named(GPUS, |gpu| gpu.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_beyond_the_suggestions_are_accepted() {
        let parser = suggested::<u32>(["1", "2"]);
        let command = Command::new("x").arg(Arg::new("n").value_parser(parser.clone()));
        assert_eq!(command.clone().try_get_matches_from(["x", "3"]).unwrap().get_one::<u32>("n"), Some(&3));
        assert!(command.try_get_matches_from(["x", "three"]).is_err());
        assert_eq!(parser.possible_values().unwrap().count(), 2);
    }

    #[test]
    fn every_listed_name_parses_to_its_value() {
        let command = || clap::Command::new("x").arg(clap::Arg::new("op").long("op").value_parser(op()));
        let parse = |name: &str| command().try_get_matches_from(["x", "--op", name]);
        assert_eq!(parse("plain").unwrap().get_one::<Op>("op"), Some(&Op::Plain));
        let message = parse("Plain").unwrap_err().to_string();
        assert!(message.contains("[possible values: gated, plain]"), "{message}");
    }
}
