//! Counts which matrix operations ran beside copies into shared memory, in the scheduler's own time: what a pipeline of
//! stages is for. See [`Matrix`](crate::Matrix) for what that can say of a GPU.

use super::cluster::Machine;
use super::warp::Warp;

/// Asynchronous copies from global memory into a CTA's shared memory.
#[derive(Debug, Default)]
pub struct Copies {
    /// Bytes in flight.
    bytes: u64,
    /// Copies started so far.
    started: u64,
}

/// A matrix operation between issue and completion.
#[derive(Debug)]
pub struct Running {
    cta: usize,
    role: usize,
    /// A copy was in flight when it was issued.
    beside: bool,
    /// Copies that had been started by then.
    started: u64,
}

impl Machine<'_> {
    /// A copy of so many bytes is issued.
    pub fn copy_starts(&mut self, cta: u32, bytes: u64) {
        let copies = &mut self.ctas[cta as usize].copies;
        copies.bytes += bytes;
        copies.started += 1;
    }

    /// It has arrived.
    pub fn copy_ends(&mut self, cta: u32, bytes: u64) {
        self.ctas[cta as usize].copies.bytes -= bytes;
    }

    /// A warp issues a matrix operation.
    pub fn matrix_starts(&mut self, w: &Warp, multiply_adds: u64) -> Running {
        let (cta, role) = (w.cta as usize, w.role as usize);
        let Copies { bytes, started } = self.ctas[cta].copies;
        let counters = &mut self.roles[role].matrix;
        counters.operations += 1;
        counters.multiply_adds += multiply_adds;
        counters.copy_bytes_at_issue += bytes;
        Running { cta, role, beside: bytes > 0, started }
    }

    /// The operation is complete.
    pub fn matrix_ends(&mut self, running: Running) {
        let Running { cta, role, beside, started } = running;
        if beside || self.ctas[cta].copies.started > started {
            self.roles[role].matrix.beside_copies += 1;
        }
    }
}
