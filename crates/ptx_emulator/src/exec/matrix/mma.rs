//! `mma.sync`: D = A · B + C in a warp's registers.

use super::product::{Product, Sum, gather_fragment, shape, types};
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::fragment::{self, Position};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Dst, Row, Src};
use crate::timing::core as timing;
use crate::types::Type;

/// Rows of A and D, and columns of B and D.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
/// Elements of C and D that a lane holds.
pub(super) const ELEMENTS: usize = 4;

/// `mma.sync d, a, b, c`.
pub struct Mma {
    product: Product,
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
}

impl Instruction for Mma {
    fn decode(i: &mut Parsed<'_>) -> Result<Mma> {
        let unknown = || DecodeError::unsupported("this shape or type");
        let [m, n, k] = shape(i).ok_or_else(unknown)?;
        let (sum, a_type, b_type) = types(i).ok_or_else(unknown)?;
        if (m, n) != (M, N) {
            return Err(unknown());
        }
        let last = i.modifiers().last().and_then(|t| Sum::parse(t));
        if last != Some(sum) {
            return Err(DecodeError::unsupported("C and D of different types"));
        }
        let d = i.dst_vector(0)?;
        let [a, b, c] = [i.src_vector(1, Type::B32)?, i.src_vector(2, Type::B32)?, i.src_vector(3, Type::B32)?];
        let per_register = 32 / a_type.bits() as usize;
        let sums = ELEMENTS / sum.per_register();
        if (a.len(), b.len(), c.len(), d.len()) != (k / per_register / 2, k / per_register / 4, sums, sums) {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        let saturate = i.has("satfinite");
        let negate = (false, false);
        let product = Product { sum, a: a_type, b: b_type, k, saturate, negate, of_warpgroup: false };
        Ok(Mma { product, d, a, b, c })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let multiply_adds = (M * N * self.product.k) as u64;
        m.count_matrix_operation(w, &[w.cta], multiply_adds);
        if let Some(timed) = &mut m.timed {
            timed.access =
                timing::Access::Matrix { multiply_adds: multiply_adds * u64::from(self.product.a.bits()) / 16 };
        }
        self.finish(w, mask);
        Ok(Flow::Next)
    }
}

impl Mma {
    fn finish(&self, w: &mut Warp, mask: u32) {
        let Product { k, .. } = self.product;
        let bytes = self.product.a.bits() as usize / 8;
        let (per_register, row_bytes) = (4 / bytes as u32, k * bytes);
        let at = |row: u32, k: u32| row as usize * row_bytes + k as usize * bytes;
        let (mut a, mut b) = (vec![0; M * row_bytes], vec![0; N * row_bytes]);
        gather_fragment(w, &self.a, bytes, &mut a, |lane, register, index| {
            let Position { row, column } = fragment::mma_a(lane, register, index, per_register);
            at(row, column)
        });
        gather_fragment(w, &self.b, bytes, &mut b, |lane, register, index| {
            let Position { row, column } = fragment::mma_b(lane, register, index, per_register);
            at(column, row)
        });
        let place = |lane: usize, index: usize| {
            let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
            row as usize * N + column as usize
        };
        let mut rows: Vec<Row> = self.c.iter().map(|s| w.get(*s)).collect();
        self.product.accumulate((M, &a), (N, &b), &mut rows, ELEMENTS, place);
        for (d, row) in self.d.iter().zip(&rows) {
            d.write(w, mask, row);
        }
    }
}
