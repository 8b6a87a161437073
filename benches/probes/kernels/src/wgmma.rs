//! Probes of a warpgroup's products on Hopper: `wgmma` of f16 ones.

use cuda_std::{
    clock::clock64,
    kernel,
    shared::dynamic_shared_address,
    thread,
    wgmma::{F16, MatrixDescriptor, MmaAsync, commit_group, fence, settle_words, wait_group},
};

use crate::{fill, write};

/// Two f16 ones.
const ONES: u32 = 0x3c00_3c00;

/// Number of 128-byte rows of A.
const A_ROWS: u32 = 64;
const ROW: u32 = 128;

/// Runs groups of `PRODUCTS` products, and commits and waits for each group. A product uses one of four steps along K.
///
/// # Safety
/// All threads of the warpgroup call it together, and `multiply` is a product of the warpgroup.
#[inline(always)]
unsafe fn each_group<const PRODUCTS: u32>(groups: u32, mut multiply: impl FnMut(u32)) {
    for _ in 0..groups {
        // SAFETY: the caller guarantees that the warpgroup calls it together.
        unsafe {
            fence();
            for n in 0..PRODUCTS {
                multiply(n % 4);
            }
            commit_group();
            wait_group::<0>();
        }
    }
}

/// Returns the cycles of groups of products.
///
/// # Safety
/// The requirements of [`wgmma_n8`].
#[inline(always)]
unsafe fn products<S: MmaAsync, const A_IN_REGISTERS: bool>(sums: &mut S, groups: u32, eights: u32) -> u64 {
    let shared = dynamic_shared_address();
    // SAFETY: the warpgroup is the whole CTA, and runs everything together. After the CTA's barrier nothing writes the
    // products' operands.
    unsafe {
        fill(shared, (A_ROWS + S::N) * ROW, ONES);
        thread::sync_threads();
        let (a, b) = (MatrixDescriptor::swizzled_128(shared), MatrixDescriptor::swizzled_128(shared + A_ROWS * ROW));
        let mut ones = [ONES; 4];
        settle_words(&mut ones);
        sums.settle();
        let multiply = |sums: &mut S, k: u32| match A_IN_REGISTERS {
            true => sums.mma_async::<F16>(ones, b.advance(k * 32), true),
            false => sums.mma_async_shared::<F16>(a.advance(k * 32), b.advance(k * 32), true),
        };
        let start = clock64();
        // Two loops with constant trip counts: after a variable loop ptxas would commit an empty product and wait for
        // it.
        if eights == 1 {
            each_group::<8>(groups, |k| multiply(sums, k));
        } else {
            each_group::<32>(groups, |k| multiply(sums, k));
        }
        let cycles = clock64() - start;
        sums.settle();
        cycles
    }
}

/// Body of an entry.
macro_rules! entry {
    ($n:literal, $a_in_registers:literal, $groups:ident, $eights:ident, $out:ident) => {{
        // `zeroed`, because an array literal of this size is filled by a loop and stays in memory.
        let mut sums: [f32; $n / 2] = core::mem::zeroed();
        let cycles = products::<_, $a_in_registers>(&mut sums, $groups, $eights);
        if thread::thread_idx_x() == 0 {
            write($out, 0, cycles);
            write($out, 1, sums[0] as u64);
        }
    }};
}

macro_rules! entries {
    ($($n:literal: $shared:ident $(, $registers:ident)?;)*) => {$(
        /// Products of 64 rows, 16 elements of K and N columns, with A and B in shared memory, in groups of 8 ·
        /// `eights` products. Each group is committed and waited for. Results: cycles; a sum.
        ///
        /// # Safety
        /// The CTA has 128 threads and shared memory for 64 + N rows of 128 bytes. `out` has room for two numbers.
        #[kernel(threads = 128)]
        pub unsafe fn $shared(groups: u32, eights: u32, out: u64) {
            // SAFETY: the caller guarantees the CTA, its shared memory and `out`. Zero bits are valid f32.
            unsafe { entry!($n, false, groups, eights, out) }
        }

        $(
            /// The same with A in registers.
            ///
            /// # Safety
            /// The requirements of the kernel with A in shared memory.
            #[kernel(threads = 128)]
            pub unsafe fn $registers(groups: u32, eights: u32, out: u64) {
                // SAFETY: the caller guarantees the CTA, its shared memory and `out`. Zero bits are valid f32.
                unsafe { entry!($n, true, groups, eights, out) }
            }
        )?
    )*};
}

entries! {
    8: wgmma_n8, wgmma_rs_n8;
    16: wgmma_n16, wgmma_rs_n16;
    32: wgmma_n32, wgmma_rs_n32;
    64: wgmma_n64, wgmma_rs_n64;
    128: wgmma_n128, wgmma_rs_n128;
    192: wgmma_n192;
    256: wgmma_n256;
}
