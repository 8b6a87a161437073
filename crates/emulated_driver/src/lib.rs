//! A `libcuda.so.1` whose GPU is the PTX emulator. It is also the fake driver of this workspace's tests.
//!
//! Programs that use CUDA's public driver API run on it unchanged: `ptx-emulator run` loads it in place of the driver.
//! A handle is a number that is looked up, so any call with any handle returns a `CUresult`. Work in a stream runs as
//! late as streams and events allow (`queue.rs`), which exposes dependencies that a program forgot. Device memory
//! belongs to the emulator, and each launch is checked there (`emulate.rs`). Calls that are not emulated are refused by
//! name (`refused.rs`).
//!
//! In a test (`for_tests.rs`, used by `fake_cuda`), device memory is process memory and a kernel is a function of the
//! test. To expose mistakes, this mode is stricter than a driver: handles must be alive, copies must lie within an
//! allocation, a context must be current, PTX must be for this device, and nothing may be allocated while a stream
//! captures. Copies and launches advance the clock that event times come from.
//!
//! Each file is a family of calls; `call.rs` is shared by all. Names and layouts follow NVIDIA's `cuda.h` of CUDA 13.0.

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::too_many_arguments, reason = "the driver's signatures")]
#![allow(missing_docs, reason = "programs see only the C symbols, which cuda.h documents")]

mod alloc;
mod call;
mod card;
mod code;
mod context;
mod control;
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
