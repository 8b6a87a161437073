//! Races between accesses of one grid to global memory, by threads and asynchronous operations of all clusters. The
//! vector clocks ([`super::race`], [`super::beyond`]) hold the order of the accesses.
//!
//! Memory is tracked in lines of 128 bytes. A line has records. Each record describes one instruction of a warp or one
//! asynchronous operation: the bytes accessed, and the lane that touched each byte. A byte has one record of its last
//! write, or several records of unordered writes of the same value, and records of the reads since then.
//!
//! Limits:
//! - A line keeps [`READS`] records of reads, and for each cluster only the latest. Among more than [`SAME`] writes of
//!   the same value, the records of the lowest cluster and of the latest write are kept. A reader that knows only of
//!   another write is reported as racing.
//! - Strong writes do not race with each other, so only the last strong write of a byte is kept. Strong reads are not
//!   kept.
//! - If several lanes read a byte in one instruction, one lane is kept. A write after a read by another lane of the
//!   same warp is not checked: the lanes of a converged warp do not overtake each other.
//! - All records together take at most [`BYTES`]. Later accesses of the launch are not checked, and
//!   [`GridRaces::is_full`] returns `true`. [`GridRaces::is_full`] says so.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use rustc_hash::FxHashMap;

use super::race::Mode;
use super::scope::{Origin, Scope};

/// Bytes per line.
pub const LINE: u64 = 128;
/// Bytes per digest: usually the maximum that a thread stores at once.
pub const PIECE: u32 = 16;
/// One digest per piece of a line.
pub type Digests = [u16; (LINE / PIECE as u64) as usize];
/// Maximum number of read records per line.
const READS: usize = 16;
/// Maximum number of records per byte for writes of the same value.
const SAME: usize = 16;
/// Maximum size of all records in bytes.
pub const BYTES: usize = 2 << 30;
/// Number of parts of the table. Each part has a lock.
const PARTS: usize = 256;

/// Bytes of a line that an instruction of a warp, or an operation, accesses.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Mask of the bytes. The lowest bit is the first byte.
    pub bytes: u128,
    pub origin: Origin,
    /// Number, in the cluster, of the warp's lane 0 or of the operation.
    pub base: u32,
    /// Thread that issued the operation. `None`: the access is not an asynchronous operation.
    pub issuer: Option<u32>,
    /// Lane that would touch the line's first byte. Each further piece of `1 << shift` bytes belongs to the next lane.
    pub first_lane: i32,
    pub shift: u32,
    /// Time of the warp or of the operation.
    pub time: u32,
    pub pc: u32,
    pub mode: Mode,
    pub scope: Scope,
    /// Digests of the written bytes, one per [`PIECE`] bytes of the line.
    pub digests: Digests,
    /// `true` if the digests are known.
    pub has_digests: bool,
}

impl Record {
    /// Lane that touches a byte.
    pub fn lane(&self, byte: u32) -> u32 {
        if self.issuer.is_some() { 0 } else { (self.first_lane + (byte >> self.shift) as i32) as u32 & 31 }
    }

    /// Number of the thread or operation that touches a byte.
    pub fn number(&self, byte: u32) -> u32 {
        self.base + self.lane(byte)
    }

    /// Whether both records are known to write the same bytes in every piece of their common bytes.
    fn wrote_the_same(&self, other: &Record, common: u128) -> bool {
        let is_same_in = |n: usize| {
            let piece = ((1 << PIECE) - 1) << (n as u32 * PIECE);
            common & piece == 0 || self.digests[n] == other.digests[n] && self.bytes & piece == other.bytes & piece
        };
        self.has_digests && other.has_digests && (0..self.digests.len()).all(is_same_in)
    }

    fn is_strong_with(&self, other: &Record) -> bool {
        self.mode.is_strong() && other.mode.is_strong() && self.origin.shares(other.origin, self.scope.min(other.scope))
    }

    pub fn same_warp(&self, other: &Record) -> bool {
        self.origin.cluster == other.origin.cluster && self.base == other.base && self.issuer == other.issuer
    }

    fn same_lanes(&self, other: &Record) -> bool {
        self.same_warp(other) && (self.first_lane, self.shift) == (other.first_lane, other.shift)
    }
}

/// Relation of a later access to an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// The earlier access happened before.
    Known,
    /// A read-modify-write has observed the earlier access, without a fence after it.
    Drawn,
    /// The earlier access happened before, but no proxy fence separates the two.
    Unproxied,
    /// A strong load has observed the earlier access, without a fence after it.
    Polled,
    /// The accesses are not ordered.
    Unknown,
}

/// Two racing accesses, with a common byte and their relation.
#[derive(Clone, Copy, Debug)]
pub struct Meeting {
    pub earlier: Record,
    pub later: Record,
    /// Address of a byte that both access.
    pub address: u64,
    pub order: Order,
    /// `true` if both write the same value.
    pub same_value: bool,
    /// `true` if the later cluster has observed a strong access of the earlier cluster that had no release before it.
    pub silent: bool,
    /// `true` if the accesses are the load and the swap of a compare-and-swap loop.
    pub guess: bool,
}

impl Meeting {
    /// Whether GPUs are known to tolerate the race.
    pub fn is_warning(&self) -> bool {
        self.same_value || self.guess || self.order == Order::Drawn
    }

    /// A form that does not depend on which access came first: the later access is the reader, or else the access of
    /// the higher cluster.
    fn canonical(self) -> Meeting {
        let Meeting { earlier, later, .. } = self;
        let key = |r: &Record| (r.mode.reads(), r.origin.cluster, r.pc);
        if key(&later) >= key(&earlier) { self } else { Meeting { earlier: later, later: earlier, ..self } }
    }

    fn place(&self) -> impl Ord + use<> {
        (self.earlier.origin.cluster, self.later.origin.cluster, self.address)
    }
}

type Part = FxHashMap<u64, Vec<Record>>;

/// Races between clusters, by severity, by whether one access reads, and by both instructions. Each entry holds the
/// first race by cluster and the number of races. Races between two writes are found whichever came first. A read that
/// its own cluster overwrites may be missed.
type Found = BTreeMap<(bool, Order, bool, u32, u32), (Meeting, u64)>;

/// Accesses of a launch, and races between clusters.
pub struct GridRaces {
    parts: Box<[Mutex<Part>]>,
    records: AtomicUsize,
    found: Mutex<Found>,
}

impl Default for GridRaces {
    fn default() -> Self {
        let parts = (0..PARTS).map(|_| Mutex::default()).collect();
        GridRaces { parts, records: AtomicUsize::new(0), found: Mutex::default() }
    }
}

impl GridRaces {
    /// Whether accesses were left out because the records would have taken too much memory.
    pub fn is_full(&self) -> bool {
        self.records.load(Relaxed) >= BYTES / size_of::<Record>()
    }

    /// Keeps a race between clusters until all clusters that run at the same time have reached the same point.
    pub fn keep(&self, meeting: Meeting) {
        let meeting = meeting.canonical();
        let key =
            (meeting.is_warning(), meeting.order, meeting.later.mode.reads(), meeting.earlier.pc, meeting.later.pc);
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, times) = found.entry(key).or_insert((meeting, 0));
        *times += 1;
        if meeting.place() < first.place() {
            *first = meeting;
        }
    }

    /// Takes the kept races, gravest first, each with its number of occurrences.
    pub fn take(&self) -> Vec<(Meeting, u64)> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *found).into_values().collect()
    }

    /// Records an access of a line. Each unordered earlier access is added to `found`. `order` returns the relation of
    /// the accessing lane, given by its byte, to an earlier record.
    pub fn access(&self, line: u64, access: Record, order: &dyn Fn(&Record, u32) -> Order, found: &mut Vec<Meeting>) {
        let mut part =
            self.parts[(line as usize ^ line as usize >> 8) % PARTS].lock().unwrap_or_else(PoisonError::into_inner);
        let records = match part.get_mut(&line) {
            Some(records) => records,
            None if self.is_full() => return,
            None => part.entry(line).or_default(),
        };
        let mut unordered = false;
        let mut same = Vec::new();
        for (n, earlier) in records.iter().enumerate() {
            let common = earlier.bytes & access.bytes;
            if common != 0
                && let Some((how, byte, same_value)) = meet(earlier, &access, common, order)
            {
                let address = line * LINE + u64::from(byte);
                let (earlier, later) = (*earlier, access);
                let same_value =
                    same_value || earlier.mode.reads() && with_its_value(records, &access, common).next().is_some();
                let meeting = Meeting { earlier, later, address, order: how, same_value, silent: false, guess: false };
                if same_value {
                    same.push((n, meeting));
                } else if !knows_the_value(records, &meeting, order) {
                    unordered = true;
                    found.push(meeting);
                }
            }
        }
        let kept = keep_same(records, &same);
        // If one instruction writes the same value in several clusters, the lowest cluster's record is kept, in any
        // order of arrival. Reads are not kept.
        if !kept.is_empty() {
            same.retain(|(_, meeting)| !meeting.earlier.mode.reads());
        }
        same.sort_by_key(|(_, meeting)| (meeting.earlier.pc, meeting.earlier.origin.cluster));
        same.dedup_by_key(|(_, meeting)| meeting.earlier.pc);
        found.extend(same.into_iter().map(|(_, meeting)| meeting));
        let before = records.len();
        match access.mode {
            Mode::StrongRead => {}
            Mode::Read | Mode::SameValue => add_read(records, access),
            Mode::Write | Mode::Atomic => add_write(records, access, unordered, &kept),
        }
        match records.len() {
            after if after >= before => _ = self.records.fetch_add(after - before, Relaxed),
            after => _ = self.records.fetch_sub(before - after, Relaxed),
        }
    }
}

/// The worst relation of two accesses on their common bytes, if it is a race.
fn meet(
    earlier: &Record,
    later: &Record,
    common: u128,
    order: &dyn Fn(&Record, u32) -> Order,
) -> Option<(Order, u32, bool)> {
    if earlier.mode.reads() && (later.mode.reads() || earlier.same_warp(later) && earlier.issuer.is_none())
        || earlier.is_strong_with(later)
        || earlier.same_lanes(later) && earlier.issuer.is_none()
    {
        return None;
    }
    let same_instruction = earlier.same_warp(later) && (earlier.time, earlier.pc) == (later.time, later.pc);
    let both_plain = earlier.mode == Mode::Write && later.mode == Mode::Write;
    let same_value = both_plain && earlier.wrote_the_same(later, common);
    if same_instruction && same_value {
        return None;
    }
    let piece = 1u128.checked_shl(1 << earlier.shift.min(later.shift).min(7)).map_or(u128::MAX, |end| end - 1);
    let size = 1 << earlier.shift.min(later.shift).min(7);
    let mut worst: Option<(Order, u32)> = None;
    let mut rest = common;
    while rest != 0 {
        let byte = rest.trailing_zeros();
        rest &= !(piece << (byte / size * size));
        let own = earlier.number(byte) == later.number(byte) && earlier.same_warp(later) && earlier.issuer.is_none();
        let order = if own { Order::Known } else { order(earlier, byte) };
        if order != Order::Known && worst.is_none_or(|(worst, _)| order > worst) {
            worst = Some((order, byte));
        }
    }
    worst.map(|(order, byte)| (order, byte, same_value))
}

fn add_read(records: &mut Vec<Record>, access: Record) {
    for old in records.iter_mut().filter(|old| old.mode.reads() && old.same_warp(&access)) {
        let same = old.same_lanes(&access);
        if same && (old.time, old.pc) == (access.time, access.pc) {
            old.bytes |= access.bytes;
            return;
        }
        if old.bytes & !access.bytes == 0 && same {
            *old = access;
            return;
        }
    }
    if records.iter().filter(|old| old.mode.reads()).count() < READS {
        records.push(access);
        return;
    }
    let own = |old: &&mut Record| old.mode.reads() && old.origin.cluster == access.origin.cluster;
    if let Some(old) = records.iter_mut().find(own) {
        *old = access;
    }
}

/// Writes, covering all of some bytes, that wrote the same values as `write`.
fn with_its_value<'r>(records: &'r [Record], write: &Record, bytes: u128) -> impl Iterator<Item = &'r Record> {
    let is_such = move |old: &&Record| {
        let are_writes = old.mode == Mode::Write && write.mode == Mode::Write;
        are_writes && old.bytes & bytes == bytes && old.wrote_the_same(write, bytes)
    };
    records.iter().filter(is_such)
}

/// Whether the reader of a race is ordered after another write of the same value.
fn knows_the_value(records: &[Record], race: &Meeting, order: &dyn Fn(&Record, u32) -> Order) -> bool {
    let common = race.earlier.bytes & race.later.bytes;
    let is_known = |write: &Record| meet(write, &race.later, common, order).is_none();
    race.later.mode.reads() && with_its_value(records, &race.earlier, common).any(is_known)
}

/// Records that stay when their value is written once more: all, or the lowest cluster's record and the latest.
fn keep_same(records: &[Record], same: &[(usize, Meeting)]) -> Vec<usize> {
    let writes = same.iter().filter(|(_, meeting)| !meeting.earlier.mode.reads());
    let mut kept: Vec<usize> = writes.map(|&(n, _)| n).collect();
    if kept.len() >= SAME {
        let lowest = kept.iter().copied().min_by_key(|&n| records[n].origin.cluster);
        let oldest = kept.iter().position(|&n| Some(n) != lowest);
        oldest.map(|at| kept.remove(at));
    }
    kept
}

fn add_write(records: &mut Vec<Record>, access: Record, unordered: bool, same: &[usize]) {
    // Among racing clusters the lowest stays, so that the report does not depend on which came first.
    let stays = |old: &Record| unordered && old.origin.cluster < access.origin.cluster && !old.mode.reads();
    let kept = records.iter().filter(|old| stays(old)).fold(0, |bytes, old| bytes | old.bytes);
    let access = Record { bytes: access.bytes & !kept, ..access };
    let mut numbers = 0..;
    records.retain_mut(|old| {
        if numbers.next().is_some_and(|n| same.contains(&n)) {
            return true;
        }
        let rest = old.bytes & !access.bytes;
        if rest != old.bytes {
            old.bytes = rest;
        }
        rest != 0
    });
    if access.bytes == 0 {
        return;
    }
    let joins = |old: &&mut Record| {
        old.same_lanes(&access) && old.mode == access.mode && (old.time, old.pc) == (access.time, access.pc)
    };
    match records.iter_mut().find(joins) {
        Some(old) => {
            old.bytes |= access.bytes;
            old.digests = std::array::from_fn(|n| old.digests[n].wrapping_add(access.digests[n]));
        }
        None => records.push(access),
    }
}
