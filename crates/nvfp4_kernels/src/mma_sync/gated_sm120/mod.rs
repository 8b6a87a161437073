//! The kernel for GeForce RTX 50, RTX PRO and DGX Spark, `kernels-gpu/src/mma_sync/gated_sm120/`: FP4 tensor cores of
//! sm_120 and sm_121.
//!
//! Supports every K whose rows a tensor map can describe. Weights are packed in slabs (`slabs.rs`). Tokens stay
//! unpacked, with their scales in the blocked layout.

#[cfg(feature = "fake")]
mod fake;
mod plan;
mod slabs;

use std::borrow::Cow;

use kernels_gpu::mma_sync::gated_sm120::abi::{self, INSTANCES, Instance, K_ALIGNMENT, K_BLOCK};

use crate::group::{PlacedGroup, Sizes};
use crate::kernel::{Entry, Grouped, Kernel, Request, instance_name, none_left};
use crate::launch::{Grid, Launch, Parameter, Scratch, Writer, output_code};
use crate::tensor_map::{MAP_BYTES, MapArguments};
use nvfp4_core::Error;
use nvfp4_core::format::Matrix;
use nvfp4_core::problem::Op;

/// The kernel.
pub struct GatedSm120;

impl Kernel for GatedSm120 {
    fn name(&self) -> &'static str {
        "gated_sm120"
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

impl Grouped for GatedSm120 {
    fn title(&self, op: Op) -> &'static str {
        match op {
            Op::Gated => "gated_sm120",
            Op::Plain => "plain_sm120",
        }
    }

    fn takes(&self, k: usize) -> bool {
        k.is_multiple_of(K_ALIGNMENT as usize)
    }

    fn instances(&self, op: Op) -> Vec<&'static str> {
        plan::instances(op).map(|instance| instance_name(self, op, instance.entry)).collect()
    }

    fn packed_bytes(&self, rows: usize, k: usize) -> [usize; 2] {
        [slabs::len(rows, k), 0]
    }

    fn pack<'m>(&self, matrix: &'m Matrix<'_>) -> [Cow<'m, [u8]>; 2] {
        [slabs::pack(matrix).into(), Cow::default()]
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

impl GatedSm120 {
    /// Returns the launch that computes all groups.
    fn launch(&self, request: &Request, groups: &[PlacedGroup]) -> Result<Launch, Error> {
        let sizes: Vec<Sizes> = groups.iter().map(|group| group.sizes).collect();
        let instance = match request.instance {
            Some(index) => plan::instances(request.op).nth(index).expect("the index is below the number of instances"),
            None => {
                plan::choose(request.op, &sizes, &request.refused).ok_or_else(|| none_left(self, &request.refused))?
            }
        };
        let tiles = plan::tiles(instance, &sizes)?;
        let blocks = plan::blocks(tiles.len() as u32, request.sms);
        let grid =
            Grid { shared_bytes: instance.shared_bytes(), ..Grid::linear(instance.entry, blocks, instance.threads()) };
        let maps = sizes.iter().filter(|sizes| sizes.m > 0).count();
        let bytes = maps * MAP_BYTES + groups.len() * size_of::<abi::Group>() + size_of_val(&*tiles);
        let (groups, output) = (groups.to_vec(), output_code(request.out_dtype));
        Ok(Launch::new(self.name(), grid, bytes, move |writer| {
            let described = groups.iter().map(|group| describe(instance, group, writer));
            let described = described.collect::<Result<Vec<_>, Error>>()?;
            let (groups, tile_count) = (writer.array(&described), tiles.len() as u32);
            Ok(Parameter::new(abi::Launch { groups, tiles: writer.array(&tiles), tile_count, output }))
        }))
    }
}

/// Writes the map of a group's tokens, if there are any, and returns the kernel's descriptor of the group.
fn describe(instance: Instance, group: &PlacedGroup, writer: &mut Writer<'_>) -> Result<abi::Group, Error> {
    let &PlacedGroup { sizes: Sizes { m, n, k }, tokens, weights, alpha, output: c } = group;
    let a_map = match m {
        0 => 0,
        _ => writer.tensor_map(&MapArguments::values(tokens.values, m, k, K_BLOCK, instance.tile_tokens))?,
    };
    let (a_scales, b) = (tokens.scales, weights.map(|slabs| slabs.values));
    Ok(abi::Group { a_map, a_scales, b, c, alpha, m, n, k, unused: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::PlacedMatrix;
    use crate::refused::Refused;
    use nvfp4_core::problem::TokenDtype;
    use nvfp4_core::shape;

    fn group(m: u32, n: u32, k: u32) -> PlacedGroup {
        PlacedGroup {
            sizes: Sizes { m, n, k },
            tokens: PlacedMatrix { values: 0x1000, scales: 0x1800 },
            weights: [0x2000, 0x3000].map(|values| PlacedMatrix { values, scales: 0 }),
            alpha: [1.0; 2],
            output: 0x4000,
        }
    }

    fn request(op: Op) -> Request {
        Request { op, instance: None, out_dtype: TokenDtype::F16, sms: 170, refused: Refused::default() }
    }

    /// Returns the tensor maps of a launch in the order of encoding, and its groups.
    fn described(launch: &Launch, groups: usize) -> (Vec<MapArguments>, Vec<abi::Group>) {
        let (mut maps, mut to) = (Vec::new(), vec![0; launch.bytes()]);
        let parameter = launch.write(0x10000, &mut to, &mut |arguments| {
            maps.push(*arguments);
            Ok([0; MAP_BYTES])
        });
        let parameter: abi::Launch = bytemuck::pod_read_unaligned(parameter.unwrap().bytes());
        let groups_at = &to[(parameter.groups - 0x10000) as usize..];
        let described = groups_at.chunks_exact(size_of::<abi::Group>()).take(groups);
        (maps, described.map(bytemuck::pod_read_unaligned).collect())
    }

    #[test]
    fn group_with_tokens_has_a_token_map() {
        let groups = [group(7, 72, 320), group(0, 8, 320), group(9, 8, 320)];
        let request = request(Op::Gated);
        let launch = GatedSm120.launch(&request, &groups).unwrap();
        let (maps, described) = described(&launch, 3);
        assert_eq!(maps, [7, 9].map(|m| MapArguments::values(0x1000, m, 320, 256, 16)));
        assert_eq!(described.iter().map(|group| group.a_map).collect::<Vec<_>>(), [0x10000, 0, 0x10080]);
        assert_eq!(described[2].b, [0x2000, 0x3000]);
        assert_eq!((launch.grid.blocks, launch.grid.entry), (3, "gated_sm120_t16"));
    }

    /// ptxas warns that multicast copies are slow on these GPUs.
    #[test]
    fn ptx_has_no_multicast_copies() {
        let ptx = crate::ptx("gated_sm120").unwrap();
        assert!(ptx.contains("cp.async.bulk") && !ptx.contains("multicast"));
    }

    #[test]
    fn every_built_in_shape_has_a_launch_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let of = |sizes: &nvfp4_core::problem::Group| group(sizes.m as u32, sizes.n as u32, sizes.k as u32);
                let groups: Vec<_> = shape.groups.iter().map(of).collect();
                let request = request(op);
                let launch = GatedSm120.launch(&request, &groups).unwrap();
                assert!((1..=170).contains(&launch.grid.blocks), "{}", shape.name);
                assert_eq!(described(&launch, 0).0.len(), groups.iter().filter(|group| group.sizes.m > 0).count());
            }
        }
    }
}
