//! Subjects of self-tests. A subject has one verdict: a kernel that computes groups, or all kernels of a layer.

use gpu_arch::Capability;

use super::kernel::Kernel;
use super::layer::router::RouterKernel;
use super::layer::silu_mul::SiluMul;
use super::linear::LinearKernels;
use super::moe::{self, MoeKernels};
use super::{GroupedKernel, builds};
use nvfp4_core::problem::{Op, TokenFormat};

/// Kernels that are tested together, because a caller uses all of them or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    /// A kernel for groups. The portable one includes the third kernel of the unfused baseline.
    Groups(GroupedKernel),
    /// MoE layers.
    Moe,
    /// MoE layers and linear layers with FP8 tokens.
    Fp8,
    /// MoE layers and linear layers with NVFP4 tokens.
    Nvfp4,
    /// Linear layers.
    Linear,
    /// Routers.
    Router,
}

impl Subject {
    /// Returns every subject.
    pub fn all() -> impl Iterator<Item = Self> {
        let layers = [Self::Moe, Self::Fp8, Self::Nvfp4, Self::Linear, Self::Router];
        GroupedKernel::all().map(Self::Groups).chain(layers)
    }

    /// Returns the subjects that a GPU has kernels for.
    pub fn of_card(card: Capability) -> impl Iterator<Item = Self> {
        Self::all().filter(move |subject| subject.runs_on(card))
    }

    /// Returns the subject of MoE layers with this token format.
    pub fn moe(token_format: TokenFormat) -> Self {
        match token_format {
            TokenFormat::Bits16 => Self::Moe,
            TokenFormat::Fp8 => Self::Fp8,
            TokenFormat::Nvfp4 => Self::Nvfp4,
        }
    }

    /// Returns the subject of MoE layers with a GPU's default token format.
    pub fn moe_unasked(card: Capability) -> Self {
        Self::moe(MoeKernels::of(card).map_or_else(TokenFormat::default, |kernels| kernels.default_format()))
    }

    /// Returns the subject of linear layers with this token format.
    pub fn linear(token_format: TokenFormat) -> Self {
        match token_format {
            TokenFormat::Bits16 => Self::Linear,
            other => Self::moe(other),
        }
    }

    /// Whether a GPU has kernels for it.
    pub fn runs_on(self, card: Capability) -> bool {
        self.kernels(card).is_some()
    }

    /// Name on the command line: the kernel's name, or `moe`, `fp8`, `nvfp4`, `linear`, `router`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Groups(kernel) => kernel.name(),
            Self::Moe => "moe",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
            Self::Linear => "linear",
            Self::Router => "router",
        }
    }

    /// Returns the subject with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|subject| subject.name() == name)
    }

    /// Whether a GPU has kernels for it that have all been verified on a GPU.
    pub fn proven(self, card: Capability) -> bool {
        self.kernels(card).is_some_and(|kernels| kernels.into_iter().all(Kernel::proven))
    }

    /// Returns its kernels on a GPU. `None`: some of them do not run there.
    pub fn kernels(self, card: Capability) -> Option<Vec<&'static dyn Kernel>> {
        let kernels: Vec<&'static dyn Kernel> = match self {
            Self::Groups(kernel) if kernel == GroupedKernel::portable() => vec![kernel.get(), &SiluMul],
            Self::Groups(kernel) => vec![kernel.get()],
            Self::Moe => MoeKernels::of(card)?.of_format(TokenFormat::Bits16)?.all,
            Self::Fp8 => moe::FP8_KERNELS.into(),
            Self::Nvfp4 => MoeKernels::of(card)?.of_format(TokenFormat::Nvfp4)?.all,
            Self::Linear => LinearKernels::of(card)?.of_format(TokenFormat::Bits16)?.all,
            Self::Router => vec![&RouterKernel],
        };
        kernels.iter().all(|kernel| builds::find(kernel.name(), card).is_some()).then_some(kernels)
    }
}

/// Returns the name of the part of a self-test that runs one instance: `gated t64`.
pub fn part_of(op: Op, instance: &str) -> String {
    format!("{} {instance}", op.name())
}

/// Returns the name of the part of a self-test that runs one instance with tiles that the plan never gives to it.
pub fn odd_part_of(op: Op, instance: &str) -> String {
    format!("{} at odd scale columns", part_of(op, instance))
}

/// Name of the part that runs the unfused baseline.
pub const UNFUSED: &str = "unfused";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_has_the_subjects_whose_kernels_run_there() {
        let names = |card| Subject::of_card(card).map(Subject::name).collect::<Vec<_>>();
        assert_eq!(names((8, 0)), ["gated_simt", "moe", "linear", "router"]);
        assert_eq!(names((9, 0)), ["gated_sm90", "gated_simt", "moe", "fp8", "linear", "router"]);
        assert_eq!(names((10, 3)), ["gated_sm100", "gated_simt", "moe", "nvfp4", "linear", "router"]);
        assert_eq!(names((12, 1)), ["gated_sm120", "gated_simt", "moe", "nvfp4", "linear", "router"]);
        assert_eq!(names((7, 5)), [""; 0]);
    }

    #[test]
    fn default_format_of_a_gpu_is_tested_first() {
        let unasked = [(8, 0), (9, 0), (10, 0), (12, 0)].map(|card| Subject::moe_unasked(card).name());
        assert_eq!(unasked, ["moe", "moe", "nvfp4", "moe"]);
        assert_eq!(TokenFormat::ALL.map(|format| Subject::linear(format).name()), ["linear", "fp8", "nvfp4"]);
    }

    #[test]
    fn subjects_are_found_by_name() {
        assert!(Subject::all().all(|subject| Subject::named(subject.name()) == Some(subject)));
        assert_eq!(Subject::named("moe_sm90"), None);
    }

    #[test]
    fn kernel_without_a_verified_gpu_is_not_proven() {
        assert!(Subject::of_card((9, 0)).all(|subject| subject.proven((9, 0))));
        for (card, kernel) in [((10, 0), "gated_sm100"), ((12, 1), "gated_sm120")] {
            let proven = |subject: &Subject| subject.proven(card);
            let (proven, others): (Vec<_>, Vec<_>) = Subject::of_card(card).partition(proven);
            assert_eq!(proven[0].name(), "gated_simt");
            assert_eq!(others[0].name(), kernel);
        }
    }
}
