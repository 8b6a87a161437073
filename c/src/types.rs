//! Arguments of the functions for MoE layers and routers, and the enumerations.

use std::ffi::{CStr, c_char, c_void};

use nvfp4::Error;
use nvfp4::fp4::InputScales;
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::{TokenDtype, TokenFormat};

use crate::pointer::elements;

/// Type of tokens and of a layer's output.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_dtype {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16.
    BF16 = 1,
}

/// Format in which a layer multiplies its tokens and, in an MoE layer, the intermediate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_token_format {
    /// 16 bits, unchanged.
    BITS16 = 0,
    /// FP8 (e4m3) with one scale per token; weights are rounded to e4m3. Faster on Hopper for many tokens, less
    /// accurate.
    FP8 = 1,
    /// NVFP4 with input scales or one global scale per token; weights are unchanged. Among GPUs, only Blackwell
    /// supports it.
    NVFP4 = 2,
}

/// How a router selects experts and computes their weights. Among equal experts the lower index comes first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_scoring {
    /// Softmax over all experts, then the k largest.
    SOFTMAX = 0,
    /// The k largest logits, then softmax over them.
    TOP_K_SOFTMAX = 1,
    /// The largest logit; its sigmoid is a weight for the layer's input; k = 1.
    SIGMOID_TOP1 = 2,
    /// Experts by sigmoid + bias, from the groups with the largest sum of their two best experts; weights are sigmoids
    /// without bias.
    SIGMOID_GROUPS = 3,
    /// Any rule with softmax over all experts as score. The three rules use every field of `nvfp4_router`.
    RULE_SOFTMAX = 4,
    /// Any rule with the sigmoid as score.
    RULE_SIGMOID = 5,
    /// Any rule with the square root of softplus as score (DeepSeek-V4).
    RULE_SQRT_SOFTPLUS = 6,
}

/// Type of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_logit_type {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16.
    BF16 = 1,
    /// IEEE binary32.
    F32 = 2,
}

/// Sizes of an MoE layer. Zero fields mean the most common layer: SiLU, no shared expert, no biases, 16-bit tokens
/// without input scales.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_sizes {
    /// H, elements of a token: a multiple of 16.
    pub hidden: usize,
    /// I, rows of gate and up: a multiple of 16.
    pub intermediate: usize,
    /// E, experts in the layer: 1 to 1024.
    pub experts: usize,
    /// Number of experts that a token can name: the length of the expert map, or E.
    pub named_experts: usize,
    /// k, experts per token: 1 to 32.
    pub top_k: usize,
    /// I of the expert that every token uses; 0 if there is none.
    pub shared_intermediate: usize,
    /// An `nvfp4_dtype`: the token type.
    pub dtype: u32,
    /// The activation as a word with its numbers, such as "silu", "gelu-tanh", "gpt-oss" or "situ=8,4"; null for "silu".
    /// The documentation of `Activation` in the crate `nvfp4` lists the words.
    pub activation: *const c_char,
    /// Whether projections have biases.
    pub biases: bool,
    /// An `nvfp4_token_format`.
    pub token_format: u32,
    /// Whether NVFP4 tokens are quantized with their experts' input scales. If not, each token has its own global
    /// scale.
    pub input_scales: bool,
}

/// A router. The fields below `scoring` belong only to the scorings that they name.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_router {
    /// E, number of experts: 1 to 1024.
    pub experts: usize,
    /// k, experts per token: 1 to 32.
    pub top_k: usize,
    /// An `nvfp4_scoring`.
    pub scoring: u32,
    /// Whether weights are divided by their sum. For `NVFP4_SCORING_SOFTMAX`, `NVFP4_SCORING_SIGMOID_GROUPS` and rules.
    pub renormalise: bool,
    /// Number of groups of neighboring experts, all of the same size; 1: no groups. This and the fields up to `bias` are
    /// for `NVFP4_SCORING_SIGMOID_GROUPS` and rules.
    pub groups: usize,
    /// Number of groups from which experts may be selected.
    pub top_groups: usize,
    /// Factor of the final weights; 1: none.
    pub scale: f32,
    /// Biases `[E]`, finite; in the memory of the device that computes. Rules compare experts by score + bias, and
    /// without biases (null) by logit.
    pub bias: *const f32,
    /// Whether groups are compared by the sum of their two best experts, instead of the best one. Requires biases. This
    /// and all fields below are for rules.
    pub best_two: bool,
    /// One finite factor of the weights per expert, `[E]`, in the memory of the device that computes; null for none.
    pub expert_scale: *const f32,
    /// Number of the last experts that have no weights. If one of them is selected, its id is -1, and its weight stays.
    pub null_experts: usize,
    /// Table of the experts of each token id, `[vocabulary, k]`, in the memory of the device that computes. It replaces
    /// the selection by logits; null for none.
    pub table: *const i32,
    /// Number of token ids in `table`.
    pub vocabulary: usize,
}

/// Inputs and outputs of a router call. On a GPU, the pointers point to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_route_call {
    /// T, number of tokens; may be 0.
    pub tokens: usize,
    /// T rows of E numbers.
    pub logits: *const c_void,
    /// An `nvfp4_logit_type`.
    pub logit_type: u32,
    /// Elements from one row to the next, at least E.
    pub logits_stride: usize,
    /// `[T]`: the id of each token, for a router with a table; otherwise null.
    pub token_ids: *const i32,
    /// `[T, k]`: output, the experts of each token.
    pub ids: *mut i32,
    /// `[T, k]`: output, their weights.
    pub weights: *mut f32,
}

/// A projection of every expert, in a checkpoint's layout: `rows` of `k` numbers per expert.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_tensor {
    /// The first expert's values, `rows * k/2` bytes: two codes (e2m1) per byte, the code of the even column in the low
    /// four bits.
    pub values: *const u8,
    /// Bytes from one expert's values to the next expert's. On a GPU, this and the address `values` are multiples of
    /// 16.
    pub values_stride: usize,
    /// The first expert's scales, `rows * k/16` bytes (e4m3).
    pub scales: *const u8,
    /// Bytes from one expert's scales to the next expert's.
    pub scales_stride: usize,
    /// Each expert's global scale, the factor of its numbers. Always in host memory.
    pub global_scales: *const f32,
    /// Biases, `rows` per expert, always in host memory; null if there are none.
    pub bias: *const f32,
    /// Each expert's input scale from the checkpoint, always in host memory; for gate and up the larger one is used.
    /// Read only if `nvfp4_moe_sizes.input_scales` is set; then every projection must have them.
    pub input_scales: *const f32,
}

/// The projections of a layer's experts: gate and up `[I, H]`, down `[H, I]`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_tensors {
    /// Gate. Ignored if the activation has no gate.
    pub gate: nvfp4_tensor,
    /// Up.
    pub up: nvfp4_tensor,
    /// Down.
    pub down: nvfp4_tensor,
}

/// Inputs and outputs of a call of an MoE layer. On a GPU, the pointers point to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_call {
    /// T, number of tokens; may be 0.
    pub tokens: usize,
    /// T rows of H numbers of the token type. On a GPU the address is a multiple of 16 bytes.
    pub hidden_states: *const u16,
    /// Elements from one row to the next, at least H. On a GPU a multiple of 8.
    pub hidden_stride: usize,
    /// `[T, k]`: the experts of each token. A negative id contributes nothing.
    pub topk_ids: *const i32,
    /// `[T, k]`: their weights.
    pub topk_weights: *const f32,
    /// Whether weights multiply the tokens instead of the experts' results. Only if k = 1 and there is no shared
    /// expert.
    pub weights_on_input: bool,
    /// `[T]`: the shared expert's weights; null if all are 1.
    pub shared_weights: *const f32,
    /// Output: T rows of H numbers. Overlaps no input.
    pub output: *mut u16,
    /// Elements from one row of the output to the next, with the limits of `hidden_stride`.
    pub output_stride: usize,
}

impl nvfp4_moe_sizes {
    /// Returns the checked sizes.
    ///
    /// # Safety
    ///
    /// `activation` is null or points to a string that ends with a zero.
    pub(crate) unsafe fn checked(&self) -> Result<MoeSizes, Error> {
        let activation = if self.activation.is_null() {
            Activation::Silu
        } else {
            // SAFETY: the caller guarantees a string that ends with a zero.
            unsafe { CStr::from_ptr(self.activation) }.to_string_lossy().parse()?
        };
        let sizes = MoeSizes {
            hidden: self.hidden,
            intermediate: self.intermediate,
            experts: self.experts,
            named_experts: self.named_experts,
            top_k: self.top_k,
            shared_intermediate: (self.shared_intermediate > 0).then_some(self.shared_intermediate),
            dtype: token_type(self.dtype)?,
            activation,
            biases: self.biases,
            token_format: token_format(self.token_format)?,
            input_scales: self.input_scales,
        };
        sizes.check()?;
        Ok(sizes)
    }
}

impl nvfp4_moe_tensors {
    /// Returns the input scales of `experts` experts; empty if the sizes have none.
    ///
    /// # Safety
    ///
    /// Each projection's `input_scales` is null or points to `experts` numbers in host memory.
    pub(crate) unsafe fn input_scales(&self, experts: usize, sizes: &MoeSizes) -> Result<Vec<InputScales>, Error> {
        if !sizes.input_scales {
            return Ok(Vec::new());
        }
        // SAFETY: the caller guarantees `experts` numbers in host memory.
        let of = |tensor: &nvfp4_tensor| unsafe { elements(tensor.input_scales, experts, "input_scales") };
        let (up, down) = (of(&self.up)?, of(&self.down)?);
        let gate = if sizes.activation.has_gate() { of(&self.gate)? } else { up };
        let of_expert = |((gate, up), &down): ((&f32, &f32), &f32)| InputScales { gate_up: gate.max(*up), down };
        Ok(gate.iter().zip(up).zip(down).map(of_expert).collect())
    }
}

pub(crate) fn token_type(dtype: u32) -> Result<TokenDtype, Error> {
    const F16: u32 = nvfp4_dtype::F16 as u32;
    const BF16: u32 = nvfp4_dtype::BF16 as u32;
    match dtype {
        F16 => Ok(TokenDtype::F16),
        BF16 => Ok(TokenDtype::Bf16),
        other => Err(Error::Invalid(format!("dtype {other} is not an nvfp4_dtype"))),
    }
}

pub(crate) fn token_format(format: u32) -> Result<TokenFormat, Error> {
    const BITS16: u32 = nvfp4_token_format::BITS16 as u32;
    const FP8: u32 = nvfp4_token_format::FP8 as u32;
    const NVFP4: u32 = nvfp4_token_format::NVFP4 as u32;
    match format {
        BITS16 => Ok(TokenFormat::Bits16),
        FP8 => Ok(TokenFormat::Fp8),
        NVFP4 => Ok(TokenFormat::Nvfp4),
        other => Err(Error::Invalid(format!("token_format {other} is not an nvfp4_token_format"))),
    }
}
