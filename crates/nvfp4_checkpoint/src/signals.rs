//! Cleanup when a signal ends the process, and survival when a mapped file is truncated.
//!
//! Signal handlers do this work, so they must not take locks or allocate. Both registers are linked lists that only
//! grow: a node is never freed, because a handler on another thread may be reading it.
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
pub(crate) fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    let _lock = unix::Lock::take();
    work()
}

/// A file or folder that is removed if a signal ends the process during the lifetime of this value. Drop removes
/// nothing.
#[derive(Debug)]
pub(crate) struct Unfinished(#[cfg(unix)] Option<&'static unix::Path>);

impl Unfinished {
    /// Registers a file. Call it in the same [`uninterrupted`] work that creates the file.
    pub(crate) fn file(path: &Path) -> Self {
        Self::new(path, false)
    }

    /// Registers a folder in the same way. Files inside are registered later, and so are removed first.
    pub(crate) fn folder(path: &Path) -> Self {
        Self::new(path, true)
    }

    #[cfg(unix)]
    fn new(path: &Path, is_folder: bool) -> Self {
        Self(unix::Path::register(path, is_folder))
    }

    #[cfg(not(unix))]
    fn new(_: &Path, _: bool) -> Self {
        Self()
    }
}

#[cfg(unix)]
impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            path.forget();
        }
    }
}

/// Mapped memory whose file may be truncated. Drop it before the map.
#[derive(Debug)]
pub(crate) struct Guarded(#[cfg(unix)] &'static unix::Map);

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
impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.forget();
    }
}

#[cfg(unix)]
mod unix {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

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

    /// A list that only grows.
    struct List<T>(AtomicPtr<Node<T>>);

    struct Node<T> {
        value: T,
        next: *const Node<T>,
    }

    impl<T: 'static> List<T> {
        const fn new() -> Self {
            Self(AtomicPtr::new(std::ptr::null_mut()))
        }

        fn push(&self, value: T) -> &'static T {
            let node = Box::leak(Box::new(Node { value, next: std::ptr::null() }));
            let mut first = self.0.load(Ordering::Acquire);
            loop {
                node.next = first;
                match self.0.compare_exchange(first, node, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return &node.value,
                    Err(now) => first = now,
                }
            }
        }

        /// Iterates from the newest node to the oldest. Takes no lock and does not allocate.
        fn iter(&self) -> impl Iterator<Item = &'static T> {
            let mut next: *const Node<T> = self.0.load(Ordering::Acquire);
            std::iter::from_fn(move || {
                // SAFETY: `next` is null or points to a node that was complete before it was published and is never
                // freed.
                let node: &'static Node<T> = unsafe { next.as_ref() }?;
                next = node.next;
                Some(&node.value)
            })
        }
    }

    static UNFINISHED: List<Path> = List::new();
    static MAPS: List<Map> = List::new();

    /// File or folder to remove.
    #[derive(Debug)]
    pub(super) struct Path {
        path: CString,
        is_folder: bool,
        unfinished: AtomicBool,
    }

    impl Path {
        /// `None`: the path contains a zero byte, so nothing can exist there.
        pub(super) fn register(path: &std::path::Path, is_folder: bool) -> Option<&'static Self> {
            let path = CString::new(path.as_os_str().as_bytes()).ok()?;
            Some(UNFINISHED.push(Self { path, is_folder, unfinished: AtomicBool::new(true) }))
        }

        pub(super) fn forget(&self) {
            self.unfinished.store(false, Ordering::Release);
        }
    }

    /// Address range of a map; length 0 after the map is gone.
    #[derive(Debug)]
    pub(super) struct Map {
        start: usize,
        length: AtomicUsize,
        broken: AtomicBool,
    }

    impl Map {
        pub(super) fn register(map: &[u8]) -> &'static Self {
            let start = map.as_ptr() as usize;
            MAPS.push(Self { start, length: AtomicUsize::new(map.len()), broken: AtomicBool::new(false) })
        }

        pub(super) fn is_broken(&self) -> bool {
            self.broken.load(Ordering::Acquire)
        }

        pub(super) fn forget(&self) {
            self.length.store(0, Ordering::Release);
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
    pub(super) struct Lock {
        mask: libc::sigset_t,
    }

    impl Lock {
        pub(super) fn take() -> Self {
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

    fn remove_unfinished() {
        lock_for_ever();
        for path in UNFINISHED.iter().filter(|path| path.unfinished.load(Ordering::Acquire)) {
            let name = path.path.as_ptr();
            // SAFETY: the name is a NUL-terminated string that is never freed; both functions are async-signal-safe.
            unsafe {
                if path.is_folder {
                    libc::rmdir(name)
                } else {
                    libc::unlink(name)
                };
            }
        }
    }

    extern "C" fn on_bus(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: the system passes valid signal information, which contains an address for SIGBUS.
        let address = unsafe { (*info).si_addr() } as usize;
        // SAFETY: `sysconf` takes a constant and accesses no memory of this process.
        let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        for map in MAPS.iter() {
            let length = map.length.load(Ordering::Acquire);
            if address < map.start || address >= map.start + length {
                continue;
            }
            map.broken.store(true, Ordering::Release);
            // If the file was truncated, all later pages of the map are missing too.
            let page = address - address % page_size;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the pages belong to a map that is still registered, so they are still mapped and hold nothing
            // else; they were readable and stay readable. `mmap` takes no lock and does not allocate in the process.
            let zeros =
                unsafe { libc::mmap(page as *mut c_void, map.start + length - page, libc::PROT_READ, flags, -1, 0) };
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
        remove_unfinished();
        end_by(signal);
    }
}
