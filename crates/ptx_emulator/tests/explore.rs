//! Exploration of all orders of a launch: numbers of orders of small programs, bugs that need a rare order, and the
//! reduction against a search without it.

use std::fmt::Write;
use std::path::Path;

use ptx_emulator::program::Program;
use ptx_emulator::{
    Arg, Bounds, Device, DeviceConfig, End, Exploration, Fault, FaultKind, LaunchConfig, Module, Order, Report,
};

/// Words of global memory that the warps share, then four words for the results of each warp.
const SHARED_WORDS: usize = 4;

/// A kernel in which thread 0 of each warp runs its own instructions. They may use `%x` (address of the shared words),
/// `%s` (address of 64 bytes of shared memory), and the registers `%r0` to `%r3`, which are stored at the end.
fn kernel(before: &str, warps: &[String]) -> String {
    let mut text = String::from(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 words)\n{\n\
         .shared .align 16 .b8 shared[64];\n.reg .pred %p<8>;\n.reg .b32 %r<8>;\n.reg .b32 %warp;\n.reg .b32 %s;\n\
         .reg .b32 %lane;\n.reg .b64 %x;\n.reg .b64 %out;\n.reg .b64 %d<4>;\n\
         ld.param.u64 %x, [words];\nmov.u32 %s, shared;\nmov.u32 %lane, %tid.x;\nshr.u32 %warp, %lane, 5;\n\
         and.b32 %lane, %lane, 31;\nmul.wide.u32 %out, %warp, 16;\nadd.u64 %out, %out, %x;\n\
         mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\nmov.u32 %r3, 0;\nsetp.ne.u32 %p0, %lane, 0;\n",
    );
    text += before;
    text += "@%p0 ret;\n";
    for n in 0..warps.len() {
        writeln!(text, "setp.eq.u32 %p1, %warp, {n};\n@%p1 bra W{n};").unwrap();
    }
    for (n, warp) in warps.iter().enumerate() {
        writeln!(text, "W{n}:\n{warp}bra.uni END;").unwrap();
    }
    text + "END:\nst.global.v4.u32 [%out+16], {%r0, %r1, %r2, %r3};\nret;\n}\n"
}

struct Launch {
    device: Device,
    module: Module,
    config: LaunchConfig,
    args: Vec<Arg>,
    words: ptx_emulator::Buffer,
}

impl Launch {
    fn new(text: &str, warps: usize) -> Launch {
        let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let mut device = Device::new(DeviceConfig::default());
        let words = device.upload(&vec![0u32; SHARED_WORDS * (1 + warps)]);
        let config = LaunchConfig::linear(1, 32 * warps as u32);
        Launch { device, module, config, args: vec![words.into()], words }
    }

    fn explore(&mut self, bounds: &Bounds) -> Exploration {
        self.device.explore(&self.module, "k", &self.config, &self.args, bounds).unwrap()
    }

    fn replay(&mut self, order: &Order) -> Result<Report, Fault> {
        self.device.replay(&self.module, "k", &self.config, &self.args, order)
    }
}

fn explored(warps: &[&str]) -> Exploration {
    let warps: Vec<String> = warps.iter().map(|warp| (*warp).to_owned()).collect();
    Launch::new(&kernel("", &warps), warps.len()).explore(&Bounds::default())
}

const ADD: &str = "atom.relaxed.gpu.global.add.u32 %r0, [%x], 1;\n";

#[track_caller]
fn assert_whole(found: &Exploration, orders: u64, results: usize) {
    assert!(found.failures.is_empty(), "{found}");
    assert_eq!((found.end, found.orders, found.results), (End::Whole, orders, results), "{found}");
}

#[test]
fn independent_warps_have_one_order() {
    let own = |n: usize| format!("st.relaxed.gpu.global.u32 [%x+{}], 1;\n", 4 * n);
    let warps: Vec<String> = (0..4).map(own).collect();
    assert_whole(&explored(&warps.iter().map(String::as_str).collect::<Vec<_>>()), 1, 1);
}

#[test]
fn atomics_at_one_address_have_every_order() {
    assert_whole(&explored(&[ADD, ADD]), 2, 2);
    assert_whole(&explored(&[ADD, ADD, ADD]), 6, 6);
    assert_whole(&explored(&[&ADD.repeat(2), &ADD.repeat(2)]), 6, 4);
}

/// Store buffering: with memory in sequential order, three of the four results exist.
#[test]
fn store_buffering_has_three_orders() {
    let warp = |to: u32, from: u32| {
        format!("st.relaxed.gpu.global.u32 [%x+{to}], 1;\nld.relaxed.gpu.global.u32 %r0, [%x+{from}];\n")
    };
    assert_whole(&explored(&[&warp(0, 4), &warp(4, 0)]), 3, 3);
}

/// Readers of one word do not depend on each other: each sees the old or the new value.
#[test]
fn two_readers_of_a_written_word_have_four_orders() {
    let read = "ld.relaxed.gpu.global.u32 %r0, [%x];\n";
    assert_whole(&explored(&["st.relaxed.gpu.global.u32 [%x], 1;\n", read, read]), 4, 4);
}

/// A barrier of three warps has one order, in whatever order they arrive.
#[test]
fn arrivals_at_a_barrier_have_one_order() {
    let warps = vec![String::new(); 3];
    let found = Launch::new(&kernel(&"bar.sync 0;\n".repeat(3), &warps), 3).explore(&Bounds::default());
    assert_whole(&found, 1, 1);
}

/// A loop that waits for a flag ends its turn instead of repeating itself.
#[test]
fn a_spinning_warp_sleeps_until_the_flag_changes() {
    let spin = "L: ld.acquire.gpu.global.u32 %r0, [%x];\nsetp.eq.u32 %p2, %r0, 0;\n@%p2 bra L;\n";
    let found = explored(&[spin, "st.release.gpu.global.u32 [%x], 7;\n"]);
    assert!(found.end == End::Whole && found.failures.is_empty() && found.results == 1, "{found}");
    assert!(found.orders <= 3, "{found}");
}

/// Two locks taken in both orders: a deadlock in some orders only.
#[test]
fn a_rare_deadlock_is_found_shrunk_and_replayed() {
    let lock = |label: &str, at: u32| {
        format!(
            "{label}: atom.acquire.gpu.global.cas.b32 %r4, [%x+{at}], 0, 1;\nsetp.ne.u32 %p2, %r4, 0;\n\
             @%p2 bra {label};\n"
        )
    };
    let unlock = |at: u32| format!("st.release.gpu.global.u32 [%x+{at}], 0;\n");
    let warp = |n: u32, first: u32, second: u32| {
        let locks = [lock(&format!("A{n}"), first), lock(&format!("B{n}"), second)].concat();
        locks + &unlock(second) + &unlock(first)
    };
    let opposite = || Launch::new(&kernel("", &[warp(0, 0, 4), warp(1, 4, 0)]), 2);
    let mut launch = opposite();
    let found = launch.explore(&Bounds::default());
    let [failure] = &found.failures[..] else { panic!("{found}") };
    assert_eq!((found.end, failure.fault.kind, failure.preemptions), (End::Fault, FaultKind::NoProgress, 1));
    let order: Order = failure.order.to_string().parse().unwrap();
    assert_eq!(launch.replay(&order).unwrap_err(), failure.fault);
    // Without a preemption there is no deadlock, and the search says that it was bounded.
    let bounds = Bounds { preemptions: Some(0), ..Bounds::default() };
    let found = opposite().explore(&bounds);
    assert!(found.end == End::Preemptions && found.failures.is_empty(), "{found}");
    let bounds = Bounds { preemptions: Some(1), ..Bounds::default() };
    assert_eq!(opposite().explore(&bounds).end, End::Fault);
    // Locks taken in one order have no deadlock.
    let mut mended = Launch::new(&kernel("", &[warp(0, 0, 4), warp(1, 0, 4)]), 2);
    let found = mended.explore(&Bounds::default());
    assert!(found.end == End::Whole && found.failures.is_empty(), "{found}");
}

#[test]
fn an_order_of_another_launch_is_refused() {
    let mut launch = Launch::new(&kernel("", &[ADD.to_owned()]), 1);
    let fault = launch.replay(&"order:c0w3".parse().unwrap()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::BadLaunch);
    assert!(fault.message.contains("c0w3"), "{fault}");
    launch.config.sanitize = false;
    assert!(launch.replay(&Order::default()).unwrap_err().message.contains("level"));
}

#[test]
fn bounds_end_a_search() {
    let warps = vec![ADD.repeat(3); 3];
    let mut launch = Launch::new(&kernel("", &warps), 3);
    let found = launch.explore(&Bounds { orders: 10, ..Bounds::default() });
    assert!(found.end == End::Orders && (1..=10).contains(&found.orders), "{found}");
    let found = launch.explore(&Bounds { time: std::time::Duration::ZERO, ..Bounds::default() });
    assert_eq!((found.end, found.orders), (End::Time, 1), "{found}");
    // 9! / 3!^3 orders of nine atomic instructions. A warp stores what its third one read, so the result is the places
    // of the three third ones. One of them is the ninth. The middle one follows five others at least, and the first one
    // two: (6; 3 to 5), (7; 3 to 6) or (8; 3 to 7). That makes 12 pairs, times 3! ways to name the warps.
    assert_whole(&launch.explore(&Bounds::default()), 1680, 72);
    // Each of the three searches leaves memory as its first order leaves it, and begins with what it finds.
    assert_eq!(launch.device.download::<u32>(launch.words)[0], 3 * 9);
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 16) as usize % n
    }
}

/// A random instruction of a warp, with the number of steps that it takes.
fn instruction(random: &mut Random, label: &str) -> String {
    let (at, register) = (4 * random.below(2), random.below(3));
    match random.below(16) {
        0 | 1 => format!("st.relaxed.gpu.global.u32 [%x+{at}], {};\n", 1 + random.below(2)),
        2 | 3 => format!("ld.relaxed.gpu.global.u32 %r{register}, [%x+{at}];\n"),
        4 => format!("atom.relaxed.gpu.global.add.u32 %r{register}, [%x+{at}], 1;\n"),
        5 => format!("atom.acq_rel.gpu.global.exch.b32 %r{register}, [%x+{at}], 5;\n"),
        6 => format!("st.release.gpu.global.u32 [%x+{at}], 3;\nld.acquire.gpu.global.u32 %r{register}, [%x+4];\n"),
        7 => format!("st.shared.u32 [%s+{at}], {};\n", 1 + random.below(2)),
        8 => format!("ld.shared.u32 %r{register}, [%s+{at}];\n"),
        9 => "mbarrier.arrive.shared.b64 _, [%s+16];\n".to_owned(),
        10 => format!(
            "mbarrier.test_wait.parity.shared.b64 %p3, [%s+16], {};\nselp.u32 %r{register}, 1, 2, %p3;\n",
            random.below(2)
        ),
        11 => format!(
            "{label}: mbarrier.try_wait.parity.shared.b64 %p3, [%s+16], {};\n@!%p3 bra {label};\n",
            random.below(2)
        ),
        12 => {
            let read = if random.below(2) == 0 { "ld.shared.u32 %r3, [%s+48];\n" } else { "" };
            format!(
                "mbarrier.arrive.expect_tx.shared.b64 _, [%s+16], 16;\n\
                 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s+48], [%x], 16, [%s+16];\n{read}"
            )
        }
        13 => {
            let wait = ["", "cp.async.bulk.wait_group 0;\n", "cp.async.bulk.wait_group.read 0;\n"][random.below(3)];
            format!(
                "cp.async.bulk.global.shared::cta.bulk_group [%x], [%s+32], 16;\ncp.async.bulk.commit_group;\n{wait}"
            )
        }
        _ => format!(
            "cp.async.ca.shared.global [%s+{}], [%x+8], 4;\n{}",
            32 + at,
            if random.below(2) == 0 { "cp.async.wait_all;\nld.shared.u32 %r3, [%s+32];\n" } else { "" }
        ),
    }
}

/// A random program: its text and its number of warps.
fn program(random: &mut Random) -> (String, usize) {
    let warps = 2 + usize::from(random.below(3) == 0);
    let most = if warps == 2 { 3 } else { 2 };
    let body = |random: &mut Random, warp: usize| {
        (0..1 + random.below(most)).map(|n| instruction(random, &format!("L{warp}_{n}"))).collect::<String>()
    };
    let bodies: Vec<String> = (0..warps).map(|warp| body(random, warp)).collect();
    let arrivals = 1 + random.below(2);
    let before = format!(
        "setp.ne.u32 %p4, %warp, 0;\nor.pred %p5, %p0, %p4;\n@%p5 bra READY;\n\
                  mbarrier.init.shared.b64 [%s+16], {arrivals};\nst.shared.v2.u32 [%s], {{0, 0}};\n\
                  st.shared.v4.u32 [%s+32], {{1, 2, 3, 4}};\nfence.proxy.async;\nREADY: bar.sync 0;\n"
    );
    (kernel(&before, &bodies), warps)
}

/// Kinds and instructions of all faults, in a fixed order. An instruction with several races stops at the first one in the
/// race detector's list, which is in the order of the earlier accesses, also of those that do not depend on each other. So
/// the kinds of races count as one.
fn faults(found: &Exploration) -> Vec<String> {
    let kind = |fault: &Fault| match fault.kind {
        FaultKind::MissingProxyFence => FaultKind::DataRace,
        kind => kind,
    };
    let line = |fault: &Fault| fault.place.as_ref().map(|place| place.line);
    let mut faults: Vec<String> =
        found.failures.iter().map(|f| format!("{} {:?}", kind(&f.fault), line(&f.fault))).collect();
    faults.sort();
    faults.dedup();
    faults
}

/// With the reduction, random programs have the same results and the same faults as in all orders.
#[test]
fn the_reduction_loses_nothing() {
    let mut random = Random(1);
    let (mut compared, mut reduced, mut all) = (0, 0, 0);
    while compared < 100 {
        let (text, warps) = program(&mut random);
        let bounds = Bounds { every_fault: true, orders: 3000, ..Bounds::default() };
        let whole = Launch::new(&text, warps).explore(&Bounds { reduction: false, ..bounds });
        if whole.end != End::Whole {
            continue;
        }
        let found = Launch::new(&text, warps).explore(&bounds);
        assert_eq!(found.end, End::Whole, "{text}\n{found}");
        assert_eq!((found.results, faults(&found)), (whole.results, faults(&whole)), "{text}\n{found}\n{whole}");
        assert!(found.orders <= whole.orders, "{text}\n{found}\n{whole}");
        compared += 1;
        reduced += found.orders + found.repeated;
        all += whole.orders;
    }
    println!("{compared} programs: {reduced} orders with the reduction, {all} without");
    assert!(reduced * 5 < all, "{reduced} of {all} orders");
}

fn read(name: &str) -> Program {
    Program::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)).unwrap()
}

fn explore_program(name: &str) -> Exploration {
    let mut prepared = read(name).prepare().unwrap();
    prepared.explore(&Bounds::default()).unwrap().unwrap()
}

/// A bug that no schedule of `tests/reported.rs` shows.
#[test]
fn a_counter_reset_under_its_pollers_is_found() {
    let found = explore_program("reported/flashinfer_3610_bug.json");
    let [failure] = &found.failures[..] else { panic!("{found}") };
    assert_eq!(failure.fault.kind, FaultKind::NoProgress, "{found}");
    let mut prepared = read("reported/flashinfer_3610_bug.json").prepare().unwrap();
    assert_eq!(prepared.replay(&failure.order).unwrap_err(), failure.fault);
    let mended = explore_program("reported/flashinfer_3610.ptx");
    assert!(mended.end == End::Whole && mended.failures.is_empty() && mended.results == 1, "{mended}");
}
