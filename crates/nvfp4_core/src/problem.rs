//! The computed problem: operation, groups, weights and a step of tokens. All validation of them is in this file.
//!
//! [`Weights`] are created once per layer. A [`Step`] holds the tokens of one forward pass and can be built only for
//! weights that it fits. Its [`GroupedProblem`] contains only sizes, for planning.

use std::str::FromStr;

use serde::Deserialize;

use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};

/// Maximum K for which exact dot products fit 64-bit integers: 2²⁰ products below 2⁴³.
pub const MAX_K: usize = 1 << 20;

/// Maximum number of experts of an MoE layer, and of experts that a router chooses from.
pub const MAX_EXPERTS: usize = 1024;

/// Maximum number of experts per token.
pub const MAX_TOP_K: usize = 32;

/// N must be a multiple of this number.
pub const N_ALIGNMENT: usize = 8;

/// Operation of every group of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// `C = silu(α₁·A·B1ᵀ) ∘ (α₂·A·B2ᵀ)`: gate and up projection in one operation.
    Gated,
    /// `C = α·A·Bᵀ`.
    Plain,
}

impl Op {
    /// Number of weight matrices of an expert: 2 (gate and up) or 1.
    pub const fn projections(self) -> usize {
        match self {
            Self::Gated => 2,
            Self::Plain => 1,
        }
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gated => "gated",
            Self::Plain => "plain",
        }
    }
}

/// Returns the error for NVFP4 tokens of weights whose input scales cannot be used.
pub fn no_nvfp4_tokens(fault: &str) -> Error {
    Error::Invalid(format!("tokens cannot be NVFP4: {fault}; use 16-bit tokens, or calibrate the model again"))
}

/// 16-bit type of tokens and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenDtype {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// Format in which a layer multiplies its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
pub enum TokenFormat {
    /// The tokens' own 16-bit type. Products and weights are exact.
    #[default]
    #[serde(rename = "16-bit")]
    Bits16,
    /// e4m3 with one scale per token. Weights are folded to e4m3: see [`crate::fp8`].
    #[serde(rename = "fp8")]
    Fp8,
    /// NVFP4. Weights are used unchanged: see [`crate::fp4`].
    #[serde(rename = "nvfp4")]
    Nvfp4,
}

impl TokenFormat {
    /// Every format, in the order of the command's help.
    pub const ALL: [Self; 3] = [Self::Bits16, Self::Fp8, Self::Nvfp4];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bits16 => "16-bit",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

impl FromStr for TokenFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Invalid(format!("unknown token format `{text}`; expected one of: {names}"))
        })
    }
}

/// Sizes of one group: an expert with its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// Number of tokens; may be 0.
    pub m: usize,
    /// Number of output features, a positive multiple of 8.
    pub n: usize,
    /// Number of input features, a positive multiple of 16 up to [`MAX_K`].
    pub k: usize,
}

/// Sizes of a problem, valid by construction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedProblem {
    op: Op,
    out_dtype: TokenDtype,
    groups: Vec<Group>,
}

impl GroupedProblem {
    /// Checks every size. A problem without groups and groups without tokens are valid and compute nothing.
    ///
    /// # Errors
    /// If N or K of a group is not aligned or out of range, or if the number of bytes of the problem overflows.
    pub fn new(op: Op, out_dtype: TokenDtype, groups: Vec<Group>) -> Result<Self, Error> {
        let mut bytes = 0usize;
        for (index, group) in groups.iter().enumerate() {
            bytes = check_weight_size(group.n, group.k)
                .and_then(|()| group_bytes(group).and_then(|more| bytes.checked_add(more)).ok_or(Error::TooLarge))
                .map_err(|error| error.at(format_args!("group {index}")))?;
        }
        if isize::try_from(bytes).is_err() {
            return Err(Error::TooLarge);
        }
        Ok(Self { op, out_dtype, groups })
    }

    /// Operation of all groups.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Type of the output.
    pub fn out_dtype(&self) -> TokenDtype {
        self.out_dtype
    }

    /// Groups, in order.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }
}

/// Checks the sizes of a weight matrix `[N, K]`.
pub fn check_weight_size(n: usize, k: usize) -> Result<(), Error> {
    if k == 0 || k > MAX_K || !k.is_multiple_of(BLOCK) {
        return Err(Error::BlockAlignment { k });
    }
    if n == 0 || !n.is_multiple_of(N_ALIGNMENT) {
        return Err(Error::OutputAlignment { n });
    }
    Ok(())
}

/// Returns an upper bound of the bytes that a backend or the oracle holds for a group. `None`: the number overflows.
fn group_bytes(group: &Group) -> Option<usize> {
    // 32 bytes per output: two f64 pre-activations, twice. An element with its share of scales takes less than a byte.
    let outputs = group.m.checked_mul(group.n)?.checked_mul(32)?;
    let operands = group.m.checked_add(group.n.checked_mul(2)?)?.checked_mul(group.k)?;
    outputs.checked_add(operands)
}

/// Weights of one expert, each `[N, K]`.
#[derive(Clone, Debug)]
pub enum Expert<'a> {
    /// Gate and up projection, each with its own global scale.
    Gated {
        /// B1.
        gate: Matrix<'a>,
        /// B2.
        up: Matrix<'a>,
    },
    /// One projection.
    Plain(Matrix<'a>),
}

impl<'a> Expert<'a> {
    /// Operation that these weights are for.
    pub fn op(&self) -> Op {
        match self {
            Self::Gated { .. } => Op::Gated,
            Self::Plain(_) => Op::Plain,
        }
    }

    /// Returns the matrices: gate and up, or the single one.
    pub fn projections(&self) -> impl Iterator<Item = &Matrix<'a>> {
        let (first, second) = match self {
            Self::Gated { gate, up } => (gate, Some(up)),
            Self::Plain(weight) => (weight, None),
        };
        std::iter::once(first).chain(second)
    }

    /// Number of output features.
    pub fn n(&self) -> usize {
        self.first().rows()
    }

    /// Number of input features.
    pub fn k(&self) -> usize {
        self.first().k()
    }

    fn first(&self) -> &Matrix<'a> {
        match self {
            Self::Gated { gate: first, .. } | Self::Plain(first) => first,
        }
    }
}

/// Weights of a layer: all experts, for one operation.
#[derive(Clone, Debug)]
pub struct Weights<'a> {
    op: Op,
    experts: Vec<Expert<'a>>,
}

impl<'a> Weights<'a> {
    /// Checks that all experts are for the operation `op`, that their sizes are valid, and that gate and up have equal
    /// sizes.
    ///
    /// # Errors
    /// The first violation, with the index of the expert.
    pub fn new(op: Op, experts: Vec<Expert<'a>>) -> Result<Self, Error> {
        for (index, expert) in experts.iter().enumerate() {
            check_expert(op, expert).map_err(|error| error.at(format_args!("expert {index}")))?;
        }
        Ok(Self { op, experts })
    }

    /// Operation of all experts.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Experts, in order.
    pub fn experts(&self) -> &[Expert<'a>] {
        &self.experts
    }
}

fn check_expert(op: Op, expert: &Expert<'_>) -> Result<(), Error> {
    if expert.op() != op {
        return Err(Error::Invalid(format!(
            "the weights are for operation {}, expected {}",
            expert.op().name(),
            op.name()
        )));
    }
    check_weight_size(expert.n(), expert.k())?;
    if let Expert::Gated { gate, up } = expert {
        for (what, got, expected) in [
            ("N of up (gate's is expected)", up.rows(), gate.rows()),
            ("K of up (gate's is expected)", up.k(), gate.k()),
        ] {
            if got != expected {
                return Err(Error::Mismatch { what, got, expected });
            }
        }
    }
    Ok(())
}

/// Tokens of one forward pass: activations `[M, K]` of each expert, checked against the weights.
#[derive(Clone, Debug)]
pub struct Step<'a> {
    problem: GroupedProblem,
    activations: Vec<Matrix<'a>>,
    alphas: Vec<[f64; 2]>,
}

impl<'a> Step<'a> {
    /// Takes one matrix of tokens per expert, with no rows for an expert without tokens.
    ///
    /// # Errors
    /// If the number of matrices differs from the number of experts, if a K differs, or if a product of global scales
    /// is so large that a dot product could overflow f32.
    pub fn new(weights: &Weights<'_>, activations: Vec<Matrix<'a>>, out_dtype: TokenDtype) -> Result<Self, Error> {
        let experts = weights.experts();
        if activations.len() != experts.len() {
            let (got, expected) = (activations.len(), experts.len());
            return Err(Error::Mismatch { what: "groups of tokens (one per expert)", got, expected });
        }
        let alphas = experts
            .iter()
            .zip(&activations)
            .enumerate()
            .map(|(index, (expert, tokens))| alphas(expert, tokens).map_err(|e| e.at(format_args!("group {index}"))))
            .collect::<Result<_, _>>()?;
        let groups = experts
            .iter()
            .zip(&activations)
            .map(|(expert, tokens)| Group { m: tokens.rows(), n: expert.n(), k: expert.k() })
            .collect();
        Ok(Self { problem: GroupedProblem::new(weights.op(), out_dtype, groups)?, activations, alphas })
    }

    /// Sizes of the step.
    pub fn problem(&self) -> &GroupedProblem {
        &self.problem
    }

    /// Tokens of each group.
    pub fn activations(&self) -> &[Matrix<'a>] {
        &self.activations
    }

    /// Returns α₁ and α₂ of a group: the exact products of the global scales of tokens and weights. α₂ of a plain group
    /// is 0.
    pub fn alphas(&self, group: usize) -> [f64; 2] {
        self.alphas[group]
    }

    /// Checks that this step was built for weights of the same operation and sizes.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_fits(&self, op: Op, sizes: impl ExactSizeIterator<Item = (usize, usize)>) -> Result<(), Error> {
        let groups = self.problem.groups();
        if op != self.problem.op() || sizes.len() != groups.len() {
            return Err(Error::Invalid(
                "the step was built for other weights; build it for the prepared weights".into(),
            ));
        }
        for (index, ((n, k), group)) in sizes.zip(groups).enumerate() {
            for (what, got, expected) in [("N of the step", group.n, n), ("K of the step", group.k, k)] {
                if got != expected {
                    return Err(Error::Mismatch { what, got, expected }.at(format_args!("group {index}")));
                }
            }
        }
        Ok(())
    }
}

fn alphas(expert: &Expert<'_>, tokens: &Matrix<'_>) -> Result<[f64; 2], Error> {
    let k = expert.k();
    if tokens.k() != k {
        return Err(Error::Mismatch { what: "K of the activations", got: tokens.k(), expected: k });
    }
    let mut alphas = [0.0; 2];
    for (slot, weight) in alphas.iter_mut().zip(expert.projections()) {
        *slot = alpha(tokens.global_scale(), weight.global_scale(), k)?;
    }
    Ok(alphas)
}

/// Returns the exact product of the global scales of tokens and weights, if no dot product over `k` can overflow f32.
pub fn alpha(tokens: f32, weights: f32, k: usize) -> Result<f64, Error> {
    /// Maximum magnitude of `e2m1 × e4m3`.
    const MAX_NUMBER: f64 = (e2m1::MAX * e4m3::MAX) as f64;
    let alpha = f64::from(tokens) * f64::from(weights);
    let largest = alpha * k as f64 * MAX_NUMBER * MAX_NUMBER;
    // A caller's scale may be NaN, for which the comparison is false.
    if largest.abs() <= f64::from(f32::MAX) { Ok(alpha) } else { Err(Error::Alpha { alpha, k }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, k: usize, global: f32) -> Matrix<'static> {
        Matrix::new(rows, k, vec![0x11; rows * k / 2], vec![0x38; rows * k / BLOCK], global).unwrap()
    }

    fn gated(n: usize, k: usize) -> Expert<'static> {
        Expert::Gated { gate: matrix(n, k, 1.0), up: matrix(n, k, 1.0) }
    }

    #[test]
    fn token_formats_parse_only_from_their_names() {
        for format in TokenFormat::ALL {
            assert_eq!(format.name().parse::<TokenFormat>().unwrap(), format);
            assert_eq!(serde_json::from_value::<TokenFormat>(format.name().into()).unwrap(), format);
        }
        let error = "fp4".parse::<TokenFormat>().unwrap_err().to_string();
        assert_eq!(error, "unknown token format `fp4`; expected one of: 16-bit, fp8, nvfp4");
    }

    #[test]
    fn invalid_sizes_are_refused_with_their_group() {
        let problem = |m, n, k| GroupedProblem::new(Op::Gated, TokenDtype::F16, vec![Group { m, n, k }]);
        assert!(problem(0, 8, 16).is_ok());
        assert!(problem(7, 72, MAX_K).is_ok());
        for (m, n, k) in [(1, 0, 16), (1, 4, 16), (1, 8, 0), (1, 8, 24), (1, 8, MAX_K + 16)] {
            assert!(problem(m, n, k).unwrap_err().to_string().starts_with("group 0: "), "{m} {n} {k}");
        }
        for (m, n) in [(usize::MAX, 8), (1 << 40, 1 << 40), (1, usize::MAX - 7)] {
            assert!(problem(m, n, 16).is_err(), "{m} {n}");
        }
        assert!(GroupedProblem::new(Op::Plain, TokenDtype::F16, vec![]).is_ok());
    }

    #[test]
    fn wrong_operations_and_unequal_projections_are_refused() {
        assert!(Weights::new(Op::Gated, vec![gated(8, 16)]).is_ok());
        assert!(Weights::new(Op::Plain, vec![gated(8, 16)]).is_err());
        let unequal = Expert::Gated { gate: matrix(8, 16, 1.0), up: matrix(16, 16, 1.0) };
        let error = Weights::new(Op::Gated, vec![gated(8, 16), unequal]).unwrap_err();
        assert!(error.to_string().starts_with("expert 1: N of up"), "{error}");
    }

    #[test]
    fn step_must_fit_its_weights() {
        let weights = Weights::new(Op::Gated, vec![gated(8, 16), gated(16, 32)]).unwrap();
        let step = |activations| Step::new(&weights, activations, TokenDtype::F16);
        assert!(step(vec![matrix(3, 16, 1.0), matrix(0, 32, 1.0)]).is_ok());
        assert!(step(vec![matrix(3, 16, 1.0)]).is_err());
        assert!(step(vec![matrix(3, 16, 1.0), matrix(1, 16, 1.0)]).is_err());
        assert!(matches!(step(vec![matrix(3, 16, 1e33), matrix(1, 32, 1.0)]), Err(Error::At { .. })));
    }

    #[test]
    fn alphas_are_exact_per_projection() {
        let expert = Expert::Gated { gate: matrix(8, 16, 0.1), up: matrix(8, 16, 0.7) };
        let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
        let step = Step::new(&weights, vec![matrix(1, 16, 0.3)], TokenDtype::Bf16).unwrap();
        let exact = |up: f32| f64::from(0.3f32) * f64::from(up);
        assert_eq!(step.alphas(0), [exact(0.1), exact(0.7)]);
    }
}
