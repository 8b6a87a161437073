//! The weights of a layer and the tokens of a step. Every validation of them stands here.

use std::borrow::Cow;

use kernels_gpu::lists::{MAX_EXPERTS, MAX_TOP_K, NO_ROW};

use super::activation::Activation;
use super::rows::Rows;
use crate::bias::Bias;
use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};
use crate::fp4::InputScales;
use crate::linear::no_nvfp4_tokens;
use crate::problem::{MAX_K, TokenDtype, TokenFormat};

/// Everything about a layer that does not change from step to step, but its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MoeSizes {
    /// H: elements of a token; a multiple of 16.
    pub hidden: usize,
    /// I: rows of gate and up, a multiple of 16.
    pub intermediate: usize,
    /// E: experts that the layer holds, from 1 to 512.
    pub experts: usize,
    /// Experts that a token can name: the length of the expert map, or E.
    pub named_experts: usize,
    /// k: experts that a token names, from 1 to 32.
    pub top_k: usize,
    /// I of the shared expert, if there is one; a multiple of 16.
    pub shared_intermediate: Option<usize>,
    /// The type of tokens, of the intermediate and of the output.
    pub dtype: TokenDtype,
    /// What becomes of gate and up.
    pub activation: Activation,
    /// Whether any projection has biases.
    pub biases: bool,
    /// As what tokens and the intermediate are multiplied.
    pub token_format: TokenFormat,
    /// Whether tokens in NVFP4 have the global scales that their experts come with ([`InputScales`]), and not each one of its own.
    pub input_scales: bool,
}

impl MoeSizes {
    /// Whether tokens are multiplied by the global scales that experts come with.
    pub fn has_input_scales(&self) -> bool {
        self.input_scales && self.token_format == TokenFormat::Nvfp4
    }

    /// Checks every size.
    ///
    /// # Errors
    /// What is out of range, with the range.
    pub fn check(&self) -> Result<(), Error> {
        let within = |what: &str, got: usize, most: usize| match got {
            got if (1..=most).contains(&got) => Ok(()),
            got => Err(Error::Invalid(format!("{what} = {got} is not from 1 to {most}"))),
        };
        within("top_k", self.top_k, MAX_TOP_K as usize)?;
        within("experts of the layer", self.experts, MAX_EXPERTS as usize)?;
        within("experts that tokens name", self.named_experts, i32::MAX as usize)?;
        check_width("hidden size", self.hidden)?;
        check_width("intermediate size", self.intermediate)?;
        self.activation.check()?;
        self.shared_intermediate.map_or(Ok(()), |size| check_width("intermediate size of the shared expert", size))
    }
}

/// Checks a size that is K of a product.
fn check_width(what: &str, size: usize) -> Result<(), Error> {
    if size == 0 || size > MAX_K || !size.is_multiple_of(BLOCK) {
        return Err(Error::Invalid(format!(
            "{what} {size} is not a multiple of 16 from 16 to 2^20; pad the weights with zeros to whole blocks of 16"
        )));
    }
    Ok(())
}

/// An expert: gate and up `[I, H]`, down `[H, I]`, each with a global scale of its own. Gate is there unless the layer's
/// activation has none.
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

/// The biases of an expert's projections, as far as they have some; zero otherwise.
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
    /// An expert with a gate and without biases.
    pub fn gated(gate: Matrix<'a>, up: Matrix<'a>, down: Matrix<'a>) -> Self {
        Self { gate: Some(gate), up, down, biases: Biases::default() }
    }

    /// An expert without gate and without biases.
    pub fn ungated(up: Matrix<'a>, down: Matrix<'a>) -> Self {
        Self { gate: None, up, down, biases: Biases::default() }
    }

    /// The expert with biases.
    pub fn with_biases(self, biases: Biases<'a>) -> Self {
        Self { biases, ..self }
    }

    /// The projections that there are, by their names, with their biases.
    pub fn projections(&self) -> impl Iterator<Item = (&'static str, &Matrix<'a>, Option<&Bias<'a>>)> {
        let Biases { gate, up, down } = &self.biases;
        let of_gate = self.gate.as_ref().map(|matrix| ("gate", matrix, gate.as_ref()));
        of_gate.into_iter().chain([("up", &self.up, up.as_ref()), ("down", &self.down, down.as_ref())])
    }

    /// Whether a projection has biases.
    fn is_biased(&self) -> bool {
        let Biases { gate, up, down } = &self.biases;
        gate.is_some() || up.is_some() || down.is_some()
    }

    /// Checks whether the gate is there, sizes, scales and biases.
    fn check(&self, sizes: &MoeSizes, intermediate: usize) -> Result<(), Error> {
        let &MoeSizes { hidden, dtype, activation, .. } = sizes;
        match (activation.has_gate(), self.gate.is_some() || self.biases.gate.is_some()) {
            (true, _) if self.gate.is_none() => {
                return Err(Error::Invalid(format!("no gate, which the activation {activation} needs")));
            }
            (false, true) => {
                let text = format!("the activation {activation} takes no gate and no biases of one; leave them out");
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

/// Refuses a global scale of weights with which a product of an f16 token leaves f32.
pub(crate) fn check_global_scale(global: f32) -> Result<(), Error> {
    /// The largest magnitude of `e2m1 × e4m3`.
    const MAX_NUMBER: f64 = (e2m1::MAX * e4m3::MAX) as f64;
    /// The largest f16.
    const MAX_TOKEN: f64 = 65504.0;
    if f64::from(global) * MAX_NUMBER * MAX_TOKEN <= f64::from(f32::MAX) {
        return Ok(());
    }
    let what =
        format!("global scale {global:e} lets a product with an f16 token overflow f32; quantize the tensor again");
    Err(Error::Invalid(what))
}

/// The weights of a layer.
#[derive(Clone, Debug)]
pub struct MoeWeights<'a> {
    sizes: MoeSizes,
    experts: Vec<MoeExpert<'a>>,
    shared: Option<MoeExpert<'a>>,
    expert_map: Option<Vec<i32>>,
    /// Of the experts and, behind them, of the shared one; empty if there are none.
    input_scales: Vec<InputScales>,
    /// Why tokens cannot be multiplied in NVFP4; `None` if they can.
    input_scale_fault: Option<String>,
}

impl<'a> MoeWeights<'a> {
    /// A layer of these experts, of which a token of type `dtype` names `top_k`, with the activation silu(gate)·up.
    ///
    /// # Errors
    /// As [`MoeWeights::with_activation`].
    pub fn new(dtype: TokenDtype, top_k: usize, experts: Vec<MoeExpert<'a>>) -> Result<Self, Error> {
        Self::with_activation(dtype, top_k, Activation::Silu, experts)
    }

    /// A layer of these experts, of which a token of type `dtype` names `top_k`.
    ///
    /// # Errors
    /// If there are none or more than 512, k is 0 or more than 32, H or I is no multiple of 16, sizes differ, a gate lacks or is too
    /// many, a bias is not finite, or a global scale takes weights out of f32. It names the expert and the projection.
    pub fn with_activation(
        dtype: TokenDtype,
        top_k: usize,
        activation: Activation,
        experts: Vec<MoeExpert<'a>>,
    ) -> Result<Self, Error> {
        let first = experts.first().map(|expert| &expert.up);
        let first = first.ok_or_else(|| Error::Invalid("a layer without experts; give it at least one".into()))?;
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
        let (expert_map, input_scales) = (None, Vec::new());
        Ok(Self { sizes, experts, shared: None, expert_map, input_scales, input_scale_fault: None })
    }

    /// The layer with an expert besides that every token has, with an I of its own.
    ///
    /// # Errors
    /// As [`MoeWeights::new`].
    pub fn with_shared(mut self, shared: MoeExpert<'a>) -> Result<Self, Error> {
        let (width, biases) = (shared.up.rows(), self.sizes.biases || shared.is_biased());
        let sizes = MoeSizes { shared_intermediate: Some(width), biases, ..self.sizes };
        sizes.check()?;
        shared.check(&sizes, width).map_err(|error| error.at("shared expert"))?;
        if sizes.input_scales {
            return Err(Error::Invalid("input scales come after the shared expert, with one for it".into()));
        }
        (self.sizes, self.shared) = (sizes, Some(shared));
        Ok(self)
    }

    /// The layer as a part of a larger one: tokens name experts of that one, and `map` has this layer's number of each, or a
    /// negative number for those that it does not hold.
    ///
    /// # Errors
    /// If the map is empty, or has a number that is no expert's.
    pub fn with_expert_map(mut self, map: Vec<i32>) -> Result<Self, Error> {
        let sizes = MoeSizes { named_experts: map.len(), ..self.sizes };
        sizes.check().map_err(|error| error.at("expert map"))?;
        let is_none = |&&number: &&i32| usize::try_from(number).is_ok_and(|number| number >= self.experts.len());
        if let Some(&number) = map.iter().find(is_none) {
            let (id, experts) = (map.iter().position(|&other| other == number).unwrap_or(0), self.experts.len());
            return Err(Error::Invalid(format!(
                "expert map: expert {id} is number {number} of a layer with {experts} experts; give a number below \
                 {experts}, or -1 for an expert that lives elsewhere"
            )));
        }
        (self.sizes, self.expert_map) = (sizes, Some(map));
        Ok(self)
    }

    /// The layer with its tokens, and its intermediate, multiplied as this; as 16 bits unless told otherwise.
    pub fn with_token_format(mut self, token_format: TokenFormat) -> Self {
        self.sizes.token_format = token_format;
        self
    }

    /// The layer with the global scales of its experts' tokens, and at last of the shared expert's, if there is one. Without them each
    /// token has a global scale of its own. Only [`TokenFormat::Nvfp4`] looks at them.
    ///
    /// # Errors
    /// If there is not one for each expert, or one is not from 2⁻¹⁰⁰ to 2¹⁰⁰.
    pub fn with_input_scales(mut self, input_scales: Vec<InputScales>) -> Result<Self, Error> {
        let expected = self.experts.len() + usize::from(self.shared.is_some());
        if input_scales.len() != expected {
            let what = "input scales (one for each expert, and the shared one)";
            return Err(Error::Mismatch { what, got: input_scales.len(), expected });
        }
        for (expert, scales) in input_scales.iter().enumerate() {
            scales.check().map_err(|error| error.at(format_args!("expert {expert}")))?;
        }
        (self.input_scales, self.sizes.input_scales) = (input_scales, true);
        Ok(self)
    }

    /// The layer with input scales that are incomplete or cannot be used, for this reason. Then [`MoeStep::new`] refuses
    /// [`TokenFormat::Nvfp4`].
    pub fn without_input_scales(mut self, reason: String) -> Self {
        (self.input_scales, self.sizes.input_scales) = (Vec::new(), false);
        self.input_scale_fault = Some(reason);
        self
    }

    /// Why tokens cannot be multiplied in NVFP4; none if they can.
    pub fn input_scale_fault(&self) -> Option<&str> {
        self.input_scale_fault.as_deref()
    }

    /// The global scales of an expert's tokens, of the shared one by the number behind the last; none if tokens have their own.
    pub fn input_scales(&self, expert: usize) -> Option<InputScales> {
        self.input_scales.get(expert).copied()
    }

    /// The sizes.
    pub fn sizes(&self) -> MoeSizes {
        self.sizes
    }

    /// The experts in order.
    pub fn experts(&self) -> &[MoeExpert<'a>] {
        &self.experts
    }

    /// The expert that every token has.
    pub fn shared(&self) -> Option<&MoeExpert<'a>> {
        self.shared.as_ref()
    }

    /// The layer's number of each expert that tokens can name, negative for those that it does not hold.
    pub fn expert_map(&self) -> Option<&[i32]> {
        self.expert_map.as_deref()
    }

    /// Bytes of the experts' values and scales, `hit` of the layer's own experts and the shared one: what a step that hits so
    /// many has to read.
    pub fn bytes(&self, hit: usize) -> usize {
        let matrices = if self.sizes.activation.has_gate() { 3 } else { 2 };
        let expert = |intermediate: usize| matrices * self.sizes.hidden * intermediate / 16 * 9;
        hit * expert(self.sizes.intermediate) + self.sizes.shared_intermediate.map_or(0, expert)
    }
}

/// What comes with each forward pass, as a caller has it. [`MoeStep::new`] checks it.
#[derive(Clone, Debug, Default)]
pub struct MoeInputs<'a> {
    /// T; may be 0.
    pub tokens: usize,
    /// X: bits of the layer's type, a row of H for each token.
    pub hidden: Cow<'a, [u16]>,
    /// Elements from one token's row to the next one's, at least H.
    pub stride: usize,
    /// `[T, k]`: the experts of each token.
    pub ids: Cow<'a, [i32]>,
    /// `[T, k]`: their weights.
    pub weights: Cow<'a, [f32]>,
    /// Whether weights multiply the tokens (k = 1), rather than the experts' results. A shared expert has the tokens as they are.
    pub weights_on_input: bool,
    /// `[T]`: the shared expert's weights; 1 if there are none.
    pub shared_weights: Option<Cow<'a, [f32]>>,
}

/// The tokens of one forward pass, checked against the layer.
#[derive(Clone, Debug)]
pub struct MoeStep<'a> {
    sizes: MoeSizes,
    inputs: MoeInputs<'a>,
    rows: Rows,
}

impl<'a> MoeStep<'a> {
    /// Checks lengths, and finds out which tokens each expert has.
    ///
    /// # Errors
    /// If a length or the stride does not fit, weights on the input are asked for with more than one expert a token or with a
    /// shared expert, there are shared weights but no shared expert, or tokens are NVFP4 and the layer's input scales
    /// cannot be used.
    pub fn new(layer: &MoeWeights<'_>, inputs: MoeInputs<'a>) -> Result<Self, Error> {
        if let (TokenFormat::Nvfp4, Some(fault)) = (layer.sizes.token_format, &layer.input_scale_fault) {
            return Err(no_nvfp4_tokens(fault));
        }
        Self::of_sizes(layer.sizes(), layer.expert_map(), inputs)
    }

    /// The step of a layer of these sizes: [`MoeStep::new`] where the layer's weights are gone.
    ///
    /// # Errors
    /// As [`MoeStep::new`].
    pub fn of_sizes(sizes: MoeSizes, expert_map: Option<&[i32]>, inputs: MoeInputs<'a>) -> Result<Self, Error> {
        let (tokens, hidden) = (inputs.tokens, sizes.hidden);
        let choices = tokens.checked_mul(sizes.top_k).filter(|&choices| choices < NO_ROW as usize);
        let choices = choices.ok_or(Error::TooLarge)?;
        if inputs.stride < hidden {
            let stride = inputs.stride;
            return Err(Error::Invalid(format!(
                "the hidden states' row stride is {stride} elements, less than the hidden size {hidden}; give the \
                 elements from one token to the next"
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
            ("top-k ids (k for each token)", inputs.ids.len(), choices),
            ("top-k weights (k for each token)", inputs.weights.len(), choices),
            ("weights of the shared expert (one for each token)", shared_weights.map_or(tokens, <[f32]>::len), tokens),
        ] {
            if got != expected {
                return Err(Error::Mismatch { what, got, expected });
            }
        }
        if shared_weights.is_some() && sizes.shared_intermediate.is_none() {
            return Err(Error::Invalid("weights of a shared expert, but the layer has none; leave them out".into()));
        }
        if inputs.weights_on_input && sizes.top_k > 1 {
            return Err(Error::Invalid(
                "weights on the input are for layers with one expert a token; multiply the results".into(),
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

    /// T.
    pub fn tokens(&self) -> usize {
        self.inputs.tokens
    }

    /// What it was made of.
    pub fn inputs(&self) -> &MoeInputs<'a> {
        &self.inputs
    }

    /// The tokens of each expert.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The bits of a token, H of them.
    pub fn token(&self, token: usize) -> &[u16] {
        &self.inputs.hidden[token * self.inputs.stride..][..self.sizes.hidden]
    }

    /// The weight with which a choice's row is added: 1 if weights are on the input.
    pub fn row_weight(&self, choice: usize) -> f32 {
        if self.inputs.weights_on_input { 1.0 } else { self.inputs.weights[choice] }
    }

    /// The weight with which the shared expert's row of a token is added.
    pub fn shared_weight(&self, token: usize) -> f32 {
        self.inputs.shared_weights.as_ref().map_or(1.0, |weights| weights[token])
    }

    /// Checks that this step was made for a layer of these sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was not.
    pub fn check_fits(&self, sizes: MoeSizes) -> Result<(), Error> {
        if self.sizes == sizes {
            return Ok(());
        }
        Err(Error::Invalid("this step was made for another layer: build it from the prepared weights".into()))
    }
}

/// Refuses what no buffer can hold: the f64 reference of every row.
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
    fn weights_are_refused_with_expert_and_projection() {
        let new = |top_k, experts| MoeWeights::new(TokenDtype::F16, top_k, experts).map_err(|error| error.to_string());
        for (top_k, experts, text) in [
            (1, vec![], "a layer without experts"),
            (0, vec![expert(16, 16)], "top_k = 0 is not from 1 to 32"),
            (33, vec![expert(16, 16)], "top_k = 33 is not from 1 to 32"),
            (1, vec![expert(16, 24 * 16); 513], "experts of the layer = 513 is not from 1 to 512"),
            (1, vec![MoeExpert { up: matrix(8, 16, 1.0), ..expert(16, 16) }], "intermediate size 8 is not"),
            (1, vec![expert(16, 32), expert(16, 16)], "expert 1: gate: rows: got 16, expected 32"),
            (1, vec![MoeExpert { down: matrix(16, 16, 1.0), ..expert(16, 32) }], "expert 0: down: columns: got 16"),
            (1, vec![MoeExpert { up: matrix(16, 16, 1e36), ..expert(16, 16) }], "expert 0: up: global scale 1e36"),
        ] {
            let error = new(top_k, experts).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        assert!(new(32, vec![expert(720, 176); 512]).is_ok());
        let error = layer(1).with_shared(expert(48, 16)).unwrap_err().to_string();
        assert!(error.starts_with("shared expert: gate: columns: got 48, expected 32"), "{error}");
        assert_eq!(layer(1).with_shared(expert(32, 96)).unwrap().sizes().shared_intermediate, Some(96));
    }

    #[test]
    fn a_gate_is_there_if_the_activation_has_one_and_biases_fit() {
        let new = |activation, expert| {
            MoeWeights::with_activation(TokenDtype::F16, 1, activation, vec![expert]).map_err(|error| error.to_string())
        };
        let ungated = || MoeExpert::ungated(matrix(16, 16, 1.0), matrix(16, 16, 1.0));
        let biased = |expert: MoeExpert<'static>, count: usize| {
            expert.with_biases(Biases { down: Some(Bias::F32(vec![1.0; count].into())), ..Default::default() })
        };
        let error = new(Activation::Silu, ungated()).unwrap_err();
        assert_eq!(error, "expert 0: no gate, which the activation silu needs");
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
    fn a_map_names_experts_of_the_layer_or_none() {
        let sizes = layer(1).with_expert_map(vec![-1, 1, 0, -1]).unwrap().sizes();
        assert_eq!((sizes.experts, sizes.named_experts), (2, 4));
        let error = layer(1).with_expert_map(vec![-1, 2]).unwrap_err().to_string();
        assert!(error.starts_with("expert map: expert 1 is number 2 of a layer with 2 experts"), "{error}");
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
            (refused(&|inputs| inputs.stride = 31), "row stride is 31 elements, less than the hidden size 32"),
            (refused(&|inputs| inputs.stride = 48), "elements of the hidden states: got 96, expected 128"),
            (refused(&|inputs| inputs.stride = usize::MAX), "exceeds the address space of this machine"),
            (refused(&|inputs| inputs.tokens = usize::MAX), "exceeds the address space of this machine"),
            (refused(&|inputs| inputs.ids = vec![0; 5].into()), "top-k ids (k for each token): got 5, expected 6"),
            (refused(&|inputs| inputs.weights = vec![0.0; 7].into()), "top-k weights (k for each token): got 7"),
            (refused(&|inputs| inputs.weights_on_input = true), "weights on the input are for layers with one expert"),
            (refused(&|inputs| inputs.shared_weights = Some(vec![0.0; 3].into())), "the layer has none; leave them"),
            (refused(&|inputs| inputs.shared_weights = Some(vec![0.0; 2].into())), "weights of the shared expert (one"),
        ] {
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_step_may_have_no_tokens_and_rows_apart() {
        let step = MoeStep::new(&layer(2), inputs(0, 2)).unwrap();
        assert_eq!((step.tokens(), step.rows().count()), (0, 0));
        let mut apart = inputs(2, 2);
        (apart.stride, apart.hidden) = (40, (0..72).collect::<Vec<u16>>().into());
        let step = MoeStep::new(&layer(2), apart).unwrap();
        assert_eq!((step.token(1)[0], step.token(1).len()), (40, 32));
        assert!(step.check_fits(layer(1).sizes()).is_err() && step.check_fits(layer(2).sizes()).is_ok());
    }

    #[test]
    fn bytes_are_those_of_the_experts_that_are_hit_and_of_the_shared_one() {
        assert_eq!(layer(1).bytes(2), 2 * 3 * 32 * 48 * 9 / 16);
        assert_eq!(layer(1).with_shared(expert(32, 16)).unwrap().bytes(0), 3 * 32 * 16 * 9 / 16);
    }
}
