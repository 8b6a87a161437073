//! Builds of the kernels in this binary, and the choice of a build for a device. Pure functions without a driver.

use std::sync::{LazyLock, OnceLock};

#[cfg(feature = "cuda")]
use gpu_arch::Reach;
use gpu_arch::{Arch, Capability};

use crate::error::Error;

/// A kernel compiled for one architecture.
pub(crate) struct Build {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Architecture as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    /// Length of the PTX, then the PTX in LZ4's block format, which is a sixteenth of its size.
    packed: &'static [u8],
    unpacked: OnceLock<String>,
}

/// Every build. build.rs writes the list.
pub(crate) static BUILDS: LazyLock<Vec<Build>> = LazyLock::new(|| include!(concat!(env!("OUT_DIR"), "/builds.rs")));

impl Build {
    const fn new(kernel: &'static str, arch: &'static str, packed: &'static [u8]) -> Self {
        Self { kernel, arch, packed, unpacked: OnceLock::new() }
    }

    /// Returns the PTX for the driver's compiler. The text is unpacked at the first call and kept.
    pub fn ptx(&self) -> &str {
        self.unpacked.get_or_init(|| {
            let bytes = lz4_flex::decompress_size_prepended(self.packed).expect("build.rs packed the PTX");
            String::from_utf8(bytes).expect("PTX is ASCII")
        })
    }

    /// Architecture that the kernel was compiled for.
    pub(crate) fn arch(&self) -> Arch {
        self.arch.parse().expect("build.rs writes valid architectures")
    }
}

/// Returns a kernel's build for a device: among the builds that run there, the build for the fewest and newest devices.
pub(crate) fn find(kernel: &str, device: Capability) -> Option<&'static Build> {
    best(&BUILDS, kernel, device)
}

fn best<'b>(builds: &'b [Build], kernel: &str, device: Capability) -> Option<&'b Build> {
    let there = builds.iter().filter(|build| build.kernel == kernel && build.arch().runs_on(device));
    there.max_by_key(|build| build.arch())
}

/// Checks that a kernel runs on a device.
///
/// # Errors
/// [`Error::Invalid`], which names the kernel's architectures.
pub(crate) fn check_runs(name: &str, device: Capability) -> Result<(), Error> {
    if find(name, device).is_some() {
        return Ok(());
    }
    let (arches, (major, minor)) = (arches_of(name).join(", "), device);
    Err(Error::Invalid(format!("{name} is for {arches} and does not run on compute capability {major}.{minor}")))
}

/// Returns the architectures that a kernel is compiled for.
pub(crate) fn arches_of(kernel: &str) -> Vec<&'static str> {
    BUILDS.iter().filter(|build| build.kernel == kernel).map(|build| build.arch).collect()
}

/// Returns the architectures that any kernel is compiled for, oldest first.
#[cfg(feature = "emulated")]
pub(crate) fn arches() -> Vec<&'static str> {
    let mut builds: Vec<_> = BUILDS.iter().collect();
    builds.sort_by_key(|build| build.arch().capability());
    let mut arches: Vec<_> = builds.into_iter().map(|build| build.arch).collect();
    arches.dedup();
    arches
}

/// Returns the name of an optional file with the machine code of a kernel for a device: `<kernel>.<arch>.cubin`. The
/// device's own architecture replaces a plain one, because machine code does not run on later devices.
#[cfg(feature = "cuda")]
pub(crate) fn cubin_name(build: &Build, device: Capability) -> String {
    let arch = match build.arch().reach() {
        Reach::Onward => format!("sm_{}{}", device.0, device.1),
        Reach::Family | Reach::Alone => build.arch.to_owned(),
    };
    format!("{}.{arch}.cubin", build.kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "cuda")]
    static PORTABLE: Build = Build::new("gated_simt", "sm_80", &[]);
    #[cfg(feature = "cuda")]
    static HOPPER: Build = Build::new("gated_sm90", "sm_90a", &[]);
    #[cfg(feature = "cuda")]
    static BLACKWELL: Build = Build::new("gated_sm100", "sm_100f", &[]);

    #[test]
    fn kernel_for_other_devices_is_refused() {
        let refused = check_runs("gated_sm90", (10, 0)).unwrap_err().to_string();
        assert_eq!(refused, "gated_sm90 is for sm_90a and does not run on compute capability 10.0");
        assert!(check_runs("gated_simt", (10, 0)).is_ok());
    }

    #[test]
    fn most_specific_build_is_found() {
        let build = |arch| Build::new("gated_simt", arch, &[]);
        let builds = ["sm_80", "sm_90", "sm_100f", "sm_103a"].map(build);
        let arch = |device| best(&builds, "gated_simt", device).map(|build| build.arch);
        let devices = [(7, 5), (8, 9), (9, 0), (10, 1), (10, 3), (12, 0)];
        let expected = [None, Some("sm_80"), Some("sm_90"), Some("sm_100f"), Some("sm_103a"), Some("sm_90")];
        assert_eq!(devices.map(arch), expected);
        assert!(best(&builds, "gated_sm90", (9, 0)).is_none());
    }

    #[test]
    fn every_build_names_an_architecture() {
        assert!(BUILDS.iter().all(|build| build.arch.parse::<Arch>().is_ok()));
    }

    /// ptxas warns that multicast copies are slow on these GPUs.
    #[test]
    fn sm_120_code_has_no_multicast_copies() {
        let for_sm_120: Vec<_> = BUILDS.iter().filter(|build| build.arch == "sm_120f").collect();
        assert!(for_sm_120.iter().any(|build| build.ptx().contains("cp.async.bulk")));
        for build in for_sm_120 {
            assert!(!build.ptx().contains("multicast"), "{}", build.kernel);
        }
    }

    #[cfg(feature = "emulated")]
    #[test]
    fn architectures_are_listed_once_oldest_first() {
        assert_eq!(arches(), ["sm_80", "sm_90a", "sm_100f", "sm_120f"]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn cubin_is_named_after_the_devices_architecture() {
        assert_eq!(cubin_name(&PORTABLE, (8, 9)), "gated_simt.sm_89.cubin");
        assert_eq!(cubin_name(&HOPPER, (9, 0)), "gated_sm90.sm_90a.cubin");
        assert_eq!(cubin_name(&BLACKWELL, (10, 3)), "gated_sm100.sm_100f.cubin");
    }
}
