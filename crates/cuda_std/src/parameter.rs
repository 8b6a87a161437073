//! A kernel's parameter, read at places that are known when it runs. An array in it that is indexed as one would be copied to the
//! stack.

use core::ops::Add;

use crate::ptx;

/// A place in the parameter of the kernel that runs.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterAddress(u64);

impl ParameterAddress {
    /// The place as a number.
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

/// Where the only parameter of a kernel begins, inside of that kernel.
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
/// They lie inside of the parameter, at a multiple of 8.
#[inline(always)]
pub unsafe fn ld_param_b64(address: ParameterAddress) -> u64 {
    let value: u64;
    // SAFETY: what `# Safety` above asks; a parameter never changes.
    unsafe {
        ptx!("ld.param.b64 {}, [{}];", out(reg64) value, in(reg64) address.0, options(pure, nomem, nostack, preserves_flags))
    };
    value
}

/// Loads 16 bytes (`ld.param.v2.b64`).
///
/// # Safety
/// They lie inside of the parameter, at a multiple of 16.
#[inline(always)]
pub unsafe fn ld_param_v2_b64(address: ParameterAddress) -> [u64; 2] {
    let (first, second): (u64, u64);
    // SAFETY: what `# Safety` above asks; a parameter never changes.
    unsafe {
        ptx!(
            "ld.param.v2.b64 {{{}, {}}}, [{}];",
            out(reg64) first, out(reg64) second, in(reg64) address.0,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    [first, second]
}
