//! A warp: 32 lanes with their registers, and the fragments into which divergence has split the lanes. Each fragment is
//! a group of lanes at the same position. This module knows no opcode.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::address::{Lane, width};
use super::in_flight::{BulkGroups, CopyGroups, Poll, SharedLoad, TmemLoad, WgmmaGroups};
use super::race::{Agent, Shared};
use super::wait::WaitFor;
use crate::config::fault::{FaultKind, Stop};
use crate::operand::{Address, Dst, PredicateDst, PredicateSrc, Row, SPREAD, Src, lanes};
use crate::types::Space;

/// Origin of an undefined value. The value becomes a fault at its first use in an address or a branch. Shipped kernels
/// produce such values in lanes whose results they drop.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// The use of a register that no instruction has written.
    Register,
    /// A load of shared memory that nothing has written.
    UnwrittenShared,
    /// A load of global memory that is marked as undefined.
    UnwrittenGlobal,
    /// A shuffle from a lane that does not participate.
    AbsentLane,
}

impl Source {
    /// The source for a load of memory that nothing has written: shared memory, or global memory.
    pub fn unwritten(shared: bool) -> Source {
        if shared { Source::UnwrittenShared } else { Source::UnwrittenGlobal }
    }
}

/// Instruction that first had an undefined value.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    pub source: Source,
    pub pc: u32,
}

impl Origin {
    /// The fault for a use of the value by the instruction at `pc`.
    pub fn stop(&self, pc: u32) -> Box<Stop> {
        let (kind, text, other) = match self.source {
            Source::Register if self.pc == pc => {
                let text = "a source register that no instruction has written";
                return Stop::new(FaultKind::UninitializedRegister, text);
            }
            Source::Register => (
                FaultKind::UninitializedRegister,
                "use of a value computed from a register that no instruction has written",
                "the first use of the register",
            ),
            Source::UnwrittenShared => (
                FaultKind::UninitializedShared,
                "use of a value computed from shared memory that nothing has written",
                "the load",
            ),
            Source::UnwrittenGlobal => (
                FaultKind::UninitializedGlobal,
                "use of a value computed from global memory that nothing has written",
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

/// Undefined bits of a register in a lane.
#[derive(Clone, Copy, Debug)]
pub struct Undefined {
    pub register: u32,
    pub lane: usize,
    pub bits: u64,
    pub origin: Origin,
}

/// Values that some lanes of a function held when they called it recursively.
pub struct Kept {
    /// Call depth of these lanes.
    pub depth: usize,
    pub mask: u32,
    /// Each register with its value, the lanes in which it is defined, and the undefined bits of each lane.
    pub registers: Vec<(u32, Row, u32, [Undefined; 32])>,
    /// Each predicate with its value and the lanes in which it is defined.
    pub predicates: Vec<(u32, u32, u32)>,
    /// Each range of local memory: its offset, and for each lane the bytes and their defined flags.
    pub local: Vec<(u32, Vec<Stretch>)>,
}

/// Bytes of local memory and their defined flags.
type Stretch = (Vec<u8>, Vec<bool>);

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

/// All that decides a warp's next steps, except for memory.
pub struct State {
    fragments: Vec<Fragment>,
    registers: Vec<Row>,
    predicates: Vec<u32>,
}

impl Fragment {
    /// Whether two fragments are at the same position, with the same kind of wait.
    fn is_like(&self, other: &Fragment) -> bool {
        let kind = |f: &Fragment| f.wait.as_ref().map(std::mem::discriminant);
        (self.pc, self.mask) == (other.pc, other.mask) && self.calls == other.calls && kind(self) == kind(other)
    }
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
    /// Undefined bits of each lane and their origins, for registers that instructions have left undefined. Other
    /// registers that are not defined were never written.
    undefined: FxHashMap<u32, [Option<(u64, Origin)>; 32]>,
    predicates: Vec<u32>,
    predicates_defined: Vec<u32>,
    /// Origins of predicates that instructions have left undefined.
    predicate_origins: FxHashMap<u32, [Option<Origin>; 32]>,
    /// Local memory and function parameters, lane by lane.
    pub local: Vec<u8>,
    pub local_defined: Vec<bool>,
    /// Bytes of local memory that hold copies of undefined bytes.
    pub local_undefined: FxHashMap<usize, Origin>,
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
    /// The race detector's knowledge of the warp's own `tcgen05` operations.
    pub tmem_known: Shared,
    /// Results of `mbarrier.try_wait` that no instruction has used yet.
    pub polls: Vec<Poll>,
    /// Matrix instructions in flight, and when each register was last written (empty if the kernel has none).
    pub wgmma: WgmmaGroups,
    pub written_at: Vec<u64>,
    /// Bulk copies of each lane that no mbarrier tracks.
    pub bulk: Box<[BulkGroups; 32]>,
    /// Registers of each thread, once `setmaxnreg` has changed them.
    pub register_limit: Option<u32>,
    /// Bits that the current instruction leaves undefined.
    pub undefined_results: Vec<Undefined>,
    /// Predicates that the current instruction leaves undefined, with their lanes.
    pub undefined_predicates: Vec<(u32, u32, Origin)>,
    /// The wait that has ended, for the instruction that began it.
    pub resumed: Option<WaitFor>,
    /// Number of instructions issued.
    pub issued: u64,
    /// Lanes that have run since the warp's state was taken.
    pub ran: u32,
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
            undefined: FxHashMap::default(),
            predicates: vec![0; predicates as usize],
            predicates_defined: vec![0; predicates as usize],
            predicate_origins: FxHashMap::default(),
            local: vec![0; local as usize * 32],
            local_defined: vec![false; local as usize * 32],
            local_undefined: FxHashMap::default(),
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
            undefined_predicates: Vec::new(),
            resumed: None,
            issued: 0,
            ran: 0,
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
        Lane { lane: lane as u32, address: self.address(address, lane) & width(space), space }
    }

    /// Address of one lane in the cluster's shared memory, by an instruction that names this space.
    pub fn shared_at(&self, address: &Address, lane: usize) -> Lane {
        self.lane_at(address, Space::SharedCluster, lane)
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

    /// Undefined bits of an operand in one lane.
    pub fn undefined_bits(&self, src: Src, lane: usize) -> u64 {
        match src {
            Src::Register(r) if self.defined(r) >> lane & 1 == 0 => {
                self.undefined.get(&r).and_then(|lanes| lanes[lane]).map_or(u64::MAX, |(bits, _)| bits)
            }
            _ => 0,
        }
    }

    /// Undefined bytes of an operand in one lane: bytes with undefined bits.
    pub fn undefined_bytes(&self, src: Src, lane: usize) -> u8 {
        let bits = self.undefined_bits(src, lane);
        (0..8).fold(0, |bytes, n| bytes | u8::from(bits >> (8 * n) & 0xff != 0) << n)
    }

    /// Origin of the undefined bits of a register in one lane, if the current instruction uses it.
    pub fn origin(&self, src: Src, lane: usize) -> Origin {
        let known = match src {
            Src::Register(r) => self.undefined.get(&r).and_then(|lanes| lanes[lane]),
            Src::Constant(_) => None,
        };
        known.map_or(Origin { source: Source::Register, pc: self.pc() }, |(_, origin)| origin)
    }

    /// Origin of an undefined predicate in one lane, if the current instruction uses it.
    pub fn predicate_origin(&self, p: u32, lane: usize) -> Origin {
        let known = self.predicate_origins.get(&p).and_then(|lanes| lanes[lane]);
        known.unwrap_or(Origin { source: Source::Register, pc: self.pc() })
    }

    /// Origin of an operand's undefined bits in some lane, if it has any.
    pub fn undefined_somewhere(&self, src: Src) -> Option<Origin> {
        let Src::Register(r) = src else { return None };
        let lane = (!self.defined(r)).trailing_zeros() as usize;
        (lane < 32).then(|| self.origin(src, lane))
    }

    /// Marks the bits of a register that an instruction has left undefined in one lane.
    pub fn undefine(&mut self, Undefined { register, lane, bits, origin }: Undefined) {
        if bits != 0 {
            let first = self.defined(register) >> lane & 1 == 1;
            self.define(register, 1 << lane, 0);
            let known = &mut self.undefined.entry(register).or_insert([None; 32])[lane];
            let before = known.filter(|_| !first).map_or(0, |(bits, _)| bits);
            *known = Some((bits | before, origin));
        }
    }

    /// Marks a predicate that an instruction has left undefined in some lanes.
    pub fn undefine_predicate(&mut self, p: u32, mask: u32, origin: Origin) {
        self.define_predicate(p, mask, 0);
        let origins = self.predicate_origins.entry(p).or_insert([None; 32]);
        lanes(mask).for_each(|lane| origins[lane] = Some(origin));
    }

    /// Marks results of the current instruction in one lane as undefined. Each register gets `piece` bytes, and
    /// `undefined` is the mask of undefined bytes over all registers.
    pub fn undefine_results(&mut self, out: &[Dst], piece: usize, lane: usize, undefined: u64, origin: Origin) {
        for (n, d) in out.iter().enumerate() {
            let bytes = undefined >> (n * piece) & ((1 << piece) - 1);
            let bits = (0..8).fold(0, |bits, n| bits | ((bytes >> n & 1) * 0xff) << (8 * n));
            if let (Some(register), true) = (d.register, bits != 0) {
                self.undefined_results.push(Undefined { register, lane, bits, origin });
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

    /// The warp's state.
    pub fn state(&self) -> State {
        let (registers, predicates) = (self.registers.clone(), self.predicates.clone());
        State { fragments: self.fragments.clone(), registers, predicates }
    }

    /// Whether the warp's threads are at the same instructions as in a state. Values that recursive calls have saved are
    /// not compared, so with them no state comes again.
    pub fn is_at(&self, state: &State) -> bool {
        let alike = |(a, b): (&Fragment, &Fragment)| a.is_like(b);
        let all =
            self.fragments.len() == state.fragments.len() && self.fragments.iter().zip(&state.fragments).all(alike);
        all && self.polls.is_empty() && self.kept.is_empty()
    }

    /// Whether these registers and predicates have the same values as in a state.
    pub fn has_values_of(&self, state: &State, registers: &BTreeSet<u32>, predicates: &BTreeSet<u32>) -> bool {
        registers.iter().all(|&r| self.registers[r as usize] == state.registers[r as usize])
            && predicates.iter().all(|&p| self.predicates[p as usize] == state.predicates[p as usize])
    }

    /// Index of the running instruction.
    pub fn pc(&self) -> u32 {
        self.fragments[self.current].pc
    }

    /// Origin of an undefined value that the current instruction creates.
    pub fn begins(&self, source: Source) -> Origin {
        Origin { source, pc: self.pc() }
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
    /// Lanes in which the predicate is defined.
    pub fn defined(&self, w: &Warp) -> u32 {
        match *self {
            PredicateSrc::Register(p, _) => w.predicate_defined(p),
            PredicateSrc::Constant(_) => u32::MAX,
        }
    }

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
