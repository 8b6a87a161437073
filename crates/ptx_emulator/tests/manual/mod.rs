//! Programs whose results are derived from the text of NVIDIA's PTX ISA manual, one file per feature. They use the
//! emulator only to read a program, and nothing of its computation, so the workspace's differential test can also run
//! them on a GPU.

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

/// Programs of every feature.
#[allow(dead_code, reason = "each user needs only some of them")]
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
