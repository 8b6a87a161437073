//! A `libcudart.so.13`: the public runtime API and the registration calls that nvcc emits, on the public driver API.
//!
//! Programs built with `nvcc -cudart shared` run on it unchanged: `ptx-emulator run` loads it in place of NVIDIA's
//! runtime. NVIDIA's own runtime requests private tables from the driver. This one calls only functions of `cuda.h`
//! (`driver.rs`), and does not depend on the emulator. Code that a program registers at its start is loaded at its
//! first use (`registration.rs`).
//!
//! Each file is a family of calls; `call.rs` is shared by all. Names and layouts follow NVIDIA's `cuda_runtime_api.h`
//! and `driver_types.h` of CUDA 13.5. A function whose name ends with `_ptsz` or `_ptds` is called by programs built
//! with `--default-stream per-thread`: stream 0 is the thread's own.

#![allow(non_snake_case, reason = "the runtime's names")]
#![allow(clippy::too_many_arguments, reason = "the runtime's signatures")]
#![allow(missing_docs, reason = "programs see only the C symbols, which cuda_runtime_api.h documents")]

mod call;
mod copy;
mod device;
mod device_attributes;
mod driver;
mod error;
mod graph;
mod launch;
mod memory;
#[path = "../../emulated_driver/src/pointer.rs"]
mod pointer;
mod refused;
mod registration;
mod stream;
mod types;
