//! The launches of a layer, read back from their parameters.

use std::ops::Range;

use bytemuck::AnyBitPattern;
use gpu_arch::Capability;
use kernels_gpu::curve::Curve;
use kernels_gpu::epilogue::{self, NO_PARAMETERS, PARAMETERS};
use kernels_gpu::layer::moe_quantize::abi::Quantize;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::{Quantize as Nvfp4Quantize, RouteQuantize};
use kernels_gpu::layer::moe_route::abi::{
    COMBINE_ENTRIES, Combine, EXPAND_ENTRY, Expand, ExpandedRows, ROUTE_ENTRIES, Route,
};
use kernels_gpu::lists::Lists;
use kernels_gpu::mma_sync::moe_few_sm90::abi::{Choices, Down, GateUp};
use kernels_gpu::moe::Launch as Product;
use kernels_gpu::nvfp4_rows::value_bytes;
use kernels_gpu::routed::QuantizedC;
use kernels_gpu::sorted::bits16_bytes;
use kernels_gpu::units::{OperandType, matrix_bytes};
use kernels_gpu::wgmma::moe_fp8_sm90::abi::Launch as Fp8Product;

use super::projection::activation_parameters;
use super::*;
use crate::launch::{Launch, output_code};
use crate::products::{ProductInstance, ProductKind, Products as _};
use crate::refused::Refused;
use crate::tensor_map::MapArguments;
use crate::wgmma::moe_sm90::MoeSm90;
use nvfp4_core::moe::Activation;
use nvfp4_core::problem::{Op, TokenDtype, TokenFormat};

const SMS: u32 = 132;

fn kernels_of(device: Capability) -> MoeKernels {
    MoeKernels::of(device).unwrap()
}

fn hopper() -> MoeKernels {
    kernels_of((9, 0))
}

fn blackwell() -> MoeKernels {
    kernels_of((10, 0))
}

fn consumer() -> MoeKernels {
    kernels_of((12, 0))
}

fn portable() -> MoeKernels {
    kernels_of((8, 0))
}

/// Where the workspace lies, and the layer's weights.
const WORKSPACE: Address = 0x10_0000_0000;
const EXPERTS: PlacedExperts =
    PlacedExperts { gate_up: 0x1000, down: 0x2000, alpha: [0x100, 0x200, 0x300], bias: [0; 3], input_scales: [0; 2] };
const SHARED: PlacedExperts =
    PlacedExperts { gate_up: 0x5000, down: 0x6000, alpha: [0x500, 0x600, 0x700], bias: [0; 3], input_scales: [0; 2] };

fn sizes(shared: Option<usize>) -> MoeSizes {
    MoeSizes {
        hidden: 2880,
        intermediate: 720,
        experts: 32,
        named_experts: 128,
        top_k: 4,
        shared_intermediate: shared,
        dtype: TokenDtype::Bf16,
        activation: Activation::Silu,
        biases: false,
        token_format: TokenFormat::Bits16,
        input_scales: false,
    }
}

fn layer(sizes: MoeSizes) -> PlacedMoe {
    let shared = sizes.shared_intermediate.map(|_| SHARED);
    PlacedMoe { sizes, experts: EXPERTS, shared, map: 0x4000, keeps_stages: false }
}

fn arguments(tokens: usize) -> MoeArguments {
    MoeArguments {
        token_count: tokens,
        tokens: 0x100_0000,
        token_pitch: 6000,
        topk_ids: 0x200_0004,
        topk_weights: 0x300_0004,
        weights_on_input: false,
        shared_weights: 0x400_0004,
        output: 0x500_0000,
        output_pitch: 5760,
    }
}

fn parameter<T: AnyBitPattern>(launch: &Launch) -> T {
    let parameter = launch.write(0, &mut [], &mut |_| unreachable!("no maps")).unwrap();
    bytemuck::pod_read_unaligned(parameter.bytes())
}

fn instance(launch: &Launch) -> ProductInstance {
    MoeSm90.instances().into_iter().find(|instance| instance.entry == launch.grid.entry).expect("a product")
}

fn chain(sizes: MoeSizes, arguments: &MoeArguments) -> Vec<Launch> {
    let workspace = Workspace::at(&sizes, arguments.token_count, WORKSPACE);
    launches(&layer(sizes), arguments, &workspace, &hopper(), SMS).unwrap()
}

#[test]
fn launches_read_the_results_of_earlier_launches() {
    let chain = chain(sizes(None), &arguments(100));
    let [route, gated, plain, combine] = &chain[..] else { panic!("{} launches", chain.len()) };
    assert!(chain.iter().all(|launch| launch.grid.overlaps));
    assert_eq!((route.grid.entry, combine.grid.entry), (ROUTE_ENTRIES[0], COMBINE_ENTRIES[1]));
    assert_eq!([gated, plain].map(|launch| instance(launch).matrices), [2, 1]);

    let (route, combine): (Route, Combine) = (parameter(route), parameter(combine));
    let tile = route.tile_tokens;
    for launch in [gated, plain] {
        assert_eq!((instance(launch).tile_tokens, instance(launch).operand_type), (tile, Some(OperandType::Bf16)));
    }
    let lists = Lists::new(400, 32);
    let [gated, plain]: [Product; 2] = [gated, plain].map(parameter);
    for product in [gated, plain] {
        assert_eq!(
            (product.firsts, product.tile_firsts),
            (route.lists + lists.firsts, route.lists + lists.tile_firsts)
        );
        assert_eq!(product.experts, 32);
    }
    assert_eq!([gated.lists_pending, plain.lists_pending], [1, 0]);
    assert_eq!([gated.ticket, plain.ticket], [0, 4].map(|at| route.lists + lists.tickets + at));
    assert_eq!([gated.rows, plain.rows], [route.lists + lists.rows, 0]);
    assert_eq!([gated.tokens, plain.tokens, combine.rows], [route.tokens, gated.c, plain.c]);
    assert_eq!(combine.places, route.lists + lists.places);
    assert_eq!([(gated.n, gated.k), (plain.n, plain.k)], [(720, 2880), (2880, 720)]);
    let [up, down] = [matrix_bytes(720, 2880), matrix_bytes(2880, 720)];
    assert_eq!((gated.b, gated.expert_bytes, gated.alpha), ([0x1000, 0x1000 + up], 2 * up, [0x100, 0x200]));
    assert_eq!((plain.b[0], plain.expert_bytes, plain.alpha[0]), (0x2000, down, 0x300));

    let of_route = [route.ids, route.map, route.input, route.input_pitch, route.input_weights, route.shared_lists];
    assert_eq!(of_route, [0x200_0004, 0x4000, 0x100_0000, 6000, 0, 0]);
    assert_eq!(
        [route.token_count, route.top_k, route.experts, route.named_experts, route.hidden],
        [100, 4, 32, 128, 2880]
    );
    let of_combine =
        [combine.weights, combine.shared_rows, combine.shared_weights, combine.output, combine.output_pitch];
    assert_eq!(of_combine, [0x300_0004, 0, 0, 0x500_0000, 5760]);
}

#[test]
fn shared_expert_has_separate_launches_and_lists() {
    let chain = chain(sizes(Some(1440)), &arguments(10));
    let [route, routed, _, gated, plain, combine] = &chain[..] else { panic!("{} launches", chain.len()) };
    let (route, combine): (Route, Combine) = (parameter(route), parameter(combine));
    let tile = instance(gated).tile_tokens;
    assert_eq!((route.shared_tile_tokens, instance(plain).tile_tokens), (tile, tile));
    let [routed, gated, plain]: [Product; 3] = [routed, gated, plain].map(parameter);
    let lists = Lists::new(10, 1);
    for product in [gated, plain] {
        assert_eq!((product.experts, product.rows, product.lists_pending), (1, 0, 0));
        assert_eq!(product.firsts, route.shared_lists + lists.firsts);
        assert_eq!(product.tile_firsts, route.shared_lists + lists.tile_firsts);
    }
    assert_eq!([gated.ticket, plain.ticket], [0, 4].map(|at| route.shared_lists + at));
    assert_eq!([gated.tokens, plain.tokens, combine.shared_rows], [routed.tokens, gated.c, plain.c]);
    assert_eq!(([gated.n, gated.k], [plain.n, plain.k]), ([1440, 2880], [2880, 1440]));
    assert_eq!((gated.b[0], plain.b[0], gated.alpha, plain.alpha[0]), (0x5000, 0x6000, [0x500, 0x600], 0x700));
    assert_eq!(combine.shared_weights, 0x400_0004);
}

#[test]
fn many_rows_per_expert_need_a_launch_that_expands_tokens() {
    let workspace = |tokens| Workspace::at(&sizes(Some(1440)), tokens, WORKSPACE);
    // Of the shared expert alone, then of all of them.
    for (tokens, routed_are_sorted) in [(100, false), (1000, true)] {
        let chain = chain(sizes(Some(1440)), &arguments(tokens));
        let [route, expand, products @ .., combine] = &chain[..] else { panic!("{} launches", chain.len()) };
        assert_eq!((expand.grid.entry, expand.grid.overlaps), (EXPAND_ENTRY, true));
        let (route, expand, combine): (Route, Expand, Combine) =
            (parameter(route), parameter(expand), parameter(combine));
        let of_instances: Vec<_> = products.iter().map(|launch| instance(launch).sorted).collect();
        assert_eq!(of_instances, [routed_are_sorted, routed_are_sorted, true, true]);
        let multiple = if routed_are_sorted { 8 } else { 1 };
        assert_eq!((route.row_multiple, route.tokens == 0, route.shared_tokens), (multiple, routed_are_sorted, 0));
        let lists = Lists::filled(4 * tokens as u64, 32, multiple);
        assert_eq!([expand.places, combine.places], [route.lists + lists.places; 2]);
        let of_expand = [expand.token_count, expand.top_k, expand.hidden];
        assert_eq!((expand.input, expand.input_pitch, of_expand), (0x100_0000, 6000, [tokens as u32, 4, 2880]));

        let [gated, plain, shared_gated, shared_plain]: [Product; 4] =
            [0, 1, 2, 3].map(|index| parameter(&products[index]));
        assert!([gated, shared_gated].iter().all(|product| product.lists_pending == 0), "a launch later");
        let placed = workspace(tokens);
        let shared = placed.shared.unwrap();
        let shared_rows = (expand.shared, [shared_gated, shared_plain], 1440, shared.capacity);
        let routed_rows = (expand.routed, [gated, plain], 720, placed.routed.capacity);
        let all = [shared_rows, routed_rows];
        for (rows, [gated, plain], width, capacity) in all.into_iter().take(1 + usize::from(routed_are_sorted)) {
            let expected = ExpandedRows { tokens: gated.tokens, intermediate: gated.c, capacity, width };
            assert_eq!(rows, expected);
            assert_eq!((plain.tokens, plain.c), (gated.c, gated.tokens), "down's rows take the place of tokens");
            assert_eq!([gated.c_is_sorted, plain.c_is_sorted], [1, 0]);
            assert_eq!([gated.row_capacity, plain.row_capacity], [capacity; 2]);
        }
        if !routed_are_sorted {
            assert_eq!((expand.routed.tokens, gated.tokens, gated.c_is_sorted), (0, route.tokens, 0));
        }
        assert_eq!([combine.rows, combine.shared_rows], [plain.c, shared_plain.c]);
    }
}

#[test]
fn lists_use_the_tile_size_of_their_instance() {
    for kernels in [hopper(), consumer(), portable()] {
        let instances = kernels.bits16.instances();
        let tile_tokens = |launch: &Launch| {
            assert_eq!(launch.kernel, kernels.bits16.name());
            let instance = instances.iter().find(|instance| instance.entry == launch.grid.entry).expect("its entry");
            assert_eq!(launch.grid.threads, instance.threads);
            let resident_blocks = launch.grid.blocks.div_ceil(SMS);
            assert_eq!(launch.grid.shared_bytes, kernels.bits16.shared_bytes(instance, resident_blocks));
            instance.tile_tokens
        };
        for tokens in [1, 8, 100, 1000, 5000] {
            let (sizes, arguments) = (sizes(Some(1440)), arguments(tokens));
            let workspace = Workspace::at(&sizes, tokens, WORKSPACE);
            let chain = launches(&layer(sizes), &arguments, &workspace, &kernels, SMS).unwrap();
            let route: Route = parameter(&chain[0]);
            let of_lists = [route.tile_tokens, route.tile_tokens, route.shared_tile_tokens, route.shared_tile_tokens];
            // Before them, tokens may be expanded.
            let first = chain.len() - 5;
            assert_eq!([0, 1, 2, 3].map(|index| tile_tokens(&chain[first + index])), of_lists, "{tokens} tokens");
        }
    }
}

#[test]
fn only_rows_of_down_and_tokens_share_memory() {
    for tokens in [1, 100, 3000] {
        let (sizes, chain) = (sizes(Some(48)), chain(sizes(Some(48)), &arguments(tokens)));
        let route: Route = parameter(&chain[0]);
        let choices = (tokens * sizes.top_k) as u64;
        let mut written: Vec<Range<u64>> = vec![
            route.lists..route.lists + Lists::filled(choices, 32, route.row_multiple).bytes,
            route.shared_lists..route.shared_lists + Lists::filled(tokens as u64, 1, route.row_multiple).bytes,
        ];
        if route.tokens != 0 {
            written.push(route.tokens..route.tokens + (2 * tokens * sizes.hidden) as u64);
        }
        let products = &chain[chain.len() - 5..chain.len() - 1];
        for (launch, rows) in products.iter().zip([choices, choices, tokens as u64, tokens as u64]) {
            let product: Product = parameter(launch);
            let bytes = match product.row_capacity {
                0 => 2 * rows * u64::from(product.n),
                capacity => bits16_bytes(capacity.into(), product.n),
            };
            written.push(product.c..product.c + bytes);
        }
        written.sort_by_key(|range| range.start);
        assert!(written.windows(2).all(|pair| pair[0].end <= pair[1].start));
        let end = WORKSPACE + workspace_bytes(&sizes, tokens) as u64;
        assert!(written[0].start >= WORKSPACE && written[written.len() - 1].end <= end);
    }
}

#[test]
fn fp8_tokens_are_quantized_before_each_product() {
    use kernels_gpu::wgmma::moe_fp8_sm90::abi::INSTANCES;

    let sizes = MoeSizes { token_format: TokenFormat::Fp8, top_k: 1, ..sizes(Some(1440)) };
    let arguments = MoeArguments { weights_on_input: true, ..arguments(100) };
    let chain = chain(sizes, &arguments);
    assert_eq!(chain.len(), 10);
    assert!(chain.iter().all(|launch| launch.grid.overlaps));
    let (route, combine): (Route, Combine) = (parameter(&chain[0]), parameter(&chain[9]));
    assert_eq!((route.tokens, route.shared_tokens, route.row_multiple), (0, 0, 8));
    let lists = [(route.lists, Lists::filled(100, 32, 8)), (route.shared_lists, Lists::filled(100, 1, 8))];
    for (of_shared, (at, lists)) in lists.into_iter().enumerate() {
        let first = 1 + 4 * of_shared;
        let [tokens, intermediate]: [Quantize; 2] = [&chain[first], &chain[first + 2]].map(parameter);
        let [gated, plain]: [Fp8Product; 2] = [&chain[first + 1], &chain[first + 3]].map(parameter);
        let tile = [route.tile_tokens, route.shared_tile_tokens][of_shared];
        for (launch, matrices) in [(&chain[first + 1], 2), (&chain[first + 3], 1)] {
            let instance = INSTANCES.iter().find(|instance| instance.entry == launch.grid.entry).expect("a product");
            assert_eq!((instance.tile_tokens, instance.matrices), (tile, matrices));
        }
        for (rounded, product, index) in [(tokens, gated, 0), (intermediate, plain, 4)] {
            assert_eq!((rounded.codes, rounded.scales), (product.tokens, product.scales));
            assert_eq!(
                (rounded.row_capacity, rounded.k, rounded.experts),
                (product.row_capacity, product.k, product.experts)
            );
            assert_eq!((rounded.firsts, product.firsts), (at + lists.firsts, at + lists.firsts));
            assert_eq!((product.tile_firsts, product.ticket), (at + lists.tile_firsts, at + lists.tickets + index));
        }
        assert_eq!((tokens.input, tokens.input_pitch, tokens.token_count), (0x100_0000, 6000, 100));
        assert_eq!((intermediate.input, intermediate.input_pitch), (gated.c, 2 * u64::from(gated.n)));
        assert_eq!((tokens.rows, intermediate.rows, intermediate.places), (at + lists.rows, 0, 0));
        let routed = (at + lists.places, arguments.topk_weights);
        assert_eq!((tokens.places, tokens.input_weights), if of_shared == 0 { routed } else { (0, 0) });
        assert_eq!([combine.rows, combine.shared_rows][of_shared], plain.c);
        let (width, units) = ([720, 1440][of_shared], [(0x1000, 0x2000), (0x5000, 0x6000)][of_shared]);
        assert_eq!(([gated.n, gated.k], [plain.n, plain.k]), ([width, 2880], [2880, width]));
        assert_eq!((gated.b, plain.b[0]), ([units.0, units.0 + matrix_bytes(width, 2880)], units.1));
        assert_eq!([gated.output, plain.output], [output_code(TokenDtype::Bf16); 2]);
    }
    assert_eq!((combine.places, combine.weights), (route.lists + lists[0].1.places, 0));
}

#[test]
fn nvfp4_tokens_are_quantized_before_each_product() {
    let sizes = MoeSizes { token_format: TokenFormat::Nvfp4, ..sizes(Some(96)) };
    let kernels = blackwell();
    let experts = PlacedExperts { input_scales: [0xA00, 0xB00], ..EXPERTS };
    let (layer, workspace) = (PlacedMoe { experts, ..layer(sizes) }, Workspace::at(&sizes, 100, WORKSPACE));
    let chain = launches(&layer, &arguments(100), &workspace, &kernels, SMS).unwrap();
    assert_eq!(chain.len(), 10);
    let route: Route = parameter(&chain[0]);
    assert_eq!((route.tokens, route.row_multiple, route.tile_tokens), (0, 1, 16), "lists alone");
    let lists = Lists::new(400, 32);
    let [first, second]: [Nvfp4Quantize; 2] = [&chain[1], &chain[3]].map(parameter);
    assert_eq!([first.places, second.places], [route.lists + lists.places, 0]);
    assert_eq!([first.token_count, second.token_count], [100, 400]);
    assert_eq!([first.input_scales, second.input_scales], [0xA00, 0xB00]);
    assert_eq!([(first.k, first.input_pitch), (second.k, second.input_pitch)], [(2880, 6000), (720, 1440)]);
    for (quantize, launch) in [(first, &chain[2]), (second, &chain[4])] {
        let (product, maps) = nvfp4_product(launch);
        assert_eq!(product.quantized, QuantizedC::default());
        assert_eq!((product.token_scales, product.globals), (quantize.scales, quantize.globals));
        assert_eq!([product.firsts, product.tile_firsts], [quantize.firsts, quantize.tile_firsts]);
        let (base, matrices) = if product.n == 720 { (0x1000, 2) } else { (0x2000, 1) };
        let [tokens, weights] = &maps[..] else { panic!("{} maps", maps.len()) };
        assert_eq!((tokens.address, tokens.rows, tokens.row_bytes), (quantize.values, 400, quantize.k / 2));
        assert_eq!((weights.address, weights.rows), (base, 32 * matrices * product.n));
        assert_eq!(product.weight_scales, base + value_bytes(weights.rows.into(), product.k));
        // Few rows: the lists are complete before the launch that quantizes lets the product start.
        assert!(launch.grid.overlaps && launch.grid.entry.ends_with("_t16_early"));
    }
    let combine: Combine = parameter(&chain[9]);
    assert_eq!([combine.rows, combine.shared_rows], [workspace.routed.rows, workspace.shared.unwrap().rows]);
}

#[test]
fn few_nvfp4_tokens_need_no_launch_for_lists() {
    let sizes = MoeSizes { token_format: TokenFormat::Nvfp4, ..sizes(None) };
    let kernels = blackwell();
    let (layer, workspace) = (layer(sizes), Workspace::at(&sizes, 300, WORKSPACE));
    let chain = |tokens: usize| launches(&layer, &arguments(tokens), &workspace, &kernels, SMS).unwrap();
    let entries = |tokens: usize| chain(tokens).iter().map(|launch| launch.grid.entry).collect::<Vec<_>>();
    let few = entries(100);
    assert_eq!(few.len(), 5);
    assert!(few[0].starts_with("moe_quantize_nvfp4_route_") && few[2].starts_with("moe_quantize_nvfp4_few_"));
    // The lists are pending when gate and up start.
    assert_eq!([few[1], few[3]], ["moe_sm100_gated_t16", "moe_sm100_plain_t16_early"]);
    let route: RouteQuantize = parameter(&chain(100)[0]);
    assert_eq!((route.quantize.token_count, route.quantize.top_k, route.tile_tokens), (100, 4, 16));
    // 1024 choices are few.
    assert_eq!([256, 257].map(|tokens| entries(tokens).len()), [5, 6]);
    assert!(entries(257).iter().all(|entry| !entry.ends_with("_early") && !entry.contains("_few_")));
}

/// The parameter of a product of tokens in NVFP4, and its tensor maps.
fn nvfp4_product(launch: &Launch) -> (kernels_gpu::routed::Launch, Vec<MapArguments>) {
    let mut maps = Vec::new();
    let product = launch.write(0, &mut [], &mut |map| {
        maps.push(*map);
        Ok([0; 128])
    });
    (bytemuck::pod_read_unaligned(product.unwrap().bytes()), maps)
}

#[test]
fn input_scales_let_gate_and_up_quantize_for_down() {
    let sizes = MoeSizes { token_format: TokenFormat::Nvfp4, input_scales: true, ..sizes(Some(96)) };
    let kernels = blackwell();
    let experts = PlacedExperts { input_scales: [0xA00, 0xB00], ..EXPERTS };
    let (layer, workspace) = (PlacedMoe { experts, ..layer(sizes) }, Workspace::at(&sizes, 100, WORKSPACE));
    for keeps_stages in [false, true] {
        let layer = PlacedMoe { keeps_stages, ..layer };
        let chain = launches(&layer, &arguments(100), &workspace, &kernels, SMS).unwrap();
        assert_eq!(chain.len(), 8);
        let ((gated, _), (down, maps)) = (nvfp4_product(&chain[2]), nvfp4_product(&chain[3]));
        let QuantizedC { input_scales, values, scales, globals } = gated.quantized;
        assert_eq!((input_scales, values), (0xB00, maps[0].address));
        assert_eq!((scales, globals), (down.token_scales, down.globals));
        assert_eq!(gated.c, if keeps_stages { workspace.routed.intermediate } else { 0 });
        assert_eq!((down.c, down.quantized), (workspace.routed.rows, QuantizedC::default()));
    }
}

#[test]
fn weights_on_the_input_are_applied_once() {
    let sizes = MoeSizes { top_k: 1, ..sizes(None) };
    let arguments = MoeArguments { weights_on_input: true, ..arguments(5) };
    let chain = chain(sizes, &arguments);
    let (route, combine): (Route, Combine) = (parameter(&chain[0]), parameter(&chain[3]));
    assert_eq!((route.input_weights, combine.weights), (arguments.topk_weights, 0));
}

#[test]
fn grids_have_a_cta_per_tile_up_to_the_sms_limit() {
    for (rows, experts, tile_tokens) in [(1u64, 32u32, 16), (31, 32, 16), (400, 3, 64), (100_000, 512, 128)] {
        let instance =
            MoeSm90.instance(ProductKind::of(Op::Plain, OperandType::F16), tile_tokens, rows, experts, [720, 64], SMS);
        let product = Product { n: 720, k: 64, experts, ..bytemuck::Zeroable::zeroed() };
        // The routing that makes most tiles: one row for each expert first, then whole tiles and one row more.
        let mut counts = vec![0u64; experts as usize];
        let hit = rows.min(experts.into());
        counts[..hit as usize].fill(1);
        counts[0] += (rows - hit) / u64::from(tile_tokens) * u64::from(tile_tokens);
        let most: u64 = counts.iter().map(|count| count.div_ceil(tile_tokens.into())).sum();
        let tiles = most * u64::from(720u32.div_ceil(instance.columns));
        for sms in [1, 132, 1 << 20] {
            let blocks = u64::from(MoeSm90.product(&instance, product, rows, sms as u32).grid.blocks);
            let most = sms * u64::from(instance.multiprocessor_blocks);
            assert_eq!(blocks, tiles.min(most), "{rows} rows of {experts} experts");
        }
    }
}

#[test]
fn tiles_grow_with_the_rows_of_an_expert() {
    let tiles = |tokens: usize| parameter::<Route>(&chain(sizes(None), &arguments(tokens))[0]).tile_tokens;
    let found: Vec<_> = [9, 32, 128, 512, 1024, 2048, 8192].map(tiles).into();
    assert_eq!(found.first(), Some(&8));
    assert_eq!(found.last(), Some(&128));
    assert!(found.is_sorted() && found.contains(&64));
}

#[test]
fn few_tiles_are_narrow_so_that_more_sms_work() {
    let columns = |tokens: usize| instance(chain(sizes(None), &arguments(tokens)).iter().rev().nth(2).unwrap()).columns;
    // A token names four experts, on average one of this layer. With 1000 tokens, every expert has rows.
    assert!(columns(9) < columns(1000));
    let narrow = MoeSm90.instances().iter().filter(|of| of.matrices == 2).map(|of| of.columns).min();
    assert_eq!(Some(columns(9)), narrow);
}

#[test]
fn few_tokens_of_gated_experts_take_two_launches() {
    let arguments = arguments(8);
    let [gate_up, down] = &chain(sizes(None), &arguments)[..] else { panic!("two launches") };
    assert!([gate_up, down].iter().all(|launch| launch.kernel == "moe_few_sm90" && launch.grid.overlaps));
    assert_eq!([gate_up, down].map(|launch| launch.grid.blocks), [SMS, SMS]);
    let (gate_up, down): (GateUp, Down) = (parameter(gate_up), parameter(down));
    assert_eq!(gate_up.choices, down.choices);
    let Choices { ids, map, token_count, top_k, experts, named_experts } = down.choices;
    assert_eq!(([ids, map], [token_count, top_k]), ([0x200_0004, 0x4000], [8, 4]));
    assert_eq!([experts, named_experts], [32, 128]);
    assert_eq!((gate_up.tokens, gate_up.token_pitch), (0x100_0000, 6000));
    assert_eq!(gate_up.intermediate, down.intermediate);
    assert_eq!([down.weights, down.rows, down.output, down.output_pitch], [0x300_0004, 0, 0x500_0000, 5760]);
    let [up, of_down] = [matrix_bytes(720, 2880), matrix_bytes(2880, 720)];
    let (first, second) = (gate_up.matrices, down.matrices);
    assert_eq!((first.b, first.expert_bytes, first.alpha), ([0x1000, 0x1000 + up], 2 * up, [0x100, 0x200]));
    assert_eq!((second.b[0], second.expert_bytes, second.alpha[0]), (0x2000, of_down, 0x300));
    assert_eq!(([first.n, first.k], [second.n, second.k]), ([720, 2880], [2880, 720]));

    let kept = PlacedMoe { keeps_stages: true, ..layer(sizes(None)) };
    let workspace = Workspace::at(&sizes(None), 8, WORKSPACE);
    let chain = launches(&kept, &arguments, &workspace, &hopper(), SMS).unwrap();
    assert_eq!(parameter::<Down>(&chain[1]).rows, workspace.routed.rows);
}

#[test]
fn few_tokens_with_other_options_take_the_long_chain() {
    let count = |sizes: MoeSizes, arguments: &MoeArguments| chain(sizes, arguments).len();
    let of = |top_k| MoeSizes { top_k, ..sizes(None) };
    assert_eq!([8, 9].map(|tokens| count(of(4), &arguments(tokens))), [2, 4]);
    assert_eq!([(8, 8), (9, 8), (32, 2), (32, 3)].map(|(k, tokens)| count(of(k), &arguments(tokens))), [2, 4, 2, 4]);
    // Where experts have more than a row each on average.
    let of_eight = MoeSizes { experts: 8, named_experts: 8, ..of(2) };
    assert_eq!([4, 5].map(|tokens| count(of_eight, &arguments(tokens))), [2, 4]);
    assert_eq!(count(sizes(Some(1440)), &arguments(1)), 6);
    assert_eq!(count(MoeSizes { activation: Activation::Relu2, ..sizes(None) }, &arguments(1)), 4);
    assert_eq!(count(of(1), &MoeArguments { weights_on_input: true, ..arguments(1) }), 4);
    for kernels in [consumer(), portable()] {
        let workspace = Workspace::at(&sizes(None), 1, WORKSPACE);
        assert_eq!(launches(&layer(sizes(None)), &arguments(1), &workspace, &kernels, SMS).unwrap().len(), 4);
    }
}

#[test]
fn chunks_cover_each_token_once_with_its_operands() {
    let (sizes, all) = (MoeSizes { top_k: 8, ..sizes(None) }, arguments(100_000));
    let chunks: Vec<_> = chunks(&sizes, &all).unwrap().collect();
    assert!(chunks.len() > 1);
    let mut next = 0;
    for (first, chunk) in chunks {
        assert_eq!(first, next);
        next += chunk.token_count;
        let first = first as u64;
        assert_eq!((chunk.tokens, chunk.output), (all.tokens + 6000 * first, all.output + 5760 * first));
        let routing = [all.topk_ids, all.topk_weights].map(|address| address + 4 * 8 * first);
        assert_eq!([chunk.topk_ids, chunk.topk_weights], routing);
        assert_eq!(chunk.shared_weights, all.shared_weights + 4 * first);
        assert_eq!((chunk.token_pitch, chunk.output_pitch), (6000, 5760));
    }
    assert_eq!(next, 100_000);
    assert_eq!(super::chunks(&sizes, &arguments(0)).unwrap().count(), 0);
}

#[test]
fn arguments_that_kernels_cannot_read_are_refused() {
    let refused = |change: &dyn Fn(&mut MoeArguments)| {
        let mut arguments = arguments(3);
        change(&mut arguments);
        chunks(&sizes(None), &arguments).err().unwrap().to_string()
    };
    for (error, text) in [
        (
            refused(&|arguments| arguments.tokens += 8),
            "tokens at 0x1000008, 6000 bytes apart: both must be multiples of 16",
        ),
        (refused(&|arguments| arguments.token_pitch = 5744), "and a row has 5760 bytes"),
        (refused(&|arguments| arguments.token_pitch = 5768), "5768 bytes apart"),
        (refused(&|arguments| arguments.output += 2), "output at 0x5000002"),
        (refused(&|arguments| arguments.output_pitch = 0), "output at 0x5000000, 0 bytes apart"),
        (refused(&|arguments| arguments.weights_on_input = true), "weights on the input need a layer with one expert"),
    ] {
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn layer_without_gate_has_two_plain_products() {
    let sizes = MoeSizes { activation: Activation::Relu2, biases: true, ..sizes(None) };
    let bias = [0, 0x800, 0x900];
    let layer = PlacedMoe { experts: PlacedExperts { bias, ..EXPERTS }, ..layer(sizes) };
    let (arguments, workspace) = (arguments(100), Workspace::at(&sizes, 100, WORKSPACE));
    let chain = launches(&layer, &arguments, &workspace, &hopper(), SMS).unwrap();
    assert_eq!([&chain[1], &chain[2]].map(|launch| instance(launch).matrices), [1, 1]);
    let [up, down]: [Product; 2] = [&chain[1], &chain[2]].map(parameter);
    assert_eq!((up.b[0], up.alpha[0], up.bias), (0x1000, 0x200, [0x800, 0]));
    assert_eq!(up.expert_bytes, matrix_bytes(720, 2880));
    assert_eq!((down.alpha[0], down.bias), (0x300, [0x900, 0]));
    assert_eq!([up, down].map(|product| product.activation.kind), [PARAMETERS, NO_PARAMETERS]);
}

#[test]
fn activations_become_parameters_of_the_kernel() {
    let silu = activation_parameters(Activation::Silu);
    assert_eq!(silu, epilogue::Activation::NONE);
    let gpt_oss = activation_parameters(Activation::GPT_OSS);
    let exponent = [(-1.702 * std::f64::consts::LOG2_E) as f32, 0.0];
    assert_eq!(gpt_oss, epilogue::Activation { kind: PARAMETERS, exponent, limit: 7.0, offset: 1.0 });
    let limited = activation_parameters(Activation::SiluLimit { limit: 2.0 });
    assert_eq!((limited.exponent[0], limited.limit, limited.offset), (-std::f32::consts::LOG2_E, 2.0, 0.0));
    let gelu = activation_parameters(Activation::GeluTanh);
    assert!(gelu.exponent[1] < 0.0 && gelu.limit == f32::INFINITY);
}

#[test]
fn curves_select_instances_with_curves() {
    let situ = Activation::Situ { beta: 8.0, linear: Some(4.0) };
    let sizes = MoeSizes { activation: situ, ..sizes(None) };
    // Few tokens too: the kernel for few tokens has no curves.
    for tokens in [1, 100] {
        let (arguments, workspace) = (arguments(tokens), Workspace::at(&sizes, tokens, WORKSPACE));
        let chain = launches(&layer(sizes), &arguments, &workspace, &hopper(), SMS).unwrap();
        let gate_up = chain.iter().find(|launch| launch.grid.entry.contains("gated")).unwrap();
        assert!(gate_up.grid.entry.ends_with("_curves"), "{}", gate_up.grid.entry);
        let product: Product = parameter(gate_up);
        assert_eq!(product.activation, epilogue::Activation::curve(Curve::Situ, [8.0, 4.0, 0.0, 0.0]));
        assert!(
            chain.iter().all(|launch| !launch.grid.entry.contains("plain") || !launch.grid.entry.ends_with("_curves"))
        );
    }
}

/// Returns the entries that multiply in a layer without a shared expert if some are refused, or the error.
fn multiplying(
    format: TokenFormat,
    device: Capability,
    tokens: usize,
    refused: &[&str],
) -> Result<Vec<&'static str>, String> {
    let sizes = MoeSizes { token_format: format, ..sizes(None) };
    let refused = refused.iter().map(|entry| ((*entry).to_owned(), "it hung".to_owned()));
    let kernels = kernels_of(device).without(Refused::new(refused));
    multiplying_entries(&sizes, tokens, &kernels, SMS).map_err(|error| error.to_string())
}

#[test]
fn refused_instances_are_replaced_by_other_tiles() {
    let bits16 = |tokens, refused: &[&str]| multiplying(TokenFormat::Bits16, (9, 0), tokens, refused);
    // A chain of four launches replaces the chain of two, and other tiles replace tiles.
    assert_eq!(bits16(1, &[]).unwrap(), ["moe_few_gate_up_bf16", "moe_few_down_bf16"]);
    let four = ["moe_gated_bf16_t8_strips", "moe_plain_bf16_t8_strips"];
    assert_eq!(bits16(1, &["moe_few_down_bf16"]).unwrap(), four);
    assert_eq!(bits16(1, &["moe_few_down_f16"]).unwrap(), ["moe_few_gate_up_bf16", "moe_few_down_bf16"]);
    assert_eq!(bits16(4000, &[]).unwrap(), ["moe_gated_bf16_t128", "moe_plain_bf16_t128"]);
    let both = bits16(4000, &["moe_gated_bf16_t128"]).unwrap();
    assert!(both[0] == "moe_gated_bf16_t64" && both[1].starts_with("moe_plain_bf16_t64"), "{both:?}");

    let nvfp4 = |tokens, refused: &[&str]| multiplying(TokenFormat::Nvfp4, (10, 0), tokens, refused);
    assert_eq!(nvfp4(4000, &[]).unwrap(), ["moe_sm100_gated_t128", "moe_sm100_plain_t128"]);
    assert_eq!(nvfp4(4000, &["moe_sm100_plain_t128"]).unwrap(), ["moe_sm100_gated_t64", "moe_sm100_plain_t64"]);
    assert_eq!(nvfp4(100, &["moe_sm100_plain_t16_early"]).unwrap(), ["moe_sm100_gated_t16", "moe_sm100_plain_t16"]);
    // A workspace has no room for so many tiles of 16 tokens.
    let error = nvfp4(4000, &["moe_sm100_plain_t128", "moe_sm100_plain_t64"]).unwrap_err();
    assert!(
        error.starts_with("no instance of moe_sm100 is left for these sizes") && error.contains("it hung"),
        "{error}"
    );
    assert!(nvfp4(100, &["moe_sm100_plain_t128", "moe_sm100_plain_t64"]).is_ok());
}

#[test]
fn layer_with_too_few_instances_is_found_before_a_call() {
    let sizes = MoeSizes { token_format: TokenFormat::Nvfp4, ..sizes(None) };
    let check = |refused: &[&str]| {
        let refused = refused.iter().map(|entry| ((*entry).to_owned(), "it hung".to_owned()));
        check_left(&sizes, &blackwell().without(Refused::new(refused)), SMS)
    };
    assert!(check(&[]).is_ok() && check(&["moe_sm100_plain_t128"]).is_ok());
    assert!(check(&["moe_sm100_plain_t128", "moe_sm100_plain_t64"]).is_err());
}
