//! How a step becomes a launch, whichever kernel it is of: its grid, the bytes of its descriptors, its parameter. Knows no
//! device, only addresses.

use kernels_gpu::abi;

use super::descriptors::{self, Address};
use super::kernels::{self, Capability, KERNELS, Kernel, SIMT, SM90, SM100};
use crate::error::Error;
use crate::plan::gated_sm100::{self, MAP_BYTES, MapArguments};
use crate::plan::{Grid, gated_simt, gated_sm90};
use crate::problem::{Op, OutDtype, Weights};

/// A kernel's way of being launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    Simt,
    Sm90,
    Sm100,
}

/// As [`kernel`], of those that have been verified on a card: the Blackwell kernel has run in the emulator only.
#[cfg(feature = "cuda")]
pub(super) fn proven_kernel(device: Capability) -> Option<&'static Kernel> {
    kernels::choose(KERNELS, &[SM90, SIMT], device)
}

/// The kernel that runs on a device; not all weights may be its own.
pub(super) fn kernel(device: Capability) -> Option<&'static Kernel> {
    kernels::choose(KERNELS, &[SM100, SM90, SIMT], device)
}

/// The kernel that runs on a device and takes all that there is to compute.
pub(super) fn portable_kernel(device: Capability) -> Option<&'static Kernel> {
    kernels::choose(KERNELS, &[SIMT], device)
}

impl Launcher {
    /// How these weights are multiplied by a kernel of this module, if it takes them.
    pub fn new(kernel: &Kernel, weights: &Weights<'_>) -> Option<Self> {
        let all = |takes: fn(usize) -> bool| weights.experts().iter().all(|expert| takes(expert.k()));
        match kernel.name {
            SM100 => all(gated_sm100::takes).then_some(Self::Sm100),
            SM90 => all(gated_sm90::takes).then_some(Self::Sm90),
            _ => Some(Self::Simt),
        }
    }

    /// What the kernel is called that computes an operation.
    pub fn name(self, op: Op) -> &'static str {
        match self {
            Self::Simt => gated_simt::name(op),
            Self::Sm90 => gated_sm90::name(op),
            Self::Sm100 => gated_sm100::name(op),
        }
    }

    /// The entries of an operation, each with the most dynamic shared memory that it is launched with.
    #[cfg(feature = "cuda")]
    pub fn entries(self, op: Op) -> Vec<(&'static str, u32)> {
        match self {
            Self::Simt => gated_simt::entries(op).into(),
            Self::Sm90 => {
                gated_sm90::instances(op).map(|(_, instance)| (instance.entry, instance.shared_bytes())).collect()
            }
            Self::Sm100 => {
                gated_sm100::variants(op).map(|(_, instance)| (instance.entry, instance.shared_bytes())).collect()
            }
        }
    }

    /// Plans the launch of a step's groups on a device of so many multiprocessors, with a variant of the kernel if one is
    /// asked for. Looks at their sizes only.
    ///
    /// # Errors
    /// If there are too many tiles, or no such variant takes the groups.
    pub fn plan(self, op: Op, variant: Option<&str>, groups: &mut [abi::Group], sms: u32) -> Result<Planned, Error> {
        Ok(match self {
            Self::Simt => Planned::Groups(gated_simt::plan(op, groups)?),
            Self::Sm90 => Planned::Sm90(gated_sm90::plan(op, variant, groups, sms)?),
            Self::Sm100 => Planned::Sm100(gated_sm100::plan(op, variant, groups, sms)?),
        })
    }
}

/// A launch whose descriptors have no address yet.
pub(super) enum Planned {
    /// Of a kernel that is told of a step by one [`abi::Group`] for each expert.
    Groups(Grid),
    Sm90(gated_sm90::Plan),
    Sm100(gated_sm100::Plan),
}

/// A kernel's one parameter.
pub(super) enum Parameter {
    Groups(abi::Launch),
    Sm90(abi::sm90::Launch),
    Sm100(abi::sm100::Launch),
}

impl Parameter {
    /// As the kernel is given it.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Groups(launch) => bytemuck::bytes_of(launch),
            Self::Sm90(launch) => bytemuck::bytes_of(launch),
            Self::Sm100(launch) => bytemuck::bytes_of(launch),
        }
    }
}

impl Planned {
    /// The grid.
    pub fn grid(&self) -> Grid {
        match self {
            Self::Groups(grid) => *grid,
            Self::Sm90(plan) => plan.grid,
            Self::Sm100(plan) => plan.grid,
        }
    }

    /// Bytes of the descriptors of the groups that were planned.
    pub fn bytes(&self, groups: &[abi::Group]) -> usize {
        match self {
            Self::Groups(_) => size_of_val(groups),
            Self::Sm90(plan) => {
                plan.map_count(groups) * MAP_BYTES
                    + groups.len() * size_of::<abi::sm90::Group>()
                    + size_of_val(&*plan.tiles)
                    + size_of_val(&*plan.starts)
            }
            Self::Sm100(plan) => {
                plan.map_count(groups) * MAP_BYTES
                    + groups.len() * size_of::<abi::sm100::Group>()
                    + size_of_val(&*plan.tiles)
            }
        }
    }

    /// Writes the descriptors, which are to lie at `address`, a multiple of 256, and returns the parameter that leads to
    /// them. `encode` makes a tensor map.
    ///
    /// # Errors
    /// Those of `encode`.
    ///
    /// # Panics
    /// If `to` has not the length of [`Planned::bytes`].
    pub fn write(
        &self,
        groups: &[abi::Group],
        out_dtype: OutDtype,
        address: Address,
        to: &mut [u8],
        mut encode: impl FnMut(&MapArguments) -> Result<[u8; MAP_BYTES], Error>,
    ) -> Result<Parameter, Error> {
        match self {
            Self::Groups(_) => {
                to.copy_from_slice(bytemuck::cast_slice(groups));
                Ok(Parameter::Groups(descriptors::parameter(address, groups.len(), out_dtype)))
            }
            Self::Sm90(plan) => {
                let (maps, rest) = to.split_at_mut(plan.map_count(groups) * MAP_BYTES);
                for (map, arguments) in maps.chunks_exact_mut(MAP_BYTES).zip(plan.maps(groups)) {
                    map.copy_from_slice(&encode(&arguments)?);
                }
                let described = plan.describe(groups, address);
                let tables: [&[u8]; 3] = [
                    bytemuck::cast_slice(&plan.tiles),
                    bytemuck::cast_slice(&described),
                    bytemuck::cast_slice(&plan.starts),
                ];
                rest.copy_from_slice(&tables.concat());
                let tiles = address + maps.len() as u64;
                let groups = tiles + tables[0].len() as u64;
                let starts = groups + tables[1].len() as u64;
                let output = descriptors::output(out_dtype);
                Ok(Parameter::Sm90(abi::sm90::Launch { groups, tiles, starts, output, unused: 0 }))
            }
            Self::Sm100(plan) => {
                let (maps, rest) = to.split_at_mut(plan.map_count(groups) * MAP_BYTES);
                for (map, arguments) in maps.chunks_exact_mut(MAP_BYTES).zip(plan.maps(groups)) {
                    map.copy_from_slice(&encode(&arguments)?);
                }
                let described = plan.describe(groups, address);
                let described: &[u8] = bytemuck::cast_slice(&described);
                rest[..described.len()].copy_from_slice(described);
                rest[described.len()..].copy_from_slice(bytemuck::cast_slice(&plan.tiles));
                let groups = address + maps.len() as u64;
                Ok(Parameter::Sm100(abi::sm100::Launch {
                    groups,
                    tiles: groups + described.len() as u64,
                    tile_count: plan.tiles.len() as u32,
                    output: descriptors::output(out_dtype),
                }))
            }
        }
    }
}
