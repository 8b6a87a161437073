//! A launch as a JSON file: PTX, shape, buffers, arguments, and what to save. See the crate's README for an example.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::config::fault::Fault;
use crate::config::launch::{Allow, DeviceConfig, LaunchConfig};
use crate::config::order::{Bounds, Exploration, Order};
use crate::config::report::Report;
use crate::device::{Arg, Buffer, Device};
use crate::hw::swizzle::Swizzle;
use crate::hw::tensor_map::{DataType, Interleave, L2Promotion, OBJECT_BYTES, OobFill, TensorMap};
use crate::module::Module;
use crate::timed::Timeline;

/// Contents of a launch file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchFile {
    /// Path of the PTX file, relative to the launch file.
    #[serde(default)]
    pub ptx: PathBuf,
    /// Name of the entry. Default: the only entry of the file.
    pub entry: Option<String>,
    /// Number of CTAs in x, y and z.
    #[serde(default = "ones")]
    pub grid: [u32; 3],
    /// Threads per CTA in x, y and z.
    #[serde(default = "ones")]
    pub block: [u32; 3],
    /// CTAs per cluster in x, y and z.
    #[serde(default = "ones")]
    pub cluster: [u32; 3],
    /// Dynamic shared memory per CTA, in bytes.
    #[serde(default)]
    pub shared_bytes: u32,
    /// Allocations by name.
    #[serde(default)]
    pub buffers: BTreeMap<String, BufferSpec>,
    /// Arguments of the kernel, in order.
    #[serde(default)]
    pub args: Vec<ArgSpec>,
    /// Arguments of an earlier launch that this launch overlaps. All other settings are the same for both launches.
    pub overlaps: Option<Vec<ArgSpec>>,
    /// Buffers to write to files after the launch.
    #[serde(default)]
    pub save: BTreeMap<String, PathBuf>,
    /// `fair`, `worst` or `seed:N`.
    pub schedule: Option<String>,
    /// Whether to search for races and uninitialized reads.
    #[serde(default = "yes")]
    pub sanitize: bool,
    /// Whether to enforce the manual literally: see [`LaunchConfig::strict`].
    #[serde(default)]
    pub strict: bool,
    /// Whether to search for races in global memory between the grid's threads. Requires `sanitize`.
    #[serde(default = "yes")]
    pub global_races: bool,
    /// [`LaunchConfig::alloc_rendezvous`].
    #[serde(default)]
    pub alloc_rendezvous: bool,
    /// Whether to continue after hazards: see [`LaunchConfig::keep_going`].
    #[serde(default)]
    pub keep_going: bool,
    /// Hazards to suppress, each `KIND` or `KIND:LINE` with a line of the PTX.
    #[serde(default)]
    pub allow: Vec<String>,
    /// How matrix instructions add floating-point products: `card` (default), as the GPU does, or `exact`, rounded once.
    pub sums: Option<String>,
    /// Maximum number of instructions that a warp may execute.
    pub instruction_budget: Option<u64>,
    /// Launches after this one, on the same buffers.
    #[serde(default)]
    pub then: Vec<Step>,
}

/// A launch after the first. Missing fields have the value of the first launch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "as in `LaunchFile`")]
pub struct Step {
    pub entry: Option<String>,
    pub grid: Option<[u32; 3]>,
    pub block: Option<[u32; 3]>,
    pub cluster: Option<[u32; 3]>,
    pub shared_bytes: Option<u32>,
    pub args: Option<Vec<ArgSpec>>,
    /// Whether the launch may begin while the previous launch still runs.
    #[serde(default)]
    pub overlaps: bool,
}

/// An address in a buffer.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "the names say it")]
pub enum PointerSpec {
    /// Address of the first byte.
    Buffer(String),
    At {
        buffer: String,
        #[serde(default)]
        offset: u64,
    },
}

impl PointerSpec {
    fn make(&self, places: &Places<'_>) -> Result<u64> {
        match self {
            PointerSpec::Buffer(buffer) => places.pointer(buffer, 0),
            PointerSpec::At { buffer, offset } => places.pointer(buffer, *offset),
        }
    }
}

fn ones() -> [u32; 3] {
    [1; 3]
}

fn yes() -> bool {
    true
}

/// Contents of a buffer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferSpec {
    /// Path of a file, relative to the launch file.
    pub file: Option<PathBuf>,
    /// Length in bytes, if no file is given.
    pub bytes: Option<u64>,
    /// `zero`, `poison` or `undefined`.
    pub fill: Option<Fill>,
    /// Values, as little-endian 32-bit words.
    pub u32: Option<Vec<u32>>,
    /// Values, as f32.
    pub f32: Option<Vec<f32>>,
    /// Pointers of 8 bytes. Each is a buffer's name, or `{"buffer": name, "offset": bytes}`. `null` is the null
    /// pointer.
    pub pointers: Option<Vec<Option<PointerSpec>>>,
    /// Values written over the bytes: pointers and tensor maps.
    #[serde(default)]
    patches: Vec<Patch>,
}

/// Initial bytes of a buffer without contents.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fill {
    /// All bytes 0.
    Zero,
    /// All bytes 0xff: a NaN in every floating-point format, -1 as an integer.
    Poison,
    /// All bytes 0xff and undefined: the sanitizer reports a use of a byte that nothing has written.
    Undefined,
}

/// An argument.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgSpec {
    /// Name of the buffer whose address is passed.
    pub pointer: Option<String>,
    /// Byte offset added to the address.
    #[serde(default)]
    pub offset: u64,
    i32: Option<i32>,
    i64: Option<i64>,
    u32: Option<u32>,
    u64: Option<u64>,
    f32: Option<f32>,
    f64: Option<f64>,
    /// A tensor map of 128 bytes.
    pub tensor_map: Option<TensorMapSpec>,
    /// Bytes in hexadecimal.
    hex: Option<String>,
    /// Bytes from a file.
    file: Option<PathBuf>,
    /// Values written over the bytes.
    #[serde(default)]
    patches: Vec<Patch>,
}

/// A value inside a parameter or a buffer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// Byte offset.
    at: usize,
    pointer: Option<String>,
    #[serde(default)]
    offset: u64,
    tensor_map: Option<TensorMapSpec>,
}

/// Arguments of `cuTensorMapEncodeTiled`, innermost dimension first.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMapSpec {
    /// The buffer that holds the tensor.
    pub buffer: String,
    #[serde(default)]
    offset: u64,
    #[serde(rename = "type")]
    data_type: String,
    dims: Vec<u64>,
    /// Strides in bytes, without the innermost dimension.
    strides: Vec<u64>,
    #[serde(rename = "box")]
    box_dims: Vec<u32>,
    element_strides: Option<Vec<u32>>,
    #[serde(default)]
    swizzle: Option<String>,
    #[serde(default)]
    interleave: Option<String>,
    #[serde(default)]
    oob_fill: Option<String>,
}

impl TensorMapSpec {
    fn make(&self, places: &Places<'_>) -> Result<[u8; OBJECT_BYTES]> {
        let data_type = match self.data_type.as_str() {
            "u8" => DataType::U8,
            "u16" => DataType::U16,
            "u32" => DataType::U32,
            "s32" => DataType::S32,
            "u64" => DataType::U64,
            "s64" => DataType::S64,
            "f16" => DataType::F16,
            "f32" => DataType::F32,
            "f64" => DataType::F64,
            "bf16" => DataType::Bf16,
            "f32_ftz" => DataType::F32Ftz,
            "tf32" => DataType::Tf32,
            "tf32_ftz" => DataType::Tf32Ftz,
            "u4x16_align8" => DataType::U4x16Align8,
            "u4x16_align16" => DataType::U4x16Align16,
            "u6x16_align16" => DataType::U6x16Align16,
            other => bail!("`{other}` is not a tensor element type"),
        };
        let swizzle = match self.swizzle.as_deref().unwrap_or("none") {
            "none" => Swizzle::None,
            "32B" => Swizzle::B32,
            "64B" => Swizzle::B64,
            "96B" => Swizzle::B96,
            "128B" => Swizzle::B128,
            "128B_atom_32B" => Swizzle::B128Atom32,
            "128B_atom_32B_flip_8B" => Swizzle::B128Atom32Flip8,
            "128B_atom_64B" => Swizzle::B128Atom64,
            other => bail!("`{other}` is not a swizzle mode"),
        };
        let interleave = match self.interleave.as_deref().unwrap_or("none") {
            "none" => Interleave::None,
            "16B" => Interleave::B16,
            "32B" => Interleave::B32,
            other => bail!("`{other}` is not an interleaved layout"),
        };
        let oob_fill = match self.oob_fill.as_deref().unwrap_or("zero") {
            "zero" => OobFill::Zero,
            "nan" => OobFill::Nan,
            other => bail!("`{other}` is not an out-of-bounds fill"),
        };
        let address = places.pointer(&self.buffer, self.offset)?;
        let ones = vec![1; self.dims.len()];
        let strides = self.element_strides.as_deref().unwrap_or(&ones);
        let map = TensorMap::tiled(
            data_type,
            address,
            &self.dims,
            &self.strides,
            &self.box_dims,
            strides,
            interleave,
            swizzle,
            L2Promotion::None,
            oob_fill,
        )?;
        (places.encode)(&map)
    }
}

/// Differences between the emulator and a GPU: addresses of buffers, and encoding of tensor maps.
pub struct Places<'a> {
    /// Device addresses of buffers, by name.
    pub addresses: BTreeMap<String, u64>,
    /// Function that encodes a tensor map.
    pub encode: &'a dyn Fn(&TensorMap) -> Result<[u8; OBJECT_BYTES]>,
}

impl Places<'_> {
    fn pointer(&self, name: &str, offset: u64) -> Result<u64> {
        let address = self.addresses.get(name).with_context(|| format!("no buffer has the name `{name}`"))?;
        address.checked_add(offset).context("the offset is too large")
    }
}

/// Maximum size of a buffer in a launch file, in bytes.
const MAX_BUFFER: u64 = 1 << 36;

/// One of several launches.
#[allow(missing_docs, reason = "the names say it")]
pub struct Launch {
    pub entry: String,
    pub config: LaunchConfig,
    pub args: Vec<Arg>,
}

/// A launch that is ready to run, and the launches after it.
pub struct Prepared {
    /// Device with the buffers.
    pub device: Device,
    /// The PTX module.
    pub module: Module,
    /// Name of the entry.
    pub entry: String,
    /// Shape and options of the launch.
    pub config: LaunchConfig,
    /// Arguments.
    pub args: Vec<Arg>,
    /// Arguments of the launch that this launch overlaps, if any.
    pub overlaps: Option<Vec<Arg>>,
    /// Launches after this one.
    pub then: Vec<Launch>,
    /// Buffers by name.
    pub buffers: BTreeMap<String, Buffer>,
    save: BTreeMap<String, PathBuf>,
}

impl LaunchFile {
    /// Reads a launch file.
    pub fn parse(text: &str) -> Result<LaunchFile> {
        Ok(serde_json::from_str(text)?)
    }

    /// Loads all files and buffers of the launch. Paths are relative to `folder`.
    pub fn prepare(&self, folder: &Path) -> Result<Prepared> {
        let path = folder.join(&self.ptx);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        self.prepare_with(&text, folder).with_context(|| path.display().to_string())
    }

    /// Like [`prepare`](LaunchFile::prepare), with the PTX text given by the caller.
    pub fn prepare_with(&self, ptx: &str, folder: &Path) -> Result<Prepared> {
        let module = Module::parse(ptx)?;
        let entry = match (&self.entry, module.entries()) {
            (Some(name), _) => name.clone(),
            (None, [only]) => only.name.clone(),
            (None, several) => bail!("the file has {} entries; name one in `entry`", several.len()),
        };
        let mut device = Device::new(DeviceConfig::default());
        let mut buffers = BTreeMap::new();
        for (name, spec) in &self.buffers {
            let buffer = spec.make(&mut device, folder).with_context(|| format!("buffer `{name}`"))?;
            buffers.insert(name.clone(), buffer);
        }
        let addresses = buffers.iter().map(|(name, buffer)| (name.clone(), buffer.address)).collect();
        let places = Places { addresses, encode: &|map| Ok(map.to_bytes()) };
        for (name, spec) in &self.buffers {
            spec.write_values(&mut device, buffers[name], &places).with_context(|| format!("buffer `{name}`"))?;
        }
        let args = arguments(&self.args, &places, folder)?;
        let overlaps = self.overlaps.as_ref().map(|args| arguments(args, &places, folder)).transpose()?;
        for name in self.save.keys() {
            ensure!(buffers.contains_key(name), "`save` names the buffer `{name}`, which does not exist");
        }
        let schedule = self.schedule.as_deref().unwrap_or("fair").parse().map_err(anyhow::Error::msg)?;
        let allow = self.allow.iter().map(|allow| allow.parse().map_err(anyhow::Error::msg));
        let allow = allow.collect::<Result<Vec<Allow>>>().context("`allow`")?;
        let sums = self.sums.as_deref().unwrap_or("card").parse().map_err(anyhow::Error::msg).context("`sums`")?;
        let mut config = LaunchConfig {
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            shared_bytes: self.shared_bytes,
            schedule,
            sanitize: self.sanitize,
            strict: self.strict,
            global_races: self.global_races,
            keep_going: self.keep_going,
            alloc_rendezvous: self.alloc_rendezvous,
            allow,
            sums,
            ..LaunchConfig::linear(1, 1)
        };
        if let Some(budget) = self.instruction_budget {
            config.instruction_budget = budget;
        }
        let step = |step: &Step| -> Result<Launch> {
            Ok(Launch {
                entry: step.entry.clone().unwrap_or_else(|| entry.clone()),
                config: LaunchConfig {
                    grid: step.grid.unwrap_or(config.grid),
                    block: step.block.unwrap_or(config.block),
                    cluster: step.cluster.unwrap_or(config.cluster),
                    shared_bytes: step.shared_bytes.unwrap_or(config.shared_bytes),
                    overlaps: step.overlaps,
                    ..config.clone()
                },
                args: arguments(step.args.as_ref().unwrap_or(&self.args), &places, folder)?,
            })
        };
        let then = self.then.iter().enumerate();
        let then =
            then.map(|(n, s)| step(s).with_context(|| format!("launch {n} of `then`"))).collect::<Result<_>>()?;
        let save = self.save.iter().map(|(name, file)| (name.clone(), folder.join(file))).collect();
        Ok(Prepared { device, module, entry, config, args, overlaps, then, buffers, save })
    }
}

/// Bytes of arguments, for buffers at these addresses. Paths are relative to `folder`.
pub fn arguments(args: &[ArgSpec], places: &Places<'_>, folder: &Path) -> Result<Vec<Arg>> {
    let args = args.iter().enumerate();
    args.map(|(n, a)| a.make(places, folder).with_context(|| format!("argument {n}"))).collect()
}

impl BufferSpec {
    /// Contents of the buffer before the launch.
    pub fn contents(&self, folder: &Path) -> Result<Vec<u8>> {
        if let Some(file) = &self.file {
            let path = folder.join(file);
            return std::fs::read(&path).with_context(|| format!("reading {}", path.display()));
        }
        if let Some(values) = &self.u32 {
            return Ok(bytemuck::cast_slice(values).to_vec());
        }
        if let Some(values) = &self.f32 {
            return Ok(bytemuck::cast_slice(values).to_vec());
        }
        let fill = if let Some(Fill::Poison | Fill::Undefined) = self.fill { 0xff } else { 0 };
        Ok(vec![fill; self.length()? as usize])
    }

    /// Writes the values that depend on addresses of buffers: pointers and patches.
    fn write_values(&self, device: &mut Device, buffer: Buffer, places: &Places<'_>) -> Result<()> {
        for (n, pointer) in (0..).zip(self.pointers.iter().flatten()) {
            let address = pointer.as_ref().map_or(Ok(0), |pointer| pointer.make(places))?;
            device.write(buffer, n * size_of::<u64>() as u64, &address.to_le_bytes());
        }
        for patch in &self.patches {
            let bytes = patch.bytes(places, buffer.bytes as usize)?;
            device.write(buffer, patch.at as u64, &bytes);
        }
        Ok(())
    }

    fn length(&self) -> Result<u64> {
        if let Some(pointers) = &self.pointers {
            return Ok((pointers.len() * size_of::<u64>()) as u64);
        }
        let bytes = self.bytes.context("missing contents; set `file`, `bytes`, `pointers` or values")?;
        ensure!(bytes <= MAX_BUFFER, "{bytes} bytes exceed the maximum of {MAX_BUFFER}");
        Ok(bytes)
    }

    fn make(&self, device: &mut Device, folder: &Path) -> Result<Buffer> {
        match self {
            // Zeros need no copy, so that a large buffer costs nothing until it is used.
            BufferSpec { file: None, u32: None, f32: None, fill: None | Some(Fill::Zero), .. } => {
                Ok(device.allocate(self.length()?))
            }
            _ => {
                let buffer = device.upload(&self.contents(folder)?);
                if let Some(Fill::Undefined) = self.fill {
                    device.undefine(buffer, 0, buffer.bytes);
                }
                Ok(buffer)
            }
        }
    }
}

impl ArgSpec {
    fn make(&self, places: &Places<'_>, folder: &Path) -> Result<Arg> {
        let mut values = Vec::new();
        if let Some(name) = &self.pointer {
            values.push(Arg::value(places.pointer(name, self.offset)?));
        }
        values.extend(self.i32.map(Arg::value));
        values.extend(self.i64.map(Arg::value));
        values.extend(self.u32.map(Arg::value));
        values.extend(self.u64.map(Arg::value));
        values.extend(self.f32.map(Arg::value));
        values.extend(self.f64.map(Arg::value));
        if let Some(map) = &self.tensor_map {
            values.push(Arg(map.make(places)?.to_vec()));
        }
        if let Some(text) = &self.hex {
            values.push(Arg(hex(text)?));
        }
        if let Some(file) = &self.file {
            let path = folder.join(file);
            values.push(Arg(std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?));
        }
        let Ok([mut arg]) = <[Arg; 1]>::try_from(values) else {
            bail!("expected exactly one of pointer, i32, i64, u32, u64, f32, f64, tensor_map, hex, file");
        };
        for p in &self.patches {
            let bytes = p.bytes(places, arg.0.len())?;
            arg.0[p.at..p.at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(arg)
    }
}

impl Patch {
    /// Bytes to write at `at`. They must fit into `room` bytes.
    fn bytes(&self, places: &Places<'_>, room: usize) -> Result<Vec<u8>> {
        let bytes = match (&self.pointer, &self.tensor_map) {
            (Some(name), None) => places.pointer(name, self.offset)?.to_le_bytes().to_vec(),
            (None, Some(map)) => map.make(places)?.to_vec(),
            _ => bail!("a patch must have either `pointer` or `tensor_map`"),
        };
        let fits = self.at.checked_add(bytes.len()).is_some_and(|end| end <= room);
        ensure!(fits, "the patch at {} exceeds the {room} bytes", self.at);
        Ok(bytes)
    }
}

fn hex(text: &str) -> Result<Vec<u8>> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).map(|d| d as u8).with_context(|| format!("`{c}` is not a hexadecimal digit")))
        .collect::<Result<_>>()?;
    ensure!(digits.len().is_multiple_of(2), "an odd number of hexadecimal digits");
    Ok(digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect())
}

impl Prepared {
    /// Runs the launches, after the launch that the first one overlaps, if any. Returns one report for all launches.
    pub fn run(&mut self) -> Result<Report, Fault> {
        self.run_on(None)
    }

    /// Like [`run`](Prepared::run), by the clock of a GPU.
    pub fn time(&mut self, timeline: &mut Timeline) -> Result<Report, Fault> {
        self.run_on(Some(timeline))
    }

    fn run_on(&mut self, mut timeline: Option<&mut Timeline>) -> Result<Report, Fault> {
        let (device, module) = (&mut self.device, &self.module);
        let mut launch = |entry: &str, config: &LaunchConfig, args: &[Arg]| match timeline.as_deref_mut() {
            Some(timeline) => device.time(timeline, module, entry, config, args),
            None => device.launch(module, entry, config, args),
        };
        if let Some(before) = &self.overlaps {
            launch(&self.entry, &self.config, before)?;
        }
        let config = LaunchConfig { overlaps: self.overlaps.is_some(), ..self.config.clone() };
        let mut report = launch(&self.entry, &config, &self.args)?;
        for Launch { entry, config, args } in &self.then {
            let later = launch(entry, config, args).map_err(|mut fault| {
                fault.printed.insert_str(0, &report.output);
                fault.before.splice(..0, report.hazards.iter().cloned());
                fault
            })?;
            report.add(&later);
        }
        Ok(report)
    }

    /// Explores the orders of the launch. The launch that it overlaps, if any, runs before on the file's schedule.
    ///
    /// # Errors
    /// If the file describes several launches. The inner result comes from [`Device::explore`].
    pub fn explore(&mut self, bounds: &Bounds) -> Result<Result<Exploration, Fault>> {
        self.ensure_single()?;
        Ok(self.before().and_then(|config| self.device.explore(&self.module, &self.entry, &config, &self.args, bounds)))
    }

    /// Runs the launch in a given order.
    ///
    /// # Errors
    /// The launch's fault. [`FaultKind::BadLaunch`](crate::FaultKind::BadLaunch) if the file describes several launches.
    pub fn replay(&mut self, order: &Order) -> Result<Report, Fault> {
        self.ensure_single().map_err(|error| Fault::launch(&self.entry, error.to_string()))?;
        let config = self.before()?;
        self.device.replay(&self.module, &self.entry, &config, &self.args, order)
    }

    fn ensure_single(&self) -> Result<()> {
        ensure!(self.then.is_empty(), "`then`: an order describes a single launch; leave the other launches out");
        Ok(())
    }

    /// Runs the launch that the first one overlaps, if any. Returns the configuration of the first launch.
    fn before(&mut self) -> Result<LaunchConfig, Fault> {
        if let Some(before) = &self.overlaps {
            self.device.launch(&self.module, &self.entry, &self.config, before)?;
        }
        Ok(LaunchConfig { overlaps: self.overlaps.is_some(), ..self.config.clone() })
    }

    /// Writes the buffers that the launch file lists in `save`.
    pub fn save(&self) -> Result<()> {
        for (name, path) in &self.save {
            let data = self.device.download::<u8>(self.buffers[name]);
            std::fs::write(path, data).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }
}
