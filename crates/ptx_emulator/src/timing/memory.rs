//! L2 and DRAM, which all multiprocessors share. A line is in L2 if fewer bytes than L2 holds have been fetched since it was
//! last touched.

use std::collections::HashMap;

use super::calendar::Calendar;
use super::card::{Card, Key};
use super::work::Range;

/// Bytes of a line.
const LINE: u64 = 128;
/// Lines of a page of the directory.
const PAGE: u64 = 512;

/// What a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A load of threads.
    Load,
    /// A copy into shared memory, bulk or tensor.
    Bulk,
    /// A store; nobody waits for its data.
    Store,
}

/// A request of a multiprocessor.
#[derive(Clone, Debug)]
pub struct Request {
    /// When it leaves the multiprocessor.
    pub time: u64,
    pub kind: Kind,
    pub ranges: Vec<Range>,
    /// The multiprocessors of the cluster's slot that take the data in.
    pub ctas: Vec<u32>,
    /// Who waits for it.
    pub waiter: Waiter,
}

/// Who waits for a request.
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

/// When the data of a request is at its multiprocessor's door.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The first bytes.
    pub first: u64,
    /// The last.
    pub last: u64,
    pub bytes: u64,
}

/// L2 and DRAM.
pub struct Memory {
    pub l2: Calendar,
    pub dram: Calendar,
    l2_latency: u64,
    dram_latency: u64,
    tma_latency: u64,
    tma_bytes: f64,
    capacity: u64,
    /// Lines fetched so far.
    fetched: u64,
    /// By page: for each line, `fetched` when it was last touched, plus one.
    touched: HashMap<u64, Box<[u64; PAGE as usize]>>,
    /// Bytes that came from L2, and those of them that came from DRAM.
    pub bytes: u64,
    pub missed: u64,
}

impl Memory {
    /// An empty L2 before a card's DRAM.
    pub fn new(card: &Card) -> Memory {
        Memory {
            l2: Calendar::new(card.bytes_per_cycle(Key::L2Bytes)),
            dram: Calendar::new(card.bytes_per_cycle(Key::DramBytes)),
            l2_latency: card.cycles(Key::L2Latency),
            dram_latency: card.cycles(Key::DramLatency),
            tma_latency: card.cycles(Key::TmaLatency),
            tma_bytes: card.get(Key::TmaBytes),
            capacity: (card.get(Key::L2Capacity) * 1e6) as u64 / LINE,
            fetched: 0,
            touched: HashMap::new(),
            bytes: 0,
            missed: 0,
        }
    }

    /// The shortest time between a request and its data: multiprocessors need not look at each other more often.
    pub fn window(card: &Card) -> u64 {
        card.cycles(Key::L2Latency)
    }

    /// Serves a request; requests should come about in order of time.
    pub fn serve(&mut self, request: &Request) -> Arrival {
        let (mut bytes, mut missed) = (0, 0);
        for &(address, length) in &request.ranges {
            bytes += u64::from(length);
            let lines = address / LINE..(address + u64::from(length)).div_ceil(LINE);
            let first_touches = lines.filter(|&line| self.touch(line)).count() as u64;
            missed += (first_touches * LINE).min(u64::from(length));
        }
        self.bytes += bytes;
        let mut time = request.time;
        if request.kind == Kind::Store {
            // L2 takes stores, and DRAM gets them some time.
            let last = self.l2.serve(time, bytes) + self.l2_latency;
            return Arrival { first: last, last, bytes: 0 };
        }
        self.missed += missed;
        let alone = match request.kind {
            Kind::Bulk => {
                time += self.tma_latency;
                (bytes as f64 / self.tma_bytes) as u64
            }
            _ => 0,
        };
        let mut first = time + self.l2_latency;
        let mut last = self.l2.serve(time, bytes) + self.l2_latency;
        if missed > 0 {
            first = time + self.dram_latency;
            last = last.max(self.dram.serve(time, missed) + self.dram_latency);
        }
        Arrival { first, last: last.max(first + alone), bytes }
    }

    /// Touches a line; whether it must be fetched.
    fn touch(&mut self, line: u64) -> bool {
        let page = self.touched.entry(line / PAGE).or_insert_with(|| Box::new([0; PAGE as usize]));
        let last = &mut page[(line % PAGE) as usize];
        let missing = *last == 0 || self.fetched - (*last - 1) > self.capacity;
        self.fetched += u64::from(missing);
        *last = self.fetched + 1;
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(memory: &mut Memory, time: u64, address: u64, bytes: u32) -> u64 {
        let request =
            Request { time, kind: Kind::Load, ranges: vec![(address, bytes)], ctas: vec![0], waiter: Waiter::Nobody };
        memory.serve(&request).last - time
    }

    #[test]
    fn what_was_read_before_comes_from_l2() {
        let card = Card::named("h200").unwrap();
        let mut memory = Memory::new(&card);
        let (first, again) = (read(&mut memory, 0, 4096, 128), read(&mut memory, 5000, 4096, 128));
        assert!(first >= card.cycles(Key::DramLatency), "{first}");
        assert!((card.cycles(Key::L2Latency)..card.cycles(Key::DramLatency)).contains(&again), "{again}");
    }

    #[test]
    fn what_l2_cannot_hold_is_read_again() {
        let card = Card::named("h200").unwrap().scaled(Key::L2Capacity, 1e-4);
        let mut memory = Memory::new(&card);
        for n in 0..2 {
            for line in 0..100 {
                read(&mut memory, n * 100_000, line * LINE, LINE as u32);
            }
        }
        assert_eq!(memory.missed, 200 * LINE);
    }
}
