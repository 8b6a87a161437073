//! The Blackwell kernel, `kernels-gpu/src/tcgen05/gated_sm100/`: the FP4 tensor cores of B200 and B300.
//!
//! Supports every K whose rows a tensor map can describe. Weights stay as in the checkpoint, with their scales in the
//! blocked layout. The kernel reads both by tensor maps and bulk copies.

#[cfg(feature = "fake")]
mod fake;
mod plan;

use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::tcgen05::gated_sm100::abi::{
    self, BOX_BYTES, BOX_TOKENS, INSTANCES, Instance, K_ALIGNMENT, Store, TILE_ROWS,
};

use crate::group::{PlacedGroup, Sizes};
use crate::kernel::{Entry, Grouped, Kernel, Request, instance_name, none_left};
use crate::launch::{Grid, Launch, Parameter, Scratch, Writer, output_code};
use crate::refused::Refused;
use crate::tensor_map::{MAP_BYTES, MapArguments};
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// The kernel.
pub struct GatedSm100;

impl Kernel for GatedSm100 {
    fn follows_manual(&self, entry: &str) -> bool {
        INSTANCES.iter().any(|instance| instance.entry == entry && instance.follows_manual())
    }

    fn name(&self) -> &'static str {
        "gated_sm100"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    fn as_grouped(&self) -> Option<&dyn Grouped> {
        Some(self)
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl Grouped for GatedSm100 {
    fn title(&self, op: Op) -> &'static str {
        match op {
            Op::Gated => "gated_sm100",
            Op::Plain => "plain_sm100",
        }
    }

    fn takes(&self, k: usize) -> bool {
        k.is_multiple_of(K_ALIGNMENT as usize)
    }

    fn instances(&self, op: Op) -> Vec<&'static str> {
        plan::instances(op).map(|instance| instance_name(self, op, instance.entry)).collect()
    }

    fn chosen(&self, op: Op, name: &str) -> bool {
        plan::candidates(op).any(|instance| instance_name(self, op, instance.entry) == name)
    }

    fn odd_above(&self, op: Op, name: &str) -> Option<u32> {
        let instance = plan::instances(op).find(|instance| instance_name(self, op, instance.entry) == name)?;
        // Tiles with fewer tokens than a column of scales support one tile only.
        (instance.allows(u32::MAX) && !plan::has_even_tiles(instance)).then_some(instance.tile_tokens)
    }

    /// Only tiles that start at even columns of scales support any number of tokens, and only an unsplit K any number of
    /// tiles.
    fn serves(&self, op: Op, refused: &Refused) -> bool {
        let is_left = |of: &Instance| of.splits == 1 && !refused.contains(of.entry) && plan::has_even_tiles(*of);
        plan::candidates(op).any(|instance| is_left(&instance))
    }

    fn launches(
        &self,
        request: &Request,
        products: &[Vec<PlacedGroup>],
        _scratch: &mut Scratch,
    ) -> Result<Vec<Launch>, Error> {
        products.iter().map(|groups| self.launch(request, groups)).collect()
    }
}

impl GatedSm100 {
    /// Returns the instance at an index. Fails if the instance does not allow the groups.
    fn named(&self, op: Op, index: usize, groups: &[Sizes]) -> Result<Instance, Error> {
        let instance = plan::instances(op).nth(index).expect("the index is below the number of instances");
        match groups.iter().position(|sizes| !instance.allows(sizes.m)) {
            None => Ok(instance),
            Some(index) => {
                let (name, most) = (instance_name(self, op, instance.entry), instance.tile_tokens);
                let m = groups[index].m;
                let text = format!("{m} tokens; instance {name} supports at most {most}; use one with larger tiles");
                Err(Error::Invalid(text).at(format_args!("group {index}")))
            }
        }
    }

    /// Returns the launch that computes all groups.
    fn launch(&self, request: &Request, groups: &[PlacedGroup]) -> Result<Launch, Error> {
        let sizes: Vec<Sizes> = groups.iter().map(|group| group.sizes).collect();
        let instance = match request.instance {
            Some(index) => self.named(request.op, index, &sizes)?,
            None => plan::choose(request.op, &sizes, request.sms, &request.refused)
                .ok_or_else(|| none_left(self, &request.refused))?,
        };
        let tiles = plan::tiles(instance, &sizes)?;
        let grid = Grid {
            cluster: instance.blocks_of_tile(),
            shared_bytes: instance.shared_bytes(),
            ..Grid::linear(instance.entry, plan::blocks(instance, tiles.len(), request.sms), instance.threads())
        };
        let maps: usize = groups.iter().map(|group| maps(instance, group).count()).sum();
        let bytes = maps * MAP_BYTES + tiles.len() * size_of::<abi::Record>();
        let (groups, output) = (groups.to_vec(), output_code(request.out_dtype));
        Ok(Launch::new(self.name(), grid, bytes, move |writer| {
            let described = groups.iter().map(|group| describe(instance, group, writer));
            let described = described.collect::<Result<Vec<_>, Error>>()?;
            let record = |tile: &abi::Tile| abi::Record { group: described[tile.group as usize], tile: *tile };
            let records: Vec<_> = tiles.iter().map(record).collect();
            Ok(Parameter::new(abi::Launch::new(writer.array(&records), output, &described, &tiles)))
        }))
    }
}

/// Returns the tensor maps of a group: tokens, then each weight matrix, then C if the epilogue stores it by a map. A
/// group without tokens has none.
fn maps(instance: Instance, group: &PlacedGroup) -> impl Iterator<Item = MapArguments> {
    let Sizes { m, n, k } = group.sizes;
    let values = move |address, rows, box_rows| MapArguments::values(address, rows, k, K_BLOCK, box_rows);
    let tokens = values(group.tokens.values, m, instance.box_tokens(m));
    let weights = group.weights.map(|matrix| values(matrix.values, n, TILE_ROWS));
    let weights = weights.into_iter().take(instance.matrices as usize);
    let output = (instance.store == Store::Tma).then(|| output_map(group));
    [tokens].into_iter().chain(weights).chain(output).filter(move |_| m > 0)
}

/// Returns the map of a group's C for the epilogue's store.
fn output_map(group: &PlacedGroup) -> MapArguments {
    let (address, row_bytes, rows) = (group.output, 2 * group.sizes.n, group.sizes.m);
    MapArguments {
        address,
        row_bytes,
        row_pitch: u64::from(row_bytes),
        rows,
        box_bytes: BOX_BYTES,
        box_rows: BOX_TOKENS,
        swizzled: false,
    }
}

/// Writes the maps of a group, and returns the kernel's descriptor of the group. The address of a missing map is 0.
fn describe(instance: Instance, group: &PlacedGroup, writer: &mut Writer<'_>) -> Result<abi::Group, Error> {
    let mut addresses = [0; 4];
    for (address, arguments) in addresses.iter_mut().zip(maps(instance, group)) {
        *address = writer.tensor_map(&arguments)?;
    }
    let [a_map, rest @ ..] = addresses;
    let (b_maps, c_map) = match instance.matrices {
        2 => ([rest[0], rest[1]], rest[2]),
        _ => ([rest[0], 0], rest[1]),
    };
    let &PlacedGroup { sizes: Sizes { m, n, k }, tokens, weights, alpha, output: c } = group;
    let (a_scales, b_scales) = (tokens.scales, weights.map(|matrix| matrix.scales));
    let a_box = instance.box_tokens(m);
    Ok(abi::Group { a_map, a_scales, b_maps, b_scales, c, c_map, alpha, m, n, k, a_box, unused: [0; 2] })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::group::PlacedMatrix;
    use nvfp4_core::problem::TokenDtype;
    use nvfp4_core::shape;

    fn group(m: u32, n: u32, k: u32) -> PlacedGroup {
        PlacedGroup {
            sizes: Sizes { m, n, k },
            tokens: PlacedMatrix { values: 0x1000, scales: 0x1800 },
            weights: [0x2000, 0x3000].map(|values| PlacedMatrix { values, scales: values + 0x800 }),
            alpha: [1.0; 2],
            output: 0x4000,
        }
    }

    fn request(op: Op, name: Option<&str>, sms: u32) -> Request {
        let index = |name| GatedSm100.instances(op).iter().position(|of_kernel| *of_kernel == name);
        let instance = name.map(|name| index(name).expect("the instance exists"));
        Request { op, instance, out_dtype: TokenDtype::F16, sms, refused: Refused::default() }
    }

    /// Returns the tensor maps of a launch in the order of encoding, and the groups of its tiles.
    fn described(launch: &Launch) -> (Vec<MapArguments>, BTreeMap<u32, abi::Group>) {
        let (mut maps, mut to) = (Vec::new(), vec![0; launch.bytes()]);
        let parameter = launch.write(0x10000, &mut to, &mut |arguments| {
            maps.push(*arguments);
            Ok([0; MAP_BYTES])
        });
        let parameter: abi::Launch = bytemuck::pod_read_unaligned(parameter.unwrap().bytes());
        let records = &to[(parameter.records - 0x10000) as usize..];
        let records = records.chunks_exact(size_of::<abi::Record>()).take(parameter.tile_count as usize);
        let described = records.map(bytemuck::pod_read_unaligned::<abi::Record>);
        let described: BTreeMap<_, _> = described.map(|record| (record.tile.group, record.group)).collect();
        (maps, described)
    }

    #[test]
    fn group_with_tokens_has_its_own_maps() {
        let groups = [group(7, 72, 320), group(0, 8, 320), group(9, 8, 320)];
        let launch = GatedSm100.launch(&request(Op::Gated, None, 148), &groups).unwrap();
        let (maps, described) = described(&launch);
        let map = |index: u64| 0x10000 + index * MAP_BYTES as u64;
        assert_eq!((described[&0].a_map, described[&0].b_maps), (map(0), [map(1), map(2)]));
        assert_eq!((described[&2].a_map, described[&2].b_maps), (map(3), [map(4), map(5)]));
        assert_eq!(maps.len(), 6);
        assert_eq!(maps[0], MapArguments::values(0x1000, 7, 320, 256, 8));
        assert_eq!(maps[2], MapArguments::values(0x3000, 72, 320, 256, 128));
        assert_eq!((launch.grid.blocks, launch.grid.entry), (4, "gated_sm100_t64_apart"));
    }

    #[test]
    fn every_built_in_shape_has_a_launch_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let of = |sizes: &nvfp4_core::problem::Group| group(sizes.m as u32, sizes.n as u32, sizes.k as u32);
                let groups: Vec<_> = shape.groups.iter().map(of).collect();
                let launch = GatedSm100.launch(&request(op, None, 148), &groups).unwrap();
                assert!((1..=148).contains(&launch.grid.blocks), "{}", shape.name);
                let (maps, _) = described(&launch);
                assert_eq!(
                    maps.len(),
                    (1 + op.projections()) * groups.iter().filter(|group| group.sizes.m > 0).count()
                );
            }
        }
    }

    #[test]
    fn pairs_use_two_sms_and_tma_stores_a_map_of_c() {
        let groups = [group(7, 72, 320), group(9, 300, 320)];
        let launch = |instance| GatedSm100.launch(&request(Op::Gated, Some(instance), 5), &groups).unwrap();
        let (pair, tma) = (launch("t64_pair"), launch("t64_tma"));
        assert_eq!((pair.grid.blocks, pair.grid.cluster, described(&pair).0.len()), (4, 2, 6));
        assert_eq!((tma.grid.blocks, tma.grid.cluster), (4, 1));
        let (maps, described) = described(&tma);
        assert_eq!((maps.len(), maps[7]), (8, output_map(&groups[1])));
        assert_eq!(described[&1].c_map, 0x10000 + 7 * MAP_BYTES as u64);
    }

    #[test]
    fn plain_group_has_one_weight_map_before_the_map_of_c() {
        let launch = GatedSm100.launch(&request(Op::Plain, Some("t64_tma"), 5), &[group(7, 72, 320)]).unwrap();
        let (maps, described) = described(&launch);
        assert_eq!((maps.len(), maps[2]), (3, output_map(&group(7, 72, 320))));
        assert_eq!(described[&0].c_map, 0x10000 + 2 * MAP_BYTES as u64);
    }
}
