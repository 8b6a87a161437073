//! Distribution of the experts that generated tokens name.

use serde::Deserialize;

/// Distribution of the experts that tokens name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Routing {
    /// All experts are equally likely.
    #[default]
    Uniform,
    /// The expert of rank r has a probability proportional to 1/r (Zipf's law), before repeated experts of a token are
    /// excluded.
    Zipf,
}

impl Routing {
    /// All distributions.
    pub const ALL: [Self; 2] = [Self::Uniform, Self::Zipf];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}
