//! Linear layers in the caller's memory: weights are packed there and calls are launched, all on the caller's stream.

use std::sync::{Arc, OnceLock};

use cuda_driver::sys::{self, CUdeviceptr, CUfunction, CUstream};

use crate::backend::cuda::device::Device;
use crate::backend::cuda::maps;
use crate::backend::cuda::planned::ReadyLaunch;
use crate::bias::Bias;
use crate::error::Error;
use crate::format::BLOCK;
use crate::fp4::check_input_scale;
use crate::kernels::launch::{ALIGNMENT, Launch};
use crate::kernels::linear::weights::PackedWeights;
use crate::kernels::linear::workspace::Workspace;
use crate::kernels::linear::{LinearArguments, LinearKernels};
use crate::kernels::{Subject, builds};
use crate::linear::LinearSizes;
use crate::problem::TokenFormat;

/// A weight in device memory as a checkpoint has it: one projection, or several below each other (as engines keep q, k and v).
#[derive(Clone, Copy, Debug)]
pub struct LinearTensor<'a> {
    /// Address of the packed values, at a multiple of 8, or for tokens in FP8 or NVFP4 of 16: `[N, K/2]`, the even element of K in the low nibble of
    /// a byte.
    pub values: CUdeviceptr,
    /// Address of the scales, `[N, K/16]`, e4m3.
    pub scales: CUdeviceptr,
    /// For each projection how many rows it has, and the factor of its numbers. The rows add up to N.
    pub global_scales: &'a [(usize, f32)],
    /// N numbers in host memory.
    pub bias: Option<&'a Bias<'a>>,
    /// For tokens in NVFP4 their global scale, as checkpoints carry it; without it each has one of its own. Tokens of other formats have
    /// no use for it.
    pub input_scale: Option<f32>,
}

impl LinearTensor<'_> {
    /// Checks what can be seen without the device.
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
            _ => Err(Error::Invalid("biases, and sizes that say that there are some, come together".into())),
        }
    }
}

/// A layer whose packed weights lie in the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLinear {
    /// The sizes.
    pub sizes: LinearSizes,
    /// Address of the weights that [`LinearLauncher::pack`] left: [`LinearLauncher::weight_bytes`], at a multiple of 256.
    pub weights: CUdeviceptr,
}

/// Packs and launches linear layers that lie in the caller's memory; made by
/// [`Cuda::linear_launcher`](super::super::Cuda::linear_launcher), one for all layers of a device.
///
/// It allocates nothing, waits for nothing, and leaves the thread's current context as it was. So an engine counts every byte, and
/// a call may be captured into the engine's own graph.
#[derive(Clone)]
pub struct LinearLauncher {
    /// Those that run on the device.
    kernels: LinearKernels,
    /// The entries for tokens of each of [`TokenFormat::ALL`], by name; good for as long as the device. They are loaded when the first
    /// such layer is packed.
    functions: Arc<[OnceLock<Box<Functions>>; TokenFormat::ALL.len()]>,
    device: Arc<Device>,
}

/// Entries by name.
type Functions = [(&'static str, CUfunction)];

// SAFETY: the handles inside are the driver's, which any thread may use with the context current; every method makes it current.
unsafe impl Send for LinearLauncher {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for LinearLauncher {}

impl LinearLauncher {
    /// Bytes at the beginning of packed weights that say whether a scale was wrong; see [`LinearLauncher::check_packed`].
    pub const HEAD_BYTES: usize = size_of::<u64>();

    /// A launcher that has loaded nothing yet.
    pub(in crate::backend::cuda) fn new(device: Arc<Device>) -> Result<Self, Error> {
        let kernels = LinearKernels::of(device.info.capability).expect("they run wherever a kernel of groups does");
        let kernels = match device.standing.code.given() {
            Some((given, _)) => {
                builds::check_runs(given, device.info.capability)?;
                kernels.with_code_of(given)
            }
            None => kernels,
        };
        Ok(Self { kernels, functions: Arc::default(), device })
    }

    /// Loads what a layer needs whose tokens have this format, before a stream may be captured.
    pub(in crate::backend::cuda) fn load(&self, token_format: TokenFormat) -> Result<(), Error> {
        self.kernels.check_takes(token_format, "this card")?;
        let place = &self.functions[token_format as usize];
        if place.get().is_none() {
            self.device.standing.check(Subject::linear(token_format))?;
            let kernels = self.kernels.of_format(token_format).expect("checked above");
            let functions = self.device.functions(&kernels)?;
            place.get_or_init(|| functions.into());
        }
        Ok(())
    }

    /// The name of the kernel that multiplies tokens of a format.
    pub(in crate::backend::cuda) fn product_kernel(&self, token_format: TokenFormat) -> &'static str {
        self.kernels.product_kernel(token_format)
    }

    /// Bytes of a layer's packed weights, a multiple of 256. The sizes have been [checked](LinearSizes::check).
    pub fn weight_bytes(sizes: &LinearSizes) -> usize {
        PackedWeights::at(sizes, 0).end as usize
    }

    /// Bytes of the workspace that a call needs with up to so many tokens, a multiple of 256: 0 with tokens of 16 bits. Layers whose calls
    /// come one after the other on a stream can share one workspace, as large as the largest of theirs.
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

    /// Queues the packing of a tensor, which is not needed any more when the stream has come past it.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Mismatch`] or [`Error::GlobalScale`] if sizes, alignments or factors are wrong, or a failure of
    /// the driver. Whether block scales are valid is found out on the device: see [`LinearLauncher::check_packed`].
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null, and captures nothing.
    /// - A tensor of these sizes lies where it says, the device can read it, and [`weight_bytes`](LinearLauncher::weight_bytes) lie
    ///   at `weights`. All of it stays allocated, and is touched by nobody else, until the stream has come past this.
    pub unsafe fn pack(
        &self,
        sizes: &LinearSizes,
        tensor: &LinearTensor<'_>,
        weights: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), Error> {
        sizes.check()?;
        self.load(sizes.token_format)?;
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
        // SAFETY: the context is current; `# Safety` above asks for the tensor, for room at every address, and for the stream. The
        // driver has read what is in pageable memory when the call returns (cuda.h, "API synchronization behavior").
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

    /// Says whether the block scales of packed weights were valid, by the first bytes of the weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place of the first that is negative or NaN.
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

    /// Queues a call on the caller's stream and returns without waiting: how many launches it was given, one, with tokens in FP8 or NVFP4
    /// two, or without tokens none.
    ///
    /// The first launch may begin before the stream has come to the end of the kernel before it, but until then reads nothing except
    /// weights, and writes nothing.
    ///
    /// # Errors
    /// If a size is out of range, an address or the pitch is not aligned, or a driver call fails. What the kernel itself does wrong
    /// shows when the stream is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - The weights were packed for these sizes, and that was waited for: the launch reads them before the stream has come to it.
    /// - Every address of `arguments` is one of memory that this device can read, or for the output write, of the sizes that
    ///   [`LinearArguments`] says. With tokens in FP8 or NVFP4, [`workspace_bytes`](LinearLauncher::workspace_bytes) lie at `workspace`, a multiple
    ///   of 256. The output and the workspace overlap nothing.
    /// - All of it stays allocated, and is written by nobody else, until the stream has come past this call, or the graph that it was
    ///   captured into is not launched any more. Calls that share a workspace are on one stream, or in an order otherwise.
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
            // SAFETY: the context is current; `# Safety` above asks for the stream and for all that the parameter points to; the device
            // keeps the functions' modules.
            unsafe { self.ready(layer.sizes.token_format, launch)?.queue(&self.device, stream)? };
        }
        Ok(launches.len())
    }

    /// A launch for tokens of a format, with its entry.
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
