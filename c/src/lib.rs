//! `nvfp4.h`: the library for C, on a GPU with the caller's pointers and stream, and on the CPU.
//!
//! cbindgen makes `nvfp4.h` from these files; doc comments here become comments there. No function unwinds or aborts: a
//! bug in the library is also reported as a status.

#![allow(non_camel_case_types, reason = "the names are C's")]

mod cpu;
mod gpu;
mod linear;
mod matrix;
mod pointer;
mod route;
mod status;
mod types;

pub use cpu::*;
pub use gpu::*;
pub use linear::*;
pub use matrix::*;
pub use route::*;
pub use status::*;
pub use types::*;
