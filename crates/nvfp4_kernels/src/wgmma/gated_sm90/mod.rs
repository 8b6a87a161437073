//! The Hopper kernel, `kernels-gpu/src/wgmma/gated_sm90/`: f16 tensor cores, with weights decoded before the products.
//!
//! Supports every K whose rows consist of whole lanes. Weights are packed in slabs, each a part of a stage. A step with
//! many tokens has two launches: a small grid that decodes the tokens once, then the grid that multiplies.

#[cfg(feature = "fake")]
mod fake;
mod plan;
mod slabs;

use std::borrow::Cow;

use kernels_gpu::wgmma::gated_sm90::abi::{self, INSTANCES, Instance, K_ALIGNMENT, STRIP_BYTES, TOKENS_ENTRY, Tokens};

use crate::group::{Address, PlacedGroup, PlacedMatrix, Sizes};
use crate::kernel::{Entry, Grouped, Kernel, Request, instance_name, none_left};
use crate::launch::{BlockCount, Grid, Launch, Scratch, output_code};
use nvfp4_core::Error;
use nvfp4_core::format::Matrix;
use nvfp4_core::problem::Op;
use plan::Plan;

/// The kernel.
pub struct GatedSm90;

impl Kernel for GatedSm90 {
    fn name(&self) -> &'static str {
        "gated_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        let tokens = Entry { name: TOKENS_ENTRY, op: None, threads: Tokens::THREADS, shared_bytes: 0 };
        INSTANCES.iter().map(entry).chain([tokens]).collect()
    }

    fn as_grouped(&self) -> Option<&dyn Grouped> {
        Some(self)
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl Grouped for GatedSm90 {
    fn title(&self, op: Op) -> &'static str {
        match op {
            Op::Gated => "gated_sm90",
            Op::Plain => "plain_sm90",
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

    fn scratch_bytes(&self, sizes: Sizes) -> Result<u64, Error> {
        decoded_bytes(sizes)
    }

    fn launches(
        &self,
        request: &Request,
        products: &[Vec<PlacedGroup>],
        scratch: &mut Scratch,
    ) -> Result<Vec<Launch>, Error> {
        let mut plans = Vec::with_capacity(products.len());
        for groups in products {
            let sizes: Vec<Sizes> = groups.iter().map(|group| group.sizes).collect();
            plans.push(match request.instance {
                None => plan::best(request.op, &sizes, request.sms, &request.refused)?
                    .ok_or_else(|| none_left(self, &request.refused))?,
                Some(index) => plan::with(plan::instance(request.op, index), &sizes, request.sms)?,
            });
        }
        let mut launches = Vec::with_capacity(1 + products.len());
        let mut decoded = None;
        // All products share the tokens, so the tokens are decoded once.
        if let Some((groups, _)) = products.iter().zip(&plans).find(|(_, plan)| !plan.instance.decodes_tokens()) {
            let places = groups.iter().map(|group| scratch.take(decoded_bytes(group.sizes)?));
            let places = places.collect::<Result<Vec<_>, Error>>()?;
            launches.push(self.decode_tokens(groups, &places)?);
            decoded = Some(places);
        }
        for (groups, plan) in products.iter().zip(&plans) {
            let decoded = decoded.as_deref().filter(|_| !plan.instance.decodes_tokens());
            launches.push(self.multiply(request, groups, plan, decoded));
        }
        Ok(launches)
    }
}

/// Bytes of the decoded tokens of a group.
fn decoded_bytes(sizes: Sizes) -> Result<u64, Error> {
    Tokens::strips(sizes.m, sizes.k).checked_mul(u64::from(STRIP_BYTES)).ok_or(Error::TooLarge)
}

impl GatedSm90 {
    /// Returns the grid that decodes the tokens of each group to the address in `decoded`. Groups without tokens are
    /// skipped.
    fn decode_tokens(&self, groups: &[PlacedGroup], decoded: &[Address]) -> Result<Launch, Error> {
        let mut blocks = BlockCount::default();
        let mut tokens = Vec::new();
        for (group, &decoded) in groups.iter().zip(decoded).filter(|(group, _)| group.sizes.m > 0) {
            let (PlacedMatrix { values, scales }, Sizes { m, k, .. }) = (group.tokens, group.sizes);
            let first_block = blocks.take(Tokens::blocks(m, k))?;
            tokens.push(Tokens { values, scales, decoded, m, k, first_block, unused: 0 });
        }
        let grid = Grid::linear(TOKENS_ENTRY, blocks.total(), Tokens::THREADS);
        Ok(Launch::of_array(self.name(), grid, tokens, |groups, group_count| abi::TokensLaunch {
            groups,
            group_count,
            unused: 0,
        }))
    }

    /// Returns the grid that multiplies. `decoded`: addresses of tokens that the previous grid decodes. `None`: CTAs
    /// decode the packed tokens themselves.
    fn multiply(&self, request: &Request, groups: &[PlacedGroup], plan: &Plan, decoded: Option<&[Address]>) -> Launch {
        let describe = |tile: &plan::Tile| {
            let plan::Tile { group, first_column, first_token, tokens, next } = *tile;
            let tokens_at = decoded.map(|places| places[group]);
            abi::Tile { group: describe(&groups[group], tokens_at), first_column, first_token, tokens, next }
        };
        let tiles: Vec<_> = plan.tiles.iter().map(describe).collect();
        let grid = Grid {
            shared_bytes: plan.instance.shared_bytes(),
            overlaps: decoded.is_some(),
            ..Grid::linear(plan.instance.entry, plan.blocks, plan.instance.threads())
        };
        let output = output_code(request.out_dtype);
        Launch::of_array(self.name(), grid, tiles, move |tiles, _| abi::Launch { tiles, output, unused: 0 })
    }
}

/// Returns the kernel's descriptor of a group. `decoded`: address of the decoded tokens. `None`: the tokens are packed.
fn describe(group: &PlacedGroup, decoded: Option<Address>) -> abi::Group {
    let &PlacedGroup { sizes: Sizes { m, n, k }, tokens, weights, alpha, output: c } = group;
    let (tokens, token_scales) = (decoded.unwrap_or(tokens.values), tokens.scales);
    abi::Group { tokens, token_scales, b: weights.map(|slabs| slabs.values), c, alpha, m, n, k, unused: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refused::Refused;
    use nvfp4_core::problem::TokenDtype;

    fn group(m: u32, n: u32, k: u32) -> PlacedGroup {
        PlacedGroup {
            sizes: Sizes { m, n, k },
            tokens: PlacedMatrix { values: 0x1000, scales: 0x1800 },
            weights: [0x2000, 0x3000].map(|values| PlacedMatrix { values, scales: 0 }),
            alpha: [1.0; 2],
            output: 0x4000,
        }
    }

    #[test]
    fn each_group_has_its_own_decoding_ctas() {
        // 7 and 9 tokens are one and two pieces of eight for each of three stages. A CTA decodes four pieces.
        let groups = [group(7, 72, 320), group(0, 8, 320), group(9, 8, 320)];
        let launch = GatedSm90.decode_tokens(&groups, &[0x10000, 0, 0x20000]).unwrap();
        let mut to = vec![0; launch.bytes()];
        launch.write(0x100, &mut to, &mut |_| unreachable!("the launch has no tensor maps")).unwrap();
        let tokens: Vec<Tokens> = to.chunks_exact(size_of::<Tokens>()).map(bytemuck::pod_read_unaligned).collect();
        let told: Vec<_> = tokens[..2].iter().map(|group| (group.decoded, group.m, group.first_block)).collect();
        assert_eq!((told, launch.grid.blocks), (vec![(0x10000, 7, 0), (0x20000, 9, 1)], 3));
        assert_eq!(groups.map(|group| decoded_bytes(group.sizes).unwrap()), [3 * 2048, 0, 6 * 2048]);
        assert!(matches!(GatedSm90.decode_tokens(&[group(u32::MAX, 8, 1 << 14)], &[0]), Err(Error::TooLarge)));
    }

    #[test]
    fn product_overlaps_the_launch_that_decodes_its_tokens() {
        let request = |name| {
            let instance = GatedSm90.instances(Op::Gated).iter().position(|of_kernel| *of_kernel == name);
            Request { op: Op::Gated, instance, out_dtype: TokenDtype::F16, sms: 4, refused: Refused::default() }
        };
        for (instance, overlaps) in [("t16", vec![false]), ("t64", vec![false, true])] {
            let products = [vec![group(7, 72, 320)]];
            let launches = GatedSm90.launches(&request(instance), &products, &mut Scratch::new(0x1000)).unwrap();
            let found: Vec<_> = launches.iter().map(|launch| launch.grid.overlaps).collect();
            assert_eq!(found, overlaps, "{instance}");
        }
    }
}
