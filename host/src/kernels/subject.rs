//! What a self-test tries as one thing, and has one verdict: a kernel that computes groups, or all kernels of a layer.

use gpu_arch::Capability;

use super::kernel::Kernel;
use super::layer::router::RouterKernel;
use super::layer::silu_mul::SiluMul;
use super::linear::LinearKernels;
use super::moe::{self, MoeKernels};
use super::{GroupedKernel, builds};
use crate::problem::{Op, TokenFormat};

/// Kernels that are tried together, since a caller gets all of them or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    /// A kernel that computes groups. With the portable one comes the third kernel of the unfused baseline.
    Groups(GroupedKernel),
    /// MoE layers.
    Moe,
    /// MoE layers and linear layers whose tokens are multiplied as FP8.
    Fp8,
    /// MoE layers and linear layers whose tokens are multiplied as NVFP4.
    Nvfp4,
    /// Linear layers.
    Linear,
    /// Routers.
    Router,
}

impl Subject {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let layers = [Self::Moe, Self::Fp8, Self::Nvfp4, Self::Linear, Self::Router];
        GroupedKernel::all().map(Self::Groups).chain(layers)
    }

    /// Those that a card has kernels for.
    pub fn of_card(card: Capability) -> impl Iterator<Item = Self> {
        Self::all().filter(move |subject| subject.runs_on(card))
    }

    /// MoE layers whose tokens have this format.
    pub fn moe(token_format: TokenFormat) -> Self {
        match token_format {
            TokenFormat::Bits16 => Self::Moe,
            TokenFormat::Fp8 => Self::Fp8,
            TokenFormat::Nvfp4 => Self::Nvfp4,
        }
    }

    /// MoE layers whose tokens have the format that a card takes unasked.
    pub fn moe_unasked(card: Capability) -> Self {
        Self::moe(MoeKernels::of(card).map_or_else(TokenFormat::default, MoeKernels::default_format))
    }

    /// Linear layers whose tokens have this format.
    pub fn linear(token_format: TokenFormat) -> Self {
        match token_format {
            TokenFormat::Bits16 => Self::Linear,
            other => Self::moe(other),
        }
    }

    /// Whether a card has kernels for it.
    pub fn runs_on(self, card: Capability) -> bool {
        self.kernels(card).is_some()
    }

    /// Its name on the command line: that of its kernel, or `moe`, `fp8`, `nvfp4`, `linear`, `router`.
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

    /// The subject of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|subject| subject.name() == name)
    }

    /// Whether a card has kernels for it that have been verified on a card that they are for.
    pub fn proven(self, card: Capability) -> bool {
        self.kernels(card).is_some_and(|kernels| kernels.into_iter().all(Kernel::proven))
    }

    /// Its kernels on a card, if it has all of them.
    pub(crate) fn kernels(self, card: Capability) -> Option<Vec<&'static dyn Kernel>> {
        let kernels: Vec<&'static dyn Kernel> = match self {
            Self::Groups(kernel) if kernel == GroupedKernel::portable() => vec![kernel.get(), &SiluMul],
            Self::Groups(kernel) => vec![kernel.get()],
            Self::Moe => MoeKernels::of(card)?.of_format(TokenFormat::Bits16)?,
            Self::Fp8 => moe::FP8_KERNELS.into(),
            Self::Nvfp4 => MoeKernels::of(card)?.of_format(TokenFormat::Nvfp4)?,
            Self::Linear => LinearKernels::of(card)?.of_format(TokenFormat::Bits16)?,
            Self::Router => vec![&RouterKernel],
        };
        kernels.iter().all(|kernel| builds::find(kernel.name(), card).is_some()).then_some(kernels)
    }
}

/// What a part of a self-test is called that runs one instance: `gated t64`.
pub(crate) fn part_of(op: Op, instance: &str) -> String {
    format!("{} {instance}", op.name())
}

/// The part that runs the unfused baseline.
pub(crate) const UNFUSED: &str = "unfused";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_the_subjects_whose_kernels_all_run_there() {
        let names = |card| Subject::of_card(card).map(Subject::name).collect::<Vec<_>>();
        assert_eq!(names((8, 0)), ["gated_simt", "moe", "linear", "router"]);
        assert_eq!(names((9, 0)), ["gated_sm90", "gated_simt", "moe", "fp8", "linear", "router"]);
        assert_eq!(names((10, 3)), ["gated_sm100", "gated_simt", "moe", "nvfp4", "linear", "router"]);
        assert_eq!(names((12, 1)), ["gated_sm120", "gated_simt", "moe", "nvfp4", "linear", "router"]);
        assert_eq!(names((7, 5)), [""; 0]);
    }

    #[test]
    fn what_a_card_computes_unasked_is_what_proves_itself_first() {
        let unasked = [(8, 0), (9, 0), (10, 0), (12, 0)].map(|card| Subject::moe_unasked(card).name());
        assert_eq!(unasked, ["moe", "moe", "nvfp4", "moe"]);
        assert_eq!(TokenFormat::ALL.map(|format| Subject::linear(format).name()), ["linear", "fp8", "nvfp4"]);
    }

    #[test]
    fn names_lead_back() {
        assert!(Subject::all().all(|subject| Subject::named(subject.name()) == Some(subject)));
        assert_eq!(Subject::named("moe_sm90"), None);
    }

    #[test]
    fn what_has_run_on_no_card_is_not_proven() {
        assert!(Subject::of_card((9, 0)).all(|subject| subject.proven((9, 0))));
        for (card, kernel) in [((10, 0), "gated_sm100"), ((12, 1), "gated_sm120")] {
            let proven = |subject: &Subject| subject.proven(card);
            let (proven, others): (Vec<_>, Vec<_>) = Subject::of_card(card).partition(proven);
            assert_eq!(proven[0].name(), "gated_simt");
            assert_eq!(others[0].name(), kernel);
        }
    }
}
