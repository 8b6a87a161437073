//! The kernel's implementation for the fake driver. The grid that decodes tokens only stores the addresses of the
//! packed tokens in place of the decoded ones. The grid that multiplies reads these addresses, and unpacks weights from
//! their slabs.

use fake_cuda::Launch;
use kernels_gpu::format::BLOCK;
use kernels_gpu::wgmma::gated_sm90::abi::{
    self, Group, INSTANCES, K_BLOCK, K_BLOCK_BYTES, LANE_BYTES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, TOKENS_ENTRY,
    Tile, Tokens, TokensLaunch, lane_offset, slab_byte,
};

use crate::fake::{matrix, multiply, out_dtype};
use crate::kernel::op_of;
use nvfp4_core::format::{Matrix, blocked};

/// Computes the launched grid, and checks it against the descriptors.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with descriptors whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        if launch.kernel == TOKENS_ENTRY {
            let parameter: TokensLaunch = launch.parameter(0);
            let groups = parameter.groups as *const Tokens;
            let mut blocks = 0;
            for tokens in std::slice::from_raw_parts(groups, parameter.group_count as usize) {
                assert_eq!(u64::from(tokens.first_block), blocks);
                blocks += Tokens::blocks(tokens.m, tokens.k);
                *(tokens.decoded as *mut [u64; 2]) = [tokens.values, tokens.scales];
            }
            assert_eq!((launch.grid, launch.block), ([blocks as u32, 1, 1], [Tokens::THREADS, 1, 1]));
            return;
        }
        let parameter: abi::Launch = launch.parameter(0);
        let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        let tile = |index: u32| *(parameter.tiles as *const Tile).add(index as usize);
        let next = |of: &Tile| (of.next > 0).then(|| tile(of.next));
        for first in 0..launch.grid[0] {
            for tile in std::iter::successors(Some(tile(first)), next) {
                if (tile.first_column, tile.first_token) != (0, 0) {
                    continue;
                }
                let Group { tokens, token_scales, b, c, alpha, m, n, k, .. } = tile.group;
                let packed = [tokens, token_scales];
                let [values, scales] = if instance.decodes_tokens() { packed } else { *(tokens as *const [u64; 2]) };
                let projection = |i: usize| unpack(n, k, b[i], alpha[i]);
                let tokens = matrix(m, k, values, scales, 1.0);
                multiply(op_of(instance.matrices), out_dtype(parameter.output), tokens, projection, c);
            }
        }
        assert_eq!((launch.block, launch.shared_bytes), ([instance.threads(), 1, 1], instance.shared_bytes()));
    }
}

/// Unpacks a weight matrix from its slabs.
///
/// # Safety
///
/// `slabs` is valid for reads of all slabs of the matrix.
unsafe fn unpack(rows: u32, k: u32, slabs: u64, global: f32) -> Matrix<'static> {
    const K_BLOCK_SCALES: u32 = K_BLOCK / BLOCK;
    // SAFETY: the caller guarantees that all slabs of the matrix are readable, and `at` is an offset in slab `slab`.
    let byte = |row: u32, k_block: u32, at: u32| unsafe {
        let slab = row / SLAB_ROWS * k.div_ceil(K_BLOCK) + k_block;
        *(slabs as *const u8).add((slab * SLAB_BYTES + at) as usize)
    };
    let value = |row: u32, column: u32| {
        let (k_block, lane, rest) = (column / K_BLOCK_BYTES, column % K_BLOCK_BYTES / LANE_BYTES, column % LANE_BYTES);
        let packed = byte(row, k_block, lane_offset(row % SLAB_ROWS, lane) + rest);
        (0..=u8::MAX).find(|&codes| slab_byte(codes) == packed).unwrap()
    };
    let scale = |row: u32, column: u32| {
        let at =
            blocked::offset((row % SLAB_ROWS) as usize, (column % K_BLOCK_SCALES) as usize, K_BLOCK_SCALES as usize);
        byte(row, column / K_BLOCK_SCALES, SLAB_VALUE_BYTES + at as u32)
    };
    let values = (0..rows).flat_map(|row| (0..k / 2).map(move |column| value(row, column)));
    let scales = (0..rows).flat_map(|row| (0..k / BLOCK).map(move |column| scale(row, column)));
    let (values, scales): (Vec<_>, Vec<_>) = (values.collect(), scales.collect());
    Matrix::new(rows as usize, k as usize, values, scales, global).unwrap()
}
