//! The kernels that this binary carries, and which of them runs on a device. Pure functions; knows no driver.

/// A kernel module of `kernels-gpu`, compiled for one architecture.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// The module, which is also its file in `kernels-gpu`.
    pub name: &'static str,
    /// What it was compiled for, as in PTX: `sm_80`, `sm_90a`, `sm_100f`.
    pub arch: &'static str,
    /// The assembly that the driver compiles.
    pub ptx: &'static str,
}

/// Every kernel and architecture, written by build.rs.
pub(super) static KERNELS: &[Kernel] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The module of the portable kernel, which runs everywhere and computes everything.
pub(super) const SIMT: &str = "gated_simt";

/// The module of the Hopper kernel.
pub(super) const SM90: &str = "gated_sm90";

/// The module of the Blackwell kernel.
pub(super) const SM100: &str = "gated_sm100";

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

/// The kernel for a device: of those of the modules `names` that run there, the one made for the fewest and newest devices.
pub(super) fn choose<'k>(kernels: &'k [Kernel], names: &[&str], device: Capability) -> Option<&'k Kernel> {
    let there = kernels.iter().filter(|kernel| names.contains(&kernel.name) && runs_on(kernel.arch, device));
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

    const PORTABLE: Kernel = Kernel { name: SIMT, arch: "sm_80", ptx: "" };
    const HOPPER: Kernel = Kernel { name: SM90, arch: "sm_90a", ptx: "" };
    const BLACKWELL: Kernel = Kernel { name: SM100, arch: "sm_100f", ptx: "" };

    #[test]
    fn the_most_special_kernel_that_runs_on_the_device_is_chosen() {
        let kernels = [PORTABLE, HOPPER, BLACKWELL];
        let names = kernels.each_ref().map(|kernel| kernel.name);
        let chosen = |device| choose(&kernels, &names, device).map(|kernel| kernel.name);
        for (device, kernel) in [
            ((7, 5), None),
            ((8, 0), Some("gated_simt")),
            ((8, 9), Some("gated_simt")),
            ((9, 0), Some("gated_sm90")),
            ((10, 0), Some("gated_sm100")),
            ((10, 3), Some("gated_sm100")),
            ((11, 0), Some("gated_simt")),
            ((12, 0), Some("gated_simt")),
        ] {
            assert_eq!(chosen(device), kernel, "{device:?}");
        }
        assert_eq!(choose(&[], &names, (9, 0)), None);
        assert_eq!(choose(&kernels, &[SIMT], (10, 0)), Some(&PORTABLE));
    }

    #[test]
    fn every_embedded_kernel_names_an_architecture_and_one_runs_from_8_0_on() {
        assert!(KERNELS.iter().all(|kernel| parse(kernel.arch).is_some()));
        assert!(choose(KERNELS, &[SIMT], (8, 0)).is_some());
        assert!(choose(KERNELS, &[SIMT], (99, 0)).is_some());
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
