//! Device-side standard library for kernels written in Rust.
//!
//! Only this crate has `asm!`. Each PTX instruction has a thin wrapper with the same name; its comment cites the
//! section of NVIDIA's PTX ISA manual that defines the instruction. Addresses have types, so that the kinds cannot be
//! confused: [shared memory](shared::SharedAddress), a [barrier](mbarrier::Mbarrier) in shared memory, [global
//! memory](global::GlobalAddress) and [tensor memory](tcgen05::TmemAddress). The crate depends on no kernel. The names
//! in `thread`, `warp` and `shared` are the names in rust-cuda's `cuda_std`.
//!
//! The crate compiles on every target, so that a workspace can check and document it. On a CPU, integer instructions
//! return the same results as on a GPU; functions that need the hardware panic.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, stdarch_nvptx))]
#![cfg_attr(not(target_arch = "nvptx64"), allow(unreachable_code, unused_mut, unused_unsafe, unused_variables))]

pub mod clock;
pub mod cluster;
pub mod convert;
pub mod cp_async;
pub mod fence;
pub mod float;
pub mod global;
pub mod griddepcontrol;
pub mod integer;
pub mod mbarrier;
pub mod mma;
pub mod parameter;
pub mod setmaxnreg;
pub mod shared;
pub mod tcgen05;
pub mod thread;
pub mod tma;
pub mod warp;
pub mod wgmma;

/// Turns a function into an entry that the driver can launch by name.
///
/// The function must be a free `unsafe fn` (nothing checks its arguments at the launch), not generic, without a return
/// value. Its parameters must be [`Copy`], because they are passed as bytes. A parameter may be aligned to at most 16
/// bytes.
///
/// `threads`: largest CTA of any launch. `min_blocks`: number of CTAs that must fit on an SM at once. The assembler
/// allots registers by both (`.maxntid`, `.minnctapersm`). `cluster`: number of CTAs along x that run together and
/// access each other's shared memory (see [`cluster`]); every launch has clusters of this size (`.reqnctapercluster`).
/// An argument that is 0 or absent sets no bound.
///
/// ```
/// # #![allow(unused)]
/// use cuda_std::{kernel, thread};
///
/// /// Doubles each element of `data`, one per thread.
/// ///
/// /// # Safety
/// /// `data` has an element for every thread of the grid.
/// #[kernel(threads = 256, min_blocks = 2)]
/// pub unsafe fn double(data: *mut f32) {
///     // SAFETY: `data` has an element for this thread.
///     unsafe { *data.add(thread::index_1d() as usize) *= 2.0 }
/// }
/// ```
///
/// A parameter that is not `Copy` does not compile:
///
/// ```compile_fail,E0277
/// # use cuda_std::kernel;
/// struct Owned;
/// #[kernel]
/// pub unsafe fn take(owned: Owned) {}
/// ```
///
/// A safe function does not compile, and neither does a function with a return value:
///
/// ```compile_fail
/// #[cuda_std::kernel]
/// pub fn safe(data: *mut f32) {}
/// ```
///
/// ```compile_fail
/// #[cuda_std::kernel]
/// pub unsafe fn returns(data: *mut f32) -> f32 { 0.0 }
/// ```
pub use cuda_std_macros::kernel;

/// Expands to `asm!` on a GPU and to a panic elsewhere. PTX line information names the wrapper, not this macro.
#[collapse_debuginfo(yes)]
macro_rules! ptx {
    ($($asm:tt)*) => {{
        #[cfg(target_arch = "nvptx64")]
        core::arch::asm!($($asm)*);
        #[cfg(not(target_arch = "nvptx64"))]
        $crate::not_on_a_gpu()
    }};
}
pub(crate) use ptx;

#[cfg(not(target_arch = "nvptx64"))]
#[cold]
pub(crate) fn not_on_a_gpu() -> ! {
    panic!("this function needs an NVIDIA GPU, but was called on a CPU")
}

/// `true` if the target architecture is older than sm_90: grids do not overlap, CTAs have no cluster, and some
/// instructions are missing. rustc sets the feature of the target architecture and the features of all older ones.
pub(crate) const BEFORE_SM_90: bool = cfg!(all(target_feature = "sm_80", not(target_feature = "sm_90")));

/// A panic ends the kernel; the driver then reports a failed launch.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: `trap` may be executed anywhere.
    unsafe { core::arch::nvptx::trap() }
}
