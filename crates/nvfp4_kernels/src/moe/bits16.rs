//! Products of 16-bit rows.

use super::chain::Chain;
use super::experts::Experts;
use super::projection::Projection;
use super::tokens::Tokens;
use crate::launch::Launch;
use crate::products::Bits16;
use nvfp4_core::Error;

impl Chain<'_> {
    /// Returns the launch of a product on the fastest instance.
    pub(super) fn bits16_product(&self, experts: &Experts<'_>, projection: Projection) -> Result<Launch, Error> {
        let ticket = projection.ticket(experts);
        let Projection { index, op, b, expert_bytes, alpha, bias, n, k, activation } = projection;
        let is_first = index == 0;
        let capacity = experts.tokens.sorted_capacity();
        let operands = Bits16 {
            tokens: match experts.tokens {
                Tokens::Bits16 { tokens } if is_first => tokens,
                _ if is_first => experts.result(1),
                _ => experts.result(0),
            },
            rows: if is_first && experts.is_routed { experts.list(|lists| lists.rows) } else { 0 },
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
            // The launch before the first product makes the lists, unless tokens are expanded in between.
            lists_pending: (is_first && experts.is_routed && !self.expands()).into(),
            row_capacity: capacity.unwrap_or(0),
            c_is_sorted: (is_first && capacity.is_some()).into(),
            activation,
            unused: 0,
        };
        self.product(self.kernels.bits16, experts, (op, &activation, false), operands)
    }
}
