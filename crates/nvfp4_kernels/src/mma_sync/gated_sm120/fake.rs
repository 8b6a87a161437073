//! The kernel's implementation for the fake driver. Its tensor maps are the emulator's. It unpacks weights from their
//! slabs.

use fake_cuda::Launch;
use kernels_gpu::format::BLOCK;
use kernels_gpu::mma_sync::gated_sm120::abi::{
    self, Group, INSTANCES, K_BLOCK_BYTES, MMA_K, SLAB_ROWS, Tile, scale_place, slab_row_bytes, value_place,
};
use ptx_emulator::TensorMap;

use super::slabs;
use crate::fake::{SMS, matrix, multiply, out_dtype};
use crate::kernel::op_of;
use nvfp4_core::format::Matrix;

/// Computes every group with a tile by the kernel's contract, and checks the launch and the maps.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with descriptors whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let tiles = std::slice::from_raw_parts(parameter.tiles as *const Tile, parameter.tile_count as usize);
        let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        for tile in tiles.iter().filter(|tile| (tile.first_column, tile.first_token) == (0, 0)) {
            let group = &*(parameter.groups as *const Group).add(tile.group as usize);
            assert!(group.a_map.is_multiple_of(64), "{:#x}", group.a_map);
            let map =
                TensorMap::from_bytes(&*(group.a_map as *const [u8; 128])).expect("the address holds a tensor map");
            assert_eq!(map.dims[..2], [group.k / 2, group.m].map(u64::from));
            assert_eq!(map.box_dims[..2], [K_BLOCK_BYTES, instance.tile_tokens]);
            let tokens = matrix(group.m, group.k, map.global_address, group.a_scales, 1.0);
            let weights = |i: usize| unpack(group.n, group.k, group.b[i], group.alpha[i]);
            multiply(op_of(instance.matrices), out_dtype(parameter.output), tokens, weights, group.c);
        }
        let blocks = parameter.tile_count.min(SMS);
        assert!((1..=blocks).contains(&launch.grid[0]) && launch.grid[1..] == [1, 1], "{:?}", launch.grid);
        assert_eq!((launch.block, launch.shared_bytes), ([instance.threads(), 1, 1], instance.shared_bytes()));
    }
}

/// Unpacks a weight matrix from its slabs.
///
/// # Safety
///
/// `slabs` is valid for reads of all slabs of the matrix.
unsafe fn unpack(rows: u32, k: u32, slabs: u64, global: f32) -> Matrix<'static> {
    let byte = |row: u32, step: u32, at: &dyn Fn(usize, u32) -> usize| {
        let (slab, value_bytes, step) = slabs::place(k, step);
        let first = u64::from(row / SLAB_ROWS) * slab_row_bytes(k) + slab as u64;
        // SAFETY: the caller guarantees that all slabs of the matrix are readable, and `at` returns an offset in the
        // slab that starts at `first`.
        unsafe { *((slabs + first) as *const u8).add(at(value_bytes, step)) }
    };
    let value = |row: u32, column: u32| {
        byte(row, column / (MMA_K / 2), &|_, step| value_place(row % SLAB_ROWS, step, column % (MMA_K / 2)) as usize)
    };
    let scale = |row: u32, column: u32| {
        let (step, place) = (column * BLOCK / MMA_K, column % (MMA_K / BLOCK));
        byte(row, step, &|values, step| values + (scale_place(row % SLAB_ROWS, step) + place) as usize)
    };
    let values = (0..rows).flat_map(|row| (0..k / 2).map(move |column| value(row, column)));
    let scales = (0..rows).flat_map(|row| (0..k / BLOCK).map(move |column| scale(row, column)));
    let (values, scales): (Vec<_>, Vec<_>) = (values.collect(), scales.collect());
    Matrix::new(rows as usize, k as usize, values, scales, global).unwrap()
}
