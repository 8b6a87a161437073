//! Matrix products of a warpgroup: 128 neighboring threads, the first a multiple of 128, which all execute the same
//! call (sm_90a only).
//!
//! A product runs beside the threads. Its accumulators may be read after [`wait_group`] and [`MmaAsync::settle`]; until
//! then, only products of the same shape may use them, and the registers of its A must not change. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

use crate::{ptx, shared::SharedAddress};

/// Threads of a warpgroup.
pub const WARPGROUP_SIZE: u32 = 128;

/// Rows of A and D.
pub const M: u32 = 64;

/// Columns of A and B of 16-bit elements: what one product sums over.
pub const K: u32 = 16;

/// Orders what the warpgroup has written to registers before its later products (`wgmma.fence`).
///
/// # Safety
/// See the module: the same call by the warpgroup.
#[inline(always)]
pub unsafe fn fence() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("wgmma.fence.sync.aligned;", options(nostack, preserves_flags)) };
}

/// Makes a group of the products that have been started since the last group (`wgmma.commit_group`).
///
/// # Safety
/// See the module: the same call by the warpgroup.
#[inline(always)]
pub unsafe fn commit_group() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("wgmma.commit_group.sync.aligned;", options(nostack, preserves_flags)) };
}

/// Waits until all but the newest `PENDING` groups are complete (`wgmma.wait_group`).
///
/// # Safety
/// See the module: the same call by the warpgroup.
#[inline(always)]
pub unsafe fn wait_group<const PENDING: u32>() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack, preserves_flags)) };
}

/// What the tensor core is told of a matrix in shared memory ("Matrix Descriptor Format").
///
/// A product takes it, and no mere address:
///
/// ```no_run
/// # use cuda_std::{shared::dynamic_shared_address, wgmma::{F16, MatrixDescriptor, MmaAsync}};
/// # let mut sums = [0.0; 4];
/// # unsafe {
/// sums.mma_async::<F16>([0; 4], MatrixDescriptor::new(dynamic_shared_address(), 128, 256), true);
/// # }
/// ```
/// ```compile_fail,E0308
/// # use cuda_std::{shared::dynamic_shared_address, wgmma::{F16, MatrixDescriptor, MmaAsync}};
/// # let mut sums = [0.0; 4];
/// # unsafe {
/// sums.mma_async::<F16>([0; 4], dynamic_shared_address(), true);
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixDescriptor(u64);

impl MatrixDescriptor {
    /// Describes a matrix without swizzle ("Canonical Layouts").
    ///
    /// The matrix consists of core matrices, 8 rows × 16 bytes, each 128 contiguous bytes. From one to the next lie
    /// `along_k` bytes along K, and `along_rows` bytes along M or N. All are multiples of 16, `address` below 2¹⁸.
    #[inline(always)]
    pub const fn new(address: SharedAddress, along_k: u32, along_rows: u32) -> Self {
        const fn field(bytes: u32) -> u64 {
            (bytes as u64 & 0x3ffff) >> 4
        }
        Self(field(address.0) | field(along_k) << 16 | field(along_rows) << 32)
    }

    /// Describes rows of 128 bytes along K, one behind the other, with the 128-byte swizzle ("Strides"): what a tensor copy with
    /// that swizzle makes. `address` is a multiple of 1024 below 2¹⁸.
    #[inline(always)]
    pub const fn swizzled_128(address: SharedAddress) -> Self {
        const EIGHT_ROWS: u32 = 8 * 128;
        const SWIZZLE_128: u64 = 1 << 62;
        // Along K there is one swizzle span alone: that stride counts for nothing, and is 1 by convention.
        Self(Self::new(address, 16, EIGHT_ROWS).0 | SWIZZLE_128)
    }

    /// Describes the same layout `bytes` further on, a multiple of 16; the address stays below 2¹⁸.
    #[inline(always)]
    pub const fn advance(self, bytes: u32) -> Self {
        // In the low half alone, so that the compiler sees no carry out of it.
        Self(self.0 & !0xffff_ffff | (self.0 as u32).wrapping_add(bytes >> 4) as u64)
    }
}

/// The 16-bit numbers that A and B of a product consist of.
pub trait Number {
    /// Whether they are bfloat16, and not IEEE half precision.
    const IS_BF16: bool;
}

/// IEEE half precision, `.f16`.
pub struct F16;

/// bfloat16, `.bf16`.
pub struct Bf16;

impl Number for F16 {
    const IS_BF16: bool = false;
}

impl Number for Bf16 {
    const IS_BF16: bool = true;
}

/// A thread's part of D of a product with N columns: an array of N/2 registers.
///
/// Element `4·j + 2·h + i` of lane l of warp w of the warpgroup is row `16·w + l/4 + 8·h` and column `8·j + 2·(l%4) + i`
/// ("Register Fragments", D of `.m64nNk16`).
pub trait MmaAsync: Sized {
    /// Columns of B and D.
    const N: u32;

    /// D += A·B, or D = A·B without `accumulate`, summed in f32 (`wgmma.mma_async.….f32.f16.f16` or `.f32.bf16.bf16`).
    ///
    /// A is in registers: `a[2·c + h]` is row `16·w + l/4 + 8·h`, columns `8·c + 2·(l%4)` and the next, the first in the
    /// low half. B is what its descriptor says, a row for each of D's columns.
    ///
    /// # Safety
    /// See the module: the same call by the warpgroup, a [`fence`] since any of the registers was written, other than by
    /// a product of the same shape. B's bytes are initialized, visible to the asynchronous proxy, and not written until a
    /// wait has covered the product.
    unsafe fn mma_async<T: Number>(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool);

    /// As [`MmaAsync::mma_async`], with A in shared memory, a row for each of D's rows.
    ///
    /// # Safety
    /// As there; what is asked of B is asked of A too.
    unsafe fn mma_async_shared<T: Number>(&mut self, a: MatrixDescriptor, b: MatrixDescriptor, accumulate: bool);

    /// D += A·B, or D = A·B without `accumulate`, of e4m3 (`wgmma.mma_async.….f32.e4m3.e4m3`). Sums keep some 14 bits of what f32
    /// would.
    ///
    /// A is in registers: `a[2·c + h]` is row `16·w + l/4 + 8·h`, columns `16·c + 4·(l%4)` and the next three, the first in the
    /// low byte ("Register Fragments", A of `.m64nNk32`).
    ///
    /// # Safety
    /// As [`MmaAsync::mma_async`].
    unsafe fn mma_async_e4m3(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool);

    /// Keeps the compiler from moving accesses of the registers across this call. It is no instruction.
    fn settle(&mut self);
}

/// Keeps the compiler from computing anything of these registers before here: after a wait, words that were loaded before it are
/// decoded into registers that products have read until then. It is no instruction.
#[inline(always)]
pub fn settle_words(words: &mut [u32; 4]) {
    // SAFETY: no instruction.
    unsafe {
        ptx!(
            "// {0} {1} {2} {3}",
            inout(reg32) words[0], inout(reg32) words[1], inout(reg32) words[2], inout(reg32) words[3],
            options(nostack, preserves_flags)
        )
    };
}

/// A product with N columns; what its name ends with, and its last operands.
macro_rules! product {
    ($sums:ident, $a:ident, $b:ident, $accumulate:ident, $n:literal: $($register:literal)*, $types:literal, $last:literal) => {
        ptx!(
            "{{",
            ".reg .pred p;",
            "setp.ne.u32 p, {accumulate}, 0;",
            concat!(
                "wgmma.mma_async.sync.aligned.m64n", $n, $types,
                " {{{0}" $(, ", {", $register, "}")*, "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, ", $last
            ),
            "}}",
            inout(reg32) $sums[0], $(inout(reg32) $sums[$register],)*
            a0 = in(reg32) $a[0], a1 = in(reg32) $a[1], a2 = in(reg32) $a[2], a3 = in(reg32) $a[3],
            b = in(reg64) $b.0, accumulate = in(reg32) u32::from($accumulate),
            options(nostack, preserves_flags)
        )
    };
}

/// As `product!`, with A in shared memory.
macro_rules! product_of_shared {
    ($sums:ident, $a:ident, $b:ident, $accumulate:ident, $n:literal: $($register:literal)*, $types:literal) => {
        ptx!(
            "{{",
            ".reg .pred p;",
            "setp.ne.u32 p, {accumulate}, 0;",
            concat!(
                "wgmma.mma_async.sync.aligned.m64n", $n, $types,
                " {{{0}" $(, ", {", $register, "}")*, "}}, {a}, {b}, p, 1, 1, 0, 0;"
            ),
            "}}",
            inout(reg32) $sums[0], $(inout(reg32) $sums[$register],)*
            a = in(reg64) $a.0, b = in(reg64) $b.0, accumulate = in(reg32) u32::from($accumulate),
            options(nostack, preserves_flags)
        )
    };
}

macro_rules! shapes {
    ($($n:literal: $($register:literal)*;)*) => {$(
        impl MmaAsync for [f32; $n / 2] {
            const N: u32 = $n;

            /// # Safety
            /// What [`MmaAsync::mma_async`] asks.
            #[inline(always)]
            unsafe fn mma_async<T: Number>(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: what `# Safety` above asks.
                unsafe {
                    if T::IS_BF16 {
                        product!(self, a, b, accumulate, $n: $($register)*, "k16.f32.bf16.bf16", "p, 1, 1, 0;")
                    } else {
                        product!(self, a, b, accumulate, $n: $($register)*, "k16.f32.f16.f16", "p, 1, 1, 0;")
                    }
                }
            }

            /// # Safety
            /// What [`MmaAsync::mma_async_shared`] asks.
            #[inline(always)]
            unsafe fn mma_async_shared<T: Number>(&mut self, a: MatrixDescriptor, b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: what `# Safety` above asks.
                unsafe {
                    if T::IS_BF16 {
                        product_of_shared!(self, a, b, accumulate, $n: $($register)*, "k16.f32.bf16.bf16")
                    } else {
                        product_of_shared!(self, a, b, accumulate, $n: $($register)*, "k16.f32.f16.f16")
                    }
                }
            }

            /// # Safety
            /// What [`MmaAsync::mma_async`] asks.
            #[inline(always)]
            unsafe fn mma_async_e4m3(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: what `# Safety` above asks. 8-bit elements have no transposed B.
                unsafe { product!(self, a, b, accumulate, $n: $($register)*, "k32.f32.e4m3.e4m3", "p, 1, 1;") }
            }

            #[inline(always)]
            fn settle(&mut self) {
                // SAFETY: no instruction.
                unsafe {
                    ptx!(
                        concat!("// {0}" $(, " {", $register, "}")*),
                        inout(reg32) self[0], $(inout(reg32) self[$register],)* options(nostack, preserves_flags)
                    )
                };
            }
        }
    )*};
}

shapes! {
    8: 1 2 3;
    16: 1 2 3 4 5 6 7;
    24: 1 2 3 4 5 6 7 8 9 10 11;
    32: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15;
    40: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19;
    48: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23;
    56: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27;
    64: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31;
    72: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35;
    80: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39;
    88: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43;
    96: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47;
    104: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51;
    112: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55;
    120: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59;
    128: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63;
    144: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71;
    160: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78
        79;
    176: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76
        77 78 79 80 81 82 83 84 85 86 87;
    192: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78
        79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95;
    208: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76
        77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103;
    224: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78
        79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111;
    240: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76
        77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110
        111 112 113 114 115 116 117 118 119;
    256: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78
        79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111
        112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_holds_sixteenths_in_its_fields() {
        let of = |address, along_k, along_rows| MatrixDescriptor::new(SharedAddress(address), along_k, along_rows);
        assert_eq!(of(0x400, 0x80, 0x100), MatrixDescriptor(0x40 | 0x8 << 16 | 0x10 << 32));
        assert_eq!(of(0x3_fff0, 16, 16), MatrixDescriptor(0x3fff | 1 << 16 | 1 << 32));
        assert_eq!(of(0x400, 0x80, 0x100).advance(0x1000), of(0x1400, 0x80, 0x100));
        let swizzled = MatrixDescriptor::swizzled_128(SharedAddress(0x400));
        assert_eq!(swizzled, MatrixDescriptor(0x40 | 1 << 16 | 0x40 << 32 | 1 << 62));
    }
}
