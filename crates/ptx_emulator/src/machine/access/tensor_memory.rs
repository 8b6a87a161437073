//! Checked reads and writes of tensor memory.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::hw::tmem::{Address, COLUMNS, LANES};
use crate::machine::race::{Agent, Detector, Mode, merge};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// Lanes of tensor memory per quarter.
const LANES_OF_QUARTER: usize = LANES as usize / 4;

impl Machine<'_> {
    /// Records that the warp knows its operations to be complete. Other warps learn this from the warp (under `strict`,
    /// after a fence).
    pub fn tmem_learn(&mut self, w: &mut Warp, mask: u32, agents: &[Agent]) {
        let Some(race) = &mut self.race else { return };
        for agent in agents {
            race.finish(agent, &mut w.tmem_known);
        }
        if !self.launch.config.strict {
            race.acquire(w.index, mask, &w.tmem_known);
        }
    }

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
            self.hazard(Stop::new(kind, text).other(other, Some(conflict.pc)))?;
        }
        Ok(())
    }

    /// Checks that accesses to freed columns are complete and known, and forgets them: the next allocation of the columns
    /// waits for this one's end.
    pub fn tmem_retire(&mut self, w: &Warp, mask: u32, first: u32, columns: u32) -> Stopped<()> {
        let memory = self.ctas.len() as u32 + w.cta;
        let Some(race) = &mut self.race else { return Ok(()) };
        let mut known = None;
        race.release(w.index, mask, &mut known);
        w.tmem_known.iter().chain(&w.tmem_view).for_each(|other| merge(&mut known, other));
        Detector::count_weak(&mut known);
        let agent = race.spawn_from(w.index, &known, false);
        let rows: Vec<u32> = (0..LANES).map(|lane| (lane * COLUMNS + first) * 4).collect();
        let found = rows.chunks(LANES_OF_QUARTER).zip(0..).find_map(|(rows, quarter)| {
            // The columns' stores of the warp's quarter come first, as they do for its loads.
            let agent = agent.clone().in_quarter(quarter);
            let found = race.agent_accesses(&agent, memory, rows, columns * 4, Mode::Write, w.pc());
            found.err().map(|(row, conflict)| (quarter as usize * LANES_OF_QUARTER + row, conflict))
        });
        race.forget(memory, &rows, columns * 4);
        let Some((row, conflict)) = found else { return Ok(()) };
        let text = format!("columns {first} to {} are freed while lane {row} is still in use", first + columns - 1);
        let did = if conflict.wrote { "write" } else { "read" };
        let other = format!("a {did} that is not known to be complete, {}", self.name_accessor(conflict.accessor));
        self.hazard(Stop::new(FaultKind::TmemNotAllocated, text).other(other, Some(conflict.pc)))
    }

    /// Returns the bits of a cell. The cell must have been written.
    pub fn tmem_read(&self, cta: u32, at: Address) -> Stopped<u32> {
        let tmem = &self.ctas[cta as usize].tmem;
        let index = (at.lane * COLUMNS + at.column) as usize;
        if self.sanitize && !tmem.defined.get(index).is_some_and(|d| *d) {
            let text = format!("lane {}, column {}: nothing has written it", at.lane, at.column);
            self.hazard(Stop::new(FaultKind::UninitializedTmem, text))?;
        }
        Ok(tmem.cells.get(index).copied().unwrap_or(0))
    }

    /// Returns the bits of adjacent cells of one lane. The cells must have been written.
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

    /// Writes adjacent cells of one lane.
    pub fn tmem_write_row(&mut self, cta: u32, at: Address, values: &[u32]) {
        let tmem = &mut self.ctas[cta as usize].tmem;
        let first = (at.lane * COLUMNS + at.column) as usize;
        tmem.cells[first..first + values.len()].copy_from_slice(values);
        tmem.defined[first..first + values.len()].fill(true);
    }

    /// Marks adjacent cells of one lane as never written.
    pub fn tmem_undefine_row(&mut self, cta: u32, at: Address, columns: usize) {
        let first = (at.lane * COLUMNS + at.column) as usize;
        self.ctas[cta as usize].tmem.defined[first..first + columns].fill(false);
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
