//! Packing of weights on the host for the MoE kernels that multiply NVFP4 tokens.

use kernels_gpu::nvfp4_rows::{row_bytes, weight_scale_bytes};

use nvfp4_core::format::Matrix;

/// Returns the values of all matrices, then the scales of all matrices, in the layout of
/// [`nvfp4_rows`](kernels_gpu::nvfp4_rows).
pub fn pack_nvfp4<'m>(matrices: impl Iterator<Item = &'m Matrix<'m>>) -> Vec<u8> {
    let (mut values, mut scales) = (Vec::new(), Vec::new());
    for matrix in matrices {
        for row in 0..matrix.rows() {
            values.extend(matrix.row_values(row));
            values.resize(values.len().next_multiple_of(row_bytes(matrix.k() as u32) as usize), 0);
        }
        let blocked = matrix.blocked_scales().into_bytes();
        assert_eq!(blocked.len() as u64, weight_scale_bytes(matrix.rows() as u32, matrix.k() as u32));
        scales.extend_from_slice(&blocked);
    }
    values.extend(scales);
    values
}
