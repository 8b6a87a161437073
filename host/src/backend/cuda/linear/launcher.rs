//! Linear layers in the caller's memory: packs weights and launches calls on the caller's stream.

use std::sync::{Arc, OnceLock};

use cuda_driver::sys::{self, CUdeviceptr, CUfunction, CUstream};

use crate::Error;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::maps;
use crate::backend::cuda::planned::ReadyLaunch;
use crate::bias::Bias;
use crate::format::BLOCK;
use crate::fp4::check_input_scale;
use crate::linear::LinearSizes;
use crate::problem::TokenFormat;
use nvfp4_kernels::kernel::Kernel;
use nvfp4_kernels::launch::{ALIGNMENT, Launch};
use nvfp4_kernels::linear::weights::PackedWeights;
use nvfp4_kernels::linear::workspace::Workspace;
use nvfp4_kernels::linear::{self, LinearArguments, LinearKernels};
use nvfp4_kernels::{Subject, builds};

/// A weight in device memory, in the order of a checkpoint: one projection, or several on top of each other, as engines keep q, k
/// and v.
#[derive(Clone, Copy, Debug)]
pub struct LinearTensor<'a> {
    /// Address of the packed values, a multiple of 8, or of 16 for FP8 and NVFP4 tokens: `[N, K/2]`, with the even element of K in
    /// the low nibble of a byte.
    pub values: CUdeviceptr,
    /// Address of the scales, `[N, K/16]`, e4m3.
    pub scales: CUdeviceptr,
    /// Number of rows and global scale of each projection. The rows add up to N.
    pub global_scales: &'a [(usize, f32)],
    /// Bias: N numbers in host memory.
    pub bias: Option<&'a Bias<'a>>,
    /// Input scale of a checkpoint, for NVFP4 tokens. `None`: each token has its own global scale. Other formats ignore it.
    pub input_scale: Option<f32>,
}

impl LinearTensor<'_> {
    /// Checks the tensor, as far as possible without the device.
    fn check(&self, sizes: &LinearSizes) -> Result<(), Error> {
        let rows = self.global_scales.iter().try_fold(0usize, |all, (rows, _)| all.checked_add(*rows));
        if rows != Some(sizes.n) {
            let got = rows.unwrap_or(usize::MAX);
            return Err(Error::Mismatch { what: "rows that have global scales", got, expected: sizes.n });
        }
        if let Some(&(_, value)) = self.global_scales.iter().find(|(_, scale)| !scale.is_finite() || *scale < 0.0) {
            return Err(Error::GlobalScale { value });
        }
        if !self.values.is_multiple_of(8) {
            return Err(Error::Invalid(format!("values at {:#x}; they must be at a multiple of 8", self.values)));
        }
        self.input_scale.map_or(Ok(()), check_input_scale)?;
        match self.bias {
            Some(bias) if sizes.bias => bias.check(sizes.dtype, sizes.n).map_err(|error| error.at("bias")),
            None if !sizes.bias => Ok(()),
            _ => Err(Error::Invalid("pass biases if and only if the sizes say that the layer has biases".into())),
        }
    }
}

/// A layer with packed weights in the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLinear {
    /// Sizes of the layer.
    pub sizes: LinearSizes,
    /// Address of the weights from [`LinearLauncher::pack`], a multiple of 256: [`LinearLauncher::weight_bytes`] bytes.
    pub weights: CUdeviceptr,
}

/// Packs and launches linear layers in the caller's memory. [`Cuda::linear_launcher`](super::super::Cuda::linear_launcher) creates
/// one for all layers of a device.
///
/// A launcher allocates nothing, waits for nothing, and leaves the thread's current context unchanged. So an engine counts every
/// byte, and can capture a call into its own graph.
#[derive(Clone)]
pub struct LinearLauncher {
    /// Kernels of the device.
    kernels: LinearKernels,
    /// Entries for each format of [`TokenFormat::ALL`], by name. They are loaded when the first layer of a format is packed, and
    /// live as long as the device.
    functions: Arc<[OnceLock<Box<Functions>>; TokenFormat::ALL.len()]>,
    device: Arc<Device>,
}

/// Entries by name.
type Functions = [(&'static str, CUfunction)];

// SAFETY: any thread may use the driver's handles inside while the context is current, and every method makes it current.
unsafe impl Send for LinearLauncher {}
// SAFETY: any thread may use the driver's handles inside, and all shared fields are written once, behind locks.
unsafe impl Sync for LinearLauncher {}

impl LinearLauncher {
    /// Bytes at the start of packed weights with the place of an invalid scale; see [`LinearLauncher::check_packed`].
    pub const HEAD_BYTES: usize = size_of::<u64>();

    /// Creates a launcher, without loading kernels.
    pub(in crate::backend::cuda) fn new(device: Arc<Device>) -> Result<Self, Error> {
        let kernels = LinearKernels::of(device.info.capability).expect("they run wherever a kernel of groups does");
        let kernels = match device.standing.code.given() {
            Some((given, _)) => {
                builds::check_runs(given, device.info.capability)?;
                kernels.with_code_of(given)
            }
            None => kernels,
        };
        let kernels = kernels.without(device.refused.clone());
        Ok(Self { kernels, functions: Arc::default(), device })
    }

    /// Loads the kernels of a layer with tokens in a format, before a stream may be captured. Returns the kernel that
    /// multiplies.
    pub(in crate::backend::cuda) fn load(&self, token_format: TokenFormat) -> Result<&'static dyn Kernel, Error> {
        let kernels = self.kernels.check(token_format, "this card")?;
        let place = &self.functions[token_format as usize];
        if place.get().is_none() {
            self.device.standing.check(Subject::linear(token_format))?;
            let functions = self.device.functions(&kernels.all)?;
            place.get_or_init(|| functions.into());
        }
        Ok(kernels.product)
    }

    /// Returns the entry that multiplies in a call on a device with `sms` SMs.
    pub(in crate::backend::cuda) fn multiplying_entry(
        &self,
        sizes: &LinearSizes,
        tokens: usize,
        sms: u32,
    ) -> Result<&'static str, Error> {
        linear::multiplying_entry(sizes, tokens, &self.kernels, sms)
    }

    /// Bytes of a layer's packed weights, a multiple of 256. The sizes must be [valid](LinearSizes::check).
    pub fn weight_bytes(sizes: &LinearSizes) -> usize {
        PackedWeights::at(sizes, 0).end as usize
    }

    /// Bytes of workspace for a call with up to `max_tokens` tokens, a multiple of 256: 0 for 16-bit tokens. Layers whose calls
    /// follow each other on a stream can share the largest of their workspaces.
    ///
    /// ```
    /// use nvfp4::backend::cuda::LinearLauncher;
    /// use nvfp4::linear::LinearSizes;
    /// use nvfp4::problem::{TokenDtype, TokenFormat};
    ///
    /// let fp8 = LinearSizes { n: 4096, k: 7168, dtype: TokenDtype::Bf16, bias: false, token_format: TokenFormat::Fp8 };
    /// assert_eq!(LinearLauncher::workspace_bytes(&fp8, 2048), 2048 * (7168 + 4));
    /// assert_eq!(LinearLauncher::workspace_bytes(&LinearSizes { token_format: TokenFormat::Bits16, ..fp8 }, 2048), 0);
    /// ```
    pub fn workspace_bytes(sizes: &LinearSizes, max_tokens: usize) -> usize {
        Workspace::at(sizes, max_tokens, 0).1 as usize
    }

    /// Queues the packing of a tensor, which may be freed after the stream has passed it.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Mismatch`] or [`Error::GlobalScale`] if sizes, alignments or global scales are wrong, or an error
    /// of the driver. The device checks the block scales; see [`LinearLauncher::check_packed`].
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null, and captures nothing.
    /// - The device can read a tensor of these sizes at its addresses, and `weights` has
    ///   [`weight_bytes`](LinearLauncher::weight_bytes) bytes. The memory stays allocated, and nothing else accesses it, until the
    ///   stream has passed the packing.
    pub unsafe fn pack(
        &self,
        sizes: &LinearSizes,
        tensor: &LinearTensor<'_>,
        weights: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), Error> {
        sizes.check()?;
        self.load(sizes.token_format)?;
        linear::check_left(sizes, &self.kernels, self.device.info.sms)?;
        tensor.check(sizes)?;
        check_aligned("packed weights", weights)?;
        let PackedWeights { invalid, layer, .. } = PackedWeights::at(sizes, weights);
        let rows = |&(rows, scale): &(usize, f32)| std::iter::repeat_n(scale, rows);
        let alpha: Vec<f32> = tensor.global_scales.iter().flat_map(rows).collect();
        let bias = tensor.bias.map(|bias| bias.numbers(sizes.dtype)).unwrap_or_default();
        let places = [tensor.values, tensor.scales];
        let launch = self.kernels.pack(sizes, places, layer.packed, invalid)?;
        let input_scale: &[f32] = if layer.input_scale == 0 { &[] } else { &[tensor.input_scale.unwrap_or(0.0)] };
        let _entered = self.device.enter()?;
        // SAFETY: the context is current. The caller guarantees the tensor, room at every address, and the stream. The driver has
        // read pageable memory when the call returns (cuda.h, "API synchronization behavior").
        unsafe {
            self.device.check_raw(sys::cuMemsetD8Async(invalid, 0xFF, Self::HEAD_BYTES, stream))?;
            for (to, numbers) in [(layer.alpha, &alpha[..]), (layer.bias, &bias), (layer.input_scale, input_scale)] {
                if !numbers.is_empty() {
                    let (from, bytes) = (numbers.as_ptr().cast(), size_of_val(numbers));
                    self.device.check_raw(sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream))?;
                }
            }
            self.ready(sizes.token_format, &launch)?.queue(&self.device, stream)
        }
    }

    /// Checks that the block scales of packed weights were valid. `head`: first bytes of the packed weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place of the first scale that is negative or NaN.
    pub fn check_packed(sizes: &LinearSizes, head: &[u8; Self::HEAD_BYTES]) -> Result<(), Error> {
        match u64::from_ne_bytes(*head) {
            u64::MAX => Ok(()),
            place => {
                let blocks = (sizes.k / BLOCK) as u64;
                let (row, block) = (place / blocks, place % blocks);
                Err(Error::Invalid(format!("the scale of row {row}, block {block} is negative or NaN")))
            }
        }
    }

    /// Queues a call on the caller's stream, returns without waiting, and returns the number of launches: 1, 2 with FP8 or NVFP4
    /// tokens, or 0 without tokens.
    ///
    /// The first launch may start before the previous kernel of the stream has ended. Until then it reads only weights, and
    /// writes nothing.
    ///
    /// # Errors
    /// If a size is out of range, an address or the pitch is not aligned, or a driver call fails. Faults of a kernel appear when
    /// the stream is synchronized.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - The weights were packed for these sizes, and the packing has ended: the launch may read them before its turn in the stream.
    /// - The device can read the memory at every address of `arguments`, and write the output, with the sizes that
    ///   [`LinearArguments`] states. With FP8 or NVFP4 tokens, `workspace` is a multiple of 256, with
    ///   [`workspace_bytes`](LinearLauncher::workspace_bytes) bytes of memory. Neither the output nor the workspace overlaps another
    ///   operand.
    /// - The memory stays allocated, and nothing else writes it, until the stream has passed this call, or the captured graph is not
    ///   launched any more. Calls that share a workspace are ordered, for example by one stream.
    pub unsafe fn launch(
        &self,
        layer: &PackedLinear,
        arguments: &LinearArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        layer.sizes.check()?;
        check_aligned("packed weights", layer.weights)?;
        check_aligned("the workspace", workspace)?;
        self.load(layer.sizes.token_format)?;
        if arguments.token_count == 0 {
            return Ok(0);
        }
        let placed = PackedWeights::at(&layer.sizes, layer.weights).layer;
        let (workspace, _) = Workspace::at(&layer.sizes, arguments.token_count, workspace);
        let launches = self.kernels.launches(&placed, arguments, workspace, self.device.info.sms)?;
        let _entered = self.device.enter()?;
        for launch in &launches {
            // SAFETY: the context is current. The caller guarantees the stream and the memory that the parameter points to. The device
            // keeps the functions' modules loaded.
            unsafe { self.ready(layer.sizes.token_format, launch)?.queue(&self.device, stream)? };
        }
        Ok(launches.len())
    }

    /// Returns a launch for tokens in a format, with its loaded entry.
    fn ready(&self, token_format: TokenFormat, launch: &Launch) -> Result<ReadyLaunch, Error> {
        let is_it = |(entry, _): &&(&str, CUfunction)| *entry == launch.grid.entry;
        let functions = self.functions[token_format as usize].get().expect("entries are loaded");
        let &(_, function) = functions.iter().find(is_it).expect("an entry of these kernels");
        let parameter = launch.write(0, &mut [], &mut |map| maps::encode(&self.device, map))?;
        Ok(ReadyLaunch { function, grid: launch.grid, parameter })
    }
}

fn check_aligned(what: &str, address: CUdeviceptr) -> Result<(), Error> {
    if address.is_multiple_of(ALIGNMENT) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{what} at {address:#x}: the address must be a multiple of {ALIGNMENT}")))
}
