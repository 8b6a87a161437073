//! The probes: launches, measurements, and checks of the computed results.

use std::cell::Cell;

use anyhow::{Result, ensure};

use crate::gpu::{Gpu, Grid, ROW_BYTES, Tensor, Value};
use crate::lines::Lines;

/// Amounts of work.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Values per line.
    pub repeats: usize,
    /// Bytes that probes of DRAM go through. At the end they start again; by then L2 has dropped the first bytes.
    memory: u64,
    /// Bytes that all threads together load.
    read: u64,
    /// Bytes that probes of L2 go through.
    l2: u64,
    /// Number of links in a chain of loads.
    links: u32,
    /// Approximate number of iterations of a loop.
    turns: u32,
    /// Number of timed copies per CTA.
    copies: u32,
    /// Number of timed copies per CTA, in the probe where neighboring CTAs share lines.
    shared_copies: u32,
    /// Cycles of a kernel, long enough to prepare the next kernel.
    work: u64,
    /// Number of consecutive launches in a graph.
    launches: usize,
}

impl Sizes {
    /// Sizes for a GPU.
    pub const FULL: Sizes = Sizes {
        repeats: 15,
        memory: 4 << 30,
        read: 4 << 30,
        l2: 8 << 20,
        links: 4096,
        turns: 512,
        copies: 64,
        shared_copies: 1024,
        work: 8000,
        launches: 101,
    };

    /// Little work per probe, for the emulator. Probes read DRAM only if L2 has less than half of `memory`.
    pub const QUICK: Sizes = Sizes {
        repeats: 1,
        memory: 96 << 20,
        read: 12 << 20,
        l2: 1 << 20,
        links: 64,
        turns: 16,
        copies: 4,
        shared_copies: 8,
        work: 1500,
        launches: 3,
    };
}

/// Bytes per line, and distances to the next link of a chain in lines: in a page that a TLB holds, or in another page.
const LINE: u64 = 128;
const NEAR: u64 = 33;
const FAR: u64 = 2049;

/// Bytes that probes of L1 go through.
const L1_BYTES: u64 = 16 << 10;

/// Bytes that each neighbor copies repeatedly.
const SHARED_BYTES: u64 = 128 << 10;

/// Bytes of shared memory before the stages of the copies.
const BARRIERS: u32 = 1024;

/// Bytes of shared memory per CTA in the probes of `tcgen05`.
const TCGEN05_SHARED: u32 = 52 << 10;

/// Amount that an MMA of ones and three halves, with scales of one and two, adds to a sum.
const MMA_ADDS: u64 = 64 * 3;

/// Columns of the `wgmma` probes. With A in registers only up to 128.
const WGMMA_COLUMNS: [u32; 7] = [8, 16, 32, 64, 128, 192, 256];

/// Columns of the `tcgen05.mma` probes.
const MMA_COLUMNS: [u32; 10] = [8, 16, 32, 64, 80, 96, 112, 128, 192, 256];

/// Returns name and unit of one line.
fn one(name: &str, unit: &'static str) -> [(String, &'static str); 1] {
    [(name.to_owned(), unit)]
}

/// The probes of a GPU.
pub struct Probes<'g> {
    gpu: &'g Gpu,
    sizes: Sizes,
    pub lines: Lines,
    memory: u64,
    l1: u64,
    l2: u64,
    l2_bytes: u64,
    /// Offset of the next unread byte of the memory.
    next: Cell<u64>,
}

impl<'g> Probes<'g> {
    /// Allocates and fills the memory.
    pub fn new(gpu: &'g Gpu, sizes: Sizes) -> Result<Self> {
        let l2_bytes = sizes.l2.max(SHARED_BYTES * u64::from(gpu.multiprocessors));
        let [memory, l1, l2] = [sizes.memory, L1_BYTES, l2_bytes].map(|bytes| gpu.allocate(bytes));
        let (memory, l1, l2) = (memory?, l1?, l2?);
        for (memory, bytes) in [(l1, L1_BYTES), (l2, l2_bytes), (memory, sizes.memory)] {
            let values = [memory, bytes / LINE, NEAR, FAR].map(Value::Long);
            gpu.launch("portable::write_chains", Grid::new(gpu.multiprocessors * 8, 256), &values)?;
        }
        gpu.synchronize()?;
        let lines = Lines::new(sizes.repeats);
        Ok(Self { gpu, sizes, lines, memory, l1, l2, l2_bytes, next: Cell::new(0) })
    }

    /// Fills L2 with the second half of the memory, so that it forgets the first half.
    fn forget(&self) -> Result<()> {
        let (blocks, half) = (self.gpu.multiprocessors, self.sizes.memory / 2);
        let values = [(self.memory + half).into(), rounds(half, blocks).into(), 1_u32.into(), self.gpu.out.into()];
        self.gpu.launch("portable::read", Grid::new(blocks, 256), &values)
    }

    /// Runs every probe that the GPU supports.
    pub fn run(&self) -> Result<()> {
        self.launches()?;
        self.latencies()?;
        self.bandwidths()?;
        self.products()?;
        self.on("copies", Self::overlapping)?;
        self.on("copies", Self::waits)?;
        self.on("copies", Self::copies)?;
        self.on("wgmma", Self::wgmma)?;
        self.on("tcgen05", Self::tcgen05)?;
        self.on("block_scale", Self::block_scale)
    }

    /// Runs the probes of a module if the GPU supports it.
    fn on(&self, module: &str, probes: fn(&Self) -> Result<()>) -> Result<()> {
        if self.gpu.runs(module) {
            return probes(self);
        }
        let (major, minor) = self.gpu.capability;
        println!("# skipped: `{module}` does not run on compute capability {major}.{minor}");
        Ok(())
    }

    /// Returns the address of `bytes` bytes that are not in L2.
    fn fresh(&self, bytes: u64) -> Result<u64> {
        ensure!(bytes <= self.sizes.memory, "{bytes} bytes of DRAM are more than the {} allocated", self.sizes.memory);
        let next = self.next.get();
        let from = if next + bytes > self.sizes.memory { 0 } else { next };
        self.next.set(from + bytes);
        Ok(self.memory + from)
    }

    /// Returns the cycles of a kernel that writes nothing else.
    fn cycles(&self, kernel: &str, grid: Grid, values: &[Value]) -> Result<f64> {
        Ok(self.gpu.ask(kernel, grid, values, 1)?[0] as f64)
    }

    /// Returns the cycles of a kernel, and checks the number that it has computed.
    fn checked(&self, kernel: &str, grid: Grid, values: &[Value], computed: u64) -> Result<f64> {
        let results = self.gpu.ask(kernel, grid, values, 2)?;
        ensure!(results[1] == computed, "{kernel} computed {}, expected {computed}", results[1]);
        Ok(results[0] as f64)
    }

    fn launches(&self) -> Result<()> {
        let (gpu, sms, sizes) = (self.gpu, self.gpu.multiprocessors, self.sizes);
        let spin = |cycles: u64, grid: Grid| gpu.launch("portable::spin", grid, &[cycles.into()]);
        let empty = |grid| move || gpu.launch("portable::empty", grid, &[]);
        self.lines.measure(one("launch-floor", "ns"), || Ok([gpu.timed(empty(Grid::new(1, 32)))?]))?;
        self.lines.measure(one("launch-floor-all", "ns"), || Ok([gpu.timed(empty(Grid::new(sms, 640)))?]))?;
        // The difference of two lengths removes the common overhead.
        let long = sizes.work * 25;
        self.lines.measure(one("clock", "MHz"), || {
            let [shorter, longer] = [long, 5 * long].map(|cycles| gpu.timed(|| spin(cycles, Grid::new(1, 32))));
            Ok([(4 * long) as f64 * 1e3 / (longer? - shorter?)])
        })?;
        for (name, work) in [("launch-gap", sizes.work), ("launch-gap-empty", 0)] {
            self.links(name, work, |_, cycles| spin(cycles, Grid::new(sms, 128)))?;
        }
        // Two CTAs per SM, each so large that an SM holds only one: measures from the end of the first CTA to the start
        // of the second.
        let grid = Grid::new(2 * sms, 128).shared(if gpu.capability.0 == 12 { 96 << 10 } else { 128 << 10 });
        self.lines.measure(one("cta-start", "cycles"), || {
            let values = [sizes.work, gpu.out].map(Value::Long);
            let results = gpu.ask("portable::spin_from", grid, &values, 4 * sms as usize)?;
            let mut blocks: Vec<&[u64]> = results.chunks(2).collect();
            blocks.sort_unstable();
            let pairs = blocks.windows(2).filter(|pair| pair[0][0] == pair[1][0]);
            let mut between: Vec<u64> =
                pairs.map(|pair| (pair[1][1] - pair[0][1]).saturating_sub(sizes.work)).collect();
            ensure!(!between.is_empty(), "no SM had two CTAs");
            between.sort_unstable();
            Ok([between[between.len() / 2] as f64])
        })
    }

    /// Measures grids that start before the previous grid has ended.
    fn overlapping(&self) -> Result<()> {
        let (gpu, sms) = (self.gpu, self.gpu.multiprocessors);
        for (name, triggers) in [("dependent-start+grid-end", 0_u32), ("grid-end", 1)] {
            for (ending, work) in [("", self.sizes.work), ("-empty", 0)] {
                self.links(&format!("{name}{ending}"), work, |n, cycles| {
                    let grid = Grid { overlaps: n > 0, ..Grid::new(sms, 128) };
                    gpu.launch("copies::link", grid, &[triggers.into(), 1_u32.into(), cycles.into()])
                })?;
            }
        }
        Ok(())
    }

    /// Measures the time of a link in a graph of consecutive launches, minus the `work` cycles of its kernel. Launches
    /// in a stream would wait for the host.
    fn links(&self, name: &str, work: u64, link: impl Fn(usize, u64) -> Result<()>) -> Result<()> {
        let (gpu, sizes) = (self.gpu, self.sizes);
        let graph = |links: usize, work: u64| gpu.graph(|| (0..links).try_for_each(|n| link(n, work)));
        let (one_link, many) = (graph(1, work)?, graph(sizes.launches, work)?);
        let longer = graph(sizes.launches, 2 * work)?;
        let ns = |graph: &crate::gpu::Graph<'_>| {
            let times: Result<Vec<f64>> = (0..sizes.repeats.min(5)).map(|_| gpu.timed(|| graph.launch())).collect();
            let mut times = times?;
            times.sort_by(f64::total_cmp);
            Ok::<_, anyhow::Error>(times[times.len() / 2])
        };
        self.lines.measure(one(name, "ns"), || {
            let many = ns(&many)?;
            let spent = (ns(&longer)? - many) / sizes.launches as f64;
            Ok([(many - ns(&one_link)?) / (sizes.launches - 1) as f64 - spent])
        })
    }

    fn latencies(&self) -> Result<()> {
        let (gpu, Sizes { links, turns, .. }) = (self.gpu, self.sizes);
        let (one_warp, out) = (Grid::new(1, 32), Value::from(gpu.out));
        let in_shared = u64::from(links) * 7 % 64 * 4;
        self.measure("shared-latency", links, |probes| {
            probes.checked("portable::chase_shared", one_warp.shared(256), &[links.into(), out], in_shared)
        })?;
        let step = NEAR * LINE;
        self.measure("l1-latency", links, |probes| {
            probes.chase("chase_l1", (probes.l1, L1_BYTES), probes.l1, links, step)
        })?;
        self.measure("l2-latency", links, |probes| {
            // The first chase brings the memory to L2.
            let chase = || probes.chase("chase_l2", (probes.l2, probes.l2_bytes), probes.l2, links, step);
            chase()?;
            chase()
        })?;
        // The other word of each line belongs to another chain, with each link in another page.
        for (name, from, step) in [("dram-latency", 0, step), ("dram-latency-of-1-GB", 8, FAR * LINE)] {
            self.measure(name, links, |probes| {
                probes.forget()?;
                let memory = (probes.memory, probes.sizes.memory);
                probes.chase("chase_l2", memory, probes.memory + from, links, step)
            })?;
        }
        for warps in [1, 4, 16] {
            self.measure(&format!("barrier-latency-{warps}-warps"), turns, |probes| {
                probes.cycles("portable::barriers", Grid::new(1, 32 * warps), &[turns.into(), out])
            })?;
        }
        Ok(())
    }

    /// Measures a line of cycles per operation, for `times` operations.
    fn measure(&self, name: &str, times: u32, cycles: impl Fn(&Self) -> Result<f64>) -> Result<()> {
        self.lines.measure(one(name, "cycles"), || Ok([cycles(self)? / f64::from(times)]))
    }

    /// Returns the cycles of a chain of loads through a memory of `bytes` bytes, whose first line follows its last.
    fn chase(&self, kernel: &str, (memory, bytes): (u64, u64), from: u64, links: u32, step: u64) -> Result<f64> {
        let values = [from.into(), links.into(), self.gpu.out.into()];
        let to = memory + (from - memory + u64::from(links) * step) % bytes;
        self.checked(&format!("portable::{kernel}"), Grid::new(1, 32), &values, to)
    }

    fn bandwidths(&self) -> Result<()> {
        let (gpu, sms, Sizes { turns, read, memory, .. }) = (self.gpu, self.gpu.multiprocessors, self.sizes);
        self.lines.measure(one("shared-bytes", "bytes/cycle"), || {
            let grid = Grid::new(1, 1024).shared(8 << 10);
            let values = [turns.into(), 0_u32.into(), gpu.out.into()];
            let cycles = self.checked("portable::read_shared", grid, &values, u64::from(8 * turns))?;
            Ok([f64::from(1024 * 128 * turns) / cycles])
        })?;
        let rate = |from: u64, bytes: u64, times: u32, blocks: u32| {
            let pieces = rounds(bytes, blocks);
            ensure!(pieces > 0, "{bytes} bytes are less than one round");
            let values = [from.into(), pieces.into(), times.into(), Value::from(gpu.out)];
            let ns = gpu.timed(|| gpu.launch("portable::read", Grid::new(blocks, 256), &values))?;
            Ok([16.0 * (pieces * u64::from(times)) as f64 / ns])
        };
        let (blocks, times) = if read == memory { (8 * sms, 100) } else { (sms, 1) };
        self.lines.measure(one("dram-bandwidth", "GB/s"), || rate(self.fresh(read)?, read, 1, blocks))?;
        self.lines.measure(one("l2-bandwidth-loads", "GB/s"), || {
            rate(self.l2, read.min(self.l2_bytes), times, blocks.min(4 * sms))
        })
    }

    /// Measures products of a warp.
    fn chains(&self, name: &str, module: &str, kind: &str, adds: u64) -> Result<()> {
        let turns = self.sizes.turns / 8;
        for (ending, chains, warps) in
            [("1-chain", 1, 1), ("4-chains", 4, 1), ("4-chains-on-4-warps", 4, 4), ("4-chains-on-8-warps", 4, 8)]
        {
            let entry = format!("{module}::{kind}_{}", if chains == 1 { "1_chain" } else { "4_chains" });
            let grid = Grid::new(1, 32 * warps).shared(128 * warps);
            let computed = u64::from(turns) * 16 * adds;
            self.measure(&format!("{name}-{ending}"), turns * 16, |probes| {
                probes.checked(&entry, grid, &[turns.into(), probes.gpu.out.into()], computed)
            })?;
        }
        Ok(())
    }

    fn products(&self) -> Result<()> {
        self.chains("mma-m16n8k16", "portable", "mma", 16)
    }

    fn block_scale(&self) -> Result<()> {
        self.chains("mma-m16n8k64-mxf4nvf4", "block_scale", "mxf4nvf4", MMA_ADDS)
    }

    /// Measures barriers in shared memory and in clusters.
    fn waits(&self) -> Result<()> {
        let (turns, out) = (self.sizes.turns, self.gpu.out);
        let values = [turns.into(), out.into()];
        // A round has two arrivals.
        self.measure("mbarrier-wake+arrive", 2 * turns, |probes| {
            probes.cycles("copies::ping_pong", Grid::new(1, 64).shared(16), &values)
        })?;
        for (name, entry) in
            [("cluster-store+wake", "copies::cluster_stores"), ("cluster-release+wake", "copies::cluster_arrivals")]
        {
            self.measure(name, 2 * turns, |probes| probes.cycles(entry, Grid::new(2, 32).shared(16), &values))?;
        }
        for (name, releases) in [("cluster-barrier-relaxed", 0_u32), ("cluster-barrier", 1)] {
            self.measure(name, turns, |probes| {
                probes.cycles(
                    "copies::cluster_barriers",
                    Grid::new(2, 32),
                    &[turns.into(), releases.into(), out.into()],
                )
            })?;
        }
        Ok(())
    }

    fn copies(&self) -> Result<()> {
        let (sms, most) = (self.gpu.multiprocessors, if self.gpu.capability.0 == 12 { 96 << 10 } else { 208 << 10 });
        let Sizes { copies: times, shared_copies, .. } = self.sizes;
        // By size, one copy in flight per SM.
        for bytes in [512, 2048, 4096, 8192, 16384, 32768, 65536, 131_072] {
            if bytes <= most {
                self.copy(Source::Dram, bytes, 1, sms, times)?;
            }
        }
        for bytes in [4096, 16384, 65536] {
            self.copy(Source::Dram, bytes, 1, 1, times)?;
        }
        // 4 to 192 KB in flight, in pieces of 2, 4 and 16 KB.
        for (bytes, stages) in
            [(2048, 2), (4096, 2), (4096, 4), (4096, 8), (4096, 12), (16384, 2), (16384, 4), (16384, 8), (16384, 12)]
        {
            if bytes * stages <= most {
                self.copy(Source::Dram, bytes, stages, sms, times)?;
            }
        }
        let more = 16 * times;
        for bytes in [512, 4096, 16384] {
            self.copy(Source::L2, bytes, 1, 1, more)?;
        }
        let deep = if most < 128 << 10 { 4 } else { 8 };
        for stages in [2, 4, 8] {
            if stages <= deep {
                self.copy(Source::L2, 16384, stages, 1, more)?;
            }
        }
        for stages in [1, 2, 4, 8] {
            if stages <= deep {
                self.copy(Source::L2, 16384, stages, sms, times)?;
            }
        }
        // First separate lines per SM, then lines that neighbors share.
        for sharers in [1, 2, 4, 16, sms] {
            self.copy(Source::Shared(sharers), 16384, deep, sms, shared_copies)?;
        }
        for rows in [4, 32, 128, 256] {
            self.tensor_copy(rows, times)?;
        }
        Ok(())
    }

    /// Returns how often `bytes` bytes are read from DRAM: `asked`, or less if there is less memory.
    fn times(&self, asked: u32, bytes: u64) -> u32 {
        asked.min((self.sizes.memory / bytes) as u32)
    }

    /// Measures bulk copies by one thread of each CTA.
    fn copy(&self, from: Source, bytes: u32, stages: u32, blocks: u32, times: u32) -> Result<()> {
        let (gpu, l2, l2_bytes) = (self.gpu, self.l2, self.sizes.l2);
        let each = u64::from(blocks * bytes);
        let times = if from == Source::Dram { self.times(times, each) } else { times };
        let all = each * u64::from(times);
        let grid = Grid::new(blocks, 32).shared(BARRIERS + bytes * stages);
        let name = match from {
            Source::Dram => format!("copy-dram-{bytes}-x{stages}-on-{blocks}"),
            Source::L2 => format!("copy-l2-{bytes}-x{stages}-on-{blocks}"),
            Source::Shared(sharers) => format!("copy-l2-{bytes}-x{stages}-same-for-{sharers}"),
        };
        self.lines.measure([(name.clone(), "cycles"), (format!("{name}-rate"), "GB/s")], || {
            let (address, wrap, sharers) = match from {
                Source::Dram => (self.fresh(all)?, all, 0),
                Source::L2 => (l2, l2_bytes, 0),
                Source::Shared(sharers) => (l2, SHARED_BYTES, sharers),
            };
            let values = [
                address.into(),
                bytes.into(),
                stages.into(),
                times.into(),
                wrap.into(),
                sharers.into(),
                Value::from(gpu.out),
            ];
            let ns = gpu.timed(|| gpu.launch("copies::copies", grid, &values))?;
            let results = gpu.results(3 * blocks as usize)?;
            for block in results.chunks(3) {
                self.check_copied(block[1], block[2])?;
            }
            Ok([median_of_blocks(&results) / f64::from(times), all as f64 / ns])
        })
    }

    /// Checks that the first word of a copied line is the address of the next line of its chain.
    fn check_copied(&self, from: u64, copied: u64) -> Result<()> {
        let next = from + NEAR * LINE;
        // The first line follows the last.
        let wraps = [self.memory, self.l2].iter().any(|memory| (*memory..memory + NEAR * LINE).contains(&copied));
        ensure!(copied == next || wraps, "the copy from {from:#x} brought {copied:#x}, expected {next:#x}");
        Ok(())
    }

    /// Measures boxes of a tensor with rows of 128 bytes, one in flight per SM.
    fn tensor_copy(&self, rows: u32, times: u32) -> Result<()> {
        let (gpu, sms) = (self.gpu, self.gpu.multiprocessors);
        let times = self.times(times, u64::from(sms * rows) * ROW_BYTES);
        let all = sms * times * rows;
        let grid = Grid::new(sms, 32).shared(BARRIERS + rows * ROW_BYTES as u32);
        let name = format!("tensor-copy-dram-{}-x1-on-{sms}", rows * ROW_BYTES as u32);
        self.lines.measure([(name.clone(), "cycles"), (format!("{name}-rate"), "GB/s")], || {
            let bytes = u64::from(all) * ROW_BYTES;
            let address = self.fresh(bytes)?;
            let map = gpu.tensor_map(address, all.into(), rows)?;
            let tensor = Tensor { map, out: gpu.out, rows, stages: 1, times, wrap: all };
            let ns = gpu.timed(|| gpu.launch("copies::tensor_copies", grid, &[Value::Tensor(tensor)]))?;
            let results = gpu.results(3 * sms as usize)?;
            for block in results.chunks(3) {
                self.check_copied(address + block[1] * ROW_BYTES, block[2])?;
            }
            Ok([median_of_blocks(&results) / f64::from(times), bytes as f64 / ns])
        })
    }

    /// Measures products of a warpgroup: the time per additional product, and the rest of a group's time, with its
    /// commit and wait.
    fn wgmma(&self) -> Result<()> {
        const MANY: u32 = 4;
        let groups = self.sizes.turns / 8;
        for (kind, columns) in [("", &WGMMA_COLUMNS[..]), ("rs_", &WGMMA_COLUMNS[..5])] {
            for &n in columns {
                let entry = format!("wgmma::wgmma_{kind}n{n}");
                let name = format!("wgmma-{}n{n}", if kind.is_empty() { "" } else { "rs-" });
                let grid = Grid::new(1, 128).shared((64 + n) * 128);
                self.lines.measure([(name.clone(), "cycles"), (format!("{name}-latency"), "cycles")], || {
                    let group = |eights: u32| {
                        let computed = u64::from(groups * eights) * 8 * 16;
                        let values = [groups.into(), eights.into(), self.gpu.out.into()];
                        Ok::<_, anyhow::Error>(self.checked(&entry, grid, &values, computed)? / f64::from(groups))
                    };
                    let (few, many) = (group(1)?, group(MANY)?);
                    let each = (many - few) / f64::from(8 * (MANY - 1));
                    Ok([each, few - 8.0 * each])
                })?;
            }
        }
        Ok(())
    }

    fn tcgen05(&self) -> Result<()> {
        for (name, entry, blocks) in [
            ("mma-m128", "mma", 1),
            ("mma-pair-m256", "mma_pair", 2),
            ("mma-m128-between-2-cp", "mma_between_copies", 1),
            ("mma-pair-m256-between-2-cp", "mma_pair_between_copies", 2),
        ] {
            for n in MMA_COLUMNS.into_iter().filter(|n| blocks == 1 || n % 16 == 0) {
                self.mma(name, &format!("tcgen05::{entry}"), n, blocks)?;
            }
        }
        let (turns, out) = (self.sizes.turns, self.gpu.out);
        let grid = Grid::new(1, 128).shared(TCGEN05_SHARED);
        self.measure("tcgen05-cp-32x128b-warpx4", 4 * turns, |probes| {
            let [few, many] = [turns, 5 * turns]
                .map(|count| probes.checked("tcgen05::cp", grid, &[count.into(), out.into()], 0x3838_3838));
            Ok(many? - few?)
        })?;
        for shape in ["32x32b.x16", "32x32b.x32", "32x32b.x64", "16x256b.x8"] {
            let entry = shape.replace('.', "_");
            let values = [turns.into(), out.into()];
            let loaded = u64::from(2 * turns);
            self.measure(&format!("tcgen05-ld-{shape}"), turns, |probes| {
                probes.checked(&format!("tcgen05::ld_{entry}"), grid, &values, loaded)
            })?;
            self.measure(&format!("tcgen05-st-{shape}"), turns, |probes| {
                probes.checked(&format!("tcgen05::st_{entry}"), grid, &values, loaded)
            })?;
        }
        self.measure("tcgen05-alloc+dealloc", turns, |probes| {
            probes.cycles("tcgen05::alloc", Grid::new(1, 32).shared(TCGEN05_SHARED), &[turns.into(), out.into()])
        })
    }

    /// Measures MMAs of `n` columns: the time per additional MMA, and the time of one MMA with its commit and wait.
    fn mma(&self, name: &str, entry: &str, n: u32, blocks: u32) -> Result<()> {
        let few = self.sizes.turns / 4;
        let grid = Grid::new(blocks, 128).shared(TCGEN05_SHARED);
        let name = format!("{name}-n{n}");
        self.lines.measure([(name.clone(), "cycles"), (format!("{name}-alone"), "cycles")], || {
            let run = |count: u32, alone: u32| {
                let values = [n.into(), count.into(), alone.into(), self.gpu.out.into()];
                let results = self.gpu.ask(entry, grid, &values, 3)?;
                let computed = u64::from(count + 1) * MMA_ADDS;
                ensure!(results[1..] == [computed; 2], "sums are {:?}, expected {computed}", &results[1..]);
                Ok(results[0] as f64)
            };
            Ok([(run(5 * few, 0)? - run(few, 0)?) / f64::from(4 * few), run(few, 1)? / f64::from(few)])
        })
    }
}

/// Returns the number of 16-byte pieces in `bytes` bytes, in whole rounds of the threads of `read`.
fn rounds(bytes: u64, blocks: u32) -> u64 {
    let round = u64::from(blocks * 256 * 8);
    bytes / 16 / round * round
}

/// Source of copies.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    Dram,
    L2,
    /// L2, with lines that this number of neighbors copy.
    Shared(u32),
}

/// Returns the median of the first of every three numbers.
fn median_of_blocks(results: &[u64]) -> f64 {
    let mut cycles: Vec<u64> = results.chunks(3).map(|block| block[0]).collect();
    cycles.sort_unstable();
    cycles[cycles.len() / 2] as f64
}
