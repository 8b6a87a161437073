//! How tokens are sorted by expert, brought into the order of K, and added up again.
//!
//! The first cluster of a grid makes the lists ([`lists`]): a block alone where choices are few, so that no block waits for
//! another. All other blocks copy tokens ([`copy`]), unless a grid of its own brings them to their rows ([`expand`]). What comes
//! after the products is another one ([`combine`]).

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

/// Repeats a block with each of these indices, while a condition holds. The compiler unrolls no loop that is long or may end early,
/// and an array is not in registers where it does not know the index.
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
/// The contract in this folder's `mod.rs`.
#[kernel(threads = Route::THREADS, min_blocks = 2)]
pub unsafe fn moe_route(route: Route) {
    griddepcontrol_launch_dependents();
    // SAFETY: the contract. Whole clusters go one way.
    unsafe {
        if thread::block_idx_x() < cluster_size() {
            lists::make(&route);
        } else {
            copy::run(&route, thread::block_idx_x() - cluster_size());
        }
    }
}

/// Expands tokens to rows.
///
/// # Safety
/// The contract in this folder's `mod.rs`.
#[kernel(threads = Expand::THREADS, min_blocks = 4)]
pub unsafe fn moe_expand(launch: Expand) {
    // SAFETY: the contract is this function's too.
    unsafe { expand::run(&launch) }
}

/// Adds up rows of f16.
///
/// # Safety
/// The contract in this folder's `mod.rs`.
#[kernel(threads = Combine::THREADS)]
pub unsafe fn moe_combine_f16(launch: Combine) {
    // SAFETY: the contract is this function's too.
    unsafe { combine::run::<OUTPUT_F16>(&launch) }
}

/// Adds up rows of bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs`.
#[kernel(threads = Combine::THREADS)]
pub unsafe fn moe_combine_bf16(launch: Combine) {
    // SAFETY: the contract is this function's too.
    unsafe { combine::run::<OUTPUT_BF16>(&launch) }
}
