//! A `libcuda.so.1` for tests: one made-up device whose memory is the host's, and which writes down every call.
//!
//! [`install`] opens the library of `emulated_driver` (not part of this crate: its symbols are the driver's own), which
//! Cargo has built beside the test. The loader then answers every later request for `libcuda.so.1` with it, since glibc
//! knows an open library by its soname. So it must come before the process's first driver call, and each test binary
//! decides for itself. A kernel that is launched is a Rust function of the test's.
//!
//! This crate knows neither `cust` nor the code under test.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

/// A launch, as the device sees it.
pub struct Launch<'a> {
    /// The entry's name.
    pub kernel: &'a str,
    /// Blocks along x, y and z.
    pub grid: [c_uint; 3],
    /// Threads of a block along x, y and z.
    pub block: [c_uint; 3],
    /// Blocks of a cluster along x, y and z.
    pub cluster: [c_uint; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: c_uint,
    /// The stream that it was given to, as a number that tells streams apart.
    pub stream: usize,
    parameters: *const *const c_void,
}

impl Launch<'_> {
    /// The kernel's parameter number `index`. A device pointer in it is one of this process: it can be followed.
    ///
    /// # Safety
    ///
    /// The launch passed a `T` there.
    pub unsafe fn parameter<T: Copy>(&self, index: usize) -> T {
        // SAFETY: cuLaunchKernel's array has a pointer for each parameter, and `# Safety` above asks that this one is a `T`.
        unsafe { (*self.parameters.add(index)).cast::<T>().read_unaligned() }
    }
}

type RawLaunch = extern "C" fn(*const c_char, *const c_uint, c_uint, usize, *const *const c_void);

/// Exclusive use of the fake device; a test holds it to its end. State starts afresh with each.
pub struct FakeCuda {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

/// Whether a kernel of the test at hand has panicked.
static KERNEL_PANICKED: AtomicBool = AtomicBool::new(false);

impl Drop for FakeCuda {
    fn drop(&mut self) {
        let panicked = KERNEL_PANICKED.swap(false, Ordering::Relaxed);
        assert!(!panicked || std::thread::panicking(), "a kernel panicked, as told above");
    }
}

static KERNEL: Mutex<Option<fn(&Launch)>> = Mutex::new(None);

/// Puts the fake device in the driver's place, and waits for other tests of this process to be done with it.
///
/// # Panics
///
/// When the library cannot be opened.
pub fn install() -> FakeCuda {
    install_without(None)
}

/// As [`install`], of an older driver that lacks a function. All tests of a process must ask for the same driver, since the
/// first one stays.
///
/// # Panics
///
/// As [`install`].
pub fn install_without(function: Option<&str>) -> FakeCuda {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let library = LIBRARY.get_or_init(|| open(function));
    let fake = FakeCuda { library, _alone: alone };
    fake.call("fake_reset", |reset: extern "C" fn()| reset());
    *kernel_slot() = None;
    fake
}

fn kernel_slot() -> MutexGuard<'static, Option<fn(&Launch)>> {
    KERNEL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(without: Option<&str>) -> Library {
    let mut path = built();
    // Kept until the library is open; open, it outlives its file.
    let folder = tempfile::tempdir().expect("a temporary folder");
    if let Some(function) = without {
        let lacking = lack(std::fs::read(&path).expect("the library is read"), function);
        path = folder.path().join("libcuda.so.1");
        std::fs::write(&path, lacking).expect("the library is written");
    }
    // SAFETY: the library is Rust without initializers; it stays open for the process's life.
    let library = unsafe { UnixLibrary::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.expect("the fake libcuda opens");
    library.into()
}

/// The library: this package depends on it, so Cargo has put it beside the test, or beside what an example depends on. A program that
/// finds it as `libcuda.so.1` runs its kernels in the emulator.
///
/// # Panics
///
/// When it is not there.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let folders = test.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let mut libraries = folders.map(|folder| folder.join("libemulated_driver.so"));
    libraries.find(|library| library.exists()).expect("libemulated_driver.so lies beside the test")
}

/// A library without one of its functions: that name in its table of symbols is another's, so nobody finds it.
fn lack(mut library: Vec<u8>, function: &str) -> Vec<u8> {
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let at = library.windows(name.len()).position(|bytes| bytes == name).expect("a function of the library");
    library[at + 1] = b'_';
    library
}

impl FakeCuda {
    fn call<F, R>(&self, name: &str, with: impl FnOnce(F) -> R) -> R
    where
        F: Copy,
    {
        // SAFETY: each caller below names a function of `for_tests.rs` and gives its type.
        let function = unsafe { self.library.get::<F>(name) }.expect("a function of for_tests.rs");
        with(*function)
    }

    /// Changes the device: compute capability and number of SMs. It is an 8.0 with 4 SMs to begin with.
    pub fn set_device(&self, major: i32, minor: i32, sms: i32) {
        self.call("fake_set_device", |set: extern "C" fn(c_int, c_int, c_int)| set(major, minor, sms));
    }

    /// How many devices there are; one to begin with.
    pub fn set_device_count(&self, count: i32) {
        self.call("fake_set_device_count", |set: extern "C" fn(c_int)| set(count));
    }

    /// The next call of `function` fails with this `CUresult` and does nothing.
    pub fn fail_next(&self, function: &str, code: i32) {
        let function = CString::new(function).expect("a name without NUL");
        self.call("fake_fail_next", |fail: extern "C" fn(*const c_char, c_int)| fail(function.as_ptr(), code));
    }

    /// What a launch does from now on, when the device comes to it. Nothing runs before something waits for it, and then only
    /// what must come before. Without a kernel, a launch does nothing.
    pub fn on_launch(&self, kernel: fn(&Launch)) {
        extern "C" fn trampoline(
            name: *const c_char,
            size: *const c_uint,
            shared_bytes: c_uint,
            stream: usize,
            parameters: *const *const c_void,
        ) {
            // SAFETY: the library passes the entry's name and nine numbers, alive during the call.
            let (name, [grid, block, cluster]) = unsafe { (CStr::from_ptr(name), *size.cast::<[[c_uint; 3]; 3]>()) };
            let kernel = *kernel_slot();
            if let Some(kernel) = kernel {
                let name = name.to_str().expect("a PTX identifier");
                let run = || kernel(&Launch { kernel: name, grid, block, cluster, shared_bytes, stream, parameters });
                // A panic cannot pass through the driver. The test fails with it when it gives the fake back.
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    KERNEL_PANICKED.store(true, Ordering::Relaxed);
                }
            }
        }
        *kernel_slot() = Some(kernel);
        self.call("fake_on_launch", |set: extern "C" fn(RawLaunch)| set(trampoline));
    }

    /// The driver functions called since the last time this was asked, in order, without those that only ask questions
    /// about the device.
    pub fn take_calls(&self) -> Vec<String> {
        let text = self.call("fake_take_calls", |take: extern "C" fn() -> *mut c_char| take());
        // SAFETY: fake_take_calls returns a C string and leaves it to us; it is given back below.
        let calls = unsafe { CStr::from_ptr(text) }.to_str().expect("names").lines().map(str::to_owned).collect();
        self.call("fake_free_text", |free: extern "C" fn(*mut c_char)| free(text));
        calls
    }

    /// What is allocated and not yet freed: device and page-locked memory, contexts, modules, streams,
    /// events, graphs.
    pub fn live_objects(&self) -> usize {
        self.call("fake_live_objects", |live: extern "C" fn() -> usize| live())
    }
}
