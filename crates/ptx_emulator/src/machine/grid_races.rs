//! Races of one grid in global memory: which accesses were made to which bytes, by threads and asynchronous operations of
//! all clusters. What orders them is in the vector clocks ([`super::race`], [`super::beyond`]).
//!
//! Memory is kept by lines of 128 bytes. A line has records, each of one warp's instruction or one asynchronous operation:
//! which bytes, and which lane touched which of them. A byte has one record of its last write, or several of writes of
//! the same value with no order between, and records of reads since then.
//!
//! What it can miss:
//! - A line keeps [`READS`] records of reads, of one cluster the latest ones. Of more than [`SAME`] writes of the same
//!   value the lowest cluster's and the latest are kept: who knows only of another is said to race with them.
//! - Of strong writes, which do not race with each other, only the last of a byte is kept; strong reads are not kept.
//! - Of lanes that read one byte in one instruction, one is kept. A write after a read by another lane of the same warp
//!   is not looked for: the lanes of a converged warp do not overtake each other.
//! - All records together take at most [`BYTES`]; what a launch touches after that is not looked at, and
//!   [`GridRaces::is_full`] says so.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use super::race::Mode;
use super::scope::{Origin, Scope};

/// Bytes of a line.
pub const LINE: u64 = 128;
/// Bytes that have one digest: what a thread stores at once at most, mostly.
pub const PIECE: u32 = 16;
/// A digest for each piece of a line.
pub type Digests = [u16; (LINE / PIECE as u64) as usize];
/// The most records of reads that a line keeps.
const READS: usize = 16;
/// The most records of writes of the same value that a byte keeps.
const SAME: usize = 16;
/// The most memory that records may take.
pub const BYTES: usize = 2 << 30;
/// Parts of the table, each with a lock.
const PARTS: usize = 256;

/// Bytes of a line that a warp's instruction or an operation accesses.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// The bytes, the lowest bit for the first.
    pub bytes: u128,
    pub origin: Origin,
    /// The thread number of lane 0 of the warp, or the operation's number, in the cluster.
    pub base: u32,
    /// The thread that issued it, if it is an operation.
    pub issuer: Option<u32>,
    /// The lane that would touch the line's first byte; each further piece of 2 to the power of `shift` bytes is the next
    /// lane's.
    pub first_lane: i32,
    pub shift: u32,
    /// The time of the warp or of the operation.
    pub time: u32,
    pub pc: u32,
    pub mode: Mode,
    pub scope: Scope,
    /// Digests of what was written, of each [`PIECE`] bytes of the line.
    pub digests: Digests,
    /// Whether that is known.
    pub has_digests: bool,
}

impl Record {
    /// The lane that touches a byte.
    pub fn lane(&self, byte: u32) -> u32 {
        if self.issuer.is_some() { 0 } else { (self.first_lane + (byte >> self.shift) as i32) as u32 & 31 }
    }

    /// The thread or operation that touches a byte.
    pub fn number(&self, byte: u32) -> u32 {
        self.base + self.lane(byte)
    }

    /// Whether both are known to have written the same in all pieces where they have bytes in common.
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

/// How an accessor knows of an earlier access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// It happened before.
    Known,
    /// A read-modify-write has read of it, and no fence followed.
    Drawn,
    /// It happened before, and no proxy fence lies between.
    Unproxied,
    /// A strong load has read of it, and no fence followed.
    Polled,
    /// Not at all.
    Unknown,
}

/// Two accesses that race: the earlier one and the byte, and how the later one knows of it.
#[derive(Clone, Copy, Debug)]
pub struct Meeting {
    pub earlier: Record,
    pub later: Record,
    /// A byte that both touch.
    pub address: u64,
    pub order: Order,
    /// Both write the same value.
    pub same_value: bool,
    /// The earlier one's cluster has made a strong access that the later one's has read, with no release before.
    pub silent: bool,
    /// They are the load and the swap of a compare-and-swap loop.
    pub guess: bool,
}

impl Meeting {
    /// What cards are known to bear.
    pub fn is_warning(&self) -> bool {
        self.same_value || self.guess || self.order == Order::Drawn
    }

    /// The same whichever side came first: the side that reads is the later one, else that of the higher cluster.
    fn canonical(self) -> Meeting {
        let Meeting { earlier, later, .. } = self;
        let key = |r: &Record| (r.mode.reads(), r.origin.cluster, r.pc);
        if key(&later) >= key(&earlier) { self } else { Meeting { earlier: later, later: earlier, ..self } }
    }

    fn place(&self) -> impl Ord + use<> {
        (self.earlier.origin.cluster, self.later.origin.cluster, self.address)
    }
}

#[derive(Default)]
struct Lines(u64);

impl Hasher for Lines {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, line: u64) {
        self.0 = (self.0 ^ line).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_right(29);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Part = HashMap<u64, Vec<Record>, BuildHasherDefault<Lines>>;

/// Races between clusters, by how grave they are, whether one side reads, and the instructions of both: the first by
/// cluster, and how often. Whichever side came first, two writes are found; a read that its own cluster overwrites may not
/// be.
type Found = BTreeMap<(bool, Order, bool, u32, u32), (Meeting, u64)>;

/// The accesses of a launch, and the races between clusters.
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
    /// Whether accesses were left out, since the records would have taken too much memory.
    pub fn is_full(&self) -> bool {
        self.records.load(Relaxed) >= BYTES / size_of::<Record>()
    }

    /// Keeps a race between clusters until all that ran beside each other have come as far.
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

    /// The races that were kept, the gravest first, each with how often it happened.
    pub fn take(&self) -> Vec<(Meeting, u64)> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *found).into_values().collect()
    }

    /// Records an access of a line. Each earlier access that it meets without order goes to `found`; `order` says how the
    /// accessing lane, given by its byte, knows of an earlier record.
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
        // Of an instruction's writes of the same value the lowest cluster's counts, whichever came first, and no read.
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

/// The worst of what two accesses are to each other on common bytes, if it is a race.
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

/// The writes of all of some bytes that wrote there what another one does.
fn with_its_value<'r>(records: &'r [Record], write: &Record, bytes: u128) -> impl Iterator<Item = &'r Record> {
    let is_such = move |old: &&Record| {
        let are_writes = old.mode == Mode::Write && write.mode == Mode::Write;
        are_writes && old.bytes & bytes == bytes && old.wrote_the_same(write, bytes)
    };
    records.iter().filter(is_such)
}

/// Whether the reader of a race knows of another write of the same value.
fn knows_the_value(records: &[Record], race: &Meeting, order: &dyn Fn(&Record, u32) -> Order) -> bool {
    let common = race.earlier.bytes & race.later.bytes;
    let is_known = |write: &Record| meet(write, &race.later, common, order).is_none();
    race.later.mode.reads() && with_its_value(records, &race.earlier, common).any(is_known)
}

/// Which of the records whose value is written once more stay: all, or the lowest cluster's and the latest.
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
    // Of clusters that race the lowest stays, so that the report does not depend on which came first.
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
