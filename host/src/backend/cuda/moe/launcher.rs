//! MoE layers in the caller's memory: packs weights and launches calls on the caller's stream.

use std::sync::{Arc, OnceLock};

use bytemuck::Zeroable;
use cuda_driver::sys::{self, CUdeviceptr, CUfunction, CUstream};
use kernels_gpu::layer::moe_pack::abi::{Pack, PackNvfp4};
use kernels_gpu::nvfp4_rows::{value_bytes, weight_scale_bytes};
use kernels_gpu::units::matrix_bytes;

use crate::Error;
use crate::backend::cuda::device::Device;
use crate::backend::cuda::maps;
use crate::backend::cuda::planned::ReadyLaunch;
use crate::bias::Bias;
use crate::format::BLOCK;
use crate::fp4::InputScales;
use crate::moe::MoeSizes;
use crate::problem::TokenFormat;
use nvfp4_kernels::kernel::Kernel;
use nvfp4_kernels::launch::{ALIGNMENT, Launch};
use nvfp4_kernels::layer::moe_pack::MoePack;
use nvfp4_kernels::layer::moe_pack::row_order::RowOrder;
use nvfp4_kernels::layer::moe_route::MoeRoute;
use nvfp4_kernels::moe::{
    self, MoeArguments, MoeKernels, PROJECTIONS, PackedWeights, Packing, PlacedExperts, PlacedMoe, Workspace, packing,
    workspace_bytes,
};
use nvfp4_kernels::{Subject, builds};

/// Names of the projections, by number.
const NAMES: [&str; PROJECTIONS] = ["gate", "up", "down"];

/// A projection of all experts of a layer, in device memory, in the order of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct MoeTensor<'a> {
    /// Address of the first expert's packed values, a multiple of 16: row-major, with the even element of K in the low nibble of
    /// a byte.
    pub values: CUdeviceptr,
    /// Bytes from one expert's values to the next one's, a multiple of 16.
    pub values_stride: usize,
    /// Address of the first expert's scales, e4m3, row-major.
    pub scales: CUdeviceptr,
    /// Bytes from one expert's scales to the next one's.
    pub scales_stride: usize,
    /// Global scale of each expert, a factor of its numbers.
    pub global_scales: &'a [f32],
    /// Biases in host memory: one number per expert and row, in the order of the experts.
    pub bias: Option<&'a Bias<'a>>,
}

/// Projections of a layer's experts: gate and up `[I, H]`, down `[H, I]`.
#[derive(Clone, Copy, Debug)]
pub struct MoeTensors<'a> {
    /// Gate of all experts, if the activation has a gate. If an engine keeps gate and up of an expert in one tensor, the stride is
    /// the size of both.
    pub gate: Option<MoeTensor<'a>>,
    /// Up of all experts.
    pub up: MoeTensor<'a>,
    /// Down of all experts.
    pub down: MoeTensor<'a>,
    /// Input scales of all experts, in host memory. Empty if the sizes have no input scales.
    pub input_scales: &'a [InputScales],
}

impl<'a> MoeTensors<'a> {
    /// Returns the projections that exist, with their numbers.
    fn projections(&self) -> impl Iterator<Item = (usize, &MoeTensor<'a>)> {
        let tensors = [self.gate.as_ref(), Some(&self.up), Some(&self.down)].into_iter().enumerate();
        tensors.filter_map(|(projection, tensor)| Some((projection, tensor?)))
    }

    /// Checks tensors of the routed experts or of the shared one, as far as possible without the device.
    fn check(&self, sizes: &MoeSizes, of_shared: bool) -> Result<(), Error> {
        if self.gate.is_some() != sizes.activation.has_gate() {
            let text =
                format!("pass tensors of gate if and only if the activation has a gate; it is {}", sizes.activation);
            return Err(Error::Invalid(text));
        }
        let (got, Matrices { count, .. }) = (self.input_scales.len(), Matrices::of(sizes, of_shared, 0));
        let expected = if sizes.input_scales { count as usize } else { 0 };
        if got != expected {
            return Err(Error::Mismatch { what: "input scales", got, expected });
        }
        self.input_scales.iter().enumerate().try_for_each(|(expert, scales)| {
            scales.check().map_err(|error| error.at(format_args!("expert {expert}")))
        })?;
        for (projection, tensor) in self.projections() {
            let (name, Matrices { count, rows, .. }) = (NAMES[projection], Matrices::of(sizes, of_shared, projection));
            let experts = count as usize;
            if let Some(bias) = tensor.bias {
                if !sizes.biases {
                    return Err(Error::Invalid(
                        "biases were given, but the sizes say that the layer has none; leave them out".into(),
                    )
                    .at(name));
                }
                bias.check(sizes.dtype, experts * rows as usize).map_err(|error| error.at(name))?;
            }
            let MoeTensor { values, values_stride, global_scales, .. } = *tensor;
            if global_scales.len() != experts {
                let got = global_scales.len();
                return Err(Error::Mismatch { what: "global scales", got, expected: experts }.at(name));
            }
            if let Some(expert) = global_scales.iter().position(|scale| !scale.is_finite() || *scale < 0.0) {
                let error = Error::GlobalScale { value: global_scales[expert] };
                return Err(error.at(format_args!("expert {expert}: {name}")));
            }
            if !values.is_multiple_of(16) || !values_stride.is_multiple_of(16) {
                return Err(Error::Invalid(format!(
                    "{name}: values at {values:#x}, {values_stride} bytes apart; both must be multiples of 16"
                )));
            }
        }
        Ok(())
    }
}

/// A layer with packed weights in the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedMoe {
    /// Sizes of the layer.
    pub sizes: MoeSizes,
    /// Address of the weights from [`MoeLauncher::pack`], a multiple of 256: [`weight_bytes`](moe::weight_bytes) bytes.
    pub weights: CUdeviceptr,
    /// Address of the layer's number of each expert that tokens can name: `sizes.named_experts` numbers, i32, negative for experts
    /// on other devices. 0: tokens name experts by the layer's numbers.
    pub expert_map: CUdeviceptr,
}

/// Entries by name.
type Functions = [(&'static str, CUfunction)];

/// Packs and launches MoE layers in the caller's memory. [`Cuda::moe_launcher`](super::super::Cuda::moe_launcher) creates one for
/// all layers of a device.
///
/// A launcher allocates nothing, waits for nothing, and leaves the thread's current context unchanged. So an engine counts every
/// byte, and can capture a call into its own graph.
#[derive(Clone)]
pub struct MoeLauncher {
    /// Kernels of the device.
    pub(super) kernels: MoeKernels,
    /// CTAs of the largest cluster that makes lists; set when the entry is loaded.
    largest_cluster: Arc<OnceLock<u32>>,
    /// Entries for each format of [`TokenFormat::ALL`], by name. They are loaded when the first layer of a format is packed, and
    /// live as long as the device.
    functions: Arc<[OnceLock<Box<Functions>>; TokenFormat::ALL.len()]>,
    device: Arc<Device>,
}

// SAFETY: any thread may use the driver's handles inside while the context is current, and every method makes it current.
unsafe impl Send for MoeLauncher {}
// SAFETY: any thread may use the driver's handles inside, and all shared fields are written once, behind locks.
unsafe impl Sync for MoeLauncher {}

impl MoeLauncher {
    /// Bytes at the start of packed weights with the places of invalid scales; see [`MoeLauncher::check_packed`].
    pub const HEAD_BYTES: usize = size_of::<u64>() * 2 * PROJECTIONS;

    /// Creates a launcher, without loading kernels.
    pub(in crate::backend::cuda) fn new(device: Arc<Device>) -> Result<Self, Error> {
        let kernels = MoeKernels::of(device.info.capability).expect("they run wherever a kernel of groups does");
        let kernels = match device.standing.code.given() {
            Some((given, _)) => {
                builds::check_runs(given, device.info.capability)?;
                kernels.with_code_of(given)
            }
            None => kernels,
        };
        let kernels = kernels.without(device.refused.clone());
        Ok(Self { kernels, largest_cluster: Arc::default(), functions: Arc::default(), device })
    }

    /// Loads the kernels of a layer with tokens in a format, before a stream may be captured. Returns the kernel that
    /// multiplies.
    pub(in crate::backend::cuda) fn load(&self, token_format: TokenFormat) -> Result<&'static dyn Kernel, Error> {
        let kernels = self.kernels.check(token_format, "this card")?;
        let place = &self.functions[token_format as usize];
        if place.get().is_none() {
            self.device.standing.check(Subject::moe(token_format))?;
            let functions = self.device.functions(&kernels.all)?;
            let _entered = self.device.enter()?;
            self.largest_cluster.get_or_init(|| self.find_largest_cluster(&functions));
            place.get_or_init(|| functions.into());
        }
        Ok(kernels.product)
    }

    /// Returns the entries that multiply in a call on a device with `sms` SMs: gate and up, then down, and the same of the
    /// shared expert.
    pub(in crate::backend::cuda) fn multiplying_entries(
        &self,
        sizes: &MoeSizes,
        tokens: usize,
        sms: u32,
    ) -> Result<Vec<&'static str>, Error> {
        moe::multiplying_entries(sizes, tokens, &self.kernels, sms)
    }

    /// Checks that the instances that failed self-tests leave one for each product of a layer.
    pub(super) fn check_left(&self, sizes: &MoeSizes) -> Result<(), Error> {
        moe::check_left(sizes, &self.kernels, self.device.info.sms)
    }

    /// Returns the CTAs of the largest cluster in which this GPU makes lists. The context is current.
    fn find_largest_cluster(&self, functions: &Functions) -> u32 {
        let large = MoeRoute::largest_cluster();
        let route = functions.iter().find(|(entry, _)| *entry == large.entry);
        let takes = |&(_, function): &(_, CUfunction)| self.device.takes_large_clusters(function, &large);
        if self.kernels.overlaps() && route.is_some_and(takes) { large.cluster } else { self.kernels.largest_cluster }
    }

    /// Queues the packing of a checkpoint's tensors, which may be freed after the stream has passed it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if sizes or alignments are wrong, [`Error::GlobalScale`], or an error of the driver. The device checks the
    /// block scales; see [`MoeLauncher::check_packed`].
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null, and captures nothing.
    /// - The device can read tensors of these sizes at their addresses, and `weights` has [`weight_bytes`](moe::weight_bytes) bytes.
    ///   The memory stays allocated, and nothing else accesses it, until the stream has passed the packing.
    pub unsafe fn pack(
        &self,
        sizes: &MoeSizes,
        experts: &MoeTensors<'_>,
        shared: Option<&MoeTensors<'_>>,
        weights: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), Error> {
        sizes.check()?;
        self.load(sizes.token_format)?;
        self.check_left(sizes)?;
        if shared.is_some() != sizes.shared_intermediate.is_some() {
            return Err(Error::Invalid(
                "pass both the tensors of a shared expert and its intermediate size in the sizes, or neither".into(),
            ));
        }
        check_weights(weights)?;
        experts.check(sizes, false)?;
        shared.map_or(Ok(()), |shared| shared.check(sizes, true).map_err(|error| error.at("shared expert")))?;
        let packed = PackedWeights::at(sizes, weights);
        let _entered = self.device.enter()?;
        // SAFETY: the context is current. The caller guarantees the tensors, the memory at `weights` and the stream.
        unsafe {
            self.clear(sizes, &packed, stream)?;
            for (of_shared, tensors) in [(false, Some(experts)), (true, shared)] {
                for (projection, tensor) in tensors.iter().flat_map(|tensors| tensors.projections()) {
                    self.pack_projection(sizes, &packed, of_shared, projection, tensor, stream)?;
                }
            }
            if sizes.has_input_scales() {
                let of_shared = shared.map_or(&[][..], |shared| shared.input_scales);
                self.set_input_scales(&packed, [experts.input_scales, of_shared], stream)?;
            }
        }
        Ok(())
    }

    /// Marks that no scale is invalid yet, and that there are no input scales.
    ///
    /// # Safety
    ///
    /// The context is current, the stream belongs to it and captures nothing, and the weights have room.
    pub(super) unsafe fn clear(&self, sizes: &MoeSizes, packed: &PackedWeights, stream: CUstream) -> Result<(), Error> {
        let (routed, shared) = ((&packed.experts, sizes.experts), packed.shared.as_ref().map(|shared| (shared, 1)));
        let experts = [routed].into_iter().chain(shared);
        let input_scales = experts.flat_map(|(placed, count)| placed.input_scales.map(|at| (at, count)));
        // SAFETY: the caller guarantees the context, the stream and room for the weights, which include the input scales.
        unsafe {
            self.device.check_raw(sys::cuMemsetD8Async(packed.invalid, 0xFF, Self::HEAD_BYTES, stream))?;
            for (at, count) in input_scales.filter(|(at, _)| *at != 0) {
                self.device.check_raw(sys::cuMemsetD8Async(at, 0, size_of::<f32>() * count, stream))?;
            }
        }
        Ok(())
    }

    /// Queues the copy of the input scales of the routed experts and of the shared one to packed weights.
    ///
    /// # Safety
    ///
    /// The requirements of [`MoeLauncher::clear`]; there is one scale per expert, and the tokens are NVFP4.
    pub(super) unsafe fn set_input_scales(
        &self,
        packed: &PackedWeights,
        [experts, shared]: [&[InputScales]; 2],
        stream: CUstream,
    ) -> Result<(), Error> {
        let of_shared = packed.shared.as_ref().map(|placed| (placed, shared));
        for (placed, scales) in [(&packed.experts, experts)].into_iter().chain(of_shared) {
            let of: [fn(&InputScales) -> f32; 2] = [|of| of.gate_up, |of| of.down];
            for (to, of) in placed.input_scales.into_iter().zip(of) {
                let numbers: Vec<f32> = scales.iter().map(of).collect();
                let (from, bytes) = (numbers.as_ptr().cast(), size_of_val(&*numbers));
                // SAFETY: the weights have room for one scale per expert. The driver has read pageable memory when the call returns
                // (cuda.h, "API synchronization behavior").
                self.device.check_raw(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream) })?;
            }
        }
        Ok(())
    }

    /// Queues the packing of a projection (0: gate, 1: up, 2: down) of all experts, and the copy of its global scales and biases.
    ///
    /// # Safety
    ///
    /// The requirements of [`MoeLauncher::pack`] for this tensor; the context is current.
    pub(super) unsafe fn pack_projection(
        &self,
        sizes: &MoeSizes,
        packed: &PackedWeights,
        of_shared: bool,
        projection: usize,
        tensor: &MoeTensor<'_>,
        stream: CUstream,
    ) -> Result<(), Error> {
        let placed = if of_shared { packed.shared.as_ref() } else { Some(&packed.experts) };
        let PlacedExperts { gate_up, down, alpha, bias, .. } = placed.expect("checked when packing begins");
        let Matrices { count, rows, k } = Matrices::of(sizes, of_shared, projection);
        let is_down = projection == 2;
        // Up follows gate, if there is a gate.
        let (before, of_both) = if sizes.activation.has_gate() { (projection as u64, 2) } else { (0, 1) };
        let (at, before, each) = if is_down { (*down, 0, 1) } else { (*gate_up, before, of_both) };
        let (packing, invalid) = (packing(sizes, projection), packed.invalid(of_shared, projection));
        let launch = match packing {
            Packing::Nvfp4 => {
                let [value_bytes_of, scale_bytes] = [value_bytes(rows.into(), k), weight_scale_bytes(rows, k)];
                let scales_at = at + u64::from(count) * each * value_bytes_of;
                MoePack.launch_nvfp4(PackNvfp4 {
                    values: tensor.values,
                    values_stride: tensor.values_stride as u64,
                    scales: tensor.scales,
                    scales_stride: tensor.scales_stride as u64,
                    packed_values: at + before * value_bytes_of,
                    packed_values_stride: each * value_bytes_of,
                    packed_scales: scales_at + before * scale_bytes,
                    packed_scales_stride: each * scale_bytes,
                    invalid,
                    matrices: count,
                    rows,
                    k,
                    unused: 0,
                })
            }
            Packing::Units(operand_type, row_order) => {
                let bytes = matrix_bytes(rows, k);
                MoePack.launch(Pack {
                    values: tensor.values,
                    values_stride: tensor.values_stride as u64,
                    scales: tensor.scales,
                    scales_stride: tensor.scales_stride as u64,
                    units: at + before * bytes,
                    units_stride: each * bytes,
                    invalid,
                    matrices: count,
                    rows,
                    k,
                    ordered_rows: (row_order == RowOrder::OfK).into(),
                    operand_type: operand_type as u32,
                    ..Pack::zeroed()
                })
            }
        };
        let biases = if bias[projection] == 0 {
            Vec::new()
        } else {
            let numbers = tensor.bias.map(|bias| bias.numbers(sizes.dtype));
            packing.row_order().biases(numbers.as_deref(), count as usize, rows as usize)
        };
        let copies = [(alpha[projection], tensor.global_scales), (bias[projection], &biases[..])];
        // SAFETY: the caller guarantees the tensor, room at every address, and the stream. The driver has read pageable memory when
        // the call returns (cuda.h, "API synchronization behavior").
        unsafe {
            for (to, numbers) in copies.into_iter().filter(|(_, numbers)| !numbers.is_empty()) {
                let (from, bytes) = (numbers.as_ptr().cast(), size_of_val(numbers));
                self.device.check_raw(sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream))?;
            }
            self.ready(&launch?)?.queue(&self.device, stream)
        }
    }

    /// Checks that the block scales of packed weights were valid. `head`: first bytes of the packed weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place of the first scale that is negative or NaN.
    pub fn check_packed(sizes: &MoeSizes, head: &[u8; Self::HEAD_BYTES]) -> Result<(), Error> {
        for (slot, bytes) in head.as_chunks::<{ size_of::<u64>() }>().0.iter().enumerate() {
            let found = u64::from_ne_bytes(*bytes);
            if found == u64::MAX {
                continue;
            }
            let (of_shared, projection) = (slot >= PROJECTIONS, slot % PROJECTIONS);
            let Matrices { rows, k, .. } = Matrices::of(sizes, of_shared, projection);
            let blocks = u64::from(k) / BLOCK as u64;
            let (row, block) = (found / blocks, found % blocks);
            let (expert, row) = (row / u64::from(rows), row % u64::from(rows));
            let expert = if of_shared { "shared expert".into() } else { format!("expert {expert}") };
            return Err(Error::Invalid(format!(
                "{expert}: {}: the scale of row {row}, block {block} is negative or NaN",
                NAMES[projection]
            )));
        }
        Ok(())
    }

    /// Bytes of workspace for a call with up to `max_tokens` tokens; see [`workspace_bytes`].
    pub fn workspace_bytes(&self, sizes: &MoeSizes, max_tokens: usize) -> usize {
        workspace_bytes(sizes, max_tokens)
    }

    /// Queues a call on the caller's stream, returns without waiting, and returns the number of launches. The launches depend on
    /// sizes, T and addresses, never on the experts that the tokens choose, and no launch waits for the host. So a captured graph
    /// is correct for the ids and weights that the memory holds when the graph runs.
    ///
    /// The first launch may start before the previous kernel of the stream has ended, but accesses no memory until then.
    ///
    /// # Errors
    /// If a size is out of range, an address or a pitch is not aligned, weights are on the input of a layer with more than one
    /// expert per token, or a driver call fails. Faults of a kernel appear when the stream is synchronized.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - The weights were packed for these sizes, on this stream or before it, and `layer` has the address of the map.
    /// - The device can read the memory at every address of `arguments`, and write the output, with the sizes that
    ///   [`MoeArguments`] states. `workspace` is a multiple of 256, with [`workspace_bytes`] bytes of memory. Neither the output nor
    ///   the workspace overlaps another operand.
    /// - The memory stays allocated, and nothing else writes it, until the stream has passed this call, or the graph is not launched
    ///   any more. Calls that share a workspace are ordered, for example by one stream.
    pub unsafe fn launch(
        &self,
        layer: &PackedMoe,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        layer.sizes.check()?;
        check_weights(layer.weights)?;
        self.load(layer.sizes.token_format)?;
        let packed = PackedWeights::at(&layer.sizes, layer.weights);
        let placed = PlacedMoe {
            sizes: layer.sizes,
            experts: packed.experts,
            shared: packed.shared,
            map: layer.expert_map,
            keeps_stages: false,
        };
        let _entered = self.device.enter()?;
        // SAFETY: the context is current. The caller guarantees weights, operands, workspace and stream.
        unsafe { self.queue(&placed, arguments, workspace, stream) }
    }

    /// Does the same as [`MoeLauncher::launch`] for a layer with parts at any addresses.
    ///
    /// # Safety
    ///
    /// The requirements of [`MoeLauncher::launch`]; the context is current.
    pub(super) unsafe fn queue(
        &self,
        layer: &PlacedMoe,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        let largest_cluster = self.largest_cluster.get().copied().unwrap_or(self.kernels.largest_cluster);
        let kernels = self.kernels.clone().with_largest_cluster(largest_cluster);
        let mut count = 0;
        for (_, chunk) in moe::chunks(&layer.sizes, arguments)? {
            let workspace = Workspace::at(&layer.sizes, chunk.token_count, workspace);
            for launch in moe::launches(layer, &chunk, &workspace, &kernels, self.device.info.sms)? {
                // SAFETY: the caller guarantees the stream and the memory that parameters point to. The device keeps the functions'
                // modules loaded.
                unsafe { self.ready(&launch)?.queue(&self.device, stream)? };
                count += 1;
            }
        }
        Ok(count)
    }

    /// Returns a launch with its loaded entry.
    fn ready(&self, launch: &Launch) -> Result<ReadyLaunch, Error> {
        let is_it = |(entry, _): &&(&str, CUfunction)| *entry == launch.grid.entry;
        let mut loaded = self.functions.iter().filter_map(OnceLock::get).flatten();
        let &(_, function) = loaded.find(is_it).expect("entries are loaded");
        let parameter = launch.write(0, &mut [], &mut |map| maps::encode(&self.device, map))?;
        Ok(ReadyLaunch { function, grid: launch.grid, parameter })
    }
}

/// Sizes of a projection's matrices.
struct Matrices {
    count: u32,
    rows: u32,
    k: u32,
}

impl Matrices {
    fn of(sizes: &MoeSizes, of_shared: bool, projection: usize) -> Self {
        let (count, intermediate) =
            if of_shared { (1, sizes.shared_intermediate.unwrap_or(0)) } else { (sizes.experts, sizes.intermediate) };
        let (hidden, intermediate) = (sizes.hidden as u32, intermediate as u32);
        let (rows, k) = if projection == 2 { (hidden, intermediate) } else { (intermediate, hidden) };
        Self { count: count as u32, rows, k }
    }
}

fn check_weights(address: CUdeviceptr) -> Result<(), Error> {
    if address.is_multiple_of(ALIGNMENT) {
        return Ok(());
    }
    Err(Error::Invalid(format!("packed weights at {address:#x}: the address must be a multiple of {ALIGNMENT}")))
}
