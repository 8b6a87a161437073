//! The trait of a kernel, which each kernel's folder implements. Code for all kernels (schedules, graphs, streams,
//! loading, planned steps) uses only the trait.

use std::borrow::Cow;

use super::group::{PlacedGroup, Sizes};
use super::launch::{Launch, Scratch};
use super::refused::Refused;
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, Matrix, blocked};
use nvfp4_core::problem::{Op, TokenDtype};

/// A function of a kernel's PTX that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in PTX.
    pub name: &'static str,
    /// Operation that the entry computes. `None`: it serves all operations.
    pub op: Option<Op>,
    /// Threads per CTA.
    pub threads: u32,
    /// Maximum dynamic shared memory per CTA at launch, in bytes.
    pub shared_bytes: u32,
}

impl Entry {
    /// Creates the entry of an instance with `matrices` weight matrices.
    pub fn of_instance(name: &'static str, matrices: u32, threads: u32, shared_bytes: u32) -> Self {
        Self { name, op: Some(op_of(matrices)), threads, shared_bytes }
    }

    /// Whether a layer of this operation may launch the entry.
    pub fn serves(&self, op: Op) -> bool {
        self.op.is_none_or(|own| own == op)
    }
}

/// A kernel of `kernels-gpu`: one folder on each side, one PTX text per architecture.
pub trait Kernel: Sync {
    /// Name of the kernel: of its folders, of its row in `[package.metadata.kernels]` and of its PTX.
    fn name(&self) -> &'static str;

    /// Returns all entries of its PTX.
    fn entries(&self) -> Vec<Entry>;

    /// Whether the kernel has been verified on a GPU that it is made for. An unverified kernel runs in the emulator, if
    /// a caller names it, and on GPUs where its self-test has passed.
    fn proven(&self) -> bool {
        false
    }

    /// Whether an entry is right by the letter of the manual. Otherwise it relies on an order that shipped kernels rely on
    /// too, and the emulator accepts it only at its default level.
    fn follows_manual(&self, _entry: &str) -> bool {
        true
    }

    /// Returns this kernel as a [`Grouped`] one. `None`: it does not compute the groups of a step.
    fn as_grouped(&self) -> Option<&dyn Grouped> {
        None
    }

    /// Computes a launch of one of its entries for the tests' driver. Uses only the descriptors, and checks them.
    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>);
}

/// Requested computation of a kernel.
#[derive(Clone, Debug)]
pub struct Request {
    /// Gated or plain.
    pub op: Op,
    /// Index into [`Grouped::instances`]. `None`: the kernel chooses the instance.
    pub instance: Option<usize>,
    /// Type of the output.
    pub out_dtype: TokenDtype,
    /// Number of SMs of the device.
    pub sms: u32,
    /// Instances that the kernel must not choose.
    pub refused: Refused,
}

/// A kernel for gated and plain grouped GEMMs, which a [`Variant`](crate::variant::Variant) can name.
pub trait Grouped: Kernel {
    /// Prefix of the names of an operation's entries.
    fn title(&self, op: Op) -> &'static str;

    /// Whether it supports sums over `k` elements.
    fn takes(&self, k: usize) -> bool;

    /// Returns the names of the instances for an operation, such as `t64` for tiles of 64 tokens.
    fn instances(&self, op: Op) -> Vec<&'static str>;

    /// Returns the entry of an instance.
    fn entry(&self, op: Op, instance: &str) -> Option<&'static str> {
        let name = format!("{}_{instance}", self.title(op));
        self.entries().into_iter().map(|entry| entry.name).find(|entry| *entry == name)
    }

    /// Whether the plan may choose this instance by itself.
    fn chosen(&self, _op: Op, _instance: &str) -> bool {
        true
    }

    /// Returns the number of tokens of a group above which some tiles of this instance start at an odd column of scales.
    /// The plan chooses the instance only up to this number. `None`: no tile starts there.
    fn odd_above(&self, _op: Op, _instance: &str) -> Option<u32> {
        None
    }

    /// Whether the kernel computes groups of any size without the refused instances.
    fn serves(&self, op: Op, refused: &Refused) -> bool {
        self.instances(op).into_iter().filter_map(|name| self.entry(op, name)).any(|entry| !refused.contains(entry))
    }

    /// Returns the sizes in bytes of the two parts that [`Grouped::pack`] returns for a matrix of `rows` rows and `k`
    /// columns.
    fn packed_bytes(&self, rows: usize, k: usize) -> [usize; 2] {
        [rows * k / 2, blocked::len(rows, k / BLOCK)]
    }

    /// Packs a weight matrix for the kernel: values, and scales unless they are packed with the values. By default the
    /// values are unchanged and the scales are in the blocked layout.
    fn pack<'m>(&self, matrix: &'m Matrix<'_>) -> [Cow<'m, [u8]>; 2] {
        [matrix.values().into(), matrix.blocked_scales().into_bytes()]
    }

    /// Bytes of device memory for intermediate results between launches, for a group of these sizes.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    fn scratch_bytes(&self, _sizes: Sizes) -> Result<u64, Error> {
        Ok(0)
    }

    /// Returns the launches, in order, that compute several products of the same tokens: lists of groups that differ
    /// only in weights and outputs.
    ///
    /// # Errors
    /// If there are too many tiles, the instance does not support these groups, or no instance is left for them.
    fn launches(
        &self,
        request: &Request,
        products: &[Vec<PlacedGroup>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Launch>, Error>;
}

/// Returns the refused entries of a kernel, with reasons.
pub fn refused_of<'r>(
    kernel: &(impl Kernel + ?Sized),
    refused: &'r Refused,
) -> impl Iterator<Item = (&'r str, &'r str)> {
    let entries = kernel.entries();
    refused.iter().filter(move |(entry, _)| entries.iter().any(|of_kernel| of_kernel.name == *entry))
}

/// Returns the error of a computation that none of a kernel's other instances supports.
pub fn none_left(kernel: &(impl Kernel + ?Sized), refused: &Refused) -> Error {
    let reasons: Vec<_> = refused_of(kernel, refused).map(|(entry, reason)| format!("{entry} ({reason})")).collect();
    Error::NotComputed(format!(
        "no instance of {} is left for these sizes; failed in the self-test on this device: {}; run `nvfp4 selftest \
         --again` to repeat the test, or use --force (Verdicts::Ignored) to ignore its verdict",
        kernel.name(),
        reasons.join(", ")
    ))
}

/// Returns the operation of an entry with `matrices` weight matrices.
pub fn op_of(matrices: u32) -> Op {
    if matrices as usize == Op::Gated.projections() { Op::Gated } else { Op::Plain }
}

/// Returns the name of an instance: the part of its entry's name after the kernel's title, such as `t64` of
/// `gated_sm90_t64`.
///
/// # Panics
/// If the entry's name does not begin with the title.
pub fn instance_name(kernel: &dyn Grouped, op: Op, entry: &'static str) -> &'static str {
    let name = entry.strip_prefix(kernel.title(op)).and_then(|rest| rest.strip_prefix('_'));
    name.unwrap_or_else(|| panic!("{entry} does not begin with {}_", kernel.title(op)))
}
