//! A `libcuda.so.1` whose card is the PTX emulator, and which is the fake driver of this workspace's tests.
//!
//! Programs on CUDA's public driver API run on it unchanged: `ptx-emulator run` puts it in their way. A handle is a number
//! that is looked up, so that any call with any handle ends with a `CUresult`. Work in a stream runs as late as streams and
//! events allow (`queue.rs`), so that a dependency which a program forgets shows. Device memory is the emulator's, and each
//! launch is checked there (`emulate.rs`). What is not emulated is refused by name (`refused.rs`).
//!
//! For a test (`for_tests.rs`, used by `fake_cuda`), device memory is the process's own and a kernel is a function of the
//! test's. It is stricter than a driver where a program's mistake can be seen: handles must be alive, copies must lie
//! within an allocation, a context must be current, PTX must be for this device, nothing is allocated while a stream
//! captures. Copies and launches advance a clock, which is an event's time.
//!
//! A file is a family of calls; `call.rs` is what all have in common. Names and layouts are those of NVIDIA's `cuda.h`
//! (read in 13.0).

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::too_many_arguments, reason = "the driver's signatures")]
#![allow(missing_docs, reason = "programs see the C symbols alone, which cuda.h documents")]

mod alloc;
mod call;
mod card;
mod code;
mod context;
mod copy;
mod current;
mod device;
mod emulate;
mod entries;
mod fatbin;
mod for_tests;
mod function;
mod graph;
mod handle;
mod image;
mod launch;
mod memory;
mod module;
mod objects;
mod options;
mod pointer;
mod proc_address;
mod queue;
mod refusal;
mod refused;
mod run;
mod state;
mod stream;
mod tensor_map;
mod work;
