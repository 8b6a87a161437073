//! Matrix products of a warp, and loads of their operands (sm_80 and up). All lanes execute the same call.
//!
//! PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Warp-level matrix load instruction: ldmatrix".

use crate::{ptx, shared::SharedAddress, wgmma::Number};

/// Loads four matrices of 8 rows × 8 elements of 16 bits (`ldmatrix.x4`). Lane l gets of each matrix the elements `2·(l%4)` and the
/// next of row l/4, the first in the low half; lane 8·i + r says where row r of matrix i lies.
///
/// # Safety
/// The whole warp calls it together. `row` is a multiple of 16; 16 bytes of the block's shared memory lie there, initialised, and
/// no thread writes them meanwhile.
#[inline(always)]
pub unsafe fn ldmatrix_x4(row: SharedAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    [a, b, c, d]
}

/// D += A·B, summed in f32, of 16 rows, 8 columns and 16 elements of K (`mma.sync.m16n8k16`).
///
/// `a[2·c + h]` is row `l/4 + 8·h`, columns `8·c + 2·(l%4)` and the next; `b[c]` is row `l/4` of Bᵀ, the same columns; `d[2·h + i]` is
/// row `l/4 + 8·h`, column `2·(l%4) + i`.
///
/// # Safety
/// The whole warp calls it together. bf16 needs sm_80.
#[inline(always)]
pub unsafe fn mma_m16n8k16<T: Number>(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    macro_rules! product {
        ($types:literal) => {
            // SAFETY: what `# Safety` above asks.
            unsafe {
                ptx!(
                    concat!(
                        "mma.sync.aligned.m16n8k16.row.col.f32", $types,
                        ".f32 {{{0}, {1}, {2}, {3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{0}, {1}, {2}, {3}}};"
                    ),
                    inout(reg32) sums[0], inout(reg32) sums[1], inout(reg32) sums[2], inout(reg32) sums[3],
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    b0 = in(reg32) b[0], b1 = in(reg32) b[1],
                    options(nostack, preserves_flags, pure, nomem)
                )
            }
        };
    }
    if T::IS_BF16 { product!(".bf16.bf16") } else { product!(".f16.f16") }
}
