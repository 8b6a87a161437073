//! Accesses of the current instruction to global memory, collected for the search for races.

use super::grid_races::{Digests, LINE, PIECE, Record};
use super::race::Mode;
use super::scope::{Origin, Scope};

/// An access of one lane of the current instruction to global memory, or of several lanes with adjacent bytes in a
/// line.
#[derive(Clone, Copy)]
pub struct Touch {
    /// First lane, and number of lanes.
    pub lane: u32,
    pub lanes: u32,
    pub address: u64,
    /// Bytes per lane.
    pub bytes: u32,
    pub mode: Mode,
    pub digests: Digests,
}

/// Accesses of the current instruction to global memory.
#[derive(Default)]
pub struct Touches {
    pub list: Vec<Touch>,
    /// Scope of the strong accesses.
    pub scope: Scope,
    pub seen: SeenReads,
}

/// Plain reads that the search for races has already checked, so that a warp's repeated read is checked only once. A
/// later writer is compared with the first of the repeated reads. Until the warp's time advances, no writer can be
/// ordered after that read without being ordered after the repeated reads too.
#[derive(Default)]
pub struct SeenReads(Vec<Option<SeenRead>>);

/// Checked reads of a line.
#[derive(Clone, Copy)]
struct SeenRead {
    /// Line, warp, time, and the assignment of lanes to bytes.
    key: (u64, u32, u32, (i32, u32)),
    bytes: u128,
}

impl SeenReads {
    const COUNT: usize = 1024;

    /// Records a read, and returns `true` if the same read was already recorded.
    pub fn again(&mut self, line: u64, record: &Record) -> bool {
        let key = (line, record.base, record.time, (record.first_lane, record.shift));
        self.0.resize(Self::COUNT, None);
        let lanes = record.first_lane.unsigned_abs() as usize * 101;
        let slot = &mut self.0[(line as usize ^ ((record.base / 32) as usize * 37) ^ lanes) % Self::COUNT];
        match slot {
            Some(seen) if seen.key == key => {
                let all = record.bytes & !seen.bytes == 0;
                seen.bytes |= record.bytes;
                all
            }
            _ => {
                *slot = Some(SeenRead { key, bytes: record.bytes });
                false
            }
        }
    }
}

/// Mask of `bytes` bytes of a line, starting at byte `first`.
pub fn bits(first: u32, bytes: u32) -> u128 {
    (u128::MAX >> (LINE as u32 - bytes)) << first
}

/// Adds bytes at a position of a line to the line's digests.
pub fn digest(digests: &mut Digests, first: u32, data: &[u8]) {
    for (chunk, at) in data.chunks(4).zip((first..).step_by(4)) {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        let mixed = (u32::from_le_bytes(word) ^ (at + 1).wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
        let digest = &mut digests[(at / PIECE) as usize % digests.len()];
        *digest = digest.wrapping_add((mixed >> 16) as u16);
    }
}

impl Touch {
    pub fn record(&self, origin: Origin, base: u32, time: u32, pc: u32, scope: Scope) -> Record {
        let first = (self.address % LINE) as u32;
        let bytes = bits(first, self.bytes * self.lanes);
        let (digests, mode, has_digests) = (self.digests, self.mode, self.mode == Mode::Write);
        let shift = if self.lanes > 1 { self.bytes.trailing_zeros() } else { 7 };
        let first_lane = self.lane as i32 - (first >> shift) as i32;
        Record { bytes, origin, base, issuer: None, first_lane, shift, time, pc, mode, scope, digests, has_digests }
    }

    /// Adds the touch to a record of the same instruction and line, if one record can hold both.
    pub fn join(&self, record: &mut Record) -> bool {
        let (first, all) = ((self.address % LINE) as u32, record.bytes);
        let bytes = bits(first, self.bytes);
        if record.mode != self.mode || self.lanes > 1 {
            return false;
        }
        if all & bytes == bytes {
            return self.mode != Mode::Write || (all, record.digests) == (bytes, self.digests);
        }
        let start = all.trailing_zeros();
        let stride = first.wrapping_sub(start);
        let second = record.shift == 7 && stride.is_power_of_two() && stride < LINE as u32;
        let shift = if second { stride.ilog2() } else { record.shift };
        let first_lane = if second { record.first_lane - (start >> shift) as i32 } else { record.first_lane };
        let fits = |first: u32, bytes: u32| first % (1 << shift) + bytes <= 1 << shift;
        let lane = first_lane + (first >> shift) as i32;
        let fitting = fits(first, self.bytes) && (!second || fits(start, all.count_ones()));
        if shift == 7 || all & bytes != 0 || lane != self.lane as i32 || !fitting {
            return false;
        }
        (record.bytes, record.shift, record.first_lane) = (all | bytes, shift, first_lane);
        for (digest, more) in record.digests.iter_mut().zip(self.digests) {
            *digest = digest.wrapping_add(more);
        }
        true
    }
}
