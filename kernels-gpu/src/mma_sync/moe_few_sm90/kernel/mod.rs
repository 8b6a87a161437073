//! Products of few tokens.
//!
//! ```text
//! ids ─ a warp ─▶ lists ─┬─ each warp: weights ─▶ its stages ─┐
//!                        └─ each warp: tokens ─▶ registers ───┴─ products ─▶ intermediate, or rows ─ CTA ─▶ output
//! ```

mod down;
mod entries;
mod gate_up;
mod lists;
mod products;
mod tokens;
mod weights;
mod work;
