//! The driver's state, behind one lock.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use ptx_emulator::Timeline;

use crate::card::Card;
use crate::code::Code;
use crate::handle::{FIRST_HANDLE, Handle};
use crate::memory::Memory;
use crate::objects::{Context, Function, Graph, Module, Node, Test};
use crate::options::Options;
use crate::queue::Queue;

pub struct Driver {
    pub card: Card,
    /// Number of these GPUs.
    pub cards: i32,
    pub options: Options,
    pub initialized: bool,
    /// The test's settings. `None`: the driver belongs to a program.
    pub test: Option<Test>,
    /// Nanoseconds on the device's clock, which copies and launches advance. The time between two events shows the work
    /// between them. It predicts a GPU's time only if launches run by the clock of a GPU.
    pub clock: u64,
    next_handle: Handle,
    pub contexts: BTreeMap<Handle, Context>,
    /// Modules and libraries.
    pub modules: BTreeMap<Handle, Module>,
    /// Functions and kernels.
    pub functions: BTreeMap<Handle, Function>,
    pub queue: Queue,
    /// Graphs and executable graphs.
    pub graphs: BTreeMap<Handle, Graph>,
    pub nodes: BTreeMap<Handle, Node>,
    /// Memory pools other than the default one.
    pub pools: BTreeMap<Handle, ()>,
    pub memory: Memory,
    /// Code of the kernel's fault that made the context unusable.
    pub lost: Option<Code>,
    /// Number of launches so far.
    pub launches: u64,
    /// Predicted times of launches. `None`: times are not predicted.
    pub timeline: Option<Timeline>,
    /// Reports of launches that no call has read. `None`: nothing reads them.
    pub reports: Option<String>,
    /// Stream of the last grid. `None`: something else has run since.
    pub last_launch: Option<Handle>,
}

static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::new(Options::from_environment(), None)));

/// Locks and returns the driver.
pub fn driver() -> MutexGuard<'static, Driver> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver {
    /// Creates the driver of a program, or of a test.
    pub fn new(options: Options, test: Option<Test>) -> Self {
        let card = if test.is_some() { Card::of_tests(8, 0, 4) } else { options.card.clone() };
        let memory = if test.is_some() { Memory::of_this_process(&card) } else { Memory::of_the_emulator(&card) };
        let timeline = options.timeline();
        Self {
            card,
            cards: 1,
            options,
            initialized: false,
            test,
            clock: 0,
            next_handle: FIRST_HANDLE,
            contexts: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            queue: Queue::new(),
            graphs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            pools: BTreeMap::new(),
            memory,
            lost: None,
            launches: 0,
            timeline,
            reports: None,
            last_launch: None,
        }
    }

    /// Sets an option for later launches.
    ///
    /// # Errors
    /// The text of the error. The option keeps its value.
    pub fn set_option(&mut self, name: &str, value: &str) -> Result<(), String> {
        if name == "GPU" && self.initialized {
            return Err("the GPU cannot change after cuInit; set it before the first call".to_owned());
        }
        self.options.set(name, value)?;
        match name {
            "GPU" => {
                self.card = self.options.card.clone();
                self.memory = Memory::of_the_emulator(&self.card);
            }
            "TIMED" | "CONSTANTS" | "NO_VALUES" => self.timeline = self.options.timeline(),
            _ => {}
        }
        Ok(())
    }

    /// Returns an unused handle.
    pub fn handle(&mut self) -> Handle {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub fn add_graph(&mut self, graph: Graph) -> Handle {
        let handle = self.handle();
        self.graphs.insert(handle, graph);
        handle
    }

    /// Number of objects that are created and not yet destroyed.
    pub fn live_objects(&self) -> usize {
        self.contexts.values().map(|context| context.users).sum::<usize>()
            + self.modules.len()
            + self.queue.live_objects()
            + self.graphs.len()
            + self.memory.live_objects()
    }
}
