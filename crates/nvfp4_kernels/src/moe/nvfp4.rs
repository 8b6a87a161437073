//! Products of NVFP4 rows. A launch quantizes the operand of a product, unless the product before it did.

use kernels_gpu::layer::moe_quantize_nvfp4::abi::{Quantize, RouteQuantize};
use kernels_gpu::nvfp4_rows::value_bytes;
use kernels_gpu::routed::QuantizedC;

use super::chain::Chain;
use super::experts::Experts;
use super::projection::Projection;
use super::quantize::Input;
use super::tokens::Nvfp4Rows;
use crate::launch::{Launch, output_code};
use crate::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use crate::nvfp4_products::{FEW_ROWS, Nvfp4};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenFormat;

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
        let is_first = projection.index == 0;
        if is_first && self.routes_nvfp4() {
            launches.push(self.route_nvfp4(self.quantize_nvfp4(experts, &projection, rows[0]))?);
        } else if is_first || !quantizes_result {
            let few = experts.rows <= FEW_ROWS;
            let quantize = self.quantize_nvfp4(experts, &projection, rows[projection.index]);
            launches.push(MoeQuantizeNvfp4.launch(quantize, sizes.dtype, few)?);
        }
        let products = self.kernels.nvfp4_products()?;
        let (op, quantized) = (projection.op, (projection.index == 0 && quantizes_result).then_some(rows[1]));
        let operands = self.nvfp4_operands(experts, projection, rows, quantized);
        let early = self.is_early(experts, is_first);
        launches.push(self.product(products, experts, (op, &operands.activation, early), operands)?);
        Ok(launches)
    }

    /// Whether a product may load weights early: not if the launch that makes the lists is still running when the product
    /// starts.
    pub(super) fn is_early(&self, experts: &Experts<'_>, is_first: bool) -> bool {
        experts.rows <= FEW_ROWS && !(is_first && self.routes_nvfp4())
    }

    /// Whether the launch that quantizes the tokens also makes the lists: few tokens, and no shared expert, which has
    /// lists of its own.
    pub(super) fn routes_nvfp4(&self) -> bool {
        let is_nvfp4 = self.layer.sizes.token_format == TokenFormat::Nvfp4;
        is_nvfp4 && self.shared.is_none() && self.routed.rows <= FEW_ROWS
    }

    /// Returns the launch that makes the lists and quantizes the tokens.
    fn route_nvfp4(&self, quantize: Quantize) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let route = RouteQuantize {
            quantize,
            ids: arguments.topk_ids,
            map: self.layer.map,
            named_experts: sizes.named_experts as u32,
            tile_tokens: self.routed.tile_tokens,
        };
        MoeQuantizeNvfp4.route(route, sizes.dtype)
    }

    /// Returns the parameter of the launch that quantizes the operand of a product.
    fn quantize_nvfp4(&self, experts: &Experts<'_>, projection: &Projection, rows: Nvfp4Rows) -> Quantize {
        let Input { address, pitch, weights, places, top_k, count } = self.input(experts, projection);
        Quantize {
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
        }
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
