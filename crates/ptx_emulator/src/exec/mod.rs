//! What a decoded instruction is, and the shapes that most of them share: a closure that does one operation for the
//! lanes of a mask. One file a family of opcodes; each handler turns a parsed instruction into such a closure.

pub mod alu;
pub mod atomic;
pub mod barrier;
pub mod bulk;
pub mod cluster;
pub mod compare;
pub mod control;
pub mod convert;
pub mod copy;
pub mod float;
pub mod matrix;
pub mod mbarrier;
pub mod memory;
pub mod tcgen05;
pub mod tensor_map;
pub mod warp;
pub mod wgmma;

use crate::fault::Stopped;
use crate::lower::{Dst, LowerError};
use crate::machine::cluster::Machine;
use crate::machine::mbarrier::{MbarrierAt, Phase};
use crate::machine::memory::SHARED_BASE;
use crate::machine::warp::{Src, Warp};
use crate::parser::source::SourceLine;
use crate::report::Class;

/// One operation of a warp's fragment. The mask holds the lanes whose guard is true; it is never empty.
pub type Step = Box<dyn Fn(&mut Warp, &mut Machine<'_>, u32) -> Stopped<Flow> + Send + Sync>;

/// What a handler makes of an instruction.
pub type Lowered = Result<Step, LowerError>;

/// Where the lanes go next.
#[derive(Debug)]
pub enum Flow {
    Next,
    /// To a label.
    Jump(u32),
    /// Each group of lanes to its label.
    Scatter(Vec<(u32, u32)>),
    /// Into a function.
    Call(u32),
    /// Out of the function, or of the kernel.
    Return,
    Exit,
    /// Wait, then execute this instruction again.
    Wait(WaitFor),
    /// Go on to the next instruction, which is executed when the wait is over.
    Pause(WaitFor),
    /// Go on, but let others run first.
    Yield,
}

/// What a fragment can wait for.
#[derive(Clone, Debug, PartialEq)]
pub enum WaitFor {
    /// These lanes of the warp: at this very instruction, or at any that waits for the same lanes.
    Lanes { need: u32, anywhere: bool },
    /// Nothing any more: all lanes have arrived.
    Released,
    /// The named barrier's next generation.
    Barrier { cta: u32, id: u32, generation: u64 },
    /// Asynchronous operations.
    Operations(Vec<u64>),
    /// A phase of an mbarrier.
    Mbarrier { at: MbarrierAt, phase: Phase },
    /// Anything that might change what an mbarrier's poll has found.
    Progress { since: u64, at: MbarrierAt },
    /// Nothing any more: time is over.
    TimedOut,
    /// The cluster barrier's next generation.
    Cluster { generation: u64 },
    /// Columns of tensor memory that others must free.
    Columns { cta: u32, columns: u32 },
    /// Registers for each thread of a warp that others must release.
    Registers { cta: u32, count: u32 },
}

impl WaitFor {
    /// Whether the wait is over.
    pub fn ready(&self, machine: &Machine<'_>, mask: u32) -> bool {
        match self {
            WaitFor::Lanes { need, .. } => need & !mask == 0,
            WaitFor::Released => true,
            WaitFor::Barrier { cta, id, generation } => {
                machine.ctas[*cta as usize].barriers[*id as usize].generation != *generation
            }
            WaitFor::Operations(ids) => ids.iter().all(|id| !machine.pending.contains(*id)),
            WaitFor::Mbarrier { at, phase } => {
                let barrier = machine.ctas[at.cta as usize].mbarriers.get(&at.offset);
                barrier.is_none_or(|b| b.is_complete(*phase))
            }
            WaitFor::Progress { since, .. } => machine.progress != *since,
            WaitFor::TimedOut => true,
            WaitFor::Columns { cta, columns } => machine.ctas[*cta as usize].tmem.room(*columns).is_some(),
            WaitFor::Registers { cta, count } => machine.ctas[*cta as usize].free_registers >= *count,
            WaitFor::Cluster { generation } => machine.cluster_barrier.generation != *generation,
        }
    }

    /// For a deadlock's report.
    pub fn describe(&self, machine: &Machine<'_>) -> String {
        match self {
            WaitFor::Lanes { need, .. } => format!("lanes {need:#010x} of its warp"),
            WaitFor::Released => "nothing".into(),
            WaitFor::Barrier { cta, id, .. } => {
                let barrier = &machine.ctas[*cta as usize].barriers[*id as usize];
                format!("barrier {id}: {} of {} threads have arrived", barrier.arrived, barrier.expected)
            }
            WaitFor::Operations(ids) => format!("{} asynchronous operations", ids.len()),
            WaitFor::Mbarrier { at, .. } | WaitFor::Progress { at, .. } => {
                let state = machine.ctas[at.cta as usize].mbarriers.get(&at.offset).map(|b| b.describe());
                let byte = at.offset - SHARED_BASE;
                let phase = match self {
                    WaitFor::Mbarrier { phase: Phase::Parity(odd), .. } => format!("parity {} of ", u32::from(*odd)),
                    WaitFor::Mbarrier { phase: Phase::Token(n), .. } => format!("phase {n} of "),
                    _ => String::new(),
                };
                format!("{phase}the mbarrier at byte {byte} of shared memory: {}", state.unwrap_or_default())
            }
            WaitFor::TimedOut => "nothing".into(),
            WaitFor::Columns { columns, .. } => format!("{columns} free columns of tensor memory"),
            WaitFor::Registers { cta, count } => {
                let free = machine.ctas[*cta as usize].free_registers;
                format!("{count} more registers a thread; warps of its CTA have released {free}")
            }
            WaitFor::Cluster { .. } => machine.cluster_barrier.describe(),
        }
    }
}

/// A decoded instruction.
pub struct Inst {
    /// Predicate and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub step: Step,
    /// Registers and predicates read and written, for the check of uninitialised ones.
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
    pub predicate_reads: Vec<u32>,
    pub predicate_writes: Vec<u32>,
    /// A plain move: uninitialised sources make an uninitialised destination, and no fault.
    pub moves: bool,
    /// All lanes of the warp execute it together.
    pub aligned: bool,
    pub class: Class,
    pub line: u32,
    pub source: SourceLine,
    pub name: String,
}

/// A lane's value as a Rust type, in the low bits of the row.
pub trait Lane: Copy + Send + Sync + 'static {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! lanes {
    ($($t:ty, $u:ty;)*) => {$(
        impl Lane for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                bits as $t
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                self as $u as u64
            }
        }
    )*};
}
lanes! { u8, u8; u16, u16; u32, u32; u64, u64; i8, u8; i16, u16; i32, u32; i64, u64; }

impl Lane for f32 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

/// `d = f(a)` in every lane.
pub fn map1<A: Lane, D: Lane>(d: Dst, a: Src, f: impl Fn(A) -> D + Send + Sync + 'static) -> Step {
    Box::new(move |w, _, mask| {
        let a = w.get(a);
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// `d = f(a, b)` in every lane.
pub fn map2<A: Lane, B: Lane, D: Lane>(
    d: Dst,
    [a, b]: [Src; 2],
    f: impl Fn(A, B) -> D + Send + Sync + 'static,
) -> Step {
    Box::new(move |w, _, mask| {
        let (a, b) = (w.get(a), w.get(b));
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i]), B::of(b[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// `d = f(a, b, c)` in every lane.
pub fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(
    d: Dst,
    [a, b, c]: [Src; 3],
    f: impl Fn(A, B, C) -> D + Send + Sync + 'static,
) -> Step {
    Box::new(move |w, _, mask| {
        let (a, b, c) = (w.get(a), w.get(b), w.get(c));
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i]), B::of(b[i]), C::of(c[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// Does `body` with the integer type that a PTX type stands for named `$T`.
macro_rules! for_integer {
    ($ty:expr, $T:ident => $body:expr) => {
        match $ty {
            $crate::types::Type::U8 | $crate::types::Type::B8 => {
                type $T = u8;
                $body
            }
            $crate::types::Type::S8 => {
                type $T = i8;
                $body
            }
            $crate::types::Type::U16 | $crate::types::Type::B16 => {
                type $T = u16;
                $body
            }
            $crate::types::Type::S16 => {
                type $T = i16;
                $body
            }
            $crate::types::Type::U32 | $crate::types::Type::B32 => {
                type $T = u32;
                $body
            }
            $crate::types::Type::S32 => {
                type $T = i32;
                $body
            }
            $crate::types::Type::U64 | $crate::types::Type::B64 => {
                type $T = u64;
                $body
            }
            $crate::types::Type::S64 => {
                type $T = i64;
                $body
            }
            other => return Err($crate::lower::LowerError::unsupported(format!("type {other:?}"))),
        }
    };
}
pub(crate) use for_integer;
