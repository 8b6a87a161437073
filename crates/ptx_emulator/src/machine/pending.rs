//! Asynchronous operations in flight. Each operation takes effect at one moment, which the schedule picks. Operations
//! may complete in any order, unless an operation must follow others. `E` is the type of an effect.

use rustc_hash::FxHashSet;

/// Warp of the cluster, and instruction, that issued an operation.
#[derive(Clone, Copy, Debug)]
pub struct Issuer {
    pub warp: u32,
    pub pc: u32,
}

/// An operation in flight.
pub struct Operation<E> {
    pub id: u64,
    /// Completion time. The operation completes earlier if nothing else can run.
    pub due: u64,
    /// Operations that must complete first.
    pub after: Vec<u64>,
    pub issuer: Issuer,
    /// `true` if the operation may carry information between clusters.
    pub communicates: bool,
    pub effect: E,
}

/// All operations of a cluster that are in flight.
pub struct Pending<E> {
    list: Vec<Operation<E>>,
    live: FxHashSet<u64>,
    next: u64,
    /// The earliest `due`, so that most calls of `take_due` need no search.
    earliest: u64,
}

impl<E> Default for Pending<E> {
    fn default() -> Self {
        Pending { list: Vec::new(), live: FxHashSet::default(), next: 0, earliest: 0 }
    }
}

impl<E> Pending<E> {
    /// Whether the operation is still in flight.
    pub fn contains(&self, id: u64) -> bool {
        self.live.contains(&id)
    }

    /// Reserves the next operation's number.
    pub fn reserve(&mut self) -> u64 {
        self.next += 1;
        self.live.insert(self.next);
        self.next
    }

    pub fn push(&mut self, operation: Operation<E>) {
        self.earliest = if self.list.is_empty() { operation.due } else { self.earliest.min(operation.due) };
        self.list.push(operation);
    }

    /// Takes the operation with the earliest `due` up to `now`. Among equals, takes the operation that was issued
    /// first.
    pub fn take_due(&mut self, now: u64) -> Option<Operation<E>> {
        if self.list.is_empty() || self.earliest > now {
            return None;
        }
        let ready = |o: &&Operation<E>| o.due <= now && o.after.iter().all(|a| !self.live.contains(a));
        let id = self.list.iter().filter(ready).min_by_key(|o| (o.due, o.id)).map(|o| o.id);
        let taken = id.and_then(|id| self.take(id));
        self.earliest = self.list.iter().map(|o| o.due).min().unwrap_or(u64::MAX);
        if taken.is_none() {
            // An operation is due, but must follow one that is not due: look again later.
            self.earliest = self.earliest.max(now + 1);
        }
        taken
    }

    /// Earliest `due` of the operations that can complete. `u64::MAX` if there is none, or if no completion time is
    /// known.
    pub fn soonest(&self) -> u64 {
        let ready = |o: &&Operation<E>| o.after.iter().all(|a| !self.live.contains(a));
        self.list.iter().filter(ready).map(|o| o.due).min().unwrap_or(u64::MAX)
    }

    /// Number of the last operation. The next operation gets this number plus one.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Whether no operation is in flight.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Changes the completion time of an operation in flight.
    pub fn set_due(&mut self, id: u64, due: u64) {
        if let Some(operation) = self.list.iter_mut().find(|o| o.id == id) {
            operation.due = due;
            self.earliest = self.earliest.min(due);
        }
    }

    /// Takes an operation when nothing else can run: the newest operation, or the operation with the earliest `due`.
    pub fn take_any(&mut self, newest: bool) -> Option<Operation<E>> {
        let ready = |o: &&Operation<E>| o.after.iter().all(|a| !self.live.contains(a));
        let ready = self.list.iter().filter(ready);
        let id = if newest { ready.max_by_key(|o| o.id) } else { ready.min_by_key(|o| (o.due, o.id)) }.map(|o| o.id)?;
        self.take(id)
    }

    /// Operations whose predecessors are complete, in the order of issue.
    pub fn ready(&self) -> impl Iterator<Item = &Operation<E>> {
        self.list.iter().filter(|o| o.after.iter().all(|a| !self.live.contains(a)))
    }

    /// All operations in flight.
    pub fn all(&self) -> &[Operation<E>] {
        &self.list
    }

    /// Takes an operation out of the list.
    pub fn take(&mut self, id: u64) -> Option<Operation<E>> {
        let at = self.list.iter().position(|o| o.id == id)?;
        self.live.remove(&id);
        Some(self.list.remove(at))
    }
}
