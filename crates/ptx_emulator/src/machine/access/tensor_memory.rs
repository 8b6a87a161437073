//! Checked reads and writes of tensor memory.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::hw::tmem::{Address, COLUMNS};
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

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

    pub fn tmem_write(&mut self, cta: u32, at: Address, value: u32) {
        let tmem = &mut self.ctas[cta as usize].tmem;
        let index = (at.lane * COLUMNS + at.column) as usize;
        if let Some(cell) = tmem.cells.get_mut(index) {
            *cell = value;
            tmem.defined[index] = true;
        }
    }
}
