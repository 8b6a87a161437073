//! MoE layers on a GPU, in the caller's memory and on the caller's stream.

use std::ffi::c_void;
use std::slice;

use nvfp4::Error;
use nvfp4::backend::cuda::{
    Cuda, LinearLauncher, MoeArguments, MoeLauncher, MoeTensor, MoeTensors, PackedMoe, RouterLauncher, weight_bytes,
    workspace_bytes,
};
use nvfp4::bias::Bias;
use nvfp4::fp4::InputScales;
use nvfp4::moe::MoeSizes;

use crate::pointer::{address, check, elements, elements_mut, value};
use crate::status::{guard, nvfp4_status};
use crate::types::{nvfp4_moe_call, nvfp4_moe_sizes, nvfp4_moe_tensors, nvfp4_tensor};

/// A GPU with its kernels loaded. Several threads may use it at once.
pub struct nvfp4_device {
    pub(crate) moe: MoeLauncher,
    pub(crate) linear: LinearLauncher,
    pub(crate) router: RouterLauncher,
}

/// Opens device `ordinal` in its primary context, which the CUDA runtime uses too. The context stays open.
///
/// # Safety
///
/// `device` points to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_device_open(ordinal: u32, device: *mut *mut nvfp4_device) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that `device` is null or points to host memory.
        let device = unsafe { elements_mut(device, 1, "device")? };
        let gpu = Cuda::open(ordinal)?;
        let opened =
            nvfp4_device { moe: gpu.moe_launcher()?, linear: gpu.linear_launcher()?, router: gpu.router_launcher()? };
        device[0] = Box::into_raw(Box::new(opened));
        Ok(())
    })
}

/// Closes a device. Does nothing for null.
///
/// # Safety
///
/// `nvfp4_device_open` opened the device, none of its work is in flight, and it is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_device_close(device: *mut nvfp4_device) {
    if !device.is_null() {
        guard(|| {
            // SAFETY: `nvfp4_device_open` made the pointer from a box, and the caller guarantees that this is its last
            // use.
            drop(unsafe { Box::from_raw(device) });
            Ok(())
        });
    }
}

/// Writes the bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to `tokens` tokens.
/// Layers whose calls follow one another on a stream can share a workspace.
///
/// # Safety
///
/// The pointers point to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_bytes(
    sizes: *const nvfp4_moe_sizes,
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
        (weights[0], workspace[0]) = (weight_bytes(&sizes), workspace_bytes(&sizes, tokens));
        Ok(())
    })
}

/// Queues the packing of a checkpoint's tensors, which are in the GPU's memory. They may be freed when the stream has
/// passed the packing. `shared` is null if `sizes` has no shared expert.
///
/// The GPU checks the block scales. When the stream has passed the packing, copy the first `NVFP4_MOE_HEAD_BYTES` of
/// the weights to the host and pass them to `nvfp4_moe_check_packed`.
///
/// # Safety
///
/// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context, and is not being captured.
/// - `weights` is a multiple of 256 and points to the number of bytes that `nvfp4_moe_bytes` returns.
/// - The tensors' pointers point to memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_pack(
    device: *const nvfp4_device,
    sizes: *const nvfp4_moe_sizes,
    tensors: *const nvfp4_moe_tensors,
    shared: *const nvfp4_moe_tensors,
    weights: *mut c_void,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (device, sizes, tensors, shared) = unsafe {
            (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(tensors, "tensors")?, shared.as_ref())
        };
        // SAFETY: the caller guarantees that biases are null or in host memory, with these sizes.
        let biases = unsafe {
            (Biases::of(tensors, &sizes, false)?, shared.map(|of| Biases::of(of, &sizes, true)).transpose()?)
        };
        // SAFETY: the caller guarantees that input scales are in host memory, one per expert.
        let input_scales = unsafe {
            let of_shared = shared.map(|shared| shared.input_scales(1, &sizes)).transpose()?;
            (tensors.input_scales(sizes.experts, &sizes)?, of_shared.unwrap_or_default())
        };
        let of_shared = shared.zip(biases.1.as_ref());
        // SAFETY: the caller guarantees that global scales are in host memory, one per expert.
        let (experts, shared) = unsafe {
            let shared =
                of_shared.map(|(shared, biases)| of(shared, 1, &sizes, biases, &input_scales.1)).transpose()?;
            (of(tensors, sizes.experts, &sizes, &biases.0, &input_scales.0)?, shared)
        };
        let (weights, stream) = (address(weights, "weights")?, stream.cast());
        // SAFETY: the caller guarantees the tensors, the size and alignment of `weights`, and the stream's context.
        unsafe { device.moe.pack(&sizes, &experts, shared.as_ref(), weights, stream) }
    })
}

/// Number of bytes at the start of packed weights that `nvfp4_moe_check_packed` reads.
pub const NVFP4_MOE_HEAD_BYTES: usize = 48;
const _: () = assert!(NVFP4_MOE_HEAD_BYTES == MoeLauncher::HEAD_BYTES);

/// Checks that the block scales of packed weights were valid.
///
/// # Safety
///
/// The pointers point to host memory; `head` points to the first `NVFP4_MOE_HEAD_BYTES` bytes of the weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_check_packed(sizes: *const nvfp4_moe_sizes, head: *const u8) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or point to host memory of these sizes.
        let (sizes, head) = unsafe { (value(sizes, "sizes")?.checked()?, value(head.cast(), "head")?) };
        MoeLauncher::check_packed(&sizes, head)
    })
}

/// Queues a call and returns without waiting. It allocates nothing, so the stream may be captured into a graph. The
/// graph is correct for any ids and weights that the memory holds when the graph runs.
///
/// # Safety
///
/// - `weights` were packed for these sizes. `expert_map` is null or points to the GPU's memory.
/// - The call's pointers point to memory of these sizes that the GPU can use.
/// - `workspace` is a multiple of 256 and points to the number of bytes that `nvfp4_moe_bytes` returns.
/// - All this memory stays allocated until the stream has passed the call.
/// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context; it may be captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_launch(
    device: *const nvfp4_device,
    sizes: *const nvfp4_moe_sizes,
    weights: *const c_void,
    expert_map: *const i32,
    call: *const nvfp4_moe_call,
    workspace: *mut c_void,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (device, sizes, call) =
            unsafe { (value(device, "device")?, value(sizes, "sizes")?.checked()?, value(call, "call")?) };
        let layer = PackedMoe { sizes, weights: address(weights, "weights")?, expert_map: expert_map.addr() as u64 };
        let pitch = |stride: usize| stride.checked_mul(size_of::<u16>()).ok_or(Error::TooLarge);
        let arguments = MoeArguments {
            token_count: call.tokens,
            tokens: call.hidden_states.addr() as u64,
            token_pitch: pitch(call.hidden_stride)?,
            topk_ids: call.topk_ids.addr() as u64,
            topk_weights: call.topk_weights.addr() as u64,
            weights_on_input: call.weights_on_input,
            shared_weights: call.shared_weights.addr() as u64,
            output: call.output.addr() as u64,
            output_pitch: pitch(call.output_stride)?,
        };
        // SAFETY: the caller guarantees the packed weights, the call's memory, the workspace, and the stream's context.
        unsafe { device.moe.launch(&layer, &arguments, address(workspace, "workspace")?, stream.cast()) }.map(drop)
    })
}

/// Biases of gate, up and down.
struct Biases<'a>([Option<Bias<'a>>; 3]);

impl<'a> Biases<'a> {
    /// # Safety
    ///
    /// Biases are null or in host memory, one per row of every expert, for as long as the reference lives.
    unsafe fn of(tensors: &'a nvfp4_moe_tensors, sizes: &MoeSizes, of_shared: bool) -> Result<Self, Error> {
        let (experts, intermediate) =
            if of_shared { (1, sizes.shared_intermediate.unwrap_or(0)) } else { (sizes.experts, sizes.intermediate) };
        let bias = |tensor: &nvfp4_tensor, rows: usize| {
            let is_there = sizes.biases && !tensor.bias.is_null();
            // SAFETY: the pointer is not null, so the caller guarantees `experts * rows` biases in host memory.
            let numbers = is_there.then(|| unsafe { elements(tensor.bias, experts * rows, "bias") }).transpose()?;
            Ok::<_, Error>(numbers.map(|numbers| Bias::F32(numbers.into())))
        };
        let gate = if sizes.activation.has_gate() { bias(&tensors.gate, intermediate)? } else { None };
        Ok(Self([gate, bias(&tensors.up, intermediate)?, bias(&tensors.down, sizes.hidden)?]))
    }
}

/// Converts the tensors to the library's types.
///
/// # Safety
///
/// Each `global_scales` is null or points to `experts` numbers in host memory, for as long as the reference lives.
unsafe fn of<'a>(
    tensors: &'a nvfp4_moe_tensors,
    experts: usize,
    sizes: &MoeSizes,
    biases: &'a Biases<'_>,
    input_scales: &'a [InputScales],
) -> Result<MoeTensors<'a>, Error> {
    let tensor = |tensor: &'a nvfp4_tensor, projection: usize| -> Result<MoeTensor<'a>, Error> {
        check(tensor.global_scales, "global_scales")?;
        Ok(MoeTensor {
            values: address(tensor.values, "values")?,
            values_stride: tensor.values_stride,
            scales: address(tensor.scales, "scales")?,
            scales_stride: tensor.scales_stride,
            // SAFETY: the pointer is aligned and not null, so the caller guarantees `experts` numbers in host memory.
            global_scales: unsafe { slice::from_raw_parts(tensor.global_scales, experts) },
            bias: biases.0[projection].as_ref(),
        })
    };
    let gate = sizes.activation.has_gate().then(|| tensor(&tensors.gate, 0)).transpose()?;
    Ok(MoeTensors { gate, up: tensor(&tensors.up, 1)?, down: tensor(&tensors.down, 2)?, input_scales })
}
