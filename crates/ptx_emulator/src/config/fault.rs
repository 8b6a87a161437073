//! Every fault that the emulator can report: its kind, its title, and its text. A fault is undefined behaviour or
//! certainly a bug of the kernel. What the emulator cannot do is no fault of the kernel: that is
//! [`FaultKind::Unsupported`].

use std::fmt;

/// Declares every kind with its title.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident => $title:literal,)+) => {
        /// What went wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum FaultKind {
            $($(#[$doc])* $name,)+
        }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$name),+];

            /// One line that says what the kind means.
            pub fn title(self) -> &'static str {
                match self {
                    $(FaultKind::$name => $title,)+
                }
            }
        }
    };
}

kinds! {
    /// An access outside every allocation, variable or window of its space.
    OutOfBounds => "access out of bounds",
    /// An address that is not a multiple of the access's size.
    Misaligned => "misaligned access",
    /// A register that no instruction has written.
    UninitialisedRegister => "read of an uninitialised register",
    /// Bytes of shared memory that nothing has written.
    UninitialisedShared => "read of uninitialised shared memory",
    /// Bytes of local memory that nothing has written.
    UninitialisedLocal => "read of uninitialised local memory",
    /// Two accesses of one shared location, one of them a write, with no order between them.
    DataRace => "data race",
    /// An access that conflicts with an earlier grid: it touches global memory which that grid has written, or writes
    /// memory which that grid has read. The earlier grid may still run, and nobody has waited for its end.
    GridNotAwaited => "race with an earlier grid that may still run",
    /// A read of bytes that an asynchronous operation still writes, or whose completion nobody waited for.
    ReadInFlight => "read of data still in flight",
    /// A write to bytes that an asynchronous operation still reads or writes.
    OverwriteInFlight => "write to memory that an asynchronous operation still uses",
    /// The async proxy accesses what the generic proxy wrote, with no proxy fence between.
    MissingProxyFence => "no proxy fence between a generic write and an async-proxy access",
    /// `wgmma` uses registers that were written since the last `wgmma.fence`.
    MissingWgmmaFence => "no wgmma.fence between writing registers and wgmma",
    /// Threads of a CTA that wait at a barrier which the others will not reach, or reach with other arguments.
    BarrierDivergence => "barrier divergence",
    /// An `.aligned` instruction, or one with a member mask, that its lanes do not execute together.
    WarpDivergence => "warp-wide instruction executed by part of its lanes",
    /// Nothing can run any more.
    Deadlock => "deadlock",
    /// The instruction budget is used up: an infinite loop, or a budget too small.
    InstructionBudget => "instruction budget used up",
    /// The kernel executed `trap`.
    Trap => "the kernel trapped",
    /// An operand whose value the manual forbids.
    InvalidOperand => "invalid operand",
    /// An mbarrier operation on memory that is no valid mbarrier object.
    MbarrierNotInitialised => "use of an mbarrier that is not initialised",
    /// More arrivals or transaction bytes than the current phase of an mbarrier can take.
    MbarrierOverflow => "mbarrier count overflow",
    /// A wait for a phase that is neither the current nor the one before.
    MbarrierPhase => "wait for an mbarrier phase that cannot come",
    /// An mbarrier overwritten or invalidated while threads wait on it or operations will signal it.
    MbarrierInUse => "mbarrier destroyed while in use",
    /// An mbarrier still expects bytes or arrivals that nothing will deliver.
    BytesNotDelivered => "bytes expected and never delivered",
    /// Tensor memory accessed outside a live allocation.
    TmemNotAllocated => "tensor memory used unallocated",
    /// Tensor memory addressed past its columns or lanes.
    TmemOutOfBounds => "tensor memory access out of bounds",
    /// Tensor memory lanes that the executing warp cannot reach.
    TmemWrongWarp => "tensor memory lanes of another warp",
    /// Tensor memory still allocated when the CTA exits.
    TmemNotFreed => "tensor memory never freed",
    /// Tensor memory that nothing has written.
    UninitialisedTmem => "read of uninitialised tensor memory",
    /// A shared-memory, instruction or tensor-map descriptor that breaks its format.
    BadDescriptor => "malformed descriptor",
    /// The launch does not fit the kernel: wrong arguments, too many threads, too much shared memory.
    BadLaunch => "launch refused",
    /// Something that the emulator does not model.
    Unsupported => "not supported by the emulator",
}

impl fmt::Display for FaultKind {
    /// The kind's name in kebab-case, as in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::new();
        for c in format!("{self:?}").chars() {
            if c.is_ascii_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.push(c.to_ascii_lowercase());
        }
        f.write_str(&name)
    }
}

/// An instruction's place.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Place {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The full opcode.
    pub instruction: String,
    /// `file:line:column` of the source that the PTX was made from, if a `.loc` names it. The calls that it was inlined
    /// into follow, the innermost first.
    pub source: Option<String>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.instruction)?;
        match &self.source {
            Some(source) => write!(f, "  ({source})"),
            None => Ok(()),
        }
    }
}

/// A thread or asynchronous operation other than the one that faulted.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Party {
    /// Who, and what it did or waits for.
    pub what: String,
    /// Where.
    pub place: Option<Place>,
}

/// A fault, with everything a reader needs to find it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, thiserror::Error)]
pub struct Fault {
    /// What went wrong.
    pub kind: FaultKind,
    /// The particulars.
    pub message: String,
    /// The entry's name.
    pub kernel: String,
    /// `%ctaid` of the thread that faulted.
    pub cta: Option<[u32; 3]>,
    /// The warp's index in its CTA.
    pub warp: Option<u32>,
    /// The lane, where one is to blame.
    pub lane: Option<u32>,
    /// The instruction.
    pub place: Option<Box<Place>>,
    /// The other side of a conflict, or who waits for what.
    pub others: Vec<Party>,
}

impl Fault {
    pub(crate) fn launch(kernel: &str, message: impl Into<String>) -> Fault {
        Fault::bare(FaultKind::BadLaunch, kernel, message)
    }

    pub(crate) fn bare(kind: FaultKind, kernel: &str, message: impl Into<String>) -> Fault {
        Fault {
            kind,
            message: message.into(),
            kernel: kernel.into(),
            cta: None,
            warp: None,
            lane: None,
            place: None,
            others: Vec::new(),
        }
    }

    /// Whether the emulator is to blame, not the kernel.
    pub fn is_unsupported(&self) -> bool {
        self.kind == FaultKind::Unsupported
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            FaultKind::Unsupported => write!(f, "unsupported: {}", self.message)?,
            kind => write!(f, "fault[{kind}]: {}: {}", kind.title(), self.message)?,
        }
        self.write_place(f)
    }
}

/// What the manual forbids and cards are known to bear: a fault only under [`Level::Strict`](crate::Level::Strict).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Warning {
    /// The first of its place, as the fault that it is under `strict`.
    #[serde(flatten)]
    pub fault: Fault,
    /// How often it happened there.
    pub times: u64,
}

impl Warning {
    /// Adds a warning to a list in which each place has one.
    pub(crate) fn add(list: &mut Vec<Warning>, new: Warning) {
        let places = |w: &Warning| {
            let others: Vec<_> = w.fault.others.iter().map(|party| party.place.clone()).collect();
            (w.fault.kind, w.fault.kernel.clone(), w.fault.place.clone(), others)
        };
        match list.iter_mut().find(|old| places(old) == places(&new)) {
            Some(old) => old.times += new.times,
            None => list.push(new),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { kind, message, .. } = &self.fault;
        write!(f, "warning[{kind}]: {}: {message}", kind.title())?;
        self.fault.write_place(f)?;
        if self.times > 1 { write!(f, "\n  {} times at this place", self.times) } else { Ok(()) }
    }
}

impl Fault {
    /// Who, where, and the other side: what faults and warnings have in common.
    fn write_place(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  in kernel `{}`", self.kernel)?;
        if let Some([x, y, z]) = self.cta {
            write!(f, ", CTA ({x}, {y}, {z})")?;
        }
        if let Some(warp) = self.warp {
            write!(f, ", warp {warp}")?;
        }
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        if let Some(place) = &self.place {
            write!(f, "\n  at {place}")?;
        }
        for other in &self.others {
            write!(f, "\n  - {}", other.what)?;
            if let Some(place) = &other.place {
                write!(f, "\n    at {place}")?;
            }
        }
        Ok(())
    }
}

/// A fault as an instruction finds it. The scheduler adds the place.
#[derive(Debug)]
pub(crate) struct Stop {
    pub kind: FaultKind,
    pub message: String,
    pub lane: Option<u32>,
    /// The instruction to blame if it is not the current one.
    pub pc: Option<u32>,
    /// What another party did, and its instruction.
    pub others: Vec<(String, Option<u32>)>,
}

impl Stop {
    pub fn new(kind: FaultKind, message: impl Into<String>) -> Box<Stop> {
        Box::new(Stop { kind, message: message.into(), lane: None, pc: None, others: Vec::new() })
    }

    pub fn unsupported(message: impl Into<String>) -> Box<Stop> {
        Stop::new(FaultKind::Unsupported, message)
    }

    pub fn lane(mut self: Box<Self>, lane: u32) -> Box<Self> {
        self.lane = Some(lane);
        self
    }

    pub fn other(mut self: Box<Self>, what: impl Into<String>, pc: Option<u32>) -> Box<Self> {
        self.others.push((what.into(), pc));
        self
    }
}

pub(crate) type Stopped<T> = Result<T, Box<Stop>>;
