//! Register values that are known when a warp starts.

use crate::code::Kernel;
use crate::machine::address::RANK_SHIFT;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Row, Special};

/// Value of a special register in each lane of a warp (PTX ISA, "Special Registers").
pub fn row(kernel: &Kernel, m: &Machine<'_>, w: &Warp, special: Special) -> Row {
    let config = m.launch.config;
    let [bx, by, _] = config.block;
    let cta = &m.ctas[w.cta as usize];
    let thread = |lane: usize| w.role * 32 + lane as u32;
    let inside: [u32; 3] = std::array::from_fn(|d| cta.index[d] % config.cluster[d]);
    let clusters: [u32; 3] = std::array::from_fn(|d| config.grid[d] / config.cluster[d]);
    let linear = cta.index[0] + config.grid[0] * (cta.index[1] + config.grid[1] * cta.index[2]);
    let all = |v: u32| [u64::from(v); 32];
    let lanes = |f: &dyn Fn(usize) -> u32| std::array::from_fn(|n| u64::from(f(n)));
    match special {
        Special::Tid(0) => lanes(&|n| thread(n) % bx),
        Special::Tid(1) => lanes(&|n| thread(n) / bx % by),
        Special::Tid(_) => lanes(&|n| thread(n) / bx / by),
        Special::Ntid(d) => all(config.block[d]),
        Special::Ctaid(d) => all(cta.index[d]),
        Special::Nctaid(d) => all(config.grid[d]),
        Special::Clusterid(d) => all(cta.index[d] / config.cluster[d]),
        Special::Nclusterid(d) => all(clusters[d]),
        Special::ClusterCtaid(d) => all(inside[d]),
        Special::ClusterNctaid(d) => all(config.cluster[d]),
        Special::ClusterCtarank => all(w.cta),
        Special::ClusterNctarank => all(m.ctas.len() as u32),
        Special::Laneid => lanes(&|n| n as u32),
        Special::Warpid => all(w.role),
        Special::Nwarpid => all(m.warps_per_cta),
        Special::Smid => all(linear % m.launch.sms),
        Special::Nsmid => all(m.launch.sms),
        Special::LanemaskEq => lanes(&|n| 1 << n),
        Special::LanemaskLe => lanes(&|n| u32::MAX >> (31 - n)),
        Special::LanemaskLt => lanes(&|n| (1 << n) - 1),
        Special::LanemaskGe => lanes(&|n| u32::MAX << n),
        Special::LanemaskGt => lanes(&|n| !(u32::MAX >> (31 - n))),
        Special::DynamicSharedSize => all(config.shared_bytes),
        Special::TotalSharedSize => all(config.shared_bytes + kernel.shared_bytes),
        Special::GridWorkspace(shift) => all((config.grid_workspace >> shift) as u32),
        Special::Zero => [0; 32],
        Special::Shared(offset) => all(w.cta << RANK_SHIFT | offset),
        Special::Variable(n) => [m.launch.symbols[n as usize]; 32],
    }
}
