//! Work of a stream: copies, fills, launches, graphs, host functions.

use std::ffi::c_void;
use std::sync::Arc;

use crate::code::{Code, INVALID_VALUE};
use crate::handle::Handle;
use crate::image::Code as ModuleCode;
use crate::memory::Memory;

/// An item of work.
#[derive(Clone)]
pub enum Work {
    Copy(Arc<Copy>),
    Fill(Arc<Fill>),
    Launch(Arc<Launch>),
    Graph(Arc<Vec<Operation>>),
    Host(HostFunction),
    /// Memory to free, in stream order.
    Free(u64),
    /// An event to pass.
    Pass(Handle),
    /// No work: it is a place in the order.
    Join,
}

/// Number of an operation in the queue or in a capture.
pub type Index = usize;

/// Work, and the operations that must precede it. The operations run in the order of `after`, which is the order that a
/// program expects least.
#[derive(Clone)]
pub struct Operation {
    pub work: Work,
    pub after: Vec<Index>,
}

/// A function of the program to call in stream order. Addresses are numbers, because work may move between threads.
#[derive(Clone, Copy)]
pub struct HostFunction {
    /// Address of the function.
    pub function: usize,
    /// Argument of the function.
    pub data: usize,
    /// Stream of a `CUstreamCallback`, which takes stream, status and data. `None`: a `CUhostFn`, which takes the data.
    pub callback_of: Option<Handle>,
}

impl HostFunction {
    pub fn call(self) {
        let data = self.data as *mut c_void;
        // SAFETY: the program passed the address of a function of this type, together with its data.
        unsafe {
            match self.callback_of {
                None => std::mem::transmute::<usize, extern "C" fn(*mut c_void)>(self.function)(data),
                Some(stream) => std::mem::transmute::<usize, extern "C" fn(Handle, Code, *mut c_void)>(self.function)(
                    stream,
                    crate::code::SUCCESS,
                    data,
                ),
            }
        }
    }
}

/// One end of a copy.
#[derive(Clone)]
pub enum End {
    Device(u64),
    /// Pageable host memory, or host memory that has not been checked.
    Host(usize),
    /// Page-locked memory, whose size the driver knows.
    Locked(usize),
    /// Contents of host memory at the time of the call, without gaps between rows.
    Taken(Vec<u8>),
}

/// A copy of rows. A plain copy has one row.
#[derive(Clone)]
pub struct Copy {
    pub to: End,
    pub from: End,
    /// Bytes per row, rows per plane, number of planes.
    pub extent: [usize; 3],
    /// Distance in bytes between rows, and between planes.
    pub to_pitch: [usize; 2],
    pub from_pitch: [usize; 2],
}

impl Copy {
    pub fn plain(to: End, from: End, bytes: usize) -> Self {
        Self { to, from, extent: [bytes, 1, 1], to_pitch: [bytes; 2], from_pitch: [bytes; 2] }
    }

    fn offsets(&self, pitch: [usize; 2]) -> impl Iterator<Item = usize> + use<> {
        let [_, rows, planes] = self.extent;
        (0..planes).flat_map(move |plane| (0..rows).map(move |row| plane * pitch[1] + row * pitch[0]))
    }

    /// Fails if an end is null, leaves its allocation or has overlapping rows. Separates page-locked memory from
    /// pageable.
    pub fn check(&mut self, memory: &Memory) -> Result<(), Code> {
        let [width, rows, planes] = self.extent;
        if self.extent.contains(&0) {
            return Ok(());
        }
        for (end, pitch) in [(&mut self.to, self.to_pitch), (&mut self.from, self.from_pitch)] {
            let overlap = (rows > 1 && pitch[0] < width) || (planes > 1 && pitch[1] / rows < width);
            let last = (planes - 1).checked_mul(pitch[1]).zip((rows - 1).checked_mul(pitch[0]));
            let span = last.and_then(|(planes, rows)| planes.checked_add(rows)?.checked_add(width));
            let span = span.filter(|_| !overlap).ok_or(INVALID_VALUE)?;
            match end {
                End::Device(address) => memory.within(*address, span)?,
                End::Host(0) => return Err(INVALID_VALUE),
                End::Host(address) if memory.locked(*address).is_some() => {
                    memory.within_locked(*address, span)?;
                    *end = End::Locked(*address);
                }
                End::Host(_) | End::Locked(_) | End::Taken(_) => {}
            }
        }
        Ok(())
    }

    /// Copies the host's bytes now, because a driver has copied pageable memory when the call returns (CUDA driver API,
    /// "API synchronization behavior").
    pub fn take_pageable(&mut self) {
        let End::Host(from) = self.from else { return };
        if self.extent.contains(&0) {
            return;
        }
        let [width, rows, planes] = self.extent;
        let mut bytes = Vec::with_capacity(width * rows * planes);
        for offset in self.offsets(self.from_pitch) {
            // SAFETY: the program guarantees that `width` bytes are readable here, and waits until they are read.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts((from + offset) as *const u8, width) });
        }
        self.from = End::Taken(bytes);
        self.from_pitch = [width, width * rows];
    }

    /// Whether the copy ends in pageable host memory. If so, the copy is complete when the call returns.
    pub fn to_pageable(&self) -> bool {
        matches!(self.to, End::Host(_))
    }

    /// Copies. If page-locked memory was freed after the copy was put into a graph, nothing is copied.
    pub fn run(&self, memory: &mut Memory) {
        let width = self.extent[0];
        // An empty copy is not checked.
        if self.extent.contains(&0) {
            return;
        }
        let gone =
            |end: &End, offset| matches!(end, End::Locked(at) if memory.within_locked(at + offset, width).is_err());
        if self.offsets(self.to_pitch).any(|to| gone(&self.to, to))
            || self.offsets(self.from_pitch).any(|from| gone(&self.from, from))
        {
            return;
        }
        for (to, from) in self.offsets(self.to_pitch).zip(self.offsets(self.from_pitch)) {
            let taken;
            let row: &[u8] = match &self.from {
                End::Device(address) => {
                    let mut row = vec![0; width];
                    memory.read(address + from as u64, &mut row);
                    taken = row;
                    &taken
                }
                // SAFETY: the program guarantees that the memory is readable until the copy is done, or the driver has
                // it page-locked.
                End::Host(base) | End::Locked(base) => unsafe {
                    std::slice::from_raw_parts((base + from) as *const u8, width)
                },
                End::Taken(bytes) => &bytes[from..from + width],
            };
            match &self.to {
                End::Device(address) => memory.write(address + to as u64, row),
                // SAFETY: the program guarantees that the memory is writable until the copy is done, or the driver has
                // it page-locked. `row` has `width` bytes. Source and destination may overlap, which `copy` allows.
                End::Host(base) | End::Locked(base) => unsafe {
                    std::ptr::copy(row.as_ptr(), (base + to) as *mut u8, width)
                },
                End::Taken(_) => {}
            }
        }
    }
}

/// Memory to fill with a value of 1, 2 or 4 bytes.
#[derive(Clone)]
pub struct Fill {
    pub to: End,
    pub value: Vec<u8>,
    /// Values per row.
    pub width: usize,
    pub rows: usize,
    /// Distance between rows in bytes.
    pub pitch: usize,
}

impl Fill {
    fn copy(&self) -> Copy {
        let bytes = self.width * self.value.len();
        let row = self.value.repeat(self.width);
        Copy {
            to: self.to.clone(),
            from: End::Taken(row),
            extent: [bytes, self.rows, 1],
            to_pitch: [self.pitch, self.pitch * self.rows],
            from_pitch: [0, 0],
        }
    }

    pub fn check(&mut self, memory: &Memory) -> Result<(), Code> {
        let bytes = self.width.checked_mul(self.value.len()).ok_or(INVALID_VALUE)?;
        let aligned = |address: u64| address.is_multiple_of(self.value.len() as u64);
        if self.width == 0 || self.rows == 0 {
            return Ok(());
        }
        let span = self.pitch.checked_mul(self.rows - 1).and_then(|before| before.checked_add(bytes));
        match &self.to {
            End::Device(address) if aligned(*address) && (self.rows == 1 || self.pitch >= bytes) => {
                memory.within(*address, span.ok_or(INVALID_VALUE)?)
            }
            End::Host(address) if aligned(*address as u64) => {
                // The GPU can fill only page-locked host memory.
                memory.within_locked(*address, span.ok_or(INVALID_VALUE)?)?;
                self.to = End::Locked(*address);
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }

    pub fn run(&self, memory: &mut Memory) {
        self.copy().run(memory);
    }
}

/// A kernel with its parameters at the time of the call.
#[derive(Clone)]
pub struct Launch {
    pub code: Arc<ModuleCode>,
    pub name: String,
    /// Sizes of grid, block and cluster.
    pub size: [[u32; 3]; 3],
    pub shared_bytes: u32,
    pub parameters: Vec<Vec<u8>>,
    pub stream: Handle,
    /// The grid may begin before the previous grid of its stream has ended.
    pub overlaps: bool,
    /// All CTAs run at the same time and may wait for each other.
    pub cooperative: bool,
}
