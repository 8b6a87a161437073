//! `nvfp4.h`: a few calls of the library for C, on a GPU with the caller's pointers and stream, and on the CPU.
//!
//! `nvfp4.h` is made of these files by cbindgen; what stands here as documentation stands there as comments. No call unwinds or aborts:
//! a bug of the library is a status too.

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
