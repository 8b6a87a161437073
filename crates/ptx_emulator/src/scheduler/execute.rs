//! Runs a warp: fetches an instruction, checks its registers, executes its step and advances the lanes.

use super::polls::settle;
use super::registers;
use crate::code::{Flow, Inst, Kernel};
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::report::Class;
use crate::machine::barrier::Barrier;
use crate::machine::state::Machine;
use crate::machine::wait::{Place, WaitFor};
use crate::machine::warp::{Fragment, Warp};
use crate::operand::lanes;

/// Instruction classes index the counters.
const _: () = assert!(Class::Other as usize + 1 == Class::COUNT);

/// Runs a warp. Returns `Ok(false)` if none of its fragments can run.
pub fn execute(kernel: &Kernel, w: &mut Warp, m: &mut Machine<'_>, slice: u64) -> Stopped<bool> {
    // The last slice may have ended with a fragment that has just finished its wait. That fragment runs first.
    if w.resumed.is_none() && !w.schedule(m)? {
        return Ok(false);
    }
    let budget = m.launch.config.instruction_budget;
    for _ in 0..slice {
        let Fragment { pc, mask, .. } = w.fragments[w.current];
        let inst = &kernel.code[pc as usize];
        m.current = (w.index, pc);
        if !w.polls.is_empty()
            && let Some(wait) = settle(w, m, inst, mask)?
        {
            w.resumed = None;
            advance(w, m, kernel, Flow::Wait(wait), mask);
            if w.schedule(m)? {
                continue;
            }
            return Ok(true);
        }
        let exec = guarded(w, m, inst, mask)?;
        if exec == 0 {
            w.resumed = None;
            w.fragments[w.current].pc = pc + 1;
            if let Some(timed) = &mut m.timed {
                timed.issued(w.index, pc, &[], "");
            }
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        if is_held(w, m, inst) {
            return Ok(true);
        }
        m.clock.now += 1;
        w.issued += 1;
        w.ran |= mask;
        if w.issued > budget {
            let text = format!("the warp has executed {budget} instructions");
            return Err(Stop::new(FaultKind::InstructionBudget, text));
        }
        let flow = if m.timed.as_ref().is_some_and(|timed| timed.skips(pc)) {
            Flow::Next
        } else {
            step(w, m, inst, mask, exec)?
        };
        if !matches!(flow, Flow::Wait(_) | Flow::WaitApart(..)) {
            advance_clock(w, m, inst, pc);
        }
        w.resumed = None;
        if let Flow::Next = flow {
            w.fragments[w.current].pc = pc + 1;
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        let pause = matches!(flow, Flow::Yield);
        advance(w, m, kernel, flow, exec);
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

/// `true` if the warp must not issue the instruction yet: it is another cluster's turn to communicate, or the fence of a
/// release is not over.
#[inline(always)]
fn is_held(w: &Warp, m: &mut Machine<'_>, inst: &Inst) -> bool {
    if inst.uses.communicates && !m.may_communicate {
        m.held = true;
        return true;
    }
    inst.uses.fence.is_some_and(|fence| m.timed.as_mut().is_some_and(|timed| timed.fence(w.index, fence)))
}

/// Advances the time model's clock past an instruction that the warp has issued.
#[inline(always)]
fn advance_clock(w: &Warp, m: &mut Machine<'_>, inst: &Inst, pc: u32) {
    let Some(timed) = &mut m.timed else { return };
    timed.issued(w.index, pc, &inst.uses.writes, &inst.name);
    if inst.uses.acquires {
        timed.acquired(w.index);
    }
}

/// Lanes of `mask` in which the instruction's guard is true.
#[inline(always)]
fn guarded(w: &Warp, m: &Machine<'_>, inst: &Inst, mask: u32) -> Stopped<u32> {
    let Some((p, negated)) = inst.guard else { return Ok(mask) };
    if m.sanitize && mask & !w.predicate_defined(p) != 0 {
        let lane = (mask & !w.predicate_defined(p)).trailing_zeros();
        let origin = w.predicate_origin(p, lane as usize);
        let stop = if origin.pc == w.pc() {
            Stop::new(FaultKind::UninitializedRegister, "the guard predicate")
        } else {
            origin.stop(w.pc())
        };
        m.hazard(stop.lane(lane))?;
    }
    let value = w.predicate(p);
    Ok(mask & if negated { !value } else { value })
}

/// Executes and counts the instruction's step in the lanes `exec` of the fragment's `mask`.
#[inline(always)]
fn step(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst, mask: u32, exec: u32) -> Stopped<Flow> {
    // A CTA barrier does not wait for threads that have exited.
    let whole = if inst.uses.aligned && inst.class == Class::Barrier { w.live() } else { w.all };
    if inst.uses.aligned && exec != whole {
        if exec != mask {
            let text = format!("its guard is true in lanes {exec:#010x} of {whole:#010x}");
            return Err(Stop::new(FaultKind::WarpDivergence, text));
        }
        return Ok(Flow::Wait(WaitFor::Lanes { need: whole, place: Place::Aligned }));
    }
    if !w.wgmma.is_empty() {
        let products = registers::await_products(w, m, inst)?;
        if !products.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(products)));
        }
    }
    if m.sanitize {
        if w.loaded & inst.uses.touched != 0 || inst.uses.awaits_loads {
            registers::await_shared_loads(w, m, inst);
        }
        if !w.tmem_loads.is_empty() {
            registers::await_loads(w, m, inst)?;
        }
        registers::check(w, inst, exec, m.launch.config.strict).or_else(|stop| m.hazard(stop))?;
        if inst.uses.acts {
            if let Some(race) = &mut m.race {
                let moves_words = matches!(inst.class, Class::Memory | Class::Matrix);
                race.course(w.index).execute(m.current.1, mask, moves_words, inst.uses.address);
            }
            m.execute_outlet()?;
        }
    }
    let flow = (inst.step)(w, m, exec)?;
    if m.has_touches() {
        m.check_touches(w)?;
    }
    if m.sanitize {
        registers::define(w, inst, exec);
    }
    if !matches!(flow, Flow::Wait(_) | Flow::WaitApart(..)) {
        let role = &mut m.roles[w.role as usize];
        role.warp_instructions += 1;
        role.thread_instructions += u64::from(exec.count_ones());
        role.by_class[inst.class as usize] += u64::from(exec.count_ones());
    }
    Ok(flow)
}

/// Whether the running fragment has reached the position of another fragment.
fn meets(w: &Warp) -> bool {
    let pc = w.fragments[w.current].pc;
    w.fragments.iter().enumerate().any(|(i, f)| i != w.current && f.pc == pc)
}

/// Moves the lanes `exec` of the running fragment as `flow` requires. The other lanes go to the next instruction.
fn advance(w: &mut Warp, m: &mut Machine<'_>, kernel: &Kernel, flow: Flow, exec: u32) {
    let now = m.clock.now;
    let current = w.fragments[w.current].clone();
    let pc = current.pc;
    let mut parts: Vec<Fragment> = Vec::new();
    let part = |mask, pc| Fragment { mask, pc, wait: None, since: now, ..current.clone() };
    let callee = |mask, function: u32| {
        let mut callee = part(mask, kernel.functions[function as usize]);
        callee.calls.push((pc + 1, function));
        callee
    };
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
        Flow::Call(function) => parts.push(callee(exec, function)),
        Flow::ScatterCall(groups) => parts.extend(groups.into_iter().map(|(mask, function)| callee(mask, function))),
        Flow::Return => {
            let mut caller = part(exec, pc);
            if let Some((back, function)) = caller.calls.pop() {
                caller.pc = back;
                lanes(exec).for_each(|lane| w.returned[lane] = function);
                parts.push(caller);
            }
        }
        Flow::Exit => {}
        Flow::Wait(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc) }),
        Flow::WaitApart(lanes, wait) => {
            parts.push(Fragment { wait: Some(wait), ..part(exec & lanes, pc) });
            parts.push(part(exec & !lanes, pc));
        }
        Flow::Pause(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc + 1) }),
    }
    if parts.iter().all(|part| part.mask & exec == 0) {
        leave_barriers(w, kernel, exec);
    }
    if let Some(race) = &mut m.race {
        for part in parts.iter().filter(|part| part.mask != current.mask) {
            race.course(w.index).part(part.mask, current.mask & !part.mask);
        }
    }
    let split = parts.len() > 1 || w.fragments.len() > 1;
    for f in &mut parts {
        f.spins += u32::from(split && f.pc <= pc && f.wait.is_none());
    }
    w.fragments.swap_remove(w.current);
    w.fragments.append(&mut parts);
    // The order must not depend on how fragments were split before.
    w.fragments.sort_by_key(|f| (f.pc, f.mask.trailing_zeros()));
}

/// Handles the exit of lanes: lanes of the warp that wait to execute a CTA barrier together stop expecting the exited
/// lanes.
fn leave_barriers(w: &mut Warp, kernel: &Kernel, exited: u32) {
    for f in w.fragments.iter_mut().filter(|f| kernel.code[f.pc as usize].class == Class::Barrier) {
        if let Some(WaitFor::Lanes { need, place: Place::Aligned }) = &mut f.wait {
            *need &= !exited;
        }
    }
}

/// Handles the exit of a warp's last threads.
fn exited(m: &mut Machine<'_>, w: &Warp) -> Stopped<()> {
    let cta = &mut m.ctas[w.cta as usize];
    cta.running -= 1;
    cta.barriers.iter_mut().for_each(Barrier::leave);
    if cta.running == 0 && cta.awaited_grids {
        m.global.earlier.waits(!cta.let_dependents_start);
    }
    if cta.running == 0 && cta.tmem.used() > 0 {
        let text = format!("the CTA exits with {} columns allocated", cta.tmem.used());
        m.hazard(Stop::new(FaultKind::TmemNotFreed, text))?;
    }
    if m.ctas[w.cta as usize].running == 0 && m.ctas.len() > 1 {
        m.check_end(w.cta)?;
    }
    let pending = &m.pending;
    m.shared_readers.retain(|(_, id, _)| pending.contains(*id));
    if m.ctas[w.cta as usize].running == 0 && m.shared_readers.iter().any(|(cta, ..)| *cta == w.cta) {
        // In the manual, shared memory lives as long as its CTA. On an H200 the copy is complete and right, because the
        // CTA's memory is reused only after its copies have ended. Shipped kernels rely on this behavior.
        let text = "the CTA exits while a bulk copy still reads its shared memory";
        let pc = m.shared_readers.iter().find(|(cta, ..)| *cta == w.cta).map(|reader| reader.2);
        m.warn(Stop { pc, ..*Stop::new(FaultKind::OverwriteInFlight, text) }.into())?;
    }
    let waited = w.cluster_generation != m.cluster_barrier.generation;
    m.cluster_barrier.leave(w.all, if waited { 0 } else { w.cluster_arrived });
    m.advance_cluster_barrier();
    Ok(())
}
