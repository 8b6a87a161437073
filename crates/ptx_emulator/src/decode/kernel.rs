//! Decodes an entry and the functions that it calls into one sequence of instructions.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::DecodeError;
use super::names::{Names, Symbol, defined_twice};
use super::opcode::{self, Opcode};
use super::parsed::Parsed;
use crate::code::{Flow, Inst, Kernel, Step, Uses};
use crate::config::fault::{FaultKind, Stop};
use crate::config::launch::Param;
use crate::config::report::Class;
use crate::machine::state::Swap;
use crate::operand::filter;
use crate::parser::ast::{Ast, Formal, Function, Instruction, Statement};
use crate::parser::error::ParseError;
use crate::parser::source::{SourceLine, Sources};
use crate::timing::work::Fence;

/// Decodes the entry `function`. `variables` numbers the module's global and constant variables.
pub fn decode(
    ast: &Rc<Ast>,
    sources: &Arc<Sources>,
    function: &Function,
    variables: &Rc<HashMap<String, u32>>,
    opcodes: &'static [Opcode],
) -> Result<Kernel, ParseError> {
    let kernel = Kernel {
        name: function.name.clone(),
        limits: function.limits.clone(),
        sources: Arc::clone(sources),
        small_sm: ast.target.starts_with("sm_12"),
        ..Kernel::default()
    };
    let mut decoder =
        Decoder { names: Names::new(ast, variables, kernel), opcodes, rows: HashMap::new(), swapped: HashSet::new() };
    decoder.entry(function)?;
    while let Some(name) = decoder.names.to_do.pop() {
        decoder.function(&name)?;
    }
    decoder.names.place_dynamic_shared();
    decoder.find_other_readers_of_scales();
    Ok(decoder.names.kernel)
}

struct Decoder {
    names: Names,
    opcodes: &'static [Opcode],
    /// Table rows of the instructions seen so far, by opcode and modifiers.
    rows: HashMap<String, Option<&'static Opcode>>,
    /// Addresses of the body's `atom.cas`, as written.
    swapped: HashSet<String>,
}

/// Collects the addresses of a body's `atom.cas`, as written.
fn swapped(body: &[Statement], found: &mut HashSet<String>) {
    for statement in body {
        match statement {
            Statement::Block(inner) => swapped(inner, found),
            Statement::Instruction(i) if is_swap(i) => found.extend(i.operands.get(1).map(|at| format!("{at:?}"))),
            _ => {}
        }
    }
}

fn is_swap(i: &Instruction) -> bool {
    i.opcode == "atom" && i.modifiers.iter().any(|modifier| modifier == "cas")
}

impl Decoder {
    fn entry(&mut self, function: &Function) -> Result<(), ParseError> {
        let mut offset = 0u32;
        for p in &function.params {
            let Formal::Memory(v) = p else {
                return Err(ParseError::new(function.line, "a kernel's parameters must be in `.param` space"));
            };
            offset = offset.next_multiple_of(v.align.max(1));
            let bytes = v.bytes as u32;
            self.names.scopes[0].insert(v.name.clone(), Symbol::Param(offset));
            self.names.kernel.params.push(Param { name: v.name.clone(), offset, bytes, align: v.align });
            offset += bytes;
        }
        if let Some(body) = &function.body {
            self.body(body)?;
        }
        Ok(())
    }

    fn function(&mut self, name: &str) -> Result<(), ParseError> {
        let ast = Rc::clone(&self.names.ast);
        let Some(function) = ast.functions.iter().find(|f| f.name == name && f.body.is_some()) else {
            return Ok(());
        };
        let signature = self.names.signature(name).map_err(|e| ParseError::new(function.line, e.message))?;
        self.names.kernel.functions[signature.function as usize] = self.names.kernel.code.len() as u32;
        self.names.scopes = vec![signature.names];
        let before = self.names.extent();
        self.body(function.body.as_deref().unwrap_or_default())?;
        let mut frame = self.names.extent().since(&before);
        frame.registers.extend(signature.formals.registers);
        frame.predicates.extend(signature.formals.predicates);
        frame.local.extend(signature.formals.local);
        // Each function is decoded once, so `set` cannot fail.
        let _ = signature.frame.set(frame);
        Ok(())
    }

    fn body(&mut self, body: &[Statement]) -> Result<(), ParseError> {
        self.swapped.clear();
        swapped(body, &mut self.swapped);
        self.block(body)?;
        // A thread that reaches the end of the body returns.
        let line = self.names.kernel.code.last().map_or(0, |i| i.line);
        self.names.kernel.code.push(Inst {
            guard: None,
            step: Box::new(|_, _, _| Ok(Flow::Return)),
            uses: Uses::default(),
            class: Class::Control,
            line,
            source: SourceLine::default(),
            name: "ret".into(),
        });
        Ok(())
    }

    fn block(&mut self, body: &[Statement]) -> Result<(), ParseError> {
        let mut scope = HashMap::new();
        for s in body {
            let (name, symbol) = match s {
                Statement::Label { name, line } => {
                    if scope.contains_key(name) {
                        return Err(defined_twice(*line, name));
                    }
                    self.names.kernel.labels.push(u32::MAX);
                    (name, Symbol::Label(self.names.kernel.labels.len() as u32 - 1))
                }
                Statement::Targets { label, names } => (label, Symbol::Targets(names.clone())),
                Statement::Prototype { label } => (label, Symbol::Prototype),
                _ => continue,
            };
            scope.insert(name.clone(), symbol);
        }
        self.names.scopes.push(scope);
        for s in body {
            match s {
                Statement::Register { ty, name, count, line } => {
                    if self.names.kernel.registers + count.unwrap_or(1) > 1 << 18 {
                        return Err(ParseError::new(*line, "too many registers"));
                    }
                    match count {
                        None => self.names.declare(name.clone(), *ty, *line)?,
                        Some(n) => (0..*n).try_for_each(|n| self.names.declare(format!("{name}{n}"), *ty, *line))?,
                    }
                }
                Statement::Variable(v) => self.names.variable(v)?,
                Statement::Label { name, .. } => {
                    if let Some(&Symbol::Label(id)) = self.names.lookup(name) {
                        self.names.kernel.labels[id as usize] = self.names.kernel.code.len() as u32;
                    }
                }
                Statement::Targets { .. } | Statement::Prototype { .. } => {}
                Statement::Instruction(i) => self.instruction(i)?,
                Statement::Block(inner) => self.block(inner)?,
            }
        }
        self.names.scopes.pop();
        Ok(())
    }

    /// Marks all lanes of a scale register as read if other instructions also read it.
    fn find_other_readers_of_scales(&mut self) {
        let Kernel { scales, code, .. } = &self.names.kernel;
        for (register, scales) in scales {
            let reads = code.iter().flat_map(|inst| &inst.uses.reads).filter(|read| *read == register).count();
            if reads > scales.uses {
                scales.lanes.store(u32::MAX, Ordering::Relaxed);
            }
        }
    }

    /// Finds the table row of an instruction. The result is cached, because most instructions occur many times.
    fn row(&mut self, i: &Instruction, name: &str) -> Option<&'static Opcode> {
        if let Some(&row) = self.rows.get(name) {
            return row;
        }
        let row = opcode::find(self.opcodes, i);
        self.rows.insert(name.to_owned(), row);
        row
    }

    fn instruction(&mut self, i: &Instruction) -> Result<(), ParseError> {
        let name = i.full_name();
        let error = |e: DecodeError| ParseError::new(i.line, format!("`{}`: {}", i.full_name(), e.message));
        let guard = match &i.guard {
            None => None,
            Some((predicate, negated)) => match self.names.lookup(predicate) {
                Some(Symbol::Predicate(p)) => Some((*p, *negated)),
                _ => return Err(error(DecodeError::invalid(format!("`{predicate}` is not a predicate")))),
            },
        };
        let found = self.row(i, &name);
        // Only the debug assertion of `Parsed::has` needs the forms.
        let forms = if cfg!(debug_assertions) { opcode::forms(self.opcodes, &i.opcode) } else { Vec::new() };
        let mut parsed = Parsed::new(i, forms, &mut self.names);
        let decoded = match found {
            Some(opcode) => (opcode.handler)(&mut parsed),
            None if opcode::knows(self.opcodes, &i.opcode) => {
                Err(DecodeError::unsupported(format!("`{name}`: this combination of modifiers is unknown")))
            }
            None => Err(DecodeError::unsupported(format!("opcode `{name}`"))),
        };
        let Parsed { mut uses, before, after, .. } = parsed;
        let class = found.map_or(Class::Other, |o| o.class);
        let guesses = || i.operands.get(1).is_some_and(|at| self.swapped.contains(&format!("{at:?}")));
        uses.swap = match &*i.opcode {
            "atom" if is_swap(i) => Some(Swap::Compare),
            "ld" if !self.swapped.is_empty() && guesses() => Some(Swap::Guess),
            _ => None,
        };
        let step: Step = match decoded {
            Ok(step) => step,
            Err(e) if e.unsupported => {
                uses = Uses::default();
                self.names.kernel.unsupported.push((i.line, e.message.clone()));
                Box::new(move |_, _, _| Err(Stop::unsupported(e.message.clone())))
            }
            Err(e) if e.faults => {
                uses = Uses::default();
                Box::new(move |_, _, _| Err(Stop::new(FaultKind::InvalidOperand, e.message.clone())))
            }
            Err(e) => return Err(error(e)),
        };
        let code = &mut self.names.kernel.code;
        let mut emit = |step, mut uses: Uses, class, name: String| {
            uses.touched = filter(&uses.reads) | filter(&uses.writes);
            uses.acts = acts(class, &uses, &name);
            uses.fence = fence(&name);
            uses.acquires = acquires(&name);
            code.push(Inst { guard, step, uses, class, line: i.line, source: i.source, name });
        };
        for (step, register) in before {
            emit(step, Uses { writes: vec![register], ..Uses::default() }, Class::Move, "mov".into());
        }
        if let Some((after, writes)) = after {
            emit(step, uses, class, name.clone());
            emit(after, Uses { writes, ..Uses::default() }, class, name);
        } else {
            emit(step, uses, class, name);
        }
        Ok(())
    }
}

/// Returns the value of [`Uses::fence`].
fn fence(name: &str) -> Option<Fence> {
    let mut parts = name.split('.');
    let opcode = parts.next()?;
    let modifiers: Vec<&str> = parts.collect();
    let any = |of: &[&str]| modifiers.iter().any(|modifier| of.contains(modifier));
    let releases = match opcode {
        "membar" => true,
        "fence" => any(&["acq_rel", "sc"]),
        "barrier" => any(&["arrive"]) && !any(&["relaxed"]),
        "st" | "red" | "atom" | "mbarrier" | "multimem" => any(&["release", "acq_rel"]),
        _ => false,
    };
    let unscoped = match opcode {
        "barrier" => any(&["cluster"]).then_some(Fence::Cluster),
        "atom" | "red" => Some(Fence::Gpu),
        _ => None,
    };
    let scope = || match modifiers.iter().find(|scope| ["cta", "cluster", "gpu", "gl", "sys"].contains(scope)) {
        Some(&"cta") => None,
        Some(&"cluster") if opcode != "fence" => Some(Fence::Cluster),
        Some(&"sys") => Some(Fence::System),
        Some(_) => Some(Fence::Gpu),
        None => unscoped,
    };
    releases.then(scope).flatten()
}

/// Returns the value of [`Uses::acquires`].
fn acquires(name: &str) -> bool {
    let has = |modifier: &str| name.split('.').any(|part| part == modifier);
    name.starts_with("barrier.cluster.wait")
        || name.starts_with("membar") && !has("cta")
        || name.starts_with("fence") && (has("acq_rel") || has("sc")) && !has("cta")
        || (has("acquire") || has("acq_rel")) && (has("cluster") || has("gpu") || has("sys"))
}

/// Whether an instruction does more than write registers.
fn acts(class: Class, uses: &Uses, name: &str) -> bool {
    match class {
        Class::Integer | Class::Float | Class::Convert | Class::Move => false,
        Class::Warp => uses.writes.is_empty() && uses.predicate_writes.is_empty(),
        Class::Matrix => !name.starts_with("mma."),
        _ => true,
    }
}
