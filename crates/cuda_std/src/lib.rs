//! Device-side standard library for kernels written in Rust.
//!
//! This is the one place with `asm!`. It has a thin wrapper for each instruction, named after it, with the section of
//! NVIDIA's PTX ISA manual that defines it, and types for what instructions take: addresses of
//! [shared memory](shared::SharedAddress), of a [barrier](mbarrier::Mbarrier) in it, of
//! [global memory](global::GlobalAddress) and of [tensor memory](tcgen05::TmemAddress) cannot be confused. It knows nothing of any kernel. The names of `thread`, `warp` and `shared` are
//! those of rust-cuda's crate of the same name.
//!
//! The crate compiles on every target, so that a workspace can check and document it. On a CPU, integer instructions compute
//! what they compute on a GPU, and whatever needs the hardware panics.

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

/// Makes a function an entry that the driver can launch by its name.
///
/// The function is free, `unsafe` (nothing checks its arguments at the launch), not generic, and returns nothing. Its
/// parameters are [`Copy`], since they are passed as bytes. A parameter may be aligned to at most 16 bytes.
///
/// `threads` is the largest block that the kernel will be launched with, and `min_blocks` the number of blocks that must fit
/// a multiprocessor at once; the assembler allots registers by them (`.maxntid`, `.minnctapersm`). `cluster` is the number
/// of blocks along x that run together and reach each other's shared memory (see [`cluster`]); every launch then has
/// clusters of this size (`.reqnctapercluster`). 0 asks for nothing, and so does leaving one out.
///
/// ```
/// # #![allow(unused)]
/// use cuda_std::{kernel, thread};
///
/// /// Doubles `data`, one element a thread.
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
/// Nor does a safe function, or one that returns something:
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

/// `asm!` on a GPU, a panic elsewhere. PTX line information names the wrapper, not this macro.
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
    panic!("this function needs the hardware of an NVIDIA GPU; it was called on a CPU")
}

/// Whether the code is compiled for an architecture before sm_90: there grids do not overlap, blocks have no cluster, and some
/// instructions lack. rustc knows such an architecture by name, and sets the features of all up to it.
pub(crate) const BEFORE_SM_90: bool = cfg!(all(target_feature = "sm_80", not(target_feature = "sm_90")));

/// A panic in a kernel ends it: the driver reports a failed launch.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: `trap` may be executed anywhere.
    unsafe { core::arch::nvptx::trap() }
}
