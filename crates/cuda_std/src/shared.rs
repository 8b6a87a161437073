//! Shared memory: the dynamic shared memory of a CTA, and loads and stores by shared address.
//!
//! PTX ISA, "Data Movement and Conversion Instructions": `ld`, `st`, `cvta`; "Parallel Synchronization and
//! Communication Instructions: atom".

use core::ops::Add;

use crate::ptx;

/// An address in the shared memory of this CTA (`.shared::cta`), in bytes.
///
/// Every such address comes from [`dynamic_shared_address`]. `+` adds a number of bytes.
///
/// ```no_run
/// # use cuda_std::shared::{dynamic_shared_address, ld_shared_b32};
/// # unsafe {
/// let word = ld_shared_b32(dynamic_shared_address() + 4);
/// # }
/// ```
///
/// A global address does not compile:
///
/// ```compile_fail,E0308
/// # use cuda_std::{global::GlobalAddress, shared::ld_shared_b32};
/// # unsafe {
/// let word = ld_shared_b32(GlobalAddress::new(0x1000));
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedAddress(pub(crate) u32);

impl Add<u32> for SharedAddress {
    type Output = Self;

    #[inline(always)]
    fn add(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

/// Alignment of the dynamic shared memory in bytes, as swizzled tensor tiles need it.
pub const DYNAMIC_ALIGNMENT: u32 = 1024;

#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align {} .b8 dynamic_shared[];", const DYNAMIC_ALIGNMENT);

/// Address of the dynamic shared memory; the launch sets its size.
#[inline(always)]
pub fn dynamic_shared_address() -> SharedAddress {
    let address: u32;
    // SAFETY: takes the address of the variable declared above.
    unsafe { ptx!("mov.u32 {}, dynamic_shared;", out(reg32) address, options(pure, nomem, nostack, preserves_flags)) };
    SharedAddress(address)
}

/// Returns the dynamic shared memory as a generic pointer, the same for all threads of a CTA.
#[inline(always)]
pub fn dynamic_shared_mem<T>() -> *mut T {
    const { assert!(align_of::<T>() <= DYNAMIC_ALIGNMENT as usize) };
    let pointer: u64;
    // SAFETY: converts an address and accesses no memory.
    unsafe {
        ptx!(
            "cvta.shared.u64 {}, {};", out(reg64) pointer, in(reg64) u64::from(dynamic_shared_address().0),
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    pointer as *mut T
}

/// Loads four words (`ld.shared.v4.b32`).
///
/// # Safety
/// `address` is a multiple of 16 and points to 16 initialized bytes of the CTA's shared memory. No thread writes them
/// during the load.
#[inline(always)]
pub unsafe fn ld_shared_v4_b32(address: SharedAddress) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller guarantees 16 aligned, initialized bytes of shared memory that nobody writes during the load.
    unsafe {
        ptx!(
            "ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address.0,
            options(readonly, nostack, preserves_flags)
        )
    };
    [a, b, c, d]
}

/// Loads two words (`ld.shared.v2.b32`).
///
/// # Safety
/// `address` is a multiple of 8 and points to 8 initialized bytes of the CTA's shared memory. No thread writes them
/// during the load.
#[inline(always)]
pub unsafe fn ld_shared_v2_b32(address: SharedAddress) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: the caller guarantees 8 aligned, initialized bytes of shared memory that nobody writes during the load.
    unsafe {
        ptx!(
            "ld.shared.v2.b32 {{{}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, in(reg32) address.0, options(readonly, nostack, preserves_flags)
        )
    };
    [a, b]
}

/// Loads 16 bits (`ld.shared.b16`).
///
/// # Safety
/// `address` is a multiple of 2 and points to 2 initialized bytes of the CTA's shared memory. No thread writes them
/// during the load.
#[inline(always)]
pub unsafe fn ld_shared_b16(address: SharedAddress) -> u16 {
    let value: u16;
    // SAFETY: the caller guarantees 2 aligned, initialized bytes of shared memory that nobody writes during the load.
    unsafe {
        ptx!("ld.shared.b16 {}, [{}];", out(reg16) value, in(reg32) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads a float (`ld.shared.f32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to 4 initialized bytes of the CTA's shared memory. No thread writes them
/// during the load.
#[inline(always)]
pub unsafe fn ld_shared_f32(address: SharedAddress) -> f32 {
    let value: f32;
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of shared memory that nobody writes during the load.
    unsafe {
        ptx!("ld.shared.f32 {}, [{}];", out(reg32) value, in(reg32) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Loads a word (`ld.shared.b32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to 4 initialized bytes of the CTA's shared memory. No thread writes them
/// during the load.
#[inline(always)]
pub unsafe fn ld_shared_b32(address: SharedAddress) -> u32 {
    let value: u32;
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of shared memory that nobody writes during the load.
    unsafe {
        ptx!("ld.shared.b32 {}, [{}];", out(reg32) value, in(reg32) address.0, options(readonly, nostack, preserves_flags))
    };
    value
}

/// Stores four words (`st.shared.v4.b32`).
///
/// # Safety
/// `address` is a multiple of 16 and points to 16 bytes of the CTA's shared memory. No other thread accesses them
/// during the store.
#[inline(always)]
pub unsafe fn st_shared_v4_b32(address: SharedAddress, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller guarantees 16 aligned bytes of shared memory that nobody else accesses during the store.
    unsafe {
        ptx!(
            "st.shared.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d,
            options(nostack, preserves_flags)
        )
    };
}

/// Stores a float (`st.shared.f32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to 4 bytes of the CTA's shared memory. No other thread accesses them during
/// the store.
#[inline(always)]
pub unsafe fn st_shared_f32(address: SharedAddress, value: f32) {
    // SAFETY: the caller guarantees 4 aligned bytes of shared memory that nobody else accesses during the store.
    unsafe { ptx!("st.shared.f32 [{}], {};", in(reg32) address.0, in(reg32) value, options(nostack, preserves_flags)) };
}

/// Stores a word (`st.shared.b32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to 4 bytes of the CTA's shared memory. No other thread accesses them during
/// the store.
#[inline(always)]
pub unsafe fn st_shared_b32(address: SharedAddress, value: u32) {
    // SAFETY: the caller guarantees 4 aligned bytes of shared memory that nobody else accesses during the store.
    unsafe { ptx!("st.shared.b32 [{}], {};", in(reg32) address.0, in(reg32) value, options(nostack, preserves_flags)) };
}

/// Stores 16 bits (`st.shared.b16`).
///
/// # Safety
/// `address` is a multiple of 2 and points to 2 bytes of the CTA's shared memory. No other thread accesses them during
/// the store.
#[inline(always)]
pub unsafe fn st_shared_b16(address: SharedAddress, value: u16) {
    // SAFETY: the caller guarantees 2 aligned bytes of shared memory that nobody else accesses during the store.
    unsafe { ptx!("st.shared.b16 [{}], {};", in(reg32) address.0, in(reg16) value, options(nostack, preserves_flags)) };
}

/// Adds `value` to a number that any thread of the CTA may add to (`red.relaxed.cta.shared.add.u32`).
///
/// # Safety
/// `address` is a multiple of 4 and points to an initialized number in the CTA's shared memory. Other threads access it
/// only by atomics.
#[inline(always)]
pub unsafe fn red_shared_add_u32(address: SharedAddress, value: u32) {
    // SAFETY: the caller guarantees 4 aligned, initialized bytes of shared memory that other threads access only by
    // atomics.
    unsafe {
        ptx!(
            "red.relaxed.cta.shared.add.u32 [{}], {};",
            in(reg32) address.0, in(reg32) value, options(nostack, preserves_flags)
        )
    };
}
