//! The builds of kernels that this binary carries, and which of them runs on a device. Pure functions; knows no driver.

use std::sync::{LazyLock, OnceLock};

#[cfg(feature = "cuda")]
use gpu_arch::Reach;
use gpu_arch::{Arch, Capability};

use crate::error::Error;

/// A kernel compiled for one architecture.
pub(crate) struct Build {
    /// The kernel's name.
    pub kernel: &'static str,
    /// What it was compiled for, as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    /// The assembly in LZ4's block format behind its length: a sixteenth of it.
    packed: &'static [u8],
    unpacked: OnceLock<String>,
}

/// Every kernel and architecture, written by build.rs.
pub(crate) static BUILDS: LazyLock<Vec<Build>> = LazyLock::new(|| include!(concat!(env!("OUT_DIR"), "/builds.rs")));

impl Build {
    const fn new(kernel: &'static str, arch: &'static str, packed: &'static [u8]) -> Self {
        Self { kernel, arch, packed, unpacked: OnceLock::new() }
    }

    /// The assembly that the driver compiles; unpacked when it is first asked for, and kept.
    pub fn ptx(&self) -> &str {
        self.unpacked.get_or_init(|| {
            let bytes = lz4_flex::decompress_size_prepended(self.packed).expect("build.rs has packed it");
            String::from_utf8(bytes).expect("PTX is ASCII")
        })
    }

    /// What it was compiled for.
    pub(crate) fn arch(&self) -> Arch {
        self.arch.parse().expect("build.rs writes architectures")
    }
}

/// A kernel's build for a device: of those that run there, the one made for the fewest and newest devices.
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
/// [`Error::Invalid`] with what it does run on.
pub(crate) fn check_runs(name: &str, device: Capability) -> Result<(), Error> {
    if find(name, device).is_some() {
        return Ok(());
    }
    let (arches, (major, minor)) = (arches_of(name).join(", "), device);
    Err(Error::Invalid(format!("{name} is for {arches} and does not run on compute capability {major}.{minor}")))
}

/// The architectures that a kernel is compiled for.
pub(crate) fn arches_of(kernel: &str) -> Vec<&'static str> {
    BUILDS.iter().filter(|build| build.kernel == kernel).map(|build| build.arch).collect()
}

/// The architectures that there are kernels for, the oldest first.
#[cfg(feature = "emulated")]
pub(crate) fn arches() -> Vec<&'static str> {
    let mut builds: Vec<_> = BUILDS.iter().collect();
    builds.sort_by_key(|build| build.arch().capability());
    let mut arches: Vec<_> = builds.into_iter().map(|build| build.arch).collect();
    arches.dedup();
    arches
}

/// The name of the file that may hold a kernel as machine code for a device: `<kernel>.<arch>.cubin`. In place of a plain
/// architecture stands the device's own, since machine code runs on no later one.
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
    fn a_kernel_that_does_not_run_on_a_device_is_refused_with_what_it_is_for() {
        let refused = check_runs("gated_sm90", (10, 0)).unwrap_err().to_string();
        assert_eq!(refused, "gated_sm90 is for sm_90a and does not run on compute capability 10.0");
        assert!(check_runs("gated_simt", (10, 0)).is_ok());
    }

    #[test]
    fn of_several_builds_of_a_kernel_the_most_special_that_runs_is_taken() {
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

    /// ptxas warns that it is slow on these cards.
    #[test]
    fn no_code_for_sm_120_copies_to_several_blocks() {
        let for_sm_120: Vec<_> = BUILDS.iter().filter(|build| build.arch == "sm_120f").collect();
        assert!(for_sm_120.iter().any(|build| build.ptx().contains("cp.async.bulk")));
        for build in for_sm_120 {
            assert!(!build.ptx().contains("multicast"), "{}", build.kernel);
        }
    }

    #[cfg(feature = "emulated")]
    #[test]
    fn architectures_are_listed_once_the_oldest_first() {
        assert_eq!(arches(), ["sm_80", "sm_90a", "sm_100f", "sm_120f"]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn machine_code_is_looked_for_under_the_devices_own_architecture() {
        assert_eq!(cubin_name(&PORTABLE, (8, 9)), "gated_simt.sm_89.cubin");
        assert_eq!(cubin_name(&HOPPER, (9, 0)), "gated_sm90.sm_90a.cubin");
        assert_eq!(cubin_name(&BLACKWELL, (10, 3)), "gated_sm100.sm_100f.cubin");
    }
}
