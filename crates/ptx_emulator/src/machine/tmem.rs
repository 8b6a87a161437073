//! Tensor memory of a CTA (PTX ISA, "Tensor Memory"): 128 lanes of 512 columns of 32 bits, which the kernel allocates by
//! columns. Where matrices lie in it is in [`crate::hw::tmem`].

use super::cluster::Machine;
use crate::fault::{FaultKind, Stop, Stopped};
use crate::hw::tmem::{Address, COLUMNS, LANES, is_allocation_size};
use crate::race::{Agent, Mode};

/// Bytes of a CTA's tensor memory, as the race detector counts them.
pub const BYTES: u32 = LANES * COLUMNS * 4;

/// The tensor memory of a CTA.
#[derive(Default)]
pub struct Tmem {
    /// Lane by lane; empty until the first allocation.
    cells: Vec<u32>,
    defined: Vec<bool>,
    /// First column and number of columns.
    allocations: Vec<(u32, u32)>,
    /// The right to allocate has been given up.
    pub relinquished: bool,
    /// The most columns allocated at once.
    pub peak: u32,
}

impl Tmem {
    /// Allocates, if there is room: the lowest free columns that are a multiple of their number.
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

    /// Where an allocation would begin.
    pub fn room(&self, columns: u32) -> Option<u32> {
        let free = |first: &u32| self.allocations.iter().all(|&(at, n)| first + columns <= at || at + n <= *first);
        (0..COLUMNS).step_by(columns as usize).find(free)
    }

    /// Columns allocated now.
    pub fn used(&self) -> u32 {
        self.allocations.iter().map(|a| a.1).sum()
    }

    /// Frees exactly what an allocation gave.
    pub fn free(&mut self, first: u32, columns: u32) -> Stopped<()> {
        if !is_allocation_size(columns) {
            let text = format!("{columns} columns; a power of two from 32 to 512 is valid");
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let Some(at) = self.allocations.iter().position(|&a| a == (first, columns)) else {
            let text = format!("{columns} columns at column {first} are freed, but not allocated so");
            return Err(Stop::new(FaultKind::TmemNotAllocated, text));
        };
        self.allocations.remove(at);
        for lane in 0..LANES {
            let row = (lane * COLUMNS + first) as usize;
            self.defined[row..row + columns as usize].fill(false);
        }
        Ok(())
    }

    fn check(&self, at: Address, columns: u32) -> Stopped<()> {
        let Address { lane, column } = at;
        if lane >= LANES || column + columns > COLUMNS {
            let text = format!("lane {lane}, columns {column} to {}", column + columns - 1);
            return Err(Stop::new(FaultKind::TmemOutOfBounds, text));
        }
        let (mut at, end) = (column, column + columns);
        while at < end {
            // A range may run over neighbouring allocations.
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

impl Machine<'_> {
    /// Checks that cells exist and are allocated, and records the access with the race detector.
    pub fn tmem_access(
        &mut self,
        cta: u32,
        at: Address,
        columns: u32,
        agent: Option<&Agent>,
        mode: Mode,
        pc: u32,
    ) -> Stopped<()> {
        self.ctas[cta as usize].tmem.check(at, columns)?;
        let memory = self.ctas.len() as u32 + cta;
        let offset = (at.lane * COLUMNS + at.column) * 4;
        if let (Some(race), Some(agent)) = (&mut self.race, agent)
            && let Err(conflict) = race.agent_access(&agent.in_tensor_memory(), memory, offset, columns * 4, mode, pc)
        {
            let agent = race.is_agent(conflict.accessor);
            let (kind, did) = match (mode, agent) {
                (Mode::Read, true) => (FaultKind::ReadInFlight, "a read"),
                (_, true) => (FaultKind::OverwriteInFlight, "a write"),
                (_, false) => (FaultKind::DataRace, "an access"),
            };
            let text = format!("{did} of tensor memory, lane {}, columns {} on", at.lane, at.column);
            let earlier = if conflict.wrote { "an earlier write" } else { "an earlier read" };
            let other = format!("{earlier}, not known to be complete, {}", self.name_accessor(conflict.accessor));
            return Err(Stop::new(kind, text).other(other, Some(conflict.pc)));
        }
        Ok(())
    }

    /// A cell's bits; it must have been written.
    pub fn tmem_read(&self, cta: u32, at: Address) -> Stopped<u32> {
        let tmem = &self.ctas[cta as usize].tmem;
        let index = (at.lane * COLUMNS + at.column) as usize;
        if self.sanitize && !tmem.defined.get(index).is_some_and(|d| *d) {
            let text = format!("lane {}, column {}: nothing has written it", at.lane, at.column);
            return Err(Stop::new(FaultKind::UninitialisedTmem, text));
        }
        Ok(tmem.cells.get(index).copied().unwrap_or(0))
    }

    /// The bits of neighbouring cells of one lane; they must have been written.
    pub fn tmem_read_row(&self, cta: u32, at: Address, columns: u32) -> Stopped<&[u32]> {
        let tmem = &self.ctas[cta as usize].tmem;
        let first = (at.lane * COLUMNS + at.column) as usize;
        let range = first..first + columns as usize;
        if self.sanitize
            && let Some(n) = tmem.defined[range.clone()].iter().position(|d| !d)
        {
            self.tmem_read(cta, Address { column: at.column + n as u32, ..at })?;
        }
        Ok(&tmem.cells[range])
    }

    /// Writes neighbouring cells of one lane.
    pub fn tmem_write_row(&mut self, cta: u32, at: Address, values: &[u32]) {
        let tmem = &mut self.ctas[cta as usize].tmem;
        let first = (at.lane * COLUMNS + at.column) as usize;
        tmem.cells[first..first + values.len()].copy_from_slice(values);
        tmem.defined[first..first + values.len()].fill(true);
    }

    pub fn tmem_write(&mut self, cta: u32, at: Address, value: u32) {
        let tmem = &mut self.ctas[cta as usize].tmem;
        let index = (at.lane * COLUMNS + at.column) as usize;
        if let Some(cell) = tmem.cells.get_mut(index) {
            *cell = value;
            tmem.defined[index] = true;
        }
    }
}
