//! The kernel's implementation for the fake driver. Its tensor maps are the emulator's.

use fake_cuda::Launch;
use kernels_gpu::tcgen05::gated_sm100::abi::{self, INSTANCES, K_BLOCK_BYTES, Record, TILE_ROWS};
use ptx_emulator::TensorMap;

use crate::fake::{SMS, matrix, multiply, out_dtype};
use crate::kernel::op_of;

/// Computes every group with a tile by the kernel's contract, and checks the launch and the maps.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with descriptors whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let records = std::slice::from_raw_parts(parameter.records as *const Record, parameter.tile_count as usize);
        let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        for Record { group, .. } in
            records.iter().filter(|Record { tile, .. }| (tile.first_row, tile.first_token) == (0, 0))
        {
            let values = |map: u64, rows: u32, box_rows: u32| {
                assert!(map.is_multiple_of(64), "{map:#x}");
                let map = TensorMap::from_bytes(&*(map as *const [u8; 128])).expect("the address holds a tensor map");
                assert_eq!(map.dims[..2], [group.k / 2, rows].map(u64::from));
                assert_eq!(map.box_dims[..2], [K_BLOCK_BYTES, box_rows]);
                map.global_address
            };
            let weights = |i: usize| {
                let values = values(group.b_maps[i], group.n, TILE_ROWS);
                matrix(group.n, group.k, values, group.b_scales[i], group.alpha[i])
            };
            let tokens = values(group.a_map, group.m, instance.box_tokens(group.m));
            let tokens = matrix(group.m, group.k, tokens, group.a_scales, 1.0);
            multiply(op_of(instance.matrices), out_dtype(parameter.output), tokens, weights, group.c);
        }
        let (blocks, all) = (instance.blocks_of_tile(), parameter.tile_count * instance.blocks_of_tile());
        // If K is split, a CTA computes one tile.
        let blocks_at_most = if instance.splits > 1 { all } else { all.min(SMS) };
        assert!((1..=blocks_at_most).contains(&launch.grid[0]) && launch.grid[1..] == [1, 1], "{:?}", launch.grid);
        assert_eq!((launch.block, launch.cluster), ([instance.threads(), 1, 1], [blocks, 1, 1]));
        assert_eq!(launch.shared_bytes, instance.shared_bytes());
    }
}
