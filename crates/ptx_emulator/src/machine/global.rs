//! Global memory: allocations with bounds, each at its own device address. Allocations are far apart, so that a pointer
//! past the end of one does not reach the next. CTAs on different threads share global memory, so it consists of
//! relaxed atomics.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::earlier::{Earlier, Touched};
use super::undefined::UndefinedBytes;

/// Alignment of allocations in bytes, as in the driver.
pub const ALIGN: u64 = 256;
/// Unmapped bytes between allocations.
const GUARD: u64 = 1 << 20;
/// First device address.
const FIRST: u64 = 0x1_0000_0000;

/// An allocation of global memory.
#[derive(Debug)]
pub struct Allocation {
    /// Index among the allocations of this launch. Counters use the same index.
    pub index: usize,
    base: u64,
    len: u64,
    words: Box<[AtomicU32]>,
    /// Bytes that the launch accessed.
    touched: Touched,
    /// Bytes that are undefined until something writes them. `None`: all bytes are defined.
    undefined: Option<UndefinedBytes>,
    /// Name of the variable or buffer, for reports.
    pub name: Option<String>,
    /// `true` for a `.const` variable.
    pub constant: bool,
}

impl Allocation {
    /// Address of the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Reads bytes for a kernel. The range must lie inside the allocation.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        self.copy_out(offset, out);
        self.note_read(offset, out.len() as u64);
    }

    /// Records that a kernel has read these bytes.
    pub fn note_read(&self, offset: u64, bytes: u64) {
        self.touched.read.add(offset, bytes);
    }

    /// Records that a kernel has written these bytes.
    pub fn note_written(&self, offset: u64, bytes: u64) {
        self.touched.written.add(offset, bytes);
        self.define(offset, bytes);
    }

    /// Records that these bytes are defined.
    pub fn define(&self, offset: u64, bytes: u64) {
        if let Some(undefined) = &self.undefined {
            undefined.define(offset, bytes);
        }
    }

    /// `true` if a byte may be undefined.
    pub fn may_be_undefined(&self) -> bool {
        self.undefined.is_some()
    }

    /// Mask of the undefined bytes among up to 64 bytes.
    pub fn undefined_bytes(&self, offset: u64, bytes: u32) -> u64 {
        self.undefined.as_ref().map_or(0, |undefined| undefined.mask(offset, bytes))
    }

    /// Value of 1, 2, 4 or 8 bytes at a multiple of its length. The value must lie inside the allocation.
    #[inline(always)]
    pub fn value(&self, offset: u64, bytes: usize) -> u64 {
        let word = |at: usize| u64::from(self.words[at].load(Relaxed));
        let at = offset as usize / 4;
        match bytes {
            4 => word(at),
            8 => word(at) | word(at + 1) << 32,
            _ => word(at) >> (offset % 4 * 8) & ((1 << (bytes * 8)) - 1),
        }
    }

    /// Writes bytes for a kernel. The range must lie inside the allocation.
    pub fn write(&self, offset: u64, data: &[u8]) {
        self.copy_in(offset, data);
        self.note_written(offset, data.len() as u64);
    }

    /// Records a strong access of a kernel to these bytes.
    pub fn strong(&self, offset: u64, len: u64) {
        self.touched.strong.add(offset, len);
    }

    /// Copies bytes out. The range must lie inside the allocation.
    pub fn copy_out(&self, offset: u64, out: &mut [u8]) {
        let mut at = offset as usize;
        let mut rest = out;
        while !rest.is_empty() {
            let skip = at % 4;
            let n = rest.len().min(4 - skip);
            let word = self.words[at / 4].load(Relaxed).to_le_bytes();
            let (now, later) = rest.split_at_mut(n);
            now.copy_from_slice(&word[skip..skip + n]);
            at += n;
            rest = later;
        }
    }

    /// Copies bytes in. The range must lie inside the allocation.
    pub fn copy_in(&self, offset: u64, data: &[u8]) {
        let mut at = offset as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let skip = at % 4;
            let n = rest.len().min(4 - skip);
            let word = &self.words[at / 4];
            let (now, later) = rest.split_at(n);
            if let Ok(whole) = <[u8; 4]>::try_from(now) {
                word.store(u32::from_le_bytes(whole), Relaxed);
            } else {
                let mut bytes = [0; 4];
                bytes[skip..skip + n].copy_from_slice(now);
                let mut mask = [0; 4];
                mask[skip..skip + n].fill(0xff);
                let (bits, mask) = (u32::from_le_bytes(bytes), u32::from_le_bytes(mask));
                // The closure always returns `Some`, so this cannot fail.
                let _ = word.fetch_update(Relaxed, Relaxed, |old| Some(old & !mask | bits));
            }
            at += n;
            rest = later;
        }
    }

    /// Distinct bytes read and written since the launch began, in whole sectors.
    pub fn distinct_bytes(&self) -> (u64, u64) {
        (self.touched.read.sector_bytes(), self.touched.written.sector_bytes())
    }
}

/// All allocations of a device.
#[derive(Debug)]
pub struct GlobalMemory {
    /// Allocations by ascending address.
    allocations: Vec<Allocation>,
    next: u64,
    /// Earlier grids that may still run.
    pub earlier: Earlier,
}

impl Default for GlobalMemory {
    fn default() -> Self {
        GlobalMemory { allocations: Vec::new(), next: FIRST, earlier: Earlier::default() }
    }
}

/// Contents of all allocations.
#[derive(PartialEq, Eq)]
pub struct Saved(Vec<(Vec<u32>, Option<Vec<u64>>)>);

impl Saved {
    /// A hash of the contents.
    pub fn digest(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.0.iter().for_each(|(words, _)| std::hash::Hash::hash(words, &mut hasher));
        std::hash::Hasher::finish(&hasher)
    }
}

impl GlobalMemory {
    /// Copies the contents of all allocations.
    pub fn save(&self) -> Saved {
        let words = |a: &Allocation| a.words.iter().map(|word| word.load(Relaxed)).collect();
        Saved(self.allocations.iter().map(|a| (words(a), a.undefined.as_ref().map(UndefinedBytes::save))).collect())
    }

    /// Restores saved contents. The allocations must be the same as when the contents were saved.
    pub fn restore(&self, saved: &Saved) {
        for (allocation, (words, undefined)) in self.allocations.iter().zip(&saved.0) {
            allocation.words.iter().zip(words).for_each(|(word, &saved)| word.store(saved, Relaxed));
            if let (Some(bytes), Some(saved)) = (&allocation.undefined, undefined) {
                bytes.restore(saved);
            }
        }
    }

    /// Allocates zeroed memory and returns its address.
    pub fn allocate(&mut self, len: u64, name: Option<String>, constant: bool) -> u64 {
        let base = self.next;
        self.next = (base + len + GUARD).next_multiple_of(ALIGN);
        let words = bytemuck::zeroed_slice_box(len.div_ceil(4) as usize);
        let touched = Touched::nothing(len);
        let at = self.allocations.partition_point(|a| a.base < base);
        self.allocations
            .insert(at, Allocation { index: 0, base, len, words, touched, undefined: None, name, constant });
        base
    }

    /// Allocates zeroed memory at an address. Returns `false` if the range is not aligned to words or overlaps an
    /// allocation.
    pub fn allocate_at(&mut self, base: u64, len: u64) -> bool {
        let at = self.allocations.partition_point(|a| a.base < base);
        let before = at.checked_sub(1).and_then(|at| self.allocations.get(at));
        let free = before.is_none_or(|a| a.base + a.len <= base)
            && self.allocations.get(at).is_none_or(|a| base.checked_add(len).is_some_and(|end| end <= a.base));
        let fits = free && base.is_multiple_of(4) && base.checked_add(len).is_some();
        if fits {
            let words = bytemuck::zeroed_slice_box(len.div_ceil(4) as usize);
            let touched = Touched::nothing(len);
            self.allocations.insert(
                at,
                Allocation { index: 0, base, len, words, touched, undefined: None, name: None, constant: false },
            );
        }
        fits
    }

    /// Frees an allocation. Its addresses stay unmapped.
    ///
    /// # Panics
    /// If no allocation begins at `base`.
    pub fn free(&mut self, base: u64) {
        let at = self.find(base);
        self.allocations.remove(at);
    }

    /// Names an allocation.
    ///
    /// # Panics
    /// If no allocation begins at `base`.
    pub fn name(&mut self, base: u64, name: &str) {
        let at = self.find(base);
        self.allocations[at].name = Some(name.to_owned());
    }

    /// Marks bytes as undefined. Returns `false` if they do not lie in an allocation.
    pub fn undefine(&mut self, address: u64, len: u64) -> bool {
        let Some(at) = self.allocations.partition_point(|a| a.base <= address).checked_sub(1) else { return false };
        let allocation = &mut self.allocations[at];
        let offset = address - allocation.base;
        let inside = offset <= allocation.len && len <= allocation.len - offset;
        if inside {
            allocation.undefined.get_or_insert_with(|| UndefinedBytes::none(allocation.len)).undefine(offset, len);
        }
        inside
    }

    fn find(&self, base: u64) -> usize {
        self.allocations.binary_search_by_key(&base, |a| a.base).expect("the address of an allocation")
    }

    /// Returns the allocation that holds `len` bytes at `address`, and the offset in it.
    pub fn locate(&self, address: u64, len: u64) -> Option<(&Allocation, u64)> {
        let (allocation, offset) = self.nearest(address)?;
        let inside = offset <= allocation.len && len <= allocation.len - offset;
        inside.then_some((allocation, offset))
    }

    /// Returns the last allocation that begins at or before `address`.
    pub fn nearest(&self, address: u64) -> Option<(&Allocation, u64)> {
        let after = self.allocations.partition_point(|a| a.base <= address);
        let allocation = self.allocations.get(after.checked_sub(1)?)?;
        Some((allocation, address - allocation.base))
    }

    /// Description of an address.
    pub fn describe(&self, address: u64) -> String {
        match self.nearest(address) {
            Some((a, offset)) if offset < a.len + GUARD => {
                let name = a.name.as_deref().unwrap_or("an allocation");
                format!("byte {offset} of {name} of {} bytes", a.len)
            }
            _ => format!("address {address:#x}, not near any allocation"),
        }
    }

    /// Begins a launch of a kernel: numbers the allocations and clears the last launch's accesses, unless that launch
    /// may still run.
    pub fn begin_launch(&mut self, kernel: &str, overlaps: bool) {
        self.allocations.iter_mut().enumerate().for_each(|(index, a)| a.index = index);
        let touched = self.allocations.iter_mut().map(|a| (a.base, &mut a.touched));
        self.earlier.begin(kernel, overlaps, touched);
    }

    /// All allocations by ascending address.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_ranges_read_back_within_bounds() {
        let mut memory = GlobalMemory::default();
        let base = memory.allocate(10, None, false);
        let (a, offset) = memory.locate(base + 3, 6).unwrap();
        a.write(offset, &[1, 2, 3, 4, 5, 6]);
        let mut out = [9; 10];
        a.read(0, &mut out);
        assert_eq!(out, [0, 0, 0, 1, 2, 3, 4, 5, 6, 0]);
        assert!(memory.locate(base + 3, 8).is_none());
        assert!(memory.locate(base - 1, 1).is_none());
        assert_eq!(a.distinct_bytes(), (32, 32));
    }

    #[test]
    fn freed_addresses_stay_unmapped() {
        let mut memory = GlobalMemory::default();
        let [first, second] = [10, 20].map(|len| memory.allocate(len, None, false));
        memory.free(first);
        assert!(memory.locate(first, 1).is_none());
        assert!(memory.locate(second, 20).is_some());
        assert!(memory.allocate(10, None, false) > second);
    }

    #[test]
    fn allocation_at_a_free_address_succeeds() {
        let mut memory = GlobalMemory::default();
        let first = memory.allocate(10, None, false);
        let host = 0x7f00_0000_0000;
        assert!(memory.allocate_at(host, 64) && memory.allocate_at(host - 64, 64));
        assert!(
            !memory.allocate_at(host + 60, 8) && !memory.allocate_at(host - 4, 8) && !memory.allocate_at(host + 65, 1)
        );
        let second = memory.allocate(10, None, false);
        assert!(second > first && second < host);
        assert_eq!(memory.locate(host + 60, 4).unwrap().1, 60);
        assert!(memory.locate(second, 10).is_some() && memory.locate(host + 60, 8).is_none());
    }
}
