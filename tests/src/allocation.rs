//! An allocator that counts, for tests that promise to use little memory. It is one for the whole test binary:
//! `#[global_allocator] static ALLOCATOR: Counting = Counting;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static CASE: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counted.
pub struct Counting;

// SAFETY: every call goes to the system's allocator with the arguments that came; null says that there is no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        if live > LIMIT.load(Ordering::Relaxed) && !std::thread::panicking() {
            // Writing to stderr does not allocate.
            let _ = writeln!(std::io::stderr(), "case {}: {live} bytes", CASE.load(Ordering::Relaxed));
            return std::ptr::null_mut();
        }
        // SAFETY: `GlobalAlloc` asks the caller for a valid `layout`, and the system's allocator asks for the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `alloc` above, so from the system, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allows at most so many bytes to be allocated at a time. An allocation beyond that finds no memory, and the process aborts.
pub fn limit(bytes: usize) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// The number in the message about memory beyond the limit.
pub fn set_case(case: u64) {
    CASE.store(case, Ordering::Relaxed);
}

/// Runs `work`; returns the most bytes that were allocated meanwhile beyond those before.
pub fn peak(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}
