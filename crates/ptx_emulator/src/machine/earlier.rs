//! Earlier grids that may still run while a launch does, and what they did in global memory (programmatic dependent
//! launch: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic Dependent Launch and Synchronization").
//!
//! Call the launches P, Q and R, in this order; R overlaps Q, and Q overlaps P. R may begin when every CTA of Q has
//! executed `griddepcontrol.launch_dependents` or has exited. A thread of R knows that Q has ended, and sees what Q
//! wrote, only after `griddepcontrol.wait`. It then knows that P has ended too, but only if a thread of Q has waited
//! for P. If some CTA of Q waited for P before it let dependents start, P has ended before R begins.
//!
//! The emulator runs grids one after the other. This file tells a launch what it must not rely on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::race::Mode;
use super::words::Words;

/// What a grid did to an allocation.
#[derive(Debug)]
pub struct Touched {
    pub read: Words,
    pub written: Words,
    /// Of these, what strong accesses touched.
    pub strong: Words,
}

impl Touched {
    /// Nothing, to so many bytes.
    pub fn nothing(bytes: u64) -> Touched {
        Touched { read: Words::none(bytes), written: Words::none(bytes), strong: Words::none(bytes) }
    }

    /// Takes out what was done; nothing is left.
    fn take(&mut self) -> Touched {
        Touched { read: self.read.take(), written: self.written.take(), strong: self.strong.take() }
    }

    /// Forgets what was done.
    pub fn clear(&mut self) {
        let Touched { read, written, strong } = self;
        [read, written, strong].into_iter().for_each(Words::clear);
    }

    /// Whether an access of a range races with what was done: with a write (`Some(true)`), with a read (`Some(false)`),
    /// or not.
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
    /// A `griddepcontrol.wait` of the running launch waits for its end too.
    awaited: bool,
    /// By the address of the allocation.
    touched: HashMap<u64, Touched>,
}

/// Whether a launch waits for the launches before it.
#[derive(Debug, Default)]
pub struct Waited {
    /// A thread does.
    pub ever: AtomicBool,
    /// A CTA does before it lets dependents start.
    pub first: AtomicBool,
}

/// The other side of a race.
pub struct Conflict<'a> {
    /// The kernel of the grid that may still run.
    pub kernel: &'a str,
    /// It wrote.
    pub wrote: bool,
    /// The accessing thread has waited, but not for that grid.
    pub out_of_reach: bool,
}

/// The grids that may still run when a launch begins.
#[derive(Debug, Default)]
pub struct Earlier {
    grids: Vec<Grid>,
    /// The launch that began last.
    last: Option<(String, Waited)>,
}

impl Earlier {
    /// A launch begins; `touched` is what the last one did, by the address of the allocation.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.grids.is_empty()
    }

    /// A thread of the running launch waits.
    pub fn waits(&self, before_dependents: bool) {
        if let Some((_, waited)) = &self.last {
            waited.ever.store(true, Relaxed);
            waited.first.fetch_or(before_dependents, Relaxed);
        }
    }

    /// The earlier grid that an access to an allocation races with. `waited`: the accessing thread knows of a wait.
    pub fn race(&self, base: u64, offset: u64, bytes: u64, mode: Mode, waited: bool) -> Option<Conflict<'_>> {
        self.grids.iter().rev().filter(|grid| !(grid.awaited && waited)).find_map(|grid| {
            let wrote = grid.touched.get(&base)?.race(offset, bytes, mode)?;
            Some(Conflict { kernel: &grid.kernel, wrote, out_of_reach: waited })
        })
    }
}
