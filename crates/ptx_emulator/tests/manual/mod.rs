//! Programs whose results are derived here from the words of NVIDIA's PTX ISA manual, a file a feature. They use the
//! emulator's interfaces for reading a program and nothing of how it computes, so that the workspace's differential test
//! can run them on a GPU too.

pub mod block_scales;
pub mod bulk_copies;
pub mod clusters;
mod common;
pub mod cp_async;
pub mod dependent_launches;
pub mod fragments;
pub mod launch_control;
pub mod mbarriers;
pub mod multicast;
pub mod sparse;
pub mod tcgen05_copies;
pub mod tcgen05_mma;
pub mod tcgen05_pairs;
pub mod tcgen05_registers;
pub mod tensor_copies;
pub mod tensor_reductions;
pub mod tensormap_replace;
pub mod wgmma;
pub mod wmma;

use ptx_emulator::program::Program;

/// Every feature's programs.
#[allow(dead_code, reason = "each user takes what it needs")]
pub fn programs() -> Vec<Program> {
    let all: [fn() -> Vec<Program>; 19] = [
        block_scales::programs,
        bulk_copies::programs,
        clusters::programs,
        cp_async::programs,
        dependent_launches::programs,
        fragments::programs,
        launch_control::programs,
        mbarriers::programs,
        multicast::programs,
        sparse::programs,
        tcgen05_copies::programs,
        tcgen05_mma::programs,
        tcgen05_pairs::programs,
        tcgen05_registers::programs,
        tensor_copies::programs,
        tensor_reductions::programs,
        tensormap_replace::programs,
        wgmma::programs,
        wmma::programs,
    ];
    all.iter().flat_map(|programs| programs()).collect()
}
