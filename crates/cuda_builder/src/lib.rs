//! Compiles a Rust crate to PTX with the stock toolchain.
//!
//! Knows nothing of what the kernels compute. [`CudaBuilder`] compiles one crate for one [`Arch`];
//! [`KernelCrate`] compiles every kernel that a crate lists in its `Cargo.toml`.
//!
//! rustc does not tell LLVM that `asm!` is *convergent*: that no thread may come to reach it by another
//! branch than its warp. Its optimisers then clone barriers and warp-wide (`.sync.aligned`) instructions
//! into divergent branches; the PTX assembles and computes wrong results. So a build has three steps:
//!
//! 1. a nested `cargo rustc` writes LLVM IR that no LLVM pass has touched,
//! 2. this crate marks that IR convergent and adds the kernels' launch bounds,
//! 3. the toolchain's own `opt` and `llc` make PTX of it.
//!
//! ```no_run
//! use cuda_builder::{Arch, CudaBuilder};
//!
//! let ptx = CudaBuilder::new("../kernels").arch(Arch::Sm80).copy_to("target/kernels.ptx").build()?;
//! # Ok::<(), cuda_builder::Error>(())
//! ```

mod arch;
mod builder;
mod error;
mod ir;
mod kernels;
mod packages;
mod toolchain;

pub use arch::Arch;
pub use builder::CudaBuilder;
pub use error::Error;
pub use kernels::{Built, Kernel, KernelCrate};
