//! A warp: 32 lanes with their registers, and the fragments into which divergence has split the lanes. Each fragment is
//! a group of lanes at the same position. This module knows no opcode.

use std::collections::HashSet;

use super::address::{Lane, space_of};
use super::frame::Kept;
use super::in_flight::{BulkGroups, CopyGroups, Poll, SharedLoad, TmemLoad, WgmmaGroups};
use super::race::{Agent, Shared};
use super::wait::WaitFor;
use crate::config::fault::{FaultKind, Stop};
use crate::operand::{Address, Dst, PredicateDst, PredicateSrc, Row, SPREAD, Src};
use crate::types::Space;

/// Source of an undefined value that becomes a fault at its first use in an address or a branch, or when stored to
/// global memory. Shipped kernels produce such values in lanes whose results they drop.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// A load of shared memory that nothing has written.
    UnwrittenShared,
    /// A shuffle from a lane that does not participate.
    AbsentLane,
}

/// Lanes that an instruction has given an undefined value.
#[derive(Clone, Copy, Debug)]
pub struct Doubt {
    pub lanes: u32,
    pub pc: u32,
    pub source: Source,
}

impl Doubt {
    fn stop(&self) -> Box<Stop> {
        let (kind, text, other) = match self.source {
            Source::UnwrittenShared => (
                FaultKind::UninitializedShared,
                "use of a value computed from shared memory that nothing has written",
                "the load",
            ),
            Source::AbsentLane => (
                FaultKind::WarpDivergence,
                "use of a value shuffled from a lane that did not participate",
                "the shuffle",
            ),
        };
        Stop::new(kind, text).other(other, Some(self.pc))
    }
}

/// Lanes at the same position.
#[derive(Clone, Debug)]
pub struct Fragment {
    pub pc: u32,
    pub mask: u32,
    /// Return addresses and called functions, innermost last.
    pub calls: Vec<(u32, u32)>,
    /// Condition that the fragment waits for. Its instruction is executed again after the wait.
    pub wait: Option<WaitFor>,
    /// Step of the cluster at the start of the wait.
    pub since: u64,
    /// Backward jumps while other fragments waited. A spinning fragment yields to the rest of its warp.
    pub spins: u32,
}

pub struct Warp {
    /// Index in the cluster.
    pub index: u32,
    /// Rank of the CTA in its cluster.
    pub cta: u32,
    /// Index in the CTA.
    pub role: u32,
    /// Lanes that have threads.
    pub all: u32,
    pub fragments: Vec<Fragment>,
    /// Function that each lane returned from last.
    pub returned: [u32; 32],
    /// Saved values of functions that were called recursively.
    pub kept: Vec<Kept>,
    /// Index of the running fragment.
    pub current: usize,
    registers: Vec<Row>,
    defined: Vec<u32>,
    /// Undefined bytes of each lane, for each register that is not completely defined.
    undefined: Vec<[u8; 32]>,
    predicates: Vec<u32>,
    predicates_defined: Vec<u32>,
    /// Local memory and function parameters, lane by lane.
    pub local: Vec<u8>,
    pub local_defined: Vec<bool>,
    /// Bytes of local memory that hold copies of undefined bytes.
    pub local_undefined: HashSet<usize>,
    pub copies: Box<[CopyGroups; 32]>,
    /// Lanes that have arrived at the cluster barrier and not yet waited, and the generation of the arrival.
    pub cluster_arrived: u32,
    pub cluster_generation: u64,
    /// Number of cluster-barrier generations that were complete at the warp's last wait.
    pub cluster_waited: u64,
    /// Race detector's time of the last `fence.mbarrier_init`, by lane. A relaxed arrival at the cluster barrier
    /// publishes the initializations before the fence.
    pub initializations_fenced: [Option<u32>; 32],
    /// Loads from shared memory whose registers are not used yet, and a filter of these registers.
    pub shared_loads: Vec<SharedLoad>,
    pub loaded: u64,
    /// `tcgen05.ld` operations whose registers have not been waited for, and `tcgen05.st` operations in flight.
    pub tmem_loads: Vec<TmemLoad>,
    pub tmem_stores: Vec<(u64, Option<Agent>)>,
    /// Knowledge of tensor memory at the warp's last `tcgen05.fence::after_thread_sync`.
    pub tmem_view: Shared,
    /// What the warp's own `tcgen05` operations did.
    pub tmem_known: Shared,
    /// What it polls and has not used yet.
    pub polls: Vec<Poll>,
    /// Matrix instructions in flight, and when each register was last written (empty if the kernel has none).
    pub wgmma: WgmmaGroups,
    pub written_at: Vec<u64>,
    /// Bulk copies of each lane that no mbarrier tracks.
    pub bulk: Box<[BulkGroups; 32]>,
    /// Registers of each thread, once `setmaxnreg` has changed them.
    pub register_limit: Option<u32>,
    /// Bytes that the current instruction leaves undefined: register, lane and byte mask.
    pub undefined_results: Vec<(u32, usize, u8)>,
    /// Lanes in which the current instruction leaves its predicates undefined.
    pub undefined_predicates: u32,
    /// Undefined values that are reported when they are stored, not only when they are used.
    pub doubts: Vec<Doubt>,
    /// The wait that has ended, for the instruction that began it.
    pub resumed: Option<WaitFor>,
    /// Number of instructions issued.
    pub issued: u64,
}

impl Warp {
    pub fn new(index: u32, cta: u32, role: u32, all: u32, registers: u32, predicates: u32, local: u32) -> Warp {
        Warp {
            index,
            cta,
            role,
            all,
            fragments: vec![Fragment { pc: 0, mask: all, calls: Vec::new(), wait: None, since: 0, spins: 0 }],
            returned: [0; 32],
            kept: Vec::new(),
            current: 0,
            registers: vec![[0; 32]; registers as usize],
            defined: vec![0; registers as usize],
            undefined: vec![[u8::MAX; 32]; registers as usize],
            predicates: vec![0; predicates as usize],
            predicates_defined: vec![0; predicates as usize],
            local: vec![0; local as usize * 32],
            local_defined: vec![false; local as usize * 32],
            local_undefined: HashSet::new(),
            copies: Box::default(),
            cluster_arrived: 0,
            cluster_generation: 0,
            cluster_waited: 0,
            initializations_fenced: [None; 32],
            shared_loads: Vec::new(),
            loaded: 0,
            tmem_loads: Vec::new(),
            tmem_stores: Vec::new(),
            tmem_view: None,
            tmem_known: None,
            polls: Vec::new(),
            wgmma: WgmmaGroups::default(),
            written_at: Vec::new(),
            bulk: Box::default(),
            register_limit: None,
            undefined_results: Vec::new(),
            undefined_predicates: 0,
            doubts: Vec::new(),
            resumed: None,
            issued: 0,
        }
    }

    /// Value of an operand in each lane.
    #[inline(always)]
    pub fn get(&self, src: Src) -> Row {
        match src {
            Src::Register(r) => self.registers[r as usize],
            Src::Constant(c) => [c; 32],
        }
    }

    /// Value of an operand in one lane.
    #[inline(always)]
    pub fn lane(&self, src: Src, lane: usize) -> u64 {
        match src {
            Src::Register(r) => self.registers[r as usize][lane],
            Src::Constant(c) => c,
        }
    }

    /// Value of an address operand in one lane.
    #[inline(always)]
    pub fn address(&self, address: &Address, lane: usize) -> u64 {
        self.lane(address.base, lane).wrapping_add(address.offset as u64)
    }

    /// Access of one lane at an address operand.
    pub fn lane_at(&self, address: &Address, space: Space, lane: usize) -> Lane {
        Lane { lane: lane as u32, address: self.address(address, lane), space }
    }

    /// Address of one lane in the cluster's shared memory, from a generic address or an address in the shared window.
    pub fn shared_at(&self, address: &Address, lane: usize) -> Lane {
        let at = self.lane_at(address, Space::SharedCluster, lane);
        let space = if space_of(at.address) == Space::Shared { Space::Generic } else { Space::SharedCluster };
        Lane { space, ..at }
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn set(&mut self, register: u32, mask: u32, row: &Row) {
        let out = &mut self.registers[register as usize];
        if mask == u32::MAX {
            *out = *row;
        } else {
            for (n, byte) in mask.to_le_bytes().into_iter().enumerate() {
                let lanes = out[8 * n..][..8].iter_mut().zip(&row[8 * n..][..8]);
                for ((out, new), written) in lanes.zip(&SPREAD[usize::from(byte)]) {
                    *out = *out & !written | new & written;
                }
            }
        }
    }

    #[inline(always)]
    pub fn set_lane(&mut self, register: u32, lane: usize, value: u64) {
        self.registers[register as usize][lane] = value;
    }

    /// Mask of the lanes in which a predicate is true.
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

    /// Undefined bytes of an operand in one lane.
    pub fn undefined_bytes(&self, src: Src, lane: usize) -> u8 {
        match src {
            Src::Register(r) if self.defined(r) >> lane & 1 == 0 => self.undefined[r as usize][lane],
            _ => 0,
        }
    }

    /// Marks the bytes of a register that an instruction has left undefined in one lane.
    pub fn undefine(&mut self, register: u32, lane: usize, bytes: u8) {
        if bytes != 0 {
            self.define(register, 1 << lane, 0);
            self.undefined[register as usize][lane] = bytes;
        }
    }

    /// Marks results of the current instruction in one lane as undefined. Each register gets `piece` bytes, and
    /// `undefined` is the mask of undefined bytes over all registers.
    pub fn undefine_results(&mut self, out: &[Dst], piece: usize, lane: usize, undefined: u64) {
        for (n, d) in out.iter().enumerate() {
            let bytes = undefined >> (n * piece) & ((1 << piece) - 1);
            if let (Some(register), true) = (d.register, bytes != 0) {
                self.undefined_results.push((register, lane, bytes as u8));
            }
        }
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

    /// Whether a register that an asynchronous matrix instruction uses was written after the last `wgmma.fence`.
    pub fn wgmma_fence_missing(&self, mut registers: impl Iterator<Item = u32>) -> bool {
        let fenced_at = self.wgmma.fenced_at;
        registers.any(|r| self.written_at.get(r as usize).is_some_and(|&at| at > fenced_at))
    }

    /// Lanes that have not exited.
    pub fn live(&self) -> u32 {
        self.fragments.iter().fold(0, |m, f| m | f.mask)
    }

    /// Index of the running instruction.
    pub fn pc(&self) -> u32 {
        self.fragments[self.current].pc
    }

    /// Records that the current instruction gives a lane an undefined value.
    pub fn doubt(&mut self, lane: usize, source: Source) {
        let pc = self.pc();
        match self.doubts.iter_mut().find(|doubt| doubt.pc == pc) {
            Some(doubt) => doubt.lanes |= 1 << lane,
            None => self.doubts.push(Doubt { lanes: 1 << lane, pc, source }),
        }
    }

    /// Copies the record of undefined values from one lane to another.
    pub fn copy_doubts(&mut self, from: usize, to: usize) {
        self.doubts.iter_mut().for_each(|doubt| doubt.lanes |= (doubt.lanes >> from & 1) << to);
    }

    /// The fault for the first instruction that gave a lane an undefined value.
    pub fn doubted(&self, lane: u32) -> Option<Box<Stop>> {
        self.doubts.iter().find(|doubt| doubt.lanes >> lane & 1 == 1).map(|doubt| doubt.stop().lane(lane))
    }

    /// Index of a byte of a lane's local memory.
    pub fn local_at(&self, lane: usize, address: u64) -> usize {
        lane * self.local_size() + address as usize
    }

    /// Bytes of local memory per lane.
    pub fn local_size(&self) -> usize {
        self.local.len() / 32
    }
}

impl Dst {
    /// Writes the lanes of `mask`, truncated to the register's width.
    #[inline(always)]
    pub fn write(&self, w: &mut Warp, mask: u32, row: &Row) {
        let Some(register) = self.register else {
            return;
        };
        if self.bits >= 64 {
            return w.set(register, mask, row);
        }
        let ones = (1 << self.bits) - 1;
        w.set(register, mask, &row.map(|v| v & ones));
    }

    #[inline(always)]
    pub fn write_lane(&self, w: &mut Warp, lane: usize, value: u64) {
        if let Some(register) = self.register {
            let ones = u64::MAX >> (64 - self.bits.min(64));
            w.set_lane(register, lane, value & ones);
        }
    }
}

impl PredicateDst {
    #[inline(always)]
    pub fn write(&self, w: &mut Warp, mask: u32, value: u32) {
        if let Some(p) = self.0 {
            w.set_predicate(p, mask, value);
        }
    }
}

impl PredicateSrc {
    /// Lanes in which the predicate is true.
    #[inline(always)]
    pub fn mask(&self, w: &Warp) -> u32 {
        match *self {
            PredicateSrc::Register(p, negated) => w.predicate(p) ^ if negated { u32::MAX } else { 0 },
            PredicateSrc::Constant(true) => u32::MAX,
            PredicateSrc::Constant(false) => 0,
        }
    }
}
