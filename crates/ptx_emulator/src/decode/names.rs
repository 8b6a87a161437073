//! Meanings of the names in a kernel, and placement of its registers and variables.

use std::collections::HashMap;
use std::iter;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use super::error::{DecodeError, Result};
use crate::code::Kernel;
use crate::machine::address::{LOCAL_BASE, SHARED_BASE};
use crate::machine::frame::Frame;
use crate::operand::{Special, Src};
use crate::parser::ast::{Ast, Formal, Variable};
use crate::parser::error::ParseError;
use crate::types::{Space, Type};

/// Meaning of a name.
#[derive(Clone, Debug)]
pub enum Symbol {
    Register {
        index: u32,
        bits: u32,
    },
    Predicate(u32),
    /// Offset in the CTA's shared memory.
    Shared(u32),
    /// Offset in the thread's local memory, and size in bytes.
    Local {
        offset: u32,
        bytes: u32,
    },
    /// Offset in the kernel's parameters.
    Param(u32),
    Label(u32),
    Targets(Vec<String>),
    Prototype,
}

/// Location of a function's argument or result.
#[derive(Clone, Debug)]
pub enum Slot {
    Register { index: u32, bits: u32 },
    Memory { offset: u32, bytes: u32 },
}

/// Calling information of a function.
#[derive(Clone)]
pub struct Signature {
    pub function: u32,
    pub params: Vec<Slot>,
    pub results: Vec<Slot>,
    /// Formals by name, for the body.
    pub names: HashMap<String, Symbol>,
    /// Registers and memory of the formals. `frame` adds the registers and memory of the body, once it is decoded.
    pub formals: Frame,
    pub frame: Arc<OnceLock<Frame>>,
}

/// The names of a kernel, and the kernel decoded so far.
pub struct Names {
    pub ast: Rc<Ast>,
    /// Global and constant variables of the module, by number.
    variables: Rc<HashMap<String, u32>>,
    pub kernel: Kernel,
    /// Scopes, innermost last.
    pub scopes: Vec<HashMap<String, Symbol>>,
    /// Registers that hold a value from the start of a warp.
    hidden: HashMap<Special, u32>,
    /// Addresses of the module's shared variables that have been placed.
    shared: HashMap<String, u32>,
    signatures: HashMap<String, Signature>,
    /// Functions that are called but not yet decoded.
    pub to_do: Vec<String>,
    carry: Option<u32>,
    taken: Option<Vec<String>>,
}

/// Numbers of registers, predicates and bytes of local memory allocated so far.
pub struct Extent([u32; 3]);

impl Extent {
    /// Everything allocated since `before`.
    pub fn since(&self, before: &Extent) -> Frame {
        let [registers, predicates, local] = std::array::from_fn(|n| iter::once(before.0[n]..self.0[n]).collect());
        Frame { registers, predicates, local }
    }
}

/// Placeholder for the address of dynamic shared memory, which is known once all static variables are placed.
const DYNAMIC: u32 = u32::MAX;

impl Names {
    /// Creates the names that every function of the module sees.
    pub fn new(ast: &Rc<Ast>, variables: &Rc<HashMap<String, u32>>, kernel: Kernel) -> Names {
        Names {
            ast: Rc::clone(ast),
            variables: Rc::clone(variables),
            kernel,
            scopes: vec![HashMap::new()],
            hidden: HashMap::new(),
            shared: HashMap::new(),
            signatures: HashMap::new(),
            to_do: Vec::new(),
            carry: None,
            taken: None,
        }
    }

    /// Binds a name in the innermost scope.
    pub fn bind(&mut self, name: &str, symbol: Symbol, line: u32) -> Result<(), ParseError> {
        match self.scopes.last_mut().and_then(|scope| scope.insert(name.to_string(), symbol)) {
            None => Ok(()),
            Some(_) => Err(defined_twice(line, name)),
        }
    }

    /// Declares a register.
    pub fn declare(&mut self, name: String, ty: Type, line: u32) -> Result<(), ParseError> {
        let symbol = self.new_register(ty);
        self.bind(&name, symbol, line)
    }

    pub fn new_register(&mut self, ty: Type) -> Symbol {
        if ty == Type::Pred {
            self.kernel.predicates += 1;
            return Symbol::Predicate(self.kernel.predicates - 1);
        }
        let index = self.kernel.registers;
        self.kernel.registers += ty.bits().div_ceil(64);
        Symbol::Register { index, bits: ty.bits() }
    }

    /// Declares a variable of a function.
    pub fn variable(&mut self, v: &Variable) -> Result<(), ParseError> {
        let symbol = match v.space {
            Space::Shared | Space::SharedCluster => Symbol::Shared(self.place_shared(v)),
            Space::Local | Space::Param => {
                let bytes = v.bytes as u32;
                Symbol::Local { offset: self.place_local(bytes, v.align), bytes }
            }
            _ => {
                let text = "a variable of this state space must be declared at module scope";
                return Err(ParseError::new(v.line, text));
            }
        };
        self.bind(&v.name, symbol, v.line)?;
        Ok(())
    }

    pub fn place_local(&mut self, bytes: u32, align: u32) -> u32 {
        let at = (LOCAL_BASE + self.kernel.local_bytes).next_multiple_of(align.max(1));
        self.kernel.local_bytes = at + bytes - LOCAL_BASE;
        at
    }

    fn place_shared(&mut self, v: &Variable) -> u32 {
        let at = (SHARED_BASE + self.kernel.shared_bytes).next_multiple_of(v.align.max(1));
        self.kernel.shared_bytes = at + v.bytes as u32 - SHARED_BASE;
        at
    }

    /// Places the unsized arrays. They all start at the end of the static variables.
    pub fn place_dynamic_shared(&mut self) {
        let external = |v: &&Variable| v.space == Space::Shared && v.bytes == 0;
        let align = self.ast.variables.iter().filter(external).map(|v| v.align).max().unwrap_or(1);
        self.kernel.shared_bytes = self.kernel.shared_bytes.next_multiple_of(align.max(1));
        let at = SHARED_BASE + self.kernel.shared_bytes;
        for (_, special) in &mut self.kernel.specials {
            if *special == Special::Shared(DYNAMIC) {
                *special = Special::Shared(at);
            }
        }
    }

    /// Meaning of a name in the innermost scope that binds it.
    pub fn lookup(&self, name: &str) -> Option<&Symbol> {
        self.scopes.iter().rev().find_map(|s| s.get(name))
    }

    /// The hidden register of a value that is known when a warp starts.
    pub fn special(&mut self, special: Special) -> Src {
        if let Some(&r) = self.hidden.get(&special) {
            return Src::Register(r);
        }
        let r = self.kernel.registers;
        self.kernel.registers += 1;
        self.hidden.insert(special, r);
        self.kernel.specials.push((r, special));
        Src::Register(r)
    }

    /// Address of a variable in its state space, and the space.
    pub fn address_of(&mut self, name: &str) -> Result<(Src, Space)> {
        match self.lookup(name).cloned() {
            Some(Symbol::Shared(offset)) => {
                return Ok((self.special(Special::Shared(offset)), Space::Shared));
            }
            Some(Symbol::Local { offset, .. }) => return Ok((Src::Constant(offset.into()), Space::Local)),
            Some(Symbol::Param(offset)) => return Ok((Src::Constant(offset.into()), Space::Param)),
            Some(_) => return Err(DecodeError::invalid(format!("`{name}` has no address"))),
            None => {}
        }
        if let Some(&n) = self.variables.get(name) {
            return Ok((self.special(Special::Variable(n)), Space::Global));
        }
        let ast = Rc::clone(&self.ast);
        let shared = |v: &&Variable| v.name == name && v.space == Space::Shared;
        if let Some(v) = ast.variables.iter().find(shared) {
            let at = match self.shared.get(name) {
                Some(&at) => at,
                None => {
                    let at = if v.bytes == 0 { DYNAMIC } else { self.place_shared(v) };
                    self.shared.insert(name.to_string(), at);
                    at
                }
            };
            return Ok((self.special(Special::Shared(at)), Space::Shared));
        }
        if let Some(address) = ast.function_address(name) {
            return Ok((Src::Constant(address), Space::Generic));
        }
        if name.starts_with('%') && !name[1..].starts_with(|c: char| c.is_ascii_digit()) {
            return Err(DecodeError::unsupported(format!(
                "`{name}` is neither a declared nor a known special register"
            )));
        }
        Err(DecodeError::invalid(format!("`{name}` is not declared")))
    }

    /// Whether a name is a predicate register.
    pub fn is_predicate(&self, name: &str) -> bool {
        matches!(self.lookup(name), Some(Symbol::Predicate(_)))
    }

    /// Number of a label.
    pub fn label(&self, name: &str) -> Result<u32> {
        match self.lookup(name) {
            Some(&Symbol::Label(id)) => Ok(id),
            _ => Err(DecodeError::invalid(format!("`{name}` is not a label"))),
        }
    }

    /// Labels of a `.branchtargets` list.
    pub fn targets(&self, name: &str) -> Result<Vec<u32>> {
        match self.lookup(name).cloned() {
            Some(Symbol::Targets(names)) => names.iter().map(|n| self.label(n)).collect(),
            _ => Err(DecodeError::invalid(format!("`{name}` is not a `.branchtargets` list"))),
        }
    }

    /// Calling information of a function. The first request queues the function for decoding.
    pub fn signature(&mut self, name: &str) -> Result<Signature> {
        if let Some(s) = self.signatures.get(name) {
            return Ok(s.clone());
        }
        let ast = Rc::clone(&self.ast);
        let Some(function) = ast.functions.iter().find(|f| f.name == name && f.body.is_some()) else {
            return Err(DecodeError::unsupported(format!("a call of `{name}`, which has no body in this module")));
        };
        let mut names = HashMap::new();
        let mut slots = |l: &mut Self, formals: &[Formal]| -> Vec<Slot> {
            let mut list = Vec::new();
            for f in formals {
                match f {
                    Formal::Memory(v) => {
                        let bytes = v.bytes as u32;
                        let offset = l.place_local(bytes, v.align);
                        names.insert(v.name.clone(), Symbol::Local { offset, bytes });
                        list.push(Slot::Memory { offset, bytes });
                    }
                    Formal::Register { name, ty } => {
                        let symbol = l.new_register(*ty);
                        if let Symbol::Register { index, bits } = symbol {
                            list.push(Slot::Register { index, bits });
                        }
                        names.insert(name.clone(), symbol);
                    }
                }
            }
            list
        };
        let before = self.extent();
        let (params, results) = (slots(self, &function.params), slots(self, &function.results));
        let formals = self.extent().since(&before);
        let number = self.kernel.functions.len() as u32;
        self.kernel.functions.push(0);
        let signature = Signature { function: number, params, results, names, formals, frame: Arc::default() };
        self.signatures.insert(name.to_string(), signature.clone());
        self.to_do.push(name.to_string());
        Ok(signature)
    }

    /// Functions whose addresses the module takes, in the order of the file.
    pub fn functions_taken(&mut self) -> Vec<String> {
        let ast = &self.ast;
        let taken = self.taken.get_or_insert_with(|| {
            let taken = ast.functions_taken();
            ast.functions.iter().map(|f| &f.name).filter(|name| taken.contains(&***name)).cloned().collect()
        });
        taken.clone()
    }

    /// Functions of a `.calltargets` list.
    pub fn call_targets(&self, name: &str) -> Option<Vec<String>> {
        match self.lookup(name) {
            Some(Symbol::Targets(names)) => Some(names.clone()),
            _ => None,
        }
    }

    /// Address of a function's first instruction.
    pub fn function_address(&self, name: &str) -> Option<u64> {
        self.ast.function_address(name)
    }

    /// Numbers of registers, predicates and bytes of local memory allocated so far.
    pub fn extent(&self) -> Extent {
        let kernel = &self.kernel;
        Extent([kernel.registers, kernel.predicates, LOCAL_BASE + kernel.local_bytes])
    }

    /// The hidden condition-code register.
    pub fn carry_flag(&mut self) -> u32 {
        *self.carry.get_or_insert_with(|| {
            self.kernel.predicates += 1;
            self.kernel.predicates - 1
        })
    }
}

/// Error for a name that is defined twice.
pub fn defined_twice(line: u32, name: &str) -> ParseError {
    ParseError::new(line, format!("`{name}` is defined twice in this scope"))
}
