//! `mma.sync` and `wmma` of f64. Each element of D is a chain of fused multiply-adds along K, each rounded once.

use super::product::shape;
use super::wmma::{Fragment, Part};
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::float::rounding;
use crate::exec::instruction::Instruction;
use crate::hw::exact;
use crate::hw::fragment::{self, Position};
use crate::hw::number::Rounding;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Dst, Row, Src};
use crate::timing::core as timing;
use crate::types::Type;

/// Columns of B and D.
const N: usize = 8;

/// `mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 d, a, b, c`, and the shapes with 16 rows.
pub struct DoubleMma {
    m: usize,
    k: usize,
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
}

impl Instruction for DoubleMma {
    fn decode(i: &mut Parsed<'_>) -> Result<DoubleMma> {
        let [m, _, k] = shape(i).ok_or_else(|| DecodeError::unsupported("this shape"))?;
        let d = i.dst_vector(0)?;
        let [a, b, c] = [i.src_vector(1, Type::F64)?, i.src_vector(2, Type::F64)?, i.src_vector(3, Type::F64)?];
        if (a.len(), b.len(), c.len(), d.len()) != (m * k / 32, N * k / 32, m * N / 32, m * N / 32) {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        Ok(DoubleMma { m, k, d, a, b, c })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let multiply_adds = (self.m * N * self.k) as u64;
        m.count_matrix_operation(w, &[w.cta], multiply_adds);
        if let Some(timed) = &mut m.timed {
            timed.access = timing::Access::Matrix { multiply_adds: multiply_adds * 4 };
        }
        self.finish(w, mask);
        Ok(Flow::Next)
    }
}

impl DoubleMma {
    fn finish(&self, w: &mut Warp, mask: u32) {
        let (mut a, mut b) = (vec![0.0; self.m * self.k], vec![0.0; N * self.k]);
        let registers = |sources: &[Src], w: &Warp| sources.iter().map(|s| w.get(*s)).collect::<Vec<Row>>();
        for (register, row) in registers(&self.a, w).iter().enumerate() {
            for (lane, bits) in row.iter().enumerate() {
                // With 8 rows, a lane holds only the first register.
                let Position { row, column } = fragment::mma_a(lane as u32, register as u32, 0, 1);
                a[row as usize * self.k + column as usize] = f64::from_bits(*bits);
            }
        }
        for (register, row) in registers(&self.b, w).iter().enumerate() {
            for (lane, bits) in row.iter().enumerate() {
                let Position { row, column } = fragment::mma_b(lane as u32, register as u32, 0, 1);
                b[column as usize * self.k + row as usize] = f64::from_bits(*bits);
            }
        }
        for (index, (d, mut sums)) in self.d.iter().zip(registers(&self.c, w)).enumerate() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
                let (a, b) = (&a[row as usize * self.k..][..self.k], &b[column as usize * self.k..][..self.k]);
                *sum = dot(a, b, f64::from_bits(*sum), Rounding::NearestEven).to_bits();
            }
            d.write(w, mask, &sums);
        }
    }
}

/// Dot product of a row and a column, plus an addend.
fn dot(row: &[f64], column: &[f64], addend: f64, rounding: Rounding) -> f64 {
    row.iter().zip(column).fold(addend, |sum, (a, b)| exact::fma(*a, *b, sum, rounding))
}

/// `wmma.mma.sync.aligned.row.col.m8n8k4.f64.f64.f64.f64 d, a, b, c`, with any layouts of A and B.
pub struct DoubleWmma {
    rounding: Rounding,
    /// Register layouts of A, of B, and of C and D.
    fragments: [Fragment; 3],
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
}

const M8N8K4: [usize; 3] = [8, 8, 4];

impl Instruction for DoubleWmma {
    fn decode(i: &mut Parsed<'_>) -> Result<DoubleWmma> {
        let columns = i.modifiers().iter().filter_map(|word| ["row", "col"].iter().position(|layout| word == layout));
        let [a_column, b_column] = columns.collect::<Vec<_>>()[..] else {
            return Err(DecodeError::invalid("the layouts of A and B are missing"));
        };
        let fragment = |part, column| Fragment::new(M8N8K4, part, column == 1, size_of::<f64>());
        let fragments = [fragment(Part::A, a_column), fragment(Part::B, b_column), fragment(Part::Sum, 0)];
        let d = i.dst_vector(0)?;
        let [a, b, c] = [i.src_vector(1, Type::F64)?, i.src_vector(2, Type::F64)?, i.src_vector(3, Type::F64)?];
        if [a.len(), b.len(), c.len()] != fragments.map(|fragment| fragment.registers()) || c.len() != d.len() {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        Ok(DoubleWmma { rounding: rounding(i), fragments, d, a, b, c })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        m.count_matrix_operation(w, &[w.cta], M8N8K4.iter().product::<usize>() as u64);
        let [of_a, of_b, of_sum] = self.fragments;
        let numbers = |bytes: Vec<u8>| -> Vec<f64> {
            bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().expect("8 bytes"))).collect()
        };
        // The elements of both are contiguous along K.
        let a = numbers(of_a.gather(w, &self.a, false));
        let b = numbers(of_b.gather(w, &self.b, true));
        for (index, (d, c)) in self.d.iter().zip(&self.c).enumerate() {
            let mut sums = w.get(*c);
            for (lane, sum) in sums.iter_mut().enumerate() {
                let (row, column) = of_sum.place(lane, index);
                *sum = dot(&a[row * 4..][..4], &b[column * 4..][..4], f64::from_bits(*sum), self.rounding).to_bits();
            }
            d.write(w, mask, &sums);
        }
        Ok(Flow::Next)
    }
}
