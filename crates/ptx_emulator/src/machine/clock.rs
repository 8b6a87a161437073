//! The time of a cluster, in warp instructions, and when asynchronous operations complete.

use crate::config::launch::Schedule;
use crate::random::Random;

/// How long an asynchronous operation takes on the fair schedule, in warp instructions of its cluster.
const FAIR_LATENCY: u64 = 64;
/// With a seed, an operation takes at most 2 to this power.
const LATENCY_BITS: u64 = 14;
/// How long the worst schedule holds an operation back while anything else can run.
const WORST_LATENCY: u64 = 1 << 22;

/// A cluster's clock, and what its schedule leaves to chance.
pub struct Clock {
    /// Warp instructions issued.
    pub now: u64,
    schedule: Schedule,
    pub random: Random,
}

impl Clock {
    /// The clock of the cluster with number `index` in the grid.
    pub fn new(schedule: Schedule, index: u64) -> Clock {
        let seed = match schedule {
            Schedule::Seed(seed) => seed,
            Schedule::Fair | Schedule::Worst => 0,
        };
        let mut random = Random::new(seed ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.next();
        Clock { now: 0, schedule, random }
    }

    /// When an asynchronous operation that starts now completes, at the latest when nothing else can run.
    pub fn completion(&mut self) -> u64 {
        match self.schedule {
            Schedule::Fair => self.now + FAIR_LATENCY,
            Schedule::Seed(_) => {
                let bits = self.random.below(LATENCY_BITS);
                self.now + self.random.below(1 << bits)
            }
            Schedule::Worst => self.now + WORST_LATENCY,
        }
    }

    /// Whether a thread that may wait for a limited time gives up at once.
    pub fn out_of_patience(&mut self) -> bool {
        match self.schedule {
            Schedule::Fair => false,
            Schedule::Seed(_) => self.random.below(4) == 0,
            Schedule::Worst => true,
        }
    }
}
