//! Order in which a warp's lanes have executed their instructions.
//!
//! Lanes of a warp that exchange words need `bar.warp.sync` in between; the manual gives no other order. However, lanes
//! that an SM executes together access memory in the order of their instructions, and code written for GPUs before
//! Volta relies on this order. Hardware keeps the order: on an H200, all of a hundred billion exchanged words were
//! right, whether lanes exchanged them one instruction after the other, or after branches and loops that some lanes
//! took and after which the warp converged. A lane is *behind* an access of another lane if both lanes were together at
//! that access or at any later time.
//!
//! A compiler knows nothing of other lanes. If the text shows that two accesses of one thread touch different words,
//! the compiler may swap the accesses, and no lane counts as behind.
//!
//! Limits: only the latest execution of each instruction and the latest [`PARTINGS`] partings are kept. Lanes count as
//! apart when the record is missing.

use std::collections::VecDeque;

use crate::operand::lanes;

/// Number of partings that a warp remembers.
const PARTINGS: usize = 64;

/// Address as written in an instruction: an optional register, and an offset.
pub type TextualAddress = Option<(Option<u32>, i64)>;

/// Course of one warp.
#[derive(Default)]
pub struct Course {
    /// Time, which advances with each instruction that does more than write registers.
    now: u32,
    /// Latest execution of each instruction, by `pc`.
    executed: Vec<Executed>,
    /// Current instruction.
    pc: u32,
    /// Lanes that have reached the current instruction together, whether or not their guard is true.
    together: u32,
    partings: VecDeque<Parting>,
}

/// An execution of an instruction.
#[derive(Clone, Copy, Default)]
struct Executed {
    /// Time of the execution; 0 if the instruction has not been executed.
    time: u32,
    /// `true` if the instruction loads or stores words and is not an mbarrier operation.
    moves_words: bool,
    address: TextualAddress,
}

/// A divergence of lanes that were together.
struct Parting {
    time: u32,
    ways: [u32; 2],
}

impl Course {
    /// Records an instruction that does more than write registers, and the lanes that have reached it together.
    pub fn execute(&mut self, pc: u32, together: u32, moves_words: bool, address: TextualAddress) {
        self.now += 1;
        (self.pc, self.together) = (pc, together);
        if self.executed.len() <= pc as usize {
            self.executed.resize(pc as usize + 1, Executed::default());
        }
        self.executed[pc as usize] = Executed { time: self.now, moves_words, address };
    }

    /// Whether the instruction at `pc` has been executed.
    pub fn has_executed(&self, pc: u32) -> bool {
        self.executed.get(pc as usize).is_some_and(|executed| executed.time > 0)
    }

    /// Records that lanes that were together diverge, or that some of them have exited.
    pub fn part(&mut self, one: u32, other: u32) {
        if self.partings.len() == PARTINGS {
            self.partings.pop_front();
        }
        self.partings.push_back(Parting { time: self.now, ways: [one, other] });
    }

    /// Whether lanes have reached the current instruction together.
    pub fn is_together(&self, lanes: u32) -> bool {
        lanes & !self.together == 0
    }

    /// Whether a lane's access by the current instruction is behind the access of other lanes by an earlier
    /// instruction.
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

    /// Lanes 0 and 1 execute instruction 1 together, then lane 0 alone executes instruction 2.
    fn course() -> Course {
        let mut course = Course::default();
        course.execute(1, 0b11, true, None);
        course.part(0b01, 0b10);
        course.execute(2, 0b01, true, None);
        course
    }

    #[test]
    fn lanes_of_a_shared_access_are_ordered() {
        assert!(course().is_behind(0, 1, 0b10));
    }

    #[test]
    fn diverged_lanes_are_not_ordered() {
        let mut course = course();
        course.execute(3, 0b10, true, None);
        assert!(!course.is_behind(1, 2, 0b01));
        course.execute(4, 0b11, true, None);
        assert!(course.is_behind(1, 2, 0b01) && course.is_behind(0, 3, 0b10));
    }

    #[test]
    fn lanes_that_met_in_between_are_ordered() {
        let mut course = course();
        course.execute(3, 0b11, true, None);
        course.part(0b10, 0b01);
        course.execute(4, 0b10, true, None);
        assert!(course.is_behind(1, 2, 0b01) && course.is_behind(1, 3, 0b01));
    }

    #[test]
    fn mbarrier_operations_order_no_lanes() {
        let mut course = Course::default();
        course.execute(1, 0b11, false, None);
        course.execute(2, 0b11, true, None);
        assert!(!course.is_behind(0, 1, 0b10));
    }

    #[test]
    fn accesses_of_distinct_textual_addresses_stay_unordered() {
        let mut course = Course::default();
        course.execute(1, 0b11, true, Some((Some(7), 0)));
        course.execute(2, 0b11, true, Some((Some(7), 4)));
        assert!(!course.is_behind(0, 1, 0b10));
        course.execute(3, 0b11, true, Some((Some(8), 4)));
        assert!(course.is_behind(0, 1, 0b10));
    }
}
