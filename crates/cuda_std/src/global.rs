//! Loads and stores in global memory, by device address.
//!
//! A plain Rust pointer works too, but its accesses are generic: the hardware has to find out that they are global.
//! PTX ISA, "Data Movement and Conversion Instructions": `ld`, `ld.global.nc`, `st`; "Parallel Synchronization and Communication
//! Instructions: red".

use core::ops::Add;

use crate::ptx;

/// An address in global memory, in bytes. Adding moves so many bytes on.
///
/// ```no_run
/// # use cuda_std::global::{GlobalAddress, st_global_b16};
/// # unsafe {
/// st_global_b16(GlobalAddress::new(0x1000) + 2, 7);
/// # }
/// ```
///
/// A number cannot stand for it:
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
    /// The address that the host has passed as a number.
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
        /// Where `predicate` holds, `address` is a multiple of the value's size, and an initialized value lies there in global
        /// memory that nobody writes meanwhile, or for `nc`, that nobody writes while the kernel runs.
        #[inline(always)]
        pub unsafe fn $name(predicate: bool, address: GlobalAddress) -> $ty {
            let value: $ty;
            // SAFETY: what `# Safety` above asks.
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
    /// Loads 16 bits where `predicate` holds, else 0, without a branch (`@p ld.global.nc.b16`).
    ld_global_nc_b16_or_zero: u16 = "ld.global.nc", "b16", reg16;
    /// Loads 32 bits where `predicate` holds, else 0, without a branch (`@p ld.global.nc.b32`).
    ld_global_nc_b32_or_zero: u32 = "ld.global.nc", "b32", reg32;
    /// Loads 64 bits where `predicate` holds, else 0, without a branch (`@p ld.global.nc.b64`).
    ld_global_nc_b64_or_zero: u64 = "ld.global.nc", "b64", reg64;
    /// Loads 32 bits where `predicate` holds, else 0, without a branch (`@p ld.global.b32`).
    ld_global_b32_or_zero: u32 = "ld.global", "b32", reg32;
    /// Loads 64 bits where `predicate` holds, else 0, without a branch (`@p ld.global.b64`).
    ld_global_b64_or_zero: u64 = "ld.global", "b64", reg64;
}

/// Loads 8 bits (`ld.global.nc.u8`).
///
/// # Safety
/// A byte of global memory lies there, initialized, that nobody writes while the kernel runs.
#[inline(always)]
pub unsafe fn ld_global_nc_u8(address: GlobalAddress) -> u8 {
    let value: u16;
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "ld.global.nc.u8 {}, [{}];", out(reg16) value, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    value as u8
}

/// Loads four words where `predicate` holds, else zeros, without a branch (`@p ld.global.v4.b32`).
///
/// # Safety
/// Where `predicate` holds, `address` is a multiple of 16; 16 bytes of global memory lie there, initialized, that nobody writes
/// meanwhile.
#[inline(always)]
pub unsafe fn ld_global_v4_b32_or_zero(predicate: bool, address: GlobalAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: what `# Safety` above asks.
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
/// `address` is a multiple of 4; an initialized value lies there in global memory that no thread writes meanwhile.
#[inline(always)]
pub unsafe fn ld_global_b32(address: GlobalAddress) -> u32 {
    let value: u32;
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!("ld.global.b32 {}, [{}];", out(reg32) value, in(reg64) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads 32 bits that another grid may have written while this one ran, past the first-level cache (`ld.relaxed.gpu.global.b32`).
///
/// # Safety
/// `address` is a multiple of 4; an initialized value lies there in global memory.
#[inline(always)]
pub unsafe fn ld_relaxed_gpu_global_b32(address: GlobalAddress) -> u32 {
    let value: u32;
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "ld.relaxed.gpu.global.b32 {}, [{}];", out(reg32) value, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    value
}

/// As [`ld_relaxed_gpu_global_b32`], of 64 bits (`ld.relaxed.gpu.global.b64`).
///
/// # Safety
/// As there, at a multiple of 8.
#[inline(always)]
pub unsafe fn ld_relaxed_gpu_global_b64(address: GlobalAddress) -> u64 {
    let value: u64;
    // SAFETY: what `# Safety` above asks.
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
/// As [`ld_global_b32`], at a multiple of 8.
#[inline(always)]
pub unsafe fn ld_global_b64(address: GlobalAddress) -> u64 {
    let value: u64;
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!("ld.global.b64 {}, [{}];", out(reg64) value, in(reg64) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads four words past the first-level cache (`ld.global.cg.v4.b32`).
///
/// # Safety
/// As [`ld_global_b32`], of 16 bytes at a multiple of 16.
#[inline(always)]
pub unsafe fn ld_global_cg_v4_b32(address: GlobalAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "ld.global.cg.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    [a, b, c, d]
}

/// Adds to a number that any thread of the device may add to, and returns what it was before
/// (`atom.relaxed.gpu.global.add.u32`).
///
/// # Safety
/// `address` is a multiple of 4; an initialized number lies there in global memory, which other threads access only so.
#[inline(always)]
pub unsafe fn atom_global_add_u32(address: GlobalAddress, value: u32) -> u32 {
    let before: u32;
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "atom.relaxed.gpu.global.add.u32 {}, [{}], {};",
            out(reg32) before, in(reg64) address.0, in(reg32) value, options(nostack, preserves_flags)
        )
    };
    before
}

/// Brings what lies at `address` to the first-level cache, ahead of a load (`prefetch.global.L1`).
///
/// # Safety
/// `address` is in global memory.
#[inline(always)]
pub unsafe fn prefetch_l1(address: GlobalAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("prefetch.global.L1 [{}];", in(reg64) address.0, options(nostack, preserves_flags)) };
}

macro_rules! stores {
    ($($(#[$doc:meta])* $name:ident: $ty:ident = $instruction:literal, $reg:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `address` is a multiple of the value's size, in global memory that no other thread accesses meanwhile.
        #[inline(always)]
        pub unsafe fn $name(address: GlobalAddress, value: $ty) {
            // SAFETY: what `# Safety` above asks.
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
/// `address` is in global memory; no other thread accesses the byte meanwhile.
#[inline(always)]
pub unsafe fn st_global_b8(address: GlobalAddress, value: u8) {
    // SAFETY: what `# Safety` above asks.
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
        /// Where `predicate` holds, `address` is a multiple of the value's size, in global memory that no other thread accesses
        /// meanwhile.
        #[inline(always)]
        pub unsafe fn $name(predicate: bool, address: GlobalAddress, value: $ty) {
            // SAFETY: what `# Safety` above asks.
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
    /// Stores 16 bits where `predicate` holds, without a branch (`@p st.global.b16`).
    st_global_b16_where: u16 = "b16", reg16;
    /// Stores 32 bits where `predicate` holds, without a branch (`@p st.global.b32`).
    st_global_b32_where: u32 = "b32", reg32;
}

/// Stores four words (`st.global.v4.b32`).
///
/// # Safety
/// `address` is a multiple of 16; 16 bytes of global memory lie there that no other thread accesses meanwhile.
#[inline(always)]
pub unsafe fn st_global_v4_b32(address: GlobalAddress, [a, b, c, d]: [u32; 4]) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "st.global.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d,
            options(nostack, preserves_flags)
        )
    };
}

/// Makes the number at `address` the smaller one of itself and `value`, as one step (`red.global.min.u64`).
///
/// # Safety
/// `address` is a multiple of 8; 8 bytes of global memory lie there, which others access by such instructions alone.
#[inline(always)]
pub unsafe fn red_global_min_u64(address: GlobalAddress, value: u64) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!("red.global.min.u64 [{}], {};", in(reg64) address.0, in(reg64) value, options(nostack, preserves_flags))
    };
}
