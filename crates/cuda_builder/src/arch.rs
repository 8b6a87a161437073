//! Table of the architectures that kernels are compiled for, with the PTX version of each.

use gpu_arch::Arch;

use crate::Error;

/// Architectures, each with the lowest PTX version (major × 10 + minor) that has it and the instructions that its
/// kernels use. A lower version runs on older drivers. PTX ISA, "Release Notes".
const TABLE: [(Arch, u32); 4] = [(Arch::SM_80, 70), (Arch::SM_90A, 83), (Arch::SM_100F, 88), (Arch::SM_120F, 88)];

/// Returns every architecture that this builder compiles for, oldest first.
pub fn arches() -> impl Iterator<Item = Arch> {
    TABLE.iter().map(|row| row.0)
}

/// Returns the version that PTX for an architecture declares, major × 10 + minor: 80 for `.version 8.0`.
///
/// # Errors
/// [`Error::UnknownArch`] if the table does not contain the architecture.
pub(crate) fn ptx_version(arch: Arch) -> Result<u32, Error> {
    let row = TABLE.iter().find(|row| row.0 == arch);
    Ok(row.ok_or(Error::UnknownArch { arch })?.1)
}
