//! The modules of `kernels-gpu` that multiply: what there is to choose of them, and what each takes. Pure functions.

use super::{gated_simt, gated_sm90, gated_sm100};
use crate::problem::Op;

/// A kernel module, which computes both operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Module {
    /// For the FP4 tensor cores of B200 and B300.
    Sm100,
    /// For the tensor cores of Hopper.
    Sm90,
    /// Portable; takes everything.
    Simt,
}

impl Module {
    /// All of them, the most special first.
    pub const ALL: [Self; 3] = [Self::Sm100, Self::Sm90, Self::Simt];

    /// Those that have been verified on a card, the most special first: what a GPU gets unasked.
    pub const PROVEN: [Self; 2] = [Self::Sm90, Self::Simt];

    /// Its name, which is also that of its folder in `kernels-gpu`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm100 => "gated_sm100",
            Self::Sm90 => "gated_sm90",
            Self::Simt => "gated_simt",
        }
    }

    /// What the kernel is called that computes an operation.
    pub fn kernel(self, op: Op) -> &'static str {
        match self {
            Self::Sm100 => gated_sm100::name(op),
            Self::Sm90 => gated_sm90::name(op),
            Self::Simt => gated_simt::name(op),
        }
    }

    /// The instances of an operation's kernel, by name: `t64` for tiles of 64 tokens, and so on.
    pub fn instances(self, op: Op) -> Vec<&'static str> {
        match self {
            Self::Sm100 => gated_sm100::variants(op).map(|(name, _)| name).collect(),
            Self::Sm90 => gated_sm90::instances(op).map(|(name, _)| name).collect(),
            Self::Simt => gated_simt::INSTANCES.map(|(name, _)| name).into(),
        }
    }

    /// The entries of an operation, each with the most dynamic shared memory that it is launched with.
    #[cfg(feature = "cuda")]
    pub(crate) fn entries(self, op: Op) -> Vec<(&'static str, u32)> {
        match self {
            Self::Sm100 => {
                gated_sm100::variants(op).map(|(_, instance)| (instance.entry, instance.shared_bytes())).collect()
            }
            Self::Sm90 => {
                let multiply = gated_sm90::instances(op).map(|(_, instance)| (instance.entry, instance.shared_bytes()));
                multiply.chain([(gated_sm90::TOKENS_ENTRY, 0)]).collect()
            }
            Self::Simt => gated_simt::entries(op).into(),
        }
    }

    /// Whether the kernel can compute sums over K elements.
    pub fn takes(self, k: usize) -> bool {
        match self {
            Self::Sm100 => gated_sm100::takes(k),
            Self::Sm90 => gated_sm90::takes(k),
            Self::Simt => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proven_modules_are_in_the_order_of_all_and_one_takes_everything() {
        let proven: Vec<_> = Module::ALL.into_iter().filter(|module| Module::PROVEN.contains(module)).collect();
        assert_eq!(proven, Module::PROVEN);
        assert!(Module::PROVEN.iter().any(|module| (16..=4096).step_by(16).all(|k| module.takes(k))));
    }
}
