//! What registers hold: which have been written, and which belong to instructions in flight.

use crate::code::Inst;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// The first use of a register that `tcgen05.ld` fills waits for the load on a card. The manual asks for
/// `tcgen05.wait::ld` before.
pub fn await_loads(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst) -> Stopped<()> {
    let used = |r: &u32| inst.uses.reads.contains(r) || inst.uses.writes.contains(r);
    while let Some(at) = w.tmem_loads.iter().position(|load| load.registers.iter().any(used)) {
        let load = w.tmem_loads.remove(at);
        let text = "a register that tcgen05.ld fills, before tcgen05.wait::ld";
        m.warn(w, Stop::new(FaultKind::ReadInFlight, text).other("the load", Some(load.pc)))?;
        let live = w.live();
        m.tmem_learn(w, live, load.agent.as_slice());
    }
    Ok(())
}

/// Checks that the registers which an instruction reads have been written. No instruction in flight may still use a
/// register that it reads or writes.
pub fn check(w: &Warp, inst: &Inst, exec: u32) -> Stopped<()> {
    for p in w.wgmma.all() {
        let result = |r: &u32| p.d.iter().any(|d| d.register == Some(*r));
        if inst.uses.reads.iter().any(result) {
            let text = "an accumulator register of wgmma, before wgmma.wait_group";
            return Err(Stop::new(FaultKind::ReadInFlight, text).other("the wgmma", Some(p.pc)));
        }
        if inst.uses.writes.iter().any(|r| result(r) || p.a.contains(r)) {
            let text = "a register that wgmma still uses, before wgmma.wait_group";
            return Err(Stop::new(FaultKind::OverwriteInFlight, text).other("the wgmma", Some(p.pc)));
        }
    }
    if inst.uses.moves {
        return Ok(());
    }
    let mut missing = 0;
    for &r in &inst.uses.reads {
        missing |= exec & !w.defined(r);
    }
    for &p in &inst.uses.predicate_reads {
        missing |= exec & !w.predicate_defined(p);
    }
    if missing == 0 {
        return Ok(());
    }
    let text = "a source register that no instruction has written";
    Err(Stop::new(FaultKind::UninitialisedRegister, text).lane(missing.trailing_zeros()))
}

/// Marks the registers that an instruction has written as defined. A plain move copies the mark of its source.
pub fn define(w: &mut Warp, inst: &Inst, exec: u32) {
    let mut known = u32::MAX;
    if inst.uses.moves {
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
}
