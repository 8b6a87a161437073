//! Small sabotages of a correct asynchronous kernel. Each must cause a fault or a wrong result on some schedule.

use ptx_emulator::{
    Arg, Bounds, Buffer, DataType, Device, DeviceConfig, End, Fault, Interleave, L2Promotion, LaunchConfig, Level,
    Module, OobFill, Report, Schedule, Swizzle, TensorMap,
};

const KERNEL: &str = include_str!("mutations/pipelined_gemm.ptx");
const M: usize = 128;
const N: usize = 16;
const K: usize = 256;

/// Description of each sabotage, the text to replace, and its replacement.
const SABOTAGES: [(&str, &str, &str); 35] = [
    ("producer does not wait for an empty stage", "    @!%p5 bra EMPTY_WAIT;\n", ""),
    ("MMA does not wait for a full stage", "    @!%p5 bra FULL_WAIT;\n", ""),
    ("epilogue does not wait for the MMAs", "    @!%p9 bra EPILOGUE;\n", ""),
    (
        "fence after the wait for the MMAs dropped",
        "    tcgen05.fence::after_thread_sync;\n    shl.b32 %r28",
        "    shl.b32 %r28",
    ),
    ("tcgen05.wait::ld dropped", "    tcgen05.wait::ld.sync.aligned;\n", ""),
    ("proxy fence dropped before the TMA store", "    fence.proxy.async.shared::cta;\n", ""),
    ("expect_tx dropped", ".arrive.expect_tx.shared::cta.b64 _, [%r18], 18432", ".arrive.shared::cta.b64 _, [%r18]"),
    ("too few bytes expected", "18432", "16384"),
    ("too many bytes expected", "18432", "18448"),
    (
        "commit to the empty barrier dropped",
        "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r19];\n",
        "",
    ),
    ("last commit dropped", "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];\n", ""),
    ("producer waits for the wrong phase", "    xor.b32 %r16, %r15, 1;", "    mov.u32 %r16, %r15;"),
    ("producer's phase never flips", "    xor.b32 %r16, %r15, 1;", "    mov.u32 %r16, 1;"),
    ("MMA's phase never flips", "[%r18], %r15;\n    @!%p5 bra FULL_WAIT", "[%r18], 0;\n    @!%p5 bra FULL_WAIT"),
    ("MMA waits for the wrong phase", "[%r18], %r15;\n    @!%p5 bra FULL_WAIT", "[%r18], 1;\n    @!%p5 bra FULL_WAIT"),
    ("epilogue waits for the wrong phase", "[%r5], 0;", "[%r5], 1;"),
    ("mbarrier init fence dropped", "    fence.mbarrier_init.release.cluster;\n", ""),
    ("barrier after the setup dropped", "    bar.sync 0;\n    tcgen05.fence::after", "    tcgen05.fence::after"),
    ("barrier before the TMA store dropped", "    bar.sync 1, 128;\n", ""),
    ("TMA store not awaited", "    cp.async.bulk.wait_group.read 0;\n", ""),
    ("TMA store not committed", "    cp.async.bulk.commit_group;\n", ""),
    ("descriptors with the 64-byte swizzle", "4611756662049472512", "9223442680476860416"),
    ("descriptors with half the stride", "4611756662049472512", "4611756524610519040"),
    ("K step of 64 bytes", "    add.u64 %d5, %d5, 2;", "    add.u64 %d5, %d5, 4;"),
    ("B never advances along K", "    add.u64 %d6, %d6, 2;\n", ""),
    (
        "A of the other stage",
        "    shl.b32 %r20, %r14, 14;\n    add.u32 %r21, %r7, %r20;\n    shr",
        "    mov.u32 %r20, 0;\n    add.u32 %r21, %r7, %r20;\n    shr",
    ),
    ("loads step by half a stage along K", "    shl.b32 %r24, %r12, 6;", "    shl.b32 %r24, %r12, 5;"),
    ("N = 32 in the instruction descriptor", "134479888", "134742032"),
    (
        "accumulators loaded from the wrong column",
        "    add.u32 %r29, %r10, %r28;",
        "    add.u32 %r29, %r10, %r28;\n    add.u32 %r29, %r29, 8;",
    ),
    ("accumulators never kept", "[%r10], %d5, %d6, %r25, %p7;", "[%r10], %d5, %d6, %r25, 0;"),
    ("accumulators never cleared", "[%r10], %d5, %d6, %r25, %p7;", "[%r10], %d5, %d6, %r25, 1;"),
    ("tensor memory never freed", "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;\n", ""),
    ("every warp loads warp 0's lanes", "    shl.b32 %r28, %r2, 21;", "    mov.u32 %r28, 0;"),
    ("commit to the other stage's barrier", "[%r19];\n    add.u32 %r12", "[%r4];\n    add.u32 %r12"),
    (
        "load of B dropped",
        "    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r23], [%d4, {%r24, %r13}], [%r18];\n",
        "",
    ),
];

/// Small integers that are exact in f16 and in every sum.
fn value(row: usize, k: usize) -> i32 {
    ((row * 7 + k * 13 + row * k) % 9) as i32 - 4
}

/// Converts an integer of at most four bits to f16.
fn f16(x: i32) -> u16 {
    let sign = if x < 0 { 0x8000 } else { 0 };
    match x.unsigned_abs() {
        0 => sign,
        m => sign | ((15 + m.ilog2()) << 10) as u16 | ((m << (10 - m.ilog2())) & 0x3ff) as u16,
    }
}

fn map(data_type: DataType, address: u64, dims: [u64; 2], stride: u64, shape: [u32; 2], swizzle: Swizzle) -> Arg {
    let (interleave, promotion) = (Interleave::None, L2Promotion::None);
    let map = TensorMap::tiled(
        data_type,
        address,
        &dims,
        &[stride],
        &shape,
        &[1, 1],
        interleave,
        swizzle,
        promotion,
        OobFill::Zero,
    );
    Arg(map.unwrap().to_bytes().to_vec())
}

/// A device with the kernel's operands, the kernel's arguments, and its result.
fn prepare() -> (Device, [Arg; 3], Buffer) {
    let mut device = Device::new(DeviceConfig::default());
    let matrix =
        |rows: usize| -> Vec<u16> { (0..rows).flat_map(|row| (0..K).map(move |k| f16(value(row, k)))).collect() };
    let (a, b) = (device.upload(&matrix(M)), device.upload(&matrix(N)));
    let d = device.upload(&vec![f32::NAN; M * N]);
    let stride = 2 * K as u64;
    let args = [
        map(DataType::F16, a.address, [K as u64, M as u64], stride, [64, M as u32], Swizzle::B128),
        map(DataType::F16, b.address, [K as u64, N as u64], stride, [64, N as u32], Swizzle::B128),
        map(DataType::F32, d.address, [N as u64, M as u64], 4 * N as u64, [N as u32, M as u32], Swizzle::None),
    ];
    (device, args, d)
}

/// Returns the report of the launch, and whether the kernel's result is right.
fn run(text: &str, level: Level, schedule: Schedule) -> Result<(Report, bool), Fault> {
    let module = Module::parse(text).unwrap();
    let (mut device, args, d) = prepare();
    let config = LaunchConfig { schedule, instruction_budget: 100_000, ..LaunchConfig::linear(1, 192) };
    let report = device.launch(&module, "gemm", &config.at_level(level), &args)?;
    let dot = |row, column| (0..K).map(|k| value(row, k) * value(column, k)).sum::<i32>() as f32;
    let want: Vec<f32> = (0..M).flat_map(|row| (0..N).map(move |column| dot(row, column))).collect();
    Ok((report, device.download::<f32>(d) == want))
}

/// The kernel has four blocks along K in two stages: each stage is filled twice. All orders of its loads, products,
/// arrivals and warps give the same result, and a stage that is filled too early is a fault in some order.
#[test]
fn all_orders_of_the_pipeline_are_right() {
    let explore = |text: &str| {
        let module = Module::parse(text).unwrap();
        let (mut device, args, _) = prepare();
        device.explore(&module, "gemm", &LaunchConfig::linear(1, 192), &args, &Bounds::default()).unwrap()
    };
    let found = explore(KERNEL);
    println!("{found}");
    assert!(found.end == End::Whole && found.failures.is_empty() && found.results == 1, "{found}");
    let [_, early, late] = SABOTAGES[0].into();
    let found = explore(&KERNEL.replace(early, late));
    assert_eq!((found.end, found.failures.len()), (End::Fault, 1), "{found}");
}

const LEVELS: [(&str, Level); 3] =
    [("machine", Level::Machine), ("default", Level::Default), ("strict", Level::Strict)];

fn schedules() -> impl Iterator<Item = Schedule> {
    [Schedule::Fair, Schedule::Worst].into_iter().chain((1..=8).map(Schedule::Seed))
}

#[test]
fn unchanged_kernel_is_right_at_every_level() {
    for (name, level) in LEVELS {
        for schedule in schedules() {
            match run(KERNEL, level, schedule) {
                Ok((report, right)) => {
                    assert!(right, "wrong result at {name} on {schedule}");
                    assert!(report.warnings.is_empty(), "at {name} on {schedule}: {report}");
                }
                Err(fault) => panic!("at {name} on {schedule}: {fault}"),
            }
        }
    }
}

/// First effect of a sabotage at a level: a fault or a wrong result on some schedule, or else a warning.
fn notices(text: &str, level: Level) -> Option<String> {
    let mut warned = None;
    for schedule in schedules() {
        match run(text, level, schedule) {
            Ok((_, false)) => return Some(format!("wrong result ({schedule})")),
            Err(fault) => return Some(format!("fault[{}] ({schedule})", fault.kind)),
            Ok((report, true)) => {
                let kind = report.warnings.first().map(|warning| warning.fault.kind);
                warned = warned.or(kind.map(|kind| format!("warning[{kind}] ({schedule})")));
            }
        }
    }
    warned
}

/// `found.txt` lists the level that finds each sabotage. The default level finds every change of the result and every
/// hang.
#[test]
fn every_sabotage_is_noticed() {
    let mut list = String::new();
    for (what, from, to) in SABOTAGES {
        assert!(KERNEL.contains(from), "{what}: the kernel has no such text");
        let text = KERNEL.replace(from, to);
        let [machine, default, strict] = LEVELS.map(|(_, level)| notices(&text, level));
        assert!(machine.is_none() || default.as_ref().is_some_and(|how| !how.starts_with("warning")), "{what}");
        assert!(strict.as_ref().is_some_and(|how| !how.starts_with("warning")), "{what}: unnoticed");
        let levels = LEVELS.iter().zip([machine, default, strict]);
        let levels = levels.map(|((name, _), how)| format!("{name} {}", how.unwrap_or("-".into())));
        list += &format!("{what}: {}\n", levels.collect::<Vec<_>>().join(", "));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mutations/found.txt");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &list).unwrap();
    }
    assert_eq!(list, std::fs::read_to_string(path).unwrap_or_default(), "{path}: run with BLESS=1 if this is right");
}
