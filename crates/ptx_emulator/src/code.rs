//! A decoded kernel: one stretch of instructions, each a step that works on a warp and the machine. Knows no opcode.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use crate::config::fault::{Fault, Party, Place, Stop, Stopped};
use crate::config::launch::Param;
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

/// The registers of an instruction, for the check of uninitialized ones, and how it is executed.
#[derive(Default)]
pub struct Uses {
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
    pub predicate_reads: Vec<u32>,
    pub predicate_writes: Vec<u32>,
    /// A plain move: uninitialized sources make an uninitialized destination, and no fault.
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
    /// Where the ways from each instruction meet, once somebody asks.
    pub(crate) joins: OnceLock<Vec<Option<u32>>>,
    /// Instructions that cannot be executed: line, and why.
    pub unsupported: Vec<(u32, String)>,
}

/// What has a value: a register, a predicate, or local memory, which is a thread's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Held {
    Register(u32),
    Predicate(u32),
    Local,
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
                if guarded && let Some(decided) = self.decided_by(user) {
                    open.extend(decided.into_iter().flat_map(|pc| self.written(pc)));
                } else if !uses.acts || self.is_private(user) {
                    open.extend(self.written(user));
                } else if guarded {
                    return None;
                } else {
                    outlets.insert(user);
                }
            }
        }
        Some(outlets.into_iter().collect())
    }

    /// Whether an instruction accesses memory in a way that nobody else notices: local memory, or a load of what is constant.
    fn is_private(&self, pc: u32) -> bool {
        let name = &self.code[pc as usize].name;
        self.is_local(pc) || ["ld.const", "ld.global.nc"].iter().any(|load| name.starts_with(load))
    }

    /// Whether an instruction accesses local memory.
    fn is_local(&self, pc: u32) -> bool {
        let Inst { class, name, .. } = &self.code[pc as usize];
        *class == Class::Memory && name.contains(".local")
    }

    /// What an instruction writes.
    fn written(&self, pc: u32) -> Vec<(u32, Held)> {
        let Uses { writes, predicate_writes, .. } = &self.code[pc as usize].uses;
        let registers = writes.iter().map(|&r| Held::Register(r));
        let stores = (self.is_local(pc) && writes.is_empty()).then_some(Held::Local);
        let all = registers.chain(predicate_writes.iter().map(|&p| Held::Predicate(p))).chain(stores);
        all.map(|held| (pc, held)).collect()
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
                Held::Local => (self.is_local(pc) && !uses.writes.is_empty(), false),
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

    /// Whether an instruction ends a function, or the kernel.
    fn ends(&self, pc: u32) -> bool {
        matches!(self.code[pc as usize].name.as_str(), "ret" | "ret.uni" | "exit" | "trap")
    }

    /// The instructions that may come behind one, within a function.
    fn successors(&self, pc: u32) -> impl Iterator<Item = u32> {
        let inst = &self.code[pc as usize];
        let chooses = inst.name.starts_with("brx");
        let jumps = if chooses { &self.targets[..] } else { inst.uses.jump.as_slice() };
        let ends = !jumps.is_empty() || self.ends(pc);
        let next = (!ends || inst.guard.is_some()).then_some(pc + 1);
        let jumps = jumps.iter().map(|&label| self.labels[label as usize]);
        jumps.chain(next).filter(|&pc| (pc as usize) < self.code.len())
    }

    /// The instructions whose execution a branch decides. `None` if others may notice one of them, or if its two ways do not meet.
    fn decided_by(&self, branch: u32) -> Option<Vec<u32>> {
        self.code[branch as usize].uses.jump?;
        let join = self.joins.get_or_init(|| self.joins())[branch as usize]?;
        let (mut decided, mut open) = (BTreeSet::new(), vec![branch]);
        while let Some(pc) = open.pop() {
            for next in self.successors(pc).filter(|&next| next != join) {
                let uses = &self.code[next as usize].uses;
                if uses.acts && uses.jump.is_none() && !self.is_private(next) {
                    return None;
                }
                if decided.insert(next) {
                    open.push(next);
                }
            }
        }
        Some(decided.into_iter().collect())
    }

    /// For each instruction, where all ways from it meet first. `None` if that is behind the function.
    ///
    /// These are the immediate post-dominators, by Cooper, Harvey and Kennedy: "A Simple, Fast Dominance Algorithm".
    fn joins(&self) -> Vec<Option<u32>> {
        let end = self.code.len();
        let after = |pc: usize| {
            let mut after: Vec<usize> = self.successors(pc as u32).map(|pc| pc as usize).collect();
            if after.is_empty() || self.ends(pc as u32) {
                after.push(end);
            }
            after
        };
        let mut before = vec![Vec::new(); end + 1];
        for pc in 0..end {
            after(pc).into_iter().for_each(|next| before[next].push(pc));
        }
        // Depth first from the end on: the order in which instructions are left.
        let (mut rank, mut order, mut open) = (vec![None; end + 1], Vec::new(), vec![(end, 0)]);
        let mut seen = vec![false; end + 1];
        seen[end] = true;
        while let Some((pc, next)) = open.last_mut() {
            if let Some(&previous) = before[*pc].get(*next) {
                *next += 1;
                if !std::mem::replace(&mut seen[previous], true) {
                    open.push((previous, 0));
                }
            } else {
                rank[*pc] = Some(order.len());
                order.push(*pc);
                open.pop();
            }
        }
        let mut joins = vec![None; end + 1];
        joins[end] = Some(end);
        let mut changed = true;
        while changed {
            changed = false;
            for &pc in order.iter().rev().skip(1) {
                let meet = |mut one: usize, mut other: usize| {
                    while one != other {
                        let later = if rank[one] < rank[other] { &mut one } else { &mut other };
                        *later = joins[*later].unwrap_or(end);
                    }
                    one
                };
                let join = after(pc).into_iter().filter(|&next| joins[next].is_some()).reduce(meet);
                changed |= join != joins[pc];
                joins[pc] = join;
            }
        }
        joins.into_iter().map(|join| join.filter(|&join| join != end).map(|join| join as u32)).collect()
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
