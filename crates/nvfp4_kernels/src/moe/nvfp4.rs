//! Products of NVFP4 rows. A launch quantizes the operand of a product, unless the product before it did.

use kernels_gpu::layer::moe_quantize_nvfp4::abi::Quantize;
use kernels_gpu::nvfp4_rows::value_bytes;
use kernels_gpu::routed::QuantizedC;

use super::chain::Chain;
use super::experts::Experts;
use super::projection::Projection;
use super::quantize::Input;
use super::tokens::Nvfp4Rows;
use crate::launch::{Launch, output_code};
use crate::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use crate::nvfp4_products::Nvfp4;
use nvfp4_core::Error;

impl Chain<'_> {
    /// Returns the launches of a product: one that quantizes its operand if needed, and one that multiplies.
    pub(super) fn nvfp4_product(
        &self,
        experts: &Experts<'_>,
        projection: Projection,
        rows: [Nvfp4Rows; 2],
    ) -> Result<Vec<Launch>, Error> {
        let sizes = &self.layer.sizes;
        // With input scales, a gated product quantizes its own result, which is the operand of down.
        let quantizes_result = sizes.has_input_scales() && sizes.activation.has_gate();
        let mut launches = Vec::with_capacity(2);
        if projection.index == 0 || !quantizes_result {
            launches.push(self.quantize_nvfp4(experts, &projection, rows[projection.index])?);
        }
        let products = self.kernels.nvfp4_products()?;
        let (op, quantized) = (projection.op, (projection.index == 0 && quantizes_result).then_some(rows[1]));
        let operands = self.nvfp4_operands(experts, projection, rows, quantized);
        launches.push(self.product(products, experts, (op, &operands.activation), operands));
        Ok(launches)
    }

    /// Returns the launch that quantizes the operand of a product.
    fn quantize_nvfp4(&self, experts: &Experts<'_>, projection: &Projection, rows: Nvfp4Rows) -> Result<Launch, Error> {
        let Input { address, pitch, weights, places, top_k, count } = self.input(experts, projection);
        let quantize = Quantize {
            input: address,
            input_pitch: pitch,
            input_weights: weights,
            places,
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            input_scales: experts.placed.input_scales[projection.index],
            values: rows.values,
            scales: rows.scales,
            globals: rows.globals,
            token_count: count,
            // The lists have the tiles.
            token_tiles: 0,
            top_k,
            experts: experts.count(),
            k: projection.k,
            unused: 0,
        };
        MoeQuantizeNvfp4.launch(quantize, self.layer.sizes.dtype)
    }

    /// Returns the operands of a product. `quantized`: rows that its result is quantized to.
    fn nvfp4_operands(
        &self,
        experts: &Experts<'_>,
        projection: Projection,
        rows: [Nvfp4Rows; 2],
        quantized: Option<Nvfp4Rows>,
    ) -> Nvfp4 {
        let Projection { index, op, b: [weights, _], alpha, bias, n, k, activation, .. } = projection;
        let matrices = u64::from(experts.count()) * op.projections() as u64;
        let writes_c = quantized.is_none() || self.layer.keeps_stages;
        Nvfp4 {
            tokens: rows[index].values,
            rows: rows[index].rows,
            token_scales: rows[index].scales,
            globals: rows[index].globals,
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            weights,
            weight_scales: weights + value_bytes(matrices * u64::from(n), k),
            alpha,
            bias,
            c: if writes_c { experts.result(index) } else { 0 },
            quantized: quantized.map_or(QuantizedC::default(), |Nvfp4Rows { values, scales, globals, .. }| {
                QuantizedC { input_scales: experts.placed.input_scales[1], values, scales, globals }
            }),
            n,
            k,
            experts: experts.count(),
            output: output_code(self.layer.sizes.dtype),
            activation,
        }
    }
}
