//! Linear layers, on the CPU and on a GPU.

use std::ffi::c_void;

use nvfp4::Error;
use nvfp4::backend::cpu::{Cpu, CpuLinearLayer};
use nvfp4::backend::cuda::{LinearArguments, LinearLauncher, LinearTensor, PackedLinear};
use nvfp4::bias::Bias;
use nvfp4::format::Matrix;
use nvfp4::linear::{LinearInputs, LinearOutput, LinearSizes, LinearWeights};

use crate::gpu::nvfp4_device;
use crate::pointer::{address, elements, elements_mut, value};
use crate::status::{guard, nvfp4_status};
use crate::types::{token_format, token_type};

/// Sizes of a linear layer. Zero fields mean: no bias, 16-bit tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_sizes {
    /// N, rows of the weight: a multiple of 16.
    pub out_features: usize,
    /// K, elements of a token: a multiple of 16.
    pub in_features: usize,
    /// An `nvfp4_dtype`: the token type.
    pub dtype: u32,
    /// Whether there is a bias.
    pub bias: bool,
    /// An `nvfp4_token_format`.
    pub token_format: u32,
}

impl nvfp4_linear_sizes {
    fn checked(&self) -> Result<LinearSizes, Error> {
        let sizes = LinearSizes {
            n: self.out_features,
            k: self.in_features,
            dtype: token_type(self.dtype)?,
            bias: self.bias,
            token_format: token_format(self.token_format)?,
        };
        sizes.check()?;
        Ok(sizes)
    }
}

/// A weight in a checkpoint's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_tensor {
    /// Values, `N * K/2` bytes, packed as in `nvfp4_tensor`. On a GPU in its memory, at a multiple of 8, or of 16 for
    /// FP8 or NVFP4 tokens.
    pub values: *const u8,
    /// Scales, `N * K/16` bytes. On a GPU in its memory.
    pub scales: *const u8,
    /// The global scale.
    pub global_scale: f32,
    /// N biases, always in host memory; null if there is no bias.
    pub bias: *const f32,
    /// For NVFP4 tokens, their global scale from the checkpoint; 0: each token has its own.
    pub input_scale: f32,
}

impl nvfp4_linear_tensor {
    fn input_scale(&self) -> Option<f32> {
        (self.input_scale != 0.0).then_some(self.input_scale)
    }
}

/// Inputs and outputs of a call of a linear layer. On a GPU, the pointers point to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_call {
    /// M, number of tokens; may be 0.
    pub tokens: usize,
    /// M rows of K numbers of the token type. On a GPU the address is a multiple of 16 bytes.
    pub x: *const u16,
    /// Elements from one row to the next, at least K. On a GPU a multiple of 8.
    pub x_stride: usize,
    /// Output: M rows of N numbers, without gaps. On a GPU the address is a multiple of 16 bytes. Overlaps no input.
    pub output: *mut u16,
}

/// A linear layer prepared for the CPU. Several threads may run calls at once.
pub struct nvfp4_linear_cpu(CpuLinearLayer<'static>);

/// Returns a layer's bias.
///
/// # Safety
///
/// The bias is null or in host memory, with this size, for as long as it is used.
unsafe fn bias<'a>(sizes: &LinearSizes, tensor: &'a nvfp4_linear_tensor) -> Result<Option<Bias<'a>>, Error> {
    if !sizes.bias {
        return Ok(None);
    }
    // SAFETY: the caller guarantees that the bias is null or has `n` numbers in host memory.
    Ok(Some(Bias::F32(unsafe { elements(tensor.bias, sizes.n, "bias")? }.into())))
}

/// Makes a layer from a tensor in host memory, and copies it.
///
/// # Safety
///
/// The pointers point to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_create(
    sizes: *const nvfp4_linear_sizes,
    tensor: *const nvfp4_linear_tensor,
    layer: *mut *mut nvfp4_linear_cpu,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or point to host memory.
        let (sizes, tensor, layer) =
            unsafe { (value(sizes, "sizes")?.checked()?, value(tensor, "tensor")?, elements_mut(layer, 1, "layer")?) };
        let LinearSizes { n, k, dtype, token_format, .. } = sizes;
        // SAFETY: the caller guarantees that the tensor's pointers are null or point to host memory of these sizes.
        let (values, scales, bias) = unsafe {
            let values = elements(tensor.values, n * k / 2, "values")?;
            (values, elements(tensor.scales, n * k / 16, "scales")?, bias(&sizes, tensor)?)
        };
        let matrix = Matrix::new(n, k, values.to_vec(), scales.to_vec(), tensor.global_scale)?;
        let mut weights = LinearWeights::new(dtype, matrix)?.with_token_format(token_format);
        if let Some(input_scale) = tensor.input_scale() {
            weights = weights.with_input_scale(input_scale)?;
        }
        if let Some(bias) = bias {
            weights = weights.with_bias(Bias::F32(bias.numbers(dtype).into_owned().into()))?;
        }
        layer[0] = Box::into_raw(Box::new(nvfp4_linear_cpu(Cpu::new().prepare_linear_layer(&weights)?)));
        Ok(())
    })
}

/// Computes a call. Its pointers point to host memory.
///
/// # Safety
///
/// The layer was made by `nvfp4_linear_cpu_create` and not destroyed. The call's memory has the sizes that the call
/// states.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_run(
    layer: *mut nvfp4_linear_cpu,
    call: *const nvfp4_linear_call,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the layer and the call are null or valid.
        let (nvfp4_linear_cpu(layer), call) = unsafe { (value(layer.cast_const(), "layer")?, value(call, "call")?) };
        let LinearSizes { n, k, .. } = layer.sizes();
        let before = call.tokens.saturating_sub(1).checked_mul(call.x_stride).ok_or(Error::TooLarge)?;
        let read = if call.tokens == 0 { 0 } else { before.checked_add(k).ok_or(Error::TooLarge)? };
        let written = call.tokens.checked_mul(n).ok_or(Error::TooLarge)?;
        // SAFETY: the caller guarantees that the call's pointers are null or point to host memory of these sizes.
        let (x, to) = unsafe { (elements(call.x, read, "x")?, elements_mut(call.output, written, "output")?) };
        let inputs = LinearInputs { tokens: call.tokens, x: x.into(), stride: call.x_stride };
        let step = layer.step(inputs)?;
        let mut computed = LinearOutput::new(&step);
        layer.execute(&step, &mut computed)?;
        to.copy_from_slice(&computed.out);
        Ok(())
    })
}

/// Frees a layer. Does nothing for null.
///
/// # Safety
///
/// The layer was made by `nvfp4_linear_cpu_create`, no call uses it, and it is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_destroy(layer: *mut nvfp4_linear_cpu) {
    if !layer.is_null() {
        guard(|| {
            // SAFETY: `nvfp4_linear_cpu_create` made the pointer from a box, and the caller guarantees that this is its
            // last use.
            drop(unsafe { Box::from_raw(layer) });
            Ok(())
        });
    }
}

/// Writes the bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to `tokens` tokens: 0
/// for 16-bit tokens.
///
/// # Safety
///
/// The pointers point to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_bytes(
    sizes: *const nvfp4_linear_sizes,
    tokens: usize,
    weights: *mut usize,
    workspace: *mut usize,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or point to host memory.
        let (sizes, weights, workspace) = unsafe {
            (
                value(sizes, "sizes")?.checked()?,
                elements_mut(weights, 1, "weights")?,
                elements_mut(workspace, 1, "workspace")?,
            )
        };
        (weights[0], workspace[0]) =
            (LinearLauncher::weight_bytes(&sizes), LinearLauncher::workspace_bytes(&sizes, tokens));
        Ok(())
    })
}

/// Queues the packing of a checkpoint's tensor, which is in the GPU's memory. It may be freed when the stream has
/// passed the packing. Wait for the packing before the first call: copy the first `NVFP4_LINEAR_HEAD_BYTES` of the
/// weights to the host and pass them to `nvfp4_linear_check_packed`, which checks the block scales.
///
/// # Safety
///
/// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context, and is not being captured.
/// - `weights` is a multiple of 256 and points to the number of bytes that `nvfp4_linear_bytes` returns.
/// - The tensor's pointers point to memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_pack(
    device: *const nvfp4_device,
    sizes: *const nvfp4_linear_sizes,
    tensor: *const nvfp4_linear_tensor,
    weights: *mut c_void,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (device, sizes, tensor) =
            unsafe { (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(tensor, "tensor")?) };
        // SAFETY: the caller guarantees that the bias is null or has `n` numbers in host memory.
        let bias = unsafe { bias(&sizes, tensor)? };
        let packed = LinearTensor {
            values: address(tensor.values, "values")?,
            scales: address(tensor.scales, "scales")?,
            global_scales: &[(sizes.n, tensor.global_scale)],
            bias: bias.as_ref(),
            input_scale: tensor.input_scale(),
        };
        // SAFETY: the caller guarantees the tensor, the size and alignment of `weights`, and the stream's context.
        unsafe { device.linear.pack(&sizes, &packed, address(weights, "weights")?, stream.cast()) }
    })
}

/// Number of bytes at the start of a linear layer's packed weights that `nvfp4_linear_check_packed` reads.
pub const NVFP4_LINEAR_HEAD_BYTES: usize = 8;
const _: () = assert!(NVFP4_LINEAR_HEAD_BYTES == LinearLauncher::HEAD_BYTES);

/// Checks that the block scales of packed weights were valid.
///
/// # Safety
///
/// The pointers point to host memory; `head` points to the first `NVFP4_LINEAR_HEAD_BYTES` bytes of the weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_check_packed(sizes: *const nvfp4_linear_sizes, head: *const u8) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or point to host memory of these sizes.
        let (sizes, head) = unsafe { (value(sizes, "sizes")?.checked()?, value(head.cast(), "head")?) };
        LinearLauncher::check_packed(&sizes, head)
    })
}

/// Queues a call and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
///
/// # Safety
///
/// - `weights` were packed for these sizes, and the packing is complete.
/// - The call's pointers point to memory of these sizes that the GPU can use.
/// - `workspace` is a multiple of 256 and points to the number of bytes that `nvfp4_linear_bytes` returns; null if it
///   returns 0.
/// - All this memory stays allocated until the stream has passed the call.
/// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context; it may be captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_launch(
    device: *const nvfp4_device,
    sizes: *const nvfp4_linear_sizes,
    weights: *const c_void,
    call: *const nvfp4_linear_call,
    workspace: *mut c_void,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (device, sizes, call) =
            unsafe { (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(call, "call")?) };
        let layer = PackedLinear { sizes, weights: address(weights, "weights")? };
        let arguments = LinearArguments {
            token_count: call.tokens,
            tokens: call.x.addr() as u64,
            token_pitch: call.x_stride.checked_mul(size_of::<u16>()).ok_or(Error::TooLarge)?,
            output: call.output.addr() as u64,
        };
        // SAFETY: the caller guarantees the packed weights, the call's memory, the workspace, and the stream's context.
        unsafe { device.linear.launch(&layer, &arguments, workspace.addr() as u64, stream.cast()) }.map(drop)
    })
}
