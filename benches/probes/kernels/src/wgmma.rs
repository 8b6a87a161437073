//! Products of a warpgroup on Hopper, `wgmma` of f16 ones.

use cuda_std::{
    clock::clock64,
    kernel,
    shared::dynamic_shared_address,
    thread,
    wgmma::{F16, MatrixDescriptor, MmaAsync, commit_group, fence, settle_words, wait_group},
};

use crate::{fill, write};

/// Two ones.
const ONES: u32 = 0x3c00_3c00;

/// Rows of 128 bytes of A and B.
const A_ROWS: u32 = 64;
const ROW: u32 = 128;

/// Groups of so many products, each committed and waited for; a product has one of four steps along K.
///
/// # Safety
/// The warpgroup calls it together, and `multiply` has it multiply.
#[inline(always)]
unsafe fn each_group<const PRODUCTS: u32>(groups: u32, mut multiply: impl FnMut(u32)) {
    for _ in 0..groups {
        // SAFETY: what `# Safety` above asks.
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

/// Cycles of groups of products.
///
/// # Safety
/// As [`wgmma_n8`].
#[inline(always)]
unsafe fn products<S: MmaAsync, const A_IN_REGISTERS: bool>(sums: &mut S, groups: u32, eights: u32) -> u64 {
    let shared = dynamic_shared_address();
    // SAFETY: the warpgroup is the whole block, and does everything together. Nobody writes what products read, after the block's barrier.
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
        // Behind a loop ptxas would commit an empty product, for which the wait waits too.
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

/// What an entry does.
macro_rules! entry {
    ($n:literal, $a_in_registers:literal, $groups:ident, $eights:ident, $out:ident) => {{
        // An array of so many is filled by a loop otherwise, and stays in memory.
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
        /// Products of 64 rows, 16 elements of K and so many columns, A and B in shared memory: groups of one or four times
        /// eight, each committed and waited for. Cycles; a sum.
        ///
        /// # Safety
        /// A block of 128 threads with shared memory for rows of 128 bytes: 64 and one for each column. `out` has two numbers.
        #[kernel(threads = 128)]
        pub unsafe fn $shared(groups: u32, eights: u32, out: u64) {
            // SAFETY: what `# Safety` above asks; zeros are numbers.
            unsafe { entry!($n, false, groups, eights, out) }
        }

        $(
            /// The same with A in registers.
            ///
            /// # Safety
            /// As there.
            #[kernel(threads = 128)]
            pub unsafe fn $registers(groups: u32, eights: u32, out: u64) {
                // SAFETY: what `# Safety` above asks; zeros are numbers.
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
