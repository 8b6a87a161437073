//! The CPU backend: fast on any machine. It is not the reference; that is [`crate::oracle`].
//!
//! `layout` says how operands lie in memory, and `kernel` computes with them. It runs on an instruction set that is
//! chosen at run time; each has a file. `epilogue` turns sums into outputs. This file spreads the tiles of a step over
//! the threads of rayon. `moe` computes whole layers, apart from all that.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod epilogue;
mod kernel;
mod layout;
mod linear;
mod moe;
mod pages;
mod peaks;
mod portable;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use self::kernel::{Scratch, Simd, TILE_PANELS, TILE_TOKENS, Tile};
use self::layout::{Panels, TokenBlock, TokenChunk, chunks, unpack_tokens};
use super::{Backend, Layer, LinearLayer, MoeLayer};
use crate::error::Error;
use crate::linear::LinearWeights;
use crate::moe::MoeWeights;
use crate::output::Output;
use crate::plan::roofline::Peaks;
use crate::problem::{Op, Step, Weights};

/// An instruction set that the backend has a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW and VNNI.
    Avx512Vnni,
    /// x86-64 with AVX2, FMA, F16C and AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// Any CPU.
    Portable,
}

impl Isa {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Avx512Vnni, Self::AvxVnni, Self::Avx2, Self::Portable];

    /// Its name, which is the kernel's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512Vnni => "avx512-vnni",
            Self::AvxVnni => "avx-vnni",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// The kernel for it, if this machine has the instructions.
    fn kernel(self) -> Option<Kernel> {
        fn boxed<S: Simd + Send + Sync + 'static>(simd: S) -> Kernel {
            Box::new(move |tile, scratch| simd.compute(tile, scratch))
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => avx512::Avx512::detect().map(boxed),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => avx2::Avx2::<true>::detect().map(boxed),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::<false>::detect().map(boxed),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512Vnni | Self::AvxVnni | Self::Avx2 => None,
            Self::Portable => Some(boxed(portable::Portable)),
        }
    }
}

type Kernel = Box<dyn Fn(&Tile<'_>, &mut Scratch) + Send + Sync>;

/// The CPU, with one of its instruction sets.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    isa: Isa,
}

impl Cpu {
    /// The fastest instruction set that this machine has.
    pub fn new() -> Self {
        let isa = Isa::ALL.into_iter().find(|isa| isa.kernel().is_some());
        Self { isa: isa.expect("the portable kernel runs anywhere") }
    }

    /// This instruction set and no other.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the machine does not have it.
    pub fn with(isa: Isa) -> Result<Self, Error> {
        match isa.kernel() {
            Some(_) => Ok(Self { isa }),
            None => Err(Error::Invalid(format!("this CPU has no {}; leave the choice to `Cpu::new`", isa.name()))),
        }
    }

    /// The instruction set that it uses.
    pub fn isa(&self) -> Isa {
        self.isa
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
        self.isa.kernel().map(|kernel| peaks::peaks(self.isa, &kernel))
    }

    fn prepare<'w>(&self, weights: &'w Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        Ok(Box::new(CpuLayer {
            isa: self.isa,
            kernel: self.isa.kernel().expect("`Cpu` is made only for what the machine has"),
            op: weights.op(),
            experts: weights.experts().iter().map(Panels::new).collect::<Result<_, _>>()?,
            tokens: Vec::new(),
            starts: Vec::new(),
            tiles: Vec::new(),
        }))
    }

    fn prepare_moe<'w>(&self, weights: &'w MoeWeights<'w>) -> Result<Box<dyn MoeLayer + 'w>, Error> {
        Ok(Box::new(moe::CpuMoeLayer::new(weights)))
    }

    fn prepare_linear<'w>(&self, weights: &'w LinearWeights<'w>) -> Result<Box<dyn LinearLayer + 'w>, Error> {
        Ok(Box::new(linear::CpuLinear::new(weights)))
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

/// Weights in panels, and the buffers of a step, kept for the next.
struct CpuLayer {
    isa: Isa,
    kernel: Kernel,
    op: Op,
    experts: Vec<Panels>,
    /// All groups' tokens, each group's in the order that [`Tile::tokens`] wants.
    tokens: Vec<TokenChunk>,
    /// Where each group begins in `tokens`.
    starts: Vec<usize>,
    tiles: Vec<TilePlace>,
}

/// Which tile: the rest is known from the step and the weights.
struct TilePlace {
    group: usize,
    first_row: usize,
    first_panel: usize,
    /// Where the group's output begins.
    output_start: usize,
}

impl Layer for CpuLayer {
    fn kernel(&self) -> &str {
        self.isa.name()
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        step.check_fits(self.op, self.experts.iter().map(|expert| (expert.n, expert.k)))?;
        output.check_fits(step.problem())?;
        let start = Instant::now();
        self.unpack_tokens(step);
        self.place_tiles(step);
        let output = OutputPointer(output.bits_mut().as_mut_ptr());
        self.tiles.par_iter().for_each(|place| self.compute(step, place, &output));
        Ok(start.elapsed())
    }
}

impl CpuLayer {
    fn unpack_tokens(&mut self, step: &Step<'_>) {
        let groups = step.problem().groups();
        let mut end = 0;
        self.starts.clear();
        for group in groups {
            self.starts.push(end);
            end += group.m * chunks(group.k);
        }
        self.tokens.resize(end, [TokenBlock::ZERO; _]);
        let starts = &self.starts;
        self.tokens.par_iter_mut().enumerate().for_each(|(at, out)| {
            // The last group that begins here or before. An empty group begins where the next one does.
            let group = starts.partition_point(|&start| start <= at) - 1;
            let (within, m) = (at - starts[group], groups[group].m);
            unpack_tokens(&step.activations()[group], within % m, within / m, out);
        });
    }

    fn place_tiles(&mut self, step: &Step<'_>) {
        self.tiles.clear();
        let mut output_start = 0;
        for (group, (sizes, expert)) in step.problem().groups().iter().zip(&self.experts).enumerate() {
            for first_row in (0..sizes.m).step_by(TILE_TOKENS) {
                let panels = (0..expert.len()).step_by(TILE_PANELS);
                self.tiles.extend(panels.map(|first_panel| TilePlace { group, first_row, first_panel, output_start }));
            }
            output_start += sizes.m * sizes.n;
        }
    }

    fn compute(&self, step: &Step<'_>, place: &TilePlace, output: &OutputPointer) {
        thread_local! {
            static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Scratch::new());
        }
        let &TilePlace { group, first_row, first_panel, output_start } = place;
        let weights = &self.experts[group];
        let m = step.problem().groups()[group].m;
        let tile = Tile {
            weights,
            panels: first_panel..weights.len().min(first_panel + TILE_PANELS),
            tokens: &self.tokens[self.starts[group]..][..m * chunks(weights.k)],
            m,
            rows: first_row..m.min(first_row + TILE_TOKENS),
            alphas: step.alphas(group),
            out_dtype: step.problem().out_dtype(),
            // SAFETY: groups lie in the output one after the other, and `execute` checked that it holds all of them.
            output: unsafe { output.0.add(output_start) },
        };
        SCRATCH.with_borrow_mut(|scratch| (self.kernel)(&tile, scratch));
    }
}

/// The output of a step, to be written by many threads.
struct OutputPointer(*mut u16);

// SAFETY: every thread writes the rectangles of its own tiles, which do not overlap and which nobody reads meanwhile.
unsafe impl Sync for OutputPointer {}
