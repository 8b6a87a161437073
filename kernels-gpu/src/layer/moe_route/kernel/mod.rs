//! Kernels that sort tokens by expert, permute them to the order of K, and add up their rows.
//!
//! The first cluster of a grid makes the lists ([`lists`]). For few choices it is a single CTA, so that no CTA waits
//! for another one. All other CTAs copy tokens ([`copy`]), unless a separate grid writes them to their rows
//! ([`expand`]). Another grid runs after the products ([`combine`]).

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
#![allow(clippy::needless_range_loop)]

/// Repeats a block with each of these indices while a condition holds. The compiler does not unroll a loop that is long
/// or may end early, and an array is not in registers if the compiler does not know the index.
macro_rules! unrolled {
    ($index:ident in [$($value:literal)*] while $condition:expr => $block:block) => {
        'unrolled: {
            $(
                let $index: usize = $value;
                if !$condition {
                    break 'unrolled;
                }
                $block
            )*
        }
    };
}

mod combine;
mod copy;
mod expand;
mod lists;

use cuda_std::{cluster::cluster_size, griddepcontrol::griddepcontrol_launch_dependents, kernel, thread};

use super::abi::{Combine, Expand, Route};
use crate::format::{OUTPUT_BF16, OUTPUT_F16};

/// Makes lists and copies tokens.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Route::THREADS, min_blocks = 2)]
pub unsafe fn moe_route(route: Route) {
    griddepcontrol_launch_dependents();
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`. Whole clusters follow the same path.
    unsafe {
        if thread::block_idx_x() < cluster_size() {
            lists::make::<1>(&route);
        } else {
            copy::run(&route, thread::block_idx_x() - cluster_size());
        }
    }
}

/// Makes lists of more experts than a CTA has threads, and copies tokens.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Route::THREADS, min_blocks = 1)]
pub unsafe fn moe_route_large(route: Route) {
    griddepcontrol_launch_dependents();
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`. Whole clusters follow the same path.
    unsafe {
        if thread::block_idx_x() < cluster_size() {
            lists::make::<2>(&route);
        } else {
            copy::run(&route, thread::block_idx_x() - cluster_size());
        }
    }
}

/// Expands tokens to rows.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Expand::THREADS, min_blocks = 4)]
pub unsafe fn moe_expand(launch: Expand) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { expand::run(&launch) }
}

/// Adds up rows of f16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Combine::THREADS)]
pub unsafe fn moe_combine_f16(launch: Combine) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { combine::run::<OUTPUT_F16>(&launch) }
}

/// Adds up rows of bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Combine::THREADS)]
pub unsafe fn moe_combine_bf16(launch: Combine) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { combine::run::<OUTPUT_BF16>(&launch) }
}
