//! The architectures that kernels are compiled for, and the PTX version of each: one table.

use gpu_arch::Arch;

use crate::Error;

/// An architecture, and the lowest PTX version (major × 10 + minor) that has it and what its kernels use: the lower the
/// version, the older the drivers that load it. PTX ISA, "Release Notes".
const TABLE: [(Arch, u32); 4] = [(Arch::SM_80, 70), (Arch::SM_90A, 83), (Arch::SM_100F, 88), (Arch::SM_120F, 88)];

/// Every architecture that this builder compiles for, oldest first.
pub fn arches() -> impl Iterator<Item = Arch> {
    TABLE.iter().map(|row| row.0)
}

/// The version that PTX for an architecture declares, major × 10 + minor: 80 for `.version 8.0`.
///
/// # Errors
/// [`Error::UnknownArch`] if this builder has none for it.
pub(crate) fn ptx_version(arch: Arch) -> Result<u32, Error> {
    let row = TABLE.iter().find(|row| row.0 == arch);
    Ok(row.ok_or(Error::UnknownArch { arch })?.1)
}
