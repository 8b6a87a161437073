//! Control flow (PTX ISA, "Control Flow Instructions", "Miscellaneous Instructions").

use super::{Flow, Lowered};
use crate::fault::{FaultKind, Stop};
use crate::lower::{Lower, LowerError};
use crate::parser::ast::{Instruction, Operand};
use crate::race::lanes;
use crate::types::Type;

fn name(i: &Instruction, n: usize) -> Result<&str, LowerError> {
    match i.operands.get(n) {
        Some(Operand::Name(name)) => Ok(name),
        _ => Err(LowerError::invalid("a label expected")),
    }
}

pub fn bra(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let label = l.label(name(i, 0)?)?;
    Ok(Box::new(move |_, _, _| Ok(Flow::Jump(label))))
}

pub fn brx(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let index = l.src(i, 0, Type::U32)?;
    let targets = l.targets(name(i, 1)?)?;
    Ok(Box::new(move |w, _, mask| {
        let mut groups: Vec<(u32, u32)> = Vec::new();
        for lane in lanes(mask) {
            let n = w.lane(index, lane) as u32;
            let Some(&label) = targets.get(n as usize) else {
                let text = format!("index {n} of {} branch targets", targets.len());
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            };
            match groups.iter_mut().find(|(_, l)| *l == label) {
                Some((mask, _)) => *mask |= 1 << lane,
                None => groups.push((1 << lane, label)),
            }
        }
        Ok(Flow::Scatter(groups))
    }))
}

pub fn call(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    l.call(i)
}

pub fn ret(_: &mut Lower<'_>, _: &Instruction) -> Lowered {
    Ok(Box::new(|_, _, _| Ok(Flow::Return)))
}

pub fn exit(_: &mut Lower<'_>, _: &Instruction) -> Lowered {
    Ok(Box::new(|_, _, _| Ok(Flow::Exit)))
}

pub fn trap(_: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let what = i.opcode.clone();
    Ok(Box::new(move |_, _, mask| {
        Err(Stop::new(FaultKind::Trap, format!("it executed `{what}`")).lane(mask.trailing_zeros()))
    }))
}

/// `nanosleep`, `pmevent`: time passes.
pub fn pause(_: &mut Lower<'_>, _: &Instruction) -> Lowered {
    Ok(Box::new(|_, _, _| Ok(Flow::Yield)))
}
