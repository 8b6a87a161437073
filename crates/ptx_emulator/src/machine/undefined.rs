//! Bytes of global memory that are undefined until something writes them: fresh memory of an allocator.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A bit per byte of an allocation.
#[derive(Debug)]
pub struct UndefinedBytes(Box<[AtomicU64]>);

/// Words of `first..first + bytes` with the bits of the range in each.
fn words(first: u64, bytes: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = first + bytes;
    // An empty range has no word, also inside of one.
    let last = if bytes == 0 { first / 64 } else { end.div_ceil(64) };
    (first / 64..last).map(move |word| {
        let from = first.max(word * 64) - word * 64;
        let to = end.min(word * 64 + 64) - word * 64;
        (word as usize, (u64::MAX >> (64 - (to - from))) << from)
    })
}

impl UndefinedBytes {
    /// No undefined byte in an allocation of `bytes` bytes.
    pub fn none(bytes: u64) -> UndefinedBytes {
        UndefinedBytes(bytemuck::zeroed_slice_box(bytes.div_ceil(64) as usize))
    }

    /// The marks.
    pub fn save(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Relaxed)).collect()
    }

    /// Brings back saved marks.
    pub fn restore(&self, saved: &[u64]) {
        self.0.iter().zip(saved).for_each(|(word, &saved)| word.store(saved, Relaxed));
    }

    /// Marks bytes as undefined. They must lie inside the allocation.
    pub fn undefine(&self, first: u64, bytes: u64) {
        words(first, bytes).for_each(|(word, bits)| {
            self.0[word].fetch_or(bits, Relaxed);
        });
    }

    /// Marks bytes as defined. They must lie inside the allocation.
    pub fn define(&self, first: u64, bytes: u64) {
        for (word, bits) in words(first, bytes) {
            // Most writes go to defined bytes; a plain load costs less than an atomic operation.
            if self.0[word].load(Relaxed) & bits != 0 {
                self.0[word].fetch_and(!bits, Relaxed);
            }
        }
    }

    /// Mask of the undefined bytes among `bytes` bytes, up to 64. Bit 0 stands for the byte at `first`.
    pub fn mask(&self, first: u64, bytes: u32) -> u64 {
        words(first, bytes.into()).fold(0, |mask, (word, bits)| {
            let found = self.0[word].load(Relaxed) & bits;
            let from = word as u64 * 64;
            mask | if from >= first { found << (from - first) } else { found >> (first - from) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_follow_undefine_and_define() {
        let bytes = UndefinedBytes::none(200);
        assert_eq!(bytes.mask(0, 64), 0);
        bytes.undefine(60, 70);
        assert_eq!((bytes.mask(56, 8), bytes.mask(64, 64), bytes.mask(126, 8)), (0xf0, u64::MAX, 0xf));
        bytes.define(62, 4);
        assert_eq!((bytes.mask(60, 8), bytes.mask(64, 1)), (0b1100_0011, 0));
        bytes.define(70, 0);
        assert_eq!((bytes.mask(70, 1), bytes.mask(70, 0)), (1, 0));
    }
}
