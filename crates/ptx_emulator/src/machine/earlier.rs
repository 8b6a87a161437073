//! Earlier grids that may still run during a launch, and their accesses to global memory (programmatic dependent
//! launch: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic Dependent Launch and Synchronization").
//!
//! Call the launches P, Q and R, in this order; R overlaps Q, and Q overlaps P. R may begin when every CTA of Q has
//! executed `griddepcontrol.launch_dependents` or has exited. A thread of R knows that Q has ended, and sees what Q
//! wrote, only after `griddepcontrol.wait`. It then knows that P has ended too, but only if a thread of Q has waited
//! for P. If some CTA of Q waited for P before it let dependents start, P has ended before R begins.
//!
//! The emulator runs grids one after the other. This file determines which results of earlier grids a launch must not
//! rely on.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustc_hash::FxHashMap;

use super::race::Mode;
use super::words::Words;

/// Words of an allocation that a grid accessed.
#[derive(Debug)]
pub struct Touched {
    pub read: Words,
    pub written: Words,
    /// Words that strong accesses touched, read or written.
    pub strong: Words,
}

impl Touched {
    /// No accesses to an allocation of `bytes` bytes.
    pub fn nothing(bytes: u64) -> Touched {
        Touched { read: Words::none(bytes), written: Words::none(bytes), strong: Words::none(bytes) }
    }

    /// Returns the accesses and leaves none.
    fn take(&mut self) -> Touched {
        Touched { read: self.read.take(), written: self.written.take(), strong: self.strong.take() }
    }

    /// Removes all accesses.
    pub fn clear(&mut self) {
        let Touched { read, written, strong } = self;
        [read, written, strong].into_iter().for_each(Words::clear);
    }

    /// Whether an access of a range races with the recorded accesses. `Some(true)`: with a write. `Some(false)`: with a
    /// read. `None`: with neither.
    fn race(&self, offset: u64, bytes: u64, mode: Mode) -> Option<bool> {
        let except = mode.is_strong().then_some(&self.strong);
        if self.written.meet(offset, bytes, except) {
            Some(true)
        } else {
            (!mode.reads() && self.read.meet(offset, bytes, except)).then_some(false)
        }
    }
}

/// A grid that may still run.
#[derive(Debug)]
struct Grid {
    kernel: String,
    /// `true` if a `griddepcontrol.wait` of the running launch also waits for the end of this grid.
    awaited: bool,
    /// Accesses, by the address of the allocation.
    touched: FxHashMap<u64, Touched>,
}

/// Waits of a launch for the launches before it.
#[derive(Debug, Default)]
pub struct Waited {
    /// `true` if a thread has waited.
    pub ever: AtomicBool,
    /// `true` if a CTA waited before it let dependents start.
    pub first: AtomicBool,
}

/// The earlier access of a race.
pub struct Conflict<'a> {
    /// Kernel of the grid that may still run.
    pub kernel: &'a str,
    /// `true` if the earlier access is a write.
    pub wrote: bool,
    /// `true` if the accessing thread has waited, but its wait does not cover that grid.
    pub out_of_reach: bool,
}

/// Grids that may still run when a launch begins.
#[derive(Debug, Default)]
pub struct Earlier {
    grids: Vec<Grid>,
    /// Kernel and waits of the launch that began last.
    last: Option<(String, Waited)>,
}

impl Earlier {
    /// Begins a launch. `touched` holds the last launch's accesses, by the address of the allocation.
    pub fn begin<'a>(&mut self, kernel: &str, overlaps: bool, touched: impl Iterator<Item = (u64, &'a mut Touched)>) {
        let last = self.last.replace((kernel.into(), Waited::default()));
        let (Some((kernel, mut waited)), true) = (last, overlaps) else {
            self.grids.clear();
            touched.for_each(|(_, touched)| touched.clear());
            return;
        };
        let (ever, first) = (*waited.ever.get_mut(), *waited.first.get_mut());
        self.grids.retain(|grid| !(grid.awaited && first));
        self.grids.iter_mut().for_each(|grid| grid.awaited &= ever);
        let touched = touched.filter(|(_, touched)| !touched.read.is_empty() || !touched.written.is_empty());
        let touched = touched.map(|(base, touched)| (base, touched.take())).collect();
        self.grids.push(Grid { kernel, awaited: true, touched });
    }

    /// Whether no earlier grid may still run.
    pub fn is_empty(&self) -> bool {
        self.grids.is_empty()
    }

    /// Records that a thread of the running launch waits.
    pub fn waits(&self, before_dependents: bool) {
        if let Some((_, waited)) = &self.last {
            waited.ever.store(true, Relaxed);
            waited.first.fetch_or(before_dependents, Relaxed);
        }
    }

    /// Returns the earlier grid that an access to an allocation races with. `waited`: the accessing thread knows of a
    /// wait.
    pub fn race(&self, base: u64, offset: u64, bytes: u64, mode: Mode, waited: bool) -> Option<Conflict<'_>> {
        self.grids.iter().rev().filter(|grid| !(grid.awaited && waited)).find_map(|grid| {
            let wrote = grid.touched.get(&base)?.race(offset, bytes, mode)?;
            Some(Conflict { kernel: &grid.kernel, wrote, out_of_reach: waited })
        })
    }
}
