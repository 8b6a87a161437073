//! What a process must still do when a signal ends it, and how it outlives a file that is cut off while it is mapped.
//!
//! Both are the work of signal handlers, which may take no lock and allocate nothing. So both keep their registers in
//! linked lists that only ever grow: a node is never freed, since a handler of another thread may be reading it.
//!
//! Nothing is installed until [`handle_signals`] is called: a library does not change a process unasked.

use std::path::Path;

/// Makes the process remove its unfinished files when a signal ends it, and outlive files that shrink while they are mapped.
///
/// Every signal that ends a process by default is caught unless it was ignored before (as `nohup` does): unfinished files and
/// folders are removed and the signal then has its usual effect. A write beyond the limit on file sizes becomes an error. A
/// page of a mapped model that the file no longer has reads as zeros, and `TensorFile::check_unchanged` finds it. For programs that
/// have no handlers of their own.
#[cfg(unix)]
pub fn handle_signals() {
    unix::install();
}

/// Does nothing: only Unix has these signals.
#[cfg(not(unix))]
pub fn handle_signals() {}

/// Runs a few system calls that no signal may part: it takes effect before or after them.
///
/// `work` should not allocate: a failed allocation inside delays the end of the process by a second.
pub(crate) fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    let _lock = unix::Lock::take();
    work()
}

/// A file or a folder that is removed if a signal ends the process while this lives. Dropping it removes nothing.
#[derive(Debug)]
pub(crate) struct Unfinished(#[cfg(unix)] Option<&'static unix::Path>);

impl Unfinished {
    /// A file, registered in the same [`uninterrupted`] work that makes it.
    pub(crate) fn file(path: &Path) -> Self {
        Self::new(path, false)
    }

    /// A folder likewise. Files in it are registered after it, and so removed before it.
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

/// Mapped memory whose file may shrink. To be dropped before the map is.
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

    /// Whether a page of it could not be read, and reads as zeros now.
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

    /// The signals that end a process by default and that it can still act upon. Not SIGSEGV and the like, which std's
    /// handler explains, and not SIGPIPE, which std ignores.
    const ENDING: [c_int; 11] = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        // A failed allocation aborts.
        libc::SIGABRT,
        libc::SIGALRM,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGXCPU,
    ];

    /// A list to which nodes are added and from which none is ever taken.
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

        /// The last pushed first. Takes no lock and allocates nothing.
        fn iter(&self) -> impl Iterator<Item = &'static T> {
            let mut next: *const Node<T> = self.0.load(Ordering::Acquire);
            std::iter::from_fn(move || {
                // SAFETY: the pointer is null or that of a node, which was complete before it was published and lives on.
                let node: &'static Node<T> = unsafe { next.as_ref() }?;
                next = node.next;
                Some(&node.value)
            })
        }
    }

    static UNFINISHED: List<Path> = List::new();
    static MAPS: List<Map> = List::new();

    /// What to remove.
    #[derive(Debug)]
    pub(super) struct Path {
        path: CString,
        is_folder: bool,
        unfinished: AtomicBool,
    }

    impl Path {
        /// `None` for a path with a zero byte, which cannot be made either.
        pub(super) fn register(path: &std::path::Path, is_folder: bool) -> Option<&'static Self> {
            let path = CString::new(path.as_os_str().as_bytes()).ok()?;
            Some(UNFINISHED.push(Self { path, is_folder, unfinished: AtomicBool::new(true) }))
        }

        pub(super) fn forget(&self) {
            self.unfinished.store(false, Ordering::Release);
        }
    }

    /// A map, by its addresses; of length 0 once it is gone.
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
            // A handler that does nothing: the write then fails with EFBIG, which is an error like any other.
            handle(libc::SIGXFSZ, on_file_size as *const () as usize, libc::SA_ONSTACK);
        });
    }

    fn handle(signal: c_int, handler: usize, flags: c_int) {
        // SAFETY: `sigaction` is plain data, for which zeros are valid; both pointers are to such; the handlers have the
        // signature that `flags` asks for and call nothing that is not safe in a handler.
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

    /// Held by a thread in [`super::uninterrupted`] work, and for ever by the handler that ends the process.
    static LOCKED: AtomicBool = AtomicBool::new(false);

    fn try_lock() -> bool {
        LOCKED.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The lock, on a thread whose signals wait: its holder is never the thread that a handler interrupts.
    pub(super) struct Lock {
        mask: libc::sigset_t,
    }

    impl Lock {
        pub(super) fn take() -> Self {
            // SAFETY: signal sets are plain data, for which zeros are valid; all pointers are to such.
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
            // SAFETY: the mask is the one that this thread had.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) };
        }
    }

    /// Waits until no other thread makes or renames a file, and keeps all from it from now on. For a second at most: a
    /// failed allocation may have ended this very thread in the middle of such work.
    fn lock_for_ever() {
        for _ in 0..1000 {
            if try_lock() {
                return;
            }
            let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            // SAFETY: `nanosleep` is safe in a handler and may be told nothing of the time that was left.
            unsafe { libc::nanosleep(&pause, std::ptr::null_mut()) };
        }
    }

    extern "C" fn on_file_size(_: c_int) {}

    extern "C" fn on_end(signal: c_int) {
        remove_unfinished();
        end_by(signal);
    }

    /// Lets a signal have its default effect as soon as the handler returns.
    fn end_by(signal: c_int) {
        // SAFETY: both functions are safe in a handler. The signal is blocked until the handler returns, and then ends the
        // process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }

    fn remove_unfinished() {
        lock_for_ever();
        for path in UNFINISHED.iter().filter(|path| path.unfinished.load(Ordering::Acquire)) {
            let name = path.path.as_ptr();
            // SAFETY: the name is a C string that lives on; both functions are safe in a handler.
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
        // SAFETY: the system passes the signal's information, which for SIGBUS has an address.
        let address = unsafe { (*info).si_addr() } as usize;
        // SAFETY: a constant of the system.
        let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        for map in MAPS.iter() {
            let length = map.length.load(Ordering::Acquire);
            if address < map.start || address >= map.start + length {
                continue;
            }
            map.broken.store(true, Ordering::Release);
            // The pages behind are gone too where the file was cut off.
            let page = address - address % page_size;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the pages are those of a map that is still registered, so it is still mapped, and nothing else is
            // there; they were and stay readable. `mmap` is a system call that neither locks nor allocates in the process.
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
