//! Calls: selection of the function, and transfer of arguments and results between caller and function.

use std::sync::{Arc, OnceLock};

use super::error::{DecodeError, Result};
use super::names::{Signature, Slot, Symbol};
use super::opcode::Decoded;
use super::parsed::Parsed;
use crate::code::{Flow, Step};
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::frame::Frame;
use crate::machine::warp::Warp;
use crate::operand::{Dst, Row, Src, lanes};
use crate::parser::ast::Operand;
use crate::types::Type;

/// Maximum depth of calls. On a GPU, a thread's stack overflows beyond it.
const DEEPEST: usize = 1024;

/// A function as called by one instruction.
struct Callee {
    function: u32,
    frame: Arc<OnceLock<Frame>>,
    arguments: Vec<Move>,
    results: Vec<Move>,
    /// `true` if the call instruction has a guard.
    guarded: bool,
}

/// Transfer of a value between a caller's variable and a formal of a function.
enum Move {
    Register { from: Src, to: Dst },
    Local { from: u32, to: u32, bytes: u32 },
}

/// A value in transfer. It is read before a frame is saved or restored.
enum Value {
    Row(Box<Row>),
    Local(Vec<(usize, Vec<u8>, Vec<bool>)>),
}

impl Move {
    fn take(&self, w: &Warp, mask: u32) -> Value {
        match *self {
            Move::Register { from, .. } => Value::Row(Box::new(w.get(from))),
            Move::Local { from, bytes, .. } => {
                let bytes_of = |lane| {
                    let at = w.local_at(lane, from.into());
                    let at = at..at + bytes as usize;
                    (lane, w.local[at.clone()].to_vec(), w.local_defined[at].to_vec())
                };
                Value::Local(lanes(mask).map(bytes_of).collect())
            }
        }
    }

    fn put(&self, value: Value, w: &mut Warp, mask: u32) {
        match (self, value) {
            (Move::Register { to, .. }, Value::Row(row)) => to.write(w, mask, &row),
            (Move::Local { to, .. }, Value::Local(values)) => {
                for (lane, bytes, defined) in values {
                    let at = w.local_at(lane, (*to).into());
                    w.local[at..at + bytes.len()].copy_from_slice(&bytes);
                    w.local_defined[at..at + bytes.len()].copy_from_slice(&defined);
                }
            }
            _ => {}
        }
    }
}

/// Reads all values, runs `between`, and then writes the values.
fn moved(moves: &[Move], w: &mut Warp, mask: u32, between: impl FnOnce(&mut Warp)) {
    let values: Vec<Value> = moves.iter().map(|each| each.take(w, mask)).collect();
    between(w);
    for (each, value) in moves.iter().zip(values) {
        each.put(value, w, mask);
    }
}

impl Callee {
    /// Passes the arguments to the function. A recursive call first saves the function's frame.
    fn enter(&self, w: &mut Warp, mask: u32) -> Stopped<()> {
        let calls = &w.fragments[w.current].calls;
        if calls.len() >= DEEPEST {
            let text = format!("{DEEPEST} nested calls: the thread's stack overflows");
            return Err(Stop::new(FaultKind::OutOfBounds, text).lane(mask.trailing_zeros()));
        }
        let again = calls.iter().any(|call| call.1 == self.function);
        if again && self.guarded {
            return Err(Stop::unsupported("a recursive call with a guard predicate"));
        }
        moved(&self.arguments, w, mask, |w| {
            if let (true, Some(frame)) = (again, self.frame.get()) {
                w.keep(mask, frame);
            }
        });
        Ok(())
    }

    /// Restores the frame and fetches the results.
    fn leave(&self, w: &mut Warp, mask: u32) {
        moved(&self.results, w, mask, |w| w.give_back(mask));
    }
}

impl Parsed<'_> {
    /// `call (results), function, (arguments)`. The call copies the arguments into the function's variables, and the
    /// results out of them after the return. If the function is a register, the register's value selects it. A
    /// `.calltargets` list or a prototype may follow.
    pub fn call(&mut self) -> Decoded {
        let mut operands = self.operands().iter().peekable();
        let list = |operands: &mut std::iter::Peekable<std::slice::Iter<'_, Operand>>| {
            let list = operands.next_if(|operand| matches!(operand, Operand::List(_)));
            if let Some(Operand::List(list)) = list { list.clone() } else { Vec::new() }
        };
        let results = list(&mut operands);
        let Some(function @ Operand::Name(name)) = operands.next() else {
            return Err(DecodeError::invalid("expected a function"));
        };
        let arguments = list(&mut operands);
        if matches!(self.names.lookup(name), Some(Symbol::Register { .. })) {
            let which = operands.next().cloned();
            return self.call_by_address(&results, function, &arguments, which.as_ref());
        }
        let signature = self.names.signature(name)?;
        if signature.params.len() != arguments.len() || signature.results.len() != results.len() {
            return Err(DecodeError::invalid(format!(
                "the arguments or results do not match the signature of `{name}`"
            )));
        }
        let (callee, written) = self.callee(&signature, &results, &arguments)?;
        let (callee, function) = (Arc::new(callee), signature.function);
        let returned = Arc::clone(&callee);
        let after: Step = Box::new(move |w, _, mask| {
            returned.leave(w, mask);
            Ok(Flow::Next)
        });
        self.after = Some((after, written));
        self.moves();
        Ok(Box::new(move |w, _, mask| {
            callee.enter(w, mask)?;
            Ok(Flow::Call(function))
        }))
    }

    /// Decodes a call of the function whose address is in a register.
    fn call_by_address(
        &mut self,
        results: &[Operand],
        function: &Operand,
        arguments: &[Operand],
        which: Option<&Operand>,
    ) -> Decoded {
        let address = self.src_operand(function, Type::B64)?;
        let named = match which {
            Some(Operand::Name(list)) => self.names.call_targets(list),
            _ => None,
        };
        let candidates = named.unwrap_or_else(|| self.names.functions_taken());
        let (mut callees, mut written) = (Vec::new(), Vec::new());
        for name in candidates {
            // Functions with other parameters, and functions without a body, cannot be called by this instruction.
            let Ok(signature) = self.names.signature(&name) else { continue };
            if signature.params.len() != arguments.len() || signature.results.len() != results.len() {
                continue;
            }
            let Ok((callee, results)) = self.callee(&signature, results, arguments) else { continue };
            written.extend(results);
            callees.push((self.names.function_address(&name), callee));
        }
        let callees = Arc::new(callees);
        let returned = Arc::clone(&callees);
        let after: Step = Box::new(move |w, _, mask| {
            for (_, callee) in returned.iter() {
                let from = lanes(mask).filter(|&lane| w.returned[lane] == callee.function);
                let from = from.fold(0, |all, lane| all | 1 << lane);
                if from != 0 {
                    callee.leave(w, from);
                }
            }
            Ok(Flow::Next)
        });
        self.after = Some((after, written));
        Ok(Box::new(move |w, _, mask| {
            let mut groups: Vec<(u32, &Callee)> = Vec::new();
            for lane in lanes(mask) {
                let to = w.lane(address, lane);
                let Some((_, callee)) = callees.iter().find(|(at, _)| *at == Some(to)) else {
                    let text = format!(
                        "a call of address {to:#x}, which is not the address of a function with these arguments"
                    );
                    return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
                };
                match groups.iter_mut().find(|(_, other)| other.function == callee.function) {
                    Some((lanes, _)) => *lanes |= 1 << lane,
                    None => groups.push((1 << lane, callee)),
                }
            }
            groups.iter().try_for_each(|(mask, callee)| callee.enter(w, *mask))?;
            Ok(Flow::ScatterCall(groups.iter().map(|(mask, callee)| (*mask, callee.function)).collect()))
        }))
    }

    /// Decodes the transfers of a call. Returns the callee, and the registers that its results fill.
    fn callee(
        &mut self,
        signature: &Signature,
        results: &[Operand],
        arguments: &[Operand],
    ) -> Result<(Callee, Vec<u32>)> {
        let inward = arguments.iter().zip(&signature.params).map(|(a, s)| self.argument(a, s));
        let inward = inward.collect::<Result<Vec<_>>>()?;
        let (reads, writes) = (self.uses.reads.clone(), std::mem::take(&mut self.uses.writes));
        let back = results.iter().zip(&signature.results).map(|(r, s)| self.result(r, s));
        let back = back.collect::<Result<Vec<_>>>()?;
        self.uses.reads = reads;
        let written = std::mem::replace(&mut self.uses.writes, writes);
        for slot in &signature.params {
            if let Slot::Register { index, .. } = slot {
                self.uses.writes.push(*index);
            }
        }
        let callee = Callee {
            function: signature.function,
            frame: Arc::clone(&signature.frame),
            arguments: inward,
            results: back,
            guarded: self.has_guard(),
        };
        Ok((callee, written))
    }

    fn argument(&mut self, argument: &Operand, slot: &Slot) -> Result<Move> {
        match *slot {
            Slot::Register { index, bits } => {
                let ty = if bits > 32 { Type::B64 } else { Type::B32 };
                let ty = if bits < 32 { Type::B8 } else { ty };
                let from = self.src_operand(argument, ty)?;
                Ok(Move::Register { from, to: Dst { register: Some(index), bits: 64 } })
            }
            Slot::Memory { offset, bytes } => {
                Ok(Move::Local { from: self.param_variable(argument, bytes)?, to: offset, bytes })
            }
        }
    }

    fn result(&mut self, result: &Operand, slot: &Slot) -> Result<Move> {
        match *slot {
            Slot::Register { index, .. } => {
                Ok(Move::Register { from: Src::Register(index), to: self.dst_operand(result)? })
            }
            Slot::Memory { offset, bytes } => {
                Ok(Move::Local { from: offset, to: self.param_variable(result, bytes)?, bytes })
            }
        }
    }

    /// Whether the module has a body for the function.
    pub fn defines(&self, name: &str) -> bool {
        self.names.ast.functions.iter().any(|f| f.name == name && f.body.is_some())
    }

    /// Offset in local memory of a `.param` variable of at least `bytes` bytes.
    pub fn param_variable(&self, operand: &Operand, bytes: u32) -> Result<u32> {
        match operand {
            Operand::Name(name) => match self.names.lookup(name) {
                Some(&Symbol::Local { offset, bytes: room }) if room >= bytes => Ok(offset),
                Some(Symbol::Local { bytes: room, .. }) => Err(DecodeError::invalid(format!(
                    "`{name}` has {room} bytes, but the function's parameter has {bytes}"
                ))),
                _ => Err(DecodeError::invalid(format!("`{name}` is not a `.param` variable"))),
            },
            _ => Err(DecodeError::unsupported("a call argument that is not a variable")),
        }
    }
}
