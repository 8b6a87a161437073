//! Floating-point instructions without a function in `core`.
//!
//! PTX ISA, "Floating Point Instructions".

use crate::{BEFORE_SM_90, ptx};

/// Returns `a · b + c`, rounded once to nearest even (`fma.rn.f32`).
#[inline(always)]
pub fn fma_rn_f32(a: f32, b: f32, c: f32) -> f32 {
    let result: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "fma.rn.f32 {}, {}, {}, {};", out(reg32) result, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    result
}

/// Returns the square root of x, rounded to nearest even (`sqrt.rn.f32`).
#[inline(always)]
pub fn sqrt_rn_f32(x: f32) -> f32 {
    let result: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!("sqrt.rn.f32 {}, {};", out(reg32) result, in(reg32) x, options(pure, nomem, nostack, preserves_flags))
    };
    result
}

/// Returns 2ˣ with a relative error of at most 2⁻²²; subnormal results become 0 (`ex2.approx.ftz.f32`).
#[inline(always)]
pub fn ex2_approx_ftz_f32(x: f32) -> f32 {
    let result: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!("ex2.approx.ftz.f32 {}, {};", out(reg32) result, in(reg32) x, options(pure, nomem, nostack, preserves_flags))
    };
    result
}

/// Returns 1/x with an error of at most one unit in the last place; subnormal results become 0 (`rcp.approx.ftz.f32`).
#[inline(always)]
pub fn rcp_approx_ftz_f32(x: f32) -> f32 {
    let result: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!("rcp.approx.ftz.f32 {}, {};", out(reg32) result, in(reg32) x, options(pure, nomem, nostack, preserves_flags))
    };
    result
}

macro_rules! of_pairs {
    ($($(#[$doc:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name([a, b]: [f32; 2], [c, d]: [f32; 2]) -> [f32; 2] {
            let (first, second): (f32, f32);
            // SAFETY: arithmetic on registers.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .b64 first, second;",
                    "mov.b64 first, {{{a}, {b}}};",
                    "mov.b64 second, {{{c}, {d}}};",
                    concat!($instruction, " first, first, second;"),
                    "mov.b64 {{{x}, {y}}}, first;",
                    "}}",
                    a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, x = out(reg32) first, y = out(reg32) second,
                    options(pure, nomem, nostack, preserves_flags)
                )
            };
            [first, second]
        }
    )*};
}

of_pairs! {
    /// Products of two pairs, each rounded once to nearest even (`mul.rn.f32x2`; sm_100 and up).
    mul_rn_f32x2 = "mul.rn.f32x2";
    /// Sums of two pairs, each rounded once to nearest even (`add.rn.f32x2`; sm_100 and up).
    add_rn_f32x2 = "add.rn.f32x2";
}

/// Products of two pairs of f16, each rounded once to nearest even; subnormal numbers are kept (`mul.rn.f16x2`).
#[inline(always)]
pub fn mul_rn_f16x2(a: u32, b: u32) -> u32 {
    let product: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "mul.rn.f16x2 {}, {}, {};", out(reg32) product, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    product
}

/// Products of two pairs of bf16, each rounded once to nearest even; subnormal numbers are kept (`mul.rn.bf16x2`, sm_90
/// and up). Before sm_90, `fma.rn.bf16x2` with an addend of -0 gives the same bits: adding -0 changes neither value nor
/// sign.
#[inline(always)]
pub fn mul_rn_bf16x2(a: u32, b: u32) -> u32 {
    if BEFORE_SM_90 {
        return fma_rn_bf16x2(a, b, 0x8000_8000);
    }
    let product: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "mul.rn.bf16x2 {}, {}, {};", out(reg32) product, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    product
}

/// Returns `a · b + c` of two triples of bf16, each rounded once to nearest even (`fma.rn.bf16x2`).
#[inline(always)]
fn fma_rn_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let sum: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "fma.rn.bf16x2 {}, {}, {}, {};", out(reg32) sum, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    sum
}
