//! A `libcuda.so.1` for tests: one fake device whose memory is host memory. It records every call.
//!
//! [`install`] opens the library of `emulated_driver`, which Cargo has built beside the test. The library is not linked
//! into this crate, because it exports the driver's own symbols. glibc identifies an open library by its soname, so
//! every later request for `libcuda.so.1` gets this library. Therefore `install` must precede the process's first
//! driver call, and each test binary decides for itself. A launched kernel is a Rust function of the test.
//!
//! This crate knows neither `cust` nor the code under test.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

/// A launch as the device sees it.
pub struct Launch<'a> {
    /// Name of the entry.
    pub kernel: &'a str,
    /// CTAs along x, y and z.
    pub grid: [c_uint; 3],
    /// Threads per CTA along x, y and z.
    pub block: [c_uint; 3],
    /// CTAs per cluster along x, y and z.
    pub cluster: [c_uint; 3],
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: c_uint,
    /// Number that identifies the stream of the launch.
    pub stream: usize,
    parameters: *const *const c_void,
}

impl Launch<'_> {
    /// Returns the kernel's parameter number `index`. A device pointer in it is valid in this process.
    ///
    /// # Safety
    ///
    /// Parameter `index` exists, and the launch passed a `T` for it.
    pub unsafe fn parameter<T: Copy>(&self, index: usize) -> T {
        // SAFETY: cuLaunchKernel's array has a valid pointer per parameter, and the caller guarantees that parameter
        // `index` is a `T`.
        unsafe { (*self.parameters.add(index)).cast::<T>().read_unaligned() }
    }
}

type RawLaunch = extern "C" fn(*const c_char, *const c_uint, c_uint, usize, *const *const c_void);

/// Exclusive use of the fake device until the value is dropped. Each use starts with fresh state.
pub struct FakeCuda {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

/// Whether a kernel of the current test has panicked.
static KERNEL_PANICKED: AtomicBool = AtomicBool::new(false);

impl Drop for FakeCuda {
    fn drop(&mut self) {
        let panicked = KERNEL_PANICKED.swap(false, Ordering::Relaxed);
        assert!(!panicked || std::thread::panicking(), "a kernel panicked; see its message above");
    }
}

static KERNEL: Mutex<Option<fn(&Launch)>> = Mutex::new(None);

/// Replaces the driver with the fake device, and waits for other tests of this process to finish with it.
///
/// # Panics
///
/// If the library cannot be opened.
pub fn install() -> FakeCuda {
    install_without(None)
}

/// Like [`install`], for an older driver without `function`. All tests of a process must request the same driver,
/// because the first one stays open.
///
/// # Panics
///
/// If the library cannot be opened.
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
    // The folder is deleted after the library is open. An open library does not need its file.
    let folder = tempfile::tempdir().expect("a temporary folder is created");
    if let Some(function) = without {
        let lacking = lack(std::fs::read(&path).expect("the library is readable"), function);
        path = folder.path().join("libcuda.so.1");
        std::fs::write(&path, lacking).expect("the temporary folder is writable");
    }
    // SAFETY: the library is Rust code without initializers, and it stays open for the life of the process.
    let library = unsafe { UnixLibrary::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.expect("the fake libcuda opens");
    library.into()
}

/// Returns the path of the library. Cargo builds it beside the test, or beside the dependencies of an example. A
/// program that loads it as `libcuda.so.1` runs its kernels in the emulator.
///
/// # Panics
///
/// If the library is missing.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let folders = test.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let mut libraries = folders.map(|folder| folder.join("libemulated_driver.so"));
    libraries.find(|library| library.exists()).expect("Cargo built libemulated_driver.so beside the test")
}

/// Renames a function in the library's string table, so that a lookup of the function fails.
fn lack(mut library: Vec<u8>, function: &str) -> Vec<u8> {
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let at = library.windows(name.len()).position(|bytes| bytes == name).expect("the library exports the function");
    library[at + 1] = b'_';
    library
}

impl FakeCuda {
    fn call<F, R>(&self, name: &str, with: impl FnOnce(F) -> R) -> R
    where
        F: Copy,
    {
        // SAFETY: each caller below passes the name and the type of a function of `for_tests.rs`.
        let function =
            unsafe { self.library.get::<F>(name) }.expect("the library exports the function of for_tests.rs");
        with(*function)
    }

    /// Sets the device's compute capability and number of SMs. The initial values are 8.0 and 4.
    pub fn set_device(&self, major: i32, minor: i32, sms: i32) {
        self.call("fake_set_device", |set: extern "C" fn(c_int, c_int, c_int)| set(major, minor, sms));
    }

    /// Sets the number of devices. The initial value is 1.
    pub fn set_device_count(&self, count: i32) {
        self.call("fake_set_device_count", |set: extern "C" fn(c_int)| set(count));
    }

    /// Makes the next call of `function` fail with this `CUresult` and do nothing else.
    pub fn fail_next(&self, function: &str, code: i32) {
        let function = CString::new(function).expect("the name contains no NUL");
        self.call("fake_fail_next", |fail: extern "C" fn(*const c_char, c_int)| fail(function.as_ptr(), code));
    }

    /// Sets the function that a launch runs on the device. Work runs only when something waits for it or for later work
    /// that depends on it. Without this function a launch does nothing.
    pub fn on_launch(&self, kernel: fn(&Launch)) {
        extern "C" fn trampoline(
            name: *const c_char,
            size: *const c_uint,
            shared_bytes: c_uint,
            stream: usize,
            parameters: *const *const c_void,
        ) {
            // SAFETY: the library passes the entry's name and nine numbers. Both are valid during the call.
            let (name, [grid, block, cluster]) = unsafe { (CStr::from_ptr(name), *size.cast::<[[c_uint; 3]; 3]>()) };
            let kernel = *kernel_slot();
            if let Some(kernel) = kernel {
                let name = name.to_str().expect("a PTX identifier is ASCII");
                let run = || kernel(&Launch { kernel: name, grid, block, cluster, shared_bytes, stream, parameters });
                // A panic cannot unwind through the driver. Dropping `FakeCuda` makes the test fail.
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    KERNEL_PANICKED.store(true, Ordering::Relaxed);
                }
            }
        }
        *kernel_slot() = Some(kernel);
        self.call("fake_on_launch", |set: extern "C" fn(RawLaunch)| set(trampoline));
    }

    /// Returns the driver functions called since the last `take_calls`, in order, without pure queries of the device.
    pub fn take_calls(&self) -> Vec<String> {
        let text = self.call("fake_take_calls", |take: extern "C" fn() -> *mut c_char| take());
        // SAFETY: fake_take_calls returns a C string that this function owns and frees below.
        let calls = unsafe { CStr::from_ptr(text) }
            .to_str()
            .expect("function names are ASCII")
            .lines()
            .map(str::to_owned)
            .collect();
        self.call("fake_free_text", |free: extern "C" fn(*mut c_char)| free(text));
        calls
    }

    /// Number of live objects: device memory, page-locked memory, contexts, modules, streams, events and graphs.
    pub fn live_objects(&self) -> usize {
        self.call("fake_live_objects", |live: extern "C" fn() -> usize| live())
    }
}
