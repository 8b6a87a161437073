//! Sets of words of an allocation. Several threads may add to a set at the same time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of a word.
const WORD: u64 = 4;
/// Words in one element of a set.
const BITS: u64 = 64;
/// Unit in which distinct bytes are counted: one DRAM sector.
const SECTOR: u64 = 32;

// One byte of an element corresponds to one sector.
const _: () = assert!(SECTOR / WORD == 8);

/// Set of words, one bit per word.
#[derive(Debug)]
pub struct Words(Box<[AtomicU64]>);

impl Words {
    /// Empty set for an allocation of `bytes` bytes.
    pub fn none(bytes: u64) -> Words {
        Words(bytemuck::zeroed_slice_box(bytes.div_ceil(WORD * BITS) as usize))
    }

    /// Adds the words of a range of bytes.
    pub fn add(&self, offset: u64, bytes: u64) {
        for (at, mask) in elements(offset, bytes) {
            let element = &self.0[at];
            if element.load(Relaxed) & mask != mask {
                element.fetch_or(mask, Relaxed);
            }
        }
    }

    /// Whether a range of bytes contains a word that is in this set and not in `others`.
    pub fn meet(&self, offset: u64, bytes: u64, others: Option<&Words>) -> bool {
        elements(offset, bytes).any(|(at, mask)| {
            let without = others.map_or(0, |others| others.0[at].load(Relaxed));
            self.0[at].load(Relaxed) & mask & !without != 0
        })
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|element| element.load(Relaxed) == 0)
    }

    /// Returns the set and leaves an empty set.
    pub fn take(&mut self) -> Words {
        Words(self.0.iter_mut().map(|element| AtomicU64::new(std::mem::take(element.get_mut()))).collect())
    }

    /// Removes all words.
    pub fn clear(&mut self) {
        self.0.iter_mut().for_each(|element| *element.get_mut() = 0);
    }

    /// Total size of the sectors that contain words of the set.
    pub fn sector_bytes(&self) -> u64 {
        let sectors = |element: &AtomicU64| {
            // The lowest bit of each byte becomes 1 if any bit of the byte is set. Bits shifted in from the next byte
            // stay in higher positions.
            let bits = element.load(Relaxed);
            let bits = bits | bits >> 4;
            let bits = bits | bits >> 2;
            let bits = bits | bits >> 1;
            u64::from((bits & 0x0101_0101_0101_0101).count_ones())
        };
        self.0.iter().map(sectors).sum::<u64>() * SECTOR
    }
}

/// Elements that hold the words of a range of bytes, each with the mask of these words.
fn elements(offset: u64, bytes: u64) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (offset / WORD, (offset + bytes).div_ceil(WORD));
    let range = if bytes == 0 { 0..0 } else { first / BITS..end.div_ceil(BITS) };
    range.map(move |at| {
        let low = first.max(at * BITS) - at * BITS;
        let high = end.min((at + 1) * BITS) - at * BITS;
        (at as usize, u64::MAX >> (BITS - (high - low)) << low)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_meet_if_they_share_a_word() {
        for (offset, bytes) in [(0, 1), (3, 2), (0, 256), (252, 8), (100, 600), (1023, 1)] {
            let words = Words::none(1024);
            words.add(offset, bytes);
            for at in 0..1024 {
                let inside = (offset / 4..=(offset + bytes - 1) / 4).contains(&(at / 4));
                assert_eq!(words.meet(at, 1, None), inside, "byte {at} of {bytes} at {offset}");
            }
            assert!(!words.meet(offset, bytes, Some(&words)) && !words.meet(offset + bytes / 2, 0, None));
            assert_eq!(words.sector_bytes(), 32 * ((offset + bytes - 1) / 32 - offset / 32 + 1));
        }
    }

    #[test]
    fn taking_words_leaves_an_empty_set() {
        let mut words = Words::none(64);
        words.add(8, 4);
        let taken = words.take();
        assert!(words.is_empty() && taken.meet(8, 4, None));
    }
}
