//! The GPU's memory, page-locked host memory, and their allocations.
//!
//! Device memory of a program belongs to the emulator. Its addresses are invalid in this process, and a kernel that
//! leaves an allocation faults. Device memory of a test is process memory, because a test's kernel is a function that
//! dereferences pointers.

use std::collections::BTreeMap;
use std::ops::Range;

use ptx_emulator::{Buffer, Device, DeviceConfig};

use crate::card::{Card, attribute};
use crate::code::{Code, INVALID_VALUE, OUT_OF_MEMORY};

/// Guaranteed alignment of a base address (CUDA programming guide, "Device memory accesses").
const ALIGNMENT: usize = 256;
/// Bytes of page-locked memory that are compared at a time after a launch.
const CHUNK: usize = 4096;
/// Byte that fills a test's fresh memory, so that no test can rely on zeros.
const FRESH: u8 = 0xCD;

/// An allocation of device memory.
struct Allocation {
    bytes: usize,
    /// `true` for a variable of a module. It is freed with its module and not by `cuMemFree`.
    variable: bool,
}

/// Owner of the device memory.
enum Place {
    /// The process. Words by base address.
    Process(BTreeMap<u64, Box<[u128]>>),
    Emulator(Box<Device>),
}

/// Page-locked memory of the host.
pub struct Locked {
    pub bytes: usize,
    /// Flags of the allocation (`CU_MEMHOSTALLOC_…`).
    pub flags: u32,
    /// The memory, if the driver allocated it. `None`: the program registered its own memory.
    owned: Option<Box<[u128]>>,
    /// `true` if the memory is mapped in the emulator, so that kernels can access it.
    mapped: bool,
    /// Address and size of parts that are undefined until the next launch writes them.
    undefined: Vec<(u64, u64)>,
}

pub struct Memory {
    place: Place,
    allocations: BTreeMap<u64, Allocation>,
    locked: BTreeMap<usize, Locked>,
    used: usize,
    total: usize,
    /// Number of allocations so far. A fault names an allocation by its number.
    count: u64,
    /// Range of the emulator's addresses from the first allocation to the last.
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

    /// Returns the emulator if it owns this memory.
    pub fn emulator(&mut self) -> Option<&mut Device> {
        match &mut self.place {
            Place::Emulator(device) => Some(device),
            Place::Process(_) => None,
        }
    }

    /// Returns the number of free bytes and of all bytes.
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

    /// Frees the allocation that begins at `address`.
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

    /// Frees everything that the program has allocated.
    pub fn free_all(&mut self) {
        let all: Vec<u64> = self.allocations.keys().copied().collect();
        for address in all {
            // Freeing a variable fails; it stays with its module.
            let _ = self.free(address);
        }
    }

    /// Registers a module's variable in the emulator's memory.
    pub fn add_variable(&mut self, buffer: Buffer) {
        self.allocations.insert(buffer.address, Allocation { bytes: buffer.bytes as usize, variable: true });
    }

    /// Returns the base address and the size of the allocation that contains an address.
    pub fn allocation_of(&self, address: u64) -> Option<(u64, usize)> {
        let (&base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.bytes as u64).then_some((base, allocation.bytes))
    }

    /// Succeeds if `bytes` bytes from `address` lie within one device allocation.
    pub fn within(&self, address: u64, bytes: usize) -> Result<(), Code> {
        let (&base, allocation) = self.allocations.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let end = base + allocation.bytes as u64;
        if address.checked_add(bytes as u64).is_some_and(|last| last <= end) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Whether an address lies in the range of device allocations. It is then invalid on the host, even after
    /// the allocation is freed.
    pub fn was_device(&self, address: u64) -> bool {
        self.reach.contains(&address)
    }

    /// Reads device memory. Does nothing if the bytes do not lie within an allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) {
        if self.within(address, out.len()).is_err() {
            return;
        }
        match &self.place {
            // SAFETY: the check above shows that the bytes lie within an allocation of this process.
            Place::Process(_) => unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len());
            },
            Place::Emulator(device) => {
                out.copy_from_slice(&device.download::<u8>(Buffer { address, bytes: out.len() as u64 }));
            }
        }
    }

    /// Writes device memory. Does nothing if the bytes do not lie within an allocation.
    pub fn write(&mut self, address: u64, data: &[u8]) {
        if self.within(address, data.len()).is_err() {
            return;
        }
        match &mut self.place {
            // SAFETY: the check above shows that the bytes lie within an allocation of this process.
            Place::Process(_) => unsafe {
                std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len());
            },
            Place::Emulator(device) => device.write(Buffer { address, bytes: data.len() as u64 }, 0, data),
        }
    }

    // ---- Page-locked memory ----

    /// Allocates page-locked memory.
    pub fn allocate_locked(&mut self, bytes: usize, flags: u32) -> Result<usize, Code> {
        let (base, words) = aligned(bytes).ok_or(OUT_OF_MEMORY)?;
        let mapped = self.map(base, bytes);
        self.locked.insert(base, Locked { bytes, flags, owned: Some(words), mapped, undefined: Vec::new() });
        Ok(base)
    }

    /// Registers memory of the program. Returns `false` if a part of it is registered already.
    pub fn register(&mut self, base: usize, bytes: usize, flags: u32) -> bool {
        let end = base.saturating_add(bytes);
        if self.locked.range(..end).next_back().is_some_and(|(other, locked)| other + locked.bytes > base) {
            return false;
        }
        let mapped = self.map(base, bytes);
        self.locked.insert(base, Locked { bytes, flags, owned: None, mapped, undefined: Vec::new() });
        true
    }

    /// Names the allocation or the page-locked memory that begins at an address, for faults.
    pub fn name(&mut self, address: u64, name: &str) -> Result<(), Code> {
        let locked = self.locked.get(&(address as usize)).filter(|locked| locked.mapped).map(|locked| locked.bytes);
        let allocation = self.allocations.get(&address).map(|allocation| allocation.bytes);
        let bytes = locked.or(allocation).ok_or(INVALID_VALUE)? as u64;
        self.emulator().ok_or(INVALID_VALUE)?.name(Buffer { address, bytes }, name);
        Ok(())
    }

    /// Marks bytes as undefined until something writes them. The host may write page-locked memory at any time, so its
    /// mark lasts for one launch.
    pub fn undefine(&mut self, address: u64, bytes: u64) -> Result<(), Code> {
        if self.within_locked(address as usize, bytes as usize).is_ok() {
            let locked = self.locked.range_mut(..=address as usize).next_back();
            locked.into_iter().for_each(|(_, locked)| locked.undefined.push((address, bytes)));
            return Ok(());
        }
        self.within(address, bytes as usize)?;
        self.emulator().ok_or(INVALID_VALUE)?.undefine(Buffer { address, bytes }, 0, bytes);
        Ok(())
    }

    /// Makes host memory accessible to kernels at its own address.
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

    /// Removes the page-locked memory that begins at `base`. `owned`: it was allocated by the driver, not registered.
    pub fn remove_locked(&mut self, base: usize, owned: bool) -> Result<(), Code> {
        let locked = self.locked.get(&base).filter(|locked| locked.owned.is_some() == owned).ok_or(INVALID_VALUE)?;
        if let (true, bytes, Place::Emulator(device)) = (locked.mapped, locked.bytes as u64, &mut self.place) {
            device.free(Buffer { address: base as u64, bytes });
        }
        self.locked.remove(&base);
        Ok(())
    }

    /// Returns the page-locked memory that contains an address, and its base.
    pub fn locked(&self, address: usize) -> Option<(usize, &Locked)> {
        let (&base, locked) = self.locked.range(..=address).next_back()?;
        (address - base < locked.bytes.max(1)).then_some((base, locked))
    }

    /// Succeeds if the bytes lie within one piece of page-locked memory.
    pub fn within_locked(&self, address: usize, bytes: usize) -> Result<(), Code> {
        let (base, locked) = self.locked(address).ok_or(INVALID_VALUE)?;
        if bytes <= locked.bytes.saturating_sub(address - base) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Copies the contents of page-locked memory to the emulator, and returns them for a later comparison.
    pub fn show_locked(&mut self) -> Vec<(usize, Vec<u8>)> {
        let Place::Emulator(device) = &mut self.place else { return Vec::new() };
        let mapped = self.locked.iter_mut().filter(|(_, locked)| locked.mapped);
        let copy = mapped.map(|(&base, locked)| {
            // SAFETY: the memory belongs to the driver, or the program registered it and must keep it until it
            // unregisters it.
            let bytes = unsafe { std::slice::from_raw_parts(base as *const u8, locked.bytes) }.to_vec();
            device.write(Buffer { address: base as u64, bytes: bytes.len() as u64 }, 0, &bytes);
            for (address, bytes) in locked.undefined.drain(..) {
                device.undefine(Buffer { address, bytes }, 0, bytes);
            }
            (base, bytes)
        });
        copy.collect()
    }

    /// Copies the bytes of page-locked memory that a kernel has changed to the host, and no other bytes.
    pub fn fetch_locked(&mut self, before: Vec<(usize, Vec<u8>)>) {
        let Place::Emulator(device) = &mut self.place else { return };
        for (base, before) in before {
            let after = device.download::<u8>(Buffer { address: base as u64, bytes: before.len() as u64 });
            let chunks = after.chunks(CHUNK).zip(before.chunks(CHUNK)).enumerate();
            for (chunk, (after, before)) in chunks.filter(|(_, (after, before))| after != before) {
                let changed = after.iter().zip(before).enumerate().filter(|(_, (new, old))| new != old);
                for (at, (new, _)) in changed {
                    // SAFETY: the byte lies in page-locked memory that was alive when `show_locked` read it. Freeing or
                    // unregistering it needs the driver's lock, which has been held since then.
                    unsafe { ((base + chunk * CHUNK + at) as *mut u8).write(*new) };
                }
            }
        }
    }
}

/// Allocates `bytes` in this process at a multiple of [`ALIGNMENT`]. Returns the base address and the memory that holds
/// it.
fn aligned(bytes: usize) -> Option<(usize, Box<[u128]>)> {
    // The box has room to align the address by hand.
    let words = bytes.checked_add(ALIGNMENT)?.div_ceil(16);
    let mut memory = Vec::new();
    memory.try_reserve_exact(words).ok()?;
    memory.resize(words, u128::from_ne_bytes([FRESH; 16]));
    let base = (memory.as_ptr() as usize).next_multiple_of(ALIGNMENT);
    Some((base, memory.into_boxed_slice()))
}
