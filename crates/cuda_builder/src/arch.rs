//! Table of the architectures that kernels are compiled for, with the PTX version of each.

use gpu_arch::Arch;

/// Architectures, each with the lowest PTX version (major × 10 + minor) that has it and the instructions that its
/// kernels use. A lower version runs on older drivers. PTX ISA, "Release Notes".
const TABLE: [(Arch, u32); 4] = [(Arch::SM_80, 70), (Arch::SM_90A, 83), (Arch::SM_100F, 88), (Arch::SM_120F, 88)];

/// Returns every architecture that this builder compiles for, oldest first.
pub fn arches() -> impl Iterator<Item = Arch> {
    TABLE.iter().map(|row| row.0)
}

/// Returns the version that PTX for an architecture declares, major × 10 + minor: 80 for `.version 8.0`. `None`: this
/// builder does not compile for the architecture.
pub(crate) fn ptx_version(arch: Arch) -> Option<u32> {
    TABLE.iter().find(|row| row.0 == arch).map(|row| row.1)
}
