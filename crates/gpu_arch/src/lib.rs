//! GPU architectures: their names, and the devices that their code runs on.
//!
//! A name consists of `sm_`, a compute capability without its dot, and a suffix for the reach of the code: `sm_80`,
//! `sm_90a`, `sm_100f` (PTX ISA, ".target"). The crate knows no driver, compiler or kernel.
//!
//! ```
//! use gpu_arch::Arch;
//!
//! let family: Arch = "sm_100f".parse()?;
//! assert!(family.runs_on((10, 3)) && !family.runs_on((12, 0)));
//! # Ok::<(), gpu_arch::ParseError>(())
//! ```

use std::{fmt, str::FromStr};

/// Compute capability of a device: major, minor.
pub type Capability = (u32, u32);

/// Compute capabilities from 8.0 on that GPUs have (PTX ISA, ".target").
pub const CAPABILITIES: [Capability; 11] =
    [(8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)];

/// Range of devices that code for an architecture runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// Its own compute capability and every later one. No suffix.
    Onward,
    /// Its own compute capability and later ones with the same major number. Suffix `f`.
    Family,
    /// Its own compute capability only. Suffix `a`.
    Alone,
}

impl Reach {
    const fn suffix(self) -> &'static str {
        match self {
            Self::Onward => "",
            Self::Family => "f",
            Self::Alone => "a",
        }
    }
}

/// An architecture that code is compiled for.
///
/// The greater of two architectures is the more specific one: it reaches fewer devices or, with the same reach, newer
/// ones. So of several builds that run on a device, the greatest is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    reach: Reach,
    capability: Capability,
}

impl Arch {
    /// Ampere and every later architecture.
    pub const SM_80: Self = Self { reach: Reach::Onward, capability: (8, 0) };

    /// Hopper only, with its own instructions (`wgmma`, `setmaxnreg`).
    pub const SM_90A: Self = Self { reach: Reach::Alone, capability: (9, 0) };

    /// The family of Blackwell data-center GPUs (B200, B300), with its own instructions (`tcgen05`).
    pub const SM_100F: Self = Self { reach: Reach::Family, capability: (10, 0) };

    /// The family of GeForce RTX 50 and RTX PRO (12.0) and DGX Spark (12.1), with `mma` of block-scaled operands.
    pub const SM_120F: Self = Self { reach: Reach::Family, capability: (12, 0) };

    /// Compute capability of the first device that the code runs on.
    pub const fn capability(self) -> Capability {
        self.capability
    }

    /// Range of devices, from the first one on, that the code runs on.
    pub const fn reach(self) -> Reach {
        self.reach
    }

    /// Whether the code runs on a device.
    pub fn runs_on(self, device: Capability) -> bool {
        match self.reach {
            Reach::Onward => self.capability <= device,
            Reach::Family => self.capability <= device && self.capability.0 == device.0,
            Reach::Alone => self.capability == device,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        f.pad(&format!("sm_{major}{minor}{}", self.reach.suffix()))
    }
}

/// A text that is not the name of an architecture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an architecture; expected a name such as sm_80, sm_90a or sm_100f")]
pub struct ParseError(String);

impl FromStr for Arch {
    type Err = ParseError;

    fn from_str(name: &str) -> Result<Self, ParseError> {
        parse(name).ok_or_else(|| ParseError(name.to_owned()))
    }
}

fn parse(name: &str) -> Option<Arch> {
    let number = name.strip_prefix("sm_")?;
    let suffixed = [Reach::Family, Reach::Alone].into_iter().find(|reach| number.ends_with(reach.suffix()));
    let reach = suffixed.unwrap_or(Reach::Onward);
    let digits = number.strip_suffix(reach.suffix())?;
    // `parse` alone would accept a sign.
    let number: u32 = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    // The last digit is the minor number.
    (number >= 10).then_some(Arch { reach, capability: (number / 10, number % 10) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_determines_capability_and_reach() {
        for (name, capability, reach) in [
            ("sm_80", (8, 0), Reach::Onward),
            ("sm_89", (8, 9), Reach::Onward),
            ("sm_90a", (9, 0), Reach::Alone),
            ("sm_100f", (10, 0), Reach::Family),
            ("sm_103f", (10, 3), Reach::Family),
            ("sm_121a", (12, 1), Reach::Alone),
        ] {
            let arch: Arch = name.parse().unwrap();
            assert_eq!((arch.capability(), arch.reach()), (capability, reach), "{name}");
            assert_eq!(arch.to_string(), name);
        }
        assert_eq!(
            [Arch::SM_80, Arch::SM_90A, Arch::SM_100F, Arch::SM_120F].map(|arch| arch.to_string()),
            ["sm_80", "sm_90a", "sm_100f", "sm_120f"]
        );
    }

    #[test]
    fn invalid_names_are_refused() {
        for name in ["", "sm_", "sm_f", "sm_x0", "sm_+80", "sm_5", "sm_90af", "80", "compute_80", "sm_80 "] {
            let error = name.parse::<Arch>().unwrap_err().to_string();
            assert_eq!(
                error,
                format!("{name:?} is not an architecture; expected a name such as sm_80, sm_90a or sm_100f")
            );
        }
    }

    #[test]
    fn suffix_determines_where_code_runs() {
        let devices = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)];
        let runs = |name: &str| {
            let arch: Arch = name.parse().unwrap();
            devices.map(|device| u32::from(arch.runs_on(device)))
        };
        assert_eq!(runs("sm_80"), [0, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(runs("sm_90a"), [0, 0, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(runs("sm_100f"), [0, 0, 0, 0, 1, 1, 0, 0, 0]);
        assert_eq!(runs("sm_103f"), [0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(runs("sm_120f"), [0, 0, 0, 0, 0, 0, 0, 1, 1]);
    }

    #[test]
    fn most_specific_architecture_is_the_greatest() {
        let mut arches: Vec<Arch> =
            ["sm_103a", "sm_100f", "sm_80", "sm_90", "sm_103f"].map(|name| name.parse().unwrap()).into();
        arches.sort();
        let names: Vec<_> = arches.iter().map(Arch::to_string).collect();
        assert_eq!(names, ["sm_80", "sm_90", "sm_100f", "sm_103f", "sm_103a"]);
    }
}
