//! Time of a cluster, in warp instructions, and completion times of asynchronous operations.

use crate::config::launch::Schedule;
use crate::random::Random;

/// Duration of an asynchronous operation on the fair schedule, in warp instructions of its cluster.
const FAIR_LATENCY: u64 = 64;
/// Base-2 logarithm of the maximum duration of an operation on a seeded schedule.
const LATENCY_BITS: u64 = 14;
/// Delay of an operation on the worst schedule while anything else can run.
const WORST_LATENCY: u64 = 1 << 22;

/// Clock of a cluster, and the random numbers of its schedule.
pub struct Clock {
    /// Warp instructions issued.
    pub now: u64,
    schedule: Schedule,
    pub random: Random,
}

impl Clock {
    /// Clock of the cluster with number `index` in the grid.
    pub fn new(schedule: Schedule, index: u64) -> Clock {
        let seed = match schedule {
            Schedule::Seed(seed) => seed,
            Schedule::Fair | Schedule::Worst => 0,
        };
        let mut random = Random::new(seed ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.next();
        Clock { now: 0, schedule, random }
    }

    /// Completion time of an asynchronous operation that starts now. The operation completes earlier if nothing else
    /// can run.
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

    /// Whether a thread whose wait has a time limit gives up at once.
    pub fn out_of_patience(&mut self) -> bool {
        match self.schedule {
            Schedule::Fair => false,
            Schedule::Seed(_) => self.random.below(4) == 0,
            Schedule::Worst => true,
        }
    }
}
