//! What the host knows of a kernel: the one trait behind which each kernel's folder stands. What is the same for all kernels
//! (schedules, graphs, streams, loading, planned steps) knows them through it alone.

use std::borrow::Cow;

use super::group::{PlacedGroup, Sizes};
use super::launch::{Launch, Scratch};
use crate::error::Error;
use crate::format::{BLOCK, Matrix, blocked};
use crate::problem::{Op, TokenDtype};

/// A function of a kernel's PTX that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its name in PTX.
    pub name: &'static str,
    /// The operation that it computes, if it is for one alone.
    pub op: Option<Op>,
    /// Threads of a block.
    pub threads: u32,
    /// The most dynamic shared memory that a block is launched with.
    pub shared_bytes: u32,
}

impl Entry {
    /// The entry of an instance with so many matrices of weights.
    pub fn of_instance(name: &'static str, matrices: u32, threads: u32, shared_bytes: u32) -> Self {
        Self { name, op: Some(op_of(matrices)), threads, shared_bytes }
    }

    /// Whether a layer of this operation may launch it.
    pub fn serves(&self, op: Op) -> bool {
        self.op.is_none_or(|own| own == op)
    }
}

/// A kernel of `kernels-gpu`: one module on each side, one PTX text for each architecture.
pub(crate) trait Kernel: Sync {
    /// Its name: that of its folders, of its row in `[package.metadata.kernels]` and of its PTX.
    fn name(&self) -> &'static str;

    /// Everything in its PTX that can be launched.
    fn entries(&self) -> Vec<Entry>;

    /// Whether it has been verified on a card that it is for. Until it has, it runs in the emulator, where a caller names it, and on
    /// cards where a self-test has passed.
    fn proven(&self) -> bool {
        false
    }

    /// The kernel as one that computes the groups of a step, if it is one.
    fn as_grouped(&self) -> Option<&dyn Grouped> {
        None
    }

    /// Does what a launch of one of its entries does, for the driver that tests run against. It knows the descriptors alone,
    /// and checks them.
    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>);
}

/// What a kernel is asked to compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub op: Op,
    /// The instance, as an index into [`Grouped::instances`], where one was named.
    pub instance: Option<usize>,
    pub out_dtype: TokenDtype,
    /// Multiprocessors of the device.
    pub sms: u32,
}

/// A kernel that computes grouped products, gated and plain: what a [`Variant`](crate::plan::variant::Variant) can name.
pub(crate) trait Grouped: Kernel {
    /// What the names of an operation's entries begin with.
    fn title(&self, op: Op) -> &'static str;

    /// Whether it can compute sums over K elements.
    fn takes(&self, k: usize) -> bool;

    /// The instances for an operation, by name: `t64` for tiles of 64 tokens, and so on.
    fn instances(&self, op: Op) -> Vec<&'static str>;

    /// Whether the plan may take an instance that nobody named.
    fn chosen(&self, _op: Op, _instance: &str) -> bool {
        true
    }

    /// Bytes of the two parts that [`Grouped::pack`] makes of a matrix of so many rows and columns.
    fn packed_bytes(&self, rows: usize, k: usize) -> [usize; 2] {
        [rows * k / 2, blocked::len(rows, k / BLOCK)]
    }

    /// A matrix of weights as the kernel reads it: values, and scales where they lie apart. Unless a kernel has a packing of its
    /// own, values are as in the matrix and scales in the blocked layout.
    fn pack<'m>(&self, matrix: &'m Matrix<'_>) -> [Cow<'m, [u8]>; 2] {
        [matrix.values().into(), matrix.blocked_scales().into_bytes()]
    }

    /// Bytes of device memory in which launches leave something to each other, for a group of these sizes.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    fn scratch_bytes(&self, _sizes: Sizes) -> Result<u64, Error> {
        Ok(0)
    }

    /// The launches, in order, that compute several products of the same tokens: lists of groups that differ in weights and
    /// outputs alone.
    ///
    /// # Errors
    /// If there are too many tiles, or the instance is not for these groups.
    fn launches(
        &self,
        request: &Request,
        products: &[Vec<PlacedGroup>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Launch>, Error>;
}

/// The operation of an entry with so many matrices of weights.
pub(crate) fn op_of(matrices: u32) -> Op {
    if matrices as usize == Op::Gated.projections() { Op::Gated } else { Op::Plain }
}

/// The name of an instance: what its entry has behind the kernel's title, `t64` of `gated_sm90_t64`.
///
/// # Panics
/// If the entry is not called so.
pub(crate) fn instance_name(kernel: &dyn Grouped, op: Op, entry: &'static str) -> &'static str {
    let name = entry.strip_prefix(kernel.title(op)).and_then(|rest| rest.strip_prefix('_'));
    name.unwrap_or_else(|| panic!("{entry} does not begin with {}_", kernel.title(op)))
}
