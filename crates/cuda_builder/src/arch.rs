//! The GPU architectures there are kernels for, and the PTX version of each: one table.

use std::{fmt, str::FromStr};

use crate::Error;

/// A target architecture (`.target` of the PTX).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Ampere and everything after it.
    Sm80,
    /// Hopper only, with its own instructions (`wgmma`, `setmaxnreg`).
    Sm90a,
    /// The family of Blackwell data-centre cards (B200, B300), with its own instructions (`tcgen05`).
    Sm100f,
}

/// Architecture, name, and the lowest PTX version (major × 10 + minor) that has the architecture and what
/// its kernels use: the lower, the older the drivers that load it. PTX ISA, "Release Notes".
const TABLE: [(Arch, &str, u32); 3] =
    [(Arch::Sm80, "sm_80", 70), (Arch::Sm90a, "sm_90a", 83), (Arch::Sm100f, "sm_100f", 88)];

impl Arch {
    /// Every architecture, oldest first.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    /// The name as in PTX, such as `sm_90a`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The version its PTX declares, major × 10 + minor: 80 for `.version 8.0`.
    pub fn ptx_version(self) -> u32 {
        self.row().2
    }

    fn row(self) -> &'static (Self, &'static str, u32) {
        &TABLE[self as usize]
    }
}

// `row` indexes the table by the variant.
const _: () = {
    let mut index = 0;
    while index < TABLE.len() {
        assert!(TABLE[index].0 as usize == index, "TABLE is in the order of the variants");
        index += 1;
    }
};

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Arch::all().find(|arch| arch.name() == name).ok_or_else(|| Error::UnknownArch { name: name.to_owned() })
    }
}
