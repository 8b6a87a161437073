//! An allocator that counts bytes, for tests that promise to use little memory. It serves the whole test binary:
//! `#[global_allocator] static ALLOCATOR: Counting = Counting;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static CASE: AtomicU64 = AtomicU64::new(0);

/// The system's allocator with counters of live bytes and of their peak.
pub struct Counting;

// SAFETY: every call goes to the system's allocator with unchanged arguments; a null pointer reports that memory ran
// out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        if live > LIMIT.load(Ordering::Relaxed) && !std::thread::panicking() {
            // Writing to stderr does not allocate.
            let _ = writeln!(std::io::stderr(), "case {}: {live} bytes", CASE.load(Ordering::Relaxed));
            return std::ptr::null_mut();
        }
        // SAFETY: the caller guarantees a valid `layout`, which is all that the system's allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `alloc` above, which got it from the system's allocator with the same layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allows at most `bytes` bytes to be live at a time. A larger allocation gets a null pointer, and the process aborts.
pub fn limit(bytes: usize) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// Sets the case number that the message about exceeded memory prints.
pub fn set_case(case: u64) {
    CASE.store(case, Ordering::Relaxed);
}

/// Runs `work`; returns the peak of bytes allocated during the run, less the bytes that were live before it.
pub fn peak(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}
