//! MMA instructions of a warp: all 32 lanes execute the same call, with fragments in registers.
//!
//! `group` is `lane / 4` and `thread` is `lane % 4`. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma,
//! ldmatrix".

use crate::{ptx, shared::SharedAddress, wgmma::Number};

/// Number of rows of A and D.
pub const M: u32 = 16;

/// Number of columns of B and D.
pub const N: u32 = 8;

/// A lane's fragment of D: columns `2·thread` and `2·thread + 1` of row `group`, then of row `group + 8`.
pub type Sums = [f32; 4];

macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// All lanes of the warp make the same call. `address` is a multiple of 16 and points to 16 initialized bytes
        /// of the CTA's shared memory. No thread writes them during the call.
        #[inline(always)]
        pub unsafe fn $name(address: SharedAddress) -> [u32; 4] {
            let (a, b, c, d): (u32, u32, u32, u32);
            // SAFETY: the caller guarantees 16 aligned, initialized shared bytes that nobody writes, and that all lanes
            // execute this.
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
    /// Loads four matrices of 8 rows of 16 bytes. Lane `8·i + r` passes the address of row r of matrix i. From each
    /// matrix, a lane gets four bytes of row `group`, starting at byte `4·thread`
    /// (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`; sm_75 and up).
    ldmatrix_x4_b16 = "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
    /// Like [`ldmatrix_x4_b16`] with transposed matrices: a lane gets element `group` of rows `2·thread` and `2·thread
    /// + 1` (`ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`; sm_75 and up).
    ldmatrix_x4_trans_b16 = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
}

/// Stores four matrices of 8 rows of 16 bytes; [`ldmatrix_x4_b16`] with the same addresses loads the same fragments
/// (`stmatrix.sync.aligned.m8n8.x4.shared.b16`; sm_90 and up).
///
/// # Safety
/// All lanes of the warp make the same call. `address` is a multiple of 16 and points to 16 bytes of the CTA's shared
/// memory. No other thread reads or writes them during the call.
#[inline(always)]
pub unsafe fn stmatrix_x4_b16(address: SharedAddress, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller guarantees 16 aligned shared bytes that nobody else accesses, and that all lanes execute this.
    unsafe {
        ptx!(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d,
            options(nostack, preserves_flags)
        )
    };
}

/// D += A·B over 16 elements of K, all of f16 or bf16 (`mma.sync.aligned.m16n8k16.row.col.f32` of `.f16` or `.bf16`;
/// sm_80 and up).
///
/// `a[2·c + h]` holds elements `8·c + 2·thread` (low half) and `8·c + 2·thread + 1` of row `group + 8·h` of A; `b[c]`
/// holds the same elements of column `group` of B.
///
/// # Safety
/// All lanes of the warp make the same call.
#[inline(always)]
pub unsafe fn mma_m16n8k16<T: Number>(d: &mut Sums, a: [u32; 4], b: [u32; 2]) {
    macro_rules! product {
        ($types:literal) => {
            // SAFETY: the caller guarantees that all lanes of the warp execute this; it accesses registers only.
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

/// D += A·B over 64 elements of K: e2m1 values with a ue4m3 scale per 16 elements
/// (`mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3`; sm_120a and
/// its family).
///
/// `a[i]` holds eight elements of row `group + 8·(i % 2)` of A from `8·thread + 32·(i / 2)` on; `b[i]` holds eight
/// elements of column `group` of B from `8·thread + 32·i` on. A word holds four scales, lowest K in the low byte
/// ("Block Scaling for mma.sync"):
///
/// * A: scales of rows `group` and `group + 8` come from the lanes with `thread` 0 and 1 (`A_THREAD` = 0) or 2 and 3
///   (`A_THREAD` = 1);
/// * B: scales of column `group` come from the lane with `thread` = `B_THREAD`.
///
/// ```no_run
/// # use cuda_std::mma::mma_m16n8k64_mxf4nvf4;
/// # let mut sums = [0.0; 4];
/// # unsafe {
/// mma_m16n8k64_mxf4nvf4::<1, 3>(&mut sums, [0; 4], [0; 2], 0, 0);
/// # }
/// ```
/// Values of `A_THREAD` above 1 do not compile:
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
/// All lanes of the warp make the same call.
#[inline(always)]
pub unsafe fn mma_m16n8k64_mxf4nvf4<const A_THREAD: u32, const B_THREAD: u32>(
    d: &mut Sums,
    a: [u32; 4],
    b: [u32; 2],
    scale_a: u32,
    scale_b: u32,
) {
    const { assert!(A_THREAD < 2 && B_THREAD < 4, "A_THREAD must be below 2, and B_THREAD below 4") };
    // SAFETY: the caller guarantees that all lanes of the warp execute this; it accesses registers only.
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
