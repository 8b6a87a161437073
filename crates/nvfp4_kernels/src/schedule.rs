//! Launch schedules: turns the groups of a step into chains of launches, for any kernel. Uses addresses and no device.

use super::GroupedKernel;
use super::group::{PlacedGroup, Sizes};
use super::kernel::{Grouped, Kernel, Request};
use super::launch::{Launch, Scratch};
use super::layer::silu_mul::{Segment, SiluMul};
use super::refused::Refused;
use crate::variant::{LaunchSchedule, Variant};
use nvfp4_core::Error;
use nvfp4_core::problem::{Op, TokenDtype, Weights};

/// Launches the steps of a layer.
#[derive(Clone)]
pub struct Launcher {
    kernel: &'static dyn Grouped,
    /// Operation that the kernel computes.
    op: Op,
    instance: Option<usize>,
    schedule: LaunchSchedule,
    refused: Refused,
}

impl Launcher {
    /// Creates the launcher of these weights for a variant. If the variant names no kernel, `default` computes. If
    /// `default` does not support these weights, the portable kernel computes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant does not fit the weights.
    pub fn new(variant: Variant, default: GroupedKernel, weights: &Weights<'_>) -> Result<Self, Error> {
        let op = variant.kernel_op(weights.op())?;
        let kernel = variant.kernel.unwrap_or(default);
        let refused = weights.experts().iter().position(|expert| !kernel.takes(expert.k()));
        let kernel = match (refused, variant.kernel) {
            (None, _) => kernel,
            (Some(_), None) => GroupedKernel::portable(),
            (Some(index), Some(_)) => {
                let (name, k) = (kernel.name(), weights.experts()[index].k());
                let text = format!("{name} does not support K = {k}; use {}", GroupedKernel::portable().name());
                return Err(Error::Invalid(text).at(format_args!("expert {index}")));
            }
        };
        let kernel = kernel.get();
        let names = kernel.instances(op);
        let index = |name| {
            names.iter().position(|of_kernel| *of_kernel == name).ok_or_else(|| {
                let (title, names) = (kernel.title(op), names.join(", "));
                Error::Invalid(format!("`{name}` is not an instance of {title}; expected one of {names}"))
            })
        };
        let instance = variant.instance.map(index).transpose()?;
        Ok(Self { kernel, op, instance, schedule: variant.schedule, refused: Refused::default() })
    }

    /// Returns the same launcher, which does not choose these instances.
    pub fn without(self, refused: Refused) -> Self {
        Self { refused, ..self }
    }

    /// Returns the kernel that computes. In the unfused baseline, it is the kernel that multiplies.
    pub fn kernel(&self) -> &'static dyn Grouped {
        self.kernel
    }

    /// Prefix of the names of the kernel's entries.
    pub fn title(&self) -> &'static str {
        self.kernel.title(self.op)
    }

    /// Returns every kernel that is launched.
    pub fn kernels(&self) -> Vec<&'static dyn Kernel> {
        let mut kernels: Vec<&'static dyn Kernel> = vec![self.kernel];
        if self.schedule == LaunchSchedule::Unfused {
            kernels.push(&SiluMul);
        }
        kernels
    }

    /// Operation that the kernel computes. In the unfused baseline: plain.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Bytes of device memory that suffice for intermediate results between launches.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn scratch_bytes(&self, groups: &[PlacedGroup]) -> Result<u64, Error> {
        let mut scratch = Scratch::new(0);
        for group in groups {
            scratch.take(self.kernel.scratch_bytes(group.sizes)?)?;
            if self.schedule == LaunchSchedule::Unfused {
                scratch.take(projection_bytes(group.sizes)?)?;
                scratch.take(projection_bytes(group.sizes)?)?;
            }
        }
        Ok(scratch.end())
    }

    /// Plans the launches of a step's groups as chains, on a device with `sms` SMs. Launches of a chain run one after
    /// the other. Chains are independent. `scratch` has at least [`Launcher::scratch_bytes`]. Groups without tokens
    /// launch nothing.
    ///
    /// # Errors
    /// If there are too many tiles, or the instance does not support the groups.
    pub fn plan(
        &self,
        groups: &[PlacedGroup],
        out_dtype: TokenDtype,
        sms: u32,
        mut scratch: Scratch,
    ) -> Result<Vec<Vec<Launch>>, Error> {
        let refused = self.refused.clone();
        let request = Request { op: self.op, instance: self.instance, out_dtype, sms, refused };
        let mut chains = match self.schedule {
            LaunchSchedule::Persistent => vec![self.kernel.launches(&request, &[groups.to_vec()], &mut scratch)?],
            LaunchSchedule::PerGroup | LaunchSchedule::Streams(_) => {
                let alone = |(index, group): (usize, &PlacedGroup)| {
                    let launches = self.kernel.launches(&request, &[vec![*group]], &mut scratch);
                    launches.map_err(|error| error.of_group(index))
                };
                groups.iter().enumerate().map(alone).collect::<Result<_, _>>()?
            }
            LaunchSchedule::Unfused => vec![self.unfused(&request, groups, &mut scratch)?],
        };
        for chain in &mut chains {
            chain.retain(|launch| launch.grid.blocks > 0);
        }
        chains.retain(|chain| !chain.is_empty());
        Ok(chains)
    }

    /// Plans the unfused baseline: gate, up, and their combination.
    fn unfused(&self, request: &Request, groups: &[PlacedGroup], scratch: &mut Scratch) -> Result<Vec<Launch>, Error> {
        let mut projections = [const { Vec::new() }; 2];
        let mut segments = Vec::new();
        for group in groups {
            let bytes = projection_bytes(group.sizes)?;
            let [gate, up] = [scratch.take(bytes)?, scratch.take(bytes)?];
            projections[0].push(group.projection(0, gate));
            projections[1].push(group.projection(1, up));
            let elements = u64::from(group.sizes.m) * u64::from(group.sizes.n);
            if elements > 0 {
                segments.push(Segment { gate, up, c: group.output, elements });
            }
        }
        let mut chain = self.kernel.launches(request, &projections, scratch)?;
        chain.push(SiluMul.launch(&segments, request.out_dtype)?);
        Ok(chain)
    }
}

/// Bytes of a group's gate projection or up projection.
fn projection_bytes(sizes: Sizes) -> Result<u64, Error> {
    (u64::from(sizes.m) * u64::from(sizes.n)).checked_mul(size_of::<u16>() as u64).ok_or(Error::TooLarge)
}

#[cfg(test)]
mod tests {
    use kernels_gpu::layer::silu_mul::abi;
    use kernels_gpu::wgmma::gated_sm90::abi::{Tile, Tokens};

    use super::*;
    use crate::group::PlacedMatrix;
    use nvfp4_core::generate::{self, Generator};
    use nvfp4_core::problem::Group;

    const SMS: u32 = 4;
    const SCRATCH: u64 = 0x10000;

    fn launcher(variant: &str, op: Op, k: usize) -> Result<Launcher, Error> {
        let sizes = [Group { m: 1, n: 8, k }; 2];
        let weights = generate::weights(Generator::Gaussian, op, &sizes, 1).unwrap();
        Launcher::new(variant.parse().unwrap(), GroupedKernel::named("gated_sm90").unwrap(), &weights)
    }

    fn groups() -> Vec<PlacedGroup> {
        let of = |(m, n)| PlacedGroup {
            sizes: Sizes { m, n, k: 64 },
            tokens: PlacedMatrix { values: 0x7000, scales: 0x8000 },
            weights: [1, 2].map(|values| PlacedMatrix { values, scales: 0 }),
            alpha: [3.0, 4.0],
            output: 0x9000,
        };
        [(7, 72), (0, 24), (130, 136)].map(of).into()
    }

    fn plan(launcher: &Launcher, groups: &[PlacedGroup]) -> Result<Vec<Vec<Launch>>, Error> {
        launcher.plan(groups, TokenDtype::F16, SMS, Scratch::new(SCRATCH))
    }

    /// Returns the descriptors of a launch with an array.
    fn array<T: bytemuck::AnyBitPattern>(launch: &Launch) -> Vec<T> {
        let mut to = vec![0; launch.bytes()];
        launch.write(0x100, &mut to, &mut |_| panic!("unexpected tensor map")).unwrap();
        to.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    #[test]
    fn schedule_has_one_chain_or_one_per_nonempty_group() {
        // Hopper's kernel decodes tokens in an extra grid, unless they are few. Only the first group's tokens are few.
        let schedules: [(_, &[usize], &[usize]); 4] = [
            ("persistent", &[1], &[2]),
            ("per-group", &[1, 1], &[1, 2]),
            ("streams=3", &[1, 1], &[1, 2]),
            ("unfused", &[3], &[4]),
        ];
        for (variant, launches, on_hopper) in schedules {
            for kernel in GroupedKernel::all() {
                let launcher = launcher(&format!("{},{variant}", kernel.name()), Op::Gated, 64).unwrap();
                let expected = if kernel.name() == "gated_sm90" { on_hopper } else { launches };
                let planned = plan(&launcher, &groups()).unwrap();
                let lengths: Vec<_> = planned.iter().map(Vec::len).collect();
                assert_eq!(lengths, expected, "{kernel:?} {variant}");
                let none = groups().into_iter().map(|mut group| {
                    group.sizes.m = 0;
                    group
                });
                assert!(plan(&launcher, &none.collect::<Vec<_>>()).unwrap().is_empty());
            }
        }
    }

    #[test]
    fn intermediate_results_do_not_overlap() {
        let (launcher, groups) = (launcher("unfused", Op::Gated, 64).unwrap(), groups());
        let chains = plan(&launcher, &groups).unwrap();
        let [decode, gate, up, combine] = &chains[0][..] else { panic!("{} launches", chains[0].len()) };
        let (tokens, segments) = (array::<Tokens>(decode), array::<abi::Segment>(combine));
        let [gate, up] = [gate, up].map(array::<Tile>);
        let with_tokens = || (0..groups.len()).filter(|&index| groups[index].sizes.m > 0);
        let mut used: Vec<_> = Vec::new();
        for (index, (tokens, segment)) in with_tokens().zip(tokens.iter().zip(&segments)) {
            let group = &groups[index];
            let of_group = |tiles: &[Tile]| tiles.iter().find(|tile| tile.group.m == group.sizes.m).unwrap().group;
            let (gate, up) = (of_group(&gate), of_group(&up));
            assert_eq!((tokens.values, tokens.m), (group.tokens.values, group.sizes.m));
            assert_eq!([gate.tokens, up.tokens], [tokens.decoded; 2]);
            assert_eq!((segment.gate, segment.up, segment.c), (gate.c, up.c, group.output));
            assert_eq!((gate.b[0], gate.alpha[0], up.b[0], up.alpha[0]), (1, 3.0, 2, 4.0));
            assert_eq!(segment.elements, u64::from(group.sizes.m * group.sizes.n));
            used.extend([gate.c, up.c].map(|address| address..address + 2 * segment.elements));
            used.push(tokens.decoded..tokens.decoded + launcher.kernel().scratch_bytes(group.sizes).unwrap());
        }
        assert_eq!(used.len(), 6);
        used.sort_by_key(|range| range.start);
        assert!(used.windows(2).all(|pair| pair[0].end <= pair[1].start));
        let end = SCRATCH + launcher.scratch_bytes(&groups).unwrap();
        assert!(used[0].start >= SCRATCH && used[used.len() - 1].end <= end);
    }

    #[test]
    fn portable_kernel_replaces_only_the_default() {
        assert_eq!(launcher("persistent", Op::Plain, 64).unwrap().title(), "plain_sm90");
        assert_eq!(launcher("persistent", Op::Plain, 48).unwrap().title(), "plain_simt");
        let refused = launcher("gated_sm90", Op::Plain, 48).err().unwrap().to_string();
        assert_eq!(refused, "expert 0: gated_sm90 does not support K = 48; use gated_simt");
    }

    #[test]
    fn instance_of_another_kernel_is_refused() {
        assert!(launcher("gated_sm100,t64_s2", Op::Gated, 64).is_ok());
        let refused = launcher("gated_simt,t64_s2", Op::Plain, 64).err().unwrap().to_string();
        assert_eq!(refused, "`t64_s2` is not an instance of plain_simt; expected one of small, large");
    }

    #[test]
    fn unsupported_group_is_named_on_every_schedule() {
        for schedule in ["persistent", "per-group", "streams=2"] {
            let launcher = launcher(&format!("gated_sm100,t8,{schedule}"), Op::Gated, 64).unwrap();
            let refused = plan(&launcher, &groups()).err().unwrap().to_string();
            assert!(refused.starts_with("group 2: 130 tokens; "), "{refused}");
        }
    }

    #[test]
    fn named_instance_is_used_for_all_sizes() {
        for (name, entry) in [("small", "gated_simt_small"), ("large", "gated_simt")] {
            for m in [1, 500] {
                let mut groups = groups();
                groups[0].sizes.m = m;
                let launcher = launcher(&format!("gated_simt,{name}"), Op::Gated, 64).unwrap();
                assert_eq!(plan(&launcher, &groups).unwrap()[0][0].grid.entry, entry);
            }
        }
    }
}
