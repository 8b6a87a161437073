//! The kernels that this binary carries, and which of them runs on a device. Pure functions; knows no driver.

use crate::error::Error;
use crate::plan::module::Module;

/// A kernel module of `kernels-gpu`, compiled for one architecture.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// The module, which is also its folder in `kernels-gpu`.
    pub name: &'static str,
    /// What it was compiled for, as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    /// The assembly that the driver compiles.
    pub ptx: &'static str,
}

/// Every kernel and architecture, written by build.rs.
pub(super) static KERNELS: &[Kernel] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

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

/// A module's build for a device: of those that run there, the one made for the fewest and newest devices.
pub(super) fn find(name: &str, device: Capability) -> Option<&'static Kernel> {
    best(KERNELS, name, device)
}

/// The first of some modules that runs on a device.
pub(super) fn choose(modules: &[Module], device: Capability) -> Option<Module> {
    modules.iter().copied().find(|module| find(module.name(), device).is_some())
}

/// Checks that a module runs on a device.
///
/// # Errors
/// [`Error::Invalid`] with what it does run on.
pub(super) fn check_runs(module: Module, device: Capability) -> Result<(), Error> {
    if find(module.name(), device).is_some() {
        return Ok(());
    }
    let of_module = KERNELS.iter().filter(|kernel| kernel.name == module.name());
    let arches: Vec<_> = of_module.map(|kernel| kernel.arch).collect();
    let (name, arches, (major, minor)) = (module.name(), arches.join(", "), device);
    Err(Error::Invalid(format!("{name} is for {arches} and does not run on compute capability {major}.{minor}")))
}

fn best<'k>(kernels: &'k [Kernel], name: &str, device: Capability) -> Option<&'k Kernel> {
    let there = kernels.iter().filter(|kernel| kernel.name == name && runs_on(kernel.arch, device));
    there.max_by_key(|kernel| parse(kernel.arch).map(|(own, reach)| (reach, own)))
}

/// The compute capability of the first device that code for an architecture runs on; `None` if that names none.
#[cfg(feature = "emulated")]
pub(super) fn capability(arch: &str) -> Option<Capability> {
    parse(arch).map(|(capability, _)| capability)
}

/// The name of the file that may hold this kernel as machine code for a device: `<kernel>.<arch>.cubin`, where a
/// plain architecture is the device's own, since machine code runs on no later one.
#[cfg(feature = "cuda")]
pub(super) fn cubin_name(kernel: &Kernel, device: Capability) -> String {
    let arch = match parse(kernel.arch) {
        Some((_, Reach::Onward)) => format!("sm_{}{}", device.0, device.1),
        _ => kernel.arch.to_owned(),
    };
    format!("{}.{arch}.cubin", kernel.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTABLE: Kernel = Kernel { name: "gated_simt", arch: "sm_80", ptx: "" };
    const HOPPER: Kernel = Kernel { name: "gated_sm90", arch: "sm_90a", ptx: "" };
    const BLACKWELL: Kernel = Kernel { name: "gated_sm100", arch: "sm_100f", ptx: "" };

    #[test]
    fn the_most_special_module_that_runs_on_the_device_is_chosen() {
        for (device, of_all, of_proven) in [
            ((7, 5), None, None),
            ((8, 0), Some(Module::Simt), Some(Module::Simt)),
            ((8, 9), Some(Module::Simt), Some(Module::Simt)),
            ((9, 0), Some(Module::Sm90), Some(Module::Sm90)),
            ((10, 0), Some(Module::Sm100), Some(Module::Simt)),
            ((10, 3), Some(Module::Sm100), Some(Module::Simt)),
            ((11, 0), Some(Module::Simt), Some(Module::Simt)),
            ((12, 0), Some(Module::Simt), Some(Module::Simt)),
            ((99, 0), Some(Module::Simt), Some(Module::Simt)),
        ] {
            assert_eq!(choose(&Module::ALL, device), of_all, "{device:?}");
            assert_eq!(choose(&Module::PROVEN, device), of_proven, "{device:?}");
        }
        let refused = check_runs(Module::Sm90, (10, 0)).unwrap_err().to_string();
        assert_eq!(refused, "gated_sm90 is for sm_90a and does not run on compute capability 10.0");
        assert!(check_runs(Module::Simt, (10, 0)).is_ok());
    }

    #[test]
    fn of_several_builds_of_a_module_the_most_special_that_runs_is_taken() {
        let build = |arch| Kernel { name: "gated_simt", arch, ptx: "" };
        let builds = ["sm_80", "sm_90", "sm_100f", "sm_103a"].map(build);
        let arch = |device| best(&builds, "gated_simt", device).map(|kernel| kernel.arch);
        let devices = [(7, 5), (8, 9), (9, 0), (10, 1), (10, 3), (12, 0)];
        let expected = [None, Some("sm_80"), Some("sm_90"), Some("sm_100f"), Some("sm_103a"), Some("sm_90")];
        assert_eq!(devices.map(arch), expected);
        assert_eq!(best(&builds, "gated_sm90", (9, 0)), None);
    }

    #[test]
    fn every_embedded_kernel_names_an_architecture() {
        assert!(KERNELS.iter().all(|kernel| parse(kernel.arch).is_some()));
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

    #[cfg(feature = "cuda")]
    #[test]
    fn machine_code_is_looked_for_under_the_devices_own_architecture() {
        assert_eq!(cubin_name(&PORTABLE, (8, 9)), "gated_simt.sm_89.cubin");
        assert_eq!(cubin_name(&HOPPER, (9, 0)), "gated_sm90.sm_90a.cubin");
        assert_eq!(cubin_name(&BLACKWELL, (10, 3)), "gated_sm100.sm_100f.cubin");
    }
}
