//! Weights in slabs, as the Hopper kernel reads them (`kernels-gpu/src/wgmma/gated_sm90/abi.rs`). A slab is a part of a
//! stage in one contiguous piece of memory. Uses no device.

use kernels_gpu::wgmma::gated_sm90::abi::{
    K_BLOCK, K_BLOCK_BYTES, LANE_BYTES, ROW_LANES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, lane_offset, slab_byte,
};
use rayon::prelude::*;

use nvfp4_core::format::blocked;
use nvfp4_core::format::{BLOCK, Matrix};

/// Returns the bytes of the slabs of a matrix with `rows` rows and `k` columns.
pub(super) fn len(rows: usize, k: usize) -> usize {
    rows.div_ceil(SLAB_ROWS as usize) * k_blocks(k) * SLAB_BYTES as usize
}

/// Number of slabs along K, one per k-block.
fn k_blocks(k: usize) -> usize {
    k.div_ceil(K_BLOCK as usize)
}

/// Packs a matrix into slabs. Its rows must consist of whole lanes of values.
pub(super) fn pack(matrix: &Matrix<'_>) -> Vec<u8> {
    /// Scales of a row per slab.
    const K_BLOCK_SCALES: usize = K_BLOCK as usize / BLOCK;

    let mut slabs = vec![0; len(matrix.rows(), matrix.k())];
    let of_same_rows = slabs.par_chunks_mut(k_blocks(matrix.k()).max(1) * SLAB_BYTES as usize);
    of_same_rows.enumerate().for_each(|(index, slabs)| {
        let first_row = index * SLAB_ROWS as usize;
        for row in 0..(SLAB_ROWS as usize).min(matrix.rows() - first_row) {
            let values = matrix.row_values(first_row + row).chunks(K_BLOCK_BYTES as usize);
            let scales = matrix.row_scales(first_row + row).chunks(K_BLOCK_SCALES);
            for (slab, (values, scales)) in slabs.chunks_exact_mut(SLAB_BYTES as usize).zip(values.zip(scales)) {
                let (to_values, to_scales) = slab.split_at_mut(SLAB_VALUE_BYTES as usize);
                for (lane, values) in (0..ROW_LANES).zip(values.as_chunks::<{ LANE_BYTES as usize }>().0) {
                    let to_values = &mut to_values[lane_offset(row as u32, lane) as usize..][..values.len()];
                    to_values.iter_mut().zip(values).for_each(|(to, codes)| *to = slab_byte(*codes));
                }
                for (tile, scales) in scales.chunks(blocked::TILE_COLUMNS).enumerate() {
                    let at = blocked::offset(row, tile * blocked::TILE_COLUMNS, K_BLOCK_SCALES);
                    to_scales[at..][..scales.len()].copy_from_slice(scales);
                }
            }
        }
    });
    slabs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_hold_every_value_and_scale() {
        let (rows, k) = (130, 352);
        let values: Vec<u8> = (0..rows * k / 2).map(|i| (i % 255 + 1) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / BLOCK).map(|i| (i % 126 + 1) as u8).collect();
        let slabs = pack(&Matrix::new(rows, k, &values[..], &scales[..], 1.0).unwrap());
        assert_eq!((slabs.len(), len(rows, k)), (2 * 3 * 9216, 2 * 3 * 9216));
        // The second slab of row 129: the first byte of its third lane, and its sixth scale.
        let (slab, row) = (&slabs[(3 + 1) * 9216..][..9216], 129);
        assert_eq!(slab[64 + 2 * 16], slab_byte(values[row * k / 2 + 64 + 32]));
        assert_eq!(slab[8192 + 512 + 16 + 1], scales[row * k / BLOCK + 8 + 5]);
        // The first slab of row 6: the swizzle.
        assert_eq!(slabs[6 * 64 + (1 ^ 3) * 16], slab_byte(values[6 * k / 2 + 16]));
        let ones = |bytes: &[u8]| bytes.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!(ones(&slabs), ones(&values) + ones(&scales));
    }
}
