//! The kernels that this binary carries, and which of them runs on a device. Pure functions; knows no driver.

use std::collections::HashSet;

use super::kernel::Kernel;
use super::{GroupedKernel, KERNELS};
use crate::error::Error;

/// A kernel compiled for one architecture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Build {
    /// The kernel's name.
    pub kernel: &'static str,
    /// What it was compiled for, as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    /// The assembly that the driver compiles.
    pub ptx: &'static str,
}

/// Every kernel and architecture, written by build.rs.
pub(crate) static BUILDS: &[Build] = include!(concat!(env!("OUT_DIR"), "/builds.rs"));

/// Compute capability, major and minor.
pub type Capability = (u32, u32);

/// On which devices code for an architecture runs (PTX ISA, ".target").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Reach {
    /// On its own compute capability and every later one.
    Onward,
    /// Suffix `f`: on its own and later ones of the same major number.
    Family,
    /// Suffix `a`: on its own alone.
    Alone,
}

/// An architecture's name taken apart: `sm_100f` is (10, 0) and its family.
fn parse(arch: &str) -> Option<(Capability, Reach)> {
    let name = arch.strip_prefix("sm_")?;
    let (digits, reach) = match name.as_bytes().last()? {
        b'f' => (&name[..name.len() - 1], Reach::Family),
        b'a' => (&name[..name.len() - 1], Reach::Alone),
        _ => (name, Reach::Onward),
    };
    let number: u32 = digits.parse().ok()?;
    Some(((number / 10, number % 10), reach))
}

fn runs_on(arch: &str, device: Capability) -> bool {
    parse(arch).is_some_and(|(own, reach)| match reach {
        Reach::Onward => own <= device,
        Reach::Family => own <= device && own.0 == device.0,
        Reach::Alone => own == device,
    })
}

/// A kernel's build for a device: of those that run there, the one made for the fewest and newest devices.
pub(crate) fn find(kernel: &str, device: Capability) -> Option<&'static Build> {
    best(BUILDS, kernel, device)
}

fn best<'b>(builds: &'b [Build], kernel: &str, device: Capability) -> Option<&'b Build> {
    let there = builds.iter().filter(|build| build.kernel == kernel && runs_on(build.arch, device));
    there.max_by_key(|build| parse(build.arch).map(|(own, reach)| (reach, own)))
}

/// The first of some kernels that runs on a device.
pub(crate) fn choose(mut kernels: impl Iterator<Item = GroupedKernel>, device: Capability) -> Option<GroupedKernel> {
    kernels.find(|kernel| find(kernel.name(), device).is_some())
}

/// Checks that a kernel runs on a device.
///
/// # Errors
/// [`Error::Invalid`] with what it does run on.
pub(crate) fn check_runs(name: &str, device: Capability) -> Result<(), Error> {
    if find(name, device).is_some() {
        return Ok(());
    }
    let arches: Vec<_> = BUILDS.iter().filter(|build| build.kernel == name).map(|build| build.arch).collect();
    let (arches, (major, minor)) = (arches.join(", "), device);
    Err(Error::Invalid(format!("{name} is for {arches} and does not run on compute capability {major}.{minor}")))
}

/// The architectures that there are kernels for, the oldest first.
#[cfg(feature = "emulated")]
pub(crate) fn arches() -> Vec<&'static str> {
    let mut arches: Vec<_> = BUILDS.iter().map(|build| build.arch).collect();
    arches.sort_by_key(|arch| parse(arch));
    arches.dedup();
    arches
}

/// The compute capability of the first device that code for an architecture runs on; `None` if that names none.
#[cfg(feature = "emulated")]
pub(crate) fn capability(arch: &str) -> Option<Capability> {
    parse(arch).map(|(capability, _)| capability)
}

/// The kernel that PTX text or machine code is of: the one with an entry that it names.
///
/// # Errors
/// [`Error::Invalid`] if it has no entry of any kernel.
pub(crate) fn kernel_of(code: &[u8]) -> Result<&'static dyn Kernel, Error> {
    let names: HashSet<&[u8]> = code.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_').collect();
    let is_of = |kernel: &&&dyn Kernel| kernel.entries().iter().any(|entry| names.contains(entry.name.as_bytes()));
    KERNELS.iter().find(is_of).copied().ok_or_else(|| {
        let kernels: Vec<_> = KERNELS.iter().map(|kernel| kernel.name()).collect();
        let kernels = kernels.join(", ");
        Error::Invalid(format!("it has no entry of any kernel ({kernels}); build one with `cargo xtask build-ptx`"))
    })
}

/// The name of the file that may hold a kernel as machine code for a device: `<kernel>.<arch>.cubin`, where a
/// plain architecture is the device's own, since machine code runs on no later one.
#[cfg(feature = "cuda")]
pub(crate) fn cubin_name(build: &Build, device: Capability) -> String {
    let arch = match parse(build.arch) {
        Some((_, Reach::Onward)) => format!("sm_{}{}", device.0, device.1),
        _ => build.arch.to_owned(),
    };
    format!("{}.{arch}.cubin", build.kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "cuda")]
    const PORTABLE: Build = Build { kernel: "gated_simt", arch: "sm_80", ptx: "" };
    #[cfg(feature = "cuda")]
    const HOPPER: Build = Build { kernel: "gated_sm90", arch: "sm_90a", ptx: "" };
    #[cfg(feature = "cuda")]
    const BLACKWELL: Build = Build { kernel: "gated_sm100", arch: "sm_100f", ptx: "" };

    #[test]
    fn the_most_special_kernel_that_runs_on_the_device_is_chosen() {
        let (simt, hopper, blackwell) = (Some("gated_simt"), Some("gated_sm90"), Some("gated_sm100"));
        for (device, of_all, of_proven) in [
            ((7, 5), None, None),
            ((8, 0), simt, simt),
            ((8, 9), simt, simt),
            ((9, 0), hopper, hopper),
            ((10, 0), blackwell, simt),
            ((10, 3), blackwell, simt),
            ((11, 0), simt, simt),
            ((12, 0), simt, simt),
            ((99, 0), simt, simt),
        ] {
            assert_eq!(choose(GroupedKernel::all(), device).map(GroupedKernel::name), of_all, "{device:?}");
            assert_eq!(choose(GroupedKernel::proven(), device).map(GroupedKernel::name), of_proven, "{device:?}");
        }
        let refused = check_runs("gated_sm90", (10, 0)).unwrap_err().to_string();
        assert_eq!(refused, "gated_sm90 is for sm_90a and does not run on compute capability 10.0");
        assert!(check_runs("gated_simt", (10, 0)).is_ok());
    }

    #[test]
    fn of_several_builds_of_a_kernel_the_most_special_that_runs_is_taken() {
        let build = |arch| Build { kernel: "gated_simt", arch, ptx: "" };
        let builds = ["sm_80", "sm_90", "sm_100f", "sm_103a"].map(build);
        let arch = |device| best(&builds, "gated_simt", device).map(|build| build.arch);
        let devices = [(7, 5), (8, 9), (9, 0), (10, 1), (10, 3), (12, 0)];
        let expected = [None, Some("sm_80"), Some("sm_90"), Some("sm_100f"), Some("sm_103a"), Some("sm_90")];
        assert_eq!(devices.map(arch), expected);
        assert_eq!(best(&builds, "gated_sm90", (9, 0)), None);
    }

    #[test]
    fn code_is_of_the_kernel_whose_entries_it_names() {
        for build in BUILDS {
            assert_eq!(kernel_of(build.ptx.as_bytes()).unwrap().name(), build.kernel);
        }
        assert_eq!(kernel_of(b"\x7fELF\0.text.plain_sm90_t64\0").unwrap().name(), "gated_sm90");
        let refused = kernel_of(b".visible .entry gated_sm90_t65()").err().unwrap().to_string();
        assert!(refused.contains("no entry of any kernel (gated_sm100, "), "{refused}");
    }

    #[test]
    fn every_build_names_an_architecture() {
        assert!(BUILDS.iter().all(|build| parse(build.arch).is_some()));
    }

    #[cfg(feature = "emulated")]
    #[test]
    fn an_architecture_names_its_first_device() {
        let named = ["sm_80", "sm_90a", "sm_100f", "sm_103f"].map(capability);
        assert_eq!(named, [(8, 0), (9, 0), (10, 0), (10, 3)].map(Some));
        for name in ["", "sm_", "sm_f", "sm_x0", "80", "compute_80", "sm_80 "] {
            assert_eq!(capability(name), None, "{name}");
        }
    }

    #[cfg(feature = "emulated")]
    #[test]
    fn architectures_are_listed_once_the_oldest_first() {
        assert_eq!(arches(), ["sm_80", "sm_90a", "sm_100f"]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn machine_code_is_looked_for_under_the_devices_own_architecture() {
        assert_eq!(cubin_name(&PORTABLE, (8, 9)), "gated_simt.sm_89.cubin");
        assert_eq!(cubin_name(&HOPPER, (9, 0)), "gated_sm90.sm_90a.cubin");
        assert_eq!(cubin_name(&BLACKWELL, (10, 3)), "gated_sm100.sm_100f.cubin");
    }
}
