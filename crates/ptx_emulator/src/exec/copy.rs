//! Non-bulk asynchronous copies (PTX ISA, "Data Movement: cp.async, cp.async.commit_group, cp.async.wait_group").
//! A copy reads and writes when the scheduler says, at the latest before the wait that covers it ends.

use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::address::{Lane, Spot};
use crate::machine::race::Mode;
use crate::machine::wait::WaitFor;
use crate::operand::{Src, lanes};
use crate::types::{Space, Type};

/// One lane's copy: `bytes` from global `address`, zeros up to `size`, to `offset` of `cta`'s shared memory.
struct Transfer {
    cta: u32,
    offset: u32,
    address: u64,
    bytes: u32,
    size: u32,
}

/// `cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size}{, cache-policy}` or `…, cp-size, ignore-src`.
pub fn cp_async(i: &mut Parsed<'_>) -> Decoded {
    let (to, from) = (i.address(0)?, i.address(1)?);
    let Src::Constant(size @ (4 | 8 | 16)) = i.src(2, Type::U32)? else {
        return Err(DecodeError::invalid("the copy size is 4, 8 or 16"));
    };
    if i.has("cg") && size != 16 {
        return Err(DecodeError::invalid("`.cg` copies 16 bytes"));
    }
    let size = size as u32;
    let policy = usize::from(i.has("L2::cache_hint"));
    let (mut src_size, mut ignore) = (None, None);
    if i.operands().len() > 3 + policy {
        if i.is_predicate(i.operand(3)?) {
            ignore = Some(i.predicate(3)?);
        } else {
            src_size = Some(i.src(3, Type::U32)?);
        }
    }
    Ok(Box::new(move |w, m, mask| {
        let (to_base, from_base) = (w.get(to.base), w.get(from.base));
        let ignored = ignore.map_or(0, |p| p.mask(w));
        let agent = m.race.as_mut().map(|r| r.spawn(w.index, mask, false));
        let mut transfers = Vec::with_capacity(32);
        for lane in lanes(mask) {
            let mut bytes = src_size.map_or(size, |s| w.lane(s, lane) as u32);
            if bytes > size {
                let text = format!("a source size of {bytes} bytes for a copy of {size}");
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            if ignored >> lane & 1 == 1 {
                bytes = 0;
            }
            let address = from_base[lane].wrapping_add(from.offset as u64);
            let target =
                Lane { lane: lane as u32, address: to_base[lane].wrapping_add(to.offset as u64), space: Space::Shared };
            let Spot::Shared { cta, offset } = m.resolve(w, target, size)? else {
                continue;
            };
            if !address.is_multiple_of(size.into()) {
                let text = format!("global address {address:#x} is not a multiple of {size}");
                return Err(Stop::new(FaultKind::Misaligned, text).lane(lane as u32));
            }
            if bytes > 0 {
                m.issue_global(w, lane, address, bytes, Mode::Read)?;
            }
            if let (Some(race), Some(agent)) = (&mut m.race, &agent)
                && let Err(conflict) = race.agent_access(agent, cta, offset, size, Mode::Write, w.pc())
            {
                return Err(m.conflict(Mode::Write, conflict, offset, size).lane(lane as u32));
            }
            transfers.push(Transfer { cta, offset, address, bytes, size });
        }
        let role = w.role as usize;
        let id = m.start(w, move |m| {
            for t in &transfers {
                let mut data = [0; 16];
                let bytes = t.bytes as usize;
                if let Some((allocation, at)) = m.global.locate(t.address, t.bytes.into()) {
                    allocation.read(at, &mut data[..bytes]);
                    m.buffers[allocation.index].loaded += u64::from(t.bytes);
                }
                m.write_shared(t.cta, t.offset, &data[..t.size as usize]);
                m.roles[role].bytes.global_load += u64::from(t.bytes);
                m.roles[role].bytes.shared_store += u64::from(t.size);
            }
            Ok(())
        });
        for lane in lanes(mask) {
            w.copies[lane].open.push((id, agent.clone()));
        }
        Ok(Flow::Next)
    }))
}

pub fn commit_group(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, _, mask| {
        for lane in lanes(mask) {
            let group = std::mem::take(&mut w.copies[lane].open);
            w.copies[lane].committed.push_back(group);
        }
        Ok(Flow::Next)
    }))
}

/// `cp.async.wait_group N` waits for all but the N newest groups, `wait_all` for every copy of the thread.
pub fn wait_group(i: &mut Parsed<'_>) -> Decoded {
    let keep = match i.operands().first() {
        None => None,
        Some(_) => match i.src(0, Type::U32)? {
            Src::Constant(n) => Some(n as usize),
            Src::Register(_) => {
                return Err(DecodeError::invalid("the number of groups is a constant"));
            }
        },
    };
    Ok(Box::new(move |w, m, mask| {
        let mut waiting = Vec::new();
        for lane in lanes(mask) {
            let copies = &w.copies[lane];
            let done = copies.committed.len().saturating_sub(keep.unwrap_or(0));
            waiting.extend(copies.committed.iter().take(done).flatten().map(|c| c.0));
            if keep.is_none() {
                waiting.extend(copies.open.iter().map(|c| c.0));
            }
        }
        waiting.sort_unstable();
        waiting.dedup();
        waiting.retain(|id| m.pending.contains(*id));
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        for lane in lanes(mask) {
            let copies = &mut w.copies[lane];
            let done = copies.committed.len().saturating_sub(keep.unwrap_or(0));
            let mut finished: Vec<_> = copies.committed.drain(..done).flatten().collect();
            if keep.is_none() {
                finished.append(&mut copies.open);
            }
            if let Some(race) = &mut m.race {
                let mut known = None;
                for (_, agent) in &finished {
                    if let Some(agent) = agent {
                        race.finish(agent, &mut known);
                    }
                }
                race.acquire(w.index, 1 << lane, &known);
            }
        }
        Ok(Flow::Next)
    }))
}
