//! The barriers of a CTA and of a cluster.

use super::race::Shared;

/// Barriers that a CTA has.
pub const COUNT: u32 = 16;

/// One named barrier.
#[derive(Default)]
pub struct Barrier {
    /// Threads that complete a generation; 0 before the first arrival.
    pub expected: u32,
    /// They are all that have not exited.
    pub of_all: bool,
    /// Threads that have arrived.
    pub arrived: u32,
    /// Complete generations.
    pub generation: u64,
    /// What the arrivals of this generation publish, and what those of the last complete one published.
    pub arriving: Shared,
    pub published: Shared,
    /// `.red`: threads whose predicate was true, and threads that voted, in this generation.
    pub votes: (u32, u32),
    /// The same in the last complete generation.
    pub result: (u32, u32),
    /// The instruction of the first arrival.
    pub first_pc: u32,
}

impl Barrier {
    /// A warp has exited: a barrier of all threads that some wait at expects it no more (CUDA Programming Guide,
    /// "Synchronization Functions": it waits for all non-exited threads).
    pub fn leave(&mut self) {
        if self.of_all && self.arrived > 0 {
            self.expected -= 32;
            self.advance();
        }
    }

    /// Ends the generation if all threads have arrived.
    pub fn advance(&mut self) {
        if self.arrived == self.expected {
            self.generation += 1;
            self.published = self.arriving.take();
            self.result = std::mem::take(&mut self.votes);
            self.arrived = 0;
        }
    }
}

/// The barrier of a cluster.
#[derive(Default)]
pub struct ClusterBarrier {
    /// Threads that have not exited.
    live: u32,
    pub arrived: u32,
    /// Complete generations.
    pub generation: u64,
    pub arriving: Shared,
    pub published: Shared,
}

impl ClusterBarrier {
    pub fn new(threads: u32) -> ClusterBarrier {
        ClusterBarrier { live: threads, ..ClusterBarrier::default() }
    }

    /// Threads exit, some of which have arrived. The barrier expects them no more.
    pub fn leave(&mut self, lanes: u32, arrived: u32) {
        self.live -= lanes.count_ones();
        self.arrived -= arrived.count_ones();
    }

    /// Ends the generation if all threads have arrived; whether it does.
    pub fn advance(&mut self) -> bool {
        let ends = self.arrived > 0 && self.arrived >= self.live;
        if ends {
            self.arrived = 0;
            self.generation += 1;
            self.published = self.arriving.take();
        }
        ends
    }

    pub fn describe(&self) -> String {
        format!("the cluster barrier: {} of {} threads have arrived", self.arrived, self.live)
    }
}
