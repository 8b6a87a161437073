//! State of registers: which are written, and which belong to instructions in flight.

use crate::code::Inst;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::report::Class;
use crate::exec::wgmma;
use crate::machine::in_flight::Wgmma;
use crate::machine::state::Machine;
use crate::machine::warp::{Origin, Source, Undefined, Warp};
use crate::operand::{Src, filter, lanes};

/// Handles the first use of a register that `tcgen05.ld` fills. A GPU waits for the load at that use; the manual
/// requires `tcgen05.wait::ld` before the use.
pub fn await_loads(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst) -> Stopped<()> {
    let used = |r: &u32| inst.uses.reads.contains(r) || inst.uses.writes.contains(r);
    while let Some(at) = w.tmem_loads.iter().position(|load| load.registers.iter().any(used)) {
        let load = w.tmem_loads.remove(at);
        let text = "use of a register that tcgen05.ld fills, before tcgen05.wait::ld";
        m.warn(Stop::new(FaultKind::ReadInFlight, text).other("the load", Some(load.pc)))?;
        let live = w.live();
        m.tmem_learn(w, live, load.agent.as_slice());
    }
    Ok(())
}

/// Ends loads from shared memory at the first use of a register that they fill, and at fences and waits. An arrival at
/// an mbarrier does not wait for loads.
pub fn await_shared_loads(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst) {
    let used = |r: &u32| inst.uses.reads.contains(r) || inst.uses.writes.contains(r);
    let warp = w.index;
    w.shared_loads.retain(|load| {
        let awaited = inst.uses.awaits_loads || load.registers.iter().any(used);
        if awaited
            && load.released
            && let Some(race) = &mut m.race
        {
            race.end_load(warp, load.time, load.pc);
        }
        !awaited
    });
    w.loaded = w.shared_loads.iter().fold(0, |bits, load| bits | filter(&load.registers));
}

/// Handles the first use of a result of `wgmma`, which waits for the product: `ptxas` renames registers if the use is a
/// move, and otherwise inserts a wait (its message C7517). The manual requires `wgmma.wait_group` before any use.
/// Returns the numbers of products that are still incomplete.
pub fn await_products(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst) -> Stopped<Vec<u64>> {
    let used = |p: &Wgmma| inst.uses.reads.iter().any(|r| p.fills(*r));
    let Some((last, pc)) = w.wgmma.all().rfind(|p| used(p)).map(|p| (p.id, p.pc)) else { return Ok(Vec::new()) };
    let early: Vec<Wgmma> = w.wgmma.all().filter(|p| p.id <= last && !p.delivered).cloned().collect();
    let waiting: Vec<u64> = early.iter().map(|p| p.id).filter(|id| m.pending.contains(*id)).collect();
    if !waiting.is_empty() {
        return Ok(waiting);
    }
    early.iter().try_for_each(|p| wgmma::deliver(w, m, w.all, p))?;
    w.wgmma.all_mut().filter(|p| p.id <= last).for_each(|p| p.delivered = true);
    let text = "use of an accumulator register of wgmma, before wgmma.wait_group";
    m.warn(Stop::new(FaultKind::ReadInFlight, text).other("the wgmma", Some(pc)))?;
    Ok(Vec::new())
}

/// Checks the registers that an instruction reads. Bytes that were never written, or were written from undefined bytes,
/// are undefined. Moves and arithmetic propagate undefined bytes to their results, and stores propagate them to memory.
/// Any other use, such as an address or a branch, is a fault. Under `strict`, every use other than a move is a fault.
/// Also checks that no instruction in flight still uses a register that this instruction reads or writes.
pub fn check(w: &mut Warp, inst: &Inst, exec: u32, strict: bool) -> Stopped<()> {
    for p in w.wgmma.all() {
        let result = |r: &u32| p.fills(*r);
        if inst.uses.writes.iter().any(|r| result(r) || p.a.contains(r)) {
            let text = "write of a register that wgmma still uses, before wgmma.wait_group";
            return Err(Stop::new(FaultKind::OverwriteInFlight, text).other("the wgmma", Some(p.pc)));
        }
    }
    let mut missing = 0;
    let stored = inst.uses.stored_from.filter(|_| !strict).unwrap_or(inst.uses.reads.len());
    for &r in &inst.uses.reads[..stored] {
        missing |= exec & !w.defined(r);
    }
    for &p in &inst.uses.predicate_reads {
        missing |= exec & !w.predicate_defined(p);
    }
    if missing == 0 {
        return Ok(());
    }
    // Compilers compute ahead with values that a selection then drops, so the result becomes undefined without a fault.
    let computes = matches!(inst.class, Class::Integer | Class::Float | Class::Convert | Class::Move);
    if inst.uses.moves || (computes || inst.uses.carries.is_some()) && !strict {
        propagate(w, inst, missing);
        return Ok(());
    }
    let lane = missing.trailing_zeros();
    let origin = origin(w, inst, lane as usize);
    Err(origin.stop(w.pc()).lane(lane))
}

/// Marks the results that undefined sources leave undefined, in lanes with undefined sources.
fn propagate(w: &mut Warp, inst: &Inst, missing: u32) {
    let mut results = Vec::new();
    for lane in lanes(missing) {
        let origin = origin(w, inst, lane);
        let undefined = |(register, bits)| Undefined { register, lane, bits, origin };
        match &inst.uses.carries {
            Some(carries) => results.extend(carries(w, lane).into_iter().map(undefined)),
            None => results.extend(inst.uses.writes.iter().map(|&register| undefined((register, u64::MAX)))),
        }
    }
    w.undefined_results.append(&mut results);
    let decided = match &inst.uses.decides {
        Some(decides) => decides(w, missing),
        None => inst.uses.predicate_writes.iter().map(|&p| (p, u32::MAX)).collect(),
    };
    let origin = origin(w, inst, missing.trailing_zeros() as usize);
    let undefined = decided.into_iter().map(|(p, lanes)| (p, lanes & missing, origin));
    w.undefined_predicates.extend(undefined.filter(|(_, lanes, _)| *lanes != 0));
}

/// Origin of the first undefined source of an instruction in a lane.
fn origin(w: &Warp, inst: &Inst, lane: usize) -> Origin {
    let missing = |defined: u32| defined >> lane & 1 == 0;
    let register = inst.uses.reads.iter().find(|&&r| missing(w.defined(r)));
    let predicate = inst.uses.predicate_reads.iter().find(|&&p| missing(w.predicate_defined(p)));
    match (register, predicate) {
        (Some(&r), _) => w.origin(Src::Register(r), lane),
        (None, Some(&p)) => w.predicate_origin(p, lane),
        (None, None) => w.begins(Source::Register),
    }
}

/// Marks the registers that an instruction has written as defined. A plain move copies the mark of its source.
pub fn define(w: &mut Warp, inst: &Inst, exec: u32) {
    let mut known = u32::MAX;
    if inst.uses.moves && inst.uses.carries.is_none() && inst.uses.decides.is_none() {
        for &r in &inst.uses.reads {
            known &= w.defined(r);
        }
        for &p in &inst.uses.predicate_reads {
            known &= w.predicate_defined(p);
        }
    }
    for &r in &inst.uses.writes {
        w.define(r, exec, known);
        if let Some(at) = w.written_at.get_mut(r as usize) {
            *at = w.issued;
        }
    }
    for &p in &inst.uses.predicate_writes {
        w.define_predicate(p, exec, known);
    }
    if w.undefined_results.is_empty() && w.undefined_predicates.is_empty() {
        return;
    }
    for undefined in std::mem::take(&mut w.undefined_results) {
        w.undefine(undefined);
    }
    for (p, lanes, origin) in std::mem::take(&mut w.undefined_predicates) {
        w.undefine_predicate(p, lanes & exec, origin);
    }
}
