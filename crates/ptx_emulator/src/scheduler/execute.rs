//! Runs a warp: fetches, checks what its registers hold, does the step, and moves the lanes on.

use crate::code::{Flow, Inst, Kernel};
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::report::Class;
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::{Fragment, Warp};

/// Instruction classes index the counters.
const _: () = assert!(Class::Other as usize + 1 == Class::COUNT);

/// Runs a warp; `Ok(false)` if none of its fragments can run.
pub fn execute(kernel: &Kernel, w: &mut Warp, m: &mut Machine<'_>, slice: u64) -> Stopped<bool> {
    // A slice may have ended on a fragment that had just come out of its wait: it still has to run what it waited in.
    if w.resumed.is_none() && !w.schedule(m)? {
        return Ok(false);
    }
    let budget = m.launch.config.instruction_budget;
    for _ in 0..slice {
        let Fragment { pc, mask, .. } = w.fragments[w.current];
        let inst = &kernel.code[pc as usize];
        let mut exec = mask;
        if let Some((p, negated)) = inst.guard {
            if m.sanitize && mask & !w.predicate_defined(p) != 0 {
                let lane = (mask & !w.predicate_defined(p)).trailing_zeros();
                return Err(Stop::new(FaultKind::UninitialisedRegister, "the guard predicate").lane(lane));
            }
            let value = w.predicate(p);
            exec &= if negated { !value } else { value };
        }
        if exec == 0 {
            w.resumed = None;
            w.fragments[w.current].pc = pc + 1;
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        m.clock.now += 1;
        w.issued += 1;
        if w.issued > budget {
            let text = format!("the warp has executed {budget} instructions");
            return Err(Stop::new(FaultKind::InstructionBudget, text));
        }
        let flow = if inst.uses.aligned && exec != w.all {
            if exec != mask {
                let text = format!("its guard is true in lanes {exec:#010x} of {:#010x}", w.all);
                return Err(Stop::new(FaultKind::WarpDivergence, text));
            }
            Flow::Wait(WaitFor::Lanes { need: w.all, anywhere: false })
        } else {
            if m.sanitize {
                check_defined(w, inst, exec)?;
            }
            let flow = (inst.step)(w, m, exec)?;
            if m.sanitize {
                define(w, inst, exec);
            }
            if !matches!(flow, Flow::Wait(_)) {
                let role = &mut m.roles[w.role as usize];
                role.warp_instructions += 1;
                role.thread_instructions += u64::from(exec.count_ones());
                role.by_class[inst.class as usize] += u64::from(exec.count_ones());
            }
            flow
        };
        w.resumed = None;
        if let Flow::Next = flow {
            w.fragments[w.current].pc = pc + 1;
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        let pause = matches!(flow, Flow::Yield);
        advance(w, kernel, flow, exec, m.clock.now);
        if w.fragments.is_empty() {
            m.progress += 1;
            exited(m, w)?;
            return Ok(true);
        }
        let alone = w.fragments.len() == 1 && w.fragments[0].wait.is_none();
        if alone {
            w.current = 0;
        } else if !w.schedule(m)? {
            return Ok(true);
        }
        if pause {
            return Ok(true);
        }
    }
    Ok(true)
}

/// Whether the running fragment has come to where another is.
fn meets(w: &Warp) -> bool {
    let pc = w.fragments[w.current].pc;
    w.fragments.iter().enumerate().any(|(i, f)| i != w.current && f.pc == pc)
}

fn check_defined(w: &Warp, inst: &Inst, exec: u32) -> Stopped<()> {
    for load in &w.tmem_loads {
        let in_flight = |r: &u32| load.values.iter().any(|(d, _)| d.register == Some(*r));
        if inst.uses.reads.iter().any(in_flight) {
            let text = "a register that tcgen05.ld fills, before tcgen05.wait::ld";
            return Err(Stop::new(FaultKind::ReadInFlight, text).other("the load", Some(load.pc)));
        }
    }
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

fn define(w: &mut Warp, inst: &Inst, exec: u32) {
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

/// Moves the lanes `exec` of the running fragment as the flow says, and its other lanes to the next instruction.
fn advance(w: &mut Warp, kernel: &Kernel, flow: Flow, exec: u32, now: u64) {
    let current = w.fragments[w.current].clone();
    let pc = current.pc;
    let mut parts: Vec<Fragment> = Vec::new();
    let part = |mask, pc| Fragment { mask, pc, wait: None, since: now, ..current.clone() };
    let rest = current.mask & !exec;
    if rest != 0 {
        parts.push(part(rest, pc + 1));
    }
    match flow {
        Flow::Next | Flow::Yield => parts.push(part(exec, pc + 1)),
        Flow::Jump(label) => parts.push(part(exec, kernel.labels[label as usize])),
        Flow::Scatter(groups) => {
            parts.extend(groups.into_iter().map(|(mask, label)| part(mask, kernel.labels[label as usize])));
        }
        Flow::Call(function) => {
            let mut callee = part(exec, kernel.functions[function as usize]);
            callee.calls.push((pc + 1, function));
            parts.push(callee);
        }
        Flow::Return => {
            let mut caller = part(exec, pc);
            if let Some((back, _)) = caller.calls.pop() {
                caller.pc = back;
                parts.push(caller);
            }
        }
        Flow::Exit => {}
        Flow::Wait(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc) }),
        Flow::Pause(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc + 1) }),
    }
    let split = parts.len() > 1 || w.fragments.len() > 1;
    for f in &mut parts {
        f.spins += u32::from(split && f.pc <= pc && f.wait.is_none());
    }
    w.fragments.swap_remove(w.current);
    w.fragments.append(&mut parts);
    // Deterministic order, whatever the history of splits.
    w.fragments.sort_by_key(|f| (f.pc, f.mask.trailing_zeros()));
}

/// A warp has no threads left.
fn exited(m: &mut Machine<'_>, w: &Warp) -> Stopped<()> {
    let cta = &mut m.ctas[w.cta as usize];
    cta.running -= 1;
    if cta.running == 0 && cta.awaited_grids {
        m.global.earlier.waits(!cta.let_dependents_start);
    }
    if cta.running == 0 && cta.tmem.used() > 0 {
        let text = format!("the CTA exits with {} columns allocated", cta.tmem.used());
        return Err(Stop::new(FaultKind::TmemNotFreed, text));
    }
    let pending = &m.pending;
    m.shared_readers.retain(|(_, id)| pending.contains(*id));
    if m.ctas[w.cta as usize].running == 0 && m.shared_readers.iter().any(|(cta, _)| *cta == w.cta) {
        let text = "the CTA exits while a bulk copy still reads its shared memory";
        return Err(Stop::new(FaultKind::OverwriteInFlight, text));
    }
    let waited = w.cluster_generation != m.cluster_barrier.generation;
    m.cluster_barrier.leave(w.all, if waited { 0 } else { w.cluster_arrived });
    Ok(())
}
