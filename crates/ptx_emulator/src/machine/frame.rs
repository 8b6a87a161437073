//! Recursion. Each register and variable of a function has one location. A recursive call saves the values there, and
//! its return restores them.

use std::ops::Range;

use super::warp::{Kept, Undefined, Warp};
use crate::operand::{Src, lanes};

/// Locations that belong to a function: its formal parameters and the declarations in its body.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    pub registers: Vec<Range<u32>>,
    pub predicates: Vec<Range<u32>>,
    /// Bytes of local memory.
    pub local: Vec<Range<u32>>,
}

impl Warp {
    /// Call depth of the running lanes.
    fn depth(&self) -> usize {
        self.fragments[self.current].calls.len()
    }

    /// Saves the lanes' values of a frame.
    pub fn keep(&mut self, mask: u32, frame: &Frame) {
        let registers = frame.registers.iter().cloned().flatten().map(|r| {
            let undefined = std::array::from_fn(|lane| {
                let bits = self.undefined_bits(Src::Register(r), lane);
                Undefined { register: r, lane, bits, origin: self.origin(Src::Register(r), lane) }
            });
            (r, self.get(Src::Register(r)), self.defined(r), undefined)
        });
        let predicates =
            frame.predicates.iter().cloned().flatten().map(|p| (p, self.predicate(p), self.predicate_defined(p)));
        let local = frame.local.iter().map(|range| {
            let stretch = |lane| {
                let at = self.local_at(lane, range.start.into());
                let bytes = at..at + range.len();
                (self.local[bytes.clone()].to_vec(), self.local_defined[bytes].to_vec())
            };
            (range.start, (0..32).map(stretch).collect())
        });
        let kept = Kept {
            depth: self.depth(),
            mask,
            registers: registers.collect(),
            predicates: predicates.collect(),
            local: local.collect(),
        };
        self.kept.push(kept);
    }

    /// Restores the values saved at a recursive call to the lanes that return from it.
    pub fn give_back(&mut self, mask: u32) {
        if self.kept.is_empty() {
            return;
        }
        let (depth, mut all) = (self.depth(), std::mem::take(&mut self.kept));
        for kept in all.iter_mut().filter(|kept| kept.depth == depth && kept.mask & mask != 0) {
            let back = kept.mask & mask;
            kept.mask &= !mask;
            for (register, row, defined, undefined) in &kept.registers {
                self.set(*register, back, row);
                self.define(*register, back, *defined);
                lanes(back).for_each(|lane| self.undefine(undefined[lane]));
            }
            for &(predicate, value, defined) in &kept.predicates {
                self.set_predicate(predicate, back, value);
                self.define_predicate(predicate, back, defined);
            }
            for (offset, stretches) in &kept.local {
                for lane in lanes(back) {
                    let (at, (bytes, defined)) = (self.local_at(lane, (*offset).into()), &stretches[lane]);
                    self.local[at..at + bytes.len()].copy_from_slice(bytes);
                    self.local_defined[at..at + bytes.len()].copy_from_slice(defined);
                }
            }
        }
        all.retain(|kept| kept.mask != 0);
        self.kept = all;
    }
}
