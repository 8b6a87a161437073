//! Address spaces, and the bytes that an address refers to. Except for global, const and param, a space is a window of
//! the generic address space.
//!
//! Shared addresses carry the CTA's rank in its cluster above bit 24, in both the `shared::cta` and the
//! `shared::cluster` window (PTX ISA, "mapa": `shared::cta` is contained in `shared::cluster`).

use super::global::Allocation;
use crate::types::Space;

/// Generic address of shared memory's window.
pub const SHARED_WINDOW: u64 = 0x7000_0000_0000;
/// Generic address of local memory's window.
pub const LOCAL_WINDOW: u64 = 0x7100_0000_0000;
/// Generic address of the kernel parameters.
pub const PARAM_WINDOW: u64 = 0x7200_0000_0000;
/// Start of the addresses of functions. These addresses can be called but not read.
pub const CODE_WINDOW: u64 = 0x7300_0000_0000;
/// Distance between the function addresses of two modules.
pub const MODULE_STRIDE: u64 = 1 << 20;
const WINDOW: u64 = 1 << 32;
/// Lowest bit of the CTA's rank in a shared address.
pub const RANK_SHIFT: u32 = 24;
/// Offset of a CTA's first variable. The first kilobyte is reserved for the system, and a null pointer faults.
pub const SHARED_BASE: u32 = 1024;
/// Offset of a thread's first local variable; nonzero, so that a null pointer faults.
pub const LOCAL_BASE: u32 = 64;

/// Generic address of a space's window, if the space has one.
pub fn window(space: Space) -> Option<u64> {
    match space {
        Space::Shared | Space::SharedCluster => Some(SHARED_WINDOW),
        Space::Local => Some(LOCAL_WINDOW),
        Space::Param => Some(PARAM_WINDOW),
        Space::Generic | Space::Global | Space::Const => None,
    }
}

/// Bits of an address that count in a space. A wider register is cut (PTX ISA, "Addresses as Operands").
pub fn width(space: Space) -> u64 {
    window(space).map_or(u64::MAX, |_| WINDOW - 1)
}

/// Space of an access. For a generic access, the space of its address.
pub fn space_at(space: Space, address: u64) -> Space {
    if space == Space::Generic { space_of(address) } else { space }
}

/// Space that contains a generic address.
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

/// Location of the bytes of an access.
pub enum Spot<'a> {
    Global(&'a Allocation, u64),
    Shared { cta: u32, offset: u32 },
    Local(usize),
    Param(usize),
}

/// An access of one lane.
#[derive(Clone, Copy)]
pub struct Lane {
    pub lane: u32,
    pub address: u64,
    pub space: Space,
}
