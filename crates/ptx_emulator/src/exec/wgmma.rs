//! Asynchronous warpgroup matrix instructions (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). Each warp
//! of the four computes its own 16 of the 64 rows; its results reach the registers at `wgmma.wait_group`.

use super::matrix::{Product, shape, types, vector, vector_dst};
use super::tcgen05::{bad, chunk, track_matrix};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::descriptor::{Major, SharedMatrix};
use crate::hw::fragment::{self, Position};
use crate::hw::matmul::gather;
use crate::machine::in_flight::Wgmma;
use crate::machine::pending::Issuer;
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Row, Src};
use crate::parser::ast::Operand;
use crate::types::Type;

/// Warps of a warpgroup.
const WARPS: u32 = 4;
/// Rows of a warp.
const ROWS: u32 = 16;

/// Where the accumulators come from.
enum Accumulators {
    Zero,
    Registers(Vec<Row>),
    /// An earlier instruction's results.
    Previous(u64),
}

/// Where A comes from.
enum A {
    Shared(SharedMatrix),
    /// The warp's 16 rows along K.
    Rows(Vec<u8>),
}

pub fn mma_async(i: &mut Parsed<'_>) -> Decoded {
    i.uses_wgmma();
    let unknown = || DecodeError::unsupported("this shape or type");
    let [_, n, k] = shape(i).ok_or_else(unknown)?;
    let (sum, a_type, b_type) = types(i).ok_or_else(unknown)?;
    let d = vector_dst(i, i.operand(0)?)?;
    if d.len() != n / 2 / sum.per_register() {
        return Err(DecodeError::invalid("wrong number of accumulator registers"));
    }
    // They are read and written when the instruction's time comes.
    i.writes_later();
    enum From {
        Descriptor(Src),
        Registers(Vec<Src>),
    }
    let from = match i.operand(1)? {
        Operand::Vector(_) => From::Registers(vector(i, i.operand(1)?)?),
        _ => From::Descriptor(i.src(1, Type::B64)?),
    };
    let b = i.src(2, Type::B64)?;
    let scale_d = i.predicate(3)?;
    let constants = (4..i.operands().len()).map(|n| match i.src(n, Type::S32)? {
        Src::Constant(c) => Ok(c as u32 as i32),
        Src::Register(_) => Err(DecodeError::invalid("scales and transpositions are constants")),
    });
    let constants = constants.collect::<Result<Vec<i32>, _>>()?;
    let negate = |n: usize| constants.get(n) == Some(&-1);
    let shared_a = matches!(from, From::Descriptor(_));
    let major = |n: usize| if constants.get(n) == Some(&1) { Major::Mn } else { Major::K };
    let (major_a, major_b) = (if shared_a { major(2) } else { Major::K }, major(if shared_a { 3 } else { 2 }));
    let bits = a_type.bits();
    let per = 32 / bits;
    let row_bytes = k * bits as usize / 8;
    if row_bytes != 32 {
        return Err(unknown());
    }
    let saturate = i.has("satfinite");
    let negate = (negate(0), negate(1));
    let a_registers: Vec<u32> = match &from {
        From::Registers(list) => {
            list.iter().filter_map(|s| if let Src::Register(r) = s { Some(*r) } else { None }).collect()
        }
        From::Descriptor(_) => Vec::new(),
    };
    Ok(Box::new(move |w, m, mask| {
        let lane = mask.trailing_zeros() as usize;
        let registers = d.iter().filter_map(|d| d.register);
        w.check_wgmma_fence(registers.chain(a_registers.iter().copied()))?;
        let first_row = w.role % WARPS * ROWS;
        let b = SharedMatrix::wgmma(w.lane(b, lane)).map_err(bad)?;
        b.check(major_b, bits, row_bytes as u32).map_err(bad)?;
        let agent = m.race.as_mut().map(|r| r.spawn(w.index, mask, true));
        let element = bits / 8;
        track_matrix(m, w, agent.as_ref(), b, major_b, 0..n as u32, (row_bytes as u32, element))?;
        let a = match &from {
            From::Descriptor(s) => {
                let a = SharedMatrix::wgmma(w.lane(*s, lane)).map_err(bad)?;
                a.check(major_a, bits, row_bytes as u32).map_err(bad)?;
                let rows = if major_a == Major::K { first_row..first_row + ROWS } else { 0..WARPS * ROWS };
                track_matrix(m, w, agent.as_ref(), a, major_a, rows, (row_bytes as u32, element))?;
                A::Shared(a)
            }
            From::Registers(list) => {
                let mut bytes = vec![0; ROWS as usize * row_bytes];
                for (r, s) in list.iter().enumerate() {
                    for (lane, value) in w.get(*s).into_iter().enumerate() {
                        let word = (value as u32).to_le_bytes();
                        for index in 0..per {
                            let Position { row, column } = fragment::mma_a(lane as u32, r as u32, index, per);
                            let (at, size) = (row as usize * row_bytes + (column * element) as usize, element as usize);
                            bytes[at..at + size].copy_from_slice(&word[(index * element) as usize..][..size]);
                        }
                    }
                }
                A::Rows(bytes)
            }
        };
        let same = |p: &&Wgmma| p.d.first().and_then(|d| d.register) == d.first().and_then(|d| d.register);
        let previous = w.wgmma.all().filter(same).last().map(|p| p.id);
        let accumulators = match (scale_d.mask(w) >> lane & 1 == 1, previous) {
            (false, _) => Accumulators::Zero,
            (true, Some(id)) => Accumulators::Previous(id),
            (true, None) => {
                let rows = d.iter().map(|d| d.register.map_or([0; 32], |r| w.get(Src::Register(r))));
                let rows = rows.collect();
                if m.sanitize && d.iter().filter_map(|d| d.register).any(|r| w.defined(r) & mask != mask) {
                    let text = "an accumulator register that no instruction has written";
                    return Err(Stop::new(FaultKind::UninitialisedRegister, text));
                }
                Accumulators::Registers(rows)
            }
        };
        let product = Product { sum, a: a_type, b: b_type, k, saturate, negate };
        let (cta, count) = (w.cta, d.len());
        let after = previous.into_iter().filter(|id| m.pending.contains(*id)).collect();
        let id = m.pending.reserve();
        let issuer = Issuer { warp: w.index, pc: w.pc() };
        m.count_matrix_operation(w, &[w.cta], ROWS as u64 * (n * k) as u64);
        m.start_reserved(id, issuer, after, move |m| {
            let read = |m: &Machine<'_>, at: u32| chunk(m, cta, at);
            let b_bytes = gather(&b, major_b, n, row_bytes, element as usize, |at| read(m, at));
            let a_bytes = match a {
                A::Rows(bytes) => bytes,
                A::Shared(a) => {
                    let rows = (WARPS * ROWS) as usize;
                    let all = gather(&a, major_a, rows, row_bytes, element as usize, |at| read(m, at));
                    all[first_row as usize * row_bytes..][..ROWS as usize * row_bytes].to_vec()
                }
            };
            let mut rows = match accumulators {
                Accumulators::Zero => vec![[0; 32]; count],
                Accumulators::Registers(rows) => rows,
                Accumulators::Previous(id) => m.matrix_results.get(&id).cloned().unwrap_or_default(),
            };
            let place = |lane: usize, index: usize| {
                // Within the warp's own rows.
                let Position { row, column } = fragment::wgmma_d(lane as u32, index as u32);
                row as usize * n + column as usize
            };
            let mut sums = vec![0; ROWS as usize * n];
            for lane in 0..32 {
                for index in 0..n / 2 {
                    sums[place(lane, index)] = sum.get(&rows, index, lane);
                }
            }
            let result = product.compute((ROWS as usize, &a_bytes), (n, &b_bytes), &sums);
            for lane in 0..32 {
                for index in 0..n / 2 {
                    sum.put(&mut rows, index, lane, result[place(lane, index)]);
                }
            }
            m.matrix_results.insert(id, rows);
            m.progress += 1;
            Ok(())
        });
        w.wgmma.open.push(Wgmma { id, agent, d: d.clone(), a: a_registers.clone(), pc: w.pc() });
        Ok(Flow::Next)
    }))
}

/// `wgmma.fence`: registers written before it may be used by `wgmma` after it.
pub fn fence(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, _, _| {
        w.wgmma.fenced_at = w.issued;
        Ok(Flow::Next)
    }))
}

pub fn commit_group(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, _, _| {
        let group = std::mem::take(&mut w.wgmma.open);
        w.wgmma.committed.push_back(group);
        Ok(Flow::Next)
    }))
}

/// `wgmma.wait_group N`: all but the N newest groups are complete, and their results in the registers.
pub fn wait_group(i: &mut Parsed<'_>) -> Decoded {
    let Src::Constant(keep) = i.src(0, Type::U32)? else {
        return Err(DecodeError::invalid("the number of groups is a constant"));
    };
    Ok(Box::new(move |w, m, mask| {
        let done = w.wgmma.committed.len().saturating_sub(keep as usize);
        let ids = w.wgmma.committed.iter().take(done).flatten().map(|p| p.id);
        let waiting: Vec<u64> = ids.filter(|id| m.pending.contains(*id)).collect();
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        let finished: Vec<Wgmma> = w.wgmma.committed.drain(..done).flatten().collect();
        for p in &finished {
            deliver(w, m, mask, p)?;
        }
        if let Some(race) = &mut m.race {
            let mut known = None;
            for agent in finished.iter().filter_map(|p| p.agent.as_ref()) {
                race.finish(agent, &mut known);
            }
            race.acquire(w.index, mask, &known);
        }
        // A later instruction in flight may still take its accumulators from one of these.
        if w.wgmma.all().next().is_none() {
            for p in &finished {
                m.matrix_results.remove(&p.id);
            }
        }
        Ok(Flow::Next)
    }))
}

fn deliver(w: &mut Warp, m: &Machine<'_>, mask: u32, p: &Wgmma) -> Stopped<()> {
    let rows = m.matrix_results.get(&p.id).ok_or_else(|| Stop::unsupported("a result that was dropped"))?;
    for (d, row) in p.d.iter().zip(rows) {
        d.write(w, mask, row);
        if let Some(r) = d.register {
            w.define(r, mask, mask);
        }
    }
    Ok(())
}
