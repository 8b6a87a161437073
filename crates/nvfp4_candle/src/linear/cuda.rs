//! The linear layer on a GPU: launches on the stream of candle's device, in candle's memory.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, CustomOp1, Layout, Result, Shape, bail};
use float8::F8E4M3;
use nvfp4::backend::cuda::{LinearArguments, LinearLauncher, LinearTensor, PackedLinear};
use nvfp4::bias::Bias;
use nvfp4::linear::LinearSizes;
use nvfp4::problem::TokenDtype;

use super::operator::{NAME, output_shape};
use crate::checkpoint::Projection;
use crate::cuda::{Token, address, handle, linear_launcher, packed_head};
use crate::error;

/// A layer in a GPU's memory.
pub struct Linear {
    sizes: LinearSizes,
    launcher: LinearLauncher,
    /// Packed for `sizes`.
    weights: CudaSlice<u8>,
}

impl Linear {
    /// Packs a projection on the device, for checked sizes, and waits for the packing.
    pub fn new(
        device: &CudaDevice,
        sizes: LinearSizes,
        projection: &Projection,
        bias: Option<&Bias<'_>>,
    ) -> Result<Self> {
        let (launcher, stream) = (linear_launcher(device)?, device.cuda_stream());
        // SAFETY: the packing writes every byte before a kernel reads it.
        let mut weights = unsafe { device.alloc::<u8>(LinearLauncher::weight_bytes(&sizes))? };
        let tensor = LinearTensor {
            values: address::<u8>(&projection.values, &stream)?,
            scales: address::<F8E4M3>(&projection.scales, &stream)?,
            global_scales: &[(sizes.n, projection.global_scale)],
            bias,
            input_scale: None,
        };
        let (to, writing) = weights.device_ptr_mut(&stream);
        // SAFETY: the stream belongs to the primary context. The tensors are on its device, and the stream has the work
        // that wrote them. candle frees the tensors and the weights after this launch, in stream order.
        unsafe { launcher.pack(&sizes, &tensor, to, handle(&stream)) }.map_err(|e| projection.at(e))?;
        drop(writing);
        LinearLauncher::check_packed(&sizes, &packed_head(&weights, device)?).map_err(|e| projection.at(e))?;
        Ok(Self { sizes, launcher, weights })
    }

    /// Queues a call. `T` is the layer's token type. The tokens are contiguous and on the layer's device.
    fn launch<T: Token>(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (sizes, device) = (self.sizes, x.device());
        let stream = device.cuda_stream();
        let shape = output_shape(layout.shape(), &sizes);
        let x = x.as_cuda_slice::<T>()?.slice(layout.start_offset()..);
        // SAFETY: the kernel writes every element. The length is at least 1, because the driver refuses empty
        // allocations.
        let mut output = unsafe { device.alloc::<T>(shape.elem_count().max(1))? };
        {
            let (tokens, _reading) = x.device_ptr(&stream);
            let (weights, _using) = self.weights.device_ptr(&stream);
            let (output, _writing) = output.device_ptr_mut(&stream);
            let arguments = LinearArguments {
                token_count: layout.shape().elem_count() / sizes.k,
                tokens,
                token_pitch: size_of::<T>() * sizes.k,
                output,
            };
            // SAFETY: the stream belongs to the primary context. The tokens and the output have the sizes in
            // `arguments`, and the packing of the weights is complete. 16-bit tokens need no workspace. candle frees
            // the memory after this launch, in stream order.
            unsafe { self.launcher.launch(&PackedLinear { sizes, weights }, &arguments, 0, handle(&stream)) }
                .map_err(error)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(output, device.clone()), shape))
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("tokens are on the CPU, but the layer is on a GPU; move them with `to_device`")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.sizes.dtype {
            TokenDtype::Bf16 => self.launch::<half::bf16>(x, layout),
            TokenDtype::F16 => self.launch::<half::f16>(x, layout),
        }
    }
}
