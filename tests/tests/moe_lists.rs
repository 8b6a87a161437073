//! What an MoE layer does before and after its products, in the emulator: lists of each expert's rows, tokens in the order of K,
//! sums of rows (`moe_route`), and weights packed on the device (`moe_pack`). Every element is compared with a plain reference, on
//! several schedules, with the sanitizer; broken PTX makes faults.

use bytemuck::NoUninit;
use half::{bf16, f16};
use kernels_gpu::format::{OUTPUT_BF16, OUTPUT_F16};
use kernels_gpu::moe_route::abi::{Lists, NO_ROW, ROUTE_ENTRY, Route};
use kernels_gpu::units::{block_columns, block_start, element_at, k_blocks};
use ptx_emulator::{Arg, Buffer, Device, DeviceConfig, Fault, LaunchConfig, Module, Schedule};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const SCHEDULES: [Schedule; 4] = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];

/// What outputs hold before a launch.
const POISON: u8 = 0xa5;

/// A kernel's PTX.
fn ptx(kernel: &str) -> &'static str {
    nvfp4::kernels::ptx(kernel).expect("a kernel of this name")
}

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

/// Rounds to a token's type, to nearest even.
fn round(token_type: u32, number: f32) -> u16 {
    if token_type == OUTPUT_BF16 { bf16::from_f32(number).to_bits() } else { f16::from_f32(number).to_bits() }
}

fn decode(token_type: u32, bits: u16) -> f32 {
    if token_type == OUTPUT_BF16 { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
}

/// Whether these are the same number, or both NaN.
fn same(token_type: u32, a: u16, b: u16) -> bool {
    a == b || decode(token_type, a).is_nan() && decode(token_type, b).is_nan()
}

/// Inputs of `moe_route`.
#[derive(Clone)]
struct Routing {
    ids: Vec<i32>,
    top_k: u32,
    experts: u32,
    map: Option<Vec<i32>>,
    /// Elements of a token, and from a token to the next one.
    hidden: u32,
    pitch: u32,
    x: Vec<u16>,
    weights: Option<Vec<f32>>,
    token_type: u32,
    tile_tokens: u32,
    has_shared: bool,
}

/// What `moe_route` writes.
#[derive(Debug, PartialEq, Eq)]
struct Routed {
    lists: Vec<u32>,
    shared_lists: Option<Vec<u32>>,
    tokens: Vec<u16>,
}

impl Routing {
    /// Of these ids, with tokens of bits at random.
    fn new(ids: Vec<i32>, top_k: u32, experts: u32, hidden: u32) -> Self {
        let tokens = ids.len() as u32 / top_k;
        let mut random = random(u64::from(hidden));
        let x = (0..tokens * hidden).map(|_| random.random()).collect();
        let (token_type, tile_tokens) = (OUTPUT_BF16, 64);
        Self { ids, top_k, experts, map: None, hidden, pitch: hidden, x, weights: None, token_type, tile_tokens, has_shared: false }
    }

    /// Of ids at random, some of which name no expert.
    fn random(tokens: u32, top_k: u32, experts: u32, hidden: u32) -> Self {
        let mut random = random(u64::from(tokens ^ experts << 16));
        let ids = (0..tokens * top_k).map(|_| random.random_range(-2..experts as i32 + 2)).collect();
        Self::new(ids, top_k, experts, hidden)
    }

    fn with_pitch(mut self, pitch: u32) -> Self {
        let mut random = random(7);
        self.x = (0..self.tokens() * pitch).map(|_| random.random()).collect();
        Self { pitch, ..self }
    }

    fn with_weights(mut self, token_type: u32) -> Self {
        let mut random = random(8);
        self.weights = Some((0..self.tokens()).map(|_| random.random_range(-2.0..2.0)).collect());
        Self { token_type, ..self }
    }

    fn with_shared(self) -> Self {
        Self { has_shared: true, ..self }
    }

    fn with_map(self, map: Vec<i32>) -> Self {
        Self { map: Some(map), ..self }
    }

    fn tokens(&self) -> u32 {
        self.ids.len() as u32 / self.top_k
    }

    /// The expert of a choice, if it is the layer's own.
    fn expert(&self, choice: usize) -> Option<usize> {
        let id = usize::try_from(self.ids[choice]).ok()?;
        let expert = match &self.map {
            Some(map) => usize::try_from(*map.get(id)?).ok()?,
            None => id,
        };
        (expert < self.experts as usize).then_some(expert)
    }

    /// What lists are of choices of one of so many experts each.
    fn lists(&self, experts: u32, top_k: u32, tile_tokens: u32, expert: impl Fn(usize) -> Option<usize>) -> Vec<u32> {
        let choices = (self.tokens() * top_k) as usize;
        let places = Lists::new(choices as u64, experts);
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
            tile += (row - lists[firsts + of]).div_ceil(tile_tokens);
        }
        (lists[firsts + experts as usize], lists[tiles + experts as usize]) = (row, tile);
        lists
    }

    /// What must come out.
    fn expected(&self) -> Routed {
        let &Self { hidden, pitch, token_type, .. } = self;
        let mut tokens = Vec::new();
        for token in 0..self.tokens() as usize {
            for k_block in 0..k_blocks(hidden) {
                let columns = block_columns(hidden, k_block);
                for position in 0..columns {
                    let column = block_start(hidden, k_block) + element_at(columns, position);
                    let bits = self.x[token * pitch as usize + column as usize];
                    tokens.push(match &self.weights {
                        Some(weights) => round(token_type, decode(token_type, bits) * weights[token]),
                        None => bits,
                    });
                }
            }
        }
        Routed {
            lists: self.lists(self.experts, self.top_k, self.tile_tokens, |choice| self.expert(choice)),
            shared_lists: self.has_shared.then(|| self.lists(1, 1, 2 * self.tile_tokens, |_| Some(0))),
            tokens,
        }
    }

    fn grid(&self, schedule: Schedule) -> LaunchConfig {
        let choices = self.ids.len() as u64;
        LaunchConfig {
            cluster: [Route::cluster(choices), 1, 1],
            shared_bytes: Route::shared_bytes(self.experts, choices),
            schedule,
            overlaps: true,
            ..LaunchConfig::linear(Route::blocks(self.tokens(), self.top_k, self.hidden) as u32, Route::THREADS)
        }
    }
}

/// A routing's operands on a device.
struct PlacedRouting {
    route: Route,
    lists: Buffer,
    shared_lists: Option<Buffer>,
    tokens: Buffer,
}

impl PlacedRouting {
    /// The lists may have room for more.
    fn new(device: &mut Device, of: &Routing) -> Self {
        let tokens = of.tokens();
        let lists = poisoned(device, Lists::new(of.ids.len() as u64, of.experts).bytes);
        let shared_lists = of.has_shared.then(|| poisoned(device, Lists::new(u64::from(tokens), 1).bytes));
        let ordered = poisoned(device, u64::from(tokens * of.hidden * 2));
        // Ids need not lie at a multiple of more than 4.
        let ids = device.upload(&[&[0], &of.ids[..]].concat());
        let route = Route {
            ids: ids.address + 4,
            map: upload(device, of.map.as_deref()),
            input: device.upload(&of.x).address,
            input_pitch: u64::from(of.pitch * 2),
            input_weights: upload(device, of.weights.as_deref()),
            tokens: ordered.address,
            lists: lists.address,
            shared_lists: shared_lists.map_or(0, |lists| lists.address),
            token_count: tokens,
            top_k: of.top_k,
            experts: of.experts,
            named_experts: of.map.as_ref().map_or(of.experts, |map| map.len() as u32),
            hidden: of.hidden,
            tile_tokens: of.tile_tokens,
            shared_tile_tokens: 2 * of.tile_tokens,
            token_type: of.token_type,
        };
        Self { route, lists, shared_lists, tokens: ordered }
    }

    fn launch(&self, device: &mut Device, module: &Module, grid: &LaunchConfig) -> Result<(), Fault> {
        device.launch(module, ROUTE_ENTRY, grid, &[Arg::value(self.route)]).map(|report| {
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        })
    }

    fn read(&self, device: &Device) -> Routed {
        Routed {
            lists: device.download(self.lists),
            shared_lists: self.shared_lists.map(|lists| device.download(lists)),
            tokens: device.download(self.tokens),
        }
    }
}

/// Runs a routing on every schedule.
fn check_routing(name: &str, routing: &Routing) {
    let module = module(ptx("moe_route"));
    let expected = routing.expected();
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let placed = PlacedRouting::new(&mut device, routing);
        let result = placed.launch(&mut device, &module, &routing.grid(schedule));
        result.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
        let Routed { lists, shared_lists, tokens } = placed.read(&device);
        let places = Lists::new(routing.ids.len() as u64, routing.experts);
        let wrong = (0..lists.len()).find(|&at| lists[at] != expected.lists[at]);
        assert_eq!(wrong.map(|at| (4 * at, lists[at], expected.lists[at])), None, "{name}, {schedule}, {places:?}");
        assert_eq!(shared_lists, expected.shared_lists, "{name}, {schedule}");
        let wrong = (0..tokens.len()).find(|&at| {
            let is_same = if routing.weights.is_some() { same(routing.token_type, tokens[at], expected.tokens[at]) } else { tokens[at] == expected.tokens[at] };
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
fn lists_of_a_cluster_are_right_with_one_group_and_with_several() {
    // A warp of the cluster has 16 · 32 choices at a time.
    for (tokens, top_k, experts) in [(129, 32, 5), (1031, 4, 512), (8200, 8, 128), (4200, 32, 3)] {
        check_routing(&format!("{tokens} × {top_k} of {experts}"), &Routing::random(tokens, top_k, experts, 16));
    }
}

#[test]
fn no_token_makes_empty_lists() {
    for routing in [Routing::new(vec![], 8, 128, 64), Routing::new(vec![], 1, 1, 16).with_shared()] {
        check_routing("no token", &routing);
    }
}

#[test]
fn all_tokens_to_one_expert_none_to_any_and_an_id_twice() {
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
fn a_map_says_which_experts_are_the_layers_own() {
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
fn tokens_come_in_the_order_of_k_whatever_their_size_pitch_and_weights() {
    for hidden in [16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 256, 272, 352, 720, 1408] {
        let routing = Routing::random(5, 2, 4, hidden);
        check_routing(&format!("{hidden} columns"), &routing);
        check_routing(&format!("{hidden} columns with a pitch"), &routing.clone().with_pitch(hidden + 24));
        for token_type in [OUTPUT_F16, OUTPUT_BF16] {
            let weighted = routing.clone().with_pitch(hidden + 8).with_weights(token_type).with_shared();
            check_routing(&format!("{hidden} columns with weights"), &weighted);
        }
    }
    check_routing("many tokens", &Routing::random(700, 8, 16, 400).with_shared());
}

#[test]
fn a_layer_may_follow_another_in_the_same_memory() {
    let module = module(ptx("moe_route"));
    let routing = Routing::random(200, 8, 32, 96).with_shared();
    let mut other = Routing::random(200, 8, 32, 96).with_shared();
    other.ids.reverse();
    for schedule in SCHEDULES {
        let mut device = Device::new(DeviceConfig::default());
        let placed = PlacedRouting::new(&mut device, &routing);
        placed.launch(&mut device, &module, &routing.grid(schedule)).unwrap();
        let mut next = PlacedRouting::new(&mut device, &other);
        let Route { tokens, lists, shared_lists, .. } = placed.route;
        next.route = Route { tokens, lists, shared_lists, ..next.route };
        next.launch(&mut device, &module, &other.grid(schedule)).unwrap();
        assert_eq!(placed.read(&device), other.expected(), "{schedule}");
    }
}
