//! Every fault that the emulator can report: its kind, its title, and its text. A fault is undefined behavior or
//! certainly a bug of the kernel. What the emulator cannot do is no fault of the kernel: that is
//! [`FaultKind::Unsupported`].

use std::fmt;

use super::names::readable;

/// Declares every kind with its title.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident => $title:literal, $remedy:literal, $section:literal;)+) => {
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

            /// What mends it, as a rule.
            pub fn remedy(self) -> &'static str {
                match self {
                    $(FaultKind::$name => $remedy,)+
                }
            }

            /// Where the PTX ISA, or what it names, says more.
            pub fn section(self) -> &'static str {
                match self {
                    $(FaultKind::$name => $section,)+
                }
            }
        }
    };
}

kinds! {
    /// An access outside every allocation, variable or window of its space.
    OutOfBounds => "access out of bounds",
        "check the address and the size of the buffer",
        "State Spaces";
    /// An address that is not a multiple of the access's size.
    Misaligned => "misaligned access",
        "align the address to the size of the access",
        "Addresses as Operands";
    /// A register that no instruction has written.
    UninitializedRegister => "read of an uninitialized register",
        "write the register on every path to its use",
        "Type Information for Instructions and Operands";
    /// Bytes of shared memory that nothing has written.
    UninitializedShared => "read of uninitialized shared memory",
        "write the bytes first, and put a barrier between",
        "Shared State Space";
    /// Bytes of local memory that nothing has written.
    UninitializedLocal => "read of uninitialized local memory",
        "write the bytes first",
        "Local State Space";
    /// Two accesses of one shared location, one of them a write, with no order between them.
    DataRace => "data race",
        "put what orders the two between them: a barrier, or a release and an acquire whose scopes hold both; or make both accesses atomic",
        "Memory Consistency Model: Data-races";
    /// An access that conflicts with an earlier grid: it touches global memory which that grid has written, or writes
    /// memory which that grid has read. The earlier grid may still run, and nobody has waited for its end.
    GridNotAwaited => "race with an earlier grid that may still run",
        "execute griddepcontrol.wait before, in this thread or in one that then meets it at a barrier",
        "griddepcontrol";
    /// A read of bytes that an asynchronous operation still writes, or whose completion nobody waited for.
    ReadInFlight => "read of data still in flight",
        "wait for the operation first: at its mbarrier, by its wait instruction, or at a commit",
        "Asynchronous Operations";
    /// A write to bytes that an asynchronous operation still reads or writes.
    OverwriteInFlight => "write to memory that an asynchronous operation still uses",
        "first wait until the operation has read and written: at its mbarrier, by its wait instruction, or at a commit",
        "Asynchronous Operations";
    /// The async proxy accesses what the generic proxy wrote, with no proxy fence between.
    MissingProxyFence => "no proxy fence between a generic write and an async-proxy access",
        "execute fence.proxy.async behind the write, or fence.mbarrier_init behind an initialization, and a barrier behind that",
        "Memory Consistency Model: Proxies; membar, fence";
    /// `wgmma` uses registers that were written since the last `wgmma.fence`.
    MissingWgmmaFence => "no wgmma.fence between writing registers and wgmma",
        "execute wgmma.fence.sync.aligned between",
        "wgmma.fence";
    /// Threads of a CTA that wait at a barrier which the others will not reach, or reach with other arguments.
    BarrierDivergence => "barrier divergence",
        "let all threads of the barrier reach it, and name the same count",
        "bar, barrier";
    /// An `.aligned` instruction, or one with a member mask, that its lanes do not execute together.
    WarpDivergence => "warp-wide instruction executed by part of its lanes",
        "let all lanes of the mask reach it together",
        "bar.warp.sync";
    /// Nothing can run any more.
    Deadlock => "deadlock",
        "find who was to complete what the threads wait for",
        "mbarrier";
    /// The instruction budget is used up: an infinite loop, or a budget too small.
    InstructionBudget => "instruction budget used up",
        "raise the budget, if the loop is to end at all",
        "Control Flow Instructions";
    /// The kernel executed `trap`.
    Trap => "the kernel trapped",
        "see what the kernel checks before it",
        "trap";
    /// An operand whose value the manual forbids.
    InvalidOperand => "invalid operand",
        "give a value that the manual allows",
        "the section of the instruction";
    /// An mbarrier operation on memory that is no valid mbarrier object.
    MbarrierNotInitialized => "use of an mbarrier that is not initialized",
        "execute mbarrier.init first, and a barrier behind it",
        "mbarrier.init";
    /// More arrivals or transaction bytes than the current phase of an mbarrier can take.
    MbarrierOverflow => "mbarrier count overflow",
        "let the count of mbarrier.init be that of the arrivals of a phase, and let none arrive for the next phase early",
        "Contents of the mbarrier object";
    /// A wait for a phase that is neither the current nor the one before.
    MbarrierPhase => "wait for an mbarrier phase that cannot come",
        "wait for each phase before the next one completes",
        "mbarrier.test_wait, mbarrier.try_wait";
    /// An mbarrier overwritten or invalidated while threads wait on it or operations will signal it.
    MbarrierInUse => "mbarrier destroyed while in use",
        "wait for what is on its way, and execute mbarrier.inval before other uses of the memory",
        "mbarrier.inval";
    /// An mbarrier still expects bytes or arrivals that nothing will deliver.
    BytesNotDelivered => "bytes expected and never delivered",
        "expect as many bytes as the copies of the phase bring",
        "Tracking asynchronous operations by the mbarrier object";
    /// Tensor memory accessed outside a live allocation.
    TmemNotAllocated => "tensor memory used unallocated",
        "execute tcgen05.alloc first, and use its address",
        "tcgen05.alloc";
    /// Tensor memory addressed past its columns or lanes.
    TmemOutOfBounds => "tensor memory access out of bounds",
        "stay in 128 lanes and 512 columns",
        "Tensor Memory: Addressing";
    /// Tensor memory lanes that the executing warp cannot reach.
    TmemWrongWarp => "tensor memory lanes of another warp",
        "add the warp's quarter to the address: 32 lanes times the warp's index modulo 4",
        "tcgen05.ld, tcgen05.st: Access restrictions";
    /// Tensor memory still allocated when the CTA exits.
    TmemNotFreed => "tensor memory never freed",
        "execute tcgen05.dealloc before the CTA ends",
        "tcgen05.dealloc";
    /// Tensor memory that nothing has written.
    UninitializedTmem => "read of uninitialized tensor memory",
        "write the cells first, or do not accumulate on them",
        "tcgen05.mma, tcgen05.ld";
    /// A scale factor in a lane from which no matrix instruction takes it.
    ScaleNotRead => "scale in a lane that nobody reads",
        "put it into the lanes that the thread selector names, or name these",
        "Block Scaling for mma.sync";
    /// A shared-memory, instruction or tensor-map descriptor that breaks its format.
    BadDescriptor => "malformed descriptor",
        "see the fields of the format",
        "Matrix Descriptors; Instruction descriptor; Tensors";
    /// The launch does not fit the kernel: wrong arguments, too many threads, too much shared memory.
    BadLaunch => "launch refused",
        "launch it as its directives say",
        "Performance-Tuning Directives; Cluster Dimension Directives";
    /// Something that the emulator does not model.
    Unsupported => "not supported by the emulator",
        "see what the emulator does not model",
        "-";
}

impl FaultKind {
    /// Whether a run can go on behind it. Such a kind can be allowed.
    pub fn is_hazard(self) -> bool {
        use FaultKind as K;
        matches!(
            self,
            K::UninitializedRegister
                | K::UninitializedShared
                | K::UninitializedLocal
                | K::UninitializedTmem
                | K::DataRace
                | K::GridNotAwaited
                | K::ReadInFlight
                | K::OverwriteInFlight
                | K::MissingProxyFence
                | K::MissingWgmmaFence
                | K::MbarrierInUse
                | K::TmemWrongWarp
                | K::TmemNotFreed
                | K::ScaleNotRead
        )
    }
}

impl std::str::FromStr for FaultKind {
    type Err = String;

    /// The kind's name in kebab-case.
    fn from_str(s: &str) -> Result<Self, String> {
        let kind = FaultKind::ALL.iter().find(|kind| kind.to_string() == s);
        kind.copied().ok_or_else(|| {
            let names: Vec<_> = FaultKind::ALL.iter().filter(|kind| kind.is_hazard()).map(|k| k.to_string()).collect();
            format!("`{s}` is no kind of fault; those that can be allowed are {}", names.join(", "))
        })
    }
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
    /// What `printf` had printed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub printed: String,
    /// The hazards found before, if the run went on behind them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Warning>,
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
            printed: String::new(),
            before: Vec::new(),
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
        self.write_place(f)?;
        if !matches!(self.kind, FaultKind::Unsupported | FaultKind::BadLaunch) {
            write!(f, "\n  remedy: {}\n  PTX ISA: {}", self.kind.remedy(), self.kind.section())?;
        }
        self.before.iter().try_for_each(|hazard| write!(f, "\n{}", hazard.display("fault")))?;
        if self.printed.is_empty() { Ok(()) } else { write!(f, "\nprinted before:\n{}", self.printed) }
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
        self.display("warning").fmt(f)
    }
}

impl Warning {
    /// The text, which begins with `warning` or `fault`.
    pub fn display(&self, what: &'static str) -> impl fmt::Display + '_ {
        fmt::from_fn(move |f| {
            let Fault { kind, message, .. } = &self.fault;
            write!(f, "{what}[{kind}]: {}: {message}", kind.title())?;
            self.fault.write_place(f)?;
            if self.times > 1 { write!(f, "\n  {} times at this place", self.times) } else { Ok(()) }
        })
    }
}

impl Fault {
    /// Who, where, and the other side: what faults and warnings have in common.
    fn write_place(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  in kernel `{}`", readable(&self.kernel))?;
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
