//! The fifth-generation tensor core and its tensor memory: 128 lanes × 512 columns of 32 bits per SM.
//!
//! A [`TmemAddress`] holds the lane in its upper 16 bits and the column in its lower 16 bits.
//!
//! One thread issues `mma` and `cp`. A copy and the MMAs after it execute in order; a copy after an MMA need not wait
//! for the MMA (PTX ISA, "Pipelined tcgen05 Instructions"). A [`tcgen05_commit`] signals their completion on an
//! mbarrier. A thread that has waited on it calls [`tcgen05_fence_after_thread_sync`] before it uses tensor memory. A
//! thread that has used tensor memory calls [`tcgen05_fence_before_thread_sync`] before it signals other threads. All
//! lanes of a warp together execute instructions that end in `sync.aligned`.
//!
//! `GROUP` (`.cta_group`) is 1, or 2 for a pair of CTAs of a [`cluster`](crate::cluster) whose ranks differ only in the
//! last bit. In a pair, one thread issues for both CTAs, an address means the same place in each CTA, and one warp of
//! each CTA allocates and frees. All operations of a kernel use the same `GROUP`. PTX ISA, "TensorCore 5th Generation
//! Family Instructions"; sm_100f.

use crate::{mbarrier::Mbarrier, ptx, shared::SharedAddress};

/// Number of lanes of tensor memory.
pub const TMEM_LANES: u32 = 128;

/// Number of columns of tensor memory.
pub const TMEM_COLUMNS: u32 = 512;

/// An address in tensor memory: a lane and a column.
///
/// ```no_run
/// # use cuda_std::tcgen05::{TmemAddress, tcgen05_ld_32x32b_x8};
/// # let accumulator: TmemAddress = todo!();
/// # unsafe {
/// let sums = tcgen05_ld_32x32b_x8(accumulator.lane(32).column(8));
/// # }
/// ```
///
/// A shared address does not compile:
///
/// ```compile_fail,E0308
/// # use cuda_std::{shared::dynamic_shared_address, tcgen05::tcgen05_ld_32x32b_x8};
/// # unsafe {
/// let sums = tcgen05_ld_32x32b_x8(dynamic_shared_address());
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TmemAddress(u32);

impl TmemAddress {
    /// Wraps the address that [`tcgen05_alloc`] has written to shared memory.
    #[inline(always)]
    pub const fn new(allocated: u32) -> Self {
        Self(allocated)
    }

    /// Returns the address `columns` columns further on.
    #[inline(always)]
    pub const fn column(self, columns: u32) -> Self {
        Self(self.0 + columns)
    }

    /// Returns the address `lanes` lanes further on.
    #[inline(always)]
    pub const fn lane(self, lanes: u32) -> Self {
        Self(self.0 + (lanes << 16))
    }
}

/// Number of columns to allocate for `columns`: a power of two, at least 32.
pub const fn tmem_allocation(columns: u32) -> u32 {
    let columns = columns.next_power_of_two();
    if columns < 32 { 32 } else { columns }
}

/// Layout of a matrix's rows in shared memory ("Shared memory descriptor", swizzle mode).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixSwizzle {
    /// No swizzle: groups of 8 rows × 16 bytes, each contiguous.
    None = 0,
    /// Rows of 128 bytes; the 16-byte chunks of a row are permuted by the row number modulo 8.
    B128 = 2,
}

/// Describes a matrix in shared memory to the tensor core ("Matrix descriptors: Shared memory descriptor").
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixDescriptor(u64);

impl MatrixDescriptor {
    /// Describes a K-major matrix at `address`, a multiple of 16 below 2¹⁸. `stride`: bytes from a group of 8 rows to
    /// the next.
    #[inline(always)]
    pub const fn new(address: SharedAddress, stride: u32, swizzle: MatrixSwizzle) -> Self {
        /// Version field; constant for this generation.
        const VERSION: u64 = 1 << 46;
        /// Stride of the leading dimension in units of 16 bytes; these layouts do not use it.
        const LEADING: u64 = 1 << 16;
        Self((address.0 >> 4) as u64 | LEADING | ((stride >> 4) as u64) << 32 | VERSION | (swizzle as u64) << 61)
    }

    /// Returns the descriptor `bytes` further on. `bytes` is a multiple of 16; the address must stay below 2¹⁸ to fit
    /// its field.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self(self.0 + (bytes >> 4) as u64)
    }
}

/// Describes an MMA to the tensor core ("Matrix descriptors: Instruction descriptor").
///
/// It is a type of its own, so that it cannot be confused with a matrix descriptor:
///
/// ```compile_fail,E0308
/// # use cuda_std::tcgen05::{InstructionDescriptor, MatrixDescriptor};
/// let of_a_matrix: MatrixDescriptor = InstructionDescriptor::mxf4nvf4(128, 64);
/// ```
/// ```
/// # use cuda_std::tcgen05::InstructionDescriptor;
/// let of_an_mma: InstructionDescriptor = InstructionDescriptor::mxf4nvf4(128, 64);
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionDescriptor(u32);

impl InstructionDescriptor {
    /// Describes an MMA of `kind::mxf4nvf4` with e2m1 values, ue4m3 scales and both matrices K-major.
    ///
    /// `m` is 128 and `n` a multiple of 8 up to 256; for a pair of CTAs, `m` is 256 and `n` a multiple of 16.
    #[inline(always)]
    pub const fn mxf4nvf4(m: u32, n: u32) -> Self {
        const A_E2M1: u32 = 1 << 7;
        const B_E2M1: u32 = 1 << 10;
        Self(A_E2M1 | B_E2M1 | (n >> 3) << 17 | (m >> 7) << 27)
    }
}

/// Allocates columns of tensor memory and writes the address of the first to shared memory; waits until enough columns
/// are free (`tcgen05.alloc.sync.aligned`).
///
/// # Safety
/// All lanes of a warp call it together with the same arguments. `columns` is a power of two from 32 to 512.
/// `destination` points to 4 aligned bytes of shared memory that nobody else accesses. The columns are freed before the
/// CTA ends.
#[inline(always)]
pub unsafe fn tcgen05_alloc<const GROUP: u32>(destination: SharedAddress, columns: u32) {
    // SAFETY: the caller guarantees 4 aligned shared bytes, a valid `columns`, and that all lanes of the warp execute
    // this.
    unsafe {
        ptx!(
            "tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [{}], {};",
            in(reg32) destination.0, in(reg32) columns, group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// Gives up the right to allocate, so that another CTA may allocate (`tcgen05.relinquish_alloc_permit.sync.aligned`).
///
/// # Safety
/// All lanes of a warp call it together; no warp of the CTA allocates afterwards.
#[inline(always)]
pub unsafe fn tcgen05_relinquish_alloc_permit<const GROUP: u32>() {
    // SAFETY: the caller guarantees that all lanes of the warp execute this, and that the CTA allocates nothing
    // afterwards.
    unsafe {
        ptx!(
            "tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;", group = const GROUP,
            options(nostack, preserves_flags)
        );
    }
}

/// Frees an allocation of [`tcgen05_alloc`] (`tcgen05.dealloc.sync.aligned`).
///
/// # Safety
/// All lanes of a warp call it together with the same arguments: address and columns of an allocation that nobody
/// uses afterwards.
#[inline(always)]
pub unsafe fn tcgen05_dealloc<const GROUP: u32>(address: TmemAddress, columns: u32) {
    // SAFETY: the caller guarantees an allocation's address and size, and that all lanes of the warp execute this.
    unsafe {
        ptx!(
            "tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {}, {};", in(reg32) address.0, in(reg32) columns,
            group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// D = A·Bᵀ, plus D if `accumulate`, over 64 elements of K with a scale per 16 elements
/// (`tcgen05.mma.kind::mxf4nvf4.block_scale.block16`).
///
/// # Safety
/// * One thread calls it. `d` is an accumulator in tensor memory; `descriptor` is from
///   [`InstructionDescriptor::mxf4nvf4`].
/// * At `scale_a` and `scale_b`, each 32 rows take one column, in every quarter of the lanes.
/// * All operands belong to the CTA and are complete; nobody else accesses them until a commit has arrived.
/// * In a pair, each CTA has half of A's rows with their scales, half of D's rows, half of B's rows, and the scales of
///   all of B.
#[inline(always)]
pub unsafe fn tcgen05_mma_mxf4nvf4_block16<const GROUP: u32>(
    d: TmemAddress,
    a: MatrixDescriptor,
    b: MatrixDescriptor,
    descriptor: InstructionDescriptor,
    scale_a: TmemAddress,
    scale_b: TmemAddress,
    accumulate: bool,
) {
    // SAFETY: the caller guarantees complete operands that nobody else accesses until a commit has arrived.
    unsafe {
        ptx!(
            "{{",
            ".reg .pred p;",
            "setp.ne.u32 p, {accumulate}, 0;",
            "tcgen05.mma.cta_group::{group}.kind::mxf4nvf4.block_scale.block16 [{d}], {a}, {b}, {descriptor}, \
             [{scale_a}], [{scale_b}], p;",
            "}}",
            d = in(reg32) d.0, a = in(reg64) a.0, b = in(reg64) b.0, descriptor = in(reg32) descriptor.0,
            scale_a = in(reg32) scale_a.0, scale_b = in(reg32) scale_b.0, accumulate = in(reg32) u32::from(accumulate),
            group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// Copies 32 rows of 16 bytes from shared memory to 4 columns of every quarter of tensor memory's lanes: one tile of
/// the blocked scale layout (128 rows × 4 scales), placed as an MMA expects it (`tcgen05.cp.32x128b.warpx4`).
///
/// # Safety
/// One thread calls it. `address` is in lane 0. Nobody else accesses source or destination until a commit has arrived.
#[inline(always)]
pub unsafe fn tcgen05_cp_32x128b_warpx4<const GROUP: u32>(address: TmemAddress, source: MatrixDescriptor) {
    // SAFETY: the caller guarantees that nobody else accesses source or destination until a commit has arrived.
    unsafe {
        ptx!(
            "tcgen05.cp.cta_group::{group}.32x128b.warpx4 [{}], {};", in(reg32) address.0, in(reg64) source.0,
            group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// Arrives at a barrier once all operations that this thread issued to the tensor core are complete
/// (`tcgen05.commit.mbarrier::arrive::one`).
///
/// # Safety
/// `mbarrier` is initialized, and its current phase still expects an arrival.
#[inline(always)]
pub unsafe fn tcgen05_commit<const GROUP: u32>(mbarrier: Mbarrier) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival.
    unsafe {
        ptx!(
            "tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [{}];", in(reg32) mbarrier.0,
            group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// Like [`tcgen05_commit`], at the barriers at the same place in several CTAs of the cluster: bit r of `blocks` selects
/// the CTA of rank r (`tcgen05.commit.mbarrier::arrive::one.multicast::cluster`).
///
/// # Safety
/// In each selected CTA, the barrier is initialized, and its current phase still expects an arrival. No selected CTA
/// has ended.
#[inline(always)]
pub unsafe fn tcgen05_commit_multicast<const GROUP: u32>(mbarrier: Mbarrier, blocks: u16) {
    // SAFETY: the caller guarantees, in every selected CTA, an initialized barrier whose phase expects an arrival.
    unsafe {
        ptx!(
            "tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{}], {};",
            in(reg32) mbarrier.0, in(reg16) blocks, group = const GROUP, options(nostack, preserves_flags)
        )
    };
}

/// Orders earlier tensor-memory operations of this thread before its next arrival or barrier
/// (`tcgen05.fence::before_thread_sync`).
#[inline(always)]
pub fn tcgen05_fence_before_thread_sync() {
    // SAFETY: orders memory accesses and makes none.
    unsafe { ptx!("tcgen05.fence::before_thread_sync;", options(nostack, preserves_flags)) };
}

/// Orders later tensor-memory operations of this thread after its last wait or barrier
/// (`tcgen05.fence::after_thread_sync`).
#[inline(always)]
pub fn tcgen05_fence_after_thread_sync() {
    // SAFETY: orders memory accesses and makes none.
    unsafe { ptx!("tcgen05.fence::after_thread_sync;", options(nostack, preserves_flags)) };
}

/// Loads 8 columns of this warp's 32 lanes, one lane per thread, and waits for them
/// (`tcgen05.ld.sync.aligned.32x32b.x8`, `tcgen05.wait::ld`).
///
/// Load and wait are one function, because the registers are undefined in between.
///
/// # Safety
/// All lanes of a warp call it together with the same address. Its lane is the first lane that the warp may access:
/// 32 · (number of the warp in the CTA modulo 4). The columns are complete.
#[inline(always)]
pub unsafe fn tcgen05_ld_32x32b_x8(address: TmemAddress) -> [u32; 8] {
    let [r0, r1, r2, r3, r4, r5, r6, r7]: [u32; 8];
    // SAFETY: the caller guarantees complete columns at the warp's lanes, and that all lanes of the warp execute this.
    unsafe {
        ptx!(
            "tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{}, {}, {}, {}, {}, {}, {}, {}}}, [{}];",
            "tcgen05.wait::ld.sync.aligned;",
            out(reg32) r0, out(reg32) r1, out(reg32) r2, out(reg32) r3,
            out(reg32) r4, out(reg32) r5, out(reg32) r6, out(reg32) r7,
            in(reg32) address.0, options(nostack, preserves_flags)
        )
    };
    [r0, r1, r2, r3, r4, r5, r6, r7]
}

/// Does two [`tcgen05_ld_32x32b_x8`] with one wait.
///
/// # Safety
/// All lanes of a warp call it together with the same addresses. The lane of each address is the first lane that the
/// warp may access: 32 · (number of the warp in the CTA modulo 4). The columns are complete.
#[inline(always)]
pub unsafe fn tcgen05_ld_32x32b_x8_twice(addresses: [TmemAddress; 2]) -> [[u32; 8]; 2] {
    let [r0, r1, r2, r3, r4, r5, r6, r7]: [u32; 8];
    let [s0, s1, s2, s3, s4, s5, s6, s7]: [u32; 8];
    // SAFETY: the caller guarantees complete columns at the warp's lanes, and that all lanes of the warp execute this.
    unsafe {
        ptx!(
            "tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{}, {}, {}, {}, {}, {}, {}, {}}}, [{first}];",
            "tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{}, {}, {}, {}, {}, {}, {}, {}}}, [{second}];",
            "tcgen05.wait::ld.sync.aligned;",
            out(reg32) r0, out(reg32) r1, out(reg32) r2, out(reg32) r3,
            out(reg32) r4, out(reg32) r5, out(reg32) r6, out(reg32) r7,
            out(reg32) s0, out(reg32) s1, out(reg32) s2, out(reg32) s3,
            out(reg32) s4, out(reg32) s5, out(reg32) s6, out(reg32) s7,
            first = in(reg32) addresses[0].0, second = in(reg32) addresses[1].0,
            options(nostack, preserves_flags)
        )
    };
    [[r0, r1, r2, r3, r4, r5, r6, r7], [s0, s1, s2, s3, s4, s5, s6, s7]]
}

macro_rules! accesses {
    ($($(#[$doc:meta])* $load:ident, $store:ident, $count:literal = $shape:literal: $($register:literal)*;)*) => {$(
        #[doc = concat!("Loads ", $count, " registers per thread and waits for them (`tcgen05.ld.sync.aligned.", $shape, "`, `tcgen05.wait::ld`).")]
        $(#[$doc])*
        ///
        /// # Safety
        /// All lanes of a warp call it together with the same address. Its lane is the first lane that the warp may
        /// access: 32 · (number of the warp in the CTA modulo 4). The columns are complete.
        #[inline(always)]
        pub unsafe fn $load(address: TmemAddress) -> [u32; $count] {
            let mut values = [0; $count];
            // SAFETY: the caller guarantees complete columns at the warp's lanes, and that all lanes of the warp
            // execute this.
            unsafe {
                ptx!(
                    concat!("tcgen05.ld.sync.aligned.", $shape, ".b32 {{{0}" $(, ", {", $register, "}")*, "}}, [{address}];"),
                    "tcgen05.wait::ld.sync.aligned;",
                    out(reg32) values[0], $(out(reg32) values[$register],)*
                    address = in(reg32) address.0, options(nostack, preserves_flags)
                )
            };
            values
        }

        #[doc = concat!("Stores registers in the layout of [`", stringify!($load), "`] and waits until they are stored")]
        #[doc = concat!("(`tcgen05.st.sync.aligned.", $shape, "`, `tcgen05.wait::st`).")]
        ///
        /// # Safety
        /// All lanes of a warp call it together with the same address. Its lane is the first lane that the warp may
        /// access: 32 · (number of the warp in the CTA modulo 4). Nobody else accesses the columns.
        #[inline(always)]
        pub unsafe fn $store(address: TmemAddress, values: [u32; $count]) {
            // SAFETY: the caller guarantees columns that nobody else accesses, and that all lanes of the warp execute
            // this.
            unsafe {
                ptx!(
                    concat!("tcgen05.st.sync.aligned.", $shape, ".b32 [{address}], {{{0}" $(, ", {", $register, "}")*, "}};"),
                    "tcgen05.wait::st.sync.aligned;",
                    in(reg32) values[0], $(in(reg32) values[$register],)*
                    address = in(reg32) address.0, options(nostack, preserves_flags)
                )
            };
        }
    )*};
}

accesses! {
    /// One lane per thread, one column per register.
    tcgen05_ld_32x32b_x16, tcgen05_st_32x32b_x16, 16 = "32x32b.x16": 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15;
    /// One lane per thread, one column per register.
    tcgen05_ld_32x32b_x32, tcgen05_st_32x32b_x32, 32 = "32x32b.x32":
        1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31;
    /// One lane per thread, one column per register.
    tcgen05_ld_32x32b_x64, tcgen05_st_32x32b_x64, 64 = "32x32b.x64":
        1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43
        44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63;
    /// 16 lanes, four threads per lane: two of every 8 columns per thread ("Matrix fragments", `.16x256b`).
    tcgen05_ld_16x256b_x8, tcgen05_st_16x256b_x8, 32 = "16x256b.x8":
        1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31;
}
