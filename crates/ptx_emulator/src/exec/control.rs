//! Control flow (PTX ISA, "Control Flow Instructions", "Miscellaneous Instructions").

use super::system_call::system_call;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::operand::lanes;
use crate::types::Type;

pub fn bra(i: &mut Parsed<'_>) -> Decoded {
    let label = i.label(0)?;
    Ok(Box::new(move |_, _, _| Ok(Flow::Jump(label))))
}

pub fn brx(i: &mut Parsed<'_>) -> Decoded {
    let index = i.src(0, Type::U32)?;
    let targets = i.targets(1)?;
    Ok(Box::new(move |w, _, mask| {
        let mut groups: Vec<(u32, u32)> = Vec::new();
        for lane in lanes(mask) {
            let n = w.lane(index, lane) as u32;
            let Some(&label) = targets.get(n as usize) else {
                let text = format!("branch index {n} is out of range; `brx.idx` has {} targets", targets.len());
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

pub fn call(i: &mut Parsed<'_>) -> Decoded {
    if let Some(step) = system_call(i)? {
        return Ok(step);
    }
    i.call()
}

pub fn ret(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|_, _, _| Ok(Flow::Return)))
}

pub fn exit(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|_, _, _| Ok(Flow::Exit)))
}

pub fn trap(i: &mut Parsed<'_>) -> Decoded {
    let what = i.opcode().to_owned();
    Ok(Box::new(move |_, _, mask| {
        Err(Stop::new(FaultKind::Trap, format!("the thread executed `{what}`")).lane(mask.trailing_zeros()))
    }))
}

/// `nanosleep`, `pmevent`: let time pass.
pub fn pause(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|_, _, _| Ok(Flow::Yield)))
}
