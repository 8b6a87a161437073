//! Knowledge of threads about other clusters. It travels with the threads' clocks ([`super::race`]): between clusters
//! through atomics and flags in global memory, and within a cluster through barriers.
//!
//! A release takes a [`Snapshot`] of its thread's knowledge of its own cluster, and passes on its knowledge of other
//! clusters.

use std::sync::Arc;

/// Progress of a cluster's threads and asynchronous operations, as some observer knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Minimum time of each warp's lanes.
    warps: Vec<u32>,
    /// Threads and operations with a later time, by number.
    further: Vec<(u32, u32)>,
}

impl Snapshot {
    /// Snapshot of a vector clock, which holds the times of `threads` threads, then of operations.
    pub fn of(times: &[u32], threads: u32) -> Snapshot {
        let (lanes, operations) = times.split_at(threads as usize);
        let warps: Vec<u32> = lanes.chunks(32).map(|warp| warp.iter().copied().min().unwrap_or(0)).collect();
        let mut further = Vec::new();
        for (warp, (lanes, &least)) in lanes.chunks(32).zip(&warps).enumerate() {
            let numbers = (warp as u32 * 32..).zip(lanes);
            further.extend(numbers.filter(|(_, time)| **time > least).map(|(number, &time)| (number, time)));
        }
        further
            .extend((threads..).zip(operations).filter(|(_, time)| **time > 0).map(|(number, &time)| (number, time)));
        Snapshot { warps, further }
    }

    /// Time of a thread or an operation.
    pub fn at(&self, number: u32) -> u32 {
        match self.further.binary_search_by_key(&number, |entry| entry.0) {
            Ok(at) => self.further[at].1,
            Err(_) => self.warps.get(number as usize / 32).copied().unwrap_or(0),
        }
    }

    fn covers(&self, o: &Snapshot) -> bool {
        self.warps.iter().zip(&o.warps).all(|(a, b)| a >= b) && o.further.iter().all(|&(n, time)| self.at(n) >= time)
    }

    fn join(&self, o: &Snapshot) -> Snapshot {
        let warps: Vec<u32> = self.warps.iter().zip(&o.warps).map(|(a, b)| *a.max(b)).collect();
        let mut numbers: Vec<u32> = self.further.iter().chain(&o.further).map(|entry| entry.0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let further = numbers.into_iter().map(|n| (n, self.at(n).max(o.at(n))));
        let least = |n: u32| warps.get(n as usize / 32).copied().unwrap_or(0);
        let further = further.filter(|&(n, time)| time > least(n)).collect();
        Snapshot { further, warps }
    }

    /// Raises a vector clock to at least these times.
    pub fn raise(&self, times: &mut [u32], threads: u32) {
        for (warp, &least) in times[..threads as usize].chunks_mut(32).zip(&self.warps) {
            warp.iter_mut().for_each(|time| *time = least.max(*time));
        }
        for &(number, time) in &self.further {
            let known = &mut times[number as usize];
            *known = time.max(*known);
        }
    }
}

/// Number of clusters per part of [`Known`].
const PART: u32 = 64;

/// Snapshots of up to [`PART`] consecutive clusters, by ascending number in the grid.
type Part = Vec<(u32, Arc<Snapshot>)>;

/// Snapshots of clusters, in parts that copies share. The thread that draws the last of many tickets has a snapshot of
/// every cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known(Vec<(u32, Arc<Part>)>);

fn find<T>(list: &[(u32, T)], number: u32) -> Result<usize, usize> {
    list.binary_search_by_key(&number, |entry| entry.0)
}

impl Known {
    /// Snapshot of a cluster.
    pub fn of(&self, cluster: u32) -> Option<&Arc<Snapshot>> {
        let part = &self.0[find(&self.0, cluster / PART).ok()?].1;
        Some(&part[find(part, cluster).ok()?].1)
    }

    /// Whether the knowledge includes the time `time` of a thread or operation of a cluster.
    pub fn reaches(&self, cluster: u32, number: u32, time: u32) -> bool {
        self.of(cluster).is_some_and(|snapshot| snapshot.at(number) >= time)
    }

    /// Adds a snapshot of a cluster.
    pub fn add(&mut self, cluster: u32, snapshot: &Arc<Snapshot>) {
        let at = find(&self.0, cluster / PART).unwrap_or_else(|at| {
            self.0.insert(at, (cluster / PART, Arc::default()));
            at
        });
        let part = Arc::make_mut(&mut self.0[at].1);
        match find(part, cluster) {
            Ok(at) => join(&mut part[at].1, snapshot),
            Err(at) => part.insert(at, (cluster, snapshot.clone())),
        }
    }

    fn covers(&self, o: &Known) -> bool {
        let covered = |(number, part): &(u32, Arc<Part>)| {
            find(&self.0, *number).is_ok_and(|at| Arc::ptr_eq(&self.0[at].1, part) || covers(&self.0[at].1, part))
        };
        o.0.len() <= self.0.len() && o.0.iter().all(covered)
    }

    /// Adds all knowledge of `o`.
    pub fn join(&mut self, o: &Known) {
        for (number, part) in &o.0 {
            match find(&self.0, *number) {
                Err(at) => self.0.insert(at, (*number, part.clone())),
                Ok(at) => {
                    let own = &self.0[at].1;
                    if Arc::ptr_eq(own, part) || covers(own, part) {
                        continue;
                    } else if covers(part, own) {
                        self.0[at].1 = part.clone();
                    } else {
                        part.iter().for_each(|(cluster, snapshot)| self.add(*cluster, snapshot));
                    }
                }
            }
        }
    }

    /// Whether there is no knowledge.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn covers(part: &Part, o: &Part) -> bool {
    let covered = |(cluster, snapshot): &(u32, Arc<Snapshot>)| {
        let own = find(part, *cluster).ok().map(|at| &part[at].1);
        own.is_some_and(|own| Arc::ptr_eq(own, snapshot) || own.covers(snapshot))
    };
    o.len() <= part.len() && o.iter().all(covered)
}

fn join(into: &mut Arc<Snapshot>, from: &Arc<Snapshot>) {
    if Arc::ptr_eq(into, from) || into.covers(from) {
        return;
    }
    *into = if from.covers(into) { from.clone() } else { Arc::new(into.join(from)) };
}

/// Knowledge about other clusters, by the way it was obtained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beyond {
    /// Knowledge of events that happened before.
    pub seen: Known,
    /// Part of `seen` that a proxy fence has made visible to the async proxy.
    pub proxied: Known,
    /// Knowledge that a fence after a strong load would have given.
    pub polled: Known,
    /// Knowledge that a fence after a read-modify-write would have given.
    pub drawn: Known,
}

impl Beyond {
    fn halves(&self) -> [&Known; 4] {
        [&self.seen, &self.proxied, &self.polled, &self.drawn]
    }

    /// Adds all knowledge of `o`.
    pub fn join(&mut self, o: &Beyond) {
        let own = [&mut self.seen, &mut self.proxied, &mut self.polled, &mut self.drawn];
        own.into_iter().zip(o.halves()).filter(|(_, o)| !o.is_empty()).for_each(|(a, b)| a.join(b));
    }

    /// `true` if `self` contains everything that `o` contains.
    pub fn covers(&self, o: &Beyond) -> bool {
        self.halves().into_iter().zip(o.halves()).all(|(a, b)| a.covers(b))
    }

    /// Knowledge of one cluster alone.
    pub fn only(&self, cluster: u32) -> Beyond {
        let part = |known: &Known| {
            let mut part = Known::default();
            known.of(cluster).into_iter().for_each(|snapshot| part.add(cluster, snapshot));
            part
        };
        let [seen, proxied, polled, drawn] = self.halves().map(part);
        Beyond { seen, proxied, polled, drawn }
    }
}

/// Joins `from` into `into`. Shares the allocation if one covers the other.
pub fn merge(into: &mut Option<Arc<Beyond>>, from: &Option<Arc<Beyond>>) {
    let Some(from) = from else { return };
    match into {
        None => *into = Some(from.clone()),
        Some(a) if Arc::ptr_eq(a, from) || a.covers(from) => {}
        Some(a) if from.covers(a) => *into = Some(from.clone()),
        Some(a) => Arc::make_mut(a).join(from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_keep_the_clock_and_joins_take_later_times() {
        let mut times = vec![5; 64 + 8];
        times[64..].fill(0);
        (times[3], times[40], times[66]) = (9, 7, 2);
        let a = Snapshot::of(&times, 64);
        assert!((0..72).all(|n| a.at(n) == times[n as usize]));
        let mut later = vec![6; 64 + 8];
        later[64..].fill(1);
        let b = Snapshot::of(&later, 64);
        let both = a.join(&b);
        assert!((0..72).all(|n| both.at(n) == times[n as usize].max(later[n as usize])), "{both:?}");
        assert!(both.covers(&a) && both.covers(&b) && !a.covers(&b) && !b.covers(&a));
        b.raise(&mut times, 64);
        assert!((0..72).all(|n| both.at(n) == times[n as usize]));
    }
}
