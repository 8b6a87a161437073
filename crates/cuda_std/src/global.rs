//! Loads and stores in global memory, by device address.
//!
//! A plain Rust pointer works too, but its accesses are generic: the hardware must find out that the address is global.
//! PTX ISA, "Data Movement and Conversion Instructions": `ld`, `ld.global.nc`, `st`; "Parallel Synchronization and
//! Communication Instructions: red".

use core::ops::Add;

use crate::ptx;

/// An address in global memory, in bytes. `+` adds a number of bytes.
///
/// ```no_run
/// # use cuda_std::global::{GlobalAddress, st_global_b16};
/// # unsafe {
/// st_global_b16(GlobalAddress::new(0x1000) + 2, 7);
/// # }
/// ```
///
/// A plain number does not compile:
///
/// ```compile_fail,E0308
/// # use cuda_std::global::st_global_b16;
/// # unsafe {
/// st_global_b16(0x1002, 7);
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalAddress(pub(crate) u64);

impl GlobalAddress {
    /// Wraps an address that the host passed as a number.
    #[inline(always)]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }
}

impl Add<u64> for GlobalAddress {
    type Output = Self;

    #[inline(always)]
    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

macro_rules! predicated_loads {
    ($($(#[$doc:meta])* $name:ident: $ty:ident = $instruction:literal, $bits:literal, $reg:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// If `predicate` is true, `address` is a multiple of the value's size and points to an initialized value in
        /// global memory. Nobody writes it during the load; for `nc`, nobody writes it while the kernel runs.
        #[inline(always)]
        pub unsafe fn $name(predicate: bool, address: GlobalAddress) -> $ty {
            let value: $ty;
            // SAFETY: the caller guarantees an aligned, initialized value that nobody writes, if `predicate` is true.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .pred p;",
                    "setp.ne.u32 p, {predicate}, 0;",
                    concat!("mov.", $bits, " {value}, 0;"),
                    concat!("@p ", $instruction, ".", $bits, " {value}, [{address}];"),
                    "}}",
                    value = out($reg) value, predicate = in(reg32) u32::from(predicate), address = in(reg64) address.0,
                    options(readonly, nostack, preserves_flags)
                )
            };
            value
        }
    )*};
}

predicated_loads! {
    /// Loads 16 bits if `predicate` is true, else returns 0, without a branch (`@p ld.global.nc.b16`).
    ld_global_nc_b16_or_zero: u16 = "ld.global.nc", "b16", reg16;
    /// Loads 32 bits if `predicate` is true, else returns 0, without a branch (`@p ld.global.nc.b32`).
    ld_global_nc_b32_or_zero: u32 = "ld.global.nc", "b32", reg32;
    /// Loads 64 bits if `predicate` is true, else returns 0, without a branch (`@p ld.global.nc.b64`).
    ld_global_nc_b64_or_zero: u64 = "ld.global.nc", "b64", reg64;
    /// Loads 32 bits if `predicate` is true, else returns 0, without a branch (`@p ld.global.b32`).
    ld_global_b32_or_zero: u32 = "ld.global", "b32", reg32;
    /// Loads 64 bits if `predicate` is true, else returns 0, without a branch (`@p ld.global.b64`).
    ld_global_b64_or_zero: u64 = "ld.global", "b64", reg64;
}

/// Loads 8 bits (`ld.global.nc.u8`).
///
/// # Safety
/// `address` points to an initialized byte of global memory that nobody writes while the kernel runs.
#[inline(always)]
pub unsafe fn ld_global_nc_u8(address: GlobalAddress) -> u8 {
    let value: u16;
    // SAFETY: the caller guarantees an initialized byte of global memory that nobody writes while the kernel runs.
    unsafe {
        ptx!(
            "ld.global.nc.u8 {}, [{}];", out(reg16) value, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    value as u8
}

/// Loads four words if `predicate` is true, else returns zeros, without a branch (`@p ld.global.v4.b32`).
///
/// # Safety
/// If `predicate` is true, `address` is a multiple of 16 and points to 16 initialized bytes of global memory that
/// nobody writes during the load.
#[inline(always)]
pub unsafe fn ld_global_v4_b32_or_zero(predicate: bool, address: GlobalAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller guarantees 16 aligned, initialized bytes that nobody writes, if `predicate` is true.
    unsafe {
        ptx!(
            "{{",
            ".reg .pred p;",
            "setp.ne.u32 p, {predicate}, 0;",
            "mov.b32 {a}, 0;",
            "mov.b32 {b}, 0;",
            "mov.b32 {c}, 0;",
            "mov.b32 {d}, 0;",
            "@p ld.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];",
            "}}",
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            predicate = in(reg32) u32::from(predicate), address = in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    [a, b, c, d]
}

/// Loads 32 bits (`ld.global.b32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to an initialized value in global memory that nobody writes during the load.
#[inline(always)]
pub unsafe fn ld_global_b32(address: GlobalAddress) -> u32 {
    let value: u32;
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of global memory that nobody writes during the load.
    unsafe {
        ptx!("ld.global.b32 {}, [{}];", out(reg32) value, in(reg64) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads 32 bits that another grid may write while this grid runs; bypasses the L1 cache (`ld.relaxed.gpu.global.b32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to an initialized value in global memory.
#[inline(always)]
pub unsafe fn ld_relaxed_gpu_global_b32(address: GlobalAddress) -> u32 {
    let value: u32;
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of global memory.
    unsafe {
        ptx!(
            "ld.relaxed.gpu.global.b32 {}, [{}];", out(reg32) value, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    value
}

/// Like [`ld_relaxed_gpu_global_b32`], for 64 bits (`ld.relaxed.gpu.global.b64`).
///
/// # Safety
/// `address` is a multiple of 8 and points to an initialized value in global memory.
#[inline(always)]
pub unsafe fn ld_relaxed_gpu_global_b64(address: GlobalAddress) -> u64 {
    let value: u64;
    // SAFETY: the caller guarantees 8 aligned, initialized bytes of global memory.
    unsafe {
        ptx!(
            "ld.relaxed.gpu.global.b64 {}, [{}];", out(reg64) value, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    value
}

/// Loads 64 bits (`ld.global.b64`).
///
/// # Safety
/// `address` is a multiple of 8 and points to an initialized value in global memory that nobody writes during the load.
#[inline(always)]
pub unsafe fn ld_global_b64(address: GlobalAddress) -> u64 {
    let value: u64;
    // SAFETY: the caller guarantees 8 aligned, initialized bytes of global memory that nobody writes during the load.
    unsafe {
        ptx!("ld.global.b64 {}, [{}];", out(reg64) value, in(reg64) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads four words past the L1 cache (`ld.global.cg.v4.b32`).
///
/// # Safety
/// `address` is a multiple of 16 and points to 16 initialized bytes of global memory that nobody writes during the
/// load.
#[inline(always)]
pub unsafe fn ld_global_cg_v4_b32(address: GlobalAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller guarantees 16 aligned, initialized bytes of global memory that nobody writes during the load.
    unsafe {
        ptx!(
            "ld.global.cg.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    [a, b, c, d]
}

/// Adds `value` to a number that any thread of the GPU may add to, and returns the number before the addition
/// (`atom.relaxed.gpu.global.add.u32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to an initialized number in global memory. Other threads access it only by
/// atomics.
#[inline(always)]
pub unsafe fn atom_global_add_u32(address: GlobalAddress, value: u32) -> u32 {
    let before: u32;
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of global memory that other threads access only by
    // atomics.
    unsafe {
        ptx!(
            "atom.relaxed.gpu.global.add.u32 {}, [{}], {};",
            out(reg32) before, in(reg64) address.0, in(reg32) value, options(nostack, preserves_flags)
        )
    };
    before
}

/// Prefetches the cache line of `address` to the L1 cache (`prefetch.global.L1`).
///
/// # Safety
/// `address` is in global memory.
#[inline(always)]
pub unsafe fn prefetch_l1(address: GlobalAddress) {
    // SAFETY: the caller guarantees an address in global memory.
    unsafe { ptx!("prefetch.global.L1 [{}];", in(reg64) address.0, options(nostack, preserves_flags)) };
}

macro_rules! stores {
    ($($(#[$doc:meta])* $name:ident: $ty:ident = $instruction:literal, $reg:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `address` is a multiple of the value's size, in global memory that no other thread accesses during the
        /// store.
        #[inline(always)]
        pub unsafe fn $name(address: GlobalAddress, value: $ty) {
            // SAFETY: the caller guarantees aligned global memory that nobody else accesses during the store.
            unsafe {
                ptx!(
                    concat!($instruction, " [{}], {};"), in(reg64) address.0, in($reg) value,
                    options(nostack, preserves_flags)
                )
            };
        }
    )*};
}

stores! {
    /// Stores 16 bits (`st.global.b16`).
    st_global_b16: u16 = "st.global.b16", reg16;
    /// Stores 32 bits (`st.global.b32`).
    st_global_b32: u32 = "st.global.b32", reg32;
    /// Stores 64 bits (`st.global.b64`).
    st_global_b64: u64 = "st.global.b64", reg64;
}

/// Stores 8 bits (`st.global.b8`).
///
/// # Safety
/// `address` is in global memory; no other thread accesses the byte during the store.
#[inline(always)]
pub unsafe fn st_global_b8(address: GlobalAddress, value: u8) {
    // SAFETY: the caller guarantees a byte of global memory that nobody else accesses during the store.
    unsafe {
        ptx!(
            "st.global.b8 [{}], {};", in(reg64) address.0, in(reg16) u16::from(value), options(nostack, preserves_flags)
        )
    };
}

macro_rules! predicated_stores {
    ($($(#[$doc:meta])* $name:ident: $ty:ident = $bits:literal, $reg:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// If `predicate` is true, `address` is a multiple of the value's size, in global memory that no other thread
        /// accesses during the store.
        #[inline(always)]
        pub unsafe fn $name(predicate: bool, address: GlobalAddress, value: $ty) {
            // SAFETY: the caller guarantees aligned global memory that nobody else accesses, if `predicate` is true.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .pred p;",
                    "setp.ne.u32 p, {predicate}, 0;",
                    concat!("@p st.global.", $bits, " [{address}], {value};"),
                    "}}",
                    predicate = in(reg32) u32::from(predicate), address = in(reg64) address.0, value = in($reg) value,
                    options(nostack, preserves_flags)
                )
            };
        }
    )*};
}

predicated_stores! {
    /// Stores 16 bits if `predicate` is true, without a branch (`@p st.global.b16`).
    st_global_b16_where: u16 = "b16", reg16;
    /// Stores 32 bits if `predicate` is true, without a branch (`@p st.global.b32`).
    st_global_b32_where: u32 = "b32", reg32;
}

/// Stores four words (`st.global.v4.b32`).
///
/// # Safety
/// `address` is a multiple of 16 and points to 16 bytes of global memory that no other thread accesses during the
/// store.
#[inline(always)]
pub unsafe fn st_global_v4_b32(address: GlobalAddress, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller guarantees 16 aligned bytes of global memory that nobody else accesses during the store.
    unsafe {
        ptx!(
            "st.global.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d,
            options(nostack, preserves_flags)
        )
    };
}

/// Replaces the number at `address` by the minimum of itself and `value`, atomically (`red.global.min.u64`).
///
/// # Safety
/// `address` is a multiple of 8 and points to 8 bytes of global memory that other threads access only by atomics.
#[inline(always)]
pub unsafe fn red_global_min_u64(address: GlobalAddress, value: u64) {
    // SAFETY: the caller guarantees 8 aligned bytes of global memory that other threads access only by atomics.
    unsafe {
        ptx!("red.global.min.u64 [{}], {};", in(reg64) address.0, in(reg64) value, options(nostack, preserves_flags))
    };
}
