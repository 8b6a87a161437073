//! Products of FP8 rows: each product follows the launch that quantizes its operand.

use kernels_gpu::layer::moe_quantize::abi::Quantize;

use super::chain::Chain;
use super::experts::Experts;
use super::projection::Projection;
use super::quantize::Input;
use super::tokens::SortedRows;
use crate::launch::{Launch, output_code};
use crate::layer::moe_quantize::MoeQuantize;
use crate::products::Fp8;
use nvfp4_core::Error;

impl Chain<'_> {
    /// Returns the launches that quantize the operand of a product and multiply.
    pub(super) fn fp8_product(
        &self,
        experts: &Experts<'_>,
        projection: Projection,
        rows: [SortedRows; 2],
    ) -> Result<[Launch; 2], Error> {
        let rows = rows[projection.index];
        let Input { address, pitch, weights, places, top_k, count } = self.input(experts, &projection);
        // Only for tokens, the host knows the number, and the lists name each row's token.
        let (lists_rows, token_count) =
            if projection.index == 0 { (experts.list(|lists| lists.rows), count) } else { (0, 0) };
        let quantize = Quantize {
            input: address,
            input_pitch: pitch,
            input_weights: weights,
            places,
            rows: lists_rows,
            firsts: experts.list(|lists| lists.firsts),
            codes: rows.codes,
            scales: rows.scales,
            token_count,
            top_k,
            experts: experts.count(),
            row_capacity: rows.capacity,
            k: projection.k,
            unused: 0,
        };
        let ticket = projection.ticket(experts);
        let Projection { index, op, b, expert_bytes, alpha, bias, n, k, activation } = projection;
        let operands = Fp8 {
            tokens: rows.codes,
            scales: rows.scales,
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            ticket,
            b,
            expert_bytes,
            alpha,
            bias,
            c: experts.result(index),
            n,
            k,
            experts: experts.count(),
            rows: 0,
            row_capacity: rows.capacity,
            output: output_code(self.layer.sizes.dtype),
            activation,
            unused: 0,
        };
        Ok([
            MoeQuantize.launch(quantize, self.layer.sizes.dtype)?,
            self.product(self.kernels.fp8_products()?, experts, (op, &activation, false), operands)?,
        ])
    }
}
