//! MMA instructions of a warpgroup: 128 neighboring threads, starting at a multiple of 128, that all execute the same
//! call (sm_90a only).
//!
//! An MMA runs asynchronously. Its accumulators may be read after [`wait_group`] and [`MmaAsync::settle`]. Until then,
//! only MMAs of the same shape may use them, and the registers of A must not change. PTX ISA, "Asynchronous Warpgroup
//! Level Matrix Multiply-Accumulate Instructions".

use crate::{ptx, shared::SharedAddress};

/// Number of threads of a warpgroup.
pub const WARPGROUP_SIZE: u32 = 128;

/// Number of rows of A and D.
pub const M: u32 = 64;

/// Number of 16-bit columns of A and B: the length of one MMA's dot products.
pub const K: u32 = 16;

/// Orders earlier register writes of the warpgroup before its later MMAs (`wgmma.fence`).
///
/// # Safety
/// All threads of the warpgroup make the same call.
#[inline(always)]
pub unsafe fn fence() {
    // SAFETY: the caller guarantees that the whole warpgroup executes this.
    unsafe { ptx!("wgmma.fence.sync.aligned;", options(nostack, preserves_flags)) };
}

/// Puts the MMAs since the last group into a new group (`wgmma.commit_group`).
///
/// # Safety
/// All threads of the warpgroup make the same call.
#[inline(always)]
pub unsafe fn commit_group() {
    // SAFETY: the caller guarantees that the whole warpgroup executes this.
    unsafe { ptx!("wgmma.commit_group.sync.aligned;", options(nostack, preserves_flags)) };
}

/// Waits until all groups but the newest `PENDING` are complete (`wgmma.wait_group`).
///
/// # Safety
/// All threads of the warpgroup make the same call.
#[inline(always)]
pub unsafe fn wait_group<const PENDING: u32>() {
    // SAFETY: the caller guarantees that the whole warpgroup executes this.
    unsafe { ptx!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack, preserves_flags)) };
}

/// Describes a matrix in shared memory to the tensor core ("Matrix Descriptor Format").
///
/// An MMA takes a descriptor. A bare address does not compile:
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
    /// The matrix consists of core matrices: 8 rows × 16 bytes, stored as 128 contiguous bytes. Adjacent core matrices
    /// are `along_k` bytes apart along K, and `along_rows` bytes apart along M or N. All are multiples of 16; `address`
    /// is below 2¹⁸.
    #[inline(always)]
    pub const fn new(address: SharedAddress, along_k: u32, along_rows: u32) -> Self {
        const fn field(bytes: u32) -> u64 {
            (bytes as u64 & 0x3ffff) >> 4
        }
        Self(field(address.0) | field(along_k) << 16 | field(along_rows) << 32)
    }

    /// Describes contiguous rows of 128 bytes along K with the 128-byte swizzle ("Strides"): the layout that a tensor
    /// copy with that swizzle writes. `address` is a multiple of 1024 below 2¹⁸.
    #[inline(always)]
    pub const fn swizzled_128(address: SharedAddress) -> Self {
        const EIGHT_ROWS: u32 = 8 * 128;
        const SWIZZLE_128: u64 = 1 << 62;
        // Along K there is only one swizzle span, so the hardware ignores that stride; by convention its field is 1.
        Self(Self::new(address, 16, EIGHT_ROWS).0 | SWIZZLE_128)
    }

    /// Describes the same layout `bytes` further on. `bytes` is a multiple of 16; the address stays below 2¹⁸.
    #[inline(always)]
    pub const fn advance(self, bytes: u32) -> Self {
        // Adds to the low half only, so that the compiler sees no carry out of it.
        Self(self.0 & !0xffff_ffff | (self.0 as u32).wrapping_add(bytes >> 4) as u64)
    }
}

/// The 16-bit number type of A and B.
pub trait Number {
    /// `true` for bfloat16, `false` for IEEE half precision.
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

/// A thread's fragment of D of an MMA with N columns: an array of N/2 registers.
///
/// Element `4·j + 2·h + i` of lane l of warp w of the warpgroup is at row `16·w + l/4 + 8·h`, column `8·j + 2·(l%4) +
/// i` ("Register Fragments", D of `.m64nNk16`).
pub trait MmaAsync: Sized {
    /// Number of columns of B and D.
    const N: u32;

    /// D += A·B, or D = A·B if `accumulate` is false; sums are f32 (`wgmma.mma_async.….f32.f16.f16` or
    /// `.f32.bf16.bf16`).
    ///
    /// A is in registers: `a[2·c + h]` holds columns `8·c + 2·(l%4)` (low half) and the next column of row `16·w + l/4
    /// + 8·h`. B is in shared memory, as `b` describes it, with one row per column of D.
    ///
    /// # Safety
    /// All threads of the warpgroup make the same call. A [`fence`] follows the last write of `self` and `a`, except
    /// writes by MMAs of the same shape. B's bytes are initialized and visible to the asynchronous proxy, and nobody
    /// writes them until a wait has covered the MMA.
    unsafe fn mma_async<T: Number>(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool);

    /// Like [`MmaAsync::mma_async`], with A in shared memory, one row per row of D.
    ///
    /// # Safety
    /// All threads of the warpgroup make the same call. A [`fence`] follows the last write of `self`, except writes by
    /// MMAs of the same shape. The bytes of A and B are initialized and visible to the asynchronous proxy, and nobody
    /// writes them until a wait has covered the MMA.
    unsafe fn mma_async_shared<T: Number>(&mut self, a: MatrixDescriptor, b: MatrixDescriptor, accumulate: bool);

    /// D += A·B, or D = A·B if `accumulate` is false, of e4m3 (`wgmma.mma_async.….f32.e4m3.e4m3`). Sums keep about 14
    /// bits of the f32 precision.
    ///
    /// A is in registers: `a[2·c + h]` holds columns `16·c + 4·(l%4)` (low byte) and the next three columns of row
    /// `16·w + l/4 + 8·h` ("Register Fragments", A of `.m64nNk32`).
    ///
    /// # Safety
    /// All threads of the warpgroup make the same call. A [`fence`] follows the last write of `self` and `a`, except
    /// writes by MMAs of the same shape. B's bytes are initialized and visible to the asynchronous proxy, and nobody
    /// writes them until a wait has covered the MMA.
    unsafe fn mma_async_e4m3(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool);

    /// Keeps the compiler from moving accesses of these registers across this call. It emits no instruction.
    fn settle(&mut self);
}

/// Keeps the compiler from computing with these words before this call. It emits no instruction. After a wait, words
/// loaded before the wait are decoded into registers that MMAs have read until then.
#[inline(always)]
pub fn settle_words(words: &mut [u32; 4]) {
    // SAFETY: emits no instruction.
    unsafe {
        ptx!(
            "// {0} {1} {2} {3}",
            inout(reg32) words[0], inout(reg32) words[1], inout(reg32) words[2], inout(reg32) words[3],
            options(nostack, preserves_flags)
        )
    };
}

/// An MMA with N columns; `$types` ends the instruction's name, and `$last` holds its last operands.
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

/// Like `product!`, with A in shared memory.
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
            /// The caller meets the conditions of [`MmaAsync::mma_async`].
            #[inline(always)]
            unsafe fn mma_async<T: Number>(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: the caller guarantees fenced registers and a visible B that stays unchanged, in the whole
                // warpgroup.
                unsafe {
                    if T::IS_BF16 {
                        product!(self, a, b, accumulate, $n: $($register)*, "k16.f32.bf16.bf16", "p, 1, 1, 0;")
                    } else {
                        product!(self, a, b, accumulate, $n: $($register)*, "k16.f32.f16.f16", "p, 1, 1, 0;")
                    }
                }
            }

            /// # Safety
            /// The caller meets the conditions of [`MmaAsync::mma_async_shared`].
            #[inline(always)]
            unsafe fn mma_async_shared<T: Number>(&mut self, a: MatrixDescriptor, b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: the caller guarantees fenced registers and visible A and B that stay unchanged, in the whole
                // warpgroup.
                unsafe {
                    if T::IS_BF16 {
                        product_of_shared!(self, a, b, accumulate, $n: $($register)*, "k16.f32.bf16.bf16")
                    } else {
                        product_of_shared!(self, a, b, accumulate, $n: $($register)*, "k16.f32.f16.f16")
                    }
                }
            }

            /// # Safety
            /// The caller meets the conditions of [`MmaAsync::mma_async`].
            #[inline(always)]
            unsafe fn mma_async_e4m3(&mut self, a: [u32; 4], b: MatrixDescriptor, accumulate: bool) {
                // SAFETY: the caller guarantees fenced registers and a visible B that stays unchanged, in the whole
                // warpgroup. The instruction has no operand to transpose B, because its elements have 8 bits.
                unsafe { product!(self, a, b, accumulate, $n: $($register)*, "k32.f32.e4m3.e4m3", "p, 1, 1;") }
            }

            #[inline(always)]
            fn settle(&mut self) {
                // SAFETY: emits no instruction.
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
    fn descriptor_fields_count_units_of_16_bytes() {
        let of = |address, along_k, along_rows| MatrixDescriptor::new(SharedAddress(address), along_k, along_rows);
        assert_eq!(of(0x400, 0x80, 0x100), MatrixDescriptor(0x40 | 0x8 << 16 | 0x10 << 32));
        assert_eq!(of(0x3_fff0, 16, 16), MatrixDescriptor(0x3fff | 1 << 16 | 1 << 32));
        assert_eq!(of(0x400, 0x80, 0x100).advance(0x1000), of(0x1400, 0x80, 0x100));
        let swizzled = MatrixDescriptor::swizzled_128(SharedAddress(0x400));
        assert_eq!(swizzled, MatrixDescriptor(0x40 | 1 << 16 | 0x40 << 32 | 1 << 62));
    }
}
