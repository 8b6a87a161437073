//! Barriers of a CTA and of a cluster.

use super::race::Shared;

/// Number of named barriers per CTA.
pub const COUNT: u32 = 16;

/// A named barrier.
#[derive(Default)]
pub struct Barrier {
    /// Number of threads that complete a generation. 0 before the first arrival.
    pub expected: u32,
    /// `true` if the barrier expects all threads of the CTA that have not exited.
    pub of_all: bool,
    /// Number of threads that have arrived.
    pub arrived: u32,
    /// Number of complete generations.
    pub generation: u64,
    /// Knowledge published by the arrivals of this generation, and by the arrivals of the last complete generation.
    pub arriving: Shared,
    pub published: Shared,
    /// For `.red`: number of threads with a true predicate, and number of threads that voted, in this generation.
    pub votes: (u32, u32),
    /// The votes of the last complete generation.
    pub result: (u32, u32),
    /// Instruction of the first arrival.
    pub first_pc: u32,
}

impl Barrier {
    /// Removes an exited warp from a barrier of all threads at which some threads wait (CUDA Programming Guide,
    /// "Synchronization Functions": the barrier waits for all non-exited threads).
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

/// Barrier of a cluster.
#[derive(Default)]
pub struct ClusterBarrier {
    /// Number of threads that have not exited.
    live: u32,
    pub arrived: u32,
    /// Number of complete generations.
    pub generation: u64,
    pub arriving: Shared,
    pub published: Shared,
}

impl ClusterBarrier {
    pub fn new(threads: u32) -> ClusterBarrier {
        ClusterBarrier { live: threads, ..ClusterBarrier::default() }
    }

    /// Removes exiting threads from the barrier. The threads `arrived` have arrived at the barrier before.
    pub fn leave(&mut self, lanes: u32, arrived: u32) {
        self.live -= lanes.count_ones();
        self.arrived -= arrived.count_ones();
    }

    /// Ends the generation if all threads have arrived. Returns `true` if it ends the generation.
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
