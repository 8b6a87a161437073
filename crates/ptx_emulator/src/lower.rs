//! From the parsed module to decoded kernels: names become registers, addresses and labels, and each instruction
//! becomes a closure. An entry and the functions it calls become one stretch of code.

use std::collections::HashMap;
use std::sync::Arc;

use crate::exec::{Flow, Inst, Lowered, Step};
use crate::fault::Stop;
use crate::machine::memory::{LOCAL_BASE, SHARED_BASE};
use crate::machine::warp::{Row, Src, Warp};
use crate::opcodes;
use crate::parser::ParseError;
use crate::parser::ast::*;
use crate::parser::source::{SourceLine, Sources};
use crate::report::Class;
use crate::types::{Space, Type};

/// Why an instruction cannot be decoded.
#[derive(Debug)]
pub struct LowerError {
    message: String,
    unsupported: bool,
}

impl LowerError {
    pub fn invalid(message: impl Into<String>) -> LowerError {
        LowerError { message: message.into(), unsupported: false }
    }

    pub fn unsupported(message: impl Into<String>) -> LowerError {
        LowerError { message: message.into(), unsupported: true }
    }
}

type Result<T, E = LowerError> = std::result::Result<T, E>;

impl Instruction {
    /// The n-th operand.
    pub(crate) fn operand(&self, n: usize) -> Result<&Operand> {
        self.operands.get(n).ok_or_else(|| LowerError::invalid(format!("operand {} is missing", n + 1)))
    }
}

/// A value that is known when a warp starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named after the manual's special registers")]
pub enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Clusterid(usize),
    Nclusterid(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterCtarank,
    ClusterNctarank,
    Laneid,
    Warpid,
    Nwarpid,
    Smid,
    Nsmid,
    LanemaskEq,
    LanemaskLe,
    LanemaskLt,
    LanemaskGe,
    LanemaskGt,
    DynamicSharedSize,
    TotalSharedSize,
    /// Grid number and the like.
    Zero,
    /// The address of a shared variable.
    Shared(u32),
    /// The address of a variable of the module.
    Variable(u32),
}

impl Special {
    fn parse(name: &str, component: Option<char>) -> Option<Special> {
        let d = match component {
            None | Some('x' | 'r') => 0,
            Some('y' | 'g') => 1,
            _ => 2,
        };
        Some(match name {
            "%tid" => Special::Tid(d),
            "%ntid" => Special::Ntid(d),
            "%ctaid" => Special::Ctaid(d),
            "%nctaid" => Special::Nctaid(d),
            "%clusterid" => Special::Clusterid(d),
            "%nclusterid" => Special::Nclusterid(d),
            "%cluster_ctaid" => Special::ClusterCtaid(d),
            "%cluster_nctaid" => Special::ClusterNctaid(d),
            "%cluster_ctarank" => Special::ClusterCtarank,
            "%cluster_nctarank" => Special::ClusterNctarank,
            "%laneid" => Special::Laneid,
            "%warpid" => Special::Warpid,
            "%nwarpid" => Special::Nwarpid,
            "%smid" => Special::Smid,
            "%nsmid" => Special::Nsmid,
            "%lanemask_eq" => Special::LanemaskEq,
            "%lanemask_le" => Special::LanemaskLe,
            "%lanemask_lt" => Special::LanemaskLt,
            "%lanemask_ge" => Special::LanemaskGe,
            "%lanemask_gt" => Special::LanemaskGt,
            "%dynamic_smem_size" => Special::DynamicSharedSize,
            "%total_smem_size" => Special::TotalSharedSize,
            "%gridid" => Special::Zero,
            _ => return None,
        })
    }
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Byte offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// A function of a decoded kernel.
pub struct Callee {
    pub name: String,
    pub entry: u32,
}

/// A decoded entry.
pub struct Kernel {
    /// The entry's name.
    pub name: String,
    /// Its parameters in order.
    pub params: Vec<Param>,
    pub(crate) limits: Limits,
    pub(crate) code: Vec<Inst>,
    pub(crate) labels: Vec<u32>,
    pub(crate) functions: Vec<Callee>,
    pub(crate) registers: u32,
    pub(crate) predicates: u32,
    pub(crate) local_bytes: u32,
    /// Static shared memory.
    pub shared_bytes: u32,
    pub(crate) specials: Vec<(u32, Special)>,
    /// Threads of different clusters may communicate, so that clusters must take turns.
    pub(crate) communicates: bool,
    pub(crate) uses_tmem: bool,
    pub(crate) uses_wgmma: bool,
    pub(crate) sources: Arc<Sources>,
    /// Instructions that cannot be executed: line, and why.
    pub unsupported: Vec<(u32, String)>,
}

impl Kernel {
    /// Bytes of the parameter block.
    pub fn param_bytes(&self) -> u32 {
        self.params.last().map_or(0, |p| p.offset + p.bytes)
    }
}

/// Where a result goes; `None` for `_`.
#[derive(Clone, Copy, Debug)]
pub struct Dst {
    register: Option<u32>,
    /// Width of the register.
    pub bits: u32,
}

impl Dst {
    /// The register, unless the result is thrown away.
    pub fn register(&self) -> Option<u32> {
        self.register
    }

    /// Writes the lanes of `mask`, cut to the register's width.
    #[inline(always)]
    pub fn write(&self, w: &mut Warp, mask: u32, row: &Row) {
        let Some(register) = self.register else {
            return;
        };
        if self.bits >= 64 {
            return w.set(register, mask, row);
        }
        let ones = (1 << self.bits) - 1;
        w.set(register, mask, &row.map(|v| v & ones));
    }

    #[inline(always)]
    pub fn write_lane(&self, w: &mut Warp, lane: usize, value: u64) {
        if let Some(register) = self.register {
            let ones = u64::MAX >> (64 - self.bits.min(64));
            w.set_lane(register, lane, value & ones);
        }
    }
}

/// Where a predicate goes; `None` for `_`.
#[derive(Clone, Copy, Debug)]
pub struct PredicateDst(Option<u32>);

impl PredicateDst {
    #[inline(always)]
    pub fn write(&self, w: &mut Warp, mask: u32, value: u32) {
        if let Some(p) = self.0 {
            w.set_predicate(p, mask, value);
        }
    }
}

/// A predicate operand.
#[derive(Clone, Copy, Debug)]
pub enum PredicateSrc {
    Register(u32, bool),
    Constant(bool),
}

impl PredicateSrc {
    /// Lanes in which it is true.
    #[inline(always)]
    pub fn mask(&self, w: &Warp) -> u32 {
        match *self {
            PredicateSrc::Register(p, negated) => w.predicate(p) ^ if negated { u32::MAX } else { 0 },
            PredicateSrc::Constant(true) => u32::MAX,
            PredicateSrc::Constant(false) => 0,
        }
    }
}

/// `[base + offset]`, with the space that the named variable lies in.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: Src,
    pub offset: i64,
    variable: Option<Space>,
}

impl Address {
    /// The space to access, given the instruction's: a function's parameters are local memory here.
    pub fn space(&self, instruction: Space) -> Space {
        match (instruction, self.variable) {
            (Space::Param, Some(Space::Local)) => Space::Local,
            (Space::Generic, Some(space)) => space,
            _ => instruction,
        }
    }
}

#[derive(Clone, Debug)]
enum Symbol {
    Register {
        index: u32,
        bits: u32,
    },
    Predicate(u32),
    /// Offset in the CTA's shared memory.
    Shared(u32),
    /// Offset in the thread's local memory.
    Local(u32),
    /// Offset in the kernel's parameters.
    Param(u32),
    Label(u32),
    Targets(Vec<String>),
    Prototype,
}

/// Where a function finds its arguments and leaves its results.
#[derive(Clone, Debug)]
enum Slot {
    Register { index: u32, bits: u32 },
    Memory { offset: u32, bytes: u32 },
}

#[derive(Clone)]
struct Signature {
    function: u32,
    params: Vec<Slot>,
    results: Vec<Slot>,
    /// Formals by name, for the body.
    names: HashMap<String, Symbol>,
}

/// Decodes one entry.
pub struct Lower<'a> {
    ast: &'a Ast,
    variables: &'a HashMap<&'a str, u32>,
    kernel: Kernel,
    scopes: Vec<HashMap<String, Symbol>>,
    hidden: HashMap<Special, u32>,
    shared: HashMap<String, u32>,
    signatures: HashMap<String, Signature>,
    to_do: Vec<String>,
    carry: Option<u32>,
    // Of the instruction being decoded.
    reads: Vec<u32>,
    writes: Vec<u32>,
    predicate_reads: Vec<u32>,
    predicate_writes: Vec<u32>,
    moves: bool,
    aligned: bool,
    before: Vec<(Step, Vec<u32>)>,
    after: Option<(Step, Vec<u32>)>,
}

/// Decodes the entry `function` of a module whose global and constant variables are numbered by `variables`.
pub fn lower(
    ast: &Ast,
    sources: &Arc<Sources>,
    function: &Function,
    variables: &HashMap<&str, u32>,
) -> Result<Kernel, ParseError> {
    let kernel = Kernel {
        name: function.name.clone(),
        params: Vec::new(),
        limits: function.limits.clone(),
        code: Vec::new(),
        labels: Vec::new(),
        functions: Vec::new(),
        registers: 0,
        predicates: 0,
        local_bytes: 0,
        shared_bytes: 0,
        specials: Vec::new(),
        communicates: false,
        uses_tmem: false,
        uses_wgmma: false,
        sources: Arc::clone(sources),
        unsupported: Vec::new(),
    };
    let mut l = Lower {
        ast,
        variables,
        kernel,
        scopes: vec![HashMap::new()],
        hidden: HashMap::new(),
        shared: HashMap::new(),
        signatures: HashMap::new(),
        to_do: Vec::new(),
        carry: None,
        reads: Vec::new(),
        writes: Vec::new(),
        predicate_reads: Vec::new(),
        predicate_writes: Vec::new(),
        moves: false,
        aligned: false,
        before: Vec::new(),
        after: None,
    };
    l.entry(function)?;
    while let Some(name) = l.to_do.pop() {
        l.function(&name)?;
    }
    l.place_dynamic_shared();
    Ok(l.kernel)
}

impl<'a> Lower<'a> {
    fn entry(&mut self, function: &'a Function) -> Result<(), ParseError> {
        let mut offset = 0u32;
        for p in &function.params {
            let Formal::Memory(v) = p else {
                return Err(ParseError::new(function.line, "a kernel's parameters are in `.param` space"));
            };
            offset = offset.next_multiple_of(v.align.max(1));
            let bytes = v.bytes as u32;
            self.scopes[0].insert(v.name.clone(), Symbol::Param(offset));
            self.kernel.params.push(Param { name: v.name.clone(), offset, bytes, align: v.align });
            offset += bytes;
        }
        if let Some(body) = &function.body {
            self.body(body)?;
        }
        Ok(())
    }

    fn function(&mut self, name: &str) -> Result<(), ParseError> {
        let ast = self.ast;
        let Some(function) = ast.functions.iter().find(|f| f.name == name && f.body.is_some()) else {
            return Ok(());
        };
        let signature = self.signatures[name].clone();
        self.kernel.functions[signature.function as usize].entry = self.kernel.code.len() as u32;
        self.scopes = vec![signature.names];
        self.body(function.body.as_deref().unwrap_or_default())
    }

    fn body(&mut self, body: &'a [Statement]) -> Result<(), ParseError> {
        self.block(body)?;
        // Whoever falls off the end returns.
        let line = self.kernel.code.last().map_or(0, |i| i.line);
        let step: Step = Box::new(|_, _, _| Ok(Flow::Return));
        self.emit(step, Class::Control, None, line, SourceLine::default(), "ret");
        Ok(())
    }

    fn block(&mut self, body: &'a [Statement]) -> Result<(), ParseError> {
        let mut scope = HashMap::new();
        for s in body {
            let (name, symbol) = match s {
                Statement::Label { name, line } => {
                    if scope.contains_key(name) {
                        return Err(defined_twice(*line, name));
                    }
                    self.kernel.labels.push(u32::MAX);
                    (name, Symbol::Label(self.kernel.labels.len() as u32 - 1))
                }
                Statement::Targets { label, names } => (label, Symbol::Targets(names.clone())),
                Statement::Prototype { label } => (label, Symbol::Prototype),
                _ => continue,
            };
            scope.insert(name.clone(), symbol);
        }
        self.scopes.push(scope);
        for s in body {
            match s {
                Statement::Register { ty, name, count, line } => {
                    if self.kernel.registers + count.unwrap_or(1) > 1 << 18 {
                        return Err(ParseError::new(*line, "too many registers"));
                    }
                    match count {
                        None => self.declare(name.clone(), *ty, *line)?,
                        Some(n) => (0..*n).try_for_each(|n| self.declare(format!("{name}{n}"), *ty, *line))?,
                    }
                }
                Statement::Variable(v) => self.variable(v)?,
                Statement::Label { name, .. } => {
                    if let Some(&Symbol::Label(id)) = self.lookup(name) {
                        self.kernel.labels[id as usize] = self.kernel.code.len() as u32;
                    }
                }
                Statement::Targets { .. } | Statement::Prototype { .. } => {}
                Statement::Instruction(i) => self.instruction(i)?,
                Statement::Block(inner) => self.block(inner)?,
            }
        }
        self.scopes.pop();
        Ok(())
    }

    fn bind(&mut self, name: &str, symbol: Symbol, line: u32) -> Result<(), ParseError> {
        match self.scopes.last_mut().and_then(|scope| scope.insert(name.to_string(), symbol)) {
            None => Ok(()),
            Some(_) => Err(defined_twice(line, name)),
        }
    }

    fn declare(&mut self, name: String, ty: Type, line: u32) -> Result<(), ParseError> {
        let symbol = self.new_register(ty);
        self.bind(&name, symbol, line)
    }

    fn new_register(&mut self, ty: Type) -> Symbol {
        if ty == Type::Pred {
            self.kernel.predicates += 1;
            return Symbol::Predicate(self.kernel.predicates - 1);
        }
        let index = self.kernel.registers;
        self.kernel.registers += ty.bits().div_ceil(64);
        Symbol::Register { index, bits: ty.bits() }
    }

    fn variable(&mut self, v: &Variable) -> Result<(), ParseError> {
        let symbol = match v.space {
            Space::Shared | Space::SharedCluster => Symbol::Shared(self.place_shared(v)),
            Space::Local | Space::Param => Symbol::Local(self.place_local(v.bytes as u32, v.align)),
            _ => {
                let text = "a variable of this space is declared at module scope";
                return Err(ParseError::new(v.line, text));
            }
        };
        self.bind(&v.name, symbol, v.line)?;
        Ok(())
    }

    fn place_local(&mut self, bytes: u32, align: u32) -> u32 {
        let at = (LOCAL_BASE + self.kernel.local_bytes).next_multiple_of(align.max(1));
        self.kernel.local_bytes = at + bytes - LOCAL_BASE;
        at
    }

    fn place_shared(&mut self, v: &Variable) -> u32 {
        let at = (SHARED_BASE + self.kernel.shared_bytes).next_multiple_of(v.align.max(1));
        self.kernel.shared_bytes = at + v.bytes as u32 - SHARED_BASE;
        at
    }

    /// Unsized arrays all begin where the static variables end.
    fn place_dynamic_shared(&mut self) {
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

    fn lookup(&self, name: &str) -> Option<&Symbol> {
        self.scopes.iter().rev().find_map(|s| s.get(name))
    }

    fn emit(
        &mut self,
        step: Step,
        class: Class,
        guard: Option<(u32, bool)>,
        line: u32,
        source: SourceLine,
        name: impl Into<String>,
    ) {
        self.kernel.code.push(Inst {
            guard,
            step,
            reads: std::mem::take(&mut self.reads),
            writes: std::mem::take(&mut self.writes),
            predicate_reads: std::mem::take(&mut self.predicate_reads),
            predicate_writes: std::mem::take(&mut self.predicate_writes),
            moves: std::mem::take(&mut self.moves),
            aligned: std::mem::take(&mut self.aligned),
            class,
            line,
            source,
            name: name.into(),
        });
    }

    fn instruction(&mut self, i: &Instruction) -> Result<(), ParseError> {
        let error = |e: LowerError| ParseError::new(i.line, format!("`{}`: {}", i.full_name(), e.message));
        let guard = match &i.guard {
            None => None,
            Some((name, negated)) => match self.lookup(name) {
                Some(Symbol::Predicate(p)) => Some((*p, *negated)),
                _ => {
                    return Err(error(LowerError::invalid(format!("`{name}` is no predicate"))));
                }
            },
        };
        let found = opcodes::find(i);
        let lowered = match found {
            Some(opcode) => {
                if i.modifiers.iter().any(|m| m == "aligned") {
                    self.aligned = true;
                }
                (opcode.handler)(self, i)
            }
            None if opcodes::knows(&i.opcode) => {
                Err(LowerError::unsupported(format!("`{}`: no such form is known", i.full_name())))
            }
            None => Err(LowerError::unsupported(format!("opcode `{}`", i.full_name()))),
        };
        let class = found.map_or(Class::Other, |o| o.class);
        let step: Step = match lowered {
            Ok(step) => step,
            Err(e) if e.unsupported => {
                for list in [&mut self.reads, &mut self.writes, &mut self.predicate_reads, &mut self.predicate_writes] {
                    list.clear();
                }
                self.aligned = false;
                self.kernel.unsupported.push((i.line, e.message.clone()));
                let text = e.message;
                Box::new(move |_, _, _| Err(Stop::unsupported(text.clone())))
            }
            Err(e) => return Err(error(e)),
        };
        for (step, writes) in std::mem::take(&mut self.before) {
            let saved = (
                std::mem::take(&mut self.reads),
                std::mem::replace(&mut self.writes, writes),
                std::mem::take(&mut self.predicate_reads),
                std::mem::take(&mut self.predicate_writes),
                std::mem::take(&mut self.moves),
                std::mem::take(&mut self.aligned),
            );
            self.emit(step, Class::Move, guard, i.line, i.source, "mov");
            (self.reads, self.writes, self.predicate_reads, self.predicate_writes, self.moves, self.aligned) = saved;
        }
        self.emit(step, class, guard, i.line, i.source, i.full_name());
        if let Some((step, writes)) = self.after.take() {
            self.writes = writes;
            self.emit(step, class, guard, i.line, i.source, i.full_name());
        }
        Ok(())
    }

    // What handlers ask for.

    /// This instruction only moves bits: undefined sources make an undefined result.
    pub fn moves(&mut self) {
        self.moves = true;
    }

    /// This instruction is executed by whole warps.
    pub fn aligned(&mut self) {
        self.aligned = true;
    }

    /// The registers written so far are not written by this instruction, but when it is waited for.
    pub fn writes_later(&mut self) {
        self.writes.clear();
    }

    /// This instruction is an asynchronous matrix instruction that uses registers.
    pub fn uses_wgmma(&mut self) {
        self.kernel.uses_wgmma = true;
    }

    /// Registers that each thread has at launch, if the entry's directives say so.
    pub fn registers_at_launch(&self) -> Option<u32> {
        self.kernel.limits.registers_at_launch()
    }

    /// This instruction works with tensor memory.
    pub fn uses_tmem(&mut self) {
        self.kernel.uses_tmem = true;
    }

    /// This instruction may carry information between clusters.
    pub fn communicates(&mut self) {
        self.kernel.communicates = true;
    }

    /// The hidden condition-code register.
    pub fn carry_flag(&mut self) -> u32 {
        *self.carry.get_or_insert_with(|| {
            self.kernel.predicates += 1;
            self.kernel.predicates - 1
        })
    }

    /// The n-th operand as a value of a type of at most 64 bits.
    pub fn src(&mut self, i: &Instruction, n: usize, ty: Type) -> Result<Src> {
        self.src_operand(i.operand(n)?, ty)
    }

    pub fn src_operand(&mut self, operand: &Operand, ty: Type) -> Result<Src> {
        let ones = u64::MAX >> (64 - ty.bits().min(64));
        let special = |name: &str, component| Special::parse(name, component);
        Ok(match operand {
            Operand::Int(v) => Src::Constant(match ty {
                Type::F32 => u64::from((*v as i64 as f32).to_bits()),
                Type::F64 => (*v as i64 as f64).to_bits(),
                _ => v & ones,
            }),
            Operand::F64(v) => Src::Constant(match ty.bits() {
                64 => v.to_bits(),
                _ => u64::from((*v as f32).to_bits()),
            }),
            Operand::F32(v) => Src::Constant(match ty.bits() {
                64 if ty == Type::F64 => f64::from(f32::from_bits(*v)).to_bits(),
                _ => u64::from(*v),
            }),
            Operand::Name(name) => match self.lookup(name).cloned() {
                Some(Symbol::Register { index, bits }) => {
                    if bits < ty.bits() {
                        return Err(LowerError::invalid(format!("`{name}` has {bits} bits, not {}", ty.bits())));
                    }
                    self.read(index, bits);
                    Src::Register(index)
                }
                Some(Symbol::Predicate(_)) => {
                    return Err(LowerError::invalid(format!("`{name}` is a predicate")));
                }
                _ => match special(name, None) {
                    Some(s) => self.special(s),
                    None => self.timer(name).map_or_else(|| self.address_of(name).map(|a| a.0), Ok)?,
                },
            },
            Operand::Component(name, c) => match special(name, Some(*c)) {
                Some(s) => self.special(s),
                None => return Err(LowerError::unsupported(format!("`{name}.{c}`"))),
            },
            Operand::Address { base: Some(base), offset, extra } if extra.is_empty() => {
                let Operand::Name(name) = &**base else {
                    return Err(LowerError::invalid("a variable expected"));
                };
                // `symbol + offset` as a value.
                let (base, _) = self.address_of(name)?;
                self.sum(base, *offset)
            }
            other => {
                return Err(LowerError::invalid(format!("a register or constant expected, not {other:?}")));
            }
        })
    }

    /// A hidden register that a step before this instruction fills.
    fn sum(&mut self, base: Src, offset: i64) -> Src {
        if let Src::Constant(c) = base {
            return Src::Constant(c.wrapping_add(offset as u64));
        }
        let hidden = self.kernel.registers;
        self.kernel.registers += 1;
        let step: Step = Box::new(move |w, _, mask| {
            let row = w.get(base).map(|v| v.wrapping_add(offset as u64));
            w.set(hidden, mask, &row);
            Ok(Flow::Next)
        });
        self.before.push((step, vec![hidden]));
        Src::Register(hidden)
    }

    /// Clocks count the cluster's warp instructions.
    fn timer(&mut self, name: &str) -> Option<Src> {
        let shift = match name {
            "%clock" | "%clock64" | "%globaltimer" | "%globaltimer_lo" => 0,
            "%clock_hi" | "%globaltimer_hi" => 32,
            _ => return None,
        };
        let hidden = self.kernel.registers;
        self.kernel.registers += 1;
        let step: Step = Box::new(move |w, m, mask| {
            w.set(hidden, mask, &[m.now >> shift; 32]);
            Ok(Flow::Next)
        });
        self.before.push((step, vec![hidden]));
        Some(Src::Register(hidden))
    }

    fn read(&mut self, index: u32, bits: u32) {
        self.reads.extend(index..index + bits.div_ceil(64));
    }

    fn special(&mut self, special: Special) -> Src {
        if let Some(&r) = self.hidden.get(&special) {
            return Src::Register(r);
        }
        let r = self.kernel.registers;
        self.kernel.registers += 1;
        self.hidden.insert(special, r);
        self.kernel.specials.push((r, special));
        Src::Register(r)
    }

    /// The address of a variable in its own space, and that space.
    fn address_of(&mut self, name: &str) -> Result<(Src, Space)> {
        match self.lookup(name).cloned() {
            Some(Symbol::Shared(offset)) => {
                return Ok((self.special(Special::Shared(offset)), Space::Shared));
            }
            Some(Symbol::Local(offset)) => return Ok((Src::Constant(offset.into()), Space::Local)),
            Some(Symbol::Param(offset)) => return Ok((Src::Constant(offset.into()), Space::Param)),
            Some(_) => return Err(LowerError::invalid(format!("`{name}` has no address"))),
            None => {}
        }
        if let Some(&n) = self.variables.get(name) {
            return Ok((self.special(Special::Variable(n)), Space::Global));
        }
        let ast = self.ast;
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
        if ast.functions.iter().any(|f| f.name == name) {
            return Err(LowerError::unsupported(format!("the address of function `{name}`")));
        }
        if name.starts_with('%') && !name[1..].starts_with(|c: char| c.is_ascii_digit()) {
            return Err(LowerError::unsupported(format!("`{name}`: no such register is declared or known")));
        }
        Err(LowerError::invalid(format!("`{name}` is not declared")))
    }

    /// The n-th operand as `[address]`.
    pub fn address(&mut self, i: &Instruction, n: usize) -> Result<Address> {
        self.address_operand(i.operand(n)?)
    }

    pub fn address_operand(&mut self, operand: &Operand) -> Result<Address> {
        let Operand::Address { base, offset, .. } = operand else {
            return Err(LowerError::invalid("an address in brackets expected"));
        };
        let Some(base) = base else {
            return Ok(Address { base: Src::Constant(*offset as u64), offset: 0, variable: None });
        };
        let Operand::Name(name) = &**base else {
            return Err(LowerError::invalid("a register or variable expected"));
        };
        match self.lookup(name).cloned() {
            Some(Symbol::Register { index, bits }) => {
                self.read(index, bits);
                Ok(Address { base: Src::Register(index), offset: *offset, variable: None })
            }
            _ => {
                let (base, space) = self.address_of(name)?;
                Ok(Address { base, offset: *offset, variable: Some(space) })
            }
        }
    }

    /// The n-th operand as an address that is a value: a register, or a variable's name.
    pub fn address_value(&mut self, i: &Instruction, n: usize) -> Result<Src> {
        self.src(i, n, Type::B32)
    }

    /// The n-th operand as a destination.
    pub fn dst(&mut self, i: &Instruction, n: usize) -> Result<Dst> {
        self.dst_operand(i.operand(n)?)
    }

    pub fn dst_operand(&mut self, operand: &Operand) -> Result<Dst> {
        match operand {
            Operand::Discard => Ok(Dst { register: None, bits: 64 }),
            Operand::Name(name) => match self.lookup(name) {
                Some(&Symbol::Register { index, bits }) => {
                    self.writes.extend(index..index + bits.div_ceil(64));
                    Ok(Dst { register: Some(index), bits: bits.min(64) })
                }
                Some(_) => Err(LowerError::invalid(format!("`{name}` is no register"))),
                None => Err(LowerError::invalid(format!("`{name}` is not declared"))),
            },
            other => Err(LowerError::invalid(format!("a destination register expected, not {other:?}"))),
        }
    }

    /// A source as 64-bit words: two for `.b128`, else one.
    pub fn words(&mut self, operand: &Operand, ty: Type) -> Result<Vec<Src>> {
        if ty.bits() <= 64 {
            return Ok(vec![self.src_operand(operand, ty)?]);
        }
        match operand {
            Operand::Name(name) => match self.lookup(name).cloned() {
                Some(Symbol::Register { index, bits: 128 }) => {
                    self.read(index, 128);
                    Ok(vec![Src::Register(index), Src::Register(index + 1)])
                }
                _ => Err(LowerError::invalid(format!("`{name}` is no register of 128 bits"))),
            },
            Operand::Int(v) => Ok(vec![Src::Constant(*v), Src::Constant(0)]),
            _ => Err(LowerError::invalid("a register of 128 bits expected")),
        }
    }

    /// A destination as 64-bit words: two for `.b128`, else one.
    pub fn dst_words(&mut self, operand: &Operand, ty: Type) -> Result<Vec<Dst>> {
        let first = self.dst_operand(operand)?;
        if ty.bits() <= 64 {
            return Ok(vec![first]);
        }
        match operand {
            Operand::Discard => Ok(vec![first, first]),
            Operand::Name(name) if matches!(self.lookup(name), Some(Symbol::Register { bits: 128, .. })) => {
                let second = Dst { register: first.register.map(|r| r + 1), bits: 64 };
                Ok(vec![first, second])
            }
            _ => Err(LowerError::invalid("a register of 128 bits expected")),
        }
    }

    pub fn is_predicate(&self, name: &str) -> bool {
        matches!(self.lookup(name), Some(Symbol::Predicate(_)))
    }

    /// The n-th operand as a predicate.
    pub fn predicate(&mut self, i: &Instruction, n: usize) -> Result<PredicateSrc> {
        self.predicate_operand(i.operand(n)?)
    }

    pub fn predicate_operand(&mut self, operand: &Operand) -> Result<PredicateSrc> {
        match operand {
            Operand::Int(v) => Ok(PredicateSrc::Constant(*v != 0)),
            Operand::Not(inner) => Ok(match self.predicate_operand(inner)? {
                PredicateSrc::Register(p, negated) => PredicateSrc::Register(p, !negated),
                PredicateSrc::Constant(c) => PredicateSrc::Constant(!c),
            }),
            Operand::Name(name) => match self.lookup(name) {
                Some(&Symbol::Predicate(p)) => {
                    self.predicate_reads.push(p);
                    Ok(PredicateSrc::Register(p, false))
                }
                _ => Err(LowerError::invalid(format!("`{name}` is no predicate"))),
            },
            _ => Err(LowerError::invalid("a predicate expected")),
        }
    }

    /// The n-th operand as a predicate to write.
    pub fn predicate_dst(&mut self, i: &Instruction, n: usize) -> Result<PredicateDst> {
        self.predicate_dst_operand(i.operand(n)?)
    }

    pub fn predicate_dst_operand(&mut self, operand: &Operand) -> Result<PredicateDst> {
        match operand {
            Operand::Discard => Ok(PredicateDst(None)),
            Operand::Name(name) => match self.lookup(name) {
                Some(&Symbol::Predicate(p)) => {
                    self.predicate_writes.push(p);
                    Ok(PredicateDst(Some(p)))
                }
                _ => Err(LowerError::invalid(format!("`{name}` is no predicate"))),
            },
            _ => Err(LowerError::invalid("a predicate expected")),
        }
    }

    pub fn label(&mut self, name: &str) -> Result<u32> {
        match self.lookup(name) {
            Some(&Symbol::Label(id)) => Ok(id),
            _ => Err(LowerError::invalid(format!("`{name}` is no label"))),
        }
    }

    /// The labels of a `.branchtargets` list.
    pub fn targets(&mut self, name: &str) -> Result<Vec<u32>> {
        match self.lookup(name).cloned() {
            Some(Symbol::Targets(names)) => names.iter().map(|n| self.label(n)).collect(),
            _ => Err(LowerError::invalid(format!("`{name}` is no list of branch targets"))),
        }
    }

    fn signature(&mut self, name: &str) -> Result<Signature> {
        if let Some(s) = self.signatures.get(name) {
            return Ok(s.clone());
        }
        let ast = self.ast;
        let Some(function) = ast.functions.iter().find(|f| f.name == name && f.body.is_some()) else {
            return Err(LowerError::unsupported(format!("a call of `{name}`, which has no body here")));
        };
        let mut names = HashMap::new();
        let mut slots = |l: &mut Self, formals: &[Formal]| -> Vec<Slot> {
            let mut list = Vec::new();
            for f in formals {
                match f {
                    Formal::Memory(v) => {
                        let bytes = v.bytes as u32;
                        let offset = l.place_local(bytes, v.align);
                        names.insert(v.name.clone(), Symbol::Local(offset));
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
        let (params, results) = (slots(self, &function.params), slots(self, &function.results));
        let number = self.kernel.functions.len() as u32;
        self.kernel.functions.push(Callee { name: name.to_string(), entry: 0 });
        let signature = Signature { function: number, params, results, names };
        self.signatures.insert(name.to_string(), signature.clone());
        self.to_do.push(name.to_string());
        Ok(signature)
    }

    /// `call (results), function, (arguments)`: arguments are copied into the function's own variables, results out
    /// of them when it has returned.
    pub fn call(&mut self, i: &Instruction) -> Lowered {
        let mut operands = i.operands.iter().peekable();
        let list = |operands: &mut std::iter::Peekable<std::slice::Iter<'_, Operand>>| match operands.peek() {
            Some(Operand::List(l)) => {
                let l = l.clone();
                operands.next();
                l
            }
            _ => Vec::new(),
        };
        let results = list(&mut operands);
        let Some(Operand::Name(name)) = operands.next() else {
            return Err(LowerError::invalid("a function expected"));
        };
        let arguments = list(&mut operands);
        if self.lookup(name).is_some() {
            return Err(LowerError::unsupported("an indirect call"));
        }
        let name = name.clone();
        let signature = self.signature(&name)?;
        if signature.params.len() != arguments.len() || signature.results.len() != results.len() {
            return Err(LowerError::invalid(format!("`{name}` takes other arguments or gives other results")));
        }
        let copies = arguments.iter().zip(&signature.params).map(|(a, s)| self.copy_in(a, s));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let reads = std::mem::take(&mut self.reads);
        let back = results.iter().zip(&signature.results).map(|(r, s)| self.copy_out(r, s));
        let back = back.collect::<Result<Vec<_>>>()?;
        self.reads = reads;
        let result_registers = std::mem::take(&mut self.writes);
        for slot in &signature.params {
            if let Slot::Register { index, .. } = slot {
                self.writes.push(*index);
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
        Ok(Box::new(move |w, m, mask| {
            if w.fragments[w.current].calls.iter().any(|c| c.1 == function) {
                let text = format!("recursion: `{}` calls itself", m.launch.kernel.functions[function as usize].name);
                return Err(Stop::unsupported(text));
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

    fn param_variable(&mut self, operand: &Operand) -> Result<u32> {
        match operand {
            Operand::Name(name) => match self.lookup(name) {
                Some(&Symbol::Local(offset)) => Ok(offset),
                _ => Err(LowerError::invalid(format!("`{name}` is no `.param` variable"))),
            },
            _ => Err(LowerError::unsupported("an argument that is no variable")),
        }
    }
}

type CopyStep = Box<dyn Fn(&mut Warp, u32) + Send + Sync>;

/// Copies bytes of local memory in each lane.
fn copy_local(from: u32, to: u32, bytes: u32) -> CopyStep {
    let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
    Box::new(move |w, mask| {
        for lane in crate::race::lanes(mask) {
            let base = lane * w.local_size();
            w.local.copy_within(base + from..base + from + bytes, base + to);
            w.local_defined.copy_within(base + from..base + from + bytes, base + to);
        }
    })
}

/// Stands for the start of dynamic shared memory until all static variables are placed.
const DYNAMIC: u32 = u32::MAX;
fn defined_twice(line: u32, name: &str) -> ParseError {
    ParseError::new(line, format!("`{name}` is defined twice in this scope"))
}
