//! Output of the parser: declarations and statements whose names are not yet resolved.

use std::collections::HashSet;

use super::source::{SourceLine, Sources};
use crate::types::{Space, Type};

/// Distance between the addresses of two functions.
const FUNCTION_STRIDE: u64 = 16;

/// A parsed file.
#[derive(Debug, Default)]
pub struct Ast {
    /// First target of `.target`, such as `sm_90a`.
    pub target: String,
    /// Source files that the PTX was generated from.
    pub sources: Sources,
    /// Module-scope variables.
    pub variables: Vec<Variable>,
    /// Entries and functions, including declarations without a body.
    pub functions: Vec<Function>,
    /// Address of the first function.
    pub code_at: u64,
}

impl Ast {
    /// Address of a function.
    pub fn function_address(&self, name: &str) -> Option<u64> {
        let n = self.functions.iter().position(|f| f.name == name && !f.entry)?;
        Some(self.code_at + n as u64 * FUNCTION_STRIDE)
    }

    /// Functions whose addresses the module takes: in an instruction, in an initializer, or in `.calltargets`.
    pub fn functions_taken(&self) -> HashSet<&str> {
        let mut taken = HashSet::new();
        for init in self.variables.iter().flat_map(|v| &v.init) {
            if let Init::Symbol { name, .. } = init {
                taken.insert(&**name);
            }
        }
        self.functions.iter().filter_map(|f| f.body.as_deref()).for_each(|body| names_used(body, &mut taken));
        let functions: HashSet<&str> = self.functions.iter().map(|f| &*f.name).collect();
        taken.retain(|name| functions.contains(name));
        taken
    }
}

/// Collects the names that a body uses as values.
fn names_used<'a>(body: &'a [Statement], used: &mut HashSet<&'a str>) {
    for statement in body {
        match statement {
            Statement::Block(inner) => names_used(inner, used),
            Statement::Targets { names, .. } => used.extend(names.iter().map(|name| &**name)),
            Statement::Instruction(i) if i.opcode != "call" => {
                for operand in &i.operands {
                    let operand = if let Operand::Address { base: Some(base), .. } = operand { base } else { operand };
                    if let Operand::Name(name) = operand {
                        used.insert(name);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A variable in any state space except `.reg`.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub space: Space,
    /// Alignment in bytes.
    pub align: u32,
    /// Size in bytes; 0 for an unsized array (`.extern .shared x[]`).
    pub bytes: u64,
    /// Element type: the unit of `init`.
    pub element: Type,
    pub external: bool,
    pub init: Vec<Init>,
    pub line: u32,
}

/// One element of an initializer.
#[derive(Clone, Debug)]
pub enum Init {
    /// The element's bits.
    Bits(u64),
    /// The address of a variable or function, plus an offset.
    Symbol { name: String, offset: i64 },
}

/// A formal parameter or return value of a function.
#[derive(Clone, Debug)]
pub enum Formal {
    /// `.param` space.
    Memory(Variable),
    /// `.reg` space.
    Register { name: String, ty: Type },
}

/// An `.entry` or a `.func`.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub entry: bool,
    pub results: Vec<Formal>,
    pub params: Vec<Formal>,
    pub limits: Limits,
    pub body: Option<Vec<Statement>>,
    pub line: u32,
}

/// Performance-tuning and cluster directives of an entry that affect a launch.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub max_threads: Option<u32>,
    pub required_threads: Option<[u32; 3]>,
    pub required_cluster: Option<[u32; 3]>,
    /// Minimum number of CTAs per SM.
    pub min_ctas: Option<u32>,
    /// Registers per thread.
    pub registers: Option<u32>,
}

impl Limits {
    /// Registers per SM, allocation unit of a thread's registers, and maximum number of registers per thread.
    const REGISTERS: u32 = 1 << 16;
    const REGISTER_UNIT: u32 = 8;
    const MOST_REGISTERS: u32 = 256;

    /// Registers per thread at launch, if the directives give them: `.maxnreg`, or the number of threads together with
    /// `.minnctapersm`. Without these directives `ptxas` ignores `setmaxnreg`.
    pub fn registers_at_launch(&self) -> Option<u32> {
        let threads = self.max_threads.or(self.required_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z)));
        let shared = || Some(Limits::REGISTERS / threads?.checked_mul(self.min_ctas?)?.max(1));
        let each = self.registers.or_else(shared)?.min(Limits::MOST_REGISTERS);
        Some(each / Limits::REGISTER_UNIT * Limits::REGISTER_UNIT)
    }
}

#[derive(Debug)]
pub enum Statement {
    /// `.reg .ty name<count>` gives `name0 …`; `count` is absent for plain names.
    Register {
        ty: Type,
        name: String,
        count: Option<u32>,
        line: u32,
    },
    Variable(Variable),
    Label {
        name: String,
        line: u32,
    },
    /// `.branchtargets` or `.calltargets` under a label.
    Targets {
        label: String,
        names: Vec<String>,
    },
    /// `.callprototype` under a label.
    Prototype {
        label: String,
    },
    Instruction(Instruction),
    Block(Vec<Statement>),
}

/// One instruction as written.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Guard predicate, and whether it is negated.
    pub guard: Option<(String, bool)>,
    pub opcode: String,
    /// Modifiers in their written order, without dots.
    pub modifiers: Vec<String>,
    pub operands: Vec<Operand>,
    pub line: u32,
    pub source: SourceLine,
}

impl Instruction {
    /// The modifiers that are types, in order.
    pub fn types(&self) -> Vec<Type> {
        self.modifiers.iter().filter_map(|m| Type::parse(m)).collect()
    }

    /// The last type among the modifiers: the type of the operation for most instructions.
    pub fn ty(&self) -> Option<Type> {
        self.modifiers.iter().rev().find_map(|m| Type::parse(m))
    }

    /// The state space among the modifiers.
    pub fn space(&self) -> Option<Space> {
        self.modifiers.iter().find_map(|m| Space::parse(m))
    }

    /// Opcode and modifiers as written.
    pub fn full_name(&self) -> String {
        let mut name = self.opcode.clone();
        for m in &self.modifiers {
            name.push('.');
            name.push_str(m);
        }
        name
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, variable, label or function.
    Name(String),
    /// `name.x`: a component of a special register or of a vector register.
    Component(String, char),
    /// An integer constant, as 64 bits.
    Int(u64),
    /// A floating-point constant written in decimal or as `0d…`.
    F64(f64),
    /// A floating-point constant written as `0f…`.
    F32(u32),
    /// `[base + offset, extra…]`.
    Address {
        base: Option<Box<Operand>>,
        offset: i64,
        extra: Vec<Operand>,
    },
    Vector(Vec<Operand>),
    /// `d|p`.
    Pair(Box<Operand>, Box<Operand>),
    /// `!p`.
    Not(Box<Operand>),
    /// Parenthesized list of a call.
    List(Vec<Operand>),
    /// `_`.
    Discard,
}
