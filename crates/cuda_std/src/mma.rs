//! Matrix products of a warp: all 32 lanes execute the same call with fragments in registers.
//!
//! A lane is `group = lane / 4` and `thread = lane % 4`. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma,
//! ldmatrix".

use crate::{ptx, shared::SharedAddress, wgmma::Number};

/// Rows of A and D.
pub const M: u32 = 16;

/// Columns of B and D.
pub const N: u32 = 8;

/// A lane's part of D: rows `group` and `group + 8`, of each the columns `2·thread` and the next.
pub type Sums = [f32; 4];

macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// See the module: the same call by all lanes. `address` is a multiple of 16; 16 bytes of the block's shared memory lie there,
        /// initialized, and no thread writes them meanwhile.
        #[inline(always)]
        pub unsafe fn $name(address: SharedAddress) -> [u32; 4] {
            let (a, b, c, d): (u32, u32, u32, u32);
            // SAFETY: what `# Safety` above asks.
            unsafe {
                ptx!(
                    concat!($instruction, " {{{}, {}, {}, {}}}, [{}];"),
                    out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address.0,
                    options(readonly, nostack, preserves_flags)
                )
            };
            [a, b, c, d]
        }
    )*};
}

loads! {
    /// Loads four matrices of 8 rows of 16 bytes. Lane 8·i + r names the address of row r of matrix i; of each matrix a lane gets the
    /// four bytes from `4·thread` on of row `group` (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`; sm_75 and up).
    ldmatrix_x4_b16 = "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
    /// As [`ldmatrix_x4_b16`], the matrices transposed: a lane gets the elements `group` of the rows `2·thread` and the next
    /// (`ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`; sm_75 and up).
    ldmatrix_x4_trans_b16 = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
}

/// Stores four matrices of 8 rows of 16 bytes, what [`ldmatrix_x4_b16`] would load from there
/// (`stmatrix.sync.aligned.m8n8.x4.shared.b16`; sm_90 and up).
///
/// # Safety
/// See the module: the same call by all lanes. `address` is a multiple of 16; 16 bytes of the block's shared memory lie there, which
/// nobody else reads or writes meanwhile.
#[inline(always)]
pub unsafe fn stmatrix_x4_b16(address: SharedAddress, [a, b, c, d]: [u32; 4]) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d,
            options(nostack, preserves_flags)
        )
    };
}

/// D += A·B over 16 elements of K, numbers of 16 bits (`mma.sync.aligned.m16n8k16.row.col.f32` of `.f16` or `.bf16`; sm_80 and up).
///
/// `a[2·c + h]` is row `group + 8·h`, the elements `8·c + 2·thread` and the next, the first in the low half; `b[c]` is column `group`, the
/// same elements.
///
/// # Safety
/// See the module: the same call by all lanes.
#[inline(always)]
pub unsafe fn mma_m16n8k16<T: Number>(d: &mut Sums, a: [u32; 4], b: [u32; 2]) {
    macro_rules! product {
        ($types:literal) => {
            // SAFETY: what `# Safety` above asks.
            unsafe {
                ptx!(
                    concat!(
                        "mma.sync.aligned.m16n8k16.row.col.f32", $types,
                        ".f32 {{{0}, {1}, {2}, {3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{0}, {1}, {2}, {3}}};"
                    ),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    b0 = in(reg32) b[0], b1 = in(reg32) b[1],
                    options(pure, nomem, nostack, preserves_flags)
                )
            }
        };
    }
    match T::IS_BF16 {
        true => product!(".bf16.bf16"),
        false => product!(".f16.f16"),
    }
}

/// D += A·B over 64 elements of K, e2m1 with a ue4m3 scale for each 16
/// (`mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3`; sm_120a and its family).
///
/// `a[i]` is row `group + 8·(i % 2)`, the eight elements from `8·thread + 32·(i / 2)` on; `b[i]` those of column `group` from
/// `8·thread + 32·i` on. Four scales are a word, that of the lowest K in its low byte ("Block Scaling for mma.sync"):
///
/// * A's rows `group` and `group + 8` have theirs in the lanes with `thread` 0 and 1 where `A_THREAD` is 0, 2 and 3 where it is 1;
/// * B's column `group` has its own in the lane whose `thread` is `B_THREAD`.
///
/// ```no_run
/// # use cuda_std::mma::mma_m16n8k64_mxf4nvf4;
/// # let mut sums = [0.0; 4];
/// # unsafe {
/// mma_m16n8k64_mxf4nvf4::<1, 3>(&mut sums, [0; 4], [0; 2], 0, 0);
/// # }
/// ```
/// There is no other thread of A to select:
///
/// ```compile_fail,E0080
/// # use cuda_std::mma::mma_m16n8k64_mxf4nvf4;
/// # let mut sums = [0.0; 4];
/// # unsafe {
/// mma_m16n8k64_mxf4nvf4::<2, 3>(&mut sums, [0; 4], [0; 2], 0, 0);
/// # }
/// ```
///
/// # Safety
/// See the module: the same call by all lanes.
#[inline(always)]
pub unsafe fn mma_m16n8k64_mxf4nvf4<const A_THREAD: u32, const B_THREAD: u32>(
    d: &mut Sums,
    a: [u32; 4],
    b: [u32; 2],
    scale_a: u32,
    scale_b: u32,
) {
    const { assert!(A_THREAD < 2 && B_THREAD < 4, "A has two thread selectors, B has four") };
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 \
             {{{d0}, {d1}, {d2}, {d3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{d0}, {d1}, {d2}, {d3}}}, \
             {scale_a}, {{0, {a_thread}}}, {scale_b}, {{0, {b_thread}}};",
            d0 = inout(reg32) d[0], d1 = inout(reg32) d[1], d2 = inout(reg32) d[2], d3 = inout(reg32) d[3],
            a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
            b0 = in(reg32) b[0], b1 = in(reg32) b[1], scale_a = in(reg32) scale_a, scale_b = in(reg32) scale_b,
            a_thread = const A_THREAD, b_thread = const B_THREAD,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
}
