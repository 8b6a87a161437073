//! What the calls for MoE layers and routers take, and the enumerations.

use std::ffi::c_void;

use nvfp4::Error;
use nvfp4::fp4::InputScales;
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::{TokenDtype, TokenFormat};

use crate::pointer::elements;

/// The type of tokens, and of what a layer makes of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_dtype {
    /// IEEE's binary16.
    F16 = 0,
    /// bfloat16.
    BF16 = 1,
}

/// As what a layer's tokens, and the intermediate of an MoE layer, are multiplied.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_token_format {
    /// As they are.
    BITS16 = 0,
    /// As FP8 (e4m3) with a scale for each token, with weights rounded to e4m3: faster on Hopper for many tokens, less accurate.
    FP8 = 1,
    /// As NVFP4, by input scales or with a global scale for each token, with weights as they are: on GPUs, Blackwell alone.
    NVFP4 = 2,
}

/// What becomes of an element g of the gate projection and u of the up projection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_activation {
    /// silu(g) * u.
    SILU = 0,
    /// silu(min(g, limit)) * clamp(u, -limit, limit).
    SILU_LIMIT = 1,
    /// gelu(g) * u, by tanh.
    GELU_TANH = 2,
    /// x * sigmoid(alpha * x) * (clamp(u, -limit, limit) + 1) with x = min(g, limit). gpt-oss has alpha = 1.702, limit = 7.
    GPT_OSS = 3,
    /// max(u, 0)^2; there is no gate.
    RELU2 = 4,
}

/// How a router chooses experts and weighs them. Of equal ones the lower expert comes first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_scoring {
    /// Softmax over all experts, then the k largest.
    SOFTMAX = 0,
    /// The k largest logits, then softmax over these.
    TOP_K_SOFTMAX = 1,
    /// The largest logit, whose sigmoid is the weight, for a layer's input; k = 1.
    SIGMOID_TOP1 = 2,
    /// Experts by sigmoid + bias, of the groups that are best by the sum of their two largest; weights are sigmoids without bias.
    SIGMOID_GROUPS = 3,
}

/// The type of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_logit_type {
    /// IEEE's binary16.
    F16 = 0,
    /// bfloat16.
    BF16 = 1,
    /// IEEE's binary32.
    F32 = 2,
}

/// The sizes of an MoE layer. What is left zero is as in most models: SiLU, no shared expert, no biases,
/// tokens of 16 bits without input scales.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_sizes {
    /// H, elements of a token: a multiple of 16.
    pub hidden: usize,
    /// I, rows of gate and up: a multiple of 16.
    pub intermediate: usize,
    /// E, experts that the layer holds: 1 to 512.
    pub experts: usize,
    /// Experts that a token can name: the length of the expert map, or E.
    pub named_experts: usize,
    /// k, experts that a token names: 1 to 32.
    pub top_k: usize,
    /// I of the expert that every token has; 0 if there is none.
    pub shared_intermediate: usize,
    /// An `nvfp4_dtype`: the type of tokens.
    pub dtype: u32,
    /// An `nvfp4_activation`.
    pub activation: u32,
    /// Of the activation, if it has one.
    pub alpha: f32,
    /// Of the activation, if it has one.
    pub limit: f32,
    /// Whether projections have biases.
    pub biases: bool,
    /// An `nvfp4_token_format`.
    pub token_format: u32,
    /// Whether tokens in NVFP4 are quantized by their experts' input scales. If not, each token has a global scale of its own.
    pub input_scales: bool,
}

/// A router. What stands below `scoring` is of those that it says alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_router {
    /// E: 1 to 512.
    pub experts: usize,
    /// k, experts that a token gets: 1 to 32.
    pub top_k: usize,
    /// An `nvfp4_scoring`.
    pub scoring: u32,
    /// Whether weights are divided by their sum: of `NVFP4_SCORING_SOFTMAX` and `NVFP4_SCORING_SIGMOID_GROUPS`.
    pub renormalise: bool,
    /// Groups of neighboring experts, equally many in each, 1 for none: of `NVFP4_SCORING_SIGMOID_GROUPS`, as all below.
    pub groups: usize,
    /// Groups whose experts may be chosen.
    pub top_groups: usize,
    /// What weights are multiplied with at last; 1 for nothing.
    pub scale: f32,
    /// `[E]`, finite: on a GPU in its memory.
    pub bias: *const f32,
}

/// What a call of a router reads and writes; on a GPU pointers to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_route_call {
    /// T; may be 0.
    pub tokens: usize,
    /// T rows of E numbers.
    pub logits: *const c_void,
    /// An `nvfp4_logit_type`.
    pub logit_type: u32,
    /// Elements from one row to the next, at least E.
    pub logits_stride: usize,
    /// `[T, k]`: where the experts of each token go.
    pub ids: *mut i32,
    /// `[T, k]`: where their weights go.
    pub weights: *mut f32,
}

/// A projection of every expert, as a checkpoint has it: `rows` of `k` numbers an expert.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_tensor {
    /// The first expert's values, `rows * k/2` bytes: two codes (e2m1) a byte, the one of the even column in the low four bits.
    pub values: *const u8,
    /// Bytes from one expert's values to the next one's; a multiple of 16 on a GPU, where `values` is at one too.
    pub values_stride: usize,
    /// The first expert's scales, `rows * k/16` bytes (e4m3).
    pub scales: *const u8,
    /// Bytes from one expert's scales to the next one's.
    pub scales_stride: usize,
    /// Each expert's global scale, by which its numbers are multiplied. In host memory, always.
    pub global_scales: *const f32,
    /// Biases, `rows` for each expert, in host memory, always; null if there are none.
    pub bias: *const f32,
    /// Each expert's input scale as a checkpoint carries it, in host memory, always: of gate and up the larger counts. Not looked at
    /// unless the sizes say that there are some; then all projections have them.
    pub input_scales: *const f32,
}

/// The projections of a layer's experts: gate and up `[I, H]`, down `[H, I]`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_tensors {
    /// Gate. Not looked at if the activation has none.
    pub gate: nvfp4_tensor,
    /// Up.
    pub up: nvfp4_tensor,
    /// Down.
    pub down: nvfp4_tensor,
}

/// What a call of a layer reads and writes; on a GPU pointers to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_moe_call {
    /// T; may be 0.
    pub tokens: usize,
    /// T rows of H numbers of the layer's type. On a GPU at a multiple of 16 bytes.
    pub hidden_states: *const u16,
    /// Elements from one row to the next, at least H. On a GPU a multiple of 8.
    pub hidden_stride: usize,
    /// `[T, k]`: the experts of each token. A negative one contributes nothing.
    pub topk_ids: *const i32,
    /// `[T, k]`: their weights.
    pub topk_weights: *const f32,
    /// Whether weights multiply the tokens rather than the experts' results: only if k = 1 and there is no shared expert.
    pub weights_on_input: bool,
    /// `[T]`: the shared expert's weights; null if all are 1.
    pub shared_weights: *const f32,
    /// Where the T rows of H numbers go. Overlaps nothing else.
    pub output: *mut u16,
    /// Elements from one row of the output to the next, as `hidden_stride`.
    pub output_stride: usize,
}

impl nvfp4_moe_sizes {
    pub(crate) fn checked(&self) -> Result<MoeSizes, Error> {
        let &Self { alpha, limit, .. } = self;
        let kinds = [
            Activation::Silu,
            Activation::SiluLimit { limit },
            Activation::GeluTanh,
            Activation::GptOss { alpha, limit },
            Activation::Relu2,
        ];
        let Some(&activation) = kinds.get(self.activation as usize) else {
            return Err(Error::Invalid(format!("activation {} is no nvfp4_activation", self.activation)));
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
    /// The input scales of so many experts: none, unless the sizes say that there are some.
    ///
    /// # Safety
    ///
    /// They are in host memory, as many as experts.
    pub(crate) unsafe fn input_scales(&self, experts: usize, sizes: &MoeSizes) -> Result<Vec<InputScales>, Error> {
        if !sizes.input_scales {
            return Ok(Vec::new());
        }
        // SAFETY: `# Safety` above.
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
        other => Err(Error::Invalid(format!("dtype {other} is no nvfp4_dtype"))),
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
        other => Err(Error::Invalid(format!("token_format {other} is no nvfp4_token_format"))),
    }
}
