//! Planning: pure functions of a problem's sizes, the same with and without a GPU.

#[cfg(feature = "kernels")]
pub(crate) mod gated_simt;
#[cfg(feature = "kernels")]
pub(crate) mod gated_sm90;
pub mod roofline;
pub mod tile;

#[cfg(feature = "kernels")]
use kernels_gpu::abi::Group;

#[cfg(feature = "kernels")]
use crate::error::Error;
#[cfg(feature = "kernels")]
use crate::problem::Op;

/// A kernel that is told of a step by one [`Group`](kernels_gpu::abi::Group) for each expert.
#[cfg(feature = "kernels")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planner {
    /// The portable one.
    Simt,
    /// Hopper's.
    Sm90,
}

#[cfg(feature = "kernels")]
impl Planner {
    /// Whether the kernel can compute sums over so many elements.
    pub fn takes(self, k: usize) -> bool {
        match self {
            Planner::Simt => true,
            Planner::Sm90 => gated_sm90::takes(k),
        }
    }

    /// What the kernel is called that computes an operation.
    pub fn name(self, op: Op) -> &'static str {
        match self {
            Planner::Simt => gated_simt::name(op),
            Planner::Sm90 => gated_sm90::name(op),
        }
    }

    /// Every entry of an operation and the most dynamic shared memory that it is launched with.
    #[cfg(feature = "cuda")]
    pub fn entries(self, op: Op) -> Vec<(&'static str, u32)> {
        match self {
            Planner::Simt => gated_simt::entries(op).to_vec(),
            Planner::Sm90 => gated_sm90::entries(op).to_vec(),
        }
    }

    /// Numbers the groups' tiles and returns the launch that computes them on a device of so many multiprocessors.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there are more tiles than can be numbered.
    pub fn plan(self, op: Op, groups: &mut [Group], sms: u32) -> Result<Grid, Error> {
        match self {
            Planner::Simt => gated_simt::plan(op, groups),
            Planner::Sm90 => gated_sm90::plan(op, groups, sms),
        }
    }
}

/// A launch of a kernel that gets the step's descriptors.
#[cfg(feature = "kernels")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The kernel's entry.
    pub entry: &'static str,
    /// Blocks along x; none if there is nothing to compute.
    pub blocks: u32,
    /// Threads of a block along x.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}
