//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::simt::gated_simt::abi::{self, Group, INSTANCES, Instance};

use crate::fake::{matrix, multiply, out_dtype};
use crate::kernel::op_of;

/// Computes every group by the kernel's contract, and checks the launch against the groups.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with descriptors whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let groups = std::slice::from_raw_parts(parameter.groups as *const Group, parameter.group_count as usize);
        let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        let mut blocks = 0;
        for group in groups {
            assert_eq!(u64::from(group.first_tile), blocks);
            blocks += instance.tile.count(group.m, group.n);
            if group.m > 0 {
                let weights = |i: usize| matrix(group.n, group.k, group.b[i], group.b_scales[i], group.alpha[i]);
                let tokens = matrix(group.m, group.k, group.a, group.a_scales, 1.0);
                multiply(op_of(instance.matrices), out_dtype(parameter.output), tokens, weights, group.c);
            }
        }
        assert_eq!(launch.grid, [u32::try_from(blocks).unwrap(), 1, 1]);
        assert_eq!(launch.block, [Instance::THREADS, 1, 1]);
        assert_eq!(launch.shared_bytes, instance.shared_bytes());
    }
}
