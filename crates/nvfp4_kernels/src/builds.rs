//! Builds of the kernels in this binary, and the choice of a build for a device. Pure functions without a driver.

use std::io::Read;
use std::sync::{LazyLock, OnceLock};

use gpu_arch::{Arch, Capability, Reach};
use nvfp4_core::Error;

/// A kernel compiled for one architecture.
pub struct Build {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Architecture as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    ptx: Packed,
    unpacked: OnceLock<String>,
    machine_code: &'static [MachineCode],
}

/// Machine code that ptxas made from a build's PTX.
pub struct MachineCode {
    /// Architecture that ptxas was asked for.
    pub arch: &'static str,
    code: Packed,
}

/// Code in the format Zstandard (RFC 8878).
#[derive(Clone, Copy)]
struct Packed {
    bytes: &'static [u8],
    /// Hash of the code, made by build.rs.
    hash: u64,
}

/// Every build. build.rs writes the list.
pub static BUILDS: LazyLock<Vec<Build>> = LazyLock::new(|| include!(concat!(env!("OUT_DIR"), "/builds.rs")));

impl Build {
    const fn new(kernel: &'static str, arch: &'static str, ptx: Packed, machine_code: &'static [MachineCode]) -> Self {
        Self { kernel, arch, ptx, unpacked: OnceLock::new(), machine_code }
    }

    /// Returns the PTX for the driver's compiler. The text is unpacked at the first call and kept.
    pub fn ptx(&self) -> &str {
        self.unpacked.get_or_init(|| String::from_utf8(self.ptx.unpack()).expect("PTX is ASCII"))
    }

    /// Architecture that the kernel was compiled for.
    pub fn arch(&self) -> Arch {
        self.arch.parse().expect("build.rs writes valid architectures")
    }

    /// Returns the machine code for a device that the build runs on: among the codes that run there, the newest. `None`:
    /// this program was built without ptxas, or the device is newer than it.
    pub fn machine_code(&self, device: Capability) -> Option<&'static MachineCode> {
        let runs = |code: &&MachineCode| {
            let arch: Arch = code.arch.parse().expect("build.rs writes valid architectures");
            match arch.reach() {
                // Machine code runs on later devices of the same major capability only.
                Reach::Onward => arch.capability().0 == device.0 && arch.runs_on(device),
                Reach::Family | Reach::Alone => arch.runs_on(device),
            }
        };
        self.machine_code.iter().filter(runs).max_by_key(|code| code.arch.parse::<Arch>().ok())
    }

    /// Returns the build with machine code for an architecture, packed in the format Zstandard.
    #[cfg(feature = "fake")]
    pub fn with_machine_code(&self, arch: &'static str, bytes: &'static [u8]) -> Self {
        let code = MachineCode { arch, code: Packed { bytes, hash: 0 } };
        Self::new(self.kernel, self.arch, self.ptx, Box::leak(Box::new([code])))
    }

    /// Returns a hash of the code that a device gets: the PTX, and the machine code if there is one.
    pub fn hash(&self, device: Capability) -> u64 {
        self.machine_code(device).map_or(self.ptx.hash, |code| code.code.hash ^ self.ptx.hash.rotate_left(1))
    }
}

impl MachineCode {
    /// Returns the file for the driver.
    pub fn unpack(&self) -> Vec<u8> {
        self.code.unpack()
    }
}

impl Packed {
    fn unpack(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let decoder = ruzstd::decoding::StreamingDecoder::new(self.bytes);
        let read = decoder.map(|mut decoder| decoder.read_to_end(&mut bytes));
        assert!(matches!(read, Ok(Ok(_))), "build.rs packed the code");
        bytes
    }
}

/// Returns a kernel's build for a device: among the builds that run there, the build for the fewest and newest devices.
pub fn find(kernel: &str, device: Capability) -> Option<&'static Build> {
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
pub fn check_runs(name: &str, device: Capability) -> Result<(), Error> {
    if find(name, device).is_some() {
        return Ok(());
    }
    let (arches, (major, minor)) = (arches_of(name).join(", "), device);
    Err(Error::Invalid(format!("{name} is for {arches} and does not run on compute capability {major}.{minor}")))
}

/// Returns the architectures that a kernel is compiled for.
pub fn arches_of(kernel: &str) -> Vec<&'static str> {
    BUILDS.iter().filter(|build| build.kernel == kernel).map(|build| build.arch).collect()
}

/// Returns the architectures that any kernel is compiled for, oldest first.
pub fn arches() -> Vec<&'static str> {
    let mut builds: Vec<_> = BUILDS.iter().collect();
    builds.sort_by_key(|build| build.arch().capability());
    let mut arches: Vec<_> = builds.into_iter().map(|build| build.arch).collect();
    arches.dedup();
    arches
}

/// Returns the name of an optional file with the machine code of a kernel for a device: `<kernel>.<arch>.cubin`. The
/// device's own architecture replaces a plain one, because machine code does not run on later devices.
pub fn cubin_name(build: &Build, device: Capability) -> String {
    let arch = match build.arch().reach() {
        Reach::Onward => format!("sm_{}{}", device.0, device.1),
        Reach::Family | Reach::Alone => build.arch.to_owned(),
    };
    format!("{}.{arch}.cubin", build.kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_CODE: Packed = Packed { bytes: &[], hash: 0 };
    static PORTABLE: Build = Build::new("gated_simt", "sm_80", NO_CODE, &[]);
    static HOPPER: Build = Build::new("gated_sm90", "sm_90a", NO_CODE, &[]);
    static BLACKWELL: Build = Build::new("gated_sm100", "sm_100f", NO_CODE, &[]);

    #[test]
    fn kernel_for_other_devices_is_refused() {
        let refused = check_runs("gated_sm90", (10, 0)).unwrap_err().to_string();
        assert_eq!(refused, "gated_sm90 is for sm_90a and does not run on compute capability 10.0");
        assert!(check_runs("gated_simt", (10, 0)).is_ok());
    }

    #[test]
    fn most_specific_build_is_found() {
        let build = |arch| Build::new("gated_simt", arch, NO_CODE, &[]);
        let builds = ["sm_80", "sm_90", "sm_100f", "sm_103a"].map(build);
        let arch = |device| best(&builds, "gated_simt", device).map(|build| build.arch);
        let devices = [(7, 5), (8, 9), (9, 0), (10, 1), (10, 3), (12, 0)];
        let expected = [None, Some("sm_80"), Some("sm_90"), Some("sm_100f"), Some("sm_103a"), Some("sm_90")];
        assert_eq!(devices.map(arch), expected);
        assert!(best(&builds, "gated_sm90", (9, 0)).is_none());
    }

    #[test]
    fn machine_code_runs_on_its_device_and_the_hash_names_it() {
        const fn code(arch: &'static str, hash: u64) -> MachineCode {
            MachineCode { arch, code: Packed { bytes: &[], hash } }
        }
        static ONWARD: [MachineCode; 3] = [code("sm_80", 1), code("sm_90", 2), code("sm_120", 3)];
        static FAMILY: [MachineCode; 1] = [code("sm_100f", 4)];
        let arch = |build: &Build, device| build.machine_code(device).map(|code| code.arch);
        let build = Build::new("gated_simt", "sm_80", Packed { bytes: &[], hash: 5 }, &ONWARD);
        let devices = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), (7, 5)];
        let expected = [Some("sm_80"), Some("sm_80"), Some("sm_90"), None, Some("sm_120"), Some("sm_120"), None];
        assert_eq!(devices.map(|device| arch(&build, device)), expected);
        assert_eq!(build.hash((10, 0)), 5);
        let hashes: std::collections::BTreeSet<_> =
            [(8, 0), (9, 0), (10, 0), (12, 1)].map(|device| build.hash(device)).into();
        assert_eq!(hashes.len(), 4);
        let build = Build::new("gated_sm100", "sm_100f", NO_CODE, &FAMILY);
        assert_eq!(
            [(10, 0), (10, 3), (12, 0)].map(|device| arch(&build, device)),
            [Some("sm_100f"), Some("sm_100f"), None]
        );
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

    #[test]
    fn architectures_are_listed_once_oldest_first() {
        assert_eq!(arches(), ["sm_80", "sm_90a", "sm_100f", "sm_120f"]);
    }

    #[test]
    fn cubin_is_named_after_the_devices_architecture() {
        assert_eq!(cubin_name(&PORTABLE, (8, 9)), "gated_simt.sm_89.cubin");
        assert_eq!(cubin_name(&HOPPER, (9, 0)), "gated_sm90.sm_90a.cubin");
        assert_eq!(cubin_name(&BLACKWELL, (10, 3)), "gated_sm100.sm_100f.cubin");
    }
}
