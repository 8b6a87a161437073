//! A `libcudart.so.13` of ours: the public runtime API and the registration calls that nvcc emits, on the public driver API.
//!
//! Programs built with `nvcc -cudart shared` run on it unchanged: `ptx-emulator run` puts it in their way. NVIDIA's own
//! runtime asks the driver for private tables; this one asks for functions of `cuda.h` alone (`driver.rs`), and knows
//! nothing of the emulator. What a program registers at its start is loaded when it is first used (`registration.rs`).
//!
//! A file is a family of calls; `call.rs` is what all have in common. Names and layouts are those of NVIDIA's
//! `cuda_runtime_api.h` and `driver_types.h` (read in 13.5). A function with the ending `_ptsz` or `_ptds` is what a program
//! calls that was built with `--default-stream per-thread`: stream 0 is its thread's own.

#![allow(non_snake_case, reason = "the runtime's names")]
#![allow(clippy::too_many_arguments, reason = "the runtime's signatures")]
#![allow(missing_docs, reason = "programs see the C symbols alone, which cuda_runtime_api.h documents")]

mod call;
mod copy;
mod device;
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
