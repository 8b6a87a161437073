//! A layer's plan for people: the launches of a call, and the instances that could take a product's place. It follows from
//! sizes and a GPU's number of SMs; no device and no weights are needed.

use super::launch::Grid;

/// A launch of a plan.
#[derive(Clone, Debug)]
pub struct PlannedLaunch {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Entry, CTAs, threads and shared memory.
    pub grid: Grid,
    /// The choice of the instance, if the launch is a product with several instances.
    pub choice: Option<Choice>,
}

/// Why a product takes an instance.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Number of the product's rows, if tokens name all experts equally often.
    pub rows: u64,
    /// Number of experts.
    pub experts: u32,
    /// Instances in the order of their cost, the chosen one first.
    pub candidates: Vec<Candidate>,
}

/// An instance that can take a product's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the entry.
    pub entry: &'static str,
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Columns of C per tile.
    pub columns: u32,
    /// Expected number of tiles.
    pub tiles: u64,
    /// Tiles of the SM that has the most.
    pub rounds: u64,
    /// Expected time in a unit that the candidates of a choice share.
    pub cost: u64,
}

/// Returns the launches with the choices, which are in the launches' order.
pub(super) fn matched(
    launches: impl IntoIterator<Item = super::launch::Launch>,
    choices: impl IntoIterator<Item = Choice>,
) -> Vec<PlannedLaunch> {
    let mut choices = choices.into_iter().peekable();
    let planned = |launch: super::launch::Launch| {
        let entry = launch.grid.entry;
        let choice = choices.next_if(|choice| choice.candidates.first().is_some_and(|first| first.entry == entry));
        PlannedLaunch { kernel: launch.kernel, grid: launch.grid, choice }
    };
    launches.into_iter().map(planned).collect()
}
