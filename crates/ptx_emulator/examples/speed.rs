//! Measures the speed of the emulator, the cost of schedules, checks and the search for races, and the cost of the sums of
//! tensor cores. Reports the minimum CPU time of one thread over several runs, so that other load on the machine has
//! little effect.
//!
//! ```sh
//! cargo run --release -p ptx_emulator --example speed
//! ```

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ptx_emulator::hw::descriptor::{Element, ScaleType};
use ptx_emulator::hw::matmul::{Floats, Fours, Packing, Scales, multiply_f32, multiply_fours};
use ptx_emulator::hw::sums::{Adder, Family, Instruction, Kind};
use ptx_emulator::{Arg, Device, DeviceConfig, LaunchConfig, Module, Report, Schedule};
use rayon::{ThreadPool, ThreadPoolBuilder};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RUNS: usize = 3;
/// Maximum of each ratio.
const SANITIZER: f64 = 2.0;
const RACES: f64 = 3.0;
const WORST: f64 = 3.0;

/// A launch of a kernel of `speed/kernels.ptx`.
struct Case {
    entry: &'static str,
    grid: [u32; 3],
    threads: u32,
    number: u32,
}

const CASES: [Case; 4] = [
    Case { entry: "product", grid: [8, 8, 1], threads: 256, number: 128 },
    Case { entry: "fill", grid: [32, 1, 1], threads: 128, number: 100 },
    Case { entry: "sums", grid: [32, 1, 1], threads: 128, number: 64 },
    Case { entry: "copy", grid: [128, 1, 1], threads: 256, number: 1 << 18 },
];

impl Case {
    fn launch(&self, module: &Module, config: &LaunchConfig) -> Result<Report> {
        let mut device = Device::new(DeviceConfig::default());
        let words: Vec<u32> = (0..1_u32 << 20).map(|n| n.wrapping_mul(0x9e37_79b9) >> 12).collect();
        let (to, from, other) = (device.allocate(4 << 20), device.upload(&words), device.upload(&words));
        let config = LaunchConfig { grid: self.grid, block: [self.threads, 1, 1], ..config.clone() };
        Ok(device.launch(
            module,
            self.entry,
            &config,
            &[to.into(), from.into(), other.into(), Arg::value(self.number)],
        )?)
    }
}

/// CPU time of this thread so far (Linux, /proc/thread-self/schedstat), or the wall-clock time elsewhere.
fn now(start: Instant) -> Duration {
    let on_cpu = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = on_cpu.and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| start.elapsed(), Duration::from_nanos)
}

/// CPU time on one thread, in seconds.
fn cpu_time(pool: &ThreadPool, run: impl Fn() -> Result<Report> + Sync) -> Result<f64> {
    pool.install(|| {
        let start = Instant::now();
        let mut least = f64::INFINITY;
        for _ in 0..RUNS {
            let before = now(start);
            run()?;
            least = least.min((now(start) - before).as_secs_f64());
        }
        Ok(least)
    })
}

/// CPU time of a call on this thread, in seconds. The clock may be too coarse for a single call.
fn time(call: impl Fn()) -> f64 {
    const CALLS: u32 = 400;
    let start = Instant::now();
    let many = || {
        let before = now(start);
        (0..CALLS).for_each(|_| call());
        (now(start) - before).as_secs_f64() / f64::from(CALLS)
    };
    (0..RUNS).map(|_| many()).fold(f64::INFINITY, f64::min)
}

/// Prints the speed of the products of `tcgen05.mma` with 128 rows and 256 columns, added as a GPU adds them and exactly.
fn products() {
    const ROWS: usize = 128;
    const COLUMNS: usize = 256;
    println!("product   exact, G products/s   card, G products/s   ratio");
    let print = |name: &str, k: usize, exact: f64, card: f64| {
        let rate = |seconds: f64| (ROWS * COLUMNS * k) as f64 / seconds / 1e9;
        println!("{name:<9} {:>19.2} {:>20.2} {:>7.2}", rate(exact), rate(card), exact / card);
    };
    let random = |count: usize| (0..count as u32).map(|n| n.wrapping_mul(0x9e37_79b9) >> 13);
    // Halves between 0.5 and 2, of both signs.
    let halves = |count: usize| -> Vec<u8> {
        random(count).flat_map(|bits| (bits as u16 & 0x87ff | 0x3800).to_le_bytes()).collect()
    };
    let floats = |rows: usize| Floats::decode(Element::F16, Packing::Dense, rows, 16, &halves(rows * 16));
    let (a, b) = (floats(ROWS), floats(COLUMNS));
    let adder = Adder::of(Family::Blackwell, Instruction::Tcgen05, Kind::Half);
    let run = |adder: Option<&Adder>| time(|| multiply_f32(&a, &b, adder, &mut vec![1.0; ROWS * COLUMNS]));
    print("f16", 16, run(None), run(Some(&adder)));
    let fours = |rows: usize| Fours::decode(rows, 64, &random(rows * 32).map(|bits| bits as u8).collect::<Vec<_>>());
    // Scales between 0.5 and 4.
    let scales = |rows: usize| {
        let codes: Vec<u8> = random(rows * 4).map(|bits| 0x30 + (bits % 24) as u8).collect();
        Scales::decode(ScaleType::Ue4m3, rows, 4, &codes).expect("no code has its top bit set")
    };
    let (a, b) = ((fours(ROWS), scales(ROWS)), (fours(COLUMNS), scales(COLUMNS)));
    let adder = Adder::of(Family::Blackwell, Instruction::Tcgen05, Kind::Four);
    let run = |adder: Option<&Adder>| {
        time(|| multiply_fours((&a.0, &a.1), (&b.0, &b.1), adder, &mut vec![1.0; ROWS * COLUMNS]))
    };
    print("mxf4nvf4", 64, run(None), run(Some(&adder)));
}

/// Exits with status 1 if a ratio exceeds its goal.
fn main() -> Result<ExitCode> {
    let module = Module::parse(include_str!("speed/kernels.ptx"))?;
    let one = ThreadPoolBuilder::new().num_threads(1).build()?;
    let checked = LaunchConfig { sanitize: true, global_races: true, ..LaunchConfig::linear(1, 1) };
    let unsearched = LaunchConfig { global_races: false, ..checked.clone() };
    let machine = LaunchConfig { sanitize: false, ..unsearched.clone() };
    let worst = LaunchConfig { schedule: Schedule::Worst, ..checked.clone() };
    println!("kernel    machine, s   M thread instructions/s   sanitizer   and races   worst to fair   all threads");
    let mut met = true;
    for case in CASES {
        let report = case.launch(&module, &machine)?;
        let time = |config: &LaunchConfig| cpu_time(&one, || case.launch(&module, config));
        let [bare, sanitized, searched, late] = [time(&machine)?, time(&unsearched)?, time(&checked)?, time(&worst)?];
        // Wall-clock time, for the speedup of all threads over one.
        let clock = |pool: Option<&ThreadPool>| -> Result<f64> {
            let mut least = f64::INFINITY;
            for _ in 0..RUNS {
                let start = Instant::now();
                match pool {
                    Some(pool) => pool.install(|| case.launch(&module, &checked))?,
                    None => case.launch(&module, &checked)?,
                };
                least = least.min(start.elapsed().as_secs_f64());
            }
            Ok(least)
        };
        let together = clock(Some(&one))? / clock(None)?;
        println!(
            "{:<9} {bare:>10.4} {:>25.0} {:>11.2} {:>11.2} {:>15.2} {together:>13.2}",
            case.entry,
            report.total.thread_instructions as f64 / bare / 1e6,
            sanitized / bare,
            searched / sanitized,
            late / searched,
        );
        met &= sanitized / bare <= SANITIZER && searched / sanitized <= RACES && late / searched <= WORST;
    }
    products();
    println!(
        "goals: sanitizer {SANITIZER} x machine, races {RACES} x that, worst {WORST} x fair: {}",
        if met { "met" } else { "NOT met" }
    );
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
