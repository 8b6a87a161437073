//! Weights in slabs, as the kernel for sm_120 reads them (`kernels-gpu/src/mma_sync/gated_sm120/abi.rs`). A slab is a
//! part of a stage in one contiguous piece of memory. Uses no device.

use kernels_gpu::mma_sync::gated_sm120::abi::{
    K_BLOCK, MMA_K, SLAB_ROWS, scale_place, slab_bytes, slab_row_bytes, slab_value_bytes, value_place,
};
use rayon::prelude::*;

use nvfp4_core::format::{BLOCK, Matrix};

/// Bytes of a row's values per step, and bytes of its scales.
const STEP_VALUES: usize = MMA_K as usize / 2;
const STEP_SCALES: usize = MMA_K as usize / BLOCK;

/// Returns the bytes of the slabs of a matrix with `rows` rows and `k` columns.
pub(super) fn len(rows: usize, k: usize) -> usize {
    rows.div_ceil(SLAB_ROWS as usize) * slab_row_bytes(k as u32) as usize
}

/// Packs a matrix into slabs.
pub(super) fn pack(matrix: &Matrix<'_>) -> Vec<u8> {
    let k = matrix.k();
    let mut slabs = vec![0; len(matrix.rows(), k)];
    let of_same_rows = slabs.par_chunks_mut(slab_row_bytes(k as u32).max(1) as usize);
    of_same_rows.enumerate().for_each(|(index, slabs)| {
        let first_row = index * SLAB_ROWS as usize;
        for row in 0..(SLAB_ROWS as usize).min(matrix.rows() - first_row) {
            let values = matrix.row_values(first_row + row).chunks(STEP_VALUES);
            let scales = matrix.row_scales(first_row + row).chunks(STEP_SCALES);
            for (step, (values, scales)) in values.zip(scales).enumerate() {
                let (slab, value_bytes, step) = place(k as u32, step as u32);
                let slab = &mut slabs[slab..];
                for (byte, codes) in (0..).zip(values) {
                    slab[value_place(row as u32, step, byte) as usize] = *codes;
                }
                let at = value_bytes + scale_place(row as u32, step) as usize;
                slab[at..][..scales.len()].copy_from_slice(scales);
            }
        }
    });
    slabs
}

/// Locates a step along K among the slabs of the same rows. Returns the start of its slab, the bytes of values in that
/// slab, and the index of the step in the slab.
pub(super) fn place(k: u32, step: u32) -> (usize, usize, u32) {
    const STEPS: u32 = K_BLOCK / MMA_K;
    let (k_block, steps) = (step / STEPS, k.div_ceil(MMA_K));
    let of_slab = STEPS.min(steps - k_block * STEPS);
    ((k_block * slab_bytes(STEPS)) as usize, slab_value_bytes(of_slab) as usize, step % STEPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_hold_every_value_and_scale() {
        let (rows, k) = (70, 352);
        let values: Vec<u8> = (0..rows * k / 2).map(|i| (i % 255 + 1) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / BLOCK).map(|i| (i % 126 + 1) as u8).collect();
        let slabs = pack(&Matrix::new(rows, k, &values[..], &scales[..], 1.0).unwrap());
        // 352 elements are six steps: a slab of four steps and one of two.
        let of_rows = 9216 + 2 * 2048 + 512;
        assert_eq!((slabs.len(), len(rows, k)), (2 * of_rows, 2 * of_rows));
        // Row 69 is row 5 of the second slab, and row 2 + 8 of its first product. Its fifth step is the first step of
        // the last slab. Byte 17 there is the second byte of register 3 of lane 8, and its scales are for thread
        // selector 0 of A.
        let slab = &slabs[of_rows + 9216..];
        assert_eq!(slab[8 * 16 + 3 * 4 + 1], values[69 * k / 2 + 4 * 32 + 17]);
        assert_eq!(slab[2 * 2048 + 9 * 4 + 3], scales[69 * k / BLOCK + 4 * 4 + 3]);
        let ones = |bytes: &[u8]| bytes.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!(ones(&slabs), ones(&values) + ones(&scales));
    }
}
