//! Compiles a Rust crate to PTX with the stock toolchain.
//!
//! The crate does not depend on what the kernels compute. [`CudaBuilder`] compiles one crate for one [`Arch`].
//! [`KernelCrate`] compiles every kernel that a crate lists in its `Cargo.toml`.
//!
//! All threads of a warp must reach a barrier or a warp-wide (`.sync.aligned`) instruction together. LLVM preserves
//! this for code that is marked *convergent*, but rustc does not mark `asm!` as convergent. LLVM's optimizers then
//! clone such instructions into divergent branches; the PTX assembles and computes wrong results. So a build has three
//! steps:
//!
//! 1. A nested `cargo rustc` writes LLVM IR before any LLVM pass.
//! 2. This crate marks the IR convergent and adds the kernels' launch bounds.
//! 3. The toolchain's own `opt` and `llc` compile the IR to PTX.
//!
//! Several builds of one crate share a compiled `core`. One build at a time runs step 1. Meanwhile, steps 2 and 3 of the
//! builds before it run in parallel on all processors.
//!
//! ```no_run
//! use cuda_builder::{Arch, CudaBuilder};
//!
//! let ptx = CudaBuilder::new("../kernels").arch(Arch::SM_80).copy_to("target/kernels.ptx").build()?;
//! # Ok::<(), cuda_builder::Error>(())
//! ```

mod arch;
mod builder;
mod error;
mod ir;
mod kernels;
mod packages;
mod toolchain;

pub use arch::arches;
pub use builder::CudaBuilder;
pub use error::Error;
pub use gpu_arch::Arch;
pub use kernels::{Built, Kernel, KernelCrate};
