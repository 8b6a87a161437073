//! A decoded kernel: one stretch of instructions, each a step that works on a warp and the machine. Knows no opcode.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::config::fault::{Fault, Party, Place, Stop, Stopped};
use crate::config::report::Class;
use crate::machine::course::TextualAddress;
use crate::machine::state::{Machine, Swap};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::Special;
use crate::parser::ast::Limits;
use crate::parser::source::{SourceLine, Sources};

/// One operation of a warp's fragment. The mask holds the lanes whose guard is true; it is never empty.
pub type Step = Box<dyn Fn(&mut Warp, &mut Machine<'_>, u32) -> Stopped<Flow> + Send + Sync>;

/// Where the lanes go next.
#[derive(Debug)]
pub enum Flow {
    /// To the next instruction.
    Next,
    /// To a label.
    Jump(u32),
    /// Each group of lanes to its label.
    Scatter(Vec<(u32, u32)>),
    /// Into a function.
    Call(u32),
    /// Each group of lanes into its function.
    ScatterCall(Vec<(u32, u32)>),
    /// Out of the function, or of the kernel if no function has called.
    Return,
    /// Out of the kernel.
    Exit,
    /// Wait, then execute this instruction again.
    Wait(WaitFor),
    /// These lanes wait, apart from the others, then execute this instruction again, as the others do at once.
    WaitApart(u32, WaitFor),
    /// Go on to the next instruction, which is executed when the wait is over.
    Pause(WaitFor),
    /// Go on, but let others run first.
    Yield,
}

/// The undefined bytes of each destination in one lane, by register.
pub type Carries = Box<dyn Fn(&Warp, usize) -> Vec<(u32, u8)> + Send + Sync>;

/// The registers of an instruction, for the check of uninitialised ones, and how it is executed.
#[derive(Default)]
pub struct Uses {
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
    pub predicate_reads: Vec<u32>,
    pub predicate_writes: Vec<u32>,
    /// A plain move: uninitialised sources make an uninitialised destination, and no fault.
    pub moves: bool,
    /// Which bytes of the destinations undefined bytes of the sources reach.
    pub carries: Option<Carries>,
    /// From which of `reads` on they are values that are only stored.
    pub stored_from: Option<usize>,
    /// A filter of the registers that it reads or writes: bit n stands for all whose number is n modulo 64.
    pub touched: u64,
    /// It waits for the warp's loads from shared memory.
    pub awaits_loads: bool,
    /// All lanes of the warp execute it together.
    pub aligned: bool,
    /// It may carry information between clusters, which take turns with such instructions.
    pub communicates: bool,
    /// It does more than write registers.
    pub acts: bool,
    /// Where its address points, as far as the text says it.
    pub address: TextualAddress,
    /// The label that it jumps to.
    pub jump: Option<u32>,
    /// Its part in a loop around `atom.cas`.
    pub swap: Option<Swap>,
}

/// A decoded instruction.
pub struct Inst {
    /// Predicate and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub step: Step,
    pub uses: Uses,
    pub class: Class,
    pub line: u32,
    pub source: SourceLine,
    pub name: String,
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

/// A register from which matrix instructions take scale factors.
#[derive(Default)]
pub struct ScaleRegister {
    /// The lanes in which some instruction reads it.
    pub lanes: Arc<AtomicU32>,
    /// How often it is taken so.
    pub uses: usize,
}

/// A decoded entry.
#[derive(Default)]
pub struct Kernel {
    /// The entry's name.
    pub name: String,
    /// Its parameters in order.
    pub params: Vec<Param>,
    pub(crate) limits: Limits,
    pub(crate) code: Vec<Inst>,
    pub(crate) labels: Vec<u32>,
    /// The labels that something jumps to.
    pub(crate) targets: Vec<u32>,
    /// Where each function begins.
    pub(crate) functions: Vec<u32>,
    pub(crate) registers: u32,
    pub(crate) predicates: u32,
    pub(crate) local_bytes: u32,
    /// Static shared memory.
    pub shared_bytes: u32,
    pub(crate) specials: Vec<(u32, Special)>,
    /// Threads of different clusters may communicate, so that clusters must take turns.
    pub(crate) communicates: bool,
    /// It is compiled for compute capability 12.x, whose multiprocessors have less shared memory than those of its time.
    pub(crate) small_shared_memory: bool,
    pub(crate) uses_tmem: bool,
    pub(crate) uses_wgmma: bool,
    /// The registers from which matrix instructions take scale factors.
    pub(crate) scales: HashMap<u32, ScaleRegister>,
    pub(crate) sources: Arc<Sources>,
    /// Instructions that cannot be executed: line, and why.
    pub unsupported: Vec<(u32, String)>,
}

/// Branches within branches that [`Kernel::outlets`] follows.
const NESTED: u32 = 3;

/// A register or a predicate.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Held {
    Register(u32),
    Predicate(u32),
}

/// Instructions that are executed one behind the other.
#[derive(Default)]
struct Way {
    /// Those that are executed in any case, and how many of `aside` come before each.
    line: Vec<(u32, usize)>,
    /// Those that branches on the way decide.
    aside: Vec<u32>,
}

impl Kernel {
    /// Bytes of the parameter block.
    pub fn param_bytes(&self) -> u32 {
        self.params.last().map_or(0, |p| p.offset + p.bytes)
    }

    /// The most threads of a CTA, where `.maxntid` or `.reqntid` says it.
    pub fn most_threads(&self) -> Option<u32> {
        let required = self.limits.required_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z));
        self.limits.max_threads.or(required)
    }

    /// CTAs of a cluster, where `.reqnctapercluster` says it.
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.limits.required_cluster
    }

    /// Registers of a thread at launch, where directives say it.
    pub fn registers_at_launch(&self) -> Option<u32> {
        self.limits.registers_at_launch()
    }

    /// Local memory of a thread, in bytes.
    pub fn local_bytes(&self) -> u32 {
        self.local_bytes
    }

    /// The instructions that do more than write registers with what a load has loaded, or with what is computed from it.
    /// `None` if it decides whether such an instruction is executed.
    pub(crate) fn outlets(&self, load: u32) -> Option<Vec<u32>> {
        let mut outlets = BTreeSet::new();
        let (mut open, mut seen) = (self.written(load), HashSet::new());
        while let Some((from, held)) = open.pop() {
            if !seen.insert((from, held)) {
                continue;
            }
            for user in self.users(from, held) {
                let Inst { guard, uses, .. } = &self.code[user as usize];
                let guarded = guard.is_some_and(|(p, _)| held == Held::Predicate(p));
                if guarded && let Some((decided, _)) = self.decided_by(user, NESTED) {
                    open.extend(decided.into_iter().flat_map(|pc| self.written(pc)));
                } else if guarded && uses.acts {
                    return None;
                } else if uses.acts {
                    outlets.insert(user);
                } else {
                    open.extend(self.written(user));
                }
            }
        }
        Some(outlets.into_iter().collect())
    }

    /// What an instruction writes.
    fn written(&self, pc: u32) -> Vec<(u32, Held)> {
        let Uses { writes, predicate_writes, .. } = &self.code[pc as usize].uses;
        let registers = writes.iter().map(|&r| Held::Register(r));
        registers.chain(predicate_writes.iter().map(|&p| Held::Predicate(p))).map(|held| (pc, held)).collect()
    }

    /// The instructions that take what another has written to a register.
    fn users(&self, from: u32, held: Held) -> Vec<u32> {
        let (mut seen, mut users) = (vec![false; self.code.len()], Vec::new());
        let mut open: Vec<u32> = self.successors(from).collect();
        while let Some(pc) = open.pop() {
            if std::mem::replace(&mut seen[pc as usize], true) {
                continue;
            }
            let Inst { guard, uses, .. } = &self.code[pc as usize];
            let (takes, replaces) = match held {
                Held::Register(r) => (uses.reads.contains(&r), uses.writes.contains(&r)),
                Held::Predicate(p) => {
                    let guards = guard.is_some_and(|(guard, _)| guard == p);
                    (guards || uses.predicate_reads.contains(&p), uses.predicate_writes.contains(&p))
                }
            };
            if takes {
                users.push(pc);
            }
            if !replaces || guard.is_some() {
                open.extend(self.successors(pc));
            }
        }
        users
    }

    /// The instructions that may come behind one, within a function.
    fn successors(&self, pc: u32) -> impl Iterator<Item = u32> {
        let inst = &self.code[pc as usize];
        let chooses = inst.name.starts_with("brx");
        let jumps = if chooses { &self.targets[..] } else { inst.uses.jump.as_slice() };
        let ends = !jumps.is_empty() || matches!(inst.name.as_str(), "ret" | "ret.uni" | "exit" | "trap");
        let next = (!ends || inst.guard.is_some()).then_some(pc + 1);
        let jumps = jumps.iter().map(|&label| self.labels[label as usize]);
        jumps.chain(next).filter(|&pc| (pc as usize) < self.code.len())
    }

    /// The instructions whose execution a branch decides, and where its two ways meet. `None` if one of them does more than write
    /// registers before they meet.
    fn decided_by(&self, branch: u32, depth: u32) -> Option<(Vec<u32>, u32)> {
        let target = self.labels[self.code[branch as usize].uses.jump? as usize];
        let ways = [branch + 1, target].map(|from| self.way(from, depth));
        let on = |way: &Way, pc: u32| way.line.iter().position(|&(at, _)| at == pc);
        let (join, ..) = *ways[0].line.iter().find(|&&(pc, _)| on(&ways[1], pc).is_some())?;
        let mut decided = Vec::new();
        for way in &ways {
            let end = on(way, join)?;
            decided.extend(way.line[..end].iter().map(|&(pc, _)| pc));
            decided.extend(&way.aside[..way.line[end].1]);
        }
        Some((decided, join))
    }

    /// What is executed from an instruction on, up to the first that does more than write registers.
    fn way(&self, from: u32, depth: u32) -> Way {
        /// The longest way that is followed.
        const LONGEST: usize = 256;
        let mut way = Way::default();
        let mut pc = from;
        while let Some(inst) = self.code.get(pc as usize).filter(|_| way.line.len() < LONGEST) {
            way.line.push((pc, way.aside.len()));
            pc = match (inst.uses.jump, inst.guard) {
                (Some(label), None) => self.labels[label as usize],
                (Some(_), Some(_)) if depth > 0 => {
                    let Some((decided, join)) = self.decided_by(pc, depth - 1) else { break };
                    way.aside.extend(decided);
                    join
                }
                (Some(_), Some(_)) => break,
                (None, _) if inst.uses.acts => break,
                (None, _) => pc + 1,
            };
        }
        way
    }

    /// Whether the code leads from one instruction to another, within a function.
    pub(crate) fn leads(&self, from: u32, to: u32) -> bool {
        let mut seen = vec![false; self.code.len()];
        let mut open = vec![from];
        while let Some(pc) = open.pop() {
            if std::mem::replace(&mut seen[pc as usize], true) {
                continue;
            }
            if self.successors(pc).any(|next| next == to) {
                return true;
            }
            open.extend(self.successors(pc));
        }
        false
    }

    /// An instruction's place.
    pub(crate) fn place(&self, pc: u32) -> Place {
        let inst = &self.code[pc as usize];
        Place { line: inst.line, instruction: inst.name.clone(), source: self.sources.describe(inst.source) }
    }
}

impl Stop {
    /// The fault of a thread, given by its CTA and the warp there.
    pub(crate) fn into_fault(self, kernel: &Kernel, thread: Option<([u32; 3], u32)>) -> Fault {
        let party = |(what, pc): (String, Option<u32>)| Party { what, place: pc.map(|pc| kernel.place(pc)) };
        Fault {
            kind: self.kind,
            message: self.message,
            kernel: kernel.name.clone(),
            cta: thread.map(|thread| thread.0),
            warp: thread.map(|thread| thread.1),
            lane: self.lane,
            place: self.pc.map(|pc| Box::new(kernel.place(pc))),
            others: self.others.into_iter().map(party).collect(),
            printed: String::new(),
            before: Vec::new(),
        }
    }
}
