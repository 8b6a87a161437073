//! In which order a warp's lanes have executed what they have.
//!
//! Lanes of a warp that exchange words need `bar.warp.sync` between; the manual orders nothing else. But lanes that a
//! multiprocessor executes together access memory in the order of their instructions, and what was written for the cards
//! before Volta relies on it. So does a card: an H200 had every word right, of a hundred billion that lanes exchanged behind each
//! other, or behind branches and loops that some of them took and where the warp came together again. A lane is *behind* an
//! access of another if both were together at that access or at some time since.
//!
//! A compiler knows nothing of other lanes. Where the text shows that two accesses of one thread touch different words, it may
//! exchange them, and nobody is behind anybody.
//!
//! What it can miss: of an instruction that lanes have executed more than once, only the latest time is kept, and of partings the
//! latest [`PARTINGS`]. Lanes count as apart then.

use std::collections::VecDeque;

use crate::operand::lanes;

/// Partings that a warp remembers.
const PARTINGS: usize = 64;

/// An address as the text of an instruction has it: a register, or none, and a distance.
pub type TextualAddress = Option<(Option<u32>, i64)>;

/// The course of one warp.
#[derive(Default)]
pub struct Course {
    /// Goes up with each instruction that does more than write registers.
    now: u32,
    /// By instruction.
    executed: Vec<Executed>,
    /// The instruction that is executed.
    pc: u32,
    /// The lanes that have come to it together, whether or not their guard is true.
    together: u32,
    partings: VecDeque<Parting>,
}

/// An execution of an instruction.
#[derive(Clone, Copy, Default)]
struct Executed {
    /// When it was, 0 for never.
    time: u32,
    /// It loads or stores words, and is no operation on an mbarrier.
    moves_words: bool,
    address: TextualAddress,
}

/// Lanes that were together go two ways.
struct Parting {
    time: u32,
    ways: [u32; 2],
}

impl Course {
    /// Lanes execute an instruction that does more than write registers, having come to it together.
    pub fn execute(&mut self, pc: u32, together: u32, moves_words: bool, address: TextualAddress) {
        self.now += 1;
        (self.pc, self.together) = (pc, together);
        if self.executed.len() <= pc as usize {
            self.executed.resize(pc as usize + 1, Executed::default());
        }
        self.executed[pc as usize] = Executed { time: self.now, moves_words, address };
    }

    /// Whether such an instruction has been executed.
    pub fn has_executed(&self, pc: u32) -> bool {
        self.executed.get(pc as usize).is_some_and(|executed| executed.time > 0)
    }

    /// Lanes that have been together go two ways from here on, or some have exited.
    pub fn part(&mut self, one: u32, other: u32) {
        if self.partings.len() == PARTINGS {
            self.partings.pop_front();
        }
        self.partings.push_back(Parting { time: self.now, ways: [one, other] });
    }

    /// Whether lanes have come to the current instruction together.
    pub fn is_together(&self, lanes: u32) -> bool {
        lanes & !self.together == 0
    }

    /// Whether a lane's access by the current instruction is behind what other lanes did by an earlier one.
    pub fn is_behind(&self, lane: u32, earlier: u32, others: u32) -> bool {
        let at = |pc: u32| self.executed.get(pc as usize).filter(|executed| executed.time > 0 && executed.moves_words);
        let (Some(before), Some(now)) = (at(earlier), at(self.pc)) else { return false };
        let addresses = (before.address, now.address);
        let apart = matches!(addresses, (Some((one, at)), Some((other, to))) if one == other && at != to);
        let together_since = |other: usize| {
            let parted = self.partings.iter().rev().find(|parting| parting.separates(lane, other as u32));
            self.together >> other & 1 == 1 || parted.is_some_and(|parting| parting.time >= before.time)
        };
        earlier != self.pc && !apart && lanes(others).all(together_since)
    }
}

impl Parting {
    fn separates(&self, lane: u32, other: u32) -> bool {
        let way = |lane| self.ways.map(|way| way >> lane & 1 == 1);
        matches!((way(lane), way(other)), ([true, false], [false, true]) | ([false, true], [true, false]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes 0 and 1 execute instruction 1 together, 2 apart from each other, and 3 together again.
    fn course() -> Course {
        let mut course = Course::default();
        course.execute(1, 0b11, true, None);
        course.part(0b01, 0b10);
        course.execute(2, 0b01, true, None);
        course
    }

    #[test]
    fn lanes_are_behind_what_they_did_together() {
        assert!(course().is_behind(0, 1, 0b10));
    }

    #[test]
    fn lanes_that_are_apart_are_behind_nothing_that_the_other_does_alone() {
        let mut course = course();
        course.execute(3, 0b10, true, None);
        assert!(!course.is_behind(1, 2, 0b01));
        course.execute(4, 0b11, true, None);
        assert!(course.is_behind(1, 2, 0b01) && course.is_behind(0, 3, 0b10));
    }

    #[test]
    fn lanes_that_were_together_in_between_are_behind() {
        let mut course = course();
        course.execute(3, 0b11, true, None);
        course.part(0b10, 0b01);
        course.execute(4, 0b10, true, None);
        assert!(course.is_behind(1, 2, 0b01) && course.is_behind(1, 3, 0b01));
    }

    #[test]
    fn operations_on_mbarriers_are_behind_nothing() {
        let mut course = Course::default();
        course.execute(1, 0b11, false, None);
        course.execute(2, 0b11, true, None);
        assert!(!course.is_behind(0, 1, 0b10));
    }

    #[test]
    fn a_compiler_may_exchange_what_the_text_tells_apart() {
        let mut course = Course::default();
        course.execute(1, 0b11, true, Some((Some(7), 0)));
        course.execute(2, 0b11, true, Some((Some(7), 4)));
        assert!(!course.is_behind(0, 1, 0b10));
        course.execute(3, 0b11, true, Some((Some(8), 4)));
        assert!(course.is_behind(0, 1, 0b10));
    }
}
