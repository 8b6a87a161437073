//! How a step becomes launches, whichever kernel and schedule they are of: their grids, the bytes of their descriptors,
//! their parameters. Knows no device, only addresses.

use std::borrow::Cow;

use bytemuck::Zeroable;
use kernels_gpu::gated_simt::abi;
use kernels_gpu::silu_mul::abi::Segment;

use super::descriptors::{self, Address};
use super::slabs;
use crate::error::Error;
use crate::format::{BLOCK, Matrix, blocked};
use crate::plan::module::Module;
use crate::plan::tensor_map::{MAP_BYTES, MapArguments};
use crate::plan::variant::{LaunchSchedule, Variant};
use crate::plan::{Grid, gated_simt, gated_sm90, gated_sm100, silu_mul};
use crate::problem::{Op, OutDtype, Weights};

/// What every launch's descriptors and every intermediate result are aligned to.
const ALIGNMENT: u64 = 256;

/// How the steps of a layer are launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launcher {
    module: Module,
    /// What the module's kernel computes.
    op: Op,
    instance: Option<&'static str>,
    schedule: LaunchSchedule,
}

impl Launcher {
    /// How these weights are multiplied in a variant; where it names no module, by `default`, or the portable one if that
    /// does not take them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant does not fit the weights.
    pub fn new(variant: Variant, default: Module, weights: &Weights<'_>) -> Result<Self, Error> {
        let op = variant.kernel_op(weights.op())?;
        let module = variant.module.unwrap_or(default);
        let refused = weights.experts().iter().position(|expert| !module.takes(expert.k()));
        let module = match (refused, variant.module) {
            (None, _) => module,
            (Some(_), None) => Module::Simt,
            (Some(index), Some(_)) => {
                let (name, k) = (module.name(), weights.experts()[index].k());
                let text = format!("K = {k} is not for {name}; take {}", Module::Simt.name());
                return Err(Error::Invalid(text).at(format_args!("expert {index}")));
            }
        };
        variant.check_instance(module, op)?;
        Ok(Self { module, op, instance: variant.instance, schedule: variant.schedule })
    }

    /// The kernel that computes, of the baseline the one that multiplies.
    pub fn kernel(self) -> &'static str {
        self.module.kernel(self.op)
    }

    /// The modules that are launched, by name, each with its entries and the most dynamic shared memory of each.
    #[cfg(feature = "cuda")]
    pub fn entries(self) -> Vec<(&'static str, Vec<(&'static str, u32)>)> {
        let mut modules = vec![(self.module.name(), self.module.entries(self.op))];
        if self.schedule == LaunchSchedule::Unfused {
            modules.push((silu_mul::NAME, vec![(silu_mul::NAME, 0)]));
        }
        modules
    }

    /// Bytes of [`Launcher::pack`]'s two parts.
    #[cfg(feature = "cuda")]
    pub fn packed_bytes(self, matrix: &Matrix<'_>) -> [usize; 2] {
        let (rows, k) = (matrix.rows(), matrix.k());
        match self.module {
            Module::Sm90 => [slabs::len(rows, k), 0],
            Module::Simt | Module::Sm100 => [matrix.values().len(), blocked::len(rows, k / BLOCK)],
        }
    }

    /// A matrix of weights as the kernel reads it: values, and scales where they lie apart.
    pub fn pack<'m>(self, matrix: &'m Matrix<'_>) -> [Cow<'m, [u8]>; 2] {
        match self.module {
            Module::Sm90 => [slabs::pack(matrix).into(), Cow::default()],
            Module::Simt | Module::Sm100 => [matrix.values().into(), matrix.blocked_scales().into_bytes()],
        }
    }

    /// Bytes of device memory that are enough for what launches leave to each other.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn scratch_bytes(self, groups: &[abi::Group]) -> Result<u64, Error> {
        let mut scratch = Scratch(0);
        for group in groups {
            if self.module == Module::Sm90 {
                scratch.take(gated_sm90::decoded_bytes(group)?)?;
            }
            if self.schedule == LaunchSchedule::Unfused {
                scratch.take(projection_bytes(group)?)?;
                scratch.take(projection_bytes(group)?)?;
            }
        }
        Ok(scratch.0)
    }

    /// Plans the launches of a step's groups on a device of so many multiprocessors: chains, which need nothing of each
    /// other, of launches that come one after the other. Looks at the groups' sizes only; `scratch` is where
    /// [`Launcher::scratch_bytes`] lie, a multiple of 256. Nothing is launched for groups without tokens.
    ///
    /// # Errors
    /// If there are too many tiles, or the instance does not take the groups.
    pub fn plan(self, groups: &[abi::Group], sms: u32, scratch: Address) -> Result<Vec<Vec<Planned>>, Error> {
        let mut scratch = Scratch(scratch);
        let mut chains = match self.schedule {
            LaunchSchedule::Persistent => vec![self.fused(groups, sms, &mut scratch)?],
            LaunchSchedule::PerGroup | LaunchSchedule::Streams(_) => {
                let alone = |(index, group): (usize, &abi::Group)| {
                    self.fused(&[*group], sms, &mut scratch).map_err(|error| error.of_group(index))
                };
                groups.iter().enumerate().map(alone).collect::<Result<_, _>>()?
            }
            LaunchSchedule::Unfused => vec![self.unfused(groups, sms, &mut scratch)?],
        };
        for chain in &mut chains {
            chain.retain(|launch| launch.grid().blocks > 0);
        }
        chains.retain(|chain| !chain.is_empty());
        Ok(chains)
    }

    /// What the module's kernel takes to compute groups.
    fn fused(self, groups: &[abi::Group], sms: u32, scratch: &mut Scratch) -> Result<Vec<Planned>, Error> {
        self.with_tokens(vec![self.multiply(groups.to_vec(), sms)?], groups, scratch)
    }

    /// Launches that multiply the tokens of `groups`, behind what decodes these for them if any takes them decoded.
    fn with_tokens(
        self,
        mut launches: Vec<Planned>,
        groups: &[abi::Group],
        scratch: &mut Scratch,
    ) -> Result<Vec<Planned>, Error> {
        if launches.iter().any(Planned::takes_decoded_tokens) {
            let decoded = groups.iter().map(|group| scratch.take(gated_sm90::decoded_bytes(group)?));
            let decoded = decoded.collect::<Result<Vec<_>, Error>>()?;
            for launch in launches.iter_mut().filter(|launch| launch.takes_decoded_tokens()) {
                launch.groups.iter_mut().zip(&decoded).for_each(|(group, &decoded)| group.a = decoded);
            }
            let (grid, tokens) = gated_sm90::decode_tokens(groups, &decoded)?;
            let work = Work::Sm90Tokens(grid, tokens);
            launches.insert(0, Planned { module: self.module.name(), groups: Vec::new(), work });
        }
        Ok(launches)
    }

    /// One launch of the module's kernel.
    fn multiply(self, mut groups: Vec<abi::Group>, sms: u32) -> Result<Planned, Error> {
        let (op, instance) = (self.op, self.instance);
        let work = match self.module {
            Module::Simt => Work::Groups(gated_simt::plan(op, instance, &mut groups)?),
            Module::Sm90 => Work::Sm90(gated_sm90::plan(op, instance, &groups, sms)?),
            Module::Sm100 => Work::Sm100(gated_sm100::plan(op, instance, &groups, sms)?),
        };
        Ok(Planned { module: self.module.name(), groups, work })
    }

    /// Gate, up, and what becomes of both.
    fn unfused(self, groups: &[abi::Group], sms: u32, scratch: &mut Scratch) -> Result<Vec<Planned>, Error> {
        let mut projections = [const { Vec::new() }; 2];
        let mut segments = Vec::new();
        for group in groups {
            let mut places = [0; 2];
            for (index, projection) in projections.iter_mut().enumerate() {
                let c = scratch.take(projection_bytes(group)?)?;
                places[index] = c;
                let (b, b_scales, alpha) = ([group.b[index], 0], [group.b_scales[index], 0], [group.alpha[index], 0.0]);
                projection.push(abi::Group { b, b_scales, alpha, c, ..*group });
            }
            let [gate, up] = places;
            let elements = u64::from(group.m) * u64::from(group.n);
            if elements > 0 {
                segments.push(Segment { gate, up, c: group.c, elements, ..Segment::zeroed() });
            }
        }
        let [gate, up] = projections;
        let both = vec![self.multiply(gate, sms)?, self.multiply(up, sms)?];
        let mut chain = self.with_tokens(both, groups, scratch)?;
        let grid = silu_mul::plan(&mut segments)?;
        chain.push(Planned { module: silu_mul::NAME, groups: Vec::new(), work: Work::SiluMul(grid, segments) });
        Ok(chain)
    }
}

/// Bytes of a group's gate projection, or of its up projection.
fn projection_bytes(group: &abi::Group) -> Result<u64, Error> {
    (u64::from(group.m) * u64::from(group.n)).checked_mul(size_of::<u16>() as u64).ok_or(Error::TooLarge)
}

/// Hands out memory for what launches leave to each other, from an address on.
struct Scratch(Address);

impl Scratch {
    fn take(&mut self, bytes: u64) -> Result<Address, Error> {
        let end = self.0.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        Ok(std::mem::replace(&mut self.0, end.ok_or(Error::TooLarge)?))
    }
}

/// A launch whose descriptors have no address yet.
pub(super) struct Planned {
    /// The module that the entry is of.
    pub module: &'static str,
    /// The groups that are multiplied.
    groups: Vec<abi::Group>,
    work: Work,
}

enum Work {
    /// Of a kernel that is told of a step by one [`abi::Group`] for each expert.
    Groups(Grid),
    Sm90Tokens(Grid, Vec<kernels_gpu::gated_sm90::abi::Tokens>),
    Sm90(gated_sm90::Plan),
    Sm100(gated_sm100::Plan),
    SiluMul(Grid, Vec<Segment>),
}

/// A kernel's one parameter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Parameter {
    Groups(abi::Launch),
    Sm90Tokens(kernels_gpu::gated_sm90::abi::TokensLaunch),
    Sm90(kernels_gpu::gated_sm90::abi::Launch),
    Sm100(kernels_gpu::gated_sm100::abi::Launch),
    SiluMul(kernels_gpu::silu_mul::abi::Launch),
}

impl Parameter {
    /// As the kernel is given it.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Groups(launch) => bytemuck::bytes_of(launch),
            Self::Sm90Tokens(launch) => bytemuck::bytes_of(launch),
            Self::Sm90(launch) => bytemuck::bytes_of(launch),
            Self::Sm100(launch) => bytemuck::bytes_of(launch),
            Self::SiluMul(launch) => bytemuck::bytes_of(launch),
        }
    }
}

impl Planned {
    /// Whether the kernel wants tokens that a grid before it has decoded.
    fn takes_decoded_tokens(&self) -> bool {
        matches!(&self.work, Work::Sm90(plan) if plan.takes_decoded_tokens())
    }

    /// The grid.
    pub fn grid(&self) -> Grid {
        match &self.work {
            Work::Groups(grid) | Work::Sm90Tokens(grid, _) | Work::SiluMul(grid, _) => *grid,
            Work::Sm90(plan) => plan.grid,
            Work::Sm100(plan) => plan.grid,
        }
    }

    /// Bytes of the descriptors, up to where the next launch's may begin.
    pub fn bytes(&self) -> usize {
        let bytes = match &self.work {
            Work::Groups(_) => size_of_val(&*self.groups),
            Work::Sm90Tokens(_, tokens) => size_of_val(&**tokens),
            Work::Sm90(plan) => plan.tiles.len() * size_of::<kernels_gpu::gated_sm90::abi::Tile>(),
            Work::Sm100(plan) => {
                plan.map_count(&self.groups) * MAP_BYTES
                    + self.groups.len() * size_of::<kernels_gpu::gated_sm100::abi::Group>()
                    + size_of_val(&*plan.tiles)
            }
            Work::SiluMul(_, segments) => size_of_val(&**segments),
        };
        bytes.next_multiple_of(ALIGNMENT as usize)
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
        out_dtype: OutDtype,
        address: Address,
        to: &mut [u8],
        mut encode: impl FnMut(&MapArguments) -> Result<[u8; MAP_BYTES], Error>,
    ) -> Result<Parameter, Error> {
        let mut to = Writer { to, written: 0 };
        let output = descriptors::output(out_dtype);
        Ok(match &self.work {
            Work::Groups(_) => {
                to.write(&self.groups);
                let group_count = self.groups.len() as u32;
                Parameter::Groups(abi::Launch { groups: address, group_count, output })
            }
            Work::Sm90Tokens(_, tokens) => {
                to.write(tokens);
                let group_count = tokens.len() as u32;
                Parameter::Sm90Tokens(kernels_gpu::gated_sm90::abi::TokensLaunch {
                    groups: address,
                    group_count,
                    unused: 0,
                })
            }
            Work::Sm90(plan) => {
                to.write(&plan.describe(&self.groups));
                Parameter::Sm90(kernels_gpu::gated_sm90::abi::Launch { tiles: address, output, unused: 0 })
            }
            Work::Sm100(plan) => {
                for arguments in plan.maps(&self.groups) {
                    to.write(&encode(&arguments)?);
                }
                let groups = address + to.written as u64;
                to.write(&plan.describe(&self.groups, address));
                let tiles = address + to.written as u64;
                to.write(&plan.tiles);
                Parameter::Sm100(kernels_gpu::gated_sm100::abi::Launch {
                    groups,
                    tiles,
                    tile_count: plan.tiles.len() as u32,
                    output,
                })
            }
            Work::SiluMul(_, segments) => {
                to.write(segments);
                let segment_count = segments.len() as u32;
                Parameter::SiluMul(kernels_gpu::silu_mul::abi::Launch {
                    segments: address,
                    segment_count,
                    format: output,
                })
            }
        })
    }
}

/// Descriptors, one behind the other.
struct Writer<'a> {
    to: &'a mut [u8],
    written: usize,
}

impl Writer<'_> {
    fn write<T: bytemuck::NoUninit>(&mut self, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.to[self.written..][..bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{self, Generator};
    use crate::problem::Group;

    const SMS: u32 = 4;

    fn launcher(variant: &str, op: Op, k: usize) -> Result<Launcher, Error> {
        let sizes = [Group { m: 1, n: 8, k }; 2];
        let weights = generate::weights(Generator::Gaussian, op, &sizes, 1).unwrap();
        Launcher::new(variant.parse().unwrap(), Module::Sm90, &weights)
    }

    fn groups() -> Vec<abi::Group> {
        [(7, 72), (0, 24), (130, 136)]
            .map(|(m, n)| abi::Group { m, n, k: 64, c: 0x9000, b: [1, 2], alpha: [3.0, 4.0], ..abi::Group::zeroed() })
            .into()
    }

    #[test]
    fn a_schedule_has_one_chain_or_one_for_each_group_that_has_tokens() {
        // Hopper's kernel has a grid of its own to decode tokens, unless they are few, as those of the first group alone.
        let schedules: [(_, &[usize], &[usize]); 4] = [
            ("persistent", &[1], &[2]),
            ("per-group", &[1, 1], &[1, 2]),
            ("streams=3", &[1, 1], &[1, 2]),
            ("unfused", &[3], &[4]),
        ];
        for (variant, launches, on_hopper) in schedules {
            for module in Module::ALL {
                let launcher = launcher(&format!("{},{variant}", module.name()), Op::Gated, 64).unwrap();
                let expected = if module == Module::Sm90 { on_hopper } else { launches };
                let planned = launcher.plan(&groups(), SMS, 0).unwrap();
                let lengths: Vec<_> = planned.iter().map(Vec::len).collect();
                assert_eq!(lengths, expected, "{module:?} {variant}");
                let none: Vec<_> = groups().into_iter().map(|group| abi::Group { m: 0, ..group }).collect();
                assert!(launcher.plan(&none, SMS, 0).unwrap().is_empty());
            }
        }
    }

    #[test]
    fn what_launches_leave_to_each_other_lies_in_memory_that_nothing_else_uses() {
        let (launcher, groups, scratch) = (launcher("unfused", Op::Gated, 64).unwrap(), groups(), 0x10000);
        let chains = launcher.plan(&groups, SMS, scratch).unwrap();
        let [decode, gate, up, combine] = &chains[0][..] else { panic!("{} launches", chains[0].len()) };
        let (Work::Sm90Tokens(_, tokens), Work::SiluMul(_, segments)) = (&decode.work, &combine.work) else { panic!() };
        let with_tokens = || (0..groups.len()).filter(|&index| groups[index].m > 0);
        let mut used: Vec<_> = Vec::new();
        for (index, (tokens, segment)) in with_tokens().zip(tokens.iter().zip(segments)) {
            let (group, gate, up) = (&groups[index], &gate.groups[index], &up.groups[index]);
            assert_eq!((tokens.values, tokens.m, gate.a, up.a), (group.a, group.m, tokens.decoded, tokens.decoded));
            assert_eq!((segment.gate, segment.up, segment.c), (gate.c, up.c, group.c));
            assert_eq!((gate.b[0], gate.alpha[0], up.b[0], up.alpha[0]), (1, 3.0, 2, 4.0));
            assert_eq!(segment.elements, u64::from(group.m * group.n));
            used.extend([gate.c, up.c].map(|address| address..address + 2 * segment.elements));
            used.push(tokens.decoded..tokens.decoded + gated_sm90::decoded_bytes(group).unwrap());
        }
        assert_eq!((tokens.len(), segments.len()), (2, 2));
        used.sort_by_key(|range| range.start);
        assert!(used.windows(2).all(|pair| pair[0].end <= pair[1].start));
        let end = scratch + launcher.scratch_bytes(&groups).unwrap();
        assert!(used[0].start >= scratch && used[used.len() - 1].end <= end);
    }

    #[test]
    fn the_portable_module_stands_in_for_the_default_but_not_for_one_that_is_named() {
        assert_eq!(launcher("persistent", Op::Plain, 64).unwrap().kernel(), "plain_sm90");
        assert_eq!(launcher("persistent", Op::Plain, 48).unwrap().kernel(), "plain_simt");
        let refused = launcher("gated_sm90", Op::Plain, 48).unwrap_err().to_string();
        assert_eq!(refused, "expert 0: K = 48 is not for gated_sm90; take gated_simt");
    }

    #[test]
    fn an_instance_that_does_not_take_a_group_names_that_group_on_every_schedule() {
        for schedule in ["persistent", "per-group", "streams=2"] {
            let launcher = launcher(&format!("gated_sm100,t8,{schedule}"), Op::Gated, 64).unwrap();
            let refused = launcher.plan(&groups(), SMS, 0).err().unwrap().to_string();
            assert!(refused.starts_with("group 2: 130 tokens; "), "{refused}");
        }
    }
}
