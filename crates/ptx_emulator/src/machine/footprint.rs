//! Footprints: the objects that a step of a warp or of an asynchronous operation reads and changes. Two steps with footprints that do not
//! conflict give the same result in both orders.

/// Something that steps of several agents share. Numbers of clusters are numbers in the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Object {
    /// Global memory.
    Global,
    /// A memory of a cluster, numbered as in the race detector: shared memories of the CTAs, then tensor memories.
    Memory { cluster: u32, memory: u32 },
    /// A named barrier of a CTA.
    Barrier { cluster: u32, cta: u32, id: u32 },
    /// The barrier of a cluster.
    ClusterBarrier(u32),
    /// Whether a CTA's warps have exited.
    Exit { cluster: u32, cta: u32 },
    /// Whether an asynchronous operation is complete.
    Operation { cluster: u32, id: u64 },
    /// All that has no object of its own, such as the allocation of tensor memory.
    Rest,
}

/// Kind of an access to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// A write of the value that the object has.
    Rewrite,
    /// An arrival in a phase. Arrivals for which the phase has room give the same result in any order.
    Arrive(Arriving),
    /// A wait finds the current phase incomplete, and goes on after its arrivals. It may go on at once before the arrivals
    /// of the phase before, whose parity is the other.
    Block {
        phase: u64,
    },
    /// The end of a wait for the end of a phase, which cannot come before the phase's arrivals.
    Await {
        phase: u64,
    },
}

/// An arrival in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arriving {
    pub phase: u64,
    /// Whether the arrival is the last of its phase.
    pub ends: bool,
    /// Number of arrivals that this arrival counts as.
    pub count: u32,
    /// Number of arrivals that the phase lacked before this arrival.
    pub room: u32,
    /// Number of arrivals in a phase that the instruction names.
    pub named: Option<u32>,
}

impl Arriving {
    /// Returns an arrival that does not count, such as the arrival of bytes.
    pub fn uncounted(phase: u64, ends: bool) -> Arriving {
        Arriving { phase, ends, count: 0, room: u32::MAX, named: None }
    }

    /// Whether the arrival may also come before the earlier arrival `before`.
    fn commutes(&self, before: &Arriving) -> bool {
        let room = self.count.saturating_add(before.count) <= before.room;
        let agree = self.named.is_none() || before.named.is_none() || self.named == before.named;
        self.phase == before.phase && !before.ends && room && agree
    }
}

/// Part of an access that a step makes. An asynchronous operation is checked for races when it is issued, and moves its data
/// when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The check and the data.
    Whole,
    /// The check of an operation that completes later.
    Issue,
    /// The data of an operation that was issued earlier.
    Completion,
}

/// An access to a range of an object. Ranges of memory are in bytes; other objects have the range 0..1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub object: Object,
    pub begin: u64,
    pub end: u64,
    pub kind: Kind,
    pub moment: Moment,
}

impl Access {
    /// An access to an object that is no memory.
    pub fn of(object: Object, kind: Kind) -> Access {
        Access::new(object, 0..1, kind)
    }

    pub fn new(object: Object, range: std::ops::Range<u64>, kind: Kind) -> Access {
        Access { object, begin: range.start, end: range.end, kind, moment: Moment::Whole }
    }

    /// Whether the access conflicts with an earlier one.
    fn conflicts(&self, other: &Access) -> bool {
        let overlap = self.object == other.object && self.begin < other.end && other.begin < self.end;
        let apart = matches!(
            (self.moment, other.moment),
            (Moment::Issue, Moment::Completion) | (Moment::Completion, Moment::Issue)
        );
        overlap
            && !apart
            && match (self.kind, other.kind) {
                (
                    Kind::Read | Kind::Await { .. } | Kind::Block { .. },
                    Kind::Read | Kind::Await { .. } | Kind::Block { .. },
                ) => false,
                (Kind::Arrive(arrival), Kind::Arrive(before)) => !arrival.commutes(&before),
                (Kind::Block { phase: current }, Kind::Arrive(Arriving { phase, .. }))
                | (Kind::Arrive(Arriving { phase, .. }), Kind::Block { phase: current }) => phase < current,
                // A parity wait that comes a whole phase late waits again, so the end of the next phase conflicts too.
                (Kind::Await { phase: awaited }, Kind::Arrive(Arriving { phase, ends, .. }))
                | (Kind::Arrive(Arriving { phase, ends, .. }), Kind::Await { phase: awaited }) => {
                    phase <= awaited || ends
                }
                _ => true,
            }
    }

    /// Whether this access can also come before the earlier access `before`, with which it conflicts.
    fn can_precede(&self, before: &Access) -> bool {
        match (before.kind, self.kind) {
            (Kind::Arrive(Arriving { phase, .. }), Kind::Await { phase: awaited }) => phase > awaited,
            (_, Kind::Await { .. }) => !matches!(self.object, Object::Operation { .. }),
            _ => true,
        }
    }
}

/// How two steps depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dependence {
    /// Both orders give the same result.
    None,
    /// The steps cannot change their order.
    Ordered,
    /// The order may matter.
    Race,
}

/// Accesses of a step.
#[derive(Clone, Debug, Default)]
pub struct Footprint {
    /// In ascending order of objects and begins, once [`Footprint::sort`] has been called.
    accesses: Vec<Access>,
    /// Length of the longest access of memory.
    longest: u64,
    /// `true` if the step conflicts with every other: it ends the launch.
    everything: bool,
}

impl Footprint {
    /// The footprint that conflicts with every other.
    pub fn everything() -> Footprint {
        Footprint { everything: true, ..Footprint::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.accesses.is_empty() && !self.everything
    }

    /// Adds an access. Accesses of one kind to adjacent or equal bytes become one.
    pub fn add(&mut self, access: Access) {
        match self.accesses.last_mut() {
            Some(last)
                if (last.object, last.kind, last.moment) == (access.object, access.kind, access.moment)
                    && last.begin <= access.begin
                    && access.begin <= last.end =>
            {
                last.end = last.end.max(access.end);
            }
            _ => self.accesses.push(access),
        }
    }

    /// The same accesses at another moment.
    pub fn at(&self, moment: Moment) -> Footprint {
        let accesses = self.accesses.iter().map(|access| Access { moment, ..*access }).collect();
        Footprint { accesses, ..self.clone() }
    }

    /// Adds all accesses of another footprint.
    pub fn extend(&mut self, other: &Footprint) {
        self.accesses.extend(&other.accesses);
        self.everything |= other.everything;
    }

    /// Sorts the accesses, so that the footprint can be compared.
    pub fn sort(&mut self) {
        self.accesses.sort_by_key(|a| (a.object, a.begin, a.end));
        let mut merged = Footprint { everything: self.everything, ..Footprint::default() };
        self.accesses.drain(..).for_each(|access| merged.add(access));
        merged.longest = merged.accesses.iter().map(|a| a.end - a.begin).max().unwrap_or(0);
        *self = merged;
    }

    /// Whether the step changes what the other, sorted, step reads.
    pub fn changes_what(&self, other: &Footprint) -> bool {
        let changes = |a: &Access| matches!(a.kind, Kind::Write | Kind::Arrive(_));
        self.everything || self.accesses.iter().filter(|a| changes(a)).any(|a| other.near(a).any(|b| a.conflicts(b)))
    }

    /// Accesses to the same object that may overlap.
    fn near<'s>(&'s self, access: &Access) -> impl Iterator<Item = &'s Access> + use<'s> {
        let (object, begin, end) = (access.object, access.begin.saturating_sub(self.longest), access.end);
        let first = self.accesses.partition_point(|a| (a.object, a.begin) < (object, begin));
        self.accesses[first..].iter().take_while(move |a| a.object == object && a.begin < end)
    }

    /// Whether a wait of this step could also have ended before the step `before`, an arrival, because an earlier phase
    /// has the same parity as the phase that the wait was for. Both must be sorted.
    pub fn could_have_ended_before(&self, before: &Footprint) -> bool {
        self.accesses.iter().any(|access| {
            let Kind::Await { phase: awaited } = access.kind else { return false };
            let arrives =
                |kind| matches!(kind, Kind::Arrive(Arriving { phase, .. }) if phase.checked_add(1) == Some(awaited));
            let is_mbarrier = matches!(access.object, Object::Memory { .. });
            is_mbarrier && before.near(access).any(|earlier| earlier.end > access.begin && arrives(earlier.kind))
        })
    }

    /// How this step depends on a step that came before. Both must be sorted.
    pub fn depends_on(&self, before: &Footprint) -> Dependence {
        if self.everything || before.everything {
            return Dependence::Race;
        }
        let mut found = Dependence::None;
        for access in &self.accesses {
            for earlier in before.near(access).filter(|earlier| access.conflicts(earlier)) {
                if !access.can_precede(earlier) {
                    return Dependence::Ordered;
                }
                found = Dependence::Race;
            }
        }
        found
    }
}

/// Records the footprint of the current step.
#[derive(Default)]
pub struct Recorder {
    /// Accesses of the step itself.
    pub own: Footprint,
    /// Accesses of the asynchronous operation that the current instruction issues or the current operation continues.
    pub issued: Footprint,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begin: u64, end: u64, kind: Kind) -> Footprint {
        let mut footprint = Footprint::default();
        footprint.add(Access::new(Object::Global, begin..end, kind));
        footprint.sort();
        footprint
    }

    fn arrive(phase: u64) -> Kind {
        Kind::Arrive(Arriving { phase, ends: false, count: 1, room: 2, named: None })
    }

    #[test]
    fn only_overlapping_accesses_with_a_write_conflict() {
        let write = at(0, 4, Kind::Write);
        assert_eq!(at(3, 5, Kind::Read).depends_on(&write), Dependence::Race);
        assert_eq!(at(4, 8, Kind::Read).depends_on(&write), Dependence::None);
        assert_eq!(at(0, 4, Kind::Read).depends_on(&at(0, 4, Kind::Read)), Dependence::None);
        assert_eq!(at(0, 4, Kind::Rewrite).depends_on(&at(0, 4, Kind::Read)), Dependence::Race);
    }

    #[test]
    fn arrivals_of_one_phase_commute_and_a_wait_follows_them() {
        assert_eq!(at(0, 8, arrive(1)).depends_on(&at(0, 8, arrive(1))), Dependence::None);
        assert_eq!(at(0, 8, arrive(2)).depends_on(&at(0, 8, arrive(1))), Dependence::Race);
        assert_eq!(at(0, 8, Kind::Await { phase: 1 }).depends_on(&at(0, 8, arrive(1))), Dependence::Ordered);
        assert_eq!(at(0, 8, arrive(2)).depends_on(&at(0, 8, Kind::Await { phase: 1 })), Dependence::None);
        let end = Kind::Arrive(Arriving::uncounted(2, true));
        assert_eq!(at(0, 8, end).depends_on(&at(0, 8, Kind::Await { phase: 1 })), Dependence::Race);
    }

    /// Two arrivals that each find room for one do not both fit.
    #[test]
    fn arrivals_without_room_conflict() {
        let arrive = |count, room| Kind::Arrive(Arriving { count, room, ..Arriving::uncounted(0, false) });
        assert_eq!(at(0, 8, arrive(1, 1)).depends_on(&at(0, 8, arrive(1, 1))), Dependence::Race);
        assert_eq!(at(0, 8, arrive(1, 1)).depends_on(&at(0, 8, arrive(1, 2))), Dependence::None);
    }

    #[test]
    fn a_wait_that_blocks_depends_on_arrivals_of_the_phase_before() {
        let blocks = at(0, 8, Kind::Block { phase: 1 });
        assert_eq!(blocks.depends_on(&at(0, 8, arrive(0))), Dependence::Race);
        assert_eq!(at(0, 8, arrive(1)).depends_on(&blocks), Dependence::None);
    }

    #[test]
    fn checks_of_one_operation_ignore_data_of_another() {
        let write = at(0, 4, Kind::Write);
        let (issue, completion) = (write.at(Moment::Issue), write.at(Moment::Completion));
        assert_eq!(issue.depends_on(&completion), Dependence::None);
        assert_eq!(issue.depends_on(&issue), Dependence::Race);
        assert_eq!(completion.depends_on(&completion), Dependence::Race);
        assert_eq!(write.depends_on(&completion), Dependence::Race);
    }

    #[test]
    fn step_cannot_precede_a_step_that_it_waits_for() {
        let mut wait = at(0, 8, Kind::Await { phase: 1 });
        wait.extend(&at(8, 12, Kind::Write));
        wait.sort();
        let mut arrival = at(0, 8, arrive(1));
        arrival.extend(&at(8, 12, Kind::Write));
        arrival.sort();
        assert_eq!(wait.depends_on(&arrival), Dependence::Ordered);
    }

    #[test]
    fn a_long_access_is_found_behind_shorter_ones() {
        let mut many = Footprint::default();
        for begin in [100, 0, 40] {
            let end = if begin == 0 { 64 } else { begin + 4 };
            many.add(Access::new(Object::Global, begin..end, Kind::Write));
        }
        many.sort();
        assert_eq!(at(50, 52, Kind::Read).depends_on(&many), Dependence::Race);
        assert_eq!(at(64, 100, Kind::Read).depends_on(&many), Dependence::None);
    }
}
