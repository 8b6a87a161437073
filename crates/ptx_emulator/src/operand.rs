//! Operands of a decoded instruction: register numbers, constants, and values that are known when a warp starts. The
//! machine reads and writes them (`machine/warp.rs`).

use crate::types::Space;

/// One value per lane, as untyped bits in the low end of each word.
pub type Row = [u64; 32];

/// The set bits of a lane mask, lowest first.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            lane
        })
    })
}

/// Like [`lanes`], highest first.
pub fn lanes_down(mask: u32) -> impl Iterator<Item = usize> {
    lanes(mask.reverse_bits()).map(|lane| 31 - lane)
}

/// A source of at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    Register(u32),
    Constant(u64),
}

/// Destination of a result.
#[derive(Clone, Copy, Debug)]
pub struct Dst {
    /// `None` for `_`: the result is discarded.
    pub register: Option<u32>,
    /// Width of the register in bits.
    pub bits: u32,
}

/// Destination of a predicate; `None` for `_`.
#[derive(Clone, Copy, Debug)]
pub struct PredicateDst(pub Option<u32>);

/// A predicate operand.
#[derive(Clone, Copy, Debug)]
pub enum PredicateSrc {
    /// A register, and whether it is negated.
    Register(u32, bool),
    Constant(bool),
}

/// `[base + offset]`, and the state space of the named variable, if a variable is named.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: Src,
    pub offset: i64,
    pub variable: Option<Space>,
}

impl Address {
    /// State space of the access, given the space that the instruction names. A function's parameters are in the
    /// emulator's local memory.
    pub fn space(&self, instruction: Space) -> Space {
        match (instruction, self.variable) {
            (Space::Param, Some(Space::Local)) => Space::Local,
            (Space::Generic, Some(space)) => space,
            _ => instruction,
        }
    }
}

/// A value that is known when a warp starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named after the manual's special registers")]
pub enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Clusterid(usize),
    Nclusterid(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterCtarank,
    ClusterNctarank,
    Laneid,
    Warpid,
    Nwarpid,
    Smid,
    Nsmid,
    LanemaskEq,
    LanemaskLe,
    LanemaskLt,
    LanemaskGe,
    LanemaskGt,
    DynamicSharedSize,
    TotalSharedSize,
    /// Half of the address of the grid's workspace: its bits starting at this bit.
    GridWorkspace(u32),
    /// A register that always reads zero here, such as the grid number.
    Zero,
    /// The address of a shared variable.
    Shared(u32),
    /// The address of a variable of the module.
    Variable(u32),
}

impl Special {
    /// The special register with this name. `component` selects a component of a vector register.
    pub fn parse(name: &str, component: Option<char>) -> Option<Special> {
        let d = match component {
            None | Some('x' | 'r') => 0,
            Some('y' | 'g') => 1,
            _ => 2,
        };
        Some(match name {
            "%tid" => Special::Tid(d),
            "%ntid" => Special::Ntid(d),
            "%ctaid" => Special::Ctaid(d),
            "%nctaid" => Special::Nctaid(d),
            "%clusterid" => Special::Clusterid(d),
            "%nclusterid" => Special::Nclusterid(d),
            "%cluster_ctaid" => Special::ClusterCtaid(d),
            "%cluster_nctaid" => Special::ClusterNctaid(d),
            "%cluster_ctarank" => Special::ClusterCtarank,
            "%cluster_nctarank" => Special::ClusterNctarank,
            "%laneid" => Special::Laneid,
            "%warpid" => Special::Warpid,
            "%nwarpid" => Special::Nwarpid,
            "%smid" => Special::Smid,
            "%nsmid" => Special::Nsmid,
            "%lanemask_eq" => Special::LanemaskEq,
            "%lanemask_le" => Special::LanemaskLe,
            "%lanemask_lt" => Special::LanemaskLt,
            "%lanemask_ge" => Special::LanemaskGe,
            "%lanemask_gt" => Special::LanemaskGt,
            "%dynamic_smem_size" => Special::DynamicSharedSize,
            "%total_smem_size" => Special::TotalSharedSize,
            // The driver uses these registers for the workspace: cooperative_groups/details/driver_abi.h.
            "%envreg1" => Special::GridWorkspace(32),
            "%envreg2" => Special::GridWorkspace(0),
            "%gridid" => Special::Zero,
            _ => return None,
        })
    }
}

/// Expands each byte of a lane mask to a word per lane: all ones if the lane's bit is set. With this table, the
/// compiler vectorizes loops over a row.
pub static SPREAD: [[u64; 8]; 256] = {
    let mut spread = [[0; 8]; 256];
    let mut n = 0;
    while n < 8 * 256 {
        spread[n / 8][n % 8] = (((n / 8) >> (n % 8) & 1) as u64).wrapping_neg();
        n += 1;
    }
    spread
};

/// A filter of registers: bit n stands for all registers whose number is n modulo 64.
pub fn filter(registers: &[u32]) -> u64 {
    registers.iter().fold(0, |bits, r| bits | 1 << (r % 64))
}
