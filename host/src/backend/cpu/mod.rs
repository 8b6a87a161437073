//! The CPU backend: fast on any machine. The reference is [`crate::oracle`], not this backend.
//!
//! * `layout` defines the layout of operands in memory, and `kernel` computes with them on an instruction set that is
//!   chosen at run time. `isa` lists the instruction sets; each has its own file.
//! * `epilogue` turns sums into outputs.
//! * `products` spreads the tiles of products over the threads of rayon.
//! * This file computes steps with NVFP4 tokens.
//! * `layer` holds the prepared MoE and linear layers. `moe` and `linear` compute layers with 16-bit tokens,
//!   `quantized` computes layers with FP8 or NVFP4 tokens.

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
mod isa;
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
pub use self::isa::Isa;
use self::isa::{Kernel16, Kernels};
use self::kernel::Kernel;
pub use self::layer::{CpuLinearLayer, CpuMoeLayer};
use self::layer::{LinearCompute, MoeCompute};
use self::layout::{Nvfp4, Panels, unpack_nvfp4};
use self::products::{Product, Products, TokenBuffer};
use super::{Backend, Layer, Linear, Moe};
use crate::Error;
use crate::Output;
use crate::linear::LinearWeights;
use crate::moe::MoeWeights;
use crate::plan::roofline::Peaks;
use crate::problem::{Expert, Op, Step, TokenDtype, TokenFormat, Weights};
use crate::router::{self, Logits, Router, Routes};

/// The CPU, with one of its instruction sets.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    isa: Isa,
}

impl Cpu {
    /// Selects the fastest instruction set of this machine.
    pub fn new() -> Self {
        let isa = Isa::ALL.into_iter().find(|isa| isa.kernels().is_some());
        Self { isa: isa.expect("the portable kernel runs anywhere") }
    }

    /// Selects this instruction set and no other.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the machine lacks the instruction set.
    pub fn with(isa: Isa) -> Result<Self, Error> {
        match isa.kernels() {
            Some(_) => Ok(Self { isa }),
            None => {
                Err(Error::Invalid(format!("this CPU lacks {}; let `Cpu::new` choose the instruction set", isa.name())))
            }
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Does the same as [`Backend::prepare_moe`], and returns a type that several threads can run at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] if memory for the weights cannot be allocated.
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

    /// Does the same as [`Backend::prepare_linear`], and returns a type that several threads can run at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] if memory for the weights cannot be allocated.
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
        self.isa.kernels().expect("`Cpu` is constructed only after its kernels were found")
    }

    /// Returns the kernel for a layer's tokens and its name, or `None` if the token format is FP8 or NVFP4.
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

    fn prepare_moe<'w>(&self, weights: &MoeWeights<'w>) -> Result<Box<dyn Layer<Moe> + 'w>, Error> {
        Ok(Box::new(self.prepare_moe_layer(weights)?))
    }

    fn route_with_ids(&self, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
        router::route_with_ids(router, logits, token_ids)
    }

    fn prepare_linear<'w>(&self, weights: &LinearWeights<'w>) -> Result<Box<dyn Layer<Linear> + 'w>, Error> {
        Ok(Box::new(self.prepare_linear_layer(weights)?))
    }
}

/// Brand string of the processor, or the name of the architecture.
fn brand() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        /// Last CPUID leaf of the brand string (Intel SDM, volume 2, CPUID).
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

/// Weights of a grouped problem, packed in panels, and the buffers of a step, which the next step reuses.
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
