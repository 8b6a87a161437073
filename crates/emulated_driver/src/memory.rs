//! The card's memory, page-locked host memory, and who allocated what.
//!
//! A program's device memory is the emulator's: its addresses are nobody's in this process, and a kernel that leaves an
//! allocation faults. In tests it is this process's own, since a test's kernel is a function that follows pointers.

use std::collections::BTreeMap;
use std::ops::Range;

use ptx_emulator::{Buffer, Device, DeviceConfig};

use crate::card::{Card, attribute};
use crate::code::{Code, INVALID_VALUE, OUT_OF_MEMORY};

/// What a device promises for a base address (CUDA programming guide, "Device memory accesses").
const ALIGNMENT: usize = 256;
/// A test's fresh memory holds no zeros to rely on.
const FRESH: u8 = 0xCD;

/// An allocation of device memory.
struct Allocation {
    bytes: usize,
    /// A module's variable: it goes with its module, not by `cuMemFree`.
    variable: bool,
}

/// Where device memory is.
enum Place {
    /// Words by base address.
    Process(BTreeMap<u64, Box<[u128]>>),
    Emulator(Box<Device>),
}

/// Page-locked memory of the host.
pub struct Locked {
    pub bytes: usize,
    /// What was asked for with it (`CU_MEMHOSTALLOC_…`).
    pub flags: u32,
    /// The memory, where it is the driver's and not registered by the program.
    owned: Option<Box<[u128]>>,
    /// Whether kernels can reach it: it is mapped in the emulator.
    mapped: bool,
}

pub struct Memory {
    place: Place,
    allocations: BTreeMap<u64, Allocation>,
    locked: BTreeMap<usize, Locked>,
    used: usize,
    total: usize,
    /// How many allocations there have been: a fault names them by number.
    count: u64,
    /// The emulator's addresses so far, from the first allocation to the last.
    reach: Range<u64>,
}

impl Memory {
    fn new(place: Place, total: usize) -> Self {
        Self { place, allocations: BTreeMap::new(), locked: BTreeMap::new(), used: 0, total, count: 0, reach: 0..0 }
    }

    pub fn of_this_process(card: &Card) -> Self {
        Self::new(Place::Process(BTreeMap::new()), card.memory)
    }

    pub fn of_the_emulator(card: &Card) -> Self {
        let sms = card.count(attribute::MULTIPROCESSORS) as u32;
        Self::new(Place::Emulator(Box::new(Device::new(DeviceConfig { sms }))), card.memory)
    }

    /// The emulator, where it holds this memory.
    pub fn emulator(&mut self) -> Option<&mut Device> {
        match &mut self.place {
            Place::Emulator(device) => Some(device),
            Place::Process(_) => None,
        }
    }

    /// Bytes that are free, and all.
    pub fn free_and_total(&self) -> (usize, usize) {
        (self.total - self.used, self.total)
    }

    pub fn live_objects(&self) -> usize {
        self.allocations.values().filter(|allocation| !allocation.variable).count() + self.locked.len()
    }

    pub fn allocate(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if bytes > self.total - self.used {
            return Err(OUT_OF_MEMORY);
        }
        let address = match &mut self.place {
            Place::Process(memory) => {
                let (base, words) = aligned(bytes).ok_or(OUT_OF_MEMORY)?;
                memory.insert(base as u64, words);
                base as u64
            }
            Place::Emulator(device) => {
                let buffer = device.allocate(bytes as u64);
                self.count += 1;
                device.name(buffer, &format!("allocation {}", self.count));
                let first = if self.reach.is_empty() { buffer.address } else { self.reach.start };
                self.reach = first..buffer.address + buffer.bytes;
                buffer.address
            }
        };
        self.used += bytes;
        self.allocations.insert(address, Allocation { bytes, variable: false });
        Ok(address)
    }

    /// Frees what begins at `address`.
    pub fn free(&mut self, address: u64) -> Result<(), Code> {
        let allocation =
            self.allocations.get(&address).filter(|allocation| !allocation.variable).ok_or(INVALID_VALUE)?;
        let bytes = allocation.bytes;
        self.allocations.remove(&address);
        self.used -= bytes;
        match &mut self.place {
            Place::Process(memory) => drop(memory.remove(&address)),
            Place::Emulator(device) => device.free(Buffer { address, bytes: bytes as u64 }),
        }
        Ok(())
    }

    /// Frees whatever a program has allocated.
    pub fn free_all(&mut self) {
        let all: Vec<u64> = self.allocations.keys().copied().collect();
        for address in all {
            // Variables stay with their modules.
            let _ = self.free(address);
        }
    }

    /// A module's variable has come to lie in the emulator's memory.
    pub fn add_variable(&mut self, buffer: Buffer) {
        self.allocations.insert(buffer.address, Allocation { bytes: buffer.bytes as usize, variable: true });
    }

    /// Base address and length of the allocation that holds an address.
    pub fn allocation_of(&self, address: u64) -> Option<(u64, usize)> {
        let (&base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.bytes as u64).then_some((base, allocation.bytes))
    }

    /// Succeeds where `bytes` from `address` lie within one allocation of the device's.
    pub fn within(&self, address: u64, bytes: usize) -> Result<(), Code> {
        let (&base, allocation) = self.allocations.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let end = base + allocation.bytes as u64;
        if address.checked_add(bytes as u64).is_some_and(|last| last <= end) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Whether an address was an allocation's that has been freed: such a one is nobody's on the host either.
    pub fn was_device(&self, address: u64) -> bool {
        self.reach.contains(&address)
    }

    /// Bytes of the device's, which lie within an allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) {
        if self.within(address, out.len()).is_err() {
            return;
        }
        match &self.place {
            // SAFETY: the bytes lie within an allocation of this process, as was just checked.
            Place::Process(_) => unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len());
            },
            Place::Emulator(device) => {
                out.copy_from_slice(&device.download::<u8>(Buffer { address, bytes: out.len() as u64 }));
            }
        }
    }

    /// Writes bytes of the device's; nothing where they no longer lie within an allocation.
    pub fn write(&mut self, address: u64, data: &[u8]) {
        if self.within(address, data.len()).is_err() {
            return;
        }
        match &mut self.place {
            // SAFETY: the bytes lie within an allocation of this process, as was just checked.
            Place::Process(_) => unsafe {
                std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len());
            },
            Place::Emulator(device) => device.write(Buffer { address, bytes: data.len() as u64 }, 0, data),
        }
    }

    // ---- Page-locked memory ----

    /// Page-locked memory of the driver's.
    pub fn allocate_locked(&mut self, bytes: usize, flags: u32) -> Result<usize, Code> {
        let (base, words) = aligned(bytes).ok_or(OUT_OF_MEMORY)?;
        let mapped = self.map(base, bytes);
        self.locked.insert(base, Locked { bytes, flags, owned: Some(words), mapped });
        Ok(base)
    }

    /// Registers a program's own memory; `false` where part of it already is.
    pub fn register(&mut self, base: usize, bytes: usize, flags: u32) -> bool {
        let end = base.saturating_add(bytes);
        if self.locked.range(..end).next_back().is_some_and(|(other, locked)| other + locked.bytes > base) {
            return false;
        }
        let mapped = self.map(base, bytes);
        self.locked.insert(base, Locked { bytes, flags, owned: None, mapped });
        true
    }

    /// Lets kernels reach host memory at its own address.
    fn map(&mut self, base: usize, bytes: usize) -> bool {
        match &mut self.place {
            Place::Process(_) => false,
            Place::Emulator(device) => {
                let buffer = device.allocate_at(base as u64, bytes as u64);
                let name = |buffer| device.name(buffer, "page-locked host memory");
                buffer.map(name).is_some()
            }
        }
    }

    /// Takes page-locked memory away that begins at `base` and is the driver's own or a registered one.
    pub fn remove_locked(&mut self, base: usize, owned: bool) -> Result<(), Code> {
        let locked = self.locked.get(&base).filter(|locked| locked.owned.is_some() == owned).ok_or(INVALID_VALUE)?;
        if let (true, bytes, Place::Emulator(device)) = (locked.mapped, locked.bytes as u64, &mut self.place) {
            device.free(Buffer { address: base as u64, bytes });
        }
        self.locked.remove(&base);
        Ok(())
    }

    /// The page-locked memory that an address lies in, and its base.
    pub fn locked(&self, address: usize) -> Option<(usize, &Locked)> {
        let (&base, locked) = self.locked.range(..=address).next_back()?;
        (address - base < locked.bytes.max(1)).then_some((base, locked))
    }

    /// Fails unless the bytes lie within one piece of page-locked memory.
    pub fn within_locked(&self, address: usize, bytes: usize) -> Result<(), Code> {
        let (base, locked) = self.locked(address).ok_or(INVALID_VALUE)?;
        if bytes <= locked.bytes.saturating_sub(address - base) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Shows kernels what the host's page-locked memory holds; the bytes, to compare with afterwards.
    pub fn show_locked(&mut self) -> Vec<(usize, Vec<u8>)> {
        let Place::Emulator(device) = &mut self.place else { return Vec::new() };
        let mapped = self.locked.iter().filter(|(_, locked)| locked.mapped);
        let copy = mapped.map(|(&base, locked)| {
            // SAFETY: the driver's own memory, or a program's that it has registered and must keep until it unregisters it.
            let bytes = unsafe { std::slice::from_raw_parts(base as *const u8, locked.bytes) }.to_vec();
            device.write(Buffer { address: base as u64, bytes: bytes.len() as u64 }, 0, &bytes);
            (base, bytes)
        });
        copy.collect()
    }

    /// Brings what a kernel has changed of page-locked memory to the host, and nothing else.
    pub fn fetch_locked(&mut self, before: Vec<(usize, Vec<u8>)>) {
        let Place::Emulator(device) = &mut self.place else { return };
        for (base, before) in before {
            let after = device.download::<u8>(Buffer { address: base as u64, bytes: before.len() as u64 });
            for (at, (new, old)) in after.iter().zip(&before).enumerate() {
                if new != old {
                    // SAFETY: as in `show_locked`; the driver's lock has been held since.
                    unsafe { ((base + at) as *mut u8).write(*new) };
                }
            }
        }
    }
}

/// `bytes` of this process at a multiple of [`ALIGNMENT`]: the base address, and the memory to keep.
fn aligned(bytes: usize) -> Option<(usize, Box<[u128]>)> {
    // Over-aligned by hand: the address is aligned, the box is the memory behind it.
    let words = bytes.checked_add(ALIGNMENT)?.div_ceil(16);
    let mut memory = Vec::new();
    memory.try_reserve_exact(words).ok()?;
    memory.resize(words, u128::from_ne_bytes([FRESH; 16]));
    let base = (memory.as_ptr() as usize).next_multiple_of(ALIGNMENT);
    Some((base, memory.into_boxed_slice()))
}
