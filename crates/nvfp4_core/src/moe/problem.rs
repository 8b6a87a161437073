//! The weights of a layer and the inputs of a step, with all their validation.

use std::borrow::Cow;

use super::activation::Activation;
use super::rows::{NO_ROW, Rows};
use crate::bias::Bias;
use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};
use crate::fp4::InputScales;
use crate::problem::{MAX_EXPERTS, MAX_K, MAX_TOP_K, TokenDtype, TokenFormat, no_nvfp4_tokens};
use crate::transform::TokenTransform;

/// All properties of a layer that are the same in every step, except the numbers of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MoeSizes {
    /// H: number of elements per token, a multiple of 16.
    pub hidden: usize,
    /// I: number of rows of gate and up, a multiple of 16.
    pub intermediate: usize,
    /// E: number of experts that the layer holds, from 1 to 1024.
    pub experts: usize,
    /// Number of experts that a token can name: the length of the expert map, or E.
    pub named_experts: usize,
    /// k: number of experts that each token names, from 1 to 32.
    pub top_k: usize,
    /// I of the shared expert, a multiple of 16. `None` without a shared expert.
    pub shared_intermediate: Option<usize>,
    /// Token type: the type of tokens, intermediate and output.
    pub dtype: TokenDtype,
    /// Activation of gate and up.
    pub activation: Activation,
    /// Whether any projection has biases.
    pub biases: bool,
    /// Format in which tokens and the intermediate are multiplied.
    pub token_format: TokenFormat,
    /// Whether the experts have input scales ([`InputScales`]), the global scales of their tokens in NVFP4. If `false`,
    /// each token has its own global scale.
    pub input_scales: bool,
}

impl MoeSizes {
    /// Whether tokens are quantized with the input scales of the experts.
    pub fn has_input_scales(&self) -> bool {
        self.input_scales && self.token_format == TokenFormat::Nvfp4
    }

    /// Checks every size.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first size out of range and its range.
    pub fn check(&self) -> Result<(), Error> {
        let within = |what: &str, got: usize, most: usize| match got {
            got if (1..=most).contains(&got) => Ok(()),
            got => Err(Error::Invalid(format!("{what} = {got} is not from 1 to {most}"))),
        };
        within("top_k", self.top_k, MAX_TOP_K)?;
        within("experts of the layer", self.experts, MAX_EXPERTS)?;
        within("experts that tokens name", self.named_experts, i32::MAX as usize)?;
        check_width("hidden size", self.hidden)?;
        check_width("intermediate size", self.intermediate)?;
        self.activation.check()?;
        self.shared_intermediate.map_or(Ok(()), |size| check_width("intermediate size of the shared expert", size))
    }
}

/// Checks a size that is the K of a product.
fn check_width(what: &str, size: usize) -> Result<(), Error> {
    if size == 0 || size > MAX_K || !size.is_multiple_of(BLOCK) {
        return Err(Error::Invalid(format!(
            "{what} {size} is not a multiple of 16 from 16 to 2^20; pad the weights with zeros to whole blocks of 16"
        )));
    }
    Ok(())
}

/// An expert: gate and up `[I, H]` and down `[H, I]`, each with its own global scale. Gate is present if and only if
/// the layer's activation has a gate.
#[derive(Clone, Debug)]
pub struct MoeExpert<'a> {
    /// Gate projection.
    pub gate: Option<Matrix<'a>>,
    /// Up projection.
    pub up: Matrix<'a>,
    /// Down projection.
    pub down: Matrix<'a>,
    /// Biases of the projections.
    pub biases: Biases<'a>,
}

/// Biases of an expert's projections. A projection without biases has `None`.
#[derive(Clone, Debug, Default)]
pub struct Biases<'a> {
    /// `[I]`.
    pub gate: Option<Bias<'a>>,
    /// `[I]`.
    pub up: Option<Bias<'a>>,
    /// `[H]`.
    pub down: Option<Bias<'a>>,
}

impl<'a> MoeExpert<'a> {
    /// Makes an expert with a gate and without biases.
    pub fn gated(gate: Matrix<'a>, up: Matrix<'a>, down: Matrix<'a>) -> Self {
        Self { gate: Some(gate), up, down, biases: Biases::default() }
    }

    /// Makes an expert without a gate and without biases.
    pub fn ungated(up: Matrix<'a>, down: Matrix<'a>) -> Self {
        Self { gate: None, up, down, biases: Biases::default() }
    }

    /// Returns the expert with these biases.
    pub fn with_biases(self, biases: Biases<'a>) -> Self {
        Self { biases, ..self }
    }

    /// Returns the expert's projections: name, matrix and biases.
    pub fn projections(&self) -> impl Iterator<Item = (&'static str, &Matrix<'a>, Option<&Bias<'a>>)> {
        let Biases { gate, up, down } = &self.biases;
        let of_gate = self.gate.as_ref().map(|matrix| ("gate", matrix, gate.as_ref()));
        of_gate.into_iter().chain([("up", &self.up, up.as_ref()), ("down", &self.down, down.as_ref())])
    }

    /// Whether any projection has biases.
    fn is_biased(&self) -> bool {
        let Biases { gate, up, down } = &self.biases;
        gate.is_some() || up.is_some() || down.is_some()
    }

    /// Checks the presence of the gate, the sizes, the global scales and the biases.
    fn check(&self, sizes: &MoeSizes, intermediate: usize) -> Result<(), Error> {
        let &MoeSizes { hidden, dtype, activation, .. } = sizes;
        match (activation.has_gate(), self.gate.is_some() || self.biases.gate.is_some()) {
            (true, _) if self.gate.is_none() => {
                return Err(Error::Invalid(format!(
                    "the activation {activation} needs a gate, but the expert has none"
                )));
            }
            (false, true) => {
                let text = format!("the activation {activation} takes no gate; leave out the gate and its biases");
                return Err(Error::Invalid(text));
            }
            _ => {}
        }
        for (name, matrix, bias) in self.projections() {
            let (rows, k) = if name == "down" { (hidden, intermediate) } else { (intermediate, hidden) };
            for (what, got, expected) in [("rows", matrix.rows(), rows), ("columns", matrix.k(), k)] {
                if got != expected {
                    return Err(Error::Mismatch { what, got, expected }.at(name));
                }
            }
            check_global_scale(matrix.global_scale()).map_err(|error| error.at(name))?;
            bias.map_or(Ok(()), |bias| bias.check(dtype, rows)).map_err(|error| error.at(name))?;
        }
        Ok(())
    }
}

/// Checks that the product of a weight with this global scale and an f16 token stays within f32.
pub fn check_global_scale(global: f32) -> Result<(), Error> {
    /// Largest magnitude of `e2m1 × e4m3`.
    const MAX_NUMBER: f64 = (e2m1::MAX * e4m3::MAX) as f64;
    /// Largest f16.
    const MAX_TOKEN: f64 = 65504.0;
    if f64::from(global) * MAX_NUMBER * MAX_TOKEN <= f64::from(f32::MAX) {
        return Ok(());
    }
    let what =
        format!("global scale {global:e} lets a product with an f16 token overflow f32; quantize the tensor again");
    Err(Error::Invalid(what))
}

/// Changes of the rows that an expert multiplies, `None` for rows that stay as they are. They are rounded to the token type
/// after the change, before a quantized token format rounds them again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertTransforms {
    /// Change of the tokens, before gate and up.
    pub gate_up: Option<TokenTransform>,
    /// Change of the intermediate, before down.
    pub down: Option<TokenTransform>,
}

/// The weights of a layer.
#[derive(Clone, Debug)]
pub struct MoeWeights<'a> {
    sizes: MoeSizes,
    experts: Vec<MoeExpert<'a>>,
    shared: Option<MoeExpert<'a>>,
    expert_map: Option<Vec<i32>>,
    /// Input scales of the experts, then of the shared expert. Empty if each token has its own global
    /// scale.
    input_scales: Vec<InputScales>,
    /// Why tokens cannot be multiplied in NVFP4; `None` if they can.
    input_scale_fault: Option<String>,
    /// Transforms of the experts, then of the shared expert. Empty if no expert has any.
    transforms: Vec<ExpertTransforms>,
}

impl<'a> MoeWeights<'a> {
    /// Makes a layer of these experts with the activation `silu(gate)·up`. Each token has type `dtype` and names
    /// `top_k` experts.
    ///
    /// # Errors
    /// The errors of [`MoeWeights::with_activation`].
    pub fn new(dtype: TokenDtype, top_k: usize, experts: Vec<MoeExpert<'a>>) -> Result<Self, Error> {
        Self::with_activation(dtype, top_k, Activation::Silu, experts)
    }

    /// Makes a layer of these experts. Each token has type `dtype` and names `top_k` experts.
    ///
    /// # Errors
    /// [`Error`] with the expert and the projection, in these cases:
    ///
    /// * there are no experts, or more than 1024;
    /// * k is not from 1 to 32;
    /// * H or I is not a multiple of 16 from 16 to 2^20, or an expert has other sizes than the first;
    /// * an expert lacks a gate that the activation needs, or has one that the activation does not take;
    /// * a bias is not finite;
    /// * a global scale lets products overflow f32.
    pub fn with_activation(
        dtype: TokenDtype,
        top_k: usize,
        activation: Activation,
        experts: Vec<MoeExpert<'a>>,
    ) -> Result<Self, Error> {
        let first = experts.first().map(|expert| &expert.up);
        let first = first.ok_or_else(|| Error::Invalid("the layer has no experts; give at least one".into()))?;
        let sizes = MoeSizes {
            hidden: first.k(),
            intermediate: first.rows(),
            experts: experts.len(),
            named_experts: experts.len(),
            top_k,
            shared_intermediate: None,
            dtype,
            activation,
            biases: experts.iter().any(MoeExpert::is_biased),
            token_format: TokenFormat::Bits16,
            input_scales: false,
        };
        sizes.check()?;
        for (index, expert) in experts.iter().enumerate() {
            let checked = expert.check(&sizes, sizes.intermediate);
            checked.map_err(|error| error.at(format_args!("expert {index}")))?;
        }
        let (expert_map, input_scales, transforms) = (None, Vec::new(), Vec::new());
        Ok(Self { sizes, experts, shared: None, expert_map, input_scales, input_scale_fault: None, transforms })
    }

    /// Adds a shared expert, which every token has. Its I may differ from the layer's I.
    ///
    /// # Errors
    /// The errors of [`MoeWeights::with_activation`], and [`Error::Invalid`] if the layer already has input scales or
    /// transforms.
    pub fn with_shared(mut self, shared: MoeExpert<'a>) -> Result<Self, Error> {
        let (width, biases) = (shared.up.rows(), self.sizes.biases || shared.is_biased());
        let sizes = MoeSizes { shared_intermediate: Some(width), biases, ..self.sizes };
        sizes.check()?;
        shared.check(&sizes, width).map_err(|error| error.at("shared expert"))?;
        if sizes.input_scales || !self.transforms.is_empty() {
            return Err(Error::Invalid(
                "the layer already has input scales or transforms; add the shared expert first, then the input scales or transforms of all experts"
                    .into(),
            ));
        }
        (self.sizes, self.shared) = (sizes, Some(shared));
        Ok(self)
    }

    /// Makes the layer a part of a larger layer. Tokens name experts of the larger layer, and `map` holds this layer's
    /// own number of each, or a negative number for an expert that this layer does not hold.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the map is empty, or an entry is not below the number of experts.
    pub fn with_expert_map(mut self, map: Vec<i32>) -> Result<Self, Error> {
        let sizes = MoeSizes { named_experts: map.len(), ..self.sizes };
        sizes.check().map_err(|error| error.at("expert map"))?;
        let is_none = |&&number: &&i32| usize::try_from(number).is_ok_and(|number| number >= self.experts.len());
        if let Some(&number) = map.iter().find(is_none) {
            let (id, experts) = (map.iter().position(|&other| other == number).unwrap_or(0), self.experts.len());
            return Err(Error::Invalid(format!(
                "expert map: entry {id} is {number}, but the layer has {experts} experts; give a number below {experts}, \
                 or -1 for an expert that this layer does not hold"
            )));
        }
        (self.sizes, self.expert_map) = (sizes, Some(map));
        Ok(self)
    }

    /// Sets the format in which tokens and the intermediate are multiplied. The default is 16-bit.
    pub fn with_token_format(mut self, token_format: TokenFormat) -> Self {
        self.sizes.token_format = token_format;
        self
    }

    /// Sets the input scales of the experts, and of the shared expert behind them if there is one. A layer without
    /// input scales gives each token its own global scale. Only [`TokenFormat::Nvfp4`] uses input scales.
    ///
    /// # Errors
    /// If their number is not the number of experts, or a scale is not from 2⁻¹⁰⁰ to 2¹⁰⁰.
    pub fn with_input_scales(mut self, input_scales: Vec<InputScales>) -> Result<Self, Error> {
        let expected = self.experts.len() + usize::from(self.shared.is_some());
        if input_scales.len() != expected {
            let what = "input scales (one per expert, including the shared expert)";
            return Err(Error::Mismatch { what, got: input_scales.len(), expected });
        }
        for (expert, scales) in input_scales.iter().enumerate() {
            scales.check().map_err(|error| error.at(format_args!("expert {expert}")))?;
        }
        (self.input_scales, self.sizes.input_scales) = (input_scales, true);
        Ok(self)
    }

    /// Removes the input scales and records why they cannot be used. [`MoeStep::new`] then refuses
    /// [`TokenFormat::Nvfp4`] with this reason.
    pub fn without_input_scales(mut self, reason: String) -> Self {
        (self.input_scales, self.sizes.input_scales) = (Vec::new(), false);
        self.input_scale_fault = Some(reason);
        self
    }

    /// Sets the transforms of the experts, and of the shared expert behind them if there is one. Only the CPU computes
    /// layers with transforms.
    ///
    /// # Errors
    /// If their number is not the number of experts, or a transform does not fit K of its projection.
    pub fn with_transforms(mut self, transforms: Vec<ExpertTransforms>) -> Result<Self, Error> {
        let experts = self.experts.iter().chain(&self.shared);
        let (got, expected) = (transforms.len(), experts.clone().count());
        if got != expected {
            let what = "transforms (one entry per expert, including the shared expert)";
            return Err(Error::Mismatch { what, got, expected });
        }
        for (index, (of_expert, expert)) in transforms.iter().zip(experts).enumerate() {
            for (transform, matrix) in [(&of_expert.gate_up, &expert.up), (&of_expert.down, &expert.down)] {
                let checked = transform.as_ref().map_or(Ok(()), |transform| transform.check(matrix.k()));
                checked.map_err(|error| error.at(format_args!("expert {index}")))?;
            }
        }
        let has_none = transforms.iter().all(|of_expert| *of_expert == ExpertTransforms::default());
        self.transforms = if has_none { Vec::new() } else { transforms };
        Ok(self)
    }

    /// Transforms of an expert; the shared expert has number E. `None` if no expert of the layer has any.
    pub fn transforms(&self, expert: usize) -> Option<&ExpertTransforms> {
        self.transforms.get(expert)
    }

    /// Refuses a layer with transforms, for a backend that does not compute them.
    ///
    /// # Errors
    /// [`Error::NotComputed`] if an expert has a transform.
    pub fn check_no_transforms(&self, backend: &str) -> Result<(), Error> {
        if self.transforms.is_empty() {
            return Ok(());
        }
        Err(Error::NotComputed(format!(
            "{backend} does not change tokens inside of experts (factors of NVFP4_AWQ that differ between experts or act on \
             the intermediate, Hadamard transforms); use the CPU, or fold factors into the weights with `nvfp4 dequantize` \
             and `nvfp4 quantize`"
        )))
    }

    /// Why tokens cannot be multiplied in NVFP4. `None` if they can.
    pub fn input_scale_fault(&self) -> Option<&str> {
        self.input_scale_fault.as_deref()
    }

    /// Input scales of an expert; the shared expert has number E. `None` if each token has its own global scale.
    pub fn input_scales(&self, expert: usize) -> Option<InputScales> {
        self.input_scales.get(expert).copied()
    }

    /// Sizes of the layer.
    pub fn sizes(&self) -> MoeSizes {
        self.sizes
    }

    /// The experts in order, without the shared expert.
    pub fn experts(&self) -> &[MoeExpert<'a>] {
        &self.experts
    }

    /// The shared expert, which every token has.
    pub fn shared(&self) -> Option<&MoeExpert<'a>> {
        self.shared.as_ref()
    }

    /// The layer's own number of each expert that tokens can name, negative for experts that the layer does not hold.
    pub fn expert_map(&self) -> Option<&[i32]> {
        self.expert_map.as_deref()
    }

    /// Number of bytes of values and scales that a step reads if `hit` of the layer's own experts have rows: the bytes
    /// of `hit` experts and of the shared expert.
    pub fn bytes(&self, hit: usize) -> usize {
        let matrices = if self.sizes.activation.has_gate() { 3 } else { 2 };
        let expert = |intermediate: usize| matrices * self.sizes.hidden * intermediate / 16 * 9;
        hit * expert(self.sizes.intermediate) + self.sizes.shared_intermediate.map_or(0, expert)
    }
}

/// Inputs of a forward pass, unchecked. [`MoeStep::new`] checks them.
#[derive(Clone, Debug, Default)]
pub struct MoeInputs<'a> {
    /// T: number of tokens, may be 0.
    pub tokens: usize,
    /// X: bits of the token type, one row of H elements per token.
    pub hidden: Cow<'a, [u16]>,
    /// Number of elements from the start of one token's row to the start of the next row, at least H.
    pub stride: usize,
    /// `[T, k]`: experts of each token.
    pub ids: Cow<'a, [i32]>,
    /// `[T, k]`: weights of the choices.
    pub weights: Cow<'a, [f32]>,
    /// Whether weights multiply the tokens instead of the experts' results. Requires k = 1. A shared expert gets the
    /// tokens unweighted.
    pub weights_on_input: bool,
    /// `[T]`: weights of the shared expert. `None` means 1 for each token.
    pub shared_weights: Option<Cow<'a, [f32]>>,
}

/// Inputs of one forward pass, checked against the layer.
#[derive(Clone, Debug)]
pub struct MoeStep<'a> {
    sizes: MoeSizes,
    inputs: MoeInputs<'a>,
    rows: Rows,
}

impl<'a> MoeStep<'a> {
    /// Checks the inputs and sorts their rows by expert.
    ///
    /// # Errors
    /// If a length or the stride does not match the layer, weights are on the input of a layer with k > 1, there are
    /// weights of a shared expert but no shared expert, or tokens are NVFP4 and the layer's input scales cannot be used.
    pub fn new(layer: &MoeWeights<'_>, inputs: MoeInputs<'a>) -> Result<Self, Error> {
        if let (TokenFormat::Nvfp4, Some(fault)) = (layer.sizes.token_format, &layer.input_scale_fault) {
            return Err(no_nvfp4_tokens(fault));
        }
        Self::of_sizes(layer.sizes(), layer.expert_map(), inputs)
    }

    /// Makes a step for a layer of these sizes. Does the same as [`MoeStep::new`] without access to the layer's
    /// weights.
    ///
    /// # Errors
    /// The errors of [`MoeStep::new`].
    pub fn of_sizes(sizes: MoeSizes, expert_map: Option<&[i32]>, inputs: MoeInputs<'a>) -> Result<Self, Error> {
        let (tokens, hidden) = (inputs.tokens, sizes.hidden);
        let choices = tokens.checked_mul(sizes.top_k).filter(|&choices| choices < NO_ROW as usize);
        let choices = choices.ok_or(Error::TooLarge)?;
        if inputs.stride < hidden {
            let stride = inputs.stride;
            return Err(Error::Invalid(format!(
                "the row stride of the hidden states is {stride} elements, less than the hidden size {hidden}; give the \
                 number of elements from one token to the next"
            )));
        }
        let elements = match tokens {
            0 => 0,
            _ => (tokens - 1)
                .checked_mul(inputs.stride)
                .and_then(|all| all.checked_add(hidden))
                .ok_or(Error::TooLarge)?,
        };
        if inputs.hidden.len() < elements {
            let got = inputs.hidden.len();
            return Err(Error::Mismatch { what: "elements of the hidden states", got, expected: elements });
        }
        let shared_weights = inputs.shared_weights.as_deref();
        for (what, got, expected) in [
            ("top-k ids (k per token)", inputs.ids.len(), choices),
            ("top-k weights (k per token)", inputs.weights.len(), choices),
            ("weights of the shared expert (one per token)", shared_weights.map_or(tokens, <[f32]>::len), tokens),
        ] {
            if got != expected {
                return Err(Error::Mismatch { what, got, expected });
            }
        }
        if shared_weights.is_some() && sizes.shared_intermediate.is_none() {
            return Err(Error::Invalid(
                "weights of a shared expert were given, but the layer has no shared expert; leave them out".into(),
            ));
        }
        if inputs.weights_on_input && sizes.top_k > 1 {
            return Err(Error::Invalid(
                "weights on the input require a layer with one expert per token; put the weights on the results".into(),
            ));
        }
        check_bytes(&sizes, tokens, choices)?;
        let rows = Rows::new(&inputs.ids, sizes.top_k, sizes.experts, expert_map);
        Ok(Self { sizes, inputs, rows })
    }

    /// The layer's sizes.
    pub fn sizes(&self) -> MoeSizes {
        self.sizes
    }

    /// T: number of tokens.
    pub fn tokens(&self) -> usize {
        self.inputs.tokens
    }

    /// Inputs of the step.
    pub fn inputs(&self) -> &MoeInputs<'a> {
        &self.inputs
    }

    /// Rows of each expert.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The H elements of a token.
    pub fn token(&self, token: usize) -> &[u16] {
        &self.inputs.hidden[token * self.inputs.stride..][..self.sizes.hidden]
    }

    /// Factor of a choice's row in the output: 1 if weights are on the input.
    pub fn row_weight(&self, choice: usize) -> f32 {
        if self.inputs.weights_on_input { 1.0 } else { self.inputs.weights[choice] }
    }

    /// Factor of the shared expert's row of a token in the output.
    pub fn shared_weight(&self, token: usize) -> f32 {
        self.inputs.shared_weights.as_ref().map_or(1.0, |weights| weights[token])
    }

    /// Checks that this step was made for a layer of these sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was made for other sizes.
    pub fn check_fits(&self, sizes: MoeSizes) -> Result<(), Error> {
        if self.sizes == sizes {
            return Ok(());
        }
        Err(Error::Invalid("this step was made for another layer; make it from the weights that were prepared".into()))
    }
}

/// Refuses sizes whose f64 reference of all rows exceeds the address space.
fn check_bytes(sizes: &MoeSizes, tokens: usize, choices: usize) -> Result<(), Error> {
    let widest = sizes.hidden.max(sizes.intermediate).max(sizes.shared_intermediate.unwrap_or(0));
    let bytes = choices.checked_add(tokens).and_then(|rows| rows.checked_mul(widest)?.checked_mul(32));
    match bytes.and_then(|bytes| isize::try_from(bytes).ok()) {
        Some(_) => Ok(()),
        None => Err(Error::TooLarge),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, k: usize, global: f32) -> Matrix<'static> {
        Matrix::new(rows, k, vec![0x11; rows * k / 2], vec![0x38; rows * k / BLOCK], global).unwrap()
    }

    fn expert(hidden: usize, intermediate: usize) -> MoeExpert<'static> {
        let inner = || matrix(intermediate, hidden, 1.0);
        MoeExpert::gated(inner(), inner(), matrix(hidden, intermediate, 1.0))
    }

    fn layer(top_k: usize) -> MoeWeights<'static> {
        MoeWeights::new(TokenDtype::Bf16, top_k, vec![expert(32, 48), expert(32, 48)]).unwrap()
    }

    fn inputs(tokens: usize, top_k: usize) -> MoeInputs<'static> {
        MoeInputs {
            tokens,
            hidden: vec![0; tokens * 32].into(),
            stride: 32,
            ids: vec![0; tokens * top_k].into(),
            weights: vec![1.0; tokens * top_k].into(),
            ..Default::default()
        }
    }

    #[test]
    fn refused_weights_name_expert_and_projection() {
        let new = |top_k, experts| MoeWeights::new(TokenDtype::F16, top_k, experts).map_err(|error| error.to_string());
        for (top_k, experts, text) in [
            (1, vec![], "the layer has no experts"),
            (0, vec![expert(16, 16)], "top_k = 0 is not from 1 to 32"),
            (33, vec![expert(16, 16)], "top_k = 33 is not from 1 to 32"),
            (1, vec![expert(16, 24 * 16); 1025], "experts of the layer = 1025 is not from 1 to 1024"),
            (1, vec![MoeExpert { up: matrix(8, 16, 1.0), ..expert(16, 16) }], "intermediate size 8 is not"),
            (1, vec![expert(16, 32), expert(16, 16)], "expert 1: gate: rows: got 16, expected 32"),
            (1, vec![MoeExpert { down: matrix(16, 16, 1.0), ..expert(16, 32) }], "expert 0: down: columns: got 16"),
            (1, vec![MoeExpert { up: matrix(16, 16, 1e36), ..expert(16, 16) }], "expert 0: up: global scale 1e36"),
        ] {
            let error = new(top_k, experts).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        assert!(new(32, vec![expert(720, 176); 1024]).is_ok());
        let error = layer(1).with_shared(expert(48, 16)).unwrap_err().to_string();
        assert!(error.starts_with("shared expert: gate: columns: got 48, expected 32"), "{error}");
        assert_eq!(layer(1).with_shared(expert(32, 96)).unwrap().sizes().shared_intermediate, Some(96));
    }

    #[test]
    fn gates_must_match_the_activation_and_biases_the_sizes() {
        let new = |activation, expert| {
            MoeWeights::with_activation(TokenDtype::F16, 1, activation, vec![expert]).map_err(|error| error.to_string())
        };
        let ungated = || MoeExpert::ungated(matrix(16, 16, 1.0), matrix(16, 16, 1.0));
        let biased = |expert: MoeExpert<'static>, count: usize| {
            expert.with_biases(Biases { down: Some(Bias::F32(vec![1.0; count].into())), ..Default::default() })
        };
        let error = new(Activation::Silu, ungated()).unwrap_err();
        assert_eq!(error, "expert 0: the activation silu needs a gate, but the expert has none");
        let error = new(Activation::Relu2, expert(16, 16)).unwrap_err();
        assert!(error.starts_with("expert 0: the activation relu2 takes no gate"), "{error}");
        let error = new(Activation::Relu2, biased(ungated(), 15)).unwrap_err();
        assert_eq!(error, "expert 0: down: biases: got 15, expected 16");
        let of_gate = Biases { gate: Some(Bias::Token(vec![0; 16].into())), ..Default::default() };
        assert!(new(Activation::Relu2, ungated().with_biases(of_gate)).is_err());
        let error = new(Activation::SiluLimit { limit: 0.0 }, expert(16, 16)).unwrap_err();
        assert!(error.starts_with("activation: limit = 0 is not"), "{error}");
        let sizes = new(Activation::GPT_OSS, biased(expert(32, 16), 32)).unwrap().sizes();
        assert_eq!((sizes.activation, sizes.biases), (Activation::GPT_OSS, true));
        let layer = new(Activation::Silu, expert(16, 16)).unwrap();
        assert!(layer.with_shared(biased(expert(16, 48), 16)).unwrap().sizes().biases);
        assert_eq!(new(Activation::Relu2, ungated()).unwrap().bytes(1), 2 * 16 * 16 * 9 / 16);
    }

    #[test]
    fn a_map_names_experts_of_the_layer() {
        let sizes = layer(1).with_expert_map(vec![-1, 1, 0, -1]).unwrap().sizes();
        assert_eq!((sizes.experts, sizes.named_experts), (2, 4));
        let error = layer(1).with_expert_map(vec![-1, 2]).unwrap_err().to_string();
        assert!(error.starts_with("expert map: entry 1 is 2, but the layer has 2 experts"), "{error}");
        assert!(layer(1).with_expert_map(vec![]).is_err());
    }

    #[test]
    fn a_step_must_fit_its_layer() {
        let refused = |change: &dyn Fn(&mut MoeInputs<'static>)| {
            let mut inputs = inputs(3, 2);
            change(&mut inputs);
            MoeStep::new(&layer(2), inputs).unwrap_err().to_string()
        };
        for (error, text) in [
            (
                refused(&|inputs| inputs.stride = 31),
                "row stride of the hidden states is 31 elements, less than the hidden size 32",
            ),
            (refused(&|inputs| inputs.stride = 48), "elements of the hidden states: got 96, expected 128"),
            (refused(&|inputs| inputs.stride = usize::MAX), "exceeds the address space of this machine"),
            (refused(&|inputs| inputs.tokens = usize::MAX), "exceeds the address space of this machine"),
            (refused(&|inputs| inputs.ids = vec![0; 5].into()), "top-k ids (k per token): got 5, expected 6"),
            (refused(&|inputs| inputs.weights = vec![0.0; 7].into()), "top-k weights (k per token): got 7"),
            (refused(&|inputs| inputs.weights_on_input = true), "weights on the input require a layer with one expert"),
            (
                refused(&|inputs| inputs.shared_weights = Some(vec![0.0; 3].into())),
                "the layer has no shared expert; leave them",
            ),
            (refused(&|inputs| inputs.shared_weights = Some(vec![0.0; 2].into())), "weights of the shared expert (one"),
        ] {
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_step_may_have_no_tokens_or_a_stride() {
        let step = MoeStep::new(&layer(2), inputs(0, 2)).unwrap();
        assert_eq!((step.tokens(), step.rows().count()), (0, 0));
        let mut apart = inputs(2, 2);
        (apart.stride, apart.hidden) = (40, (0..72).collect::<Vec<u16>>().into());
        let step = MoeStep::new(&layer(2), apart).unwrap();
        assert_eq!((step.token(1)[0], step.token(1).len()), (40, 32));
        assert!(step.check_fits(layer(1).sizes()).is_err() && step.check_fits(layer(2).sizes()).is_ok());
    }

    #[test]
    fn bytes_count_hit_experts_and_the_shared_expert() {
        assert_eq!(layer(1).bytes(2), 2 * 3 * 32 * 48 * 9 / 16);
        assert_eq!(layer(1).with_shared(expert(32, 16)).unwrap().bytes(0), 3 * 32 * 16 * 9 / 16);
    }
}
