//! Address spaces: which bytes an address means. Global, const and param aside, a space is a window of the generic
//! address space.
//!
//! Shared addresses carry the CTA's rank in its cluster above bit 24, in the `shared::cta` and `shared::cluster`
//! windows alike (PTX ISA, "mapa": the former is contained in the latter).

use super::global::Allocation;
use crate::types::Space;

/// Generic address of shared memory's window.
pub const SHARED_WINDOW: u64 = 0x7000_0000_0000;
/// Generic address of local memory's window.
pub const LOCAL_WINDOW: u64 = 0x7100_0000_0000;
/// Generic address of the kernel parameters.
pub const PARAM_WINDOW: u64 = 0x7200_0000_0000;
/// From here on lie the addresses of functions, which can be called and not read.
pub const CODE_WINDOW: u64 = 0x7300_0000_0000;
/// Between the addresses of two modules' functions.
pub const MODULE_STRIDE: u64 = 1 << 20;
const WINDOW: u64 = 1 << 32;
/// Where a shared address carries the CTA's rank.
pub const RANK_SHIFT: u32 = 24;
/// A CTA's variables begin here: the first kilobyte is the system's (and a null pointer faults).
pub const SHARED_BASE: u32 = 1024;
/// A thread's local variables begin here, so that a null pointer faults.
pub const LOCAL_BASE: u32 = 64;

/// Generic address of a space's window, if it has one.
pub fn window(space: Space) -> Option<u64> {
    match space {
        Space::Shared | Space::SharedCluster => Some(SHARED_WINDOW),
        Space::Local => Some(LOCAL_WINDOW),
        Space::Param => Some(PARAM_WINDOW),
        Space::Generic | Space::Global | Space::Const => None,
    }
}

/// The space of an access: where it is generic, that of its address.
pub fn space_at(space: Space, address: u64) -> Space {
    if space == Space::Generic { space_of(address) } else { space }
}

/// The space that a generic address lies in.
pub fn space_of(address: u64) -> Space {
    let inside = |base: u64| (base..base + WINDOW).contains(&address);
    if inside(SHARED_WINDOW) {
        Space::Shared
    } else if inside(LOCAL_WINDOW) {
        Space::Local
    } else if inside(PARAM_WINDOW) {
        Space::Param
    } else {
        Space::Global
    }
}

/// Bytes that an address means.
pub enum Spot<'a> {
    Global(&'a Allocation, u64),
    Shared { cta: u32, offset: u32 },
    Local(usize),
    Param(usize),
}

/// One access of one lane.
#[derive(Clone, Copy)]
pub struct Lane {
    pub lane: u32,
    pub address: u64,
    pub space: Space,
}
