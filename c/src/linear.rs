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

/// The sizes of a linear layer. What is left zero: no bias, tokens of 16 bits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_sizes {
    /// N, rows of the weight: a multiple of 16.
    pub out_features: usize,
    /// K, elements of a token: a multiple of 16.
    pub in_features: usize,
    /// An `nvfp4_dtype`: the type of tokens.
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

/// A weight as a checkpoint has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_tensor {
    /// Values, `N * K/2` bytes, as `nvfp4_tensor`. On a GPU in its memory, at a multiple of 8, or for tokens in FP8 or NVFP4
    /// of 16.
    pub values: *const u8,
    /// Scales, `N * K/16` bytes. On a GPU in its memory.
    pub scales: *const u8,
    /// The global scale.
    pub global_scale: f32,
    /// N numbers in host memory, always; null if there is none.
    pub bias: *const f32,
    /// With tokens in NVFP4, their global scale as a checkpoint carries it; 0 if each token is to have one of its own.
    pub input_scale: f32,
}

impl nvfp4_linear_tensor {
    fn input_scale(&self) -> Option<f32> {
        (self.input_scale != 0.0).then_some(self.input_scale)
    }
}

/// What a call of a layer reads and writes; on a GPU pointers to its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvfp4_linear_call {
    /// M; may be 0.
    pub tokens: usize,
    /// M rows of K numbers of the layer's type. On a GPU at a multiple of 16 bytes.
    pub x: *const u16,
    /// Elements from one row to the next, at least K. On a GPU a multiple of 8.
    pub x_stride: usize,
    /// Where the M rows of N numbers go, without gaps. On a GPU at a multiple of 16 bytes. Overlaps nothing else.
    pub output: *mut u16,
}

/// A linear layer prepared for the CPU. Several threads may run calls at once.
pub struct nvfp4_linear_cpu(CpuLinearLayer<'static>);

/// A layer's bias.
///
/// # Safety
///
/// It is in host memory, of this size, and stays as long as it is used.
unsafe fn bias<'a>(sizes: &LinearSizes, tensor: &'a nvfp4_linear_tensor) -> Result<Option<Bias<'a>>, Error> {
    if !sizes.bias {
        return Ok(None);
    }
    // SAFETY: `# Safety` above.
    Ok(Some(Bias::F32(unsafe { elements(tensor.bias, sizes.n, "bias")? }.into())))
}

/// Makes a layer of a tensor in host memory, which is copied.
///
/// # Safety
///
/// The pointers are to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_create(
    sizes: *const nvfp4_linear_sizes,
    tensor: *const nvfp4_linear_tensor,
    layer: *mut *mut nvfp4_linear_cpu,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (sizes, tensor, layer) =
            unsafe { (value(sizes, "sizes")?.checked()?, value(tensor, "tensor")?, elements_mut(layer, 1, "layer")?) };
        let LinearSizes { n, k, dtype, token_format, .. } = sizes;
        // SAFETY: as above.
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

/// Computes a call, whose pointers are to host memory.
///
/// # Safety
///
/// The layer was made by `nvfp4_linear_cpu_create` and not destroyed. The call's memory has the sizes that it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_run(
    layer: *mut nvfp4_linear_cpu,
    call: *const nvfp4_linear_call,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (nvfp4_linear_cpu(layer), call) = unsafe { (value(layer.cast_const(), "layer")?, value(call, "call")?) };
        let LinearSizes { n, k, .. } = layer.sizes();
        let before = call.tokens.saturating_sub(1).checked_mul(call.x_stride).ok_or(Error::TooLarge)?;
        let read = if call.tokens == 0 { 0 } else { before.checked_add(k).ok_or(Error::TooLarge)? };
        let written = call.tokens.checked_mul(n).ok_or(Error::TooLarge)?;
        // SAFETY: `# Safety` above.
        let (x, to) = unsafe { (elements(call.x, read, "x")?, elements_mut(call.output, written, "output")?) };
        let inputs = LinearInputs { tokens: call.tokens, x: x.into(), stride: call.x_stride };
        let step = layer.step(inputs)?;
        let mut computed = LinearOutput::new(&step);
        layer.execute(&step, &mut computed)?;
        to.copy_from_slice(&computed.out);
        Ok(())
    })
}

/// Frees a layer. Null is nothing.
///
/// # Safety
///
/// The layer was made by `nvfp4_linear_cpu_create`, is in no call, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_cpu_destroy(layer: *mut nvfp4_linear_cpu) {
    if !layer.is_null() {
        guard(|| {
            // SAFETY: it came from a box; `# Safety` above.
            drop(unsafe { Box::from_raw(layer) });
            Ok(())
        });
    }
}

/// Bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to so many tokens: 0 with tokens of 16 bits.
///
/// # Safety
///
/// The pointers are to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_bytes(
    sizes: *const nvfp4_linear_sizes,
    tokens: usize,
    weights: *mut usize,
    workspace: *mut usize,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
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

/// Queues the packing of a checkpoint's tensor, which lies in the GPU's memory and is not needed any more when the stream has come
/// past it. Wait for that before the first call: copy the first `NVFP4_LINEAR_HEAD_BYTES` of the weights to the host and give them
/// to `nvfp4_linear_check_packed`, which says whether block scales are valid.
///
/// # Safety
///
/// `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context, or null, and captures nothing. At `weights`, a
/// multiple of 256, are as many bytes as `nvfp4_linear_bytes` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_pack(
    device: *const nvfp4_device,
    sizes: *const nvfp4_linear_sizes,
    tensor: *const nvfp4_linear_tensor,
    weights: *mut c_void,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (device, sizes, tensor) =
            unsafe { (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(tensor, "tensor")?) };
        // SAFETY: as above.
        let bias = unsafe { bias(&sizes, tensor)? };
        let packed = LinearTensor {
            values: address(tensor.values, "values")?,
            scales: address(tensor.scales, "scales")?,
            global_scales: &[(sizes.n, tensor.global_scale)],
            bias: bias.as_ref(),
            input_scale: tensor.input_scale(),
        };
        // SAFETY: as above.
        unsafe { device.linear.pack(&sizes, &packed, address(weights, "weights")?, stream.cast()) }
    })
}

/// Bytes that a linear layer's packed weights begin with, for `nvfp4_linear_check_packed`.
pub const NVFP4_LINEAR_HEAD_BYTES: usize = 8;
const _: () = assert!(NVFP4_LINEAR_HEAD_BYTES == LinearLauncher::HEAD_BYTES);

/// Says whether the block scales of packed weights were valid.
///
/// # Safety
///
/// The pointers are to host memory; `head` to the first `NVFP4_LINEAR_HEAD_BYTES` of the weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_linear_check_packed(sizes: *const nvfp4_linear_sizes, head: *const u8) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (sizes, head) = unsafe { (value(sizes, "sizes")?.checked()?, value(head.cast(), "head")?) };
        LinearLauncher::check_packed(&sizes, head)
    })
}

/// Queues a call, and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
///
/// # Safety
///
/// `weights` were packed for these sizes, and that was waited for. The call's pointers are to memory of these sizes that the GPU can
/// use, and `workspace`, a multiple of 256, to as many bytes as `nvfp4_linear_bytes` says; null if that is 0. All of it stays until the
/// stream has come past the call. `stream` is as `nvfp4_linear_pack` says, but may capture.
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
        // SAFETY: `# Safety` above.
        let (device, sizes, call) =
            unsafe { (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(call, "call")?) };
        let layer = PackedLinear { sizes, weights: address(weights, "weights")? };
        let arguments = LinearArguments {
            token_count: call.tokens,
            tokens: call.x.addr() as u64,
            token_pitch: call.x_stride.checked_mul(size_of::<u16>()).ok_or(Error::TooLarge)?,
            output: call.output.addr() as u64,
        };
        // SAFETY: as above.
        unsafe { device.linear.launch(&layer, &arguments, workspace.addr() as u64, stream.cast()) }.map(drop)
    })
}
