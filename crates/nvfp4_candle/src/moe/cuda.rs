//! The MoE layer on a GPU: launches on the stream of candle's device, in candle's memory.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use float8::F8E4M3;
use nvfp4::backend::cuda::{
    MoeArguments, MoeLauncher, MoeTensor, MoeTensors, PackedMoe, weight_bytes, workspace_bytes,
};
use nvfp4::moe::MoeSizes;
use nvfp4::problem::TokenDtype;

use super::operator::{Expert, NAME};
use crate::checkpoint::Projection;
use crate::cuda::{Token, address, handle, moe_launcher, packed_head};
use crate::error;

/// A layer in a GPU's memory.
pub struct Moe {
    sizes: MoeSizes,
    launcher: MoeLauncher,
    /// Packed for `sizes`.
    weights: CudaSlice<u8>,
}

/// A projection of every expert.
struct Stacked {
    values: Tensor,
    scales: Tensor,
    global_scales: Vec<f32>,
}

impl Stacked {
    fn of<'a>(projections: impl Iterator<Item = &'a Projection>) -> Result<Self> {
        let projections = projections.collect::<Vec<_>>();
        let stack = |part: fn(&Projection) -> &Tensor| {
            Tensor::stack(&projections.iter().map(|of| part(of)).collect::<Vec<_>>(), 0)
        };
        Ok(Self {
            values: stack(|of| &of.values)?,
            scales: stack(|of| &of.scales)?,
            global_scales: projections.iter().map(|of| of.global_scale).collect(),
        })
    }

    fn tensor(&self, stream: &CudaStream) -> Result<MoeTensor<'_>> {
        let bytes_of_one = |tensor: &Tensor| tensor.elem_count() / self.global_scales.len();
        Ok(MoeTensor {
            values: address::<u8>(&self.values, stream)?,
            values_stride: bytes_of_one(&self.values),
            scales: address::<F8E4M3>(&self.scales, stream)?,
            scales_stride: bytes_of_one(&self.scales),
            global_scales: &self.global_scales,
            bias: None,
        })
    }
}

impl Moe {
    /// Packs experts on the device, for checked sizes, and waits for the packing.
    pub fn new(device: &CudaDevice, sizes: MoeSizes, experts: &[Expert]) -> Result<Self> {
        let (launcher, stream) = (moe_launcher(device)?, device.cuda_stream());
        let gates = experts.iter().filter_map(|expert| expert.gate.as_ref());
        let gate = sizes.activation.has_gate().then(|| Stacked::of(gates)).transpose()?;
        let up = Stacked::of(experts.iter().map(|expert| &expert.up))?;
        let down = Stacked::of(experts.iter().map(|expert| &expert.down))?;
        let tensors = MoeTensors {
            gate: gate.as_ref().map(|gate| gate.tensor(&stream)).transpose()?,
            up: up.tensor(&stream)?,
            down: down.tensor(&stream)?,
            input_scales: &[],
        };
        // SAFETY: the packing writes every byte before a kernel reads it.
        let mut weights = unsafe { device.alloc::<u8>(weight_bytes(&sizes))? };
        let (to, writing) = weights.device_ptr_mut(&stream);
        // SAFETY: the stream belongs to the primary context. The tensors are on its device, and the stream has the work
        // that wrote them. candle frees the tensors and the weights after this launch, in stream order.
        unsafe { launcher.pack(&sizes, &tensors, None, to, handle(&stream)) }.map_err(error)?;
        drop(writing);
        MoeLauncher::check_packed(&sizes, &packed_head(&weights, device)?).map_err(error)?;
        Ok(Self { sizes, launcher, weights })
    }

    /// Queues a call. `T` is the layer's token type. The tensors are contiguous, on the layer's device, and have
    /// matching shapes.
    fn launch<T: Token>(
        &self,
        (hidden, hidden_layout): (&CudaStorage, &Layout),
        (ids, ids_layout): (&CudaStorage, &Layout),
        (weights, weights_layout): (&CudaStorage, &Layout),
    ) -> Result<(CudaStorage, Shape)> {
        let (sizes, device) = (self.sizes, hidden.device());
        let stream = device.cuda_stream();
        let shape = hidden_layout.shape().clone();
        let token_count = shape.elem_count() / sizes.hidden;
        let hidden = hidden.as_cuda_slice::<T>()?.slice(hidden_layout.start_offset()..);
        let ids = ids.as_cuda_slice::<u32>()?.slice(ids_layout.start_offset()..);
        let weights = weights.as_cuda_slice::<f32>()?.slice(weights_layout.start_offset()..);
        // SAFETY: the kernels write every element of the output, and every byte of the workspace before they read it.
        // The lengths are at least 1, because the driver refuses empty allocations.
        let (mut output, mut workspace) = unsafe {
            let bytes = workspace_bytes(&sizes, token_count);
            (device.alloc::<T>(shape.elem_count().max(1))?, device.alloc::<u8>(bytes.max(1))?)
        };
        {
            let (tokens, _reading_tokens) = hidden.device_ptr(&stream);
            let (topk_ids, _reading_ids) = ids.device_ptr(&stream);
            let (topk_weights, _reading_weights) = weights.device_ptr(&stream);
            let (packed, _using) = self.weights.device_ptr(&stream);
            let (output, _writing) = output.device_ptr_mut(&stream);
            let (workspace, _working) = workspace.device_ptr_mut(&stream);
            let pitch = size_of::<T>() * sizes.hidden;
            let arguments = MoeArguments {
                token_count,
                tokens,
                token_pitch: pitch,
                // The kernel reads i32. An id beyond i32 becomes negative, and has no expert either way.
                topk_ids,
                topk_weights,
                output,
                output_pitch: pitch,
                ..Default::default()
            };
            let layer = PackedMoe { sizes, weights: packed, expert_map: 0 };
            // SAFETY: the stream belongs to the primary context, and the packing of the weights is complete. The
            // tensors, the output and the workspace have the sizes in `arguments`. candle frees the memory after this
            // launch, in stream order.
            unsafe { self.launcher.launch(&layer, &arguments, workspace, handle(&stream)) }.map_err(error)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(output, device.clone()), shape))
    }
}

impl CustomOp3 for Moe {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("tokens are on the CPU, but the layer is on a GPU; move them with `to_device`")
    }

    fn cuda_fwd(
        &self,
        hidden: &CudaStorage,
        hidden_layout: &Layout,
        ids: &CudaStorage,
        ids_layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (hidden, ids, weights) = ((hidden, hidden_layout), (ids, ids_layout), (weights, weights_layout));
        match self.sizes.dtype {
            TokenDtype::Bf16 => self.launch::<half::bf16>(hidden, ids, weights),
            TokenDtype::F16 => self.launch::<half::f16>(hidden, ids, weights),
        }
    }
}
