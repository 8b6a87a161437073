//! A decoded kernel: one sequence of instructions, each a step that operates on a warp and the machine. This module
//! knows no opcode.

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
use crate::timing::work::Fence;

/// One operation of a warp's fragment. The mask holds the lanes whose guard is true. It is never empty.
pub type Step = Box<dyn Fn(&mut Warp, &mut Machine<'_>, u32) -> Stopped<Flow> + Send + Sync>;

/// Where the lanes go after a step.
#[derive(Debug)]
pub enum Flow {
    /// Go to the next instruction.
    Next,
    /// Jump to a label.
    Jump(u32),
    /// Jump with each group of lanes to its label.
    Scatter(Vec<(u32, u32)>),
    /// Call a function.
    Call(u32),
    /// Call with each group of lanes its function.
    ScatterCall(Vec<(u32, u32)>),
    /// Return from the function, or exit from the kernel if there is no caller.
    Return,
    /// Exit from the kernel.
    Exit,
    /// Wait, then execute this instruction again.
    Wait(WaitFor),
    /// These lanes wait separately and then execute the instruction again. The other lanes execute it again at once.
    WaitApart(u32, WaitFor),
    /// Go to the next instruction, but execute it only after the wait.
    Pause(WaitFor),
    /// Go to the next instruction, but let other warps run first.
    Yield,
}

/// Computes, for one lane, the undefined bits of each destination register.
pub type Carries = Box<dyn Fn(&Warp, usize) -> Vec<(u32, u64)> + Send + Sync>;

/// Computes, for lanes with undefined sources, the lanes in which each destination predicate is undefined.
pub type Decides = Box<dyn Fn(&Warp, u32) -> Vec<(u32, u32)> + Send + Sync>;

/// Registers that an instruction uses, for the check of uninitialized registers, and properties of its execution.
#[derive(Default)]
pub struct Uses {
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
    pub predicate_reads: Vec<u32>,
    pub predicate_writes: Vec<u32>,
    /// `true` for a plain move: an uninitialized source makes the destination uninitialized and is not a fault.
    pub moves: bool,
    /// Propagation of undefined bits from sources to destinations. `None`: every bit of a destination becomes
    /// undefined.
    pub carries: Option<Carries>,
    /// Propagation of undefined bits to destination predicates. `None`: the predicates become undefined.
    pub decides: Option<Decides>,
    /// Index in `reads` of the first value that is only stored.
    pub stored_from: Option<usize>,
    /// Filter of the registers that the instruction reads or writes: bit n stands for all registers whose number is n
    /// modulo 64.
    pub touched: u64,
    /// `true` if the instruction waits for the warp's loads from shared memory.
    pub awaits_loads: bool,
    /// `true` if all lanes of the warp execute the instruction together.
    pub aligned: bool,
    /// `true` if the instruction may carry information between clusters. Clusters take turns with such instructions.
    pub communicates: bool,
    /// `true` if the instruction does more than write registers.
    pub acts: bool,
    /// Fence in the machine code before an instruction that releases earlier writes at a scope beyond the CTA.
    pub fence: Option<Fence>,
    /// `true` if the instruction acquires from a scope beyond the CTA. The machine code then empties L1, CCTL.IVALL
    /// (ptxas 13.5).
    pub acquires: bool,
    /// Target of the address, as far as the text gives it.
    pub address: TextualAddress,
    /// Label that the instruction jumps to.
    pub jump: Option<u32>,
    /// Part of the instruction in a loop around `atom.cas`.
    pub swap: Option<Swap>,
}

/// A decoded instruction.
pub struct Inst {
    /// Guard predicate, and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub step: Step,
    pub uses: Uses,
    pub class: Class,
    pub line: u32,
    pub source: SourceLine,
    pub name: String,
}

/// A register that supplies scale factors to matrix instructions.
#[derive(Default)]
pub struct ScaleRegister {
    /// Mask of the lanes in which any instruction reads the register.
    pub lanes: Arc<AtomicU32>,
    /// Number of reads as scale factors.
    pub uses: usize,
}

/// A decoded entry.
#[derive(Default)]
pub struct Kernel {
    /// Name of the entry.
    pub name: String,
    /// Parameters, in order.
    pub params: Vec<Param>,
    pub(crate) limits: Limits,
    pub(crate) code: Vec<Inst>,
    pub(crate) labels: Vec<u32>,
    /// Labels that are jump targets.
    pub(crate) targets: Vec<u32>,
    /// Index of each function's first instruction.
    pub(crate) functions: Vec<u32>,
    pub(crate) registers: u32,
    pub(crate) predicates: u32,
    pub(crate) local_bytes: u32,
    /// Bytes of static shared memory.
    pub shared_bytes: u32,
    pub(crate) specials: Vec<(u32, Special)>,
    /// `true` if threads of different clusters may communicate. Clusters must then take turns.
    pub(crate) communicates: bool,
    /// `true` if the kernel is compiled for compute capability 12.x, whose SMs have less shared memory than SMs of 9.0
    /// and 10.0.
    pub(crate) small_sm: bool,
    pub(crate) uses_tmem: bool,
    pub(crate) uses_wgmma: bool,
    /// CTA group of the kernel's `tcgen05` instructions: 1 or 2.
    pub(crate) cta_group: Option<u32>,
    /// Registers that supply scale factors to matrix instructions.
    pub(crate) scales: HashMap<u32, ScaleRegister>,
    pub(crate) sources: Arc<Sources>,
    /// For each instruction, the point where all paths from it meet. Computed on first use.
    pub(crate) joins: OnceLock<Vec<Option<u32>>>,
    /// Instructions that cannot be executed: line and reason.
    pub unsupported: Vec<(u32, String)>,
}

/// Holder of a value: a register, a predicate, or the thread's local memory.
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

    /// Maximum number of threads per CTA, if `.maxntid` or `.reqntid` gives it.
    pub fn most_threads(&self) -> Option<u32> {
        let required = self.limits.required_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z));
        self.limits.max_threads.or(required)
    }

    /// CTAs per cluster, if `.reqnctapercluster` gives them.
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.limits.required_cluster
    }

    /// Registers per thread at launch, if directives give them.
    pub fn registers_at_launch(&self) -> Option<u32> {
        self.limits.registers_at_launch()
    }

    /// Bytes of local memory per thread.
    pub fn local_bytes(&self) -> u32 {
        self.local_bytes
    }

    /// Instructions that use the value of a load, or a value computed from it, for more than writing registers. `None`:
    /// the value decides whether one of these instructions is executed.
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

    /// Whether an instruction's memory access cannot be observed by other threads: local memory, or a load of constant
    /// data.
    pub(crate) fn is_private(&self, pc: u32) -> bool {
        let name = &self.code[pc as usize].name;
        self.is_local(pc) || ["ld.const", "ld.global.nc"].iter().any(|load| name.starts_with(load))
    }

    /// Whether an instruction accesses local memory.
    fn is_local(&self, pc: u32) -> bool {
        let Inst { class, name, .. } = &self.code[pc as usize];
        *class == Class::Memory && name.contains(".local")
    }

    /// Holders that an instruction writes.
    fn written(&self, pc: u32) -> Vec<(u32, Held)> {
        let Uses { writes, predicate_writes, .. } = &self.code[pc as usize].uses;
        let registers = writes.iter().map(|&r| Held::Register(r));
        let stores = (self.is_local(pc) && writes.is_empty()).then_some(Held::Local);
        let all = registers.chain(predicate_writes.iter().map(|&p| Held::Predicate(p))).chain(stores);
        all.map(|held| (pc, held)).collect()
    }

    /// Instructions that read the value that instruction `from` wrote to `held`.
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

    /// Whether an instruction ends a function or the kernel.
    fn ends(&self, pc: u32) -> bool {
        matches!(self.code[pc as usize].name.as_str(), "ret" | "ret.uni" | "exit" | "trap")
    }

    /// Instructions that may follow an instruction, within a function.
    fn successors(&self, pc: u32) -> impl Iterator<Item = u32> {
        let inst = &self.code[pc as usize];
        let chooses = inst.name.starts_with("brx");
        let jumps = if chooses { &self.targets[..] } else { inst.uses.jump.as_slice() };
        let ends = !jumps.is_empty() || self.ends(pc);
        let next = (!ends || inst.guard.is_some()).then_some(pc + 1);
        let jumps = jumps.iter().map(|&label| self.labels[label as usize]);
        jumps.chain(next).filter(|&pc| (pc as usize) < self.code.len())
    }

    /// Returns the instructions between a branch and the point where its paths meet. `None`: another thread may observe
    /// one of these instructions, or the paths do not meet.
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

    /// Returns, for each instruction, the first instruction where all paths from it meet. `None`: the paths meet at the
    /// end of the function.
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
        // Depth-first from the end, in post-order.
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

    /// Whether a path leads from one instruction to another, within a function.
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

    /// Location of an instruction.
    pub(crate) fn place(&self, pc: u32) -> Place {
        let inst = &self.code[pc as usize];
        Place { line: inst.line, instruction: inst.name.clone(), source: self.sources.describe(inst.source) }
    }
}

impl Stop {
    /// Fault of a thread, which is given by its CTA and its warp in the CTA.
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
