//! The matrices of a product: gate and up, or down.

use kernels_gpu::epilogue::{self, PARAMETERS};

use super::PlacedExperts;
use super::experts::Experts;
use super::weights::packed_bytes;
use crate::group::Address;
use nvfp4_core::moe::{Activation, Form, MoeSizes};
use nvfp4_core::problem::Op;

/// Tickets by which the products take their tiles: one per product.
const TICKETS: [u64; 2] = [0, 1];

/// Matrices of a product. A plain product has one matrix, and 0 as the second address.
pub(super) struct Projection {
    /// Index of the product: 0 for gate and up (or up alone), 1 for down.
    pub index: usize,
    pub op: Op,
    pub b: [Address; 2],
    /// Bytes from one expert's matrices to the next expert's.
    pub expert_bytes: u64,
    pub alpha: [Address; 2],
    pub bias: [Address; 2],
    /// Columns of the result.
    pub n: u32,
    /// Elements per sum.
    pub k: u32,
    pub activation: epilogue::Activation,
}

impl Projection {
    /// Returns gate and up, or up alone if the activation has no gate.
    pub fn gate_up(sizes: &MoeSizes, experts: &Experts<'_>) -> Self {
        let (n, k) = (experts.memory.width, sizes.hidden as u32);
        let PlacedExperts { gate_up, alpha: [gate_alpha, up_alpha, _], bias: [gate_bias, up_bias, _], .. } =
            *experts.placed;
        let bytes = packed_bytes(sizes.token_format, n, k);
        let activation = activation_parameters(sizes.activation);
        if sizes.activation.has_gate() {
            let (b, alpha, bias) = ([gate_up, gate_up + bytes], [gate_alpha, up_alpha], [gate_bias, up_bias]);
            Self { index: 0, op: Op::Gated, b, expert_bytes: 2 * bytes, alpha, bias, n, k, activation }
        } else {
            let (b, alpha, bias) = ([gate_up, 0], [up_alpha, 0], [up_bias, 0]);
            Self { index: 0, op: Op::Plain, b, expert_bytes: bytes, alpha, bias, n, k, activation }
        }
    }

    /// Returns down.
    pub fn down(sizes: &MoeSizes, experts: &Experts<'_>) -> Self {
        let (n, k) = (sizes.hidden as u32, experts.memory.width);
        let PlacedExperts { down, alpha: [.., alpha], bias: [.., bias], .. } = *experts.placed;
        Self {
            index: 1,
            op: Op::Plain,
            b: [down, 0],
            expert_bytes: packed_bytes(sizes.token_format, n, k),
            alpha: [alpha, 0],
            bias: [bias, 0],
            n,
            k,
            activation: epilogue::Activation::NONE,
        }
    }

    /// Returns the address of the product's ticket.
    pub fn ticket(&self, experts: &Experts<'_>) -> Address {
        experts.list(|lists| lists.tickets) + 4 * TICKETS[self.index]
    }
}

/// Returns an activation as kernels take it, with f32 parameters.
pub(super) fn activation_parameters(activation: Activation) -> epilogue::Activation {
    let none = epilogue::Activation::NONE;
    match activation.form() {
        _ if activation == Activation::Silu => none,
        Form::Square => epilogue::Activation { kind: PARAMETERS, ..none },
        Form::Curve(curve, numbers) => epilogue::Activation::curve(curve, numbers),
        Form::Formula(gate) => epilogue::Activation {
            kind: PARAMETERS,
            exponent: [gate.slope, gate.cubic].map(|factor| (-std::f64::consts::LOG2_E * factor) as f32),
            limit: gate.limit as f32,
            offset: gate.offset as f32,
        },
    }
}
