//! Integer instructions that Rust has no operator for.
//!
//! On a CPU the functions return the same results, so that a kernel's arithmetic can be tested there.

#[cfg(target_arch = "nvptx64")]
use crate::ptx;

/// `accumulator` plus the dot product of the four signed bytes in `a` and in `b`, wrapping
/// (`dp4a.s32.s32`; PTX ISA, "Integer Arithmetic Instructions: dp4a").
#[inline(always)]
pub fn dp4a_s32_s32(a: u32, b: u32, accumulator: i32) -> i32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let sum: i32;
        // SAFETY: arithmetic on registers.
        unsafe {
            ptx!(
                "dp4a.s32.s32 {}, {}, {}, {};", out(reg32) sum, in(reg32) a, in(reg32) b, in(reg32) accumulator,
                options(pure, nomem, nostack, preserves_flags)
            )
        };
        sum
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let products =
            a.to_le_bytes().into_iter().zip(b.to_le_bytes()).map(|(a, b)| i32::from(a as i8) * i32::from(b as i8));
        accumulator.wrapping_add(products.sum())
    }
}

/// `accumulator` plus the dot product of the four unsigned bytes in `a` and in `b`, wrapping
/// (`dp4a.u32.u32`; PTX ISA, "Integer Arithmetic Instructions: dp4a").
#[inline(always)]
pub fn dp4a_u32_u32(a: u32, b: u32, accumulator: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let sum: u32;
        // SAFETY: arithmetic on registers.
        unsafe {
            ptx!(
                "dp4a.u32.u32 {}, {}, {}, {};", out(reg32) sum, in(reg32) a, in(reg32) b, in(reg32) accumulator,
                options(pure, nomem, nostack, preserves_flags)
            )
        };
        sum
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes()).map(|(a, b)| u32::from(a) * u32::from(b));
        accumulator.wrapping_add(products.sum())
    }
}

/// Picks four bytes of `b:a`, one per nibble of `selector`. The low three bits of a nibble select one of the eight
/// bytes; if the top bit is set, the byte's sign bit is repeated eight times instead (`prmt.b32`; PTX ISA, "Data
/// Movement and Conversion Instructions: prmt").
#[inline(always)]
pub fn prmt_b32(a: u32, b: u32, selector: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let picked: u32;
        // SAFETY: arithmetic on registers.
        unsafe {
            ptx!(
                "prmt.b32 {}, {}, {}, {};", out(reg32) picked, in(reg32) a, in(reg32) b, in(reg32) selector,
                options(pure, nomem, nostack, preserves_flags)
            )
        };
        picked
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
        u32::from_le_bytes(core::array::from_fn(|position| {
            let nibble = selector >> (4 * position);
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }))
    }
}

/// Repeats one half of `value` in both halves of the result: the high half if `HIGH` (`mov.b32`, which unpacks and
/// packs halves). Unlike `prmt`, it is free as an operand of arithmetic on pairs, because those instructions can name
/// the half to use.
#[inline(always)]
pub fn half_twice_b16<const HIGH: bool>(value: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        macro_rules! twice {
            ($half:literal) => {{
                let twice: u32;
                // SAFETY: arithmetic on registers.
                unsafe {
                    ptx!(
                        "mov.b32 {{{low}, {high}}}, {value};", concat!("mov.b32 {twice}, {{{", $half, "}, {", $half, "}}};"),
                        low = out(reg16) _, high = out(reg16) _, value = in(reg32) value, twice = out(reg32) twice,
                        options(pure, nomem, nostack, preserves_flags)
                    )
                };
                twice
            }};
        }
        if HIGH { twice!("high") } else { twice!("low") }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let half = if HIGH { value >> 16 } else { value & 0xffff };
        half << 16 | half
    }
}

/// Applies a function of three bits at each of 32 places: its value for bits a, b and c is bit `4·a + 2·b + c` of
/// `TABLE` (`lop3.b32`; PTX ISA, "Logic and Shift Instructions: lop3").
#[inline(always)]
pub fn lop3_b32<const TABLE: u32>(a: u32, b: u32, c: u32) -> u32 {
    const { assert!(TABLE < 1 << 8, "TABLE must have at most 8 bits") };
    #[cfg(target_arch = "nvptx64")]
    {
        let result: u32;
        // SAFETY: arithmetic on registers.
        unsafe {
            ptx!(
                "lop3.b32 {}, {}, {}, {}, {};",
                out(reg32) result, in(reg32) a, in(reg32) b, in(reg32) c, const TABLE,
                options(pure, nomem, nostack, preserves_flags)
            )
        };
        result
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        (0..8).filter(|row| TABLE >> row & 1 == 1).fold(0, |result, row| {
            let places = |bits: u32, one: u32| if one != 0 { bits } else { !bits };
            result | places(a, row & 4) & places(b, row & 2) & places(c, row & 1)
        })
    }
}

/// Returns `value`, but hides from the compiler that it is the same number. The compiler then computes dependent values
/// where they are used, and does not keep them in registers from before a loop.
#[inline(always)]
pub fn opaque_b32(value: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let same: u32;
        // SAFETY: copies a register. It is not `pure`, so that the compiler does not move it.
        unsafe { ptx!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nomem, nostack, preserves_flags)) };
        same
    }
    #[cfg(not(target_arch = "nvptx64"))]
    value
}

/// Returns `pointer`, but hides from the compiler where it points. Memory that is accessed through it stays in memory: the
/// compiler neither moves it to registers nor forwards stores to loads through another such pointer.
#[inline(always)]
pub fn opaque_pointer<T>(pointer: *mut T) -> *mut T {
    #[cfg(target_arch = "nvptx64")]
    {
        let same: u64;
        // SAFETY: copies a register. Without `nomem`, the compiler assumes that the memory is read and written.
        unsafe {
            ptx!(
                "mov.b64 {}, {};", out(reg64) same, in(reg64) pointer.expose_provenance() as u64,
                options(nostack, preserves_flags)
            )
        };
        core::ptr::with_exposed_provenance_mut(same as usize)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lop3_follows_its_table() {
        let (a, b, c) = (0xff00_1234, 0x0ff0_5678, 0xf0f0_f0f0);
        assert_eq!(lop3_b32::<0x80>(a, b, c), a & b & c);
        assert_eq!(lop3_b32::<0x96>(a, b, c), a ^ b ^ c);
        assert_eq!(lop3_b32::<0xe4>(a, b, c), a & c | b & !c);
    }

    #[test]
    fn dp4a_multiplies_signed_bytes_and_wraps() {
        assert_eq!(dp4a_s32_s32(0x01_80_ff_7f, 0x02_80_03_7f, 10), 10 + 2 + 16384 - 3 + 16129);
        assert_eq!(dp4a_s32_s32(1, 1, i32::MAX), i32::MIN);
    }

    #[test]
    fn dp4a_multiplies_unsigned_bytes_and_wraps() {
        assert_eq!(dp4a_u32_u32(0x01_80_ff_7f, 0x02_80_03_7f, 10), 10 + 2 + 16384 + 765 + 16129);
        assert_eq!(dp4a_u32_u32(1, 1, u32::MAX), 0);
    }

    #[test]
    fn prmt_picks_bytes_and_their_signs() {
        assert_eq!(prmt_b32(0x4433_2211, 0x8877_6655, 0x7520), 0x8866_3311);
        assert_eq!(prmt_b32(0x4433_2211, 0x8877_6655, 0xf8f8), 0xff00_ff00);
    }
}
