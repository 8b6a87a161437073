//! The instruction sets that the backend has kernels for, and their kernels.

use super::kernel::{Kernel, Simd};
use super::layout::{Bf16, Bf16ByParity, Bits16, Nvfp4};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16};

/// An instruction set that the backend has a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AMX for bf16 tokens, and AVX-512 F, BW and VNNI for all other tokens.
    AmxBf16,
    /// x86-64 with AVX-512 BF16 for bf16 tokens, and AVX-512 F, BW and VNNI for all other tokens.
    Avx512Bf16,
    /// x86-64 with AVX-512 F, BW and VNNI.
    Avx512Vnni,
    /// x86-64 with AVX2, FMA, F16C and AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AArch64 with matrix products of bytes, `smmla`.
    NeonI8mm,
    /// AArch64 with dot products of bytes, `sdot`.
    NeonDot,
    /// Any CPU.
    Portable,
}

impl Isa {
    /// All instruction sets, the fastest first.
    pub const ALL: [Self; 8] = [
        Self::AmxBf16,
        Self::Avx512Bf16,
        Self::Avx512Vnni,
        Self::AvxVnni,
        Self::Avx2,
        Self::NeonI8mm,
        Self::NeonDot,
        Self::Portable,
    ];

    /// Name of the instruction set, which is also the name of its kernel.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AmxBf16 => "amx-bf16",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Avx512Vnni => "avx512-vnni",
            Self::AvxVnni => "avx-vnni",
            Self::Avx2 => "avx2",
            Self::NeonI8mm => "neon-i8mm",
            Self::NeonDot => "neon-dot",
            Self::Portable => "portable",
        }
    }

    /// Instruction set that multiplies tokens of other types than bf16.
    pub(super) fn of_others(self) -> Self {
        match self {
            Self::AmxBf16 | Self::Avx512Bf16 => Self::Avx512Vnni,
            isa => isa,
        }
    }

    /// Returns the kernels for the instruction set, or `None` if this machine lacks the instructions.
    pub(super) fn kernels(self) -> Option<Kernels> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => {
                let (amx, rest) = (amx::Amx::detect()?, Self::Avx512Vnni.kernels()?);
                let bf16 = Kernel16::Bf16(Box::new(move |tile, scratch| amx.compute(tile, scratch)));
                Some(Kernels { bf16: Some(bf16), ..rest })
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                let (simd, rest) = (avx512_bf16::Avx512Bf16::detect()?, Self::Avx512Vnni.kernels()?);
                let bf16 = Kernel16::Bf16ByParity(Box::new(move |tile, scratch| simd.compute(tile, scratch)));
                Some(Kernels { bf16: Some(bf16), ..rest })
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => avx512::Avx512::detect().map(Kernels::new),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => avx2::Avx2::<true>::detect().map(Kernels::new),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::<false>::detect().map(Kernels::new),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => neon::Neon::<true>::detect().map(Kernels::new),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => neon::Neon::<false>::detect().map(Kernels::new),
            #[cfg(not(target_arch = "x86_64"))]
            Self::AmxBf16 | Self::Avx512Bf16 | Self::Avx512Vnni | Self::AvxVnni | Self::Avx2 => None,
            #[cfg(not(target_arch = "aarch64"))]
            Self::NeonI8mm | Self::NeonDot => None,
            Self::Portable => Some(Kernels::new(portable::Portable)),
        }
    }
}

/// Kernels of an instruction set.
pub(super) struct Kernels {
    pub nvfp4: Kernel<Nvfp4>,
    pub bits16: Kernel<Bits16>,
    /// Kernel for bf16 alone, if the instruction set has one.
    pub bf16: Option<Kernel16>,
}

impl Kernels {
    fn new<S: Simd<Nvfp4> + Simd<Bits16> + Send + Sync + 'static>(simd: S) -> Self {
        Self {
            nvfp4: Box::new(move |tile, scratch| simd.compute(tile, scratch)),
            bits16: Box::new(move |tile, scratch| simd.compute(tile, scratch)),
            bf16: None,
        }
    }
}

/// A kernel for 16-bit tokens.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 multiplies bf16"))]
pub(super) enum Kernel16 {
    Bits16(Kernel<Bits16>),
    Bf16(Kernel<Bf16>),
    Bf16ByParity(Kernel<Bf16ByParity>),
}
