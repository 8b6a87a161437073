//! Cleanup when a signal ends the process, and survival when a mapped file is truncated.
//!
//! Signal handlers do this work, so they must not allocate. They read two lists: unfinished files, and maps. A list
//! changes only under a lock that no handler waits for on its own thread. A node is never freed but used again, so the
//! lists take as much memory as the most files that were open at a time.
//!
//! Nothing is installed until [`handle_signals`] is called: a library must not change a process unasked.

use std::path::Path;

/// Makes the process remove its unfinished files when a signal ends it, and survive truncation of mapped files.
///
/// - Every signal that ends a process by default is caught, unless it is ignored (as with `nohup`): unfinished files
///   and folders are removed, then the signal has its usual effect.
/// - A write beyond the file size limit becomes an error.
/// - A truncated page of a mapped model reads as zeros, and `TensorFile::check_unchanged` detects it.
///
/// For programs without signal handlers of their own.
#[cfg(unix)]
pub fn handle_signals() {
    unix::install();
}

/// Does nothing: only Unix has these signals.
#[cfg(not(unix))]
pub fn handle_signals() {}

/// Runs system calls that signal handling must not split: a signal takes effect before or after all of them.
///
/// `work` should not allocate: a failed allocation inside delays the end of the process by one second.
pub(crate) fn uninterrupted<T>(work: impl FnOnce(&Lock) -> T) -> T {
    work(&Lock::take())
}

#[cfg(unix)]
pub(crate) use unix::Lock;

/// Stands for the lock of Unix.
#[cfg(not(unix))]
pub(crate) struct Lock;

#[cfg(not(unix))]
impl Lock {
    fn take() -> Self {
        Self
    }
}

/// A file or folder that is removed if a signal ends the process during the lifetime of this value. Drop removes
/// nothing.
#[derive(Debug)]
pub(crate) struct Unfinished {
    #[cfg(unix)]
    _entry: Option<unix::Entry<unix::Path>>,
}

impl Unfinished {
    /// Registers a file under the lock under which it was created.
    pub(crate) fn file(path: &Path, lock: &Lock) -> Self {
        Self::new(path, false, lock)
    }

    /// Registers a folder in the same way. Files inside are registered later, and so are removed first.
    pub(crate) fn folder(path: &Path, lock: &Lock) -> Self {
        Self::new(path, true, lock)
    }

    #[cfg(unix)]
    fn new(path: &Path, is_folder: bool, lock: &Lock) -> Self {
        Self { _entry: unix::Path::register(path, is_folder, lock) }
    }

    #[cfg(not(unix))]
    fn new(_: &Path, _: bool, _: &Lock) -> Self {
        Self {}
    }
}

/// Mapped memory whose file may be truncated. Drop it before the map.
#[derive(Debug)]
pub(crate) struct Guarded(#[cfg(unix)] unix::Entry<unix::Map>);

impl Guarded {
    /// Registers a map.
    pub(crate) fn new(map: &[u8]) -> Self {
        #[cfg(unix)]
        return Self(unix::Map::register(map));
        #[cfg(not(unix))]
        {
            _ = map;
            Self()
        }
    }

    /// Whether a page could not be read and was replaced by zeros.
    pub(crate) fn is_broken(&self) -> bool {
        #[cfg(unix)]
        return self.0.is_broken();
        #[cfg(not(unix))]
        false
    }
}

#[cfg(unix)]
mod unix {
    use std::cell::UnsafeCell;
    use std::ffi::CString;
    use std::fmt;
    use std::ops::Deref;
    use std::os::unix::ffi::OsStrExt;
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

    use libc::{c_int, c_void, siginfo_t};

    /// Signals that end a process by default and leave it able to act. SIGSEGV and similar are missing because std's
    /// handler reports them; SIGPIPE is missing because std ignores it.
    const ENDING: [c_int; 11] = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        // A failed allocation raises SIGABRT.
        libc::SIGABRT,
        libc::SIGALRM,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGXCPU,
    ];

    /// A list of values that handlers read. Only a thread that holds the lock changes it or reads other values than its
    /// own.
    struct List<T>(AtomicPtr<Node<T>>);

    struct Node<T> {
        value: UnsafeCell<T>,
        /// Whether an entry has this node.
        taken: AtomicBool,
        next: *mut Node<T>,
    }

    /// A value in a list for the lifetime of the entry.
    pub(crate) struct Entry<T: 'static>(&'static Node<T>);

    // SAFETY: an entry gives shared access to its value. The thread that uses the node again drops the value.
    unsafe impl<T: Send + Sync> Send for Entry<T> {}
    // SAFETY: as above.
    unsafe impl<T: Send + Sync> Sync for Entry<T> {}

    impl<T: 'static> List<T> {
        const fn new() -> Self {
            Self(AtomicPtr::new(std::ptr::null_mut()))
        }

        /// Adds a value.
        fn add(&self, value: T, _: &Lock) -> Entry<T> {
            if let Some(node) = self.nodes().find(|node| !node.taken.load(Ordering::Acquire)) {
                // SAFETY: no entry has the node, and the lock keeps every other thread and its handlers from the value.
                _ = unsafe { node.value.get().replace(value) };
                node.taken.store(true, Ordering::Release);
                return Entry(node);
            }
            let next = self.0.load(Ordering::Acquire);
            let node = Box::new(Node { value: UnsafeCell::new(value), taken: AtomicBool::new(true), next });
            let node: &'static Node<T> = Box::leak(node);
            self.0.store(std::ptr::from_ref(node).cast_mut(), Ordering::Release);
            Entry(node)
        }

        /// Iterates over the values of all entries. It does not allocate.
        ///
        /// # Safety
        /// The caller holds the lock, or has interrupted the thread that holds it.
        unsafe fn values(&self) -> impl Iterator<Item = &'static T> {
            let taken = self.nodes().filter(|node| node.taken.load(Ordering::Acquire));
            // SAFETY: only `add` replaces values, under the lock.
            taken.map(|node| unsafe { &*node.value.get() })
        }

        fn nodes(&self) -> impl Iterator<Item = &'static Node<T>> {
            let mut next = self.0.load(Ordering::Acquire);
            std::iter::from_fn(move || {
                // SAFETY: `next` is null or points to a node that was complete before it was published and is never
                // freed.
                let node: &'static Node<T> = unsafe { next.as_ref() }?;
                next = node.next;
                Some(node)
            })
        }
    }

    impl<T> Deref for Entry<T> {
        type Target = T;

        fn deref(&self) -> &T {
            // SAFETY: the node is taken, so nobody replaces the value.
            unsafe { &*self.0.value.get() }
        }
    }

    impl<T> Drop for Entry<T> {
        fn drop(&mut self) {
            self.0.taken.store(false, Ordering::Release);
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Entry<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            T::fmt(self, f)
        }
    }

    static UNFINISHED: List<Path> = List::new();
    static MAPS: List<Map> = List::new();

    /// File or folder to remove.
    #[derive(Debug)]
    pub(crate) struct Path {
        path: CString,
        is_folder: bool,
    }

    impl Path {
        /// `None`: the path contains a zero byte, so nothing can exist there.
        pub(super) fn register(path: &std::path::Path, is_folder: bool, lock: &Lock) -> Option<Entry<Self>> {
            let path = CString::new(path.as_os_str().as_bytes()).ok()?;
            Some(UNFINISHED.add(Self { path, is_folder }, lock))
        }
    }

    /// Address range of a map.
    #[derive(Debug)]
    pub(crate) struct Map {
        start: usize,
        length: usize,
        broken: AtomicBool,
    }

    impl Map {
        pub(super) fn register(map: &[u8]) -> Entry<Self> {
            let map = Self { start: map.as_ptr() as usize, length: map.len(), broken: AtomicBool::new(false) };
            MAPS.add(map, &Lock::take())
        }

        pub(super) fn is_broken(&self) -> bool {
            self.broken.load(Ordering::Acquire)
        }
    }

    pub(super) fn install() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            for signal in ENDING {
                handle(signal, on_end as *const () as usize, libc::SA_ONSTACK);
            }
            handle(libc::SIGBUS, on_bus as *const () as usize, libc::SA_ONSTACK | libc::SA_SIGINFO);
            // The handler does nothing, so that the write fails with EFBIG like any other error.
            handle(libc::SIGXFSZ, on_file_size as *const () as usize, libc::SA_ONSTACK);
        });
    }

    fn handle(signal: c_int, handler: usize, flags: c_int) {
        // SAFETY: `sigaction` is plain data, for which zeros are valid; both pointers refer to valid `sigaction`
        // values; the handlers have the signature that `flags` requires and are async-signal-safe.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut before) != 0 || before.sa_sigaction == libc::SIG_IGN {
                return;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            action.sa_flags = flags;
            libc::sigfillset(&mut action.sa_mask);
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }

    /// Held by a thread during [`super::uninterrupted`] work, and forever by the handler that ends the process.
    static LOCKED: AtomicBool = AtomicBool::new(false);

    fn try_lock() -> bool {
        LOCKED.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Holds the lock on a thread with blocked signals, so a handler never interrupts the thread that holds the lock.
    pub(crate) struct Lock {
        mask: libc::sigset_t,
    }

    impl Lock {
        pub(crate) fn take() -> Self {
            // SAFETY: signal sets are plain data, for which zeros are valid; all pointers refer to valid signal sets.
            let mask = unsafe {
                let (mut all, mut mask) = (std::mem::zeroed(), std::mem::zeroed());
                libc::sigfillset(&mut all);
                libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut mask);
                mask
            };
            while !try_lock() {
                std::thread::yield_now();
            }
            Self { mask }
        }
    }

    impl Drop for Lock {
        fn drop(&mut self) {
            LOCKED.store(false, Ordering::SeqCst);
            // SAFETY: `self.mask` is the mask that this thread had before.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) };
        }
    }

    /// Waits until no other thread creates or renames a file, and then blocks all such work forever. Gives up after a
    /// second: a failed allocation may have interrupted this thread during such work.
    fn lock_for_ever() {
        for _ in 0..1000 {
            if try_lock() {
                return;
            }
            let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            // SAFETY: `nanosleep` is async-signal-safe and accepts a null pointer for the remaining time.
            unsafe { libc::nanosleep(&pause, std::ptr::null_mut()) };
        }
    }

    extern "C" fn on_file_size(_: c_int) {}

    extern "C" fn on_end(signal: c_int) {
        remove_unfinished();
        end_by(signal);
    }

    /// Gives a signal its default effect as soon as the handler returns.
    fn end_by(signal: c_int) {
        // SAFETY: both functions are async-signal-safe. The signal is blocked until the handler returns, and then ends
        // the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }

    /// Removes files, and then the folders that had them.
    fn remove_unfinished() {
        lock_for_ever();
        for is_folder in [false, true] {
            // SAFETY: this thread holds the lock; after a second without it, this handler has interrupted its holder.
            for path in unsafe { UNFINISHED.values() }.filter(|path| path.is_folder == is_folder) {
                let remove = if is_folder { libc::rmdir } else { libc::unlink };
                // SAFETY: the name is a NUL-terminated string; both functions are async-signal-safe.
                unsafe { remove(path.path.as_ptr()) };
            }
        }
    }

    /// Returns the start and length of the map that has an address, and marks the map as broken.
    fn broken_map(address: usize) -> Option<(usize, usize)> {
        // A thread that reads a map does not hold the lock, so the holder is another thread and goes on.
        while !try_lock() {
            std::thread::yield_now();
        }
        // SAFETY: this thread holds the lock.
        let map = unsafe { MAPS.values() }.find(|map| (map.start..map.start + map.length).contains(&address));
        let range = map.map(|map| {
            map.broken.store(true, Ordering::Release);
            (map.start, map.length)
        });
        LOCKED.store(false, Ordering::SeqCst);
        range
    }

    extern "C" fn on_bus(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: the system passes valid signal information, which contains an address for SIGBUS.
        let address = unsafe { (*info).si_addr() } as usize;
        // SAFETY: `sysconf` takes a constant and accesses no memory of this process.
        let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        if let Some((start, length)) = broken_map(address) {
            // If the file was truncated, all later pages of the map are missing too.
            let page = address - address % page_size;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: this thread was reading the map, so its pages are still mapped and hold nothing else; they were
            // readable and stay readable. `mmap` takes no lock and does not allocate in the process.
            let zeros =
                unsafe { libc::mmap(page as *mut c_void, start + length - page, libc::PROT_READ, flags, -1, 0) };
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
        remove_unfinished();
        end_by(signal);
    }
    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn released_nodes_are_used_again() {
            static LIST: List<u32> = List::new();
            let lock = Lock::take();
            let first = LIST.add(1, &lock);
            for value in 2..100 {
                assert_eq!(*LIST.add(value, &lock), value);
            }
            assert_eq!(*first, 1);
            assert_eq!(LIST.nodes().count(), 2);
            // SAFETY: this thread holds the lock.
            assert_eq!(unsafe { LIST.values() }.collect::<Vec<_>>(), [&1]);
        }
    }
}
