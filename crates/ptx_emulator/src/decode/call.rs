//! Calls: how arguments and results move between a caller and a function.

use super::error::{DecodeError, Result};
use super::names::{Slot, Symbol};
use super::opcode::Decoded;
use super::parsed::Parsed;
use crate::code::{Flow, Step};
use crate::config::fault::Stop;
use crate::machine::warp::Warp;
use crate::operand::{Src, lanes};
use crate::parser::ast::Operand;
use crate::types::Type;

impl Parsed<'_> {
    /// `call (results), function, (arguments)`: arguments are copied into the function's own variables, results out
    /// of them when it has returned.
    pub fn call(&mut self) -> Decoded {
        let mut operands = self.operands().iter().peekable();
        let list = |operands: &mut std::iter::Peekable<std::slice::Iter<'_, Operand>>| {
            let list = operands.next_if(|operand| matches!(operand, Operand::List(_)));
            if let Some(Operand::List(list)) = list { list.clone() } else { Vec::new() }
        };
        let results = list(&mut operands);
        let Some(Operand::Name(name)) = operands.next() else {
            return Err(DecodeError::invalid("a function expected"));
        };
        let arguments = list(&mut operands);
        if self.names.lookup(name).is_some() {
            return Err(DecodeError::unsupported("an indirect call"));
        }
        let signature = self.names.signature(name)?;
        if signature.params.len() != arguments.len() || signature.results.len() != results.len() {
            return Err(DecodeError::invalid(format!("`{name}` takes other arguments or gives other results")));
        }
        let copies = arguments.iter().zip(&signature.params).map(|(a, s)| self.copy_in(a, s));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let reads = std::mem::take(&mut self.uses.reads);
        let back = results.iter().zip(&signature.results).map(|(r, s)| self.copy_out(r, s));
        let back = back.collect::<Result<Vec<_>>>()?;
        self.uses.reads = reads;
        let result_registers = std::mem::take(&mut self.uses.writes);
        for slot in &signature.params {
            if let Slot::Register { index, .. } = slot {
                self.uses.writes.push(*index);
            }
        }
        self.moves();
        let after: Step = Box::new(move |w, _, mask| {
            for copy in &back {
                copy(w, mask);
            }
            Ok(Flow::Next)
        });
        self.after = Some((after, result_registers));
        let function = signature.function;
        let recursion = format!("recursion: `{name}` calls itself");
        Ok(Box::new(move |w, _, mask| {
            if w.fragments[w.current].calls.iter().any(|c| c.1 == function) {
                return Err(Stop::unsupported(recursion.clone()));
            }
            for copy in &copies {
                copy(w, mask);
            }
            Ok(Flow::Call(function))
        }))
    }

    fn copy_in(&mut self, argument: &Operand, slot: &Slot) -> Result<CopyStep> {
        match *slot {
            Slot::Register { index, bits } => {
                let ty = if bits > 32 { Type::B64 } else { Type::B32 };
                let ty = if bits < 32 { Type::B8 } else { ty };
                let from = self.src_operand(argument, ty)?;
                Ok(Box::new(move |w, mask| {
                    let row = w.get(from);
                    w.set(index, mask, &row);
                }))
            }
            Slot::Memory { offset, bytes } => {
                let from = self.param_variable(argument)?;
                Ok(copy_local(from, offset, bytes))
            }
        }
    }

    fn copy_out(&mut self, result: &Operand, slot: &Slot) -> Result<CopyStep> {
        match *slot {
            Slot::Register { index, .. } => {
                let to = self.dst_operand(result)?;
                Ok(Box::new(move |w, mask| {
                    let row = w.get(Src::Register(index));
                    to.write(w, mask, &row);
                }))
            }
            Slot::Memory { offset, bytes } => {
                let to = self.param_variable(result)?;
                Ok(copy_local(offset, to, bytes))
            }
        }
    }

    /// Whether the module has a body for the function.
    pub fn defines(&self, name: &str) -> bool {
        self.names.ast.functions.iter().any(|f| f.name == name && f.body.is_some())
    }

    /// Where a `.param` variable lies in local memory.
    pub fn param_variable(&self, operand: &Operand) -> Result<u32> {
        match operand {
            Operand::Name(name) => match self.names.lookup(name) {
                Some(&Symbol::Local(offset)) => Ok(offset),
                _ => Err(DecodeError::invalid(format!("`{name}` is no `.param` variable"))),
            },
            _ => Err(DecodeError::unsupported("an argument that is no variable")),
        }
    }
}

type CopyStep = Box<dyn Fn(&mut Warp, u32) + Send + Sync>;

/// Copies bytes of local memory in each lane.
fn copy_local(from: u32, to: u32, bytes: u32) -> CopyStep {
    let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
    Box::new(move |w, mask| {
        for lane in lanes(mask) {
            let base = lane * w.local_size();
            w.local.copy_within(base + from..base + from + bytes, base + to);
            w.local_defined.copy_within(base + from..base + from + bytes, base + to);
        }
    })
}
