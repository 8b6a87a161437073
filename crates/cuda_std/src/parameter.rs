//! Loads from a kernel's parameter at offsets that are computed at run time. Indexing an array in the parameter with
//! Rust code would copy the array to the stack.

use core::ops::Add;

use crate::ptx;

/// An address in the parameter of the running kernel.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterAddress(u64);

impl ParameterAddress {
    /// Wraps an address given as a number.
    #[doc(hidden)]
    #[inline(always)]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }
}

impl Add<u32> for ParameterAddress {
    type Output = Self;

    #[inline(always)]
    fn add(self, bytes: u32) -> Self {
        Self(self.0 + u64::from(bytes))
    }
}

/// Returns the address of the kernel's only parameter. Use it inside of that kernel.
#[macro_export]
macro_rules! parameter_address {
    ($kernel:ident) => {{
        let address: u64;
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::asm!(
            concat!("mov.b64 {0}, ", stringify!($kernel), "_param_0;"),
            out(reg64) address, options(pure, nomem, nostack, preserves_flags)
        );
        #[cfg(not(target_arch = "nvptx64"))]
        {
            address = 0;
        }
        $crate::parameter::ParameterAddress::new(address)
    }};
}

/// Loads 8 bytes (`ld.param.b64`).
///
/// # Safety
/// The 8 bytes lie inside of the parameter, at a multiple of 8.
#[inline(always)]
pub unsafe fn ld_param_b64(address: ParameterAddress) -> u64 {
    let value: u64;
    // SAFETY: the caller guarantees 8 aligned bytes inside of the parameter; a parameter never changes.
    unsafe {
        ptx!("ld.param.b64 {}, [{}];", out(reg64) value, in(reg64) address.0, options(pure, nomem, nostack, preserves_flags))
    };
    value
}

/// Loads 16 bytes (`ld.param.v2.b64`).
///
/// # Safety
/// The 16 bytes lie inside of the parameter, at a multiple of 16.
#[inline(always)]
pub unsafe fn ld_param_v2_b64(address: ParameterAddress) -> [u64; 2] {
    let (first, second): (u64, u64);
    // SAFETY: the caller guarantees 16 aligned bytes inside of the parameter; a parameter never changes.
    unsafe {
        ptx!(
            "ld.param.v2.b64 {{{}, {}}}, [{}];",
            out(reg64) first, out(reg64) second, in(reg64) address.0,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    [first, second]
}
