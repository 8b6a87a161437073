//! Compares the time model with published tables of a B200 and a B300, by loops like the measured ones. `benches/lab/time-model.md` names
//! the sources. Each point must be within 10 %, except for the listed misses.

use ptx_emulator::{
    Arg, Buffer, Card, DataType, Device, DeviceConfig, Interleave, Key, L2Promotion, LaunchConfig, Module, OobFill,
    Swizzle, TensorMap, Timeline,
};

const B200_SMS: u32 = 148;

fn b200() -> Card {
    Card::named("b200").unwrap()
}

/// Cycles of a launch.
fn cycles(device: &mut Device, ptx: &str, entry: &str, config: &LaunchConfig, args: &[Arg]) -> f64 {
    let module = Module::parse(ptx).unwrap();
    let mut timeline = Timeline::new(b200());
    device.time(&mut timeline, &module, entry, config, args).unwrap();
    let time = &timeline.launches()[0];
    (time.end_us - time.start_us) * b200().get(Key::Clock)
}

fn near(what: &str, predicted: f64, published: f64) {
    let miss = predicted / published - 1.0;
    println!("{what}: {predicted:.1}, published {published}, {:+.1} %", 100.0 * miss);
    assert!(miss.abs() < 0.1, "{what}: predicted {predicted:.1}, published {published}");
}

/// SemiAnalysisAI/microbench-blackwell 9a068d85: cycles per MMA, both operands in shared memory, M = 128.
#[test]
fn block_scaled_products_take_the_published_cycles() {
    for (n, published) in [(64, 48.2), (80, 52.2), (96, 56.2), (112, 60.2), (128, 64.2), (256, 128.2)] {
        let time = |products: u32| {
            let mut device = Device::new(DeviceConfig { sms: B200_SMS });
            // M = 128, e2m1 and ue4m3; N / 8 starts at bit 17.
            let descriptor = 0x0800_0480 | (n / 8) << 17;
            let args = [Arg::value(products), Arg::value(descriptor)];
            cycles(&mut device, include_str!("time/mma.ptx"), "mma", &LaunchConfig::linear(1, 128), &args)
        };
        near(&format!("N = {n}"), (time(96) - time(32)) / 64.0, published);
    }
}

/// Antoniomv7/gb300-microbench 1f27767, results/umma_throughput.csv: cycles of a round of products of one CTA (M = 128)
/// and of a pair (M = 256), by N and number of products. The constants of the B300 are fitted to the rounds of 4 and 16
/// products. Rounds of four products are up to 11 % off: the measured ones depend on N beyond the products' own time.
#[test]
fn rounds_of_products_take_the_cycles_of_a_b300() {
    const PUBLISHED: [(u32, u32, f64, f64); 12] = [
        (64, 4, 444.1, 932.1),
        (64, 16, 1127.1, 1460.1),
        (64, 64, 3395.1, 3584.1),
        (64, 256, 12611.1, 12032.1),
        (128, 4, 601.1, 987.1),
        (128, 16, 1261.1, 1760.1),
        (128, 64, 4354.1, 4858.1),
        (128, 256, 16642.1, 17146.1),
        (256, 4, 749.1, 1233.1),
        (256, 16, 2394.1, 2784.1),
        (256, 64, 8559.1, 8939.1),
        (256, 256, 33135.0, 33419.1),
    ];
    let card = Card::named("b300").unwrap();
    let round = |blocks: u32, n: u32, products: u32| {
        let time = |turns: u32| {
            let mut device = Device::new(DeviceConfig { sms: card.sms });
            // bf16 with f32 sums; N / 8 starts at bit 17, M / 16 at bit 24.
            let descriptor = 0x490 | (n / 8) << 17 | (8 * blocks) << 24;
            let args = [turns, products, descriptor].map(Arg::value);
            let config = LaunchConfig { cluster: [blocks, 1, 1], ..LaunchConfig::linear(blocks, 128) };
            let module = Module::parse(include_str!("time/rounds.ptx")).unwrap();
            let mut timeline = Timeline::new(card.clone());
            let entry = ["rounds", "pair_rounds"][blocks as usize - 1];
            device.time(&mut timeline, &module, entry, &config, &args).unwrap();
            let time = &timeline.launches()[0];
            (time.end_us - time.start_us) * card.get(Key::Clock)
        };
        (time(6) - time(2)) / 4.0
    };
    for (n, products, alone, pair) in PUBLISHED {
        let most = if products == 4 { 0.12 } else { 0.1 };
        for (blocks, published) in [(1, alone), (2, pair)] {
            let predicted = round(blocks, n, products);
            let miss = predicted / published - 1.0;
            println!(
                "{blocks} CTAs, N = {n}, {products}: {predicted:.1}, published {published}, {:+.1} %",
                100.0 * miss
            );
            assert!(miss.abs() < most, "{blocks} CTAs, N = {n}, {products}: {predicted:.1}, published {published}");
        }
    }
}

/// Cycles of a copy with one copy in flight on every SM.
fn copy(bytes: u32) -> f64 {
    const TIMES: u32 = 12;
    let mut device = Device::new(DeviceConfig { sms: B200_SMS });
    let from: Buffer = device.allocate(u64::from(bytes * TIMES) * u64::from(B200_SMS));
    let mut time = |times: u32| {
        let args = [from.into(), Arg::value(bytes), Arg::value(times)];
        let config = LaunchConfig { shared_bytes: bytes, ..LaunchConfig::linear(B200_SMS, 1) };
        cycles(&mut device, include_str!("time/copies.ptx"), "copies", &config, &args)
    };
    (time(TIMES) - time(TIMES / 3)) / f64::from(TIMES - TIMES / 3)
}

/// The same source: `TMA 2D load from DRAM, all multiprocessors at once, one load in flight each`.
#[test]
fn copies_from_dram_take_the_published_cycles() {
    let published =
        [(9, 900.0), (10, 927.0), (11, 968.0), (12, 1038.0), (14, 1405.0), (15, 1757.0), (16, 2698.0), (17, 5248.0)];
    for (log, published) in published {
        near(&format!("{} bytes", 1 << log), copy(1 << log), published);
    }
}

/// The same source: DRAM throughput by bytes in flight per SM. 32 KB is left out: 5.9 TB/s there.
#[test]
fn dram_delivers_the_published_rates() {
    for (log, published) in [(14, 3.8), (16, 7.22), (17, 7.26)] {
        let bytes = f64::from(B200_SMS << log);
        let rate = bytes / copy(1 << log) * b200().get(Key::Clock) / 1e6;
        near(&format!("{} bytes in flight, TB/s", 1 << log), rate, published);
    }
}

/// A tensor copy of rows takes the same time with any swizzle, and reads all rows from DRAM.
#[test]
fn swizzle_does_not_change_copy_times() {
    const TIMES: u32 = 4;
    let time = |row: u32, swizzle| {
        let mut device = Device::new(DeviceConfig { sms: B200_SMS });
        let (rows, box_rows) = (64 * TIMES * B200_SMS, 64);
        let from = device.allocate(u64::from(row) * u64::from(rows));
        let (dims, none) = ([u64::from(row), u64::from(rows)], Interleave::None);
        let (shape, stride) = ([row, box_rows], [u64::from(row)]);
        let (promotion, fill) = (L2Promotion::None, OobFill::Zero);
        let map = TensorMap::tiled(
            DataType::U8,
            from.address,
            &dims,
            &stride,
            &shape,
            &[1, 1],
            none,
            swizzle,
            promotion,
            fill,
        );
        let args = [Arg(map.unwrap().to_bytes().to_vec()), Arg::value(row * box_rows), Arg::value(TIMES)];
        let module = Module::parse(include_str!("time/tensor_copies.ptx")).unwrap();
        let mut timeline = Timeline::new(b200());
        let config = LaunchConfig::linear(B200_SMS, 1);
        device.time(&mut timeline, &module, "tensor_copies", &config, &args).unwrap();
        let time = &timeline.launches()[0];
        assert_eq!(time.dram_bytes, u64::from(row) * u64::from(rows), "{swizzle:?}");
        time.end_us
    };
    for (row, swizzle) in [(32, Swizzle::B32), (64, Swizzle::B64), (128, Swizzle::B128), (128, Swizzle::B128Atom32)] {
        assert_eq!(time(row, swizzle), time(row, Swizzle::None), "{swizzle:?}");
    }
}

/// Loads of tensor memory take time for their bytes, one after the other, and `tcgen05.wait::ld` waits for the last.
#[test]
fn loads_of_tensor_memory_are_waited_for() {
    let turn = |loads: u32| {
        let time = |turns: u32| {
            let mut device = Device::new(DeviceConfig { sms: B200_SMS });
            let args = [Arg::value(turns), Arg::value(loads)];
            cycles(&mut device, include_str!("time/tmem.ptx"), "tmem", &LaunchConfig::linear(1, 32), &args)
        };
        (time(96) - time(32)) / 64.0
    };
    let [bytes, latency] = [Key::TmemBytes, Key::TmemLatency].map(|key| b200().get(key));
    let load = f64::from(32 * 128) / bytes;
    let (one, two) = (turn(1), turn(2));
    assert!((load + latency..load + latency + 40.0).contains(&one), "{one}");
    assert!((two - one - load).abs() <= 10.0, "{one} and {two}");
}

/// Cycles of a turn of `time/cluster.ptx`.
fn cluster_turn(card: &Card, entry: &str) -> f64 {
    let time = |turns: u32| {
        let mut device = Device::new(DeviceConfig { sms: card.sms });
        let threads = if entry == "arrivals" { 1 } else { 32 };
        let config = LaunchConfig { cluster: [2, 1, 1], ..LaunchConfig::linear(2, threads) };
        let module = Module::parse(include_str!("time/cluster.ptx")).unwrap();
        let mut timeline = Timeline::new(card.clone());
        device.time(&mut timeline, &module, entry, &config, &[Arg::value(turns)]).unwrap();
        let time = &timeline.launches()[0];
        (time.end_us - time.start_us) * card.get(Key::Clock)
    };
    (time(96) - time(32)) / 64.0
}

/// Another CTA of the cluster sees an arrival after the fence of its release and the cluster latency, whichever CTA
/// arrives last.
#[test]
fn cluster_arrivals_take_the_cluster_latency() {
    let [cluster, barrier, fence, wake] =
        [Key::ClusterLatency, Key::ClusterBarrier, Key::ClusterFence, Key::MbarrierWake].map(|key| b200().get(key));
    let turn = |entry| cluster_turn(&b200(), entry);
    let (relaxed, releasing, arrivals) = (turn("relaxed_barriers"), turn("barriers"), turn("arrivals"));
    assert!((barrier..barrier + 30.0).contains(&relaxed), "{relaxed}");
    assert!((relaxed + fence - 5.0..relaxed + fence + 5.0).contains(&releasing), "{releasing}");
    // One round trip.
    let expected = 2.0 * (fence + cluster + wake);
    assert!((expected..expected + 60.0).contains(&arrivals), "{arrivals}, not {expected}");
}

/// benches/lab/measurements/h100-probes.txt: a turn of two CTAs at their barrier and at each other's mbarrier.
#[test]
fn clusters_take_the_cycles_of_an_h100() {
    let turn = |entry| cluster_turn(&Card::named("h100").unwrap(), entry);
    near("barrier without a release", turn("relaxed_barriers"), 88.18);
    near("barrier", turn("barriers"), 775.09);
    near("arrival with a release", turn("arrivals") / 2.0, 949.18);
}

/// benches/lab/measurements/h200-fences.txt: a turn of a warp with one fence, store or load.
#[test]
fn fences_take_the_cycles_of_an_h200() {
    let card = Card::named("h200").unwrap();
    let turn = |entry| {
        let time = |turns: u32| {
            let mut device = Device::new(DeviceConfig { sms: card.sms });
            let word = device.allocate(4096);
            let module = Module::parse(include_str!("time/fences.ptx")).unwrap();
            let mut timeline = Timeline::new(card.clone());
            let args = [word.into(), Arg::value(turns)];
            device.time(&mut timeline, &module, entry, &LaunchConfig::linear(1, 32), &args).unwrap();
            let time = &timeline.launches()[0];
            (time.end_us - time.start_us) * card.get(Key::Clock)
        };
        (time(96) - time(32)) / 64.0
    };
    near("fence of the cluster", turn("fence_cluster"), 264.7);
    near("fence of the GPU", turn("fence_gpu"), 264.7);
    near("fence of the system", turn("fence_system"), 1097.6);
    near("fence of the GPU behind a store", turn("store_fence"), 586.0);
    near("releasing store", turn("releasing_store"), 580.1);
    near("relaxed load", turn("relaxed_load"), 319.1);
    near("acquiring load", turn("acquiring_load"), 322.7);
    assert!(turn("fence_cta") < 20.0, "a fence of the CTA took {}", turn("fence_cta"));
}

/// The same launch has the same time, whatever else the device ran.
#[test]
fn repeated_launches_take_the_same_time() {
    assert_eq!(copy(4096), copy(4096));
}

/// A constant has its intended effect: half the DRAM bandwidth doubles the time of a DRAM-bound kernel.
#[test]
fn half_the_bandwidth_doubles_the_time() {
    let time = |card: Card| {
        let mut device = Device::new(DeviceConfig { sms: B200_SMS });
        let from = device.allocate(u64::from(B200_SMS) * 4 * (128 << 10));
        let module = Module::parse(include_str!("time/copies.ptx")).unwrap();
        let mut timeline = Timeline::new(card);
        let config = LaunchConfig { shared_bytes: 128 << 10, ..LaunchConfig::linear(B200_SMS, 1) };
        let args = [from.into(), Arg::value(128u32 << 10), Arg::value(4u32)];
        device.time(&mut timeline, &module, "copies", &config, &args).unwrap();
        timeline.launches()[0].end_us
    };
    let (whole, half) = (time(b200()), time(b200().scaled(Key::DramBytes, 0.5)));
    assert!((1.8..2.1).contains(&(half / whole)), "{whole} and {half}");
}
