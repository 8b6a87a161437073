//! `mma.sync` of f64: the sums of a row and a column are made by fused multiply-adds along K, each rounded to nearest.

use super::product::shape;
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

/// Columns of B and D.
const N: usize = 8;

/// `mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 d, a, b, c`, and with 16 rows.
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
                // With 8 rows there is one register, the first.
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
                let total = a.iter().zip(b).fold(f64::from_bits(*sum), |sum, (a, b)| a.mul_add(*b, sum));
                *sum = total.to_bits();
            }
            d.write(w, mask, &sums);
        }
    }
}
