//! The activation: the function of gate and up between the first products and the down projection.
//!
//! An activation is one of three [`Form`]s. To add one within the formula: a variant with its word and numbers, and its
//! numbers in [`Activation::form`]. Outside the formula: also its exact factors here, and the f32 arithmetic in
//! `kernels-gpu/src/curve.rs`. The reference, the CPU, the kernels and all bindings follow.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use kernels_gpu::curve::Curve;
use serde::Deserialize;

use crate::error::Error;
use crate::oracle::silu;

/// An activation. An element of the intermediate is a function of the elements g of the gate projection and u of the up
/// projection, both with their biases. σ(x) is 1/(1+e⁻ˣ).
///
/// An activation is written as one word, also in a file of shapes and in every binding: `silu`, `silu-limit=7`,
/// `swiglu-step=7`, `gelu`, `gelu-tanh`, `gpt-oss` or `gpt-oss=1.702,7` (alpha, limit), `swigluoai=1.702,7,1` (alpha,
/// limit, offset), `situ=8` or `situ=8,4` (beta, linear beta), `relu2`, `relu2-gated`. Words that engines and
/// configurations use for them are read too ([`Activation::ALIASES`]).
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
#[non_exhaustive]
pub enum Activation {
    /// silu(g)·u, with silu(x) = x·σ(x): SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020).
    #[default]
    Silu,
    /// silu(min(g, limit))·clamp(u, −limit, limit): DeepSeek-V4 (`swiglu_limit`; `SiluAndMulWithClamp` in vLLM).
    SiluLimit {
        /// Positive.
        limit: f32,
    },
    /// min(silu(g), limit)·clamp(u, −limit, limit): the clamped layers of Step-3.5 (`swiglu_limits`; `Step3p5MLP` in
    /// vLLM).
    SwigluStep {
        /// Positive.
        limit: f32,
    },
    /// gelu(g)·u, with gelu(x) = x·Φ(x) and the normal distribution's Φ: GeGLU (Hendrycks and Gimpel, "Gaussian Error
    /// Linear Units", 2016).
    Gelu,
    /// gelu(g)·u, with gelu(x) = x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (the same paper).
    GeluTanh,
    /// x·σ(alpha·x)·(clamp(u, −limit, limit) + 1), with x = min(g, limit): gpt-oss (`GptOssExperts` in Transformers).
    /// Interleaved rows of gate and up in a checkpoint are handled by the reader of checkpoints.
    GptOss {
        /// Positive; 1.702 in the models.
        alpha: f32,
        /// Positive; 7 in the models.
        limit: f32,
    },
    /// [`Self::GptOss`] with another number than 1 added to up: `swiglu_beta` of MiniMax-M3.
    SwigluOai {
        /// Positive.
        alpha: f32,
        /// Positive.
        limit: f32,
        /// Finite.
        offset: f32,
    },
    /// beta·tanh(g/beta)·σ(g)·u; with a linear beta, linear·tanh(u/linear) takes the place of u: SiTU of Kimi-K3
    /// (`activation_situ_beta`, `activation_situ_linear_beta`; `SituAndMul` in vLLM).
    Situ {
        /// Positive.
        beta: f32,
        /// Positive, or `None`: up is not changed.
        linear: Option<f32>,
    },
    /// max(u, 0)², for layers without a gate (So et al., "Primer", 2021): Nemotron-H.
    Relu2,
    /// max(g, 0)²·u.
    GatedRelu2,
}

/// How an activation is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// The formula of most gated activations.
    Formula(Gate),
    /// Another gated activation, with its numbers.
    Curve(Curve, [f32; 4]),
    /// max(u, 0)², without a gate.
    Square,
}

/// Most gated activations as one formula: `x·σ(slope·x + cubic·x³)·(clamp(u, −limit, limit) + offset)` with `x = min(g,
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

/// One of the two factors of a curve: a function of gate or a function of up, at a place in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factor {
    pub value: f64,
    /// Maximum magnitude of the function's derivative in the interval.
    pub slope: f64,
    /// Maximum relative error of a device's f32 arithmetic in the interval, in units of 2⁻²³.
    pub share: f64,
}

impl Activation {
    /// The activation of gpt-oss, with the numbers of its models.
    pub const GPT_OSS: Self = Self::GptOss { alpha: 1.702, limit: 7.0 };

    /// Forms of all words, for error messages.
    const WORDS: &str = "silu, silu-limit=LIMIT, swiglu-step=LIMIT, gelu, gelu-tanh, gpt-oss, gpt-oss=ALPHA,LIMIT, \
        swigluoai=ALPHA,LIMIT,OFFSET, situ=BETA, situ=BETA,LINEAR, relu2, relu2-gated";

    /// Other names of the words, from Transformers' and vLLM's configurations and activations.
    pub const ALIASES: &[(&str, &str)] = &[
        ("swish", "silu"),
        ("swiglu", "silu"),
        ("swiglustep", "swiglu-step"),
        ("gelu_tanh", "gelu-tanh"),
        ("gelu_pytorch_tanh", "gelu-tanh"),
        ("gelu_new", "gelu-tanh"),
        ("gpt_oss", "gpt-oss"),
        ("swigluoai_uninterleave", "swigluoai"),
        ("relu2_no_mul", "relu2"),
    ];

    /// Whether the activation has a gate projection.
    pub fn has_gate(self) -> bool {
        self.form() != Form::Square
    }

    /// Checks the activation's numbers.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a positive number is not from 1e-6 to 1e6, or the offset is not from -1e6 to 1e6.
    pub fn check(self) -> Result<(), Error> {
        let (_, numbers) = self.written();
        let names = match self {
            Self::Situ { .. } => ["beta", "linear beta", ""],
            Self::SiluLimit { .. } | Self::SwigluStep { .. } => ["limit", "", ""],
            _ => ["alpha", "limit", "offset"],
        };
        for (what, number) in names.into_iter().zip(numbers.into_iter().flatten()) {
            // Outside of this range, f32 products with a gate of ordinary magnitude lose their accuracy.
            let (least, range) = if what == "offset" { (-1e6, "-1e6") } else { (1e-6, "1e-6") };
            if !(least..=1e6).contains(&number) {
                return Err(Error::Invalid(format!("activation: {what} = {number} is not from {range} to 1e6")));
            }
        }
        Ok(())
    }

    /// Returns how the activation is computed.
    pub fn form(self) -> Form {
        /// 2·√(2/π): (1 + tanh(y))/2 is σ(2y).
        const GELU_SLOPE: f64 = 1.595_769_121_605_730_7;
        let plain = Gate { slope: 1.0, cubic: 0.0, limit: f64::INFINITY, offset: 0.0 };
        let oai = |alpha: f32, limit: f32, offset: f32| {
            Form::Formula(Gate { slope: alpha.into(), limit: limit.into(), offset: offset.into(), ..plain })
        };
        match self {
            Self::Silu => Form::Formula(plain),
            Self::SiluLimit { limit } => Form::Formula(Gate { limit: limit.into(), ..plain }),
            Self::GeluTanh => Form::Formula(Gate { slope: GELU_SLOPE, cubic: GELU_SLOPE * 0.044715, ..plain }),
            Self::GptOss { alpha, limit } => oai(alpha, limit, 1.0),
            Self::SwigluOai { alpha, limit, offset } => oai(alpha, limit, offset),
            Self::SwigluStep { limit } => Form::Curve(Curve::SwigluStep, [limit, 0.0, 0.0, 0.0]),
            Self::Gelu => Form::Curve(Curve::Gelu, [0.0; 4]),
            Self::Situ { beta, linear } => Form::Curve(Curve::Situ, [beta, linear.unwrap_or(0.0), 0.0, 0.0]),
            Self::GatedRelu2 => Form::Curve(Curve::GatedRelu2, [0.0; 4]),
            Self::Relu2 => Form::Square,
        }
    }

    /// Returns a curve's function of gate at `x`, by its definition in f64. `ends` contains `x`. NaN stays NaN.
    ///
    /// The errors of f32 arithmetic count the roundings in `kernels-gpu/src/curve.rs`: 6 for tanh, 3 for σ, one for each
    /// further operation.
    pub(crate) fn gate_factor(self, x: f64, ends: [f64; 2]) -> Factor {
        /// Maximum slope of x·σ(x), at x ≈ 2.4. β·tanh(x/β)·σ(x) is flatter: |β·tanh(x/β)| ≤ |x|, with a slope of 1.
        const SILU_SLOPE: f64 = 1.0999;
        match self {
            Self::Situ { beta, .. } => {
                let beta = f64::from(beta);
                Factor { value: beta * (x / beta).tanh() * sigmoid(x), slope: SILU_SLOPE, share: 12.0 }
            }
            Self::SwigluStep { limit } => {
                let (silu, limit) = (silu(x), f64::from(limit));
                Factor { value: if silu > limit { limit } else { silu }, slope: SILU_SLOPE, share: 4.0 }
            }
            Self::Gelu => {
                let far = ends[0].abs().max(ends[1].abs()).min(14.0);
                // The steepest place of x·Φ(x) is √2.
                Factor { value: x * normal(x), slope: 1.1291, share: 8.0 + far * far / 4.0 }
            }
            Self::GatedRelu2 => {
                let square = |x: f64| if x < 0.0 { 0.0 } else { x * x };
                Factor { value: square(x), slope: 2.0 * ends[1].max(0.0), share: 1.0 }
            }
            _ => unreachable!("only curves have factors"),
        }
    }

    /// Returns a curve's function of up at `u`, which does not fall as `u` grows.
    pub(crate) fn up_factor(self, u: f64) -> Factor {
        match self {
            Self::Situ { linear: Some(linear), .. } => {
                let linear = f64::from(linear);
                Factor { value: linear * (u / linear).tanh(), slope: 1.0, share: 8.0 }
            }
            Self::SwigluStep { limit } => {
                Factor { value: u.clamp(f64::from(-limit), f64::from(limit)), slope: 1.0, share: 0.0 }
            }
            _ => Factor { value: u, slope: 1.0, share: 0.0 },
        }
    }

    /// Computes the activation by its definition, in f64. `gate` is ignored if the activation has no gate. NaN stays
    /// NaN.
    pub fn apply(self, gate: f64, up: f64) -> f64 {
        let min = |x: f64, limit: f32| if x > f64::from(limit) { f64::from(limit) } else { x };
        let clamp = |x: f64, limit: f32| x.clamp(f64::from(-limit), f64::from(limit));
        let oai = |alpha: f32, limit: f32, offset: f32| {
            let x = min(gate, limit);
            x / (1.0 + (-f64::from(alpha) * x).exp()) * (clamp(up, limit) + f64::from(offset))
        };
        match self {
            Self::Silu => silu(gate) * up,
            Self::SiluLimit { limit } => silu(min(gate, limit)) * clamp(up, limit),
            Self::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            Self::GptOss { alpha, limit } => oai(alpha, limit, 1.0),
            Self::SwigluOai { alpha, limit, offset } => oai(alpha, limit, offset),
            Self::Relu2 if up < 0.0 => 0.0,
            Self::Relu2 => up * up,
            Self::Situ { .. } | Self::SwigluStep { .. } | Self::Gelu | Self::GatedRelu2 => {
                self.gate_factor(gate, [gate; 2]).value * self.up_factor(up).value
            }
        }
    }

    /// Returns the word and the numbers after it.
    fn written(self) -> (&'static str, [Option<f32>; 3]) {
        match self {
            Self::Silu => ("silu", [None; 3]),
            Self::SiluLimit { limit } => ("silu-limit", [Some(limit), None, None]),
            Self::SwigluStep { limit } => ("swiglu-step", [Some(limit), None, None]),
            Self::Gelu => ("gelu", [None; 3]),
            Self::GeluTanh => ("gelu-tanh", [None; 3]),
            Self::GptOss { alpha: 1.702, limit: 7.0 } => ("gpt-oss", [None; 3]),
            Self::GptOss { alpha, limit } => ("gpt-oss", [Some(alpha), Some(limit), None]),
            Self::SwigluOai { alpha, limit, offset } => ("swigluoai", [alpha, limit, offset].map(Some)),
            Self::Situ { beta, linear } => ("situ", [Some(beta), linear, None]),
            Self::Relu2 => ("relu2", [None; 3]),
            Self::GatedRelu2 => ("relu2-gated", [None; 3]),
        }
    }

    /// Returns the activation with this word and numbers, the inverse of [`Self::written`].
    fn read(word: &str, numbers: &[f32]) -> Option<Self> {
        let word = Self::ALIASES.iter().find(|(alias, _)| *alias == word).map_or(word, |(_, word)| word);
        Some(match (word, numbers) {
            ("silu", []) => Self::Silu,
            ("silu-limit", &[limit]) => Self::SiluLimit { limit },
            ("swiglu-step", &[limit]) => Self::SwigluStep { limit },
            ("gelu", []) => Self::Gelu,
            ("gelu-tanh", []) => Self::GeluTanh,
            ("gpt-oss" | "swigluoai", []) => Self::GPT_OSS,
            ("gpt-oss" | "swigluoai", &[alpha, limit]) | ("swigluoai", &[alpha, limit, 1.0]) => {
                Self::GptOss { alpha, limit }
            }
            ("swigluoai", &[alpha, limit, offset]) => Self::SwigluOai { alpha, limit, offset },
            ("situ", &[beta]) => Self::Situ { beta, linear: None },
            ("situ", &[beta, linear]) => Self::Situ { beta, linear: Some(linear) },
            ("relu2", []) => Self::Relu2,
            ("relu2-gated", []) => Self::GatedRelu2,
            _ => return None,
        })
    }

    /// Key for equality and hashing.
    fn key(self) -> (std::mem::Discriminant<Self>, [Option<u32>; 3]) {
        (std::mem::discriminant(&self), self.written().1.map(|number| number.map(f32::to_bits)))
    }
}

/// 1/(1 + e⁻ˣ).
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The normal distribution's Φ(x), with a relative error below 10⁻¹³ down to x = −38: by the series of Φ(x) − 1/2 near
/// 0, and by the continued fraction of the tail elsewhere (Abramowitz and Stegun, 26.2.11 and 26.2.14).
fn normal(x: f64) -> f64 {
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let z = x.abs();
    if x.is_nan() {
        return x;
    }
    if z < 3.0 {
        let (mut term, mut sum) = (x, x);
        for divisor in (3..200).step_by(2) {
            term *= x * x / f64::from(divisor);
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let fraction = (1..=200).rev().fold(z, |below, index| z + f64::from(index) / below);
    let tail = density / fraction;
    if x < 0.0 { tail } else { 1.0 - tail }
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
        let (word, numbers) = self.written();
        f.write_str(word)?;
        for (index, number) in numbers.into_iter().flatten().enumerate() {
            write!(f, "{}{number}", if index == 0 { '=' } else { ',' })?;
        }
        Ok(())
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
        let activation = Self::read(word, &numbers.unwrap_or_default()).ok_or_else(unknown)?;
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

    const ALL: [Activation; 11] = [
        Activation::Silu,
        Activation::SiluLimit { limit: 2.5 },
        Activation::SwigluStep { limit: 1.5 },
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::GPT_OSS,
        Activation::SwigluOai { alpha: 1.702, limit: 7.0, offset: -0.5 },
        Activation::Situ { beta: 2.0, linear: None },
        Activation::Situ { beta: 8.0, linear: Some(4.0) },
        Activation::Relu2,
        Activation::GatedRelu2,
    ];

    #[test]
    fn displayed_text_parses_to_the_same_activation() {
        for activation in ALL.into_iter().chain([Activation::GptOss { alpha: 1.5, limit: 0.25 }]) {
            assert_eq!(activation.to_string().parse::<Activation>().unwrap(), activation);
        }
        for text in ["gpt-oss=1.702,7", "swigluoai", "swigluoai_uninterleave=1.702,7", "swigluoai=1.702,7,1"] {
            assert_eq!(text.parse::<Activation>().unwrap(), Activation::GPT_OSS, "{text}");
        }
        for (alias, word) in Activation::ALIASES {
            let numbers = if *alias == "swiglustep" { "=3" } else { "" };
            let [alias, word] = [alias, word].map(|of| format!("{of}{numbers}").parse::<Activation>().unwrap());
            assert_eq!(alias, word);
        }
        for (text, error) in [
            ("tanh", "activation `tanh` is none of: silu, silu-limit=LIMIT, "),
            ("situ", "activation `situ` is none of"),
            ("situ=0", "activation: beta = 0 is not from"),
            ("situ=2,-1", "activation: linear beta = -1 is not from"),
            ("swigluoai=1,7,inf", "activation: offset = inf is not from"),
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
        close(Activation::Gelu.apply(1.0, 2.0), 2.0 * 0.841_345);
        close(Activation::Gelu.apply(-4.0, 1e4), -4.0 * 0.316_712);
        close(Activation::GatedRelu2.apply(1.5, -2.0), -4.5);
        close(Activation::GatedRelu2.apply(-1.5, -2.0), 0.0);
        // silu(3) is 2.85772.
        close(Activation::SwigluStep { limit: 2.0 }.apply(3.0, -5.0), -4.0);
        close(Activation::SwigluStep { limit: 3.0 }.apply(3.0, 2.0), 2.0 * 2.857_722);
        // tanh(0.5) is 0.462117, σ(1) is 0.731059.
        close(Activation::Situ { beta: 2.0, linear: None }.apply(1.0, 3.0), 2.0 * 0.462_117 * 0.731_059 * 3.0);
        close(
            Activation::Situ { beta: 2.0, linear: Some(2.0) }.apply(1.0, 1.0),
            4.0 * 0.462_117f64.powi(2) * 0.731_059,
        );
    }

    #[test]
    fn the_formula_matches_each_definition() {
        for activation in ALL {
            let Form::Formula(gate) = activation.form() else { continue };
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
        assert_eq!(Activation::Gelu.apply(f64::INFINITY, 1.0), f64::INFINITY);
        let situ = Activation::Situ { beta: 8.0, linear: Some(4.0) };
        assert_eq!(situ.apply(f64::INFINITY, f64::NEG_INFINITY), -32.0);
        assert_eq!(situ.apply(f64::NEG_INFINITY, 1.0), 0.0);
    }
}
