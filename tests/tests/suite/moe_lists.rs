//! Tests of `moe_route` and `moe_pack` in the emulator: lists of each expert's rows, tokens in the order of K, sums of
//! rows, and weights packed on the device. Every element is compared with a simple reference, on several schedules,
//! with the sanitizer. Broken PTX must cause faults.

use bytemuck::NoUninit;
use half::{bf16, f16};
use kernels_gpu::format::{OUTPUT_BF16, OUTPUT_F16};
use kernels_gpu::layer::moe_pack::abi::{self as moe_pack, Pack};
use kernels_gpu::layer::moe_route::abi::{
    COMBINE_ENTRIES, Combine, EXPAND_ENTRY, Expand, ExpandedRows, ROUTE_ENTRIES, Route,
};
use kernels_gpu::lists::{Lists, NO_ROW, SMALL_EXPERTS};
use kernels_gpu::sorted::{ROW_MULTIPLE, bits16_bytes, bits16_place, line, most_rows};
use kernels_gpu::units::{
    OperandType, UNIT_ROWS, block_columns, block_start, element, element_at, k_blocks, lane_place, lane_scales,
    lane_words, matrix_bytes, scale_place, unit_offset,
};
use nvfp4_tests::sabotage::{changed, lines_of};
use nvfp4_tests::sampled;
use ptx_emulator::{Arg, Buffer, Device, DeviceConfig, Fault, FaultKind, LaunchConfig, Module, Report, Schedule};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const SCHEDULES: [Schedule; 4] = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];

/// Byte that fills outputs before a launch.
const POISON: u8 = 0xa5;

/// Returns the PTX of `moe_route` for an architecture.
fn route_ptx(arch: &str) -> &'static str {
    nvfp4::kernels::ptx_for("moe_route", arch).expect("the kernel is compiled for this architecture")
}

const HOPPER: &str = "sm_90a";

/// An architecture without clusters and without overlapping grids.
const PORTABLE: &str = "sm_80";

fn module(ptx: &str) -> Module {
    let module = Module::parse(ptx).unwrap();
    for entry in module.entries() {
        assert!(entry.unsupported.is_empty(), "{}: {:?}", entry.name, entry.unsupported);
    }
    module
}

fn random(seed: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(seed)
}

fn poisoned(device: &mut Device, bytes: u64) -> Buffer {
    device.upload(&vec![POISON; bytes as usize])
}

fn upload<T: NoUninit>(device: &mut Device, data: Option<&[T]>) -> u64 {
    data.map_or(0, |data| device.upload(data).address)
}

/// Rounds to a token type, to nearest even.
fn round(operand_type: u32, number: f32) -> u16 {
    if operand_type == OUTPUT_BF16 { bf16::from_f32(number).to_bits() } else { f16::from_f32(number).to_bits() }
}

fn decode(operand_type: u32, bits: u16) -> f32 {
    if operand_type == OUTPUT_BF16 { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
}

/// `true` if both are the same number, or both are NaN.
fn same(operand_type: u32, a: u16, b: u16) -> bool {
    a == b || decode(operand_type, a).is_nan() && decode(operand_type, b).is_nan()
}

/// Inputs of `moe_route`.
#[derive(Clone)]
struct Routing {
    ids: Vec<i32>,
    top_k: u32,
    experts: u32,
    map: Option<Vec<i32>>,
    /// Elements per token.
    hidden: u32,
    /// Elements from one token to the next.
    pitch: u32,
    x: Vec<u16>,
    weights: Option<Vec<f32>>,
    operand_type: u32,
    tile_tokens: u32,
    row_multiple: u32,
    has_shared: bool,
    /// CTAs per cluster. `None`: [`Route::cluster`] decides.
    cluster: Option<u32>,
}

/// Outputs of `moe_route`.
#[derive(Debug, PartialEq, Eq)]
struct Routed {
    lists: Vec<u32>,
    shared_lists: Option<Vec<u32>>,
    tokens: Vec<u16>,
    /// Unweighted tokens, for the shared expert.
    shared_tokens: Option<Vec<u16>>,
}

impl Routing {
    /// Makes a routing of these ids, with tokens of random bits.
    fn new(ids: Vec<i32>, top_k: u32, experts: u32, hidden: u32) -> Self {
        let tokens = ids.len() as u32 / top_k;
        let mut random = random(u64::from(hidden));
        let x = (0..tokens * hidden).map(|_| random.random()).collect();
        let (operand_type, tile_tokens) = (OUTPUT_BF16, 64);
        Self {
            ids,
            top_k,
            experts,
            map: None,
            hidden,
            pitch: hidden,
            x,
            weights: None,
            operand_type,
            tile_tokens,
            row_multiple: 1,
            has_shared: false,
            cluster: None,
        }
    }

    /// Makes a routing of random ids. Some ids name no expert.
    fn random(tokens: u32, top_k: u32, experts: u32, hidden: u32) -> Self {
        let mut random = random(u64::from(tokens ^ (experts << 16)));
        let ids = (0..tokens * top_k).map(|_| random.random_range(-2..experts as i32 + 2)).collect();
        Self::new(ids, top_k, experts, hidden)
    }

    fn with_pitch(mut self, pitch: u32) -> Self {
        let mut random = random(7);
        self.x = (0..self.tokens() * pitch).map(|_| random.random()).collect();
        Self { pitch, ..self }
    }

    fn with_weights(mut self, operand_type: u32) -> Self {
        let mut random = random(8);
        self.weights = Some((0..self.tokens()).map(|_| random.random_range(-2.0..2.0)).collect());
        Self { operand_type, ..self }
    }

    fn with_shared(self) -> Self {
        Self { has_shared: true, ..self }
    }

    /// Requests lists without tokens, with each expert's rows padded to [`ROW_MULTIPLE`].
    fn filled(self) -> Self {
        Self { row_multiple: ROW_MULTIPLE, ..self }
    }

    fn with_map(self, map: Vec<i32>) -> Self {
        Self { map: Some(map), ..self }
    }

    fn tokens(&self) -> u32 {
        self.ids.len() as u32 / self.top_k
    }

    /// Returns the expert of a choice. `None`: the choice names no expert of the layer.
    fn expert(&self, choice: usize) -> Option<usize> {
        let id = usize::try_from(self.ids[choice]).ok()?;
        let expert = match &self.map {
            Some(map) => usize::try_from(*map.get(id)?).ok()?,
            None => id,
        };
        (expert < self.experts as usize).then_some(expert)
    }

    /// Returns the expected lists for choices among `experts` experts. `expert` returns the expert of a choice.
    fn lists(&self, experts: u32, top_k: u32, tile_tokens: u32, expert: impl Fn(usize) -> Option<usize>) -> Vec<u32> {
        let choices = (self.tokens() * top_k) as usize;
        let places = Lists::filled(choices as u64, experts, self.row_multiple);
        let mut lists = vec![u32::from_le_bytes([POISON; 4]); places.bytes as usize / 4];
        let [tickets, firsts, tiles, rows, place] =
            [places.tickets, places.firsts, places.tile_firsts, places.rows, places.places].map(|at| at as usize / 4);
        lists[tickets..][..Lists::TICKETS as usize].fill(0);
        lists[place..][..choices].fill(NO_ROW);
        let (mut row, mut tile) = (0, 0);
        for of in 0..experts as usize {
            (lists[firsts + of], lists[tiles + of]) = (row, tile);
            for choice in (0..choices).filter(|&choice| expert(choice) == Some(of)) {
                lists[rows + row as usize] = choice as u32 / top_k;
                lists[place + choice] = row;
                row += 1;
            }
            while !row.is_multiple_of(self.row_multiple) {
                lists[rows + row as usize] = NO_ROW;
                row += 1;
            }
            tile += (row - lists[firsts + of]).div_ceil(tile_tokens);
        }
        (lists[firsts + experts as usize], lists[tiles + experts as usize]) = (row, tile);
        lists
    }

    /// Returns the expected outputs.
    fn expected(&self) -> Routed {
        let &Self { hidden, pitch, operand_type, .. } = self;
        let (mut tokens, mut plain) = (Vec::new(), Vec::new());
        for token in 0..self.tokens() as usize {
            for k_block in 0..k_blocks(hidden) {
                let columns = block_columns(hidden, k_block);
                for position in 0..columns {
                    let column = block_start(hidden, k_block) + element_at(columns, position);
                    let bits = self.x[token * pitch as usize + column as usize];
                    plain.push(bits);
                    tokens.push(match &self.weights {
                        Some(weights) => round(operand_type, decode(operand_type, bits) * weights[token]),
                        None => bits,
                    });
                }
            }
        }
        if self.row_multiple > 1 {
            tokens.fill(u16::from_le_bytes([POISON; 2]));
            plain.clone_from(&tokens);
        }
        Routed {
            lists: self.lists(self.experts, self.top_k, self.tile_tokens, |choice| self.expert(choice)),
            shared_lists: self.has_shared.then(|| self.lists(1, 1, 2 * self.tile_tokens, |_| Some(0))),
            tokens,
            shared_tokens: self.has_plain_tokens().then_some(plain),
        }
    }

    /// `true` if the kernel also writes unweighted tokens.
    fn has_plain_tokens(&self) -> bool {
        self.has_shared && self.weights.is_some()
    }

    fn grid(&self, schedule: Schedule, overlaps: bool) -> LaunchConfig {
        let choices = self.ids.len() as u64;
        let largest = if overlaps { Route::PORTABLE_CLUSTER } else { 1 };
        let cluster = self.cluster.unwrap_or_else(|| Route::cluster(choices, self.experts, largest));
        let blocks = if self.row_multiple > 1 {
            Route::list_blocks(self.tokens(), self.row_multiple, cluster)
        } else {
            Route::blocks(self.tokens(), self.hidden, cluster)
        };
        LaunchConfig {
            cluster: [cluster, 1, 1],
            shared_bytes: Route::shared_bytes(choices, self.experts, cluster),
            schedule,
            overlaps,
            ..LaunchConfig::linear(blocks as u32, Route::THREADS)
        }
    }
}

/// Operands of a routing on a device.
struct PlacedRouting {
    route: Route,
    lists: Buffer,
    shared_lists: Option<Buffer>,
    tokens: Buffer,
    shared_tokens: Option<Buffer>,
}

impl PlacedRouting {
    /// Uploads a routing and allocates its outputs.
    fn new(device: &mut Device, of: &Routing) -> Self {
        let tokens = of.tokens();
        let lists = poisoned(device, Lists::filled(of.ids.len() as u64, of.experts, of.row_multiple).bytes);
        let shared_lists = Lists::filled(u64::from(tokens), 1, of.row_multiple);
        let shared_lists = of.has_shared.then(|| poisoned(device, shared_lists.bytes));
        let ordered = poisoned(device, u64::from(tokens * of.hidden * 2));
        let shared_tokens = of.has_plain_tokens().then(|| poisoned(device, u64::from(tokens * of.hidden * 2)));
        // Ids need an alignment of 4 bytes only.
        let ids = device.upload(&[&[0], &of.ids[..]].concat());
        let route = Route {
            ids: ids.address + 4,
            map: upload(device, of.map.as_deref()),
            input: device.upload(&of.x).address,
            input_pitch: u64::from(of.pitch * 2),
            input_weights: upload(device, of.weights.as_deref()),
            tokens: if of.row_multiple > 1 { 0 } else { ordered.address },
            shared_tokens: shared_tokens.map_or(0, |tokens| tokens.address),
            lists: lists.address,
            shared_lists: shared_lists.map_or(0, |lists| lists.address),
            token_count: tokens,
            top_k: of.top_k,
            experts: of.experts,
            named_experts: of.map.as_ref().map_or(of.experts, |map| map.len() as u32),
            hidden: of.hidden,
            tile_tokens: of.tile_tokens,
            shared_tile_tokens: 2 * of.tile_tokens,
            operand_type: of.operand_type,
            row_multiple: of.row_multiple,
            unused: 0,
        };
        Self { route, lists, shared_lists, tokens: ordered, shared_tokens }
    }

    fn read(&self, device: &Device) -> Routed {
        Routed {
            lists: device.download(self.lists),
            shared_lists: self.shared_lists.map(|lists| device.download(lists)),
            tokens: device.download(self.tokens),
            shared_tokens: self.shared_tokens.map(|tokens| device.download(tokens)),
        }
    }
}

/// Turns the first warning of a launch into a fault, as `strict` does. At the default level, lanes that do not wait for
/// one another cause only a warning.
fn no_warning(report: Report) -> Result<(), Fault> {
    report.warnings.into_iter().next().map_or(Ok(()), |warning| Err(warning.fault))
}

fn launch_route(device: &mut Device, module: &Module, route: &Route, grid: &LaunchConfig) -> Result<(), Fault> {
    let entry = ROUTE_ENTRIES[usize::from(route.experts > SMALL_EXPERTS)];
    let report = device.launch(module, entry, grid, &[Arg::value(*route)])?;
    no_warning(report)
}

/// Checks a routing on every schedule, with the code for Hopper.
fn check_routing(name: &str, routing: &Routing) {
    check_routing_on(HOPPER, name, routing);
}

/// Same as [`check_routing`], with the code for an architecture.
fn check_routing_on(arch: &str, name: &str, routing: &Routing) {
    let module = module(route_ptx(arch));
    let expected = routing.expected();
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let placed = PlacedRouting::new(&mut device, routing);
        let result = launch_route(&mut device, &module, &placed.route, &routing.grid(schedule, arch != PORTABLE));
        result.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
        let Routed { lists, shared_lists, tokens, shared_tokens } = placed.read(&device);
        let places = Lists::filled(routing.ids.len() as u64, routing.experts, routing.row_multiple);
        let wrong = (0..lists.len()).find(|&at| lists[at] != expected.lists[at]);
        assert_eq!(wrong.map(|at| (4 * at, lists[at], expected.lists[at])), None, "{name}, {schedule}, {places:?}");
        assert_eq!(shared_lists, expected.shared_lists, "{name}, {schedule}");
        assert!(shared_tokens == expected.shared_tokens, "{name}, {schedule}");
        let wrong = (0..tokens.len()).find(|&at| {
            let is_same = if routing.weights.is_some() {
                same(routing.operand_type, tokens[at], expected.tokens[at])
            } else {
                tokens[at] == expected.tokens[at]
            };
            !is_same
        });
        assert_eq!(wrong.map(|at| (at, tokens[at], expected.tokens[at])), None, "{name}, {schedule}");
    }
}

#[test]
fn lists_are_right_for_few_and_many_experts_and_choices() {
    for (tokens, top_k, experts) in
        [(1, 1, 1), (1, 8, 128), (17, 1, 512), (17, 32, 512), (64, 8, 33), (128, 32, 512), (513, 7, 31), (512, 8, 1)]
    {
        check_routing(&format!("{tokens} × {top_k} of {experts}"), &Routing::random(tokens, top_k, experts, 32));
    }
}

#[test]
fn lists_of_a_cluster_are_right_for_any_number_of_choices() {
    // A warp handles 512 choices at a time. A CTA sorts them if no warp has more.
    let sizes = [(129, 32, 5), (300, 8, 60), (1031, 4, 512), (1100, 16, 129), (8200, 8, 128), (4200, 32, 3)];
    for (tokens, top_k, experts) in sampled(sizes.to_vec(), 3) {
        check_routing(&format!("{tokens} × {top_k} of {experts}"), &Routing::random(tokens, top_k, experts, 16));
    }
}

#[test]
fn lists_of_the_largest_cluster_are_right() {
    let sizes = [(0, 4, 7), (1, 1, 1), (129, 32, 5), (1031, 4, 512), (2100, 8, 256), (4200, 32, 3)];
    for (tokens, top_k, experts) in sampled(sizes.to_vec(), 3) {
        let routing = Routing::random(tokens, top_k, experts, 16).with_shared().filled();
        let routing = Routing { cluster: Some(Route::MAX_CLUSTER), ..routing };
        check_routing(&format!("{tokens} × {top_k} of {experts}, the largest cluster"), &routing);
    }
}

#[test]
fn one_cta_makes_the_lists_without_clusters() {
    for (tokens, top_k, experts) in [(1, 1, 1), (17, 1, 512), (64, 8, 33), (1031, 4, 512), (1100, 8, 40)] {
        let routing = Routing::random(tokens, top_k, experts, 48).with_shared();
        check_routing_on(PORTABLE, &format!("{tokens} × {top_k} of {experts} in one CTA"), &routing);
    }
}

#[test]
fn rows_of_each_expert_are_padded_to_multiples_of_8() {
    for (tokens, top_k, experts) in [(1, 1, 1), (17, 1, 512), (64, 8, 33), (513, 7, 31), (1031, 4, 512)] {
        let routing = Routing::random(tokens, top_k, experts, 32).with_shared().filled();
        check_routing(&format!("{tokens} × {top_k} of {experts}, padded"), &routing);
    }
}

#[test]
fn lists_of_more_experts_than_threads_are_right() {
    // Kimi-K3's 16 of 896 experts, an odd number of experts, and the most experts and choices. Up to 1024 choices have one
    // CTA, more have a cluster, and segments of more than 192 choices have several groups.
    for (tokens, top_k, experts) in
        [(5, 16, 896), (64, 16, 896), (33, 32, 1024), (100, 1, 513), (900, 16, 896), (3, 2, 1023)]
    {
        let name = format!("{tokens} tokens, {top_k} of {experts}");
        check_routing(&name, &Routing::random(tokens, top_k, experts, 16));
        check_routing(&name, &Routing::random(tokens, top_k, experts, 16).with_shared().filled());
    }
    for (tokens, top_k, experts) in [(40, 16, 896), (300, 32, 1024)] {
        check_routing_on(PORTABLE, "one CTA", &Routing::random(tokens, top_k, experts, 16));
        check_routing(
            "a cluster",
            &Routing { cluster: Some(Route::SMALL_CLUSTER), ..Routing::random(tokens, top_k, experts, 16) },
        );
    }
    for experts in [513, 1024] {
        check_routing("none", &Routing::new(vec![-1; 80], 16, experts, 16));
        check_routing("the last", &Routing::new(vec![experts as i32 - 1; 80], 16, experts, 16));
    }
}

#[test]
fn lists_without_tokens_are_empty() {
    for routing in [Routing::new(vec![], 8, 128, 64), Routing::new(vec![], 1, 1, 16).with_shared()] {
        check_routing("no token", &routing);
    }
}

#[test]
fn single_missing_and_repeated_experts_are_right() {
    for tokens in [3, 200, 1500] {
        check_routing("one", &Routing::new(vec![5; tokens * 4], 4, 8, 16));
        check_routing("none", &Routing::new(vec![-1; tokens * 4], 4, 8, 16));
        let twice = (0..tokens as i32).flat_map(|token| [token % 7, 3, token % 7, 6]).collect();
        check_routing("twice", &Routing::new(twice, 4, 8, 16));
        let extreme = [i32::MIN, i32::MAX, 7, 8, -1, 0].into_iter().cycle().take(tokens * 4).collect();
        check_routing("extreme", &Routing::new(extreme, 4, 8, 16));
    }
}

#[test]
fn expert_map_selects_the_experts_of_the_layer() {
    let some = (0..256).map(|expert| if expert % 8 == 3 { expert / 8 } else { -1 }).collect::<Vec<_>>();
    for tokens in [5, 64, 700] {
        let mut random = random(3);
        let ids: Vec<_> = (0..tokens * 8).map(|_| random.random_range(-1..258)).collect();
        check_routing("map", &Routing::new(ids.clone(), 8, 32, 16).with_map(some.clone()));
        check_routing("nobody", &Routing::new(ids.clone(), 8, 32, 16).with_map(vec![-1; 256]));
        check_routing("short", &Routing::new(ids, 8, 32, 16).with_map(vec![31, 0, 30]));
    }
}

#[test]
fn tokens_of_any_size_are_in_the_order_of_k() {
    for hidden in [16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 256, 272, 352, 720, 1408] {
        let routing = Routing::random(5, 2, 4, hidden);
        check_routing(&format!("{hidden} columns"), &routing);
        check_routing(&format!("{hidden} columns with a pitch"), &routing.clone().with_pitch(hidden + 24));
        for operand_type in [OUTPUT_F16, OUTPUT_BF16] {
            let weighted = routing.clone().with_pitch(hidden + 8).with_weights(operand_type).with_shared();
            check_routing(&format!("{hidden} columns with weights"), &weighted);
        }
    }
    check_routing("many tokens", &Routing::random(700, 8, 16, 400).with_shared());
}

#[test]
fn two_layers_can_share_the_same_memory() {
    let module = module(route_ptx(HOPPER));
    let routing = Routing::random(200, 8, 32, 96).with_shared();
    let mut other = Routing::random(200, 8, 32, 96).with_shared();
    other.ids.reverse();
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let placed = PlacedRouting::new(&mut device, &routing);
        launch_route(&mut device, &module, &placed.route, &routing.grid(schedule, true)).unwrap();
        let mut next = PlacedRouting::new(&mut device, &other);
        let Route { tokens, lists, shared_lists, .. } = placed.route;
        next.route = Route { tokens, lists, shared_lists, ..next.route };
        launch_route(&mut device, &module, &next.route, &other.grid(schedule, true)).unwrap();
        assert_eq!(placed.read(&device), other.expected(), "{schedule}");
    }
}

/// Inputs of `moe_expand`, which copies tokens to the rows of a routing and of the shared expert.
struct Expansion {
    routing: Routing,
    /// Columns of the intermediate, of the routed experts and of the shared expert. `None`: no rows of this kind.
    widths: [Option<u32>; 2],
}

/// Outputs of `moe_expand` on a device: rows of tokens and of the intermediate.
struct PlacedRows {
    rows: ExpandedRows,
    tokens: Buffer,
    intermediate: Buffer,
}

impl Expansion {
    fn capacities(&self) -> [u32; 2] {
        let routed = most_rows(self.routing.ids.len() as u64, self.routing.experts, ROW_MULTIPLE) as u32;
        [routed, self.routing.tokens().next_multiple_of(ROW_MULTIPLE)]
    }

    /// Makes the operands of the launch that follows the lists.
    fn place(&self, device: &mut Device, route: &Route) -> (Expand, [Option<PlacedRows>; 2]) {
        let hidden = self.routing.hidden;
        let mut place = |of: usize| {
            let (width, capacity) = (self.widths[of]?, self.capacities()[of]);
            let [tokens, intermediate] =
                [hidden, width].map(|columns| poisoned(device, bits16_bytes(capacity.into(), columns)));
            let rows = ExpandedRows { tokens: tokens.address, intermediate: intermediate.address, capacity, width };
            Some(PlacedRows { rows, tokens, intermediate })
        };
        let placed = [place(0), place(1)];
        let [routed, shared] = placed.each_ref().map(|placed| {
            let none = ExpandedRows { tokens: 0, intermediate: 0, capacity: 0, width: 0 };
            placed.as_ref().map_or(none, |placed| placed.rows)
        });
        let lists = Lists::filled(self.routing.ids.len() as u64, self.routing.experts, ROW_MULTIPLE);
        let &Route { input, input_pitch, input_weights, token_count, top_k, operand_type, .. } = route;
        let places = route.lists + lists.places;
        let expand = Expand {
            input,
            input_pitch,
            input_weights,
            places,
            routed,
            shared,
            token_count,
            top_k,
            hidden,
            operand_type,
        };
        (expand, placed)
    }

    /// Returns the expected rows of tokens and of the intermediate, for tokens `[T, H]` in the order of K. `of`: 0 for
    /// routed experts, 1 for the shared expert.
    fn expected(&self, of: usize, tokens: &[u16]) -> [Vec<u16>; 2] {
        let (hidden, width, capacity) = (self.routing.hidden, self.widths[of].unwrap(), self.capacities()[of]);
        let poison = u16::from_le_bytes([POISON; 2]);
        let [mut rows, mut intermediate] =
            [hidden, width].map(|columns| vec![poison; bits16_bytes(capacity.into(), columns) as usize / 2]);
        let lists = self.routing.clone().filled().expected().lists;
        let places = Lists::filled(self.routing.ids.len() as u64, self.routing.experts, ROW_MULTIPLE).places;
        let places = &lists[places as usize / 4..];
        let of_token = |token: u32| match of {
            0 => places[(token * self.routing.top_k) as usize..][..self.routing.top_k as usize].to_vec(),
            _ => vec![token],
        };
        let zero = |rows: &mut [u16], row, lines| {
            for index in lines {
                rows[line(capacity, index, row) as usize / 2..][..64].fill(0);
            }
        };
        for token in 0..self.routing.tokens() {
            for row in of_token(token).into_iter().filter(|&row| row != NO_ROW) {
                zero(&mut rows, row, 0..2 * k_blocks(hidden));
                for (position, &number) in (0..).zip(&tokens[(token * hidden) as usize..][..hidden as usize]) {
                    rows[bits16_place(capacity, hidden, row, position) as usize / 2] = number;
                }
                zero(&mut intermediate, row, width / 128 * 2..2 * k_blocks(width));
            }
        }
        [rows, intermediate]
    }

    /// Checks the expansion after the lists on every schedule, with the code for an architecture.
    fn check(&self, arch: &str, name: &str) {
        let (module, overlaps) = (module(route_ptx(arch)), arch != PORTABLE);
        let Routed { tokens, shared_tokens, .. } = self.routing.expected();
        let operand_type = self.routing.operand_type;
        for schedule in SCHEDULES {
            let mut device = Device::new(DeviceConfig::default());
            let filled = self.routing.clone().filled();
            let route = PlacedRouting::new(&mut device, &filled).route;
            launch_route(&mut device, &module, &route, &filled.grid(schedule, overlaps)).unwrap();
            let (expand, placed) = self.place(&mut device, &route);
            let result = launch_expand(&mut device, &module, &expand, schedule, overlaps);
            result.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
            for (of, placed) in placed.into_iter().enumerate() {
                let Some(PlacedRows { tokens: found_tokens, intermediate, .. }) = placed else { continue };
                let numbers = if of == 0 { &tokens } else { shared_tokens.as_ref().unwrap_or(&tokens) };
                let expected = self.expected(of, numbers);
                for (found, expected) in [found_tokens, intermediate].into_iter().zip(expected) {
                    let found: Vec<u16> = device.download(found);
                    let wrong = (0..found.len()).find(|&at| {
                        let is_weighted = of == 0 && self.routing.weights.is_some();
                        found[at] != expected[at] && !(is_weighted && same(operand_type, found[at], expected[at]))
                    });
                    assert_eq!(wrong.map(|at| (at, found[at], expected[at])), None, "{name}, {schedule}, {of}");
                }
            }
        }
    }
}

fn launch_expand(
    device: &mut Device,
    module: &Module,
    expand: &Expand,
    schedule: Schedule,
    overlaps: bool,
) -> Result<(), Fault> {
    let linear = LaunchConfig::linear(expand.blocks() as u32, Expand::THREADS);
    let report =
        device.launch(module, EXPAND_ENTRY, &LaunchConfig { schedule, overlaps, ..linear }, &[Arg::value(*expand)])?;
    no_warning(report)
}

#[test]
fn tokens_of_any_size_are_copied_to_their_rows() {
    for (hidden, width) in [(16, 128), (48, 16), (112, 48), (128, 112), (176, 240), (240, 176), (272, 96), (720, 352)] {
        let routing = Routing::random(21, 3, 4, hidden);
        let name = format!("{hidden} × {width}");
        let expand = |routing, widths| Expansion { routing, widths };
        expand(routing.clone().with_pitch(hidden + 24), [Some(width), None]).check(HOPPER, &name);
        expand(routing.clone(), [None, Some(width)]).check(PORTABLE, &name);
        let weighted = Routing::random(9, 1, 2, hidden).with_weights(OUTPUT_F16).with_shared();
        expand(weighted, [Some(width), Some(hidden)]).check(HOPPER, &name);
    }
    let many = Routing::random(300, 8, 16, 400).with_shared();
    Expansion { routing: many, widths: [Some(48), Some(400)] }.check(HOPPER, "many tokens");
}

#[test]
fn missing_wait_for_lists_in_moe_expand_is_found() {
    let ptx = route_ptx(HOPPER);
    let waits = lines_of(ptx, EXPAND_ENTRY, "griddepcontrol.wait");
    assert_eq!(waits.len(), 1);
    let broken = changed(ptx, &[(waits[0].0, "")]);
    let expansion = Expansion { routing: Routing::random(40, 3, 4, 144), widths: [Some(48), None] };
    let fault = |ptx: &str| {
        let module = Module::parse(ptx).unwrap();
        let mut device = Device::new(DeviceConfig::default());
        let filled = expansion.routing.clone().filled();
        let route = PlacedRouting::new(&mut device, &filled).route;
        launch_route(&mut device, &module, &route, &filled.grid(Schedule::Worst, true)).unwrap();
        let (expand, _) = expansion.place(&mut device, &route);
        launch_expand(&mut device, &module, &expand, Schedule::Worst, true).err()
    };
    assert_eq!(fault(ptx), None);
    assert_eq!(fault(&broken).expect("a fault, as no warp waits").kind, FaultKind::GridNotAwaited);
}

/// Inputs of `moe_combine`.
#[derive(Clone)]
struct Sum {
    tokens: u32,
    top_k: u32,
    hidden: u32,
    pitch: u32,
    operand_type: u32,
    rows: Vec<u16>,
    places: Vec<u32>,
    weights: Option<Vec<f32>>,
    shared_rows: Option<Vec<u16>>,
    shared_weights: Option<Vec<f32>>,
}

impl Sum {
    /// Makes random rows. One choice in four has no row.
    fn random(operand_type: u32, tokens: u32, top_k: u32, hidden: u32) -> Self {
        let mut random = random(u64::from((tokens * top_k) ^ hidden));
        let row_count = (tokens * top_k).max(1);
        let mut numbers = |rows: u32| {
            (0..rows * hidden).map(|_| round(operand_type, random.random_range(-8.0..8.0))).collect::<Vec<_>>()
        };
        let (rows, shared_rows) = (numbers(row_count), Some(numbers(tokens)));
        let places = (0..tokens * top_k)
            .map(|_| if random.random_range(0..4) == 0 { NO_ROW } else { random.random_range(0..row_count) });
        let places = places.collect();
        let mut weights = |count: u32| Some((0..count).map(|_| random.random_range(-1.0..1.0)).collect());
        let (weights, shared_weights) = (weights(tokens * top_k), weights(tokens));
        Self {
            tokens,
            top_k,
            hidden,
            pitch: hidden + 8,
            operand_type,
            rows,
            places,
            weights,
            shared_rows,
            shared_weights,
        }
    }

    fn expected(&self, token: usize, column: usize) -> u16 {
        let (top_k, hidden) = (self.top_k as usize, self.hidden as usize);
        let mut sum = 0.0f32;
        for choice in token * top_k..(token + 1) * top_k {
            if self.places[choice] != NO_ROW {
                let number = decode(self.operand_type, self.rows[self.places[choice] as usize * hidden + column]);
                sum = self.weights.as_ref().map_or(1.0, |weights| weights[choice]).mul_add(number, sum);
            }
        }
        if let Some(rows) = &self.shared_rows {
            let number = decode(self.operand_type, rows[token * hidden + column]);
            sum = self.shared_weights.as_ref().map_or(1.0, |weights| weights[token]).mul_add(number, sum);
        }
        round(self.operand_type, sum)
    }

    /// Uploads the operands and allocates the output.
    fn place(&self, device: &mut Device) -> (Combine, Buffer) {
        let output = poisoned(device, u64::from(self.tokens * self.pitch * 2));
        let combine = Combine {
            rows: device.upload(&self.rows).address,
            places: device.upload(&self.places).address,
            weights: upload(device, self.weights.as_deref()),
            shared_rows: upload(device, self.shared_rows.as_deref()),
            shared_weights: upload(device, self.shared_weights.as_deref()),
            output: output.address,
            output_pitch: u64::from(self.pitch * 2),
            token_count: self.tokens,
            top_k: self.top_k,
            hidden: self.hidden,
            unused: 0,
        };
        (combine, output)
    }

    fn check_output(&self, name: &str, output: &[u16]) {
        for (at, &bits) in output.iter().enumerate() {
            let (token, column) = (at / self.pitch as usize, at % self.pitch as usize);
            if column < self.hidden as usize {
                let expected = self.expected(token, column);
                assert!(
                    same(self.operand_type, bits, expected),
                    "{name}: token {token}, column {column}: found {bits:#x}, expected {expected:#x}"
                );
            } else {
                assert_eq!(bits, u16::from_le_bytes([POISON; 2]), "{name}: a byte after token {token} was written");
            }
        }
    }
}

fn launch_combine(
    device: &mut Device,
    module: &Module,
    operand_type: u32,
    combine: &Combine,
    schedule: Schedule,
) -> Result<(), Fault> {
    let grid = LaunchConfig {
        schedule,
        overlaps: true,
        ..LaunchConfig::linear(Combine::blocks(combine.token_count, combine.hidden) as u32, Combine::THREADS)
    };
    let entry = COMBINE_ENTRIES[usize::from(operand_type == OUTPUT_BF16)];
    device.launch(module, entry, &grid, &[Arg::value(*combine)]).map(drop)
}

fn check_sum(name: &str, sum: &Sum) {
    let module = module(route_ptx(HOPPER));
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let (combine, output) = sum.place(&mut device);
        let result = launch_combine(&mut device, &module, sum.operand_type, &combine, schedule);
        result.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
        sum.check_output(&format!("{name}, {schedule}"), &device.download(output));
    }
}

#[test]
fn sums_follow_the_order_of_choices_and_round_once() {
    for operand_type in [OUTPUT_F16, OUTPUT_BF16] {
        for (tokens, top_k, hidden) in [(1, 1, 16), (1, 8, 2048), (17, 32, 48), (9, 8, 272), (3, 9, 720), (130, 4, 256)]
        {
            let name = format!("{tokens} × {top_k}, {hidden} columns");
            let sum = Sum::random(operand_type, tokens, top_k, hidden);
            check_sum(&name, &sum);
            check_sum(&name, &Sum { shared_weights: None, ..sum.clone() });
            check_sum(&name, &Sum { shared_rows: None, shared_weights: None, weights: None, pitch: hidden, ..sum });
        }
    }
}

#[test]
fn infinities_stay_in_their_token_and_missing_rows_add_nothing() {
    for operand_type in [OUTPUT_F16, OUTPUT_BF16] {
        let mut sum = Sum::random(operand_type, 6, 4, 32);
        sum.places = (0..24).collect();
        sum.rows[5 * 32..6 * 32].fill(round(operand_type, f32::INFINITY));
        sum.rows[6 * 32..7 * 32].fill(round(operand_type, f32::NEG_INFINITY));
        sum.rows[9 * 32..10 * 32].fill(round(operand_type, f32::NAN));
        sum.rows[12 * 32..13 * 32].fill(round(operand_type, 60000.0));
        sum.weights.as_mut().unwrap()[12] = 100.0;
        // A choice without a row has the weight NaN.
        sum.places[16] = NO_ROW;
        sum.weights.as_mut().unwrap()[16] = f32::NAN;
        // The last token has no rows.
        sum.places[20..].fill(NO_ROW);
        check_sum("infinities", &sum);
        check_sum("infinities", &Sum { shared_rows: None, shared_weights: None, ..sum });
    }
}

#[test]
fn combine_can_run_directly_after_the_lists() {
    let module = module(route_ptx(HOPPER));
    let routing = Routing::random(70, 4, 8, 96);
    let expected = routing.expected();
    let places = Lists::new(routing.ids.len() as u64, routing.experts);
    let mut sum = Sum::random(OUTPUT_BF16, 70, 4, 96);
    sum.places = expected.lists[places.places as usize / 4..][..280].to_vec();
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let placed = PlacedRouting::new(&mut device, &routing);
        let (mut combine, output) = sum.place(&mut device);
        combine.places = placed.lists.address + places.places;
        launch_route(&mut device, &module, &placed.route, &routing.grid(schedule, true)).unwrap();
        launch_combine(&mut device, &module, sum.operand_type, &combine, schedule).unwrap();
        sum.check_output(&schedule.to_string(), &device.download(output));
    }
}

/// Matrices of one size, in a checkpoint's layout.
struct Weights {
    matrices: u32,
    rows: u32,
    k: u32,
    values: Vec<u8>,
    scales: Vec<u8>,
}

impl Weights {
    fn random(matrices: u32, rows: u32, k: u32) -> Self {
        let mut random = random(u64::from(rows * k));
        let values = (0..matrices * rows * k / 2).map(|_| random.random()).collect();
        // Half of the scales are zero, subnormal or small.
        let mut scale = || if random.random() { random.random_range(0..10) } else { random.random_range(0..0x7f) };
        Self { matrices, rows, k, values, scales: (0..matrices * rows * k / 16).map(|_| scale()).collect() }
    }

    fn code(&self, matrix: u32, row: u32, column: u32) -> u32 {
        let element = ((matrix * self.rows + row) * self.k + column) as usize;
        u32::from(self.values[element / 2] >> (element % 2 * 4) & 0xf)
    }

    /// Returns the scale of an element.
    fn scale(&self, matrix: u32, row: u32, column: u32) -> u8 {
        self.scales[(((matrix * self.rows + row) * self.k + column) / 16) as usize]
    }

    /// Packs a matrix into units.
    fn units(&self, matrix: u32, operand_type: OperandType, ordered_rows: bool) -> Vec<u8> {
        let &Self { rows, k, .. } = self;
        let mut units = vec![0; matrix_bytes(rows, k) as usize];
        for (position, k_block) in (0..rows).flat_map(|row| (0..k_blocks(k)).map(move |k_block| (row, k_block))) {
            let mut row = position;
            if ordered_rows {
                let of = (0..k_blocks(rows)).rfind(|&k_block| block_start(rows, k_block) <= position).unwrap();
                let start = block_start(rows, of);
                row = start + element_at(block_columns(rows, of), position - start);
            }
            let unit = unit_offset(rows, k, position / UNIT_ROWS, k_block) as usize;
            let (start, columns) = (block_start(k, k_block), block_columns(k, k_block));
            let position = position % UNIT_ROWS;
            for lane in 0..4 {
                for word in 0..lane_words(columns) {
                    let mut codes = 0;
                    for nibble in 0..8 {
                        if let Some(column) = element(columns, lane, word, nibble) {
                            codes |= self.code(matrix, row, start + column) << (4 * nibble);
                        }
                    }
                    let scale = self.scale(matrix, row, start + element(columns, lane, word, 0).unwrap());
                    let codes = if operand_type == OperandType::Bf16 && scale == 0 { 0 } else { codes };
                    let at = unit + (lane_place(columns, position, lane) + 4 * word) as usize;
                    units[at..at + 4].copy_from_slice(&operand_type.pack(codes).to_le_bytes());
                    let at = unit + (scale_place(columns, position, lane) + word / 2) as usize;
                    units[at] = operand_type.pack_scale(scale);
                }
                assert_eq!(lane_words(columns).div_ceil(2), lane_scales(columns));
            }
        }
        units
    }

    /// Packs the matrices on a device. Returns the units of each, and the index of the first invalid scale.
    fn pack(
        &self,
        operand_type: OperandType,
        ordered_rows: bool,
        schedule: Schedule,
    ) -> Result<(Vec<Vec<u8>>, u64), Fault> {
        let &Self { matrices, rows, k, .. } = self;
        let (mut device, module) = (
            Device::new(DeviceConfig::default()),
            module(nvfp4::kernels::ptx("moe_pack").expect("a kernel of this name")),
        );
        // Puts a gap after each matrix.
        let apart = |bytes: &[u8], gap: usize| {
            let of_one = bytes.len() / matrices as usize;
            bytes.chunks(of_one).flat_map(|one| [one, &vec![POISON; gap]].concat()).collect::<Vec<_>>()
        };
        let unit_bytes = matrix_bytes(rows, k);
        let units = poisoned(&mut device, u64::from(matrices) * (unit_bytes + 16));
        let invalid = device.upload(&[u64::MAX]);
        let value_bytes = u64::from(rows * k / 2);
        let pack = Pack {
            values: device.upload(&apart(&self.values, (16 - value_bytes % 16) as usize)).address,
            values_stride: value_bytes + 16 - value_bytes % 16,
            // Scales need no alignment.
            scales: device.upload(&[&[POISON][..], &apart(&self.scales, 3)].concat()).address + 1,
            scales_stride: u64::from(rows * k / 16) + 3,
            units: units.address,
            units_stride: unit_bytes + 16,
            invalid: invalid.address,
            matrices,
            rows,
            k,
            ordered_rows: ordered_rows.into(),
            operand_type: operand_type as u32,
            unused: 0,
        };
        let blocks = Pack::blocks(matrices, rows, k) as u32;
        let grid = LaunchConfig { schedule, ..LaunchConfig::linear(blocks, Pack::THREADS) };
        device.launch(&module, moe_pack::ENTRY, &grid, &[Arg::value(pack)])?;
        let units = device.download::<u8>(units);
        let units = units.chunks((unit_bytes + 16) as usize).map(|units| {
            let (units, gap) = units.split_at(unit_bytes as usize);
            assert!(gap.iter().all(|&byte| byte == POISON), "a byte after a matrix was written");
            units.to_vec()
        });
        Ok((units.collect(), device.download::<u64>(invalid)[0]))
    }
}

#[test]
fn packed_weights_match_the_reference() {
    let ragged = [16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 352];
    let sizes = ragged.iter().flat_map(|&k| [(16, k), (144, k)]).chain(ragged.iter().map(|&rows| (rows, 144)));
    for (rows, k) in sizes.chain([(272, 720), (720, 272)]) {
        let weights = Weights::random(2, rows, k);
        for operand_type in [OperandType::F16, OperandType::Bf16, OperandType::E4m3] {
            for ordered_rows in [false, true] {
                let (units, invalid) = weights.pack(operand_type, ordered_rows, Schedule::Fair).unwrap();
                assert_eq!(invalid, u64::MAX);
                for (matrix, units) in units.iter().enumerate() {
                    let expected = weights.units(matrix as u32, operand_type, ordered_rows);
                    let wrong = (0..expected.len()).find(|&at| units[at] != expected[at]);
                    assert_eq!(wrong, None, "{rows} × {k}, {operand_type:?}, {ordered_rows}");
                }
            }
        }
    }
}

#[test]
fn first_invalid_scale_is_found_on_every_schedule() {
    for (k, ordered_rows) in [(128, false), (176, true), (48, true)] {
        let mut weights = Weights::random(3, 160, k);
        let places = [weights.scales.len() - 1, weights.scales.len() / 2 + 1, weights.scales.len() / 2 + 8];
        for (place, scale) in places.into_iter().zip([0x7f, 0x80, 0xff]) {
            weights.scales[place] = scale;
        }
        for schedule in SCHEDULES {
            let (_, invalid) = weights.pack(OperandType::Bf16, ordered_rows, schedule).unwrap();
            assert_eq!(invalid, places[1] as u64, "{k}, {schedule}");
        }
    }
}

/// Returns the fault that stops two consecutive layers when a line of the kernel is changed.
fn fault(line: usize, changed: &str, routing: &Routing, schedule: Schedule) -> Option<Fault> {
    let mut lines: Vec<_> = route_ptx(HOPPER).lines().collect();
    lines[line] = changed;
    let module = Module::parse(&lines.join("\n")).unwrap();
    let mut device = Device::new(DeviceConfig::default());
    let placed = PlacedRouting::new(&mut device, routing);
    let (mut combine, _) = Sum::random(OUTPUT_BF16, routing.tokens(), routing.top_k, routing.hidden).place(&mut device);
    combine.places = placed.route.lists + Lists::new(routing.ids.len() as u64, routing.experts).places;
    // The output of the first layer is the input of the second.
    let next = Route { input: combine.output, input_pitch: combine.output_pitch, ..placed.route };
    [placed.route, next].iter().find_map(|route| {
        let routed = launch_route(&mut device, &module, route, &routing.grid(schedule, true));
        routed.and_then(|()| launch_combine(&mut device, &module, OUTPUT_BF16, &combine, schedule)).err()
    })
}

#[test]
fn removing_any_barrier_or_wait_is_found() {
    /// Entry, instruction, number of occurrences, number that can be removed unnoticed. Two `bar.warp.sync` are spare,
    /// because votes also keep the lanes together: one between a warp's first counts and its rounds, one between pairs
    /// of rounds.
    const SABOTAGES: [(&str, &str, usize, usize); 6] = [
        ("moe_route", "bar.sync", 4, 0),
        ("moe_route", "bar.warp.sync", 5, 2),
        ("moe_route", "barrier.cluster.arrive", 1, 0),
        ("moe_route", "barrier.cluster.wait", 1, 0),
        ("moe_route", "griddepcontrol.wait", 2, 0),
        ("moe_combine_bf16", "griddepcontrol.wait", 1, 0),
    ];
    let routing = Routing::random(1031, 4, 40, 48);
    assert_eq!(fault(0, "", &routing, Schedule::Fair), None, "the first line is a comment");
    for (entry, instruction, count, spare) in SABOTAGES {
        let lines = route_ptx(HOPPER).lines().enumerate();
        let lines = lines.skip_while(|(_, line)| !line.contains(&format!(".entry {entry}(")));
        let lines = lines.take_while(|(_, line)| !line.contains("// -- End function"));
        let lines: Vec<_> = lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect();
        assert_eq!(lines.len(), count, "{instruction}");
        let mut unnoticed = Vec::new();
        for (line, text) in lines {
            match SCHEDULES.iter().find_map(|&schedule| fault(line, "", &routing, schedule)) {
                Some(fault) if instruction.starts_with("griddepcontrol") => {
                    assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
                }
                Some(_) => {}
                None => unnoticed.push(text),
            }
        }
        assert!(unnoticed.len() <= spare, "removing these went unnoticed: {unnoticed:?}");
    }
}
