//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::silu_mul::abi::{self, Segment, THREADS};

use crate::fake::out_dtype;
use nvfp4_core::oracle::silu;

/// Computes every segment by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with descriptors whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let dtype = out_dtype(parameter.format);
        let count = parameter.segment_count as usize;
        let mut blocks = 0;
        for segment in std::slice::from_raw_parts(parameter.segments as *const Segment, count) {
            assert_eq!(u64::from(segment.first_block), blocks);
            blocks += Segment::blocks(segment.elements);
            for element in 0..segment.elements as usize {
                let [gate, up] =
                    [segment.gate, segment.up].map(|from| dtype.decode(*(from as *const u16).add(element)));
                *(segment.c as *mut u16).add(element) = dtype.round(silu(gate) * up);
            }
        }
        assert_eq!((launch.grid, launch.block), ([u32::try_from(blocks).unwrap(), 1, 1], [THREADS, 1, 1]));
    }
}
