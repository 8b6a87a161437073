//! The portable kernel, `kernels-gpu/src/simt/gated_simt/`: integer dot products, on any GPU from compute capability
//! 8.0 on.
//!
//! Supports every K. Weights stay as in the checkpoint, with their scales in the blocked layout.

#[cfg(feature = "fake")]
mod fake;
mod plan;

use kernels_gpu::simt::gated_simt::abi::{self, INSTANCES, Instance, Tile};

use crate::group::{PlacedGroup, Sizes};
use crate::kernel::{Entry, Grouped, Kernel, Request, none_left, op_of};
use crate::launch::{Grid, Launch, Scratch, output_code};
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// The kernel.
pub struct GatedSimt;

/// Names of the instances by tile.
const NAMES: [(&str, Tile); 2] = [("small", Tile::SMALL), ("large", Tile::LARGE)];

/// Returns the instance of an operation with a tile.
fn instance(op: Op, tile: Tile) -> Instance {
    let of = INSTANCES.iter().find(|instance| op_of(instance.matrices) == op && instance.tile == tile);
    *of.expect("both operations have an instance of every tile")
}

impl Kernel for GatedSimt {
    fn name(&self) -> &'static str {
        "gated_simt"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, Instance::THREADS, of.shared_bytes());
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

impl Grouped for GatedSimt {
    fn title(&self, op: Op) -> &'static str {
        match op {
            Op::Gated => "gated_simt",
            Op::Plain => "plain_simt",
        }
    }

    fn takes(&self, _k: usize) -> bool {
        true
    }

    fn instances(&self, _op: Op) -> Vec<&'static str> {
        NAMES.map(|(name, _)| name).into()
    }

    fn entry(&self, op: Op, name: &str) -> Option<&'static str> {
        NAMES.into_iter().find(|(of_tile, _)| *of_tile == name).map(|(_, tile)| instance(op, tile).entry)
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

impl GatedSimt {
    /// Returns the launch that computes all groups.
    fn launch(&self, request: &Request, groups: &[PlacedGroup]) -> Result<Launch, Error> {
        let sizes: Vec<Sizes> = groups.iter().map(|group| group.sizes).collect();
        let tile = match request.instance {
            None => {
                let is_left = |tile| !request.refused.contains(instance(request.op, tile).entry);
                plan::choose(&sizes, is_left).ok_or_else(|| none_left(self, &request.refused))?
            }
            Some(index) => NAMES[index].1,
        };
        let instance = instance(request.op, tile);
        let (first_tiles, blocks) = plan::number_tiles(tile, &sizes)?;
        let groups = groups.iter().zip(first_tiles).map(|(group, first_tile)| describe(group, first_tile)).collect();
        let grid =
            Grid { shared_bytes: instance.shared_bytes(), ..Grid::linear(instance.entry, blocks, Instance::THREADS) };
        let output = output_code(request.out_dtype);
        Ok(Launch::of_array(self.name(), grid, groups, move |groups, group_count| abi::Launch {
            groups,
            group_count,
            output,
        }))
    }
}

/// Returns the kernel's descriptor of a group.
fn describe(group: &PlacedGroup, first_tile: u32) -> abi::Group {
    let &PlacedGroup { sizes: Sizes { m, n, k }, tokens, weights, alpha, output } = group;
    abi::Group {
        a: tokens.values,
        a_scales: tokens.scales,
        b: weights.map(|matrix| matrix.values),
        b_scales: weights.map(|matrix| matrix.scales),
        c: output,
        alpha,
        m,
        n,
        k,
        first_tile,
    }
}
