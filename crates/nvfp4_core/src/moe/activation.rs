//! The activation: the function of gate and up between the first products and the down projection.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use serde::Deserialize;

use crate::error::Error;
use crate::oracle::silu;

/// An activation. An element of the intermediate is a function of the elements g of the gate projection and u of the up
/// projection, both with their biases. σ(x) is 1/(1+e⁻ˣ).
///
/// An activation is written as one word, also in a file of shapes: `silu`, `silu-limit=7`, `gelu-tanh`, `gpt-oss` or
/// `gpt-oss=1.702,7` (alpha, limit), `relu2`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub enum Activation {
    /// silu(g)·u, with silu(x) = x·σ(x): SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020).
    #[default]
    Silu,
    /// silu(min(g, limit))·clamp(u, −limit, limit).
    SiluLimit {
        /// Positive.
        limit: f32,
    },
    /// gelu(g)·u, with gelu(x) = x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks and Gimpel, "Gaussian Error Linear
    /// Units", 2016).
    GeluTanh,
    /// x·σ(alpha·x)·(clamp(u, −limit, limit) + 1), with x = min(g, limit): gpt-oss (`GptOssExperts` in Transformers).
    /// Interleaved rows of gate and up in a checkpoint are handled by the reader of checkpoints.
    GptOss {
        /// Positive; 1.702 in the models.
        alpha: f32,
        /// Positive; 7 in the models.
        limit: f32,
    },
    /// max(u, 0)², for layers without a gate (So et al., "Primer", 2021).
    Relu2,
}

/// All gated activations as one formula: `x·σ(slope·x + cubic·x³)·(clamp(u, −limit, limit) + offset)` with `x = min(g,
/// limit)`. min and clamp keep NaN. `limit` and `offset` are exact in f32; devices round `slope` and `cubic` to f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gate {
    /// Positive.
    pub slope: f64,
    /// Not negative.
    pub cubic: f64,
    /// Infinite if the activation has no limit.
    pub limit: f64,
    /// Added to up.
    pub offset: f64,
}

impl Activation {
    /// The activation of gpt-oss, with the numbers of its models.
    pub const GPT_OSS: Self = Self::GptOss { alpha: 1.702, limit: 7.0 };

    /// All words, for error messages.
    const WORDS: &str = "silu, silu-limit=LIMIT, gelu-tanh, gpt-oss, gpt-oss=ALPHA,LIMIT, relu2";

    /// Whether the activation has a gate projection.
    pub fn has_gate(self) -> bool {
        self != Self::Relu2
    }

    /// Checks the activation's numbers.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a number is not from 1e-6 to 1e6.
    pub fn check(self) -> Result<(), Error> {
        let (alpha, limit) = match self {
            Self::SiluLimit { limit } => (1.0, limit),
            Self::GptOss { alpha, limit } => (alpha, limit),
            Self::Silu | Self::GeluTanh | Self::Relu2 => return Ok(()),
        };
        for (what, number) in [("alpha", alpha), ("limit", limit)] {
            // Outside of this range, f32 products with a gate of ordinary magnitude lose their accuracy.
            if !(1e-6..=1e6).contains(&number) {
                return Err(Error::Invalid(format!("activation: {what} = {number} is not from 1e-6 to 1e6")));
            }
        }
        Ok(())
    }

    /// Numbers of the formula. `None` if the activation has no gate.
    pub fn gate(self) -> Option<Gate> {
        /// 2·√(2/π): (1 + tanh(y))/2 is σ(2y).
        const GELU_SLOPE: f64 = 1.595_769_121_605_730_7;
        let plain = Gate { slope: 1.0, cubic: 0.0, limit: f64::INFINITY, offset: 0.0 };
        match self {
            Self::Silu => Some(plain),
            Self::SiluLimit { limit } => Some(Gate { limit: limit.into(), ..plain }),
            Self::GeluTanh => Some(Gate { slope: GELU_SLOPE, cubic: GELU_SLOPE * 0.044715, ..plain }),
            Self::GptOss { alpha, limit } => {
                Some(Gate { slope: alpha.into(), limit: limit.into(), offset: 1.0, ..plain })
            }
            Self::Relu2 => None,
        }
    }

    /// Computes the activation by its definition, in f64. `gate` is ignored if the activation has no gate. NaN stays
    /// NaN.
    pub fn apply(self, gate: f64, up: f64) -> f64 {
        let min = |x: f64, limit: f32| if x > f64::from(limit) { f64::from(limit) } else { x };
        let clamp = |x: f64, limit: f32| x.clamp(f64::from(-limit), f64::from(limit));
        match self {
            Self::Silu => silu(gate) * up,
            Self::SiluLimit { limit } => silu(min(gate, limit)) * clamp(up, limit),
            Self::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            Self::GptOss { alpha, limit } => {
                let x = min(gate, limit);
                x / (1.0 + (-f64::from(alpha) * x).exp()) * (clamp(up, limit) + 1.0)
            }
            Self::Relu2 if up < 0.0 => 0.0,
            Self::Relu2 => up * up,
        }
    }

    /// Key for equality and hashing.
    fn key(self) -> (u8, [u32; 2]) {
        match self {
            Self::Silu => (0, [0; 2]),
            Self::SiluLimit { limit } => (1, [limit.to_bits(), 0]),
            Self::GeluTanh => (2, [0; 2]),
            Self::GptOss { alpha, limit } => (3, [alpha, limit].map(f32::to_bits)),
            Self::Relu2 => (4, [0; 2]),
        }
    }
}

impl PartialEq for Activation {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Activation {}

impl Hash for Activation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silu => f.write_str("silu"),
            Self::SiluLimit { limit } => write!(f, "silu-limit={limit}"),
            Self::GeluTanh => f.write_str("gelu-tanh"),
            &gpt_oss if gpt_oss == Self::GPT_OSS => f.write_str("gpt-oss"),
            Self::GptOss { alpha, limit } => write!(f, "gpt-oss={alpha},{limit}"),
            Self::Relu2 => f.write_str("relu2"),
        }
    }
}

impl FromStr for Activation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::Invalid(format!("activation `{}` is none of: {}", crate::printable(text), Self::WORDS));
        let (word, numbers) = text.split_once('=').map_or((text, None), |(word, numbers)| (word, Some(numbers)));
        let numbers: Option<Vec<f32>> = numbers
            .map(|numbers| numbers.split(',').map(|number| number.trim().parse()).collect::<Result<_, _>>())
            .transpose()
            .map_err(|_| unknown())?;
        let activation = match (word, numbers.as_deref()) {
            ("silu", None) => Self::Silu,
            ("silu-limit", Some(&[limit])) => Self::SiluLimit { limit },
            ("gelu-tanh", None) => Self::GeluTanh,
            ("gpt-oss", None) => Self::GPT_OSS,
            ("gpt-oss", Some(&[alpha, limit])) => Self::GptOss { alpha, limit },
            ("relu2", None) => Self::Relu2,
            _ => return Err(unknown()),
        };
        activation.check()?;
        Ok(activation)
    }
}

impl TryFrom<String> for Activation {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Activation; 5] = [
        Activation::Silu,
        Activation::SiluLimit { limit: 2.5 },
        Activation::GeluTanh,
        Activation::GPT_OSS,
        Activation::Relu2,
    ];

    #[test]
    fn displayed_text_parses_to_the_same_activation() {
        for activation in ALL.into_iter().chain([Activation::GptOss { alpha: 1.5, limit: 0.25 }]) {
            assert_eq!(activation.to_string().parse::<Activation>().unwrap(), activation);
        }
        assert_eq!("gpt-oss=1.702,7".parse::<Activation>().unwrap(), Activation::GPT_OSS);
        for (text, error) in [
            ("swish", "activation `swish` is none of: silu, silu-limit=LIMIT, "),
            ("silu=2", "activation `silu=2` is none of"),
            ("gpt-oss=1", "activation `gpt-oss=1` is none of"),
            ("silu-limit=x", "activation `silu-limit=x` is none of"),
            ("silu-limit=-1", "activation: limit = -1 is not from"),
            ("silu-limit=inf", "activation: limit = inf is not from"),
            ("gpt-oss=NaN,7", "activation: alpha = NaN is not from"),
        ] {
            let got = text.parse::<Activation>().unwrap_err().to_string();
            assert!(got.starts_with(error), "{got}");
        }
    }

    #[test]
    fn definitions_give_the_values_of_the_papers() {
        // gelu(1) with tanh is 0.84119 (with erf 0.84134). silu(1) is 0.73106.
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-5, "{got} {want}");
        close(Activation::GeluTanh.apply(1.0, 2.0), 2.0 * 0.841_192);
        close(Activation::Silu.apply(1.0, 2.0), 2.0 * 0.731_059);
        close(Activation::SiluLimit { limit: 1.0 }.apply(5.0, -3.0), -0.731_059);
        close(Activation::GPT_OSS.apply(1.0, 2.0), 3.0 / (1.0 + (-1.702f64).exp()));
        close(Activation::GPT_OSS.apply(100.0, -100.0), 7.0 / (1.0 + (-1.702f64 * 7.0).exp()) * -6.0);
        close(Activation::Relu2.apply(f64::NAN, 3.0), 9.0);
        assert_eq!(Activation::Relu2.apply(0.0, -3.0), 0.0);
    }

    #[test]
    fn the_formula_matches_each_definition() {
        for (activation, gate) in ALL.into_iter().filter_map(|activation| Some((activation, activation.gate()?))) {
            for (g, u) in (-60..=60).flat_map(|g| (-5..=5).map(move |u| (f64::from(g) / 7.0, f64::from(u) * 2.3))) {
                let Gate { slope, cubic, limit, offset } = gate;
                let x = g.min(limit);
                let got = x / (1.0 + (-(slope * x + cubic * x.powi(3))).exp()) * (u.clamp(-limit, limit) + offset);
                let want = activation.apply(g, u);
                assert!((got - want).abs() <= 1e-6 * (1.0 + want.abs()), "{activation} {g} {u}: {got} {want}");
            }
        }
    }

    #[test]
    fn nan_stays_and_limits_clamp_infinities() {
        for activation in ALL {
            assert!(activation.apply(1.0, f64::NAN).is_nan(), "{activation}");
            assert!(!activation.has_gate() || activation.apply(f64::NAN, 1.0).is_nan(), "{activation}");
        }
        assert_eq!(Activation::GPT_OSS.apply(f64::INFINITY, f64::NEG_INFINITY), Activation::GPT_OSS.apply(7.0, -7.0));
        assert_eq!(Activation::GeluTanh.apply(f64::INFINITY, 1.0), f64::INFINITY);
    }
}
