//! Host side of the GPU kernels: one folder per kernel, with the same name as in `kernels-gpu`, behind the trait
//! `Kernel` (`kernel.rs`).
//!
//! A folder defines its kernel's instances, supported sizes, packing of weights, plan of a step, launches, and (for
//! tests) the result of a launch. `KERNELS` has one row per kernel. Everything here is a function of sizes and
//! addresses without a device.

pub mod builds;
mod expected;
pub mod explain;
#[cfg(feature = "fake")]
pub mod fake;
pub mod group;
pub mod kernel;
pub mod launch;
pub mod layer;
pub mod linear;
mod linear_fp8;
mod linear_nvfp4;
mod mma_sync;
pub mod moe;
mod nvfp4_products;
mod products;
mod refused;
pub mod schedule;
mod simt;
pub mod subject;
mod tcgen05;
pub mod tensor_map;
mod tiles;
#[cfg(any(test, feature = "fake"))]
mod unpacked;
pub mod variant;
mod wgmma;

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};

use kernel::{Grouped, Kernel};
pub use layer::router;
use nvfp4_core::Error;
use nvfp4_core::problem::Op;
pub use refused::Refused;
pub use subject::Subject;

/// Every kernel. Kernels for groups come in the order of preference, the portable one last.
#[rustfmt::skip] // One kernel per line.
pub static KERNELS: &[&dyn Kernel] = &[
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

/// Returns the kernel that PTX or machine code belongs to: the kernel with the most entry names in the code.
///
/// # Errors
/// [`Error::Invalid`] if the code contains no entry of any kernel.
pub fn kernel_of(code: &[u8]) -> Result<&'static dyn Kernel, Error> {
    let entries: HashSet<&[u8]> =
        KERNELS.iter().flat_map(|kernel| kernel.entries()).map(|entry| entry.name.as_bytes()).collect();
    let shortest = entries.iter().map(|name| name.len()).min().unwrap_or(0);
    let words = code.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
    let names: HashSet<&[u8]> = words.filter(|word| word.len() >= shortest && entries.contains(word)).collect();
    // A kernel's name may also be the name of another kernel's entry, or occur in the names of source files.
    let named =
        |kernel: &dyn Kernel| kernel.entries().iter().filter(|entry| names.contains(entry.name.as_bytes())).count();
    let kernels = KERNELS.iter().rev().copied().filter(|kernel| named(*kernel) > 0);
    kernels.max_by_key(|kernel| named(*kernel)).ok_or_else(|| {
        let kernels: Vec<_> = KERNELS.iter().map(|kernel| kernel.name()).collect();
        let kernels = kernels.join(", ");
        Error::Invalid(format!(
            "the code contains no entry of any kernel ({kernels}); build one with `cargo xtask build-ptx`"
        ))
    })
}

/// Returns the built-in PTX of a kernel for the oldest supported devices. `None`: there is no such kernel.
pub fn ptx(kernel: &str) -> Option<&'static str> {
    builds::BUILDS.iter().find(|build| build.kernel == kernel).map(|build| build.ptx())
}

/// Returns the built-in PTX of a kernel for an architecture, such as `sm_90a`. `None`: there is no such build.
pub fn ptx_for(kernel: &str, arch: &str) -> Option<&'static str> {
    builds::BUILDS.iter().find(|build| (build.kernel, build.arch) == (kernel, arch)).map(|build| build.ptx())
}

/// A kernel that computes the groups of a step, gated and plain.
///
/// ```
/// use nvfp4_kernels::GroupedKernel;
/// use nvfp4_core::problem::Op;
///
/// let hopper = GroupedKernel::named("gated_sm90").expect("the kernel exists");
/// assert_eq!(hopper.instances(Op::Gated), ["t16", "t64", "t128", "t128_narrow"]);
/// ```
#[derive(Clone, Copy)]
pub struct GroupedKernel(&'static dyn Grouped);

impl GroupedKernel {
    /// Returns every kernel for groups, the most specific first, the portable one last.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
        KERNELS.iter().filter_map(|kernel| kernel.as_grouped()).map(Self)
    }

    /// Returns the kernels that have been verified on a GPU, in the same order. A GPU uses these by default; a
    /// self-test there can add others.
    pub fn proven() -> impl DoubleEndedIterator<Item = Self> + Clone {
        Self::all().filter(|kernel| kernel.0.proven())
    }

    /// Returns the kernel with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|kernel| kernel.name() == name)
    }

    /// Returns the portable kernel, which supports all sizes.
    pub fn portable() -> Self {
        Self::all().next_back().expect("the list ends with the portable kernel")
    }

    /// Returns the first of some kernels that runs on a device.
    pub fn choose(mut kernels: impl Iterator<Item = Self>, device: gpu_arch::Capability) -> Option<Self> {
        kernels.find(|kernel| builds::find(kernel.name(), device).is_some())
    }

    /// Returns the architectures that it is compiled for.
    pub fn arches(self) -> Vec<&'static str> {
        builds::arches_of(self.name())
    }

    /// Name of the kernel and of its folder in `kernels-gpu`.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// Prefix of the names of an operation's entries, such as `plain_sm90`.
    pub fn title(self, op: Op) -> &'static str {
        self.0.title(op)
    }

    /// Returns the names of the instances for an operation, such as `t64` for tiles of 64 tokens.
    pub fn instances(self, op: Op) -> Vec<&'static str> {
        self.0.instances(op)
    }

    /// Whether the kernel supports sums over `k` elements.
    pub fn takes(self, k: usize) -> bool {
        self.0.takes(k)
    }

    /// Returns the implementation.
    pub fn get(self) -> &'static dyn Grouped {
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
    fn every_compiled_kernel_has_a_row() {
        let rows: BTreeSet<_> = KERNELS.iter().map(|kernel| kernel.name()).collect();
        let built: BTreeSet<_> = builds::BUILDS.iter().map(|build| build.kernel).collect();
        assert_eq!(rows, built, "KERNELS and [package.metadata.kernels] of kernels-gpu/Cargo.toml");
        assert_eq!(rows.len(), KERNELS.len(), "no kernel has two rows");
    }

    #[test]
    fn entries_and_threads_match_the_ptx() {
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
    fn most_specific_kernel_of_the_device_is_chosen() {
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
    fn kernel_of_code_is_found_by_its_entries() {
        for build in builds::BUILDS.iter() {
            assert_eq!(kernel_of(build.ptx().as_bytes()).unwrap().name(), build.kernel);
        }
        assert_eq!(kernel_of(b"\x7fELF\0.text.plain_sm90_t64\0").unwrap().name(), "gated_sm90");
        let refused = kernel_of(b".visible .entry gated_sm90_t65()").err().unwrap().to_string();
        assert!(refused.contains("no entry of any kernel (gated_sm120, "), "{refused}");
    }

    #[test]
    fn portable_kernel_supports_all_sizes_and_is_proven() {
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
