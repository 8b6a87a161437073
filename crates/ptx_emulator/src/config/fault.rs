//! Every fault that the emulator can report, with its kind, title and text. A fault is undefined behavior, or certainly
//! a bug of the kernel. A limit of the emulator is not a fault of the kernel: it has the kind
//! [`FaultKind::Unsupported`].

use std::fmt;

use super::names::readable;

/// Declares every kind with its title, its remedy and its section of the manual.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident => $title:literal, $remedy:literal, $section:literal;)+) => {
        /// Kind of a fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum FaultKind {
            $($(#[$doc])* $name,)+
        }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$name),+];

            /// Title: one line that describes the kind.
            pub fn title(self) -> &'static str {
                match self {
                    $(FaultKind::$name => $title,)+
                }
            }

            /// Usual remedy.
            pub fn remedy(self) -> &'static str {
                match self {
                    $(FaultKind::$name => $remedy,)+
                }
            }

            /// Section of the PTX ISA that describes the rule.
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
    /// A read of a register that no instruction has written.
    UninitializedRegister => "read of an uninitialized register",
        "write the register on every path to its use",
        "Type Information for Instructions and Operands";
    /// A read of shared-memory bytes that nothing has written.
    UninitializedShared => "read of uninitialized shared memory",
        "write the bytes first, and synchronize the write and the read by a barrier",
        "Shared State Space";
    /// A use of global-memory bytes that are marked as undefined ([`Device::undefine`](crate::Device::undefine)) and that
    /// nothing has written since.
    UninitializedGlobal => "read of uninitialized global memory",
        "write the bytes first: fill the buffer before the launch, or order the kernel's own write before the read",
        "Global State Space";
    /// A read of local-memory bytes that nothing has written.
    UninitializedLocal => "read of uninitialized local memory",
        "write the bytes first",
        "Local State Space";
    /// Two unordered accesses of the same location, at least one of them a write.
    DataRace => "data race",
        "order the two accesses by a barrier, or by a release and an acquire whose scopes include both threads; or make both accesses atomic",
        "Memory Consistency Model: Data-races";
    /// An access that conflicts with an earlier grid: it touches global memory that the earlier grid wrote, or writes
    /// global memory that the earlier grid read. The earlier grid may still run, and no thread has waited for its end.
    GridNotAwaited => "race with an earlier grid that may still run",
        "execute griddepcontrol.wait before the access, in this thread or in a thread that then synchronizes with it by a barrier",
        "griddepcontrol";
    /// A read of bytes that an asynchronous operation still writes, or whose completion no thread waited for.
    ReadInFlight => "read of data still in flight",
        "first wait for the operation: at its mbarrier, by its wait instruction, or at a commit",
        "Asynchronous Operations";
    /// A write to bytes that an asynchronous operation still reads or writes.
    OverwriteInFlight => "write to memory that an asynchronous operation still uses",
        "first wait for the operation's reads and writes: at its mbarrier, by its wait instruction, or at a commit",
        "Asynchronous Operations";
    /// The async proxy accesses bytes that the generic proxy wrote, without a proxy fence between the two accesses.
    MissingProxyFence => "no proxy fence between a generic write and an async-proxy access",
        "execute fence.proxy.async after the write (fence.mbarrier_init after an mbarrier initialization), then a barrier",
        "Memory Consistency Model: Proxies; membar, fence";
    /// `wgmma` uses registers that were written after the last `wgmma.fence`.
    MissingWgmmaFence => "no wgmma.fence between writing registers and wgmma",
        "execute wgmma.fence.sync.aligned after the last write to the registers",
        "wgmma.fence";
    /// Threads of a CTA wait at a barrier that the other threads do not reach, or reach with different arguments.
    BarrierDivergence => "barrier divergence",
        "make all threads of the barrier reach it with the same thread count",
        "bar, barrier";
    /// Only some of the required lanes execute an `.aligned` instruction or an instruction with a member mask.
    WarpDivergence => "warp-wide instruction executed by only some of its lanes",
        "make all lanes of the mask reach the instruction together",
        "bar.warp.sync";
    /// No thread can run, and no operation is left that could wake a thread.
    Deadlock => "deadlock",
        "find the thread or operation that should have completed the barriers the threads wait for",
        "mbarrier";
    /// Threads run, but repeat the same steps forever: nothing is left that could change what they read.
    NoProgress => "no progress",
        "find the thread that should write what the threads read, and what it waits for itself",
        "Memory Consistency Model: Scope";
    /// A warp used up its instruction budget, or a launch its time: the kernel loops forever, or the limit is too small.
    InstructionBudget => "instruction budget used up",
        "raise the limit (--limit), or fix the loop that does not end",
        "Control Flow Instructions";
    /// The kernel executed `trap`.
    Trap => "the kernel trapped",
        "see which check of the kernel leads to the trap",
        "trap";
    /// An operand has a value that the manual forbids.
    InvalidOperand => "invalid operand",
        "use a value that the manual allows",
        "the section of the instruction";
    /// An mbarrier operation on memory that holds no valid mbarrier object.
    MbarrierNotInitialized => "use of an mbarrier that is not initialized",
        "execute mbarrier.init first, then a barrier",
        "mbarrier.init";
    /// More arrivals or transaction bytes than the current phase of an mbarrier can take.
    MbarrierOverflow => "mbarrier count overflow",
        "set the count of mbarrier.init to the number of arrivals per phase, and do not arrive early for the next phase",
        "Contents of the mbarrier object";
    /// A wait for a phase other than the current phase and the previous phase.
    MbarrierPhase => "wait for an mbarrier phase that cannot come",
        "wait for each phase before the next one completes",
        "mbarrier.test_wait, mbarrier.try_wait";
    /// An mbarrier was overwritten or invalidated while threads wait on it or pending operations will signal it.
    MbarrierInUse => "mbarrier destroyed while in use",
        "wait for all pending operations, and execute mbarrier.inval before other uses of the memory",
        "mbarrier.inval";
    /// An mbarrier still expects bytes or arrivals that nothing will deliver.
    BytesNotDelivered => "expected bytes were never delivered",
        "expect the number of bytes that the copies of the phase deliver",
        "Tracking asynchronous operations by the mbarrier object";
    /// An access of tensor memory outside a live allocation.
    TmemNotAllocated => "use of unallocated tensor memory",
        "execute tcgen05.alloc first, and use the address that it returns",
        "tcgen05.alloc";
    /// An address in tensor memory past its columns or lanes.
    TmemOutOfBounds => "tensor memory access out of bounds",
        "stay within 128 lanes and 512 columns",
        "Tensor Memory: Addressing";
    /// An access of tensor-memory lanes that the executing warp cannot reach.
    TmemWrongWarp => "access of tensor-memory lanes of another warp",
        "add the warp's quarter to the address: 32 lanes times the warp's index modulo 4",
        "tcgen05.ld, tcgen05.st: Access restrictions";
    /// Tensor memory is still allocated when the CTA exits.
    TmemNotFreed => "tensor memory never freed",
        "execute tcgen05.dealloc before the CTA ends",
        "tcgen05.dealloc";
    /// A read of tensor memory that nothing has written.
    UninitializedTmem => "read of uninitialized tensor memory",
        "write the cells first, or do not accumulate into them",
        "tcgen05.mma, tcgen05.ld";
    /// A scale factor in a lane from which no matrix instruction reads scale factors.
    ScaleNotRead => "scale factor in a lane that no matrix instruction reads",
        "put the scale factor into the lanes that the thread selector names, or change the selector",
        "Block Scaling for mma.sync";
    /// A shared-memory, instruction or tensor-map descriptor that violates its format.
    BadDescriptor => "malformed descriptor",
        "set the fields as the format defines them",
        "Matrix Descriptors; Instruction descriptor; Tensors";
    /// The launch does not fit the kernel: wrong arguments, too many threads, too much shared memory.
    BadLaunch => "launch refused",
        "launch the kernel as its directives require",
        "Performance-Tuning Directives; Cluster Dimension Directives";
    /// A feature that the emulator does not model.
    Unsupported => "not supported by the emulator",
        "see the list of features that the emulator does not model",
        "-";
}

impl FaultKind {
    /// `true` if a run can continue after this kind of fault. Only such kinds can be allowed.
    pub fn is_hazard(self) -> bool {
        use FaultKind as K;
        matches!(
            self,
            K::UninitializedRegister
                | K::UninitializedShared
                | K::UninitializedGlobal
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

    /// Parses the kind's name, in kebab-case. Both spellings of `initialised` are accepted.
    fn from_str(s: &str) -> Result<Self, String> {
        let name = s.replace("initialized", "initialised");
        let kind = FaultKind::ALL.iter().find(|kind| kind.to_string() == name);
        kind.copied().ok_or_else(|| {
            let names: Vec<_> = FaultKind::ALL.iter().filter(|kind| kind.is_hazard()).map(|k| k.to_string()).collect();
            format!("`{s}` is not a kind of fault; expected one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for FaultKind {
    /// Writes the kind's name in kebab-case, with the British `initialised`: programs match on these names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::new();
        for c in format!("{self:?}").chars() {
            if c.is_ascii_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.push(c.to_ascii_lowercase());
        }
        f.write_str(&name.replace("initialized", "initialised"))
    }
}

impl serde::Serialize for FaultKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Position of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Place {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The full opcode.
    pub instruction: String,
    /// `file:line:column` in the source that the PTX was compiled from, if a `.loc` gives it. The call sites that the
    /// instruction was inlined into follow, innermost first.
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
    /// Description of the party and of its access or wait.
    pub what: String,
    /// Location.
    pub place: Option<Place>,
}

/// A fault, with the data needed to locate it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, thiserror::Error)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Details of the fault.
    pub message: String,
    /// The entry's name.
    pub kernel: String,
    /// `%ctaid` of the thread that faulted.
    pub cta: Option<[u32; 3]>,
    /// The warp's index in its CTA.
    pub warp: Option<u32>,
    /// The lane at fault. `None`: the fault concerns the whole warp.
    pub lane: Option<u32>,
    /// The instruction at fault.
    pub place: Option<Box<Place>>,
    /// The other side of a conflict, or the threads that wait and what they wait for.
    pub others: Vec<Party>,
    /// Output of `printf` before the fault.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub printed: String,
    /// Hazards found before the fault, if the launch continued after them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Warning>,
}

impl Fault {
    pub(crate) fn launch(kernel: &str, message: impl Into<String>) -> Fault {
        Fault::bare(FaultKind::BadLaunch, kernel, message)
    }

    /// Whether another fault has the same kind and the same instructions.
    pub(crate) fn is_like(&self, other: &Fault) -> bool {
        let places = |fault: &Fault| fault.others.iter().map(|other| other.place.clone()).collect::<Vec<_>>();
        (self.kind, &self.place) == (other.kind, &other.place) && places(self) == places(other)
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

    /// `true` if the cause is a limit of the emulator and not the kernel.
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

/// A violation of the manual that GPUs are known to tolerate. It is a fault only under
/// [`Level::Strict`](crate::Level::Strict).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Warning {
    /// The first occurrence at this place, in the form of the fault that `strict` would report.
    #[serde(flatten)]
    pub fault: Fault,
    /// Number of occurrences at this place.
    pub times: u64,
}

impl Warning {
    /// Adds a warning to a list that holds one warning per kind and place.
    pub(crate) fn count(list: &mut Vec<Warning>, new: Warning) {
        let place = |w: &Warning| (w.fault.kind, w.fault.kernel.clone(), w.fault.place.clone());
        match list.iter_mut().find(|old| place(old) == place(&new)) {
            Some(old) => old.times += new.times,
            None => list.push(new),
        }
    }

    /// Adds a hazard to a list that holds one hazard per kind, place and places of the other parties.
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
    /// Text of the warning. The text starts with `what`: `warning` or `fault`.
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
    /// Writes the part common to faults and warnings: the thread, the place and the other parties.
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

/// A fault as an instruction reports it. The scheduler adds the place.
#[derive(Debug)]
pub(crate) struct Stop {
    pub kind: FaultKind,
    pub message: String,
    pub lane: Option<u32>,
    /// The instruction at fault, if it is not the current instruction.
    pub pc: Option<u32>,
    /// Actions of the other parties, with their instructions.
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
