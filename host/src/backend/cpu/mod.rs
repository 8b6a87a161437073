//! The CPU backend: fast on any machine. It is not the reference; that is [`crate::oracle`].
//!
//! `layout` says how operands lie in memory, and `kernel` computes with them. It runs on an instruction set that is
//! chosen at run time; each has a file. `epilogue` turns sums into outputs. `products` spreads the tiles of products over
//! the threads of rayon. This file computes steps of NVFP4 tokens that way. `layer` has the prepared MoE and linear
//! layers; `moe` and `linear` compute those with 16-bit tokens, `quantized` those with FP8 or NVFP4 tokens.

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod epilogue;
mod kernel;
mod layer;
mod layout;
mod linear;
mod moe;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pages;
mod peaks;
mod portable;
mod products;
mod quantized;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use self::epilogue::Epilogue;
use self::kernel::{Kernel, Simd};
pub use self::layer::{CpuLinearLayer, CpuMoeLayer};
use self::layer::{LinearCompute, MoeCompute};
use self::layout::{Bf16, Bf16ByParity, Bits16, Nvfp4, Panels, unpack_nvfp4};
use self::products::{Product, Products, TokenBuffer};
use super::{Backend, Layer, LinearLayer, MoeLayer};
use crate::error::Error;
use crate::linear::LinearWeights;
use crate::moe::MoeWeights;
use crate::output::Output;
use crate::plan::roofline::Peaks;
use crate::problem::{Expert, Op, Step, TokenDtype, TokenFormat, Weights};
use crate::router::{self, Logits, Router, Routes};

/// An instruction set that the backend has a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AMX for bf16, and AVX-512 F, BW and VNNI for all else.
    AmxBf16,
    /// x86-64 with AVX-512 BF16 for bf16, and AVX-512 F, BW and VNNI for all else.
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
    /// All of them, the fastest first.
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

    /// Its name, which is the kernel's.
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

    /// The one that multiplies other tokens than bf16.
    fn of_others(self) -> Self {
        match self {
            Self::AmxBf16 | Self::Avx512Bf16 => Self::Avx512Vnni,
            isa => isa,
        }
    }

    /// The kernels for it, if this machine has the instructions.
    fn kernels(self) -> Option<Kernels> {
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

/// The kernels of an instruction set.
struct Kernels {
    nvfp4: Kernel<Nvfp4>,
    bits16: Kernel<Bits16>,
    /// Where there is one for bf16 alone.
    bf16: Option<Kernel16>,
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

/// A kernel for tokens of 16 bits.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 multiplies bf16"))]
enum Kernel16 {
    Bits16(Kernel<Bits16>),
    Bf16(Kernel<Bf16>),
    Bf16ByParity(Kernel<Bf16ByParity>),
}

/// The CPU, with one of its instruction sets.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    isa: Isa,
}

impl Cpu {
    /// The fastest instruction set that this machine has.
    pub fn new() -> Self {
        let isa = Isa::ALL.into_iter().find(|isa| isa.kernels().is_some());
        Self { isa: isa.expect("the portable kernel runs anywhere") }
    }

    /// This instruction set and no other.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the machine does not have it.
    pub fn with(isa: Isa) -> Result<Self, Error> {
        match isa.kernels() {
            Some(_) => Ok(Self { isa }),
            None => Err(Error::Invalid(format!("this CPU has no {}; leave the choice to `Cpu::new`", isa.name()))),
        }
    }

    /// The instruction set that it uses.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// [`Backend::prepare_moe`] with a type that several threads can run at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no memory for the weights.
    pub fn prepare_moe_layer<'w>(&self, weights: &MoeWeights<'w>) -> Result<CpuMoeLayer<'w>, Error> {
        use moe::PackedMoe;
        let sizes = weights.sizes();
        let (kernel, compute): (_, Box<dyn MoeCompute + 'w>) =
            match self.kernel_of_tokens(sizes.token_format, sizes.dtype) {
                Some((name, Kernel16::Bits16(kernel))) => (name, Box::new(PackedMoe::new(kernel, weights)?)),
                Some((name, Kernel16::Bf16(kernel))) => (name, Box::new(PackedMoe::new(kernel, weights)?)),
                Some((name, Kernel16::Bf16ByParity(kernel))) => (name, Box::new(PackedMoe::new(kernel, weights)?)),
                None => (sizes.token_format.name(), Box::new(quantized::CpuQuantizedMoe::new(weights))),
            };
        Ok(CpuMoeLayer { kernel, sizes, expert_map: weights.expert_map().map(Into::into), compute })
    }

    /// [`Backend::prepare_linear`] with a type that several threads can run at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no memory for the weights.
    pub fn prepare_linear_layer<'w>(&self, weights: &LinearWeights<'w>) -> Result<CpuLinearLayer<'w>, Error> {
        use linear::PackedLinear;
        let sizes = weights.sizes();
        let (kernel, compute): (_, Box<dyn LinearCompute + 'w>) =
            match self.kernel_of_tokens(sizes.token_format, sizes.dtype) {
                Some((name, Kernel16::Bits16(kernel))) => (name, Box::new(PackedLinear::new(kernel, weights)?)),
                Some((name, Kernel16::Bf16(kernel))) => (name, Box::new(PackedLinear::new(kernel, weights)?)),
                Some((name, Kernel16::Bf16ByParity(kernel))) => (name, Box::new(PackedLinear::new(kernel, weights)?)),
                None => (sizes.token_format.name(), Box::new(quantized::CpuQuantizedLinear::new(weights))),
            };
        Ok(CpuLinearLayer { kernel, sizes, compute })
    }

    fn kernels(&self) -> Kernels {
        self.isa.kernels().expect("`Cpu` is made only for what the machine has")
    }

    /// What multiplies a layer's tokens, and its name; none if they have fewer bits.
    fn kernel_of_tokens(&self, format: TokenFormat, dtype: TokenDtype) -> Option<(&'static str, Kernel16)> {
        let Kernels { bits16, bf16, .. } = self.kernels();
        match (format, bf16.filter(|_| dtype == TokenDtype::Bf16)) {
            (TokenFormat::Bits16, Some(kernel)) => Some((self.isa.name(), kernel)),
            (TokenFormat::Bits16, None) => Some((self.isa.of_others().name(), Kernel16::Bits16(bits16))),
            (TokenFormat::Fp8 | TokenFormat::Nvfp4, _) => None,
        }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> String {
        format!("{}, {} threads", brand(), rayon::current_num_threads())
    }

    fn peaks(&self) -> Option<Peaks> {
        Some(peaks::peaks(self.isa, &self.kernels().nvfp4))
    }

    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        let pack = |expert: &Expert<'_>| Panels::new(&expert.projections().collect::<Vec<_>>());
        Ok(Box::new(CpuLayer {
            isa: self.isa.of_others(),
            kernel: self.kernels().nvfp4,
            op: weights.op(),
            experts: weights.experts().iter().map(pack).collect::<Result<_, _>>()?,
            tokens: TokenBuffer::new(),
            products: Products::default(),
        }))
    }

    fn prepare_moe<'w>(&self, weights: &MoeWeights<'w>) -> Result<Box<dyn MoeLayer + 'w>, Error> {
        Ok(Box::new(self.prepare_moe_layer(weights)?))
    }

    fn route(&self, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
        router::route(router, logits)
    }

    fn prepare_linear<'w>(&self, weights: &LinearWeights<'w>) -> Result<Box<dyn LinearLayer + 'w>, Error> {
        Ok(Box::new(self.prepare_linear_layer(weights)?))
    }
}

/// What the CPU calls itself.
fn brand() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        /// The last of the leaves that hold the brand string (Intel SDM, volume 2, CPUID).
        const LAST_LEAF: u32 = 0x8000_0004;
        if __cpuid(0x8000_0000).eax >= LAST_LEAF {
            let leaves = (LAST_LEAF - 2..=LAST_LEAF).map(__cpuid);
            let bytes: Vec<u8> =
                leaves.flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]).flat_map(u32::to_le_bytes).collect();
            return String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ']).to_owned();
        }
    }
    std::env::consts::ARCH.to_owned()
}

/// The prepared weights of a grouped problem in panels, and the buffers of a step, kept for the next one.
struct CpuLayer {
    isa: Isa,
    kernel: Kernel<Nvfp4>,
    op: Op,
    experts: Vec<Panels>,
    tokens: TokenBuffer<Nvfp4>,
    products: Products,
}

impl Layer for CpuLayer {
    fn kernel(&self) -> &str {
        self.isa.name()
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        step.check_fits(self.op, self.experts.iter().map(|expert| (expert.n, expert.k)))?;
        output.check_fits(step.problem())?;
        let start = Instant::now();
        let (groups, dtype) = (step.problem().groups(), output.dtype());
        self.tokens.fill(groups.iter().map(|group| (group.m, group.k)), |group, row, chunk, out| {
            unpack_nvfp4(&step.activations()[group], row, chunk, out);
        });
        let product = |group: usize| Product {
            weights: &self.experts[group],
            tokens: self.tokens.of(group),
            m: groups[group].m,
            epilogue: Epilogue::of_nvfp4(step.alphas(group), dtype),
        };
        self.products.run(&self.kernel, groups.len(), product, output.bits_mut());
        Ok(start.elapsed())
    }
}
