//! `mma.sync`: D = A · B + C in a warp's registers, also with a sparse A, which takes half as many registers.

use super::product::{Product, Sum, gather_fragment, shape, types};
use super::sparse::MetadataOperand;
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::fragment::{self, Position};
use crate::hw::matmul::Packing;
use crate::hw::sums::{self, Kind};
use crate::machine::state::Machine;
use crate::machine::warp::{Origin, Undefined, Warp};
use crate::operand::{Dst, Row, Src};
use crate::timing::core as timing;
use crate::types::Type;

/// Rows of A and D, and columns of B and D.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
/// Elements of C and D per lane.
pub(super) const ELEMENTS: usize = 4;

/// `mma.sync d, a, b, c{, metadata, selector}`.
pub struct Mma {
    product: Product,
    /// Bytes per element in its register. An element of 4 or 6 bits takes a byte.
    element_bytes: usize,
    /// Metadata of a sparse A. `None`: A is dense.
    sparse: Option<MetadataOperand>,
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
}

impl Instruction for Mma {
    fn decode(i: &mut Parsed<'_>) -> Result<Mma> {
        let unknown = || DecodeError::unsupported("this combination of shape and types");
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
        let element_bytes = a_type.bits().max(8) as usize / 8;
        let per_register = 4 / element_bytes;
        let sparse = if i.one_of(&["sp", "sp::ordered_metadata"]).is_some() {
            Some(MetadataOperand::decode(i, 4, 8 * element_bytes as u32, k)?)
        } else {
            None
        };
        let of_a = if sparse.is_some() { k / 2 } else { k } / per_register / 2;
        let sums = ELEMENTS / sum.per_register();
        if (a.len(), b.len(), c.len(), d.len()) != (of_a, k / per_register / 4, sums, sums) {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        if sparse.is_none() {
            // `issue` marks the elements of D that undefined elements of A, B and C change.
            i.carries(|_, _| Vec::new());
        }
        let saturate = i.has("satfinite");
        let negate = (false, false);
        let packing = if i.has("kind::f8f6f4") { Packing::Container } else { Packing::Dense };
        let adder = i.adder(sums::Instruction::Mma, Kind::of(a_type), sparse.is_some());
        let product = Product { sum, a: a_type, b: b_type, k, saturate, negate, adder, packing };
        Ok(Mma { product, element_bytes, sparse, d, a, b, c })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let multiply_adds = (M * N * self.product.k) as u64;
        m.count_matrix_operation(w, &[w.cta], multiply_adds);
        if let Some(timed) = &mut m.timed {
            // Only the stored elements of a sparse A take time.
            let there = if self.sparse.is_some() { multiply_adds / 2 } else { multiply_adds };
            timed.access = timing::Access::Matrix { multiply_adds: there * self.element_bytes as u64 / 2 };
        }
        let open = [&self.a, &self.b, &self.c].into_iter().flatten().find_map(|s| w.undefined_somewhere(*s));
        if let (true, true, Some(origin)) = (m.sanitize, self.sparse.is_none(), open) {
            self.mark(w, origin);
        }
        self.finish(w, m, mask)?;
        Ok(Flow::Next)
    }
}

impl Mma {
    /// Marks the elements of D that undefined elements change: a row of D for an element of A, a column for an element
    /// of B, and one element for an element of C.
    fn mark(&self, w: &mut Warp, origin: Origin) {
        let per_register = 4 / self.element_bytes as u32;
        let width = 8 * self.element_bytes;
        let has = |s: Src, lane: usize, width: usize, index: usize| {
            w.undefined_bits(s, lane) >> (width * index) & (u64::MAX >> (64 - width)) != 0
        };
        let (mut rows, mut columns) = ([false; M], [false; N]);
        for (lane, index) in (0..32).flat_map(|lane| (0..per_register).map(move |index| (lane, index))) {
            for (register, _) in self.a.iter().enumerate().filter(|(_, s)| has(**s, lane, width, index as usize)) {
                rows[fragment::mma_a(lane as u32, register as u32, index, per_register).row as usize] = true;
            }
            for (register, _) in self.b.iter().enumerate().filter(|(_, s)| has(**s, lane, width, index as usize)) {
                columns[fragment::mma_b(lane as u32, register as u32, index, per_register).column as usize] = true;
            }
        }
        let per_sum = ELEMENTS / self.d.len();
        let width = 32 / per_sum;
        let mut results = Vec::new();
        for (lane, index) in (0..32).flat_map(|lane| (0..ELEMENTS).map(move |index| (lane, index))) {
            let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
            let (number, at) = (index / per_sum, index % per_sum);
            let open = rows[row as usize] || columns[column as usize] || has(self.c[number], lane, width, at);
            if let (true, Some(register)) = (open, self.d[number].register) {
                let bits = (u64::MAX >> (64 - width)) << (width * at);
                results.push(Undefined { register, lane, bits, origin });
            }
        }
        w.undefined_results.append(&mut results);
    }

    fn finish(&self, w: &mut Warp, m: &Machine<'_>, mask: u32) -> Stopped<()> {
        let bytes = self.element_bytes;
        let (per_register, row_bytes) = (4 / bytes as u32, self.product.k * bytes);
        // The lanes hold 128 bytes per register of A: 8 bytes per row.
        let a_bytes = self.a.len() * 8;
        let (mut a, mut b) = (vec![0; M * a_bytes], vec![0; N * row_bytes]);
        gather_fragment(w, &self.a, bytes, &mut a, |lane, register, index| {
            let Position { row, column } = fragment::mma_a(lane, register, index, per_register);
            row as usize * a_bytes + column as usize * bytes
        });
        gather_fragment(w, &self.b, bytes, &mut b, |lane, register, index| {
            let Position { row, column } = fragment::mma_b(lane, register, index, per_register);
            column as usize * row_bytes + row as usize * bytes
        });
        if let Some(sparse) = &self.sparse {
            a = sparse.read(w).dense(&a, a_bytes)?;
        }
        let place = |lane: usize, index: usize| {
            let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
            row as usize * N + column as usize
        };
        let mut rows: Vec<Row> = self.c.iter().map(|s| w.get(*s)).collect();
        self.product.accumulate((M, &a), (N, &b), m.adder(&self.product.adder), &mut rows, ELEMENTS, place);
        for (d, row) in self.d.iter().zip(&rows) {
            d.write(w, mask, row);
        }
        Ok(())
    }
}
