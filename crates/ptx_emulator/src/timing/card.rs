//! Constants of GPUs, each with its source. No other part of the model has numbers of a particular GPU.

use std::fmt;

/// Origin of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Measured on the GPU by `benches/probes`, with the date.
    Measured(&'static str),
    /// Published, with the source.
    Published(&'static str),
    /// Fitted to points measured on the GPU, with the points.
    Fitted(&'static str),
    /// Neither measured nor published: an assumption, with its reason. `--sensitivity` reports its effect.
    Assumed(&'static str),
}

/// A constant of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Value in the unit of its [`Key`].
    pub value: f64,
    /// Origin of the value.
    pub origin: Origin,
}

macro_rules! keys {
    ($($key:ident, $name:literal, $unit:literal, $what:literal;)*) => {
        /// Names of constants. Cycles are SM cycles.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Key { $(#[doc = $what] $key,)* }

        impl Key {
            /// Every key.
            pub const ALL: &[Key] = &[$(Key::$key,)*];

            /// Name on the command line and in tables.
            pub const fn name(self) -> &'static str {
                match self { $(Key::$key => $name,)* }
            }

            /// Unit of the values.
            pub const fn unit(self) -> &'static str {
                match self { $(Key::$key => $unit,)* }
            }

            /// Description.
            pub const fn what(self) -> &'static str {
                match self { $(Key::$key => $what,)* }
            }
        }
    };
}

keys! {
    Clock, "clock", "MHz", "clock of the SMs";
    LaunchFloor, "launch-floor", "ns", "time between two events around an empty kernel";
    LaunchGap, "launch-gap", "ns", "from the end of a grid to the start of the next grid in its stream";
    DependentStart, "dependent-start", "ns", "from the last `launch_dependents` of a grid to the start of the next grid";
    CtaStart, "cta-start", "cycles", "from the end of a CTA to the first instruction of the CTA that replaces it";
    GridEnd, "grid-end", "cycles", "from the last exit of a grid to the end of `griddepcontrol.wait` in the next grid";
    SharedLatency, "shared-latency", "cycles", "from a load of shared memory to its use";
    L1Latency, "l1-latency", "cycles", "latency of a load that hits L1";
    L1Part, "l1-part", "cycles", "time of L1 and shared memory per line of lanes served together";
    SharedBytes, "shared-bytes", "bytes/cycle", "bandwidth of shared memory per SM";
    L2Latency, "l2-latency", "cycles", "latency of a load that hits L2";
    FarLatency, "far-latency", "cycles", "additional latency of a load that hits L2 on the GPU's other die";
    DramLatency, "dram-latency", "cycles", "latency of a load that misses L2";
    TmaLatency, "tma-latency", "cycles", "additional latency of a bulk or tensor copy over a load";
    TmaBytes, "tma-bytes", "bytes/cycle", "bandwidth of a single bulk or tensor copy";
    Intake, "intake", "bytes/cycle", "maximum rate at which an SM receives data";
    L2Bytes, "l2-bandwidth", "GB/s", "bandwidth of L2 to all SMs";
    Neighbors, "neighbours", "SMs", "SMs that share the delivery of a line if they request it while it is in flight to one of them";
    DramBytes, "dram-bandwidth", "GB/s", "bandwidth of DRAM";
    DramBanks, "dram-banks", "banks", "number of DRAM banks; each delivers one page of 1 KB at a time";
    DramPage, "dram-page", "cycles", "time for which a page keeps its bank busy";
    L2Capacity, "l2-capacity", "MB", "capacity of L2";
    MbarrierWake, "mbarrier-wake", "cycles", "from the end of an mbarrier's phase to the waiting warp's next instruction";
    BarrierLatency, "barrier-latency", "cycles", "from the last arrival at a named barrier to the next instruction of the waiting warps";
    ClusterLatency, "cluster-latency", "cycles", "latency of an arrival or store in another CTA of the cluster";
    ClusterBarrier, "cluster-barrier", "cycles", "from the last arrival at a cluster's barrier to the next instruction of the waiting warps";
    ClusterFence, "cluster-fence", "cycles", "delay of an arrival that releases earlier writes to the cluster, beyond one that does not";
    GpuFence, "gpu-fence", "cycles", "delay of a fence of the cluster or the GPU, or of a release to the GPU, after the warp's last store has reached L2";
    SystemFence, "system-fence", "cycles", "delay of a fence of the system, or of a release to the system, after the warp's last store has reached L2";
    TensorRate, "tensor-rate", "f16 multiply-adds/cycle", "rate of an SM's tensor cores, dense";
    MmaLatency, "mma-latency", "cycles", "latency of mma.sync beyond its time in the tensor core";
    MatrixLatency, "matrix-latency", "cycles", "latency of wgmma, or of tcgen05.mma with its commit and wait, beyond its time in the tensor core";
    PairLatency, "pair-latency", "cycles", "matrix-latency for a pair of CTAs";
    MatrixFloor, "matrix-floor", "cycles", "minimum time of a wgmma in the tensor core";
    SumsDelay, "sums-delay", "cycles", "delay of an instruction during a wgmma, per register of accumulators that the wgmma reads or writes in a cycle";
    Release, "release", "cycles", "from a memory access until the registers that it reads may be overwritten";
    TmemBytes, "tmem-bytes", "bytes/cycle", "bandwidth of tcgen05.ld and st per quarter of an SM";
    TmemLatency, "tmem-latency", "cycles", "latency of tcgen05.ld and st beyond the transfer of their bytes";
    CopyBytes, "tcgen05-cp", "bytes/cycle", "rate at which tcgen05.cp reads shared memory";
    GenericStall, "generic-stall", "cycles", "cycles between instructions of a warp if no machine code is available";
}

/// A GPU.
#[derive(Clone, Debug)]
pub struct Card {
    /// Name on the command line.
    pub name: &'static str,
    /// Number of SMs.
    pub sms: u32,
    /// Architecture, in the spelling of ptxas.
    pub arch: &'static str,
    constants: Vec<Constant>,
}

/// Resources of an SM (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0, 10.0 and
/// 12.x).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub threads: u32,
    /// Bytes of shared memory.
    pub shared_bytes: u32,
    /// Bytes of L1 that remain at the maximum of shared memory.
    pub least_l1: u32,
    pub ctas: u32,
}

const PUBLIC_B200: &str = "SemiAnalysisAI/microbench-blackwell 9a068d85";
const ROUNDS_B300: &str =
    "Antoniomv7/gb300-microbench 1f27767, a B300: rounds of 4, 16 and 64 products, one CTA and pairs";
const PUBLIC_LATENCIES: &str = "markdewing/AI_kernels, latency/README.md";
const PUBLIC_READS: &str = "NInfer (Neroued/ninfer), tools/hbm_bandwidth_probe.cu: read bandwidth of an RTX 5090";
const PROBES_H200: &str = "benches/probes on an H200, 2026-11-22";
const LATER_PROBES_H200: &str = "benches/probes on an H200, 2026-11-23";
/// Cycles of a cluster's barrier, and of a release to the cluster, on the chip of the H100 and the H200.
const CLUSTER_BARRIER_H100: f64 = 82.0;
const CLUSTER_FENCE_H100: f64 = 687.0;
const FENCES_H200: &str = "benches/probes/fences.cu on an H200, 2026-11-29";
/// Cycles of a fence of the GPU and of a fence of the system on an H200.
const GPU_FENCE_H200: f64 = 265.0;
const SYSTEM_FENCE_H200: f64 = 1100.0;
const H100_LITERATURE: &str =
    "Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (2024), an H100";

impl Card {
    /// Names of all GPUs.
    pub const NAMES: [&str; 8] = ["h200", "h100", "b200", "b300", "rtx-5090", "rtx-pro-6000", "rtx-5070-ti", "gb10"];

    /// GPU with this name.
    pub fn named(name: &str) -> Option<Card> {
        match name {
            "h200" => Some(Card::h200()),
            "h100" => Some(Card::h100()),
            "b200" => Some(Card::b200()),
            "b300" => Some(Card::b300()),
            "rtx-5090" => Some(Card::sm_120("rtx-5090", 170, "sm_120a", 2407.0, 1792.0, 96.0)),
            "rtx-pro-6000" => Some(Card::sm_120("rtx-pro-6000", 188, "sm_120a", 2617.0, 1792.0, 128.0)),
            "rtx-5070-ti" => Some(Card::sm_120("rtx-5070-ti", 70, "sm_120a", 2452.0, 896.0, 48.0)),
            "gb10" => Some(Card::sm_120("gb10", 48, "sm_121a", 2418.0, 273.0, 24.0)),
            _ => None,
        }
    }

    fn new(name: &'static str, sms: u32, arch: &'static str, of: impl Fn(Key) -> (f64, Origin)) -> Card {
        let constant = |&key: &Key| {
            let (value, origin) = of(key);
            Constant { value, origin }
        };
        Card { name, sms, arch, constants: Key::ALL.iter().map(constant).collect() }
    }

    /// Resources of an SM.
    pub(crate) fn room(&self) -> Room {
        match self.arch {
            "sm_120a" | "sm_121a" => Room { threads: 1536, shared_bytes: 100 << 10, least_l1: 28 << 10, ctas: 24 },
            _ => Room { threads: 2048, shared_bytes: 228 << 10, least_l1: 28 << 10, ctas: 32 },
        }
    }

    /// Returns a constant with its origin.
    pub fn constant(&self, key: Key) -> Constant {
        self.constants[key as usize]
    }

    /// Returns a constant's value.
    pub fn get(&self, key: Key) -> f64 {
        self.constant(key).value
    }

    /// Returns a constant in whole cycles.
    pub fn cycles(&self, key: Key) -> u64 {
        match key.unit() {
            "ns" => (self.get(key) * self.get(Key::Clock) / 1000.0).round() as u64,
            _ => self.get(key).round() as u64,
        }
    }

    /// Returns a bandwidth in bytes per cycle.
    pub fn bytes_per_cycle(&self, key: Key) -> f64 {
        match key.unit() {
            "GB/s" => self.get(key) * 1000.0 / self.get(Key::Clock),
            _ => self.get(key),
        }
    }

    /// The same GPU with a constant multiplied by a factor.
    #[must_use]
    pub fn scaled(&self, key: Key, factor: f64) -> Card {
        let mut card = self.clone();
        card.constants[key as usize].value *= factor;
        card
    }

    /// The same GPU reduced to a share of the resources that all SMs share.
    pub(crate) fn share(&self, share: f64) -> Card {
        let shared = [Key::L2Bytes, Key::DramBytes, Key::DramBanks, Key::L2Capacity];
        shared.into_iter().fold(self.clone(), |card, key| card.scaled(key, share))
    }

    /// The same GPU with another value of a constant, given as `NAME=VALUE`.
    ///
    /// # Errors
    /// If no such constant exists, or the value is not a positive number.
    pub fn with(mut self, setting: &str) -> Result<Card, String> {
        let names = || Key::ALL.iter().map(|key| key.name()).collect::<Vec<_>>().join(", ");
        let (name, value) = setting.split_once('=').ok_or(format!("`{setting}` is not NAME=VALUE"))?;
        let key = Key::ALL.iter().find(|key| key.name() == name);
        let key = *key.ok_or_else(|| format!("unknown constant `{name}`; the constants are {}", names()))?;
        // A rate of zero would never serve a request.
        let is_rate = key.unit() != "cycles";
        let value = value.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
        let value = value
            .filter(|value| *value > 0.0 || !is_rate)
            .ok_or(format!("`{setting}`: the value must be a positive number"))?;
        self.constants[key as usize] = Constant { value, origin: Origin::Assumed("given by the caller") };
        Ok(self)
    }

    /// Converts cycles to microseconds.
    pub fn microseconds(&self, cycles: u64) -> f64 {
        cycles as f64 / self.get(Key::Clock)
    }

    fn h200() -> Card {
        use Origin::{Assumed, Measured, Published};
        let (probes, probes_later) = (Measured(PROBES_H200), Measured(LATER_PROBES_H200));
        let datasheet = Published("NVIDIA H200 data sheet, Hopper white paper");
        Card::new("h200", 132, "sm_90a", |key| match key {
            Key::Clock => (1980.0, Published("nvidia-smi, benches/lab/measurements/h200.json; lower under load")),
            Key::LaunchFloor => (5380.0, Measured("benches/probes on an H200, 2026-11-21; 5.0 to 8.6 us a day later")),
            Key::LaunchGap => (597.0, probes),
            Key::DependentStart => (483.0, probes),
            Key::CtaStart => (300.0, Assumed("parameters and barriers must be fetched again")),
            Key::GridEnd => (430.0, probes),
            Key::SharedLatency => (29.0, probes),
            Key::L1Latency => (32.0, probes),
            Key::L1Part => (1.0, probes_later),
            Key::SharedBytes => (128.0, datasheet),
            Key::L2Latency => (280.0, probes),
            Key::FarLatency => (0.0, Published("Hopper white paper: one die")),
            Key::DramLatency => (652.0, probes),
            Key::TmaLatency => (
                71.0,
                Measured("benches/probes: 821 for 512 bytes of DRAM, minus the load, the wake and 20 for the loop"),
            ),
            Key::TmaBytes => (116.0, probes),
            Key::Intake => (79.0, probes),
            Key::L2Bytes => (8800.0, probes),
            Key::Neighbors => (2.0, probes),
            Key::DramBytes => (4520.0, probes),
            Key::DramBanks => (512.0, Measured("benches/probes: DRAM throughput by bytes in flight")),
            Key::DramPage => (200.0, Measured("benches/probes: DRAM throughput by bytes in flight")),
            Key::L2Capacity => (50.0, datasheet),
            Key::MbarrierWake => {
                (79.0, Measured("benches/probes: 99 with the arrival, minus 20 for the loop's instructions"))
            }
            Key::BarrierLatency => (20.0, probes),
            Key::ClusterLatency => (180.0, Published(H100_LITERATURE)),
            Key::ClusterBarrier => (CLUSTER_BARRIER_H100, Assumed("as on an H100, which is the same chip")),
            Key::ClusterFence => (CLUSTER_FENCE_H100, Assumed("as on an H100, which is the same chip")),
            Key::GpuFence => (GPU_FENCE_H200, Measured(FENCES_H200)),
            Key::SystemFence => (SYSTEM_FENCE_H200, Measured(FENCES_H200)),
            Key::TensorRate => (2048.0, datasheet),
            Key::MmaLatency => (
                20.0,
                Measured("benches/probes: 24 from a product to the next product on the same accumulators, minus 4"),
            ),
            Key::MatrixLatency => (32.0, Published(H100_LITERATURE)),
            Key::PairLatency => (32.0, Assumed("this GPU has no CTA pairs")),
            Key::MatrixFloor => (16.0, Measured("benches/probes: 13 for 8 and 16 columns, 16 for 32")),
            Key::SumsDelay => (1.3, Measured("benches/probes: 0.8 to 1.6, by columns and kind of instruction")),
            Key::Release => (23.0, probes_later),
            Key::TmemBytes => (128.0, Assumed("this GPU has no tensor memory")),
            Key::TmemLatency => (30.0, Assumed("this GPU has no tensor memory")),
            Key::CopyBytes => (64.0, Assumed("this GPU has no tensor memory")),
            Key::GenericStall => (2.0, Assumed("two independent instructions between dependent instructions")),
        })
    }

    /// An H100 with 80 GB of HBM3: the same chip as an H200, with the same constants except for memory.
    fn h100() -> Card {
        let h200 = Card::h200();
        let probes = Origin::Measured("benches/probes on an H100, 2026-11-25");
        Card::new("h100", h200.sms, h200.arch, |key| match key {
            Key::DramLatency => (684.0, probes),
            Key::DramBytes => (3136.0, probes),
            Key::ClusterLatency => (220.0, probes),
            Key::ClusterBarrier => (
                CLUSTER_BARRIER_H100,
                Origin::Measured("benches/probes on an H100, 2026-11-25: 88 without a release, minus 6 for the loop"),
            ),
            Key::ClusterFence => (
                CLUSTER_FENCE_H100,
                Origin::Measured(
                    "benches/probes on an H100, 2026-11-25: 775 for a cluster's barrier with a release, 88 without",
                ),
            ),
            _ => (h200.get(key), Origin::Assumed("as on an H200")),
        })
    }

    fn b200() -> Card {
        use Origin::{Assumed, Fitted, Published};
        let (public, datasheet) = (Published(PUBLIC_B200), Published("NVIDIA Blackwell data sheets"));
        Card::new("b200", 148, "sm_100a", |key| match key {
            Key::Clock => (1965.0, datasheet),
            Key::LaunchFloor => {
                (4500.0, Fitted("gau-nernst/gpu-mode-kernels aee9cda6: the smallest shapes take 4.5 to 5 us"))
            }
            Key::LaunchGap => (597.0, Assumed("as on an H200")),
            Key::DependentStart => (483.0, Assumed("as on an H200")),
            Key::CtaStart => (300.0, Assumed("parameters and barriers must be fetched again")),
            Key::GridEnd => (430.0, Assumed("as on an H200")),
            Key::SharedLatency => (29.0, Assumed("as on an H100")),
            Key::L1Latency => (38.0, Assumed("as on an H100")),
            Key::L1Part => (0.0, Assumed("not measured; taken as zero")),
            Key::SharedBytes => (128.0, public),
            // The minimum of loads, so of loads from the near die. Other latencies are means over both dies.
            Key::L2Latency => (370.0, public),
            Key::FarLatency => (300.0, Published("SemiAnalysis, 2026-03-31, a B200: about 300 cycles")),
            Key::DramLatency => (700.0, public),
            Key::TmaLatency => (190.0, public),
            Key::TmaBytes => (37.0, public),
            Key::Intake => (72.0, public),
            Key::L2Bytes => (16000.0, Fitted("gau-nernst/gpu-mode-kernels aee9cda6: dual_gemm v1c on dual-1")),
            Key::Neighbors => (1.0, Assumed("not measured; taken as no sharing")),
            Key::DramBytes => (7260.0, public),
            Key::DramBanks => (512.0, Assumed("as on an H200; no effect with a dram-page of 0")),
            Key::DramPage => (
                0.0,
                Fitted("SemiAnalysisAI/microbench-blackwell 9a068d85: copies of 16 to 128 KB do not wait for a bank"),
            ),
            Key::L2Capacity => (126.0, datasheet),
            Key::MbarrierWake => (20.0, Assumed("as long as a load of shared memory")),
            Key::BarrierLatency => (20.0, Assumed("as long as a load of shared memory")),
            Key::ClusterLatency => (180.0, Assumed("as on an H100")),
            Key::ClusterBarrier => (180.0, Assumed("as long as an arrival in another CTA")),
            // A pair's round takes 752 cycles without its products. A round of one CTA takes 371 of them, a pair's products
            // have 34 cycles more latency, and the cluster's barrier takes 180. The rest is the fence of the arrival.
            Key::ClusterFence => (167.0, Fitted(ROUNDS_B300)),
            Key::GpuFence => (GPU_FENCE_H200, Assumed("as on an H200")),
            Key::SystemFence => (SYSTEM_FENCE_H200, Assumed("as on an H200")),
            Key::TensorRate => (4096.0, datasheet),
            Key::MmaLatency => (20.0, Assumed("as on an H200")),
            Key::MatrixLatency => (140.0, public),
            Key::PairLatency => (174.0, public),
            Key::MatrixFloor => (16.0, Assumed("reading 64 rows of A takes 16 cycles of shared memory")),
            Key::SumsDelay => (0.0, Assumed("this GPU has no wgmma")),
            Key::Release => (0.0, Assumed("not measured; taken as zero")),
            Key::TmemBytes => (128.0, Assumed("32 lanes of 4 bytes")),
            Key::TmemLatency => (30.0, Assumed("as for shared memory")),
            Key::CopyBytes => (64.0, Assumed("half the bandwidth of shared memory")),
            Key::GenericStall => (2.0, Assumed("two independent instructions between dependent instructions")),
        })
    }

    /// A B300: a B200 with the clock, memory and rounds of products that others measured. Its block-scaled products with
    /// K = 96, which are faster than a B200's, are not emulated.
    fn b300() -> Card {
        use Origin::{Assumed, Fitted, Published};
        let b200 = Card::b200();
        Card::new("b300", b200.sms, "sm_103a", |key| match key {
            Key::Clock => (
                2019.0,
                Published("Antoniomv7/gb300-microbench 1f27767: 16.358 TFLOP/s of an SM at 8102 FLOP per cycle"),
            ),
            Key::DramBytes => (7024.0, Published("Antoniomv7/gb300-microbench 1f27767, a B300: memory_paths, LDGSTS")),
            Key::MatrixLatency => (270.0, Fitted(ROUNDS_B300)),
            Key::PairLatency => (304.0, Fitted(ROUNDS_B300)),
            Key::ClusterFence => (b200.get(key), Fitted(ROUNDS_B300)),
            _ => (b200.get(key), Assumed("as on a B200")),
        })
    }
}

impl Card {
    /// A GPU of compute capability 12.x. Its number of SMs, clock (MHz), bandwidth (GB/s) and L2 size (MB) come from
    /// its data sheet. Others measured latencies of two of these GPUs, and the read bandwidth of one. Most other constants
    /// are assumptions, and no prediction was compared with one of these GPUs.
    fn sm_120(name: &'static str, sms: u32, arch: &'static str, clock: f64, dram: f64, l2: f64) -> Card {
        use Origin::{Assumed, Published};
        let datasheet = Published("NVIDIA RTX Blackwell GPU Architecture, and the product page");
        let like_hopper = Assumed("as on an H100");
        let latency = |on_5090: f64, on_pro_6000: f64, otherwise: (f64, Origin)| match name {
            "rtx-5090" => (on_5090, Published(PUBLIC_LATENCIES)),
            "rtx-pro-6000" => (on_pro_6000, Published(PUBLIC_LATENCIES)),
            "rtx-5070-ti" => (on_5090, Assumed("as on an RTX 5090")),
            _ => otherwise,
        };
        Card::new(name, sms, arch, |key| match key {
            Key::Clock => (clock, datasheet),
            Key::LaunchFloor => (5000.0, Assumed("between the values of a B200 and an H200")),
            Key::LaunchGap => (597.0, Assumed("as on an H200")),
            Key::DependentStart => (483.0, Assumed("as on an H200")),
            Key::CtaStart => (300.0, Assumed("parameters and barriers must be fetched again")),
            Key::GridEnd => (430.0, Assumed("as on an H200")),
            Key::SharedLatency => (29.0, like_hopper),
            Key::L1Latency => latency(44.0, 44.0, (38.0, like_hopper)),
            Key::L1Part => (0.0, Assumed("not measured; taken as zero")),
            Key::SharedBytes => (128.0, Assumed("32 banks of 4 bytes")),
            Key::L2Latency => latency(360.0, 352.0, (300.0, Assumed("between the values of an H100 and a B200"))),
            Key::FarLatency => (0.0, Published("NVIDIA RTX Blackwell GPU Architecture: one die")),
            Key::DramLatency => latency(936.0, 864.0, (800.0, Assumed("LPDDR5X is slower than HBM"))),
            Key::TmaLatency => (170.0, like_hopper),
            Key::TmaBytes => (37.0, Assumed("as on a B200")),
            Key::Intake => (64.0, Assumed("64 bytes per cycle from L2 to an SM, as on every GPU since Volta")),
            Key::L2Bytes => (f64::from(sms) * 32.0 * clock / 1000.0, Assumed("32 bytes per cycle and SM")),
            Key::Neighbors => (1.0, Assumed("not measured; taken as no sharing")),
            Key::DramBytes if name == "rtx-5090" => (1674.5, Published(PUBLIC_READS)),
            Key::DramBytes => (dram * 0.92, Assumed("92 % of the data sheet, which reads reach on other GPUs")),
            Key::DramBanks => (512.0, Assumed("as on an H200; no effect with a dram-page of 0")),
            Key::DramPage => (0.0, Assumed("not measured; taken as zero")),
            Key::L2Capacity => (l2, datasheet),
            Key::MbarrierWake => (20.0, Assumed("as long as a load of shared memory")),
            Key::BarrierLatency => (20.0, Assumed("as long as a load of shared memory")),
            Key::ClusterLatency => (180.0, like_hopper),
            Key::ClusterBarrier => (180.0, Assumed("as long as an arrival in another CTA")),
            Key::ClusterFence => (0.0, Assumed("not measured; taken as zero")),
            Key::GpuFence => (GPU_FENCE_H200, Assumed("as on an H200")),
            Key::SystemFence => (SYSTEM_FENCE_H200, Assumed("as on an H200")),
            // A quarter of the FP4 rate: 16 cycles for a product of 16 × 8 × 64 in a quarter of an SM.
            Key::TensorRate => (
                512.0,
                Assumed("a quarter of the data sheet's FP4 rate; f16 with f32 accumulators may take twice as long"),
            ),
            Key::MmaLatency => (18.0, Assumed("as on an H200")),
            Key::MatrixLatency => (18.0, Assumed("this GPU has no wgmma")),
            Key::PairLatency => (18.0, Assumed("this GPU has no CTA pairs")),
            Key::MatrixFloor => (16.0, Assumed("this GPU has no wgmma")),
            Key::SumsDelay => (0.0, Assumed("this GPU has no wgmma")),
            Key::Release => (0.0, Assumed("not measured; taken as zero")),
            Key::TmemBytes => (128.0, Assumed("this GPU has no tensor memory")),
            Key::TmemLatency => (30.0, Assumed("this GPU has no tensor memory")),
            Key::CopyBytes => (64.0, Assumed("this GPU has no tensor memory")),
            Key::GenericStall => (2.0, Assumed("two independent instructions between dependent instructions")),
        })
    }
}

impl fmt::Display for Card {
    /// Formats the constants as a Markdown table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| constant | value | unit | what | source |\n|---|---:|---|---|---|")?;
        for &key in Key::ALL {
            let Constant { value, origin } = self.constant(key);
            let origin = match origin {
                Origin::Measured(how) => format!("measured: {how}"),
                Origin::Published(source) => source.to_owned(),
                Origin::Fitted(points) => format!("fitted: {points}"),
                Origin::Assumed(why) => format!("**assumed**: {why}"),
            };
            writeln!(f, "| {} | {value} | {} | {} | {origin} |", key.name(), key.unit(), key.what())?;
        }
        Ok(())
    }
}
