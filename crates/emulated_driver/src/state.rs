//! All that the driver knows, behind one lock.

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
    /// How many such cards there are.
    pub cards: i32,
    pub options: Options,
    pub initialized: bool,
    /// What a test asks of the driver; a program's has none.
    pub test: Option<Test>,
    /// Nanoseconds on the device's clock, which copies and launches advance. The time between two events tells what lies
    /// between them; how long a card would take, it tells of launches by a card's clock alone.
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
    /// Memory pools beside the default one.
    pub pools: BTreeMap<Handle, ()>,
    pub memory: Memory,
    /// Why the context can no longer be used: a kernel has faulted.
    pub lost: Option<Code>,
    /// How many launches have begun.
    pub launches: u64,
    /// The time of launches on a card, if it is to be predicted.
    pub timeline: Option<Timeline>,
    /// The grid that ran last, and its stream, if nothing has run since.
    pub last_launch: Option<Handle>,
}

static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::new(Options::from_environment(), None)));

/// The driver, locked.
pub fn driver() -> MutexGuard<'static, Driver> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver {
    /// The driver of a program, or of a test.
    pub fn new(options: Options, test: Option<Test>) -> Self {
        let card = if test.is_some() { Card::of_tests(8, 0, 4) } else { options.card.clone() };
        let memory = if test.is_some() { Memory::of_this_process(&card) } else { Memory::of_the_emulator(&card) };
        let timeline = options.clock.clone().map(Timeline::new);
        let timeline = if options.no_values { timeline.map(Timeline::without_values) } else { timeline };
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
            last_launch: None,
        }
    }

    /// A handle that nothing had before.
    pub fn handle(&mut self) -> Handle {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub fn add_graph(&mut self, graph: Graph) -> Handle {
        let handle = self.handle();
        self.graphs.insert(handle, graph);
        handle
    }

    /// What is created and not yet destroyed.
    pub fn live_objects(&self) -> usize {
        self.contexts.values().map(|context| context.users).sum::<usize>()
            + self.modules.len()
            + self.queue.live_objects()
            + self.graphs.len()
            + self.memory.live_objects()
    }
}
