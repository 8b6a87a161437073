//! Conversions between floating-point formats.
//!
//! Formats without a register class are passed as bits. PTX ISA, "Data Movement and Conversion
//! Instructions: cvt".

use crate::ptx;

/// Converts two f32 to f16, `low` in the low half; rounds to nearest even, overflows to ±inf (`cvt.rn.f16x2.f32`).
#[inline(always)]
pub fn cvt_rn_f16x2_f32(low: f32, high: f32) -> u32 {
    let packed: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    packed
}

/// `true` if the target architecture can convert e4m3: sm_89 and up.
pub const CONVERTS_E4M3: bool = cfg!(not(all(target_feature = "sm_80", not(target_feature = "sm_89"))));

/// Converts two e4m3 to f16, the low byte to the low half; exact (`cvt.rn.f16x2.e4m3x2`, sm_89 and up).
#[inline(always)]
pub fn cvt_rn_f16x2_e4m3x2(bytes: u16) -> u32 {
    let packed: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "cvt.rn.f16x2.e4m3x2 {}, {};", out(reg32) packed, in(reg16) bytes,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    packed
}

/// Converts two f32 to e4m3, `low` in the low byte; rounds to nearest even, larger values to ±448, NaN to 0x7f
/// (`cvt.rn.satfinite.e4m3x2.f32`).
#[inline(always)]
pub fn cvt_rn_satfinite_e4m3x2_f32(low: f32, high: f32) -> u16 {
    let packed: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "cvt.rn.satfinite.e4m3x2.f32 {}, {}, {};", out(reg16) packed, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    packed
}

/// Converts two f32 to e2m1, `low` in the low nibble; rounds to nearest even, larger values to ±6, NaN to 6
/// (`cvt.rn.satfinite.e2m1x2.f32`, sm_100f and sm_120f).
#[inline(always)]
pub fn cvt_rn_satfinite_e2m1x2_f32(low: f32, high: f32) -> u8 {
    let packed: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "{{",
            ".reg .b8 pair;",
            "cvt.rn.satfinite.e2m1x2.f32 pair, {high}, {low};",
            "cvt.u16.u8 {packed}, pair;",
            "}}",
            packed = out(reg16) packed, high = in(reg32) high, low = in(reg32) low,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    packed as u8
}

/// Converts two f32 to bf16, `low` in the low half; rounds to nearest even, overflows to ±inf (`cvt.rn.bf16x2.f32`).
#[inline(always)]
pub fn cvt_rn_bf16x2_f32(low: f32, high: f32) -> u32 {
    let packed: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    packed
}

/// Converts the bits of an f16 to f32 (`cvt.f32.f16`).
#[inline(always)]
pub fn cvt_f32_f16(bits: u16) -> f32 {
    let value: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        ptx!(
            "cvt.f32.f16 {}, {};", out(reg32) value, in(reg16) bits,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    value
}
