//! A warp: 32 lanes with their registers, and the fragments into which divergence has split them. Each fragment is
//! a group of lanes at one place; fragments that meet again merge. Knows no opcode.

use std::collections::VecDeque;

use super::cluster::Machine;
use crate::exec::{WaitFor, wgmma};
use crate::fault::{FaultKind, Stop, Stopped};
use crate::lower::Dst;
use crate::race::{Agent, Shared};

/// One value for each lane, as untyped bits in the low end.
pub type Row = [u64; 32];

/// Lanes that are at one place.
#[derive(Clone, Debug)]
pub struct Fragment {
    pub pc: u32,
    pub mask: u32,
    /// Return addresses and the functions called, innermost last.
    pub calls: Vec<(u32, u32)>,
    /// What the fragment waits for; its instruction is executed again when that has come.
    pub wait: Option<WaitFor>,
    /// The cluster's step when the wait began.
    pub since: u64,
    /// Backward jumps while others waited: a fragment that spins yields to the rest of its warp.
    pub spins: u32,
}

/// The non-bulk asynchronous copies of one lane.
#[derive(Clone, Debug, Default)]
pub struct CopyGroups {
    /// Issued and not yet committed.
    pub open: Vec<(u64, Option<Agent>)>,
    /// Committed, oldest first.
    pub committed: VecDeque<Vec<(u64, Option<Agent>)>>,
}

/// A bulk copy that belongs to a group: when its source has been read, and when it is complete.
#[derive(Clone, Debug)]
pub struct BulkCopy {
    pub read: u64,
    pub written: u64,
    pub agent: Option<Agent>,
}

/// A load from tensor memory before its wait: registers and the values they will get.
pub struct TmemLoad {
    pub values: Vec<(Dst, Row)>,
    pub agent: Option<Agent>,
    pub pc: u32,
}

/// The bulk copies of one lane that complete by groups.
#[derive(Clone, Debug, Default)]
pub struct BulkGroups {
    /// Issued and not yet committed.
    pub open: Vec<BulkCopy>,
    /// Committed, oldest first.
    pub committed: VecDeque<Vec<BulkCopy>>,
}

pub struct Warp {
    /// Index in the cluster.
    pub index: u32,
    /// CTA of the cluster.
    pub cta: u32,
    /// Index in the CTA.
    pub role: u32,
    /// Lanes that the launch gave threads to.
    pub all: u32,
    pub fragments: Vec<Fragment>,
    /// The fragment that runs now.
    pub current: usize,
    registers: Vec<Row>,
    defined: Vec<u32>,
    predicates: Vec<u32>,
    predicates_defined: Vec<u32>,
    /// Local memory and function parameters, lane after lane.
    pub local: Vec<u8>,
    pub local_defined: Vec<bool>,
    pub copies: Box<[CopyGroups; 32]>,
    /// Lanes that have arrived at the cluster barrier and not yet waited, and in which generation.
    pub cluster_arrived: u32,
    pub cluster_generation: u64,
    /// `tcgen05.ld` whose registers have not been waited for, and `tcgen05.st` in flight.
    pub tmem_loads: Vec<TmemLoad>,
    pub tmem_stores: Vec<(u64, Option<Agent>)>,
    /// What the warp knew of tensor memory at its last `tcgen05.fence::after_thread_sync`.
    pub tmem_view: Shared,
    /// What the warp's own `tcgen05` operations did.
    pub tmem_known: Shared,
    /// Matrix instructions in flight, and when each register was last written (empty if the kernel has none).
    pub wgmma: wgmma::Groups,
    pub written_at: Vec<u64>,
    /// Bulk copies of each lane that no mbarrier tracks.
    pub bulk: Box<[BulkGroups; 32]>,
    /// Registers of each thread, once `setmaxnreg` has changed them.
    pub register_limit: Option<u32>,
    /// The wait that just ended, for the instruction that began it.
    pub resumed: Option<WaitFor>,
    /// Instructions issued.
    pub issued: u64,
}

/// Operand of a decoded instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    Register(u32),
    Constant(u64),
}

impl Warp {
    pub fn new(index: u32, cta: u32, role: u32, all: u32, registers: u32, predicates: u32, local: u32) -> Warp {
        Warp {
            index,
            cta,
            role,
            all,
            fragments: vec![Fragment { pc: 0, mask: all, calls: Vec::new(), wait: None, since: 0, spins: 0 }],
            current: 0,
            registers: vec![[0; 32]; registers as usize],
            defined: vec![0; registers as usize],
            predicates: vec![0; predicates as usize],
            predicates_defined: vec![0; predicates as usize],
            local: vec![0; local as usize * 32],
            local_defined: vec![false; local as usize * 32],
            copies: Box::default(),
            cluster_arrived: 0,
            cluster_generation: 0,
            tmem_loads: Vec::new(),
            tmem_stores: Vec::new(),
            tmem_view: None,
            tmem_known: None,
            wgmma: wgmma::Groups::default(),
            written_at: Vec::new(),
            bulk: Box::default(),
            register_limit: None,
            resumed: None,
            issued: 0,
        }
    }

    /// An operand's value in each lane.
    #[inline(always)]
    pub fn get(&self, src: Src) -> Row {
        match src {
            Src::Register(r) => self.registers[r as usize],
            Src::Constant(c) => [c; 32],
        }
    }

    /// An operand's value in one lane.
    #[inline(always)]
    pub fn lane(&self, src: Src, lane: usize) -> u64 {
        match src {
            Src::Register(r) => self.registers[r as usize][lane],
            Src::Constant(c) => c,
        }
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn set(&mut self, register: u32, mask: u32, row: &Row) {
        let out = &mut self.registers[register as usize];
        if mask == u32::MAX {
            *out = *row;
        } else {
            for i in 0..32 {
                let keep = ((mask >> i & 1) as u64).wrapping_sub(1);
                out[i] = out[i] & keep | row[i] & !keep;
            }
        }
    }

    #[inline(always)]
    pub fn set_lane(&mut self, register: u32, lane: usize, value: u64) {
        self.registers[register as usize][lane] = value;
    }

    /// A predicate as a mask of the lanes in which it is true.
    #[inline(always)]
    pub fn predicate(&self, p: u32) -> u32 {
        self.predicates[p as usize]
    }

    #[inline(always)]
    pub fn set_predicate(&mut self, p: u32, mask: u32, value: u32) {
        let out = &mut self.predicates[p as usize];
        *out = *out & !mask | value & mask;
    }

    /// Lanes in which a register has been written.
    #[inline(always)]
    pub fn defined(&self, register: u32) -> u32 {
        self.defined[register as usize]
    }

    #[inline(always)]
    pub fn define(&mut self, register: u32, mask: u32, defined: u32) {
        let out = &mut self.defined[register as usize];
        *out = *out & !mask | defined & mask;
    }

    #[inline(always)]
    pub fn predicate_defined(&self, p: u32) -> u32 {
        self.predicates_defined[p as usize]
    }

    #[inline(always)]
    pub fn define_predicate(&mut self, p: u32, mask: u32, defined: u32) {
        let out = &mut self.predicates_defined[p as usize];
        *out = *out & !mask | defined & mask;
    }

    /// Registers that an asynchronous matrix instruction uses must not have been written since the last `wgmma.fence`.
    pub fn check_wgmma_fence(&self, registers: impl Iterator<Item = u32>) -> Stopped<()> {
        let mut registers = registers;
        let fenced_at = self.wgmma.fenced_at;
        match registers.find(|&r| self.written_at.get(r as usize).is_some_and(|&at| at > fenced_at)) {
            None => Ok(()),
            Some(_) => {
                let text = "a register of the instruction was written since the warp's last wgmma.fence";
                Err(Stop::new(FaultKind::MissingWgmmaFence, text))
            }
        }
    }

    /// Lanes that have not exited.
    pub fn live(&self) -> u32 {
        self.fragments.iter().fold(0, |m, f| m | f.mask)
    }

    /// The instruction that runs now.
    pub fn pc(&self) -> u32 {
        self.fragments[self.current].pc
    }

    /// Bytes of local memory of one lane.
    pub fn local_size(&self) -> usize {
        self.local.len() / 32
    }

    /// Merges fragments at one place, and picks the next to run: among those that can, the one that span least,
    /// then the one that is furthest behind. `false` if none can run.
    pub fn schedule(&mut self, machine: &mut Machine) -> Stopped<bool> {
        if self.fragments.len() == 1 {
            self.current = 0;
            let ready = match &self.fragments[0].wait {
                None => true,
                Some(wait) => wait.ready(machine, self.fragments[0].mask),
            };
            if ready {
                self.resume(0, machine);
            } else {
                self.check_convergence()?;
            }
            return Ok(ready);
        }
        self.merge();
        let mut best: Option<(u32, u32, usize)> = None;
        for (i, f) in self.fragments.iter().enumerate() {
            let ready = match &f.wait {
                None => true,
                Some(WaitFor::Lanes { need, anywhere: false }) => need & !f.mask == 0,
                Some(WaitFor::Lanes { need, anywhere: true }) => {
                    let waiting = self.fragments.iter().filter_map(|o| match &o.wait {
                        Some(WaitFor::Lanes { need: n, anywhere: true }) if n == need => Some(o.mask),
                        _ => None,
                    });
                    need & !waiting.fold(0, |m, n| m | n) == 0
                }
                Some(wait) => wait.ready(machine, f.mask),
            };
            let key = (f.spins / SPIN_QUOTA, f.pc, i);
            if ready && best.is_none_or(|b| key < b) {
                best = Some(key);
            }
        }
        let Some((_, _, i)) = best else {
            self.check_convergence()?;
            return Ok(false);
        };
        if let Some(WaitFor::Lanes { need, anywhere: true }) = self.fragments[i].wait {
            // All members have arrived, wherever they are: free them all.
            for f in &mut self.fragments {
                if matches!(&f.wait, Some(WaitFor::Lanes { need: n, anywhere: true }) if *n == need) {
                    f.wait = Some(WaitFor::Released);
                }
            }
        }
        self.current = i;
        self.resume(i, machine);
        Ok(true)
    }

    /// Ends a fragment's wait.
    fn resume(&mut self, fragment: usize, machine: &mut Machine) {
        let fragment = &mut self.fragments[fragment];
        self.resumed = fragment.wait.take();
        if !matches!(self.resumed, None | Some(WaitFor::Lanes { .. } | WaitFor::Released)) {
            machine.roles[self.role as usize].waited_steps += machine.now - fragment.since;
        }
    }

    /// Joins fragments that are at one place in the same call.
    fn merge(&mut self) {
        let mut i = 0;
        while i < self.fragments.len() {
            let mut j = i + 1;
            while j < self.fragments.len() {
                let (a, b) = (&self.fragments[i], &self.fragments[j]);
                let converging = |f: &Fragment| matches!(&f.wait, None | Some(WaitFor::Lanes { anywhere: false, .. }));
                if a.pc == b.pc && a.calls == b.calls && (a.wait == b.wait || converging(a) && converging(b)) {
                    let b = self.fragments.swap_remove(j);
                    let a = &mut self.fragments[i];
                    a.mask |= b.mask;
                    a.spins = a.spins.min(b.spins);
                    if a.wait != b.wait {
                        a.wait = None;
                    }
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
        if self.fragments.len() == 1 {
            self.fragments[0].spins = 0;
        }
    }

    /// When no fragment can run: lanes that wait for each other at different places will wait for ever.
    fn check_convergence(&self) -> Stopped<()> {
        let live = self.live();
        for f in &self.fragments {
            let Some(WaitFor::Lanes { need, anywhere }) = &f.wait else {
                continue;
            };
            // A lane that waits for something else may still come.
            let stuck = |o: &&Fragment| {
                o.mask & need != 0 && o.mask & f.mask == 0 && matches!(o.wait, Some(WaitFor::Lanes { .. }))
            };
            let gone = need & !live;
            let elsewhere = self.fragments.iter().find(stuck);
            if gone == 0 && elsewhere.is_none() {
                continue;
            }
            let mut stop = Stop::new(
                FaultKind::WarpDivergence,
                if gone != 0 && elsewhere.is_none() {
                    format!(
                        "lanes {need:#010x} must execute it together; {:#010x} do, {gone:#010x} have exited",
                        f.mask
                    )
                } else if *anywhere {
                    format!("lanes {need:#010x} must all arrive; {:#010x} wait here", f.mask)
                } else {
                    format!("lanes {need:#010x} must execute it together; {:#010x} do", f.mask)
                },
            );
            stop.pc = Some(f.pc);
            if let Some(o) = elsewhere {
                stop = stop.other(format!("lanes {:#010x} are at another place", o.mask), Some(o.pc));
            }
            return Err(stop);
        }
        Ok(())
    }
}

/// Backward jumps that a fragment may take before the rest of its warp gets a turn.
const SPIN_QUOTA: u32 = 64;
