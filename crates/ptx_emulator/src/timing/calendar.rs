//! A unit that all SMs share, such as DRAM. It delivers a fixed number of bytes per time interval, a *stretch*.

/// Cycles per stretch.
const STRETCH: u64 = 64;

/// Number of bytes of each stretch that requests have reserved. Requests may arrive out of order. Each request reserves
/// the earliest free bytes.
#[derive(Clone, Debug)]
pub struct Calendar {
    /// Bytes per stretch.
    capacity: f64,
    used: Vec<f64>,
    /// All stretches before this one are full.
    full: usize,
}

impl Calendar {
    /// Server with this number of bytes per cycle.
    pub fn new(bytes_per_cycle: f64) -> Calendar {
        Calendar { capacity: bytes_per_cycle * STRETCH as f64, used: Vec::new(), full: 0 }
    }

    /// Time at which the last of `bytes` requested at `time` is served.
    pub fn serve(&mut self, time: u64, bytes: u64) -> u64 {
        let mut left = bytes as f64;
        let mut n = ((time / STRETCH) as usize).max(self.full);
        let mut end = time;
        while left > 0.0 {
            if n >= self.used.len() {
                self.used.resize(n + 256, 0.0);
            }
            let take = (self.capacity - self.used[n]).min(left);
            self.used[n] += take;
            left -= take;
            if take > 0.0 {
                let share = self.used[n] / self.capacity;
                end = (n as u64 * STRETCH + (share * STRETCH as f64).ceil() as u64).max(time);
            }
            if self.used[n] >= self.capacity && n == self.full {
                self.full += 1;
            }
            n += 1;
        }
        end
    }

    /// Mean share of the assigned bytes per stretch, from `from` to `to`.
    pub fn utilization(&self, from: u64, to: u64) -> f64 {
        let range = (from / STRETCH) as usize..(to.div_ceil(STRETCH) as usize).max(1);
        let stretches = range.len().max(1) as f64;
        let used: f64 = self.used.iter().take(range.end).skip(range.start).sum();
        used / self.capacity / stretches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_time_takes_bytes_that_later_requests_left() {
        let mut server = Calendar::new(10.0);
        assert_eq!(server.serve(0, 640), 64);
        assert_eq!(server.serve(0, 320), 96);
        assert_eq!(server.serve(200, 640), 256);
        // Later requests use the bytes that earlier ones left.
        assert_eq!(server.serve(0, 320), 128);
        assert!((server.utilization(0, 256) - 0.75).abs() < 1e-9);
    }

    #[test]
    fn lone_request_ends_after_its_bytes() {
        let mut server = Calendar::new(2.0);
        assert_eq!(server.serve(64, 256), 192);
    }
}
