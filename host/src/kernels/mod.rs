//! The GPU's kernels as the host sees them: a module for each, in the same folder as in `kernels-gpu`, behind the trait
//! `Kernel` (`kernel.rs`).
//!
//! A module says what its kernel takes, which instances it has, how weights are packed for it, how a step is planned, what is
//! launched, and (for tests) what a launch does. `KERNELS` has a row for each. Everything here is a function of sizes and
//! addresses and knows no device.

pub(crate) mod builds;
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod fake;
pub(crate) mod group;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod layer;
pub(crate) mod linear;
mod linear_fp8;
mod linear_nvfp4;
mod mma_sync;
pub mod moe;
mod nvfp4_products;
mod products;
pub(crate) mod schedule;
mod simt;
pub(crate) mod subject;
mod tcgen05;
pub(crate) mod tensor_map;
mod tiles;
mod wgmma;

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::error::Error;
use crate::problem::Op;
use kernel::{Grouped, Kernel};
pub use layer::router;
pub use subject::Subject;

/// Every kernel. Those that compute groups come in the order in which they are chosen, the one that takes everything last.
#[rustfmt::skip] // A kernel, a line.
pub(crate) static KERNELS: &[&dyn Kernel] = &[
    &mma_sync::gated_sm120::GatedSm120,
    &tcgen05::gated_sm100::GatedSm100,
    &wgmma::gated_sm90::GatedSm90,
    &simt::gated_simt::GatedSimt,
    &layer::silu_mul::SiluMul,
    &layer::moe_route::MoeRoute,
    &wgmma::moe_sm90::MoeSm90,
    &mma_sync::moe_few_sm90::MoeFewSm90,
    &wgmma::moe_sm120::MoeSm120,
    &mma_sync::moe_sm80::MoeSm80,
    &tcgen05::moe_sm100::MoeSm100,
    &mma_sync::moe_nvfp4_sm120::MoeNvfp4Sm120,
    &layer::moe_quantize::MoeQuantize,
    &layer::moe_quantize_nvfp4::MoeQuantizeNvfp4,
    &wgmma::moe_fp8_sm90::MoeFp8Sm90,
    &wgmma::linear_sm90::LinearSm90,
    &mma_sync::linear_sm120::LinearSm120,
    &mma_sync::linear_sm80::LinearSm80,
    &layer::moe_pack::MoePack,
    &layer::router::RouterKernel,
];

/// The kernel that a PTX text or machine code belongs to: the one of whose entries the code names most.
///
/// # Errors
/// [`Error::Invalid`] if it has no entry of any kernel.
pub(crate) fn kernel_of(code: &[u8]) -> Result<&'static dyn Kernel, Error> {
    let names: HashSet<&[u8]> = code.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_').collect();
    // A kernel's name may be that of an entry of another, and stand in the names of source files.
    let named =
        |kernel: &dyn Kernel| kernel.entries().iter().filter(|entry| names.contains(entry.name.as_bytes())).count();
    let kernels = KERNELS.iter().rev().copied().filter(|kernel| named(*kernel) > 0);
    kernels.max_by_key(|kernel| named(*kernel)).ok_or_else(|| {
        let kernels: Vec<_> = KERNELS.iter().map(|kernel| kernel.name()).collect();
        let kernels = kernels.join(", ");
        Error::Invalid(format!("it has no entry of any kernel ({kernels}); build one with `cargo xtask build-ptx`"))
    })
}

/// The PTX of a kernel as it is built in, for the oldest devices that it is for; none if there is no kernel of this name.
pub fn ptx(kernel: &str) -> Option<&'static str> {
    builds::BUILDS.iter().find(|build| build.kernel == kernel).map(|build| build.ptx())
}

/// As [`ptx`], for an architecture that the kernel is compiled for, such as `sm_90a`.
pub fn ptx_for(kernel: &str, arch: &str) -> Option<&'static str> {
    builds::BUILDS.iter().find(|build| (build.kernel, build.arch) == (kernel, arch)).map(|build| build.ptx())
}

/// A kernel that computes the groups of a step, gated and plain.
///
/// ```
/// use nvfp4::kernels::GroupedKernel;
/// use nvfp4::problem::Op;
///
/// let hopper = GroupedKernel::named("gated_sm90").expect("one of the kernels");
/// assert_eq!(hopper.instances(Op::Gated), ["t16", "t64", "t128", "t128_narrow"]);
/// ```
#[derive(Clone, Copy)]
pub struct GroupedKernel(&'static dyn Grouped);

impl GroupedKernel {
    /// All of them, the most special first, the one that takes everything last.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
        KERNELS.iter().filter_map(|kernel| kernel.as_grouped()).map(Self)
    }

    /// Those that have been verified on a card, in the same order: what a GPU gets unasked, until a self-test there says more.
    pub fn proven() -> impl DoubleEndedIterator<Item = Self> + Clone {
        Self::all().filter(|kernel| kernel.0.proven())
    }

    /// The kernel of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|kernel| kernel.name() == name)
    }

    /// The one that takes everything.
    pub(crate) fn portable() -> Self {
        Self::all().next_back().expect("a kernel takes everything")
    }

    /// The first of some kernels that runs on a device.
    #[cfg(any(feature = "emulated", test))]
    pub(crate) fn choose(mut kernels: impl Iterator<Item = Self>, device: gpu_arch::Capability) -> Option<Self> {
        kernels.find(|kernel| builds::find(kernel.name(), device).is_some())
    }

    /// The architectures that it is compiled for.
    pub fn arches(self) -> Vec<&'static str> {
        builds::arches_of(self.name())
    }

    /// Its name, which is also that of its module in `kernels-gpu`.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// What the names of an operation's entries begin with, `plain_sm90` for instance.
    pub fn title(self, op: Op) -> &'static str {
        self.0.title(op)
    }

    /// The instances for an operation, by name: `t64` for tiles of 64 tokens, and so on.
    pub fn instances(self, op: Op) -> Vec<&'static str> {
        self.0.instances(op)
    }

    /// Whether the kernel can compute sums over K elements.
    pub fn takes(self, k: usize) -> bool {
        self.0.takes(k)
    }

    /// The kernel itself.
    pub(crate) fn get(self) -> &'static dyn Grouped {
        self.0
    }
}

impl PartialEq for GroupedKernel {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for GroupedKernel {}

impl Hash for GroupedKernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for GroupedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn there_is_a_row_for_each_kernel_that_is_compiled() {
        let rows: BTreeSet<_> = KERNELS.iter().map(|kernel| kernel.name()).collect();
        let built: BTreeSet<_> = builds::BUILDS.iter().map(|build| build.kernel).collect();
        assert_eq!(rows, built, "KERNELS and [package.metadata.kernels] of kernels-gpu/Cargo.toml");
        assert_eq!(rows.len(), KERNELS.len(), "a kernel has two rows");
    }

    #[test]
    fn the_entries_of_a_kernel_are_those_of_its_ptx_with_as_many_threads() {
        for kernel in KERNELS {
            for build in builds::BUILDS.iter().filter(|build| build.kernel == kernel.name()) {
                let in_ptx = build.ptx().split(".entry ").skip(1).map(|text| {
                    let name = &text[..text.find('(').unwrap()];
                    let threads = text.split_once(".maxntid ").unwrap().1;
                    (name, threads[..threads.find(|c: char| !c.is_ascii_digit()).unwrap()].parse().unwrap())
                });
                let in_ptx: BTreeSet<(&str, u32)> = in_ptx.collect();
                let entries = kernel.entries();
                let of_row: BTreeSet<_> = entries.iter().map(|entry| (entry.name, entry.threads)).collect();
                assert_eq!(of_row, in_ptx, "{} for {}", kernel.name(), build.arch);
            }
        }
    }

    #[test]
    fn the_most_special_kernel_that_runs_on_the_device_is_chosen() {
        let (simt, hopper, blackwell) = (Some("gated_simt"), Some("gated_sm90"), Some("gated_sm100"));
        let consumer = Some("gated_sm120");
        for (device, of_all, of_proven) in [
            ((7, 5), None, None),
            ((8, 0), simt, simt),
            ((8, 9), simt, simt),
            ((9, 0), hopper, hopper),
            ((10, 0), blackwell, simt),
            ((10, 3), blackwell, simt),
            ((11, 0), simt, simt),
            ((12, 0), consumer, simt),
            ((12, 1), consumer, simt),
            ((99, 0), simt, simt),
        ] {
            assert_eq!(
                GroupedKernel::choose(GroupedKernel::all(), device).map(GroupedKernel::name),
                of_all,
                "{device:?}"
            );
            assert_eq!(
                GroupedKernel::choose(GroupedKernel::proven(), device).map(GroupedKernel::name),
                of_proven,
                "{device:?}"
            );
        }
    }

    #[test]
    fn code_is_of_the_kernel_whose_entries_it_names() {
        for build in builds::BUILDS.iter() {
            assert_eq!(kernel_of(build.ptx().as_bytes()).unwrap().name(), build.kernel);
        }
        assert_eq!(kernel_of(b"\x7fELF\0.text.plain_sm90_t64\0").unwrap().name(), "gated_sm90");
        let refused = kernel_of(b".visible .entry gated_sm90_t65()").err().unwrap().to_string();
        assert!(refused.contains("no entry of any kernel (gated_sm120, "), "{refused}");
    }

    #[test]
    fn one_kernel_takes_everything_and_it_is_proven() {
        let portable = GroupedKernel::portable();
        assert!((16..=4096).step_by(16).all(|k| portable.takes(k)));
        assert_eq!(GroupedKernel::proven().next_back(), Some(portable));
    }

    #[test]
    fn every_instance_has_an_entry_of_its_operation() {
        for kernel in GroupedKernel::all() {
            for op in [Op::Gated, Op::Plain] {
                let entries = kernel.get().entries().into_iter().filter(|entry| entry.op == Some(op));
                assert_eq!(kernel.instances(op).len(), entries.count(), "{kernel:?} {op:?}");
            }
        }
    }
}
