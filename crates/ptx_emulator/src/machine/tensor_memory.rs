//! Tensor memory of a CTA (PTX ISA, "Tensor Memory"): 128 lanes of 512 columns of 32 bits. The kernel allocates it by
//! columns. [`crate::hw::tmem`] describes the layout of matrices in tensor memory.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::hw::tmem::{Address, COLUMNS, LANES, is_allocation_size};

/// Bytes of a CTA's tensor memory, as counted by the race detector.
pub const BYTES: u32 = LANES * COLUMNS * 4;

/// An allocation with `.cta_group::2`.
#[derive(Clone, Copy)]
pub struct PairAllocation {
    /// The allocating warp, and the race detector's time of the allocation.
    pub warp: u32,
    pub time: u32,
    /// Number of cluster-barrier generations that the warp had waited for.
    pub met: u64,
}

/// The tensor memory of a CTA.
#[derive(Default)]
pub struct Tmem {
    /// Cells in lane-major order. Empty until the first allocation.
    pub cells: Vec<u32>,
    pub defined: Vec<bool>,
    /// First column and number of columns of each allocation.
    allocations: Vec<(u32, u32)>,
    /// Allocations with `.cta_group::2`, in order.
    pub pair_allocations: Vec<PairAllocation>,
    /// `true` if the CTA has given up the right to allocate.
    pub relinquished: bool,
    /// Maximum number of columns allocated at the same time.
    pub peak: u32,
}

impl Tmem {
    /// Allocates columns, if there is room. Takes the lowest free column that is a multiple of `columns`.
    pub fn allocate(&mut self, columns: u32) -> Option<u32> {
        if self.cells.is_empty() {
            self.cells = vec![0; (LANES * COLUMNS) as usize];
            self.defined = vec![false; self.cells.len()];
        }
        let first = self.room(columns)?;
        self.allocations.push((first, columns));
        self.peak = self.peak.max(self.used());
        Some(first)
    }

    /// First column that an allocation would get.
    pub fn room(&self, columns: u32) -> Option<u32> {
        let free = |first: &u32| self.allocations.iter().all(|&(at, n)| first + columns <= at || at + n <= *first);
        (0..COLUMNS).step_by(columns as usize).find(free)
    }

    /// Number of columns allocated at present.
    pub fn used(&self) -> u32 {
        self.allocations.iter().map(|a| a.1).sum()
    }

    /// Frees an allocation. The range must be exactly an allocated range.
    pub fn free(&mut self, first: u32, columns: u32) -> Stopped<()> {
        if !is_allocation_size(columns) {
            let text = format!("invalid number of columns {columns}; expected a power of two from 32 to 512");
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let Some(at) = self.allocations.iter().position(|&a| a == (first, columns)) else {
            let text = format!("cannot free {columns} columns at column {first}: no allocation has this range");
            return Err(Stop::new(FaultKind::TmemNotAllocated, text));
        };
        self.allocations.remove(at);
        for lane in 0..LANES {
            let row = (lane * COLUMNS + first) as usize;
            self.defined[row..row + columns as usize].fill(false);
        }
        Ok(())
    }

    /// Checks that cells exist and are allocated.
    pub fn check(&self, at: Address, columns: u32) -> Stopped<()> {
        let Address { lane, column } = at;
        if lane >= LANES || column + columns > COLUMNS {
            let text = format!("lane {lane}, columns {column} to {}", column + columns - 1);
            return Err(Stop::new(FaultKind::TmemOutOfBounds, text));
        }
        let (mut at, end) = (column, column + columns);
        while at < end {
            // A range may span adjacent allocations.
            match self.allocations.iter().find(|&&(first, n)| (first..first + n).contains(&at)) {
                Some(&(first, n)) => at = first + n,
                None => {
                    return Err(Stop::new(FaultKind::TmemNotAllocated, format!("column {at} is not allocated")));
                }
            }
        }
        Ok(())
    }
}
