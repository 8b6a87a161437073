//! Loads and stores, and the checks of every access: bounds, alignment, races and initialization.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::names::readable;
use crate::machine::address::{LOCAL_BASE, Lane, RANK_SHIFT, SHARED_BASE, Spot, space_of, window};
use crate::machine::footprint::{Kind, Object};
use crate::machine::global::Allocation;
use crate::machine::in_flight::SharedLoad;
use crate::machine::race::{Accessor, Agent, Conflict, Mode, RemoteAccess};
use crate::machine::state::{Machine, forget};
use crate::machine::warp::{Origin, Source, Warp};
use crate::operand::{filter, lanes};
use crate::types::Space;

/// Kind of a write, and whether it writes the value that was there.
fn written(repeats: bool) -> Kind {
    if repeats { Kind::Rewrite } else { Kind::Write }
}

/// Party of a fault: where a value was first undefined.
const FIRST_USE: &str = "where the value was first undefined";

/// Indices of the set bits.
fn lanes64(bits: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |n| bits >> n & 1 == 1)
}

impl<'a> Machine<'a> {
    /// CTA rank in a shared address, generic or not.
    pub fn rank_of(&self, address: u64) -> u32 {
        (address as u32) >> RANK_SHIFT
    }

    /// Location of an access of `len` bytes. Faults if some of the bytes do not exist.
    pub fn resolve(&self, w: &Warp, at: Lane, len: u32) -> Stopped<Spot<'a>> {
        self.resolve_aligned(w, at, len, len)
    }

    /// Like [`resolve`](Machine::resolve), for an access whose alignment differs from its length.
    pub fn resolve_aligned(&self, w: &Warp, at: Lane, len: u32, align: u32) -> Stopped<Spot<'a>> {
        let Lane { lane, address, space } = at;
        let fault = |what: String| {
            let text = format!("{len} bytes at {} address {address:#x}: {what}", space.name());
            Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane))
        };
        if !address.is_multiple_of(u64::from(align)) {
            let text = format!("{} address {address:#x} is not a multiple of {align}", space.name());
            return Err(Stop::new(FaultKind::Misaligned, text).lane(lane));
        }
        let (space, address) = match space {
            Space::Generic => {
                let found = space_of(address);
                (
                    if found == Space::Shared { Space::SharedCluster } else { found },
                    match window(found) {
                        Some(base) => address - base,
                        None => address,
                    },
                )
            }
            _ => (space, address),
        };
        match space {
            Space::Shared | Space::SharedCluster => {
                let cta = (address >> RANK_SHIFT) as u32;
                let offset = address & ((1 << RANK_SHIFT) - 1);
                let Some(owner) = self.ctas.get(cta as usize) else {
                    return fault(format!("the cluster has no CTA of rank {cta}"));
                };
                let memory = &owner.shared;
                if owner.running == 0 {
                    return fault(format!("the memory of CTA rank {cta}, which has exited"));
                }
                if space == Space::Shared && cta != w.cta {
                    return fault(format!("the memory of CTA rank {cta}, not of the executing CTA"));
                }
                if offset < SHARED_BASE.into() || offset + u64::from(len) > memory.data.len() as u64 {
                    let size = memory.data.len() as u32 - SHARED_BASE;
                    return fault(format!("byte {} of {size}", offset as i64 - i64::from(SHARED_BASE)));
                }
                Ok(Spot::Shared { cta, offset: offset as u32 })
            }
            Space::Local => {
                if address < LOCAL_BASE.into() || address + u64::from(len) > w.local_size() as u64 {
                    let size = w.local_size() as u32 - LOCAL_BASE;
                    return fault(format!("byte {} of {size}", address as i64 - i64::from(LOCAL_BASE)));
                }
                Ok(Spot::Local(w.local_at(lane as usize, address)))
            }
            Space::Param => {
                if address + u64::from(len) > self.params.len() as u64 {
                    return fault(format!("byte {address} of {}", self.params.len()));
                }
                Ok(Spot::Param(address as usize))
            }
            Space::Generic | Space::Global | Space::Const => match self.global.locate(address, len.into()) {
                Some((allocation, offset)) => Ok(Spot::Global(allocation, offset)),
                None => fault(self.global.describe(address)),
            },
        }
    }

    /// Whether lanes of the warp have reached its instruction together.
    fn is_together(&mut self, w: &Warp, lanes: u32) -> bool {
        self.race.as_mut().is_some_and(|race| race.course(w.index).is_together(lanes))
    }

    /// Records an access to shared memory with the race detector.
    pub fn track(
        &mut self,
        cta: u32,
        offset: u32,
        len: u32,
        who: Accessor,
        mode: Mode,
        pc: u32,
    ) -> Result<(), Conflict> {
        self.reach_by_threads(cta, who, pc);
        self.track_order(cta, offset, len, who, mode, pc)
    }

    /// Like [`track`](Machine::track), for a check that is no access itself.
    pub fn track_order(
        &mut self,
        cta: u32,
        offset: u32,
        len: u32,
        who: Accessor,
        mode: Mode,
        pc: u32,
    ) -> Result<(), Conflict> {
        let Some(race) = &mut self.race else { return Ok(()) };
        let result = race.access(cta, offset, len, who, mode, pc);
        if let Some(conflict) = race.take_behind() {
            // `warn` returns no fault here: if warnings are faults, the detector does not use the course as an order.
            let lane = who.mask.trailing_zeros();
            let _ = self.warn(self.conflict(mode, conflict, offset, len).lane(lane));
        }
        result
    }

    /// Records that threads access the shared memory of a CTA, if it is another CTA's.
    pub fn reach_by_threads(&mut self, cta: u32, who: Accessor, pc: u32) {
        let warp = who.base / 32;
        if warp / self.warps_per_cta != cta {
            let time = self.race.as_ref().map_or(0, |race| race.now(warp));
            lanes(who.mask).for_each(|lane| self.reach(cta, who.base + lane as u32, time, warp, pc));
        }
    }

    /// Records that a thread or operation that belongs to `warp` accesses the shared memory of another CTA.
    fn reach(&mut self, cta: u32, number: u32, time: u32, warp: u32, pc: u32) {
        if self.race.is_some() {
            let access = RemoteAccess { number, time, pc, warp };
            self.ctas[cta as usize].remote_accesses.insert(number, access);
        }
    }

    /// Like [`reach`](Machine::reach), for an operation of the warp's current instruction.
    pub fn reach_async(&mut self, w: &Warp, cta: u32, agent: Option<&Agent>) {
        if let Some((number, time, _)) = agent.map(Agent::identity).filter(|_| cta != w.cta) {
            self.reach(cta, number, time, w.index, w.pc());
        }
    }

    /// Checks that a CTA's end is ordered after the accesses to its shared memory by other CTAs. An access after the end
    /// is a launch failure on a B300, a Thor and an RTX PRO 6000 (sgl-project/sglang#32907, triton-lang/triton#11730).
    pub fn check_end(&mut self, cta: u32) -> Stopped<()> {
        let owner = &mut self.ctas[cta as usize];
        let accesses: Vec<RemoteAccess> = std::mem::take(&mut owner.remote_accesses).into_values().collect();
        let Some(race) = &self.race else { return Ok(()) };
        let Some(access) = race.unknown_to(cta, &accesses) else { return Ok(()) };
        let ([x, y, z], warp, _) = self.launch.thread(self.index, access.warp * 32);
        let other =
            format!("CTA ({x}, {y}, {z}), warp {warp} accesses it, and no thread of the CTA that ends knows of this");
        let text = format!("CTA rank {cta} ends, and its shared memory with it, while another CTA may still access it");
        self.hazard(Stop::new(FaultKind::OutOfBounds, text).other(other, Some(access.pc)))
    }

    /// Location of bytes at a global address. Faults if some of the bytes do not exist.
    pub fn locate_global(&self, address: u64, len: u64) -> Stopped<(&'a Allocation, u64)> {
        self.global.locate(address, len).ok_or_else(|| {
            let text = format!("{len} bytes at global address {address:#x}: {}", self.global.describe(address));
            Stop::new(FaultKind::OutOfBounds, text)
        })
    }

    /// Checks the access of an operation to global memory. A lane issues the operation.
    pub fn issue_global(
        &mut self,
        w: &Warp,
        lane: usize,
        agent: Option<&Agent>,
        (address, len): (u64, u64),
        mode: Mode,
    ) -> Stopped<()> {
        let at = self.locate_global(address, len).map_err(|stop| stop.lane(lane as u32))?;
        self.track_global(w, lane as u32, at, len, mode)?;
        self.touch_async(w, lane as u32, agent, (address, len), mode)
    }

    /// Checks an access to global memory against earlier grids that may still run. The access is made by a thread or by
    /// an operation that the thread issues.
    pub fn track_global(
        &self,
        w: &Warp,
        lane: u32,
        (allocation, offset): (&Allocation, u64),
        len: u64,
        mode: Mode,
    ) -> Stopped<()> {
        if mode.is_strong() {
            allocation.strong(offset, len);
        }
        let earlier = &self.global.earlier;
        let Some(race) = self.race.as_ref().filter(|_| !earlier.is_empty()) else { return Ok(()) };
        let waited = race.knows_end_of_grids(w.index, lane);
        let Some(conflict) = earlier.race(allocation.base(), offset, len, mode, waited) else { return Ok(()) };
        let did = if mode.reads() { "read" } else { "write" };
        let text = format!("{did} of {len} bytes at {}", self.global.describe(allocation.base() + offset));
        let other = format!(
            "an earlier grid of `{}` {} it, {}",
            readable(conflict.kernel),
            if conflict.wrote { "wrote" } else { "read" },
            if conflict.out_of_reach {
                "and no grid in between has waited for its end"
            } else {
                "and no griddepcontrol.wait was executed in between"
            }
        );
        self.hazard(Stop::new(FaultKind::GridNotAwaited, text).lane(lane).other(other, None))
    }

    /// The fault for a conflict in shared memory.
    pub fn conflict(&self, mode: Mode, conflict: Conflict, offset: u32, len: u32) -> Box<Stop> {
        let reads = mode.reads();
        let agent = self.race.as_ref().is_some_and(|r| r.is_agent(conflict.accessor));
        let kind = match (conflict.only_proxy, agent, reads) {
            (true, ..) => FaultKind::MissingProxyFence,
            (_, true, true) => FaultKind::ReadInFlight,
            (_, true, false) => FaultKind::OverwriteInFlight,
            _ if conflict.loading => FaultKind::OverwriteInFlight,
            (_, false, _) => FaultKind::DataRace,
        };
        let did = if reads { "read" } else { "write" };
        let byte = i64::from(offset) - i64::from(SHARED_BASE);
        let text = format!("{did} of {len} bytes at byte {byte} of shared memory");
        let who = self.name_accessor(conflict.accessor);
        let missing = match (conflict.only_proxy, conflict.loading) {
            _ if conflict.met => {
                "and only arrivals that publish nothing (relaxed, or of too narrow a scope) are in between"
            }
            (true, _) => "the two accesses are ordered, but no proxy fence separates them",
            (_, true) => {
                "and may still read it: its warp arrived at an mbarrier before it used the loaded value. Execute \
                 fence.proxy.async before the arrival: ptxas may move the use after the arrival"
            }
            _ => "and the two accesses are not ordered",
        };
        let other = format!("{who} {} it before, {missing}", if conflict.wrote { "wrote" } else { "read" });
        Stop::new(kind, text).other(other, Some(conflict.pc))
    }

    /// Description of an accessor.
    pub fn name_accessor(&self, who: Accessor) -> String {
        let issuer = self.race.as_ref().and_then(|race| race.issuer(who));
        let thread = issuer.map_or(who.base + who.mask.trailing_zeros(), |warp| warp * 32);
        let ([x, y, z], warp, lane) = self.launch.thread(self.index, thread);
        match issuer {
            Some(_) => format!("an asynchronous operation of CTA ({x}, {y}, {z}), warp {warp}"),
            None => format!("CTA ({x}, {y}, {z}), warp {warp}, lane {lane}"),
        }
    }

    /// Reads the bytes of one lane's access, with all checks.
    pub fn load(&mut self, w: &Warp, at: Lane, mode: Mode, out: &mut [u8]) -> Stopped<()> {
        self.read(w, at, mode, out, false, false).map(drop)
    }

    /// Like [`load`](Machine::load), for a register's value. Returns the mask of unwritten bytes, which may stay
    /// undefined until the value matters. Shipped kernels load values of rows outside a matrix and drop the results.
    ///
    /// `tracked`: the race detector has already recorded the access ([`Machine::track_shared_loads`]).
    pub fn load_value(&mut self, w: &Warp, at: Lane, mode: Mode, out: &mut [u8], tracked: bool) -> Stopped<u64> {
        self.read(w, at, mode, out, !self.launch.config.strict, tracked)
    }

    fn read(
        &mut self,
        w: &Warp,
        at: Lane,
        mode: Mode,
        out: &mut [u8],
        may_be_unwritten: bool,
        tracked: bool,
    ) -> Stopped<u64> {
        let mut unwritten = 0;
        let len = out.len() as u32;
        match self.resolve(w, at, len)? {
            Spot::Global(allocation, offset) => {
                self.track_global(w, at.lane, (allocation, offset), len.into(), mode)?;
                let missing = if self.sanitize { allocation.undefined_bytes(offset, len) } else { 0 };
                if may_be_unwritten {
                    unwritten = missing;
                } else if missing != 0 {
                    let place = self.global.describe(allocation.base() + offset);
                    let text = format!("{len} bytes at {place}: nothing has written them");
                    self.hazard(Stop::new(FaultKind::UninitializedGlobal, text).lane(at.lane))?;
                }
                allocation.read(offset, out);
                let begin = allocation.base() + offset;
                self.record(Object::Global, begin..begin + u64::from(len), Kind::Read);
                if !allocation.constant {
                    self.touch(at.lane, allocation.base() + offset, len, mode, &[]);
                }
                self.buffers[allocation.index].loaded += u64::from(len);
                self.roles[w.role as usize].bytes.global_load += u64::from(len);
            }
            Spot::Shared { cta, offset } => {
                self.record_shared(cta, offset, len, Kind::Read);
                let who = Accessor { base: w.index * 32, mask: 1 << at.lane };
                if !tracked && let Err(conflict) = self.track(cta, offset, len, who, mode, w.pc()) {
                    let stop = self.conflict(mode, conflict, offset, len).lane(at.lane);
                    // Shipped kernels read the address of tensor memory after a cluster barrier with relaxed arrivals.
                    let word = self.ctas[cta as usize].allocation_words.get(&offset);
                    if word.is_none_or(|&(pc, arrived)| pc != conflict.pc || w.cluster_waited < arrived) {
                        self.hazard(stop)?;
                    } else {
                        self.warn(stop)?;
                    }
                }
                let range = offset as usize..(offset + len) as usize;
                let memory = &self.ctas[cta as usize].shared;
                if self.sanitize && !memory.defined[range.clone()].iter().all(|d| *d) {
                    if may_be_unwritten {
                        let bytes = memory.defined[range.clone()].iter().enumerate();
                        unwritten = bytes.fold(0, |bytes, (n, defined)| bytes | u64::from(!defined) << n);
                    }
                    let byte = offset - SHARED_BASE;
                    let text = format!("{len} bytes at byte {byte} of shared memory: nothing has written them");
                    if unwritten == 0 {
                        self.hazard(Stop::new(FaultKind::UninitializedShared, text).lane(at.lane))?;
                    }
                }
                out.copy_from_slice(&memory.data[range]);
                self.roles[w.role as usize].bytes.shared_load += u64::from(len);
            }
            Spot::Local(offset) => {
                let range = offset..offset + len as usize;
                // Compilers spill and copy undefined padding, so only a completely unwritten value is a fault.
                if self.sanitize && !w.local_defined[range.clone()].iter().any(|d| *d) {
                    let byte = offset % w.local_size() - LOCAL_BASE as usize;
                    let text = format!("{len} bytes at byte {byte} of local memory: nothing has written them");
                    self.hazard(Stop::new(FaultKind::UninitializedLocal, text).lane(at.lane))?;
                }
                out.copy_from_slice(&w.local[range]);
                self.roles[w.role as usize].bytes.local_load += u64::from(len);
            }
            Spot::Param(offset) => {
                out.copy_from_slice(&self.params[offset..offset + len as usize]);
                self.roles[w.role as usize].bytes.other += u64::from(len);
            }
        }
        Ok(unwritten)
    }

    /// Begins a load from shared memory by the current instruction. Its registers count as filled when they are first
    /// used.
    pub fn begin_load(&self, w: &mut Warp, registers: &Arc<[u32]>) {
        if let Some(race) = &self.race {
            let (pc, time) = (w.pc(), race.now(w.index));
            w.loaded |= filter(registers);
            w.shared_loads.push(SharedLoad { registers: registers.clone(), pc, time, released: false });
        }
    }

    /// Marks the warp's pending loads as released, because the warp arrives at an mbarrier.
    pub fn release_loads(&mut self, w: &mut Warp) {
        let Some(race) = &mut self.race else { return };
        for load in w.shared_loads.iter_mut().filter(|load| !load.released) {
            load.released = true;
            race.release_load(w.index, load.time, load.pc);
        }
    }

    /// Writes the bytes of one lane's access, with all checks.
    pub fn store(&mut self, w: &mut Warp, at: Lane, mode: Mode, data: &[u8]) -> Stopped<()> {
        self.write(w, at, mode, data, false)
    }

    /// Like [`store`](Machine::store), for the value of a `st` or `stmatrix`. Several warps may store the same value to
    /// the same address: shipped kernels do so, and no GPU can produce a different value. If the values are sums that
    /// differ in their last bits, any of them may remain: Triton stores the sums of all lanes.
    pub fn store_value(&mut self, w: &mut Warp, at: Lane, mode: Mode, data: &[u8]) -> Stopped<()> {
        self.write(w, at, mode, data, true)
    }

    fn write(&mut self, w: &mut Warp, at: Lane, mode: Mode, data: &[u8], is_value: bool) -> Stopped<()> {
        let len = data.len() as u32;
        match self.resolve(w, at, len)? {
            Spot::Global(allocation, _) if allocation.constant => {
                let text = format!("a write to constant memory: {}", self.global.describe(at.address));
                return Err(Stop::new(FaultKind::OutOfBounds, text).lane(at.lane));
            }
            Spot::Global(allocation, offset) => {
                self.track_global(w, at.lane, (allocation, offset), len.into(), mode)?;
                let mut before = [0; 64];
                let before = &mut before[..data.len()];
                allocation.copy_out(offset, before);
                let repeats = before == data;
                self.repeats += u64::from(repeats);
                let begin = allocation.base() + offset;
                self.record(Object::Global, begin..begin + u64::from(len), written(repeats));
                allocation.write(offset, data);
                self.touch(at.lane, allocation.base() + offset, len, mode, data);
                self.buffers[allocation.index].stored += u64::from(len);
                self.roles[w.role as usize].bytes.global_store += u64::from(len);
            }
            Spot::Shared { cta, offset } => {
                self.check_no_mbarrier(cta, offset, len).map_err(|s| s.lane(at.lane))?;
                let before = &self.ctas[cta as usize].shared.data[offset as usize..(offset + len) as usize];
                self.record_shared(cta, offset, len, written(*before == *data));
                let who = Accessor { base: w.index * 32, mask: 1 << at.lane };
                let range = offset as usize..(offset + len) as usize;
                if let Err(conflict) = self.track(cta, offset, len, who, mode, w.pc()) {
                    // Lanes of one instruction may write the same value to the same address.
                    let together = conflict.accessor.base == who.base && conflict.pc == w.pc() && conflict.wrote;
                    let before = &self.ctas[cta as usize].shared.data[range.clone()];
                    let same = *before == *data;
                    let alike = same || is_value && differ_by_rounding(before, data);
                    let thread = conflict.wrote && conflict.accessor.base < self.threads();
                    let plain = is_value && mode == Mode::Write && thread;
                    let stop = self.conflict(mode, conflict, offset, len).lane(at.lane);
                    // If the values differ, the lowest lane's value remains, also on an H200.
                    let by_lane = together && plain && self.is_together(w, conflict.accessor.mask);
                    if !(alike || by_lane) || !together && !plain {
                        self.hazard(stop)?;
                    } else if !same || !together {
                        self.warn(stop)?;
                    }
                    if alike
                        && !together
                        && plain
                        && let Err(conflict) = self.track(cta, offset, len, who, Mode::SameValue, w.pc())
                    {
                        self.hazard(self.conflict(mode, conflict, offset, len).lane(at.lane))?;
                    }
                    if same {
                        return Ok(());
                    }
                }
                let memory = &mut self.ctas[cta as usize].shared;
                self.repeats += u64::from(memory.data[range.clone()] == *data);
                memory.data[range.clone()].copy_from_slice(data);
                memory.defined[range.clone()].fill(true);
                forget(&mut memory.undefined, range);
                self.roles[w.role as usize].bytes.shared_store += u64::from(len);
            }
            Spot::Local(offset) => {
                let range = offset..offset + len as usize;
                self.repeats += u64::from(w.local[range.clone()] == *data);
                w.local[range.clone()].copy_from_slice(data);
                w.local_defined[range.clone()].fill(true);
                forget(&mut w.local_undefined, range);
                self.roles[w.role as usize].bytes.local_store += u64::from(len);
            }
            Spot::Param(_) => {
                let text = "a write to the kernel's parameters";
                return Err(Stop::new(FaultKind::OutOfBounds, text).lane(at.lane));
            }
        }
        self.progress += 1;
        Ok(())
    }

    /// Marks bytes of a completed store whose source bytes were undefined. Shared and local memory keep the mark.
    /// Global memory has no marks, so a store there is a warning.
    pub fn store_undefined(&mut self, w: &mut Warp, at: Lane, len: u32, bytes: u64, origin: Origin) -> Stopped<()> {
        let marked = |first: usize| lanes64(bytes).map(move |n| (first + n, origin));
        match self.resolve(w, at, len)? {
            Spot::Global(..) => match origin.source {
                Source::Register => {
                    let text = "a register with undefined bytes is stored to global memory";
                    let mut stop = Stop::new(FaultKind::UninitializedRegister, text).lane(at.lane);
                    if origin.pc != w.pc() {
                        stop = stop.other(FIRST_USE, Some(origin.pc));
                    }
                    self.warn(stop)?;
                }
                _ => self.hazard(origin.stop(w.pc()).lane(at.lane))?,
            },
            Spot::Shared { cta, offset } => {
                self.ctas[cta as usize].shared.undefined.extend(marked(offset as usize));
            }
            Spot::Local(offset) => w.local_undefined.extend(marked(offset)),
            Spot::Param(_) => {}
        }
        Ok(())
    }

    /// Returns a mask of an access's bytes that are copies of undefined bytes, and the origin of one of them.
    pub fn undefined_bytes(&self, w: &Warp, at: Lane, len: u32) -> Stopped<Option<(u64, Origin)>> {
        let among = |undefined: &FxHashMap<usize, Origin>, first: usize| {
            let found = |n: usize| Some((1u64 << n, *undefined.get(&(first + n))?));
            (0..len as usize).filter_map(found).reduce(|(all, origin), (byte, _)| (all | byte, origin))
        };
        Ok(match self.resolve(w, at, len)? {
            Spot::Shared { cta, offset } if !self.ctas[cta as usize].shared.undefined.is_empty() => {
                among(&self.ctas[cta as usize].shared.undefined, offset as usize)
            }
            Spot::Local(offset) if !w.local_undefined.is_empty() => among(&w.local_undefined, offset),
            _ => None,
        })
    }

    /// Checks an asynchronous read of shared memory. A stored value with undefined bytes is a warning.
    pub fn check_undefined(&self, cta: u32, offset: u32, len: u32) -> Stopped<()> {
        let undefined = &self.ctas[cta as usize].shared.undefined;
        if undefined.is_empty() {
            return Ok(());
        }
        let Some(origin) = (offset..offset + len).find_map(|byte| undefined.get(&(byte as usize))) else {
            return Ok(());
        };
        let byte = offset - SHARED_BASE;
        let text =
            format!("{len} bytes at byte {byte} of shared memory, where a value with undefined bytes was stored");
        self.warn(Stop::new(FaultKind::UninitializedShared, text).other(FIRST_USE, Some(origin.pc)))
    }

    /// Whether any byte of shared memory, or of the warp's local memory, holds a copy of an undefined byte.
    pub fn has_undefined(&self, w: &Warp) -> bool {
        !w.local_undefined.is_empty() || self.ctas.iter().any(|cta| !cta.shared.undefined.is_empty())
    }

    /// Counts the shared-memory cycles of an access beyond the minimum that its bytes need. There are 32 banks of 4
    /// bytes. Each distinct word in the busiest bank costs one cycle.
    pub fn count_bank_conflicts(&mut self, w: &Warp, mask: u32, addresses: &[u64; 32], len: u32) {
        if one_word_a_bank(mask, addresses, len) {
            return;
        }
        // Distinct words of each bank. A lane touches each bank once.
        let mut banks = [[0u32; 32]; 32];
        let mut counts = [0usize; 32];
        for lane in lanes(mask) {
            let first = addresses[lane] as u32 / 4;
            for word in first..first + len.div_ceil(4) {
                let bank = (word % 32) as usize;
                let seen = &mut banks[bank][..=counts[bank]];
                if !seen[..counts[bank]].contains(&word) {
                    seen[counts[bank]] = word;
                    counts[bank] += 1;
                }
            }
        }
        let busiest = counts.iter().copied().max().unwrap_or(0) as u32;
        let fewest = (counts.iter().sum::<usize>() as u32).div_ceil(32);
        self.roles[w.role as usize].bank_conflicts += u64::from(busiest - fewest.min(busiest));
    }
}

/// Whether the lanes touch at most one word of each bank, as in most instructions. Then there is no conflict.
fn one_word_a_bank(mask: u32, addresses: &[u64; 32], len: u32) -> bool {
    let mut words = [u32::MAX; 32];
    lanes(mask).all(|lane| {
        let first = addresses[lane] as u32 / 4;
        (first..first + len.div_ceil(4)).all(|word| {
            let seen = std::mem::replace(&mut words[(word % 32) as usize], word);
            seen == u32::MAX || seen == word
        })
    })
}

/// Whether two values may be sums of the same numbers in different orders: all words are equal, or are f32 values of
/// ordinary magnitude that differ by at most 1/1024. The bit patterns of such f32 values are not integers below 600
/// million, and random numbers are not that close.
fn differ_by_rounding(a: &[u8], b: &[u8]) -> bool {
    const ORDINARY: std::ops::Range<f32> = 3.6e-15..1.8e19; // 2^-48 to 2^64
    a.chunks(4).zip(b.chunks(4)).all(|(a, b)| {
        let (Ok(x), Ok(y)) = (a.try_into().map(f32::from_le_bytes), b.try_into().map(f32::from_le_bytes)) else {
            return a == b;
        };
        let ordinary = ORDINARY.contains(&x.abs()) && ORDINARY.contains(&y.abs());
        a == b || ordinary && (x - y).abs() <= x.abs().max(y.abs()) / 1024.0
    })
}

#[cfg(test)]
mod tests {
    use super::differ_by_rounding;

    fn close(a: f32, b: f32) -> bool {
        differ_by_rounding(&a.to_le_bytes(), &b.to_le_bytes())
    }

    #[test]
    fn only_reordered_sums_are_close() {
        assert!(close(1.0, 1.000_000_1) && close(-3e5, -3.000_01e5) && close(0.0, 0.0));
        assert!(!close(1.0, 1.01) && !close(1.0, -1.0) && !close(1.0, f32::NAN) && !close(0.0, 1e-9));
        let integers = [(5u32, 6u32), (1 << 20, (1 << 20) + 1), (33_554_689, 33_554_690)];
        assert!(integers.iter().all(|(a, b)| !differ_by_rounding(&a.to_le_bytes(), &b.to_le_bytes())));
        assert!(!differ_by_rounding(&[1, 0], &[2, 0]) && differ_by_rounding(&[1, 0], &[1, 0]));
    }
}
