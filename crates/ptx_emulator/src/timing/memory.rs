//! L2 and DRAM, which all SMs share. L2 keeps lines and fetches sectors of them. A fetched sector is present if fewer
//! bytes than the size of L2 have been fetched since its line was last touched.
//!
//! DRAM has banks. Each bank delivers one page at a time. The bank of a page looks random, so a request sometimes waits
//! for a bank while others are idle, and more often when DRAM is busier.

use std::collections::HashMap;

use super::calendar::Calendar;
use super::card::{Card, Key};
use super::work::Range;
use crate::random::mixed;

/// Bytes per sector: the smallest request to DRAM.
const SECTOR: u64 = 32;
/// Sectors per line.
const SECTORS: u64 = 4;
/// Lines per page of the directory.
const PAGE: u64 = 512;
/// Sectors per page of DRAM, which a bank delivers at once: 1 KB (JESD238, HBM3).
const DRAM_PAGE: u64 = 1024 / SECTOR;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A load of threads.
    Load,
    /// A copy into shared memory, bulk or tensor.
    Bulk,
    /// A store. Nothing waits for it.
    Store,
}

/// A request of an SM.
#[derive(Clone, Debug)]
pub struct Request {
    /// Time at which the request leaves the SM.
    pub time: u64,
    pub kind: Kind,
    pub ranges: Vec<Range>,
    /// SMs of the cluster's slot that receive the data.
    pub ctas: Vec<u32>,
    /// Waiting party.
    pub waiter: Waiter,
}

/// Party that waits for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiter {
    /// An asynchronous operation of a cluster, by number.
    Operation {
        cluster: u64,
        id: u64,
    },
    /// Registers of a warp of a cluster.
    Registers {
        cluster: u64,
        warp: u32,
        load: u64,
    },
    Nobody,
}

/// Time at which the data of a request reaches its SM.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Time of the first bytes.
    pub first: u64,
    /// Time of the last bytes.
    pub last: u64,
    pub bytes: u64,
}

/// A line of L2.
#[derive(Clone, Copy, Default)]
struct Line {
    /// Number of sectors that L2 had fetched when the line was last touched.
    touched: u64,
    /// Bit mask of the line's fetched sectors.
    sectors: u8,
}

/// A line in flight to a group of neighboring SMs.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    /// Bit mask of the sectors in flight.
    sectors: u8,
    /// Time at which the last sector arrives.
    until: u64,
}

/// Banks of DRAM.
struct Banks {
    /// Cycles that a bank takes for a page.
    page: u64,
    /// Time at which each bank becomes free.
    free: Vec<u64>,
}

impl Banks {
    fn new(card: &Card) -> Banks {
        let count = card.get(Key::DramBanks).round().max(1.0) as usize;
        Banks { page: card.cycles(Key::DramPage), free: vec![0; count] }
    }

    /// Waiting time of a request for sectors of a page until the page's bank is free.
    fn wait(&mut self, page: u64, sectors: u64, time: u64) -> u64 {
        let bank = ((mixed(page) >> 32) * self.free.len() as u64) >> 32;
        let free = &mut self.free[bank as usize];
        let start = time.max(*free);
        *free = start + self.page * sectors / DRAM_PAGE;
        start - time
    }
}

/// L2 and DRAM.
pub struct Memory {
    pub l2: Calendar,
    pub dram: Calendar,
    banks: Banks,
    l2_latency: u64,
    far_latency: u64,
    dram_latency: u64,
    tma_latency: u64,
    tma_bytes: f64,
    /// Size of L2 in sectors.
    capacity: u64,
    /// Number of sectors fetched so far.
    fetched: u64,
    lines: HashMap<u64, Box<[Line; PAGE as usize]>>,
    /// Number of SMs that share the delivery of a line if they request it while it is in flight to one of them.
    neighbors: u32,
    /// Lines in flight, by group of neighbors and line.
    under_way: HashMap<(u32, u64), UnderWay>,
    /// Bytes delivered by L2, and the bytes of them that came from DRAM.
    pub bytes: u64,
    pub missed: u64,
}

impl Memory {
    /// An empty L2 in front of a GPU's DRAM.
    pub fn new(card: &Card) -> Memory {
        Memory {
            l2: Calendar::new(card.bytes_per_cycle(Key::L2Bytes)),
            dram: Calendar::new(card.bytes_per_cycle(Key::DramBytes)),
            banks: Banks::new(card),
            l2_latency: card.cycles(Key::L2Latency),
            far_latency: card.cycles(Key::FarLatency),
            dram_latency: card.cycles(Key::DramLatency),
            tma_latency: card.cycles(Key::TmaLatency),
            tma_bytes: card.get(Key::TmaBytes),
            capacity: (card.get(Key::L2Capacity) * 1e6) as u64 / SECTOR,
            fetched: 0,
            lines: HashMap::new(),
            neighbors: card.get(Key::Neighbors) as u32,
            under_way: HashMap::new(),
            bytes: 0,
            missed: 0,
        }
    }

    /// Minimum time between a request and its data. SMs affect each other no sooner than this.
    pub fn window(card: &Card) -> u64 {
        card.cycles(Key::L2Latency)
    }

    /// Serves a request of an SM. Requests should come roughly in order of time.
    pub fn serve(&mut self, request: &Request, multiprocessor: u32) -> Arrival {
        let mut time = request.time;
        if request.kind == Kind::Bulk {
            time += self.tma_latency;
        }
        let fetched = self.fetched;
        let (mut bytes, mut wait) = (0, 0);
        let (mut near, mut far) = (false, false);
        for &(address, length) in &request.ranges {
            bytes += u64::from(length);
            let (from, to) = (address / SECTOR, (address + u64::from(length)).div_ceil(SECTOR));
            for page in from / DRAM_PAGE..to.div_ceil(DRAM_PAGE) {
                let is_far = is_far(page, multiprocessor);
                (near, far) = (near || !is_far, far || is_far);
                let missing = self.touch(from.max(page * DRAM_PAGE), to.min((page + 1) * DRAM_PAGE));
                if missing > 0 && request.kind != Kind::Store {
                    wait = wait.max(self.banks.wait(page, missing, time));
                }
            }
        }
        let missed = (self.fetched - fetched) * SECTOR;
        if request.kind == Kind::Store {
            // L2 accepts stores. They reach DRAM at some later time.
            self.bytes += bytes;
            let last = self.l2.serve(time, bytes) + self.l2_latency;
            return Arrival { first: last, last, bytes: 0 };
        }
        let (delivered, until) = self.delivered(request, multiprocessor);
        self.bytes += delivered;
        self.missed += missed;
        let alone = match request.kind {
            Kind::Bulk => (bytes as f64 / self.tma_bytes) as u64,
            _ => 0,
        };
        let mut first = time + self.l2_latency + if near { 0 } else { self.far_latency };
        let mut last = self.l2.serve(time, delivered) + self.l2_latency + if far { self.far_latency } else { 0 };
        if missed > 0 {
            first = time + self.dram_latency;
            last = last.max(self.dram.serve(time, missed).max(time + wait) + self.dram_latency);
        }
        last = last.max(first + alone).max(until);
        self.send(request, multiprocessor, last);
        Arrival { first, last, bytes }
    }

    /// Sectors that a request touches: lines with bit masks.
    fn sectors(request: &Request) -> impl Iterator<Item = (u64, u8)> {
        request.ranges.iter().flat_map(|&(address, length)| {
            let (from, to) = (address / SECTOR, (address + u64::from(length)).div_ceil(SECTOR));
            (from / SECTORS..to.div_ceil(SECTORS)).map(move |line| (line, asked(from, to, line)))
        })
    }

    /// Bytes of a request that L2 delivers to its SM, and arrival time of the bytes that are already in flight to a
    /// neighbor.
    fn delivered(&self, request: &Request, multiprocessor: u32) -> (u64, u64) {
        let bytes = request.ranges.iter().map(|&(_, length)| u64::from(length)).sum();
        if self.neighbors < 2 {
            return (bytes, 0);
        }
        let (mut shared, mut until) = (0, 0);
        for (line, asked) in Self::sectors(request) {
            if let Some(line) = self.under_way.get(&(self.together(multiprocessor), line))
                && line.until > request.time
                && line.sectors & asked == asked
            {
                shared += u64::from(asked.count_ones()) * SECTOR;
                until = until.max(line.until);
            }
        }
        (bytes.saturating_sub(shared), until)
    }

    /// Records that the lines of a request are in flight.
    fn send(&mut self, request: &Request, multiprocessor: u32, until: u64) {
        if self.neighbors < 2 {
            return;
        }
        /// Number of lines that may be kept after their arrival.
        const MANY: usize = 1 << 16;
        if self.under_way.len() > MANY {
            self.under_way.retain(|_, line| line.until > request.time);
        }
        let together = self.together(multiprocessor);
        for (line, asked) in Self::sectors(request) {
            let line = self.under_way.entry((together, line)).or_insert(UnderWay { sectors: 0, until: 0 });
            if line.until <= request.time {
                *line = UnderWay { sectors: asked, until };
            } else if line.sectors & asked != asked {
                *line = UnderWay { sectors: line.sectors | asked, until: line.until.max(until) };
            }
        }
    }

    /// Group of neighbors that an SM belongs to.
    fn together(&self, multiprocessor: u32) -> u32 {
        multiprocessor / self.neighbors
    }

    /// Touches the sectors `from..to` and fetches the missing sectors. Returns the number of fetched sectors.
    fn touch(&mut self, from: u64, to: u64) -> u64 {
        let fetched = self.fetched;
        for line in from / SECTORS..to.div_ceil(SECTORS) {
            let asked = asked(from, to, line);
            let page = self.lines.entry(line / PAGE).or_insert_with(|| Box::new([Line::default(); PAGE as usize]));
            let line = &mut page[(line % PAGE) as usize];
            if self.fetched - line.touched > self.capacity {
                line.sectors = 0;
            }
            self.fetched += u64::from((asked & !line.sectors).count_ones());
            *line = Line { touched: self.fetched, sectors: line.sectors | asked };
        }
        self.fetched - fetched
    }
}

/// Returns `true` if a page of DRAM and an SM are on different dies. The page's die is drawn from its number.
fn is_far(page: u64, multiprocessor: u32) -> bool {
    /// Consecutive SMs on the same die, so that a cluster is on one die.
    const TOGETHER: u32 = 16;
    mixed(page) & 1 != u64::from(multiprocessor / TOGETHER % 2)
}

/// Bit mask of the sectors of a line that are in `from..to`.
fn asked(from: u64, to: u64, line: u64) -> u8 {
    let first = from.max(line * SECTORS) % SECTORS;
    let count = to.min((line + 1) * SECTORS) - line * SECTORS - first;
    ((1u8 << count) - 1) << first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(memory: &mut Memory, time: u64, address: u64, bytes: u32) -> u64 {
        let request =
            Request { time, kind: Kind::Load, ranges: vec![(address, bytes)], ctas: vec![0], waiter: Waiter::Nobody };
        memory.serve(&request, 0).last - time
    }

    #[test]
    fn repeated_read_comes_from_l2() {
        let card = Card::named("h200").unwrap();
        let mut memory = Memory::new(&card);
        let (first, again) = (read(&mut memory, 0, 4096, 128), read(&mut memory, 5000, 4096, 128));
        assert!(first >= card.cycles(Key::DramLatency), "{first}");
        assert!((card.cycles(Key::L2Latency)..card.cycles(Key::DramLatency)).contains(&again), "{again}");
    }

    #[test]
    fn half_of_the_pages_are_on_the_other_die() {
        let card = Card::named("b200").unwrap();
        let mut memory = Memory::new(&card);
        let mut far = 0;
        for page in 0..1000 {
            read(&mut memory, page * 10_000, page * 1024, 128);
            let again = read(&mut memory, page * 10_000 + 5000, page * 1024, 128) - card.cycles(Key::L2Latency);
            far += u32::from(again >= card.cycles(Key::FarLatency));
        }
        assert!((450..550).contains(&far), "{far}");
        read(&mut memory, 20_000_000, 0, 65536);
        let both = read(&mut memory, 20_005_000, 0, 65536);
        assert!(both >= card.cycles(Key::L2Latency) + card.cycles(Key::FarLatency), "{both}");
    }

    #[test]
    fn lines_are_fetched_once_in_parts_of_any_size() {
        let card = Card::named("h200").unwrap();
        for part in [16, 32, 64, 128] {
            let mut memory = Memory::new(&card);
            (0..1024 / part).for_each(|n| _ = read(&mut memory, 0, n * part, part as u32));
            assert_eq!(memory.missed, 1024, "parts of {part} bytes");
        }
    }

    #[test]
    fn neighbors_share_a_line_in_flight() {
        let card = Card::named("h200").unwrap();
        let delivered = |second: u32, late: u64| {
            let mut memory = Memory::new(&card);
            for (multiprocessor, time) in [(0, 0), (second, late)] {
                let ranges = vec![(4096, 128)];
                let request = Request { time, kind: Kind::Load, ranges, ctas: vec![0], waiter: Waiter::Nobody };
                memory.serve(&request, multiprocessor);
            }
            memory.bytes
        };
        let latency = card.cycles(Key::DramLatency);
        assert_eq!(delivered(1, latency / 2), 128);
        assert_eq!(delivered(1, 2 * latency), 256);
        assert_eq!(delivered(2, latency / 2), 256);
    }

    /// `stream` of benches/lab/measurements/h200-probes.txt: each of 132 SMs keeps `requests` requests of `bytes` bytes in
    /// flight, at its own addresses. `own`: cycles of the loop's instructions between the end of a request and the
    /// start of the next.
    #[test]
    fn loaded_dram_matches_an_h200() {
        let card = Card::named("h200").unwrap();
        let bulk = card.cycles(Key::MbarrierWake) + 20;
        let loop_of_copies = 758 - card.cycles(Key::DramLatency);
        for (kind, requests, bytes, rate) in [
            (Kind::Load, 4, 1024, 5.11),
            (Kind::Load, 8, 1024, 9.38),
            (Kind::Load, 12, 1024, 12.63),
            (Kind::Load, 16, 1024, 14.61),
            (Kind::Bulk, 1, 2048, 2.40),
            (Kind::Bulk, 1, 4096, 4.35),
            (Kind::Bulk, 2, 4096, 7.86),
            (Kind::Bulk, 4, 4096, 12.60),
            (Kind::Bulk, 8, 4096, 16.56),
            (Kind::Bulk, 1, 8192, 7.31),
            (Kind::Bulk, 2, 8192, 12.28),
            (Kind::Bulk, 4, 8192, 16.78),
        ] {
            let mut memory = Memory::new(&card);
            let own = if kind == Kind::Bulk { bulk } else { loop_of_copies };
            let places = card.sms * requests;
            let mut next: std::collections::BTreeSet<(u64, u32)> = (0..places).map(|n| (u64::from(n), n)).collect();
            let (mut address, mut served, rounds) = (0, 0, 40 * u64::from(places));
            let mut time = 0;
            while served < rounds {
                let place;
                (time, place) = next.pop_first().unwrap();
                let ranges = vec![(address, bytes)];
                let request = Request { time, kind, ranges, ctas: vec![0], waiter: Waiter::Nobody };
                next.insert((memory.serve(&request, place / requests).last + own, place));
                (address, served) = (address + u64::from(bytes), served + 1);
            }
            let modeled = (served * u64::from(bytes)) as f64 / time as f64 / f64::from(card.sms);
            let error = modeled / rate - 1.0;
            println!(
                "{kind:?} {requests} x {bytes}: {modeled:.2} bytes per cycle, measured {rate}, {:+.1} %",
                100.0 * error
            );
            assert!(error.abs() < 0.05, "{kind:?} {requests} x {bytes}: {modeled:.2} bytes per cycle, measured {rate}");
        }
    }

    #[test]
    fn data_larger_than_l2_is_read_again() {
        let card = Card::named("h200").unwrap().scaled(Key::L2Capacity, 1e-4);
        let mut memory = Memory::new(&card);
        for n in 0..2 {
            for line in 0..100 {
                read(&mut memory, n * 100_000, line * 128, 128);
            }
        }
        assert_eq!(memory.missed, 200 * 128);
    }
}
