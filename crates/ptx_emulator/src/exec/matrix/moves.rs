//! `ldmatrix`, `stmatrix`, `movmatrix`: moves 8×8 matrices of 16-bit elements between shared memory and fragments.
//!
//! - `ldmatrix` also loads 8×16 and 16×16 matrices of 4-bit or 6-bit elements, which it widens to bytes, and 16×16
//!   matrices of bytes.
//! - `stmatrix` also stores 16×8 matrices of bytes, column by column.

use std::sync::Arc;

use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::fragment::{self, Position};
use crate::machine::address::Lane;
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::warp::{Source, Undefined, Warp};
use crate::operand::{Address, Dst, Row, Src};
use crate::timing::core as timing;
use crate::types::{Space, Type};

/// Rows of a matrix. A 16×16 matrix is two matrices of 8 rows, one below the other, with one register each.
const ROWS: usize = 8;
/// Bytes per row.
const ROW_BYTES: usize = 16;
/// Maximum number of registers that an instruction fills.
const MOST_REGISTERS: usize = 4;

/// A matrix in memory, row after row.
type Matrix = [[u8; ROW_BYTES]; ROWS];

/// Matrices in memory. The lanes supply the addresses of their rows.
struct Matrices {
    address: Address,
    space: Space,
    trans: bool,
}

impl Matrices {
    /// Decodes the matrices. The instruction must have `of_each` registers for each matrix.
    fn decode(i: &mut Parsed<'_>, address: usize, registers: usize, of_each: usize) -> Result<Matrices> {
        let address = i.address(address)?;
        let count = match i.one_of(&["x2", "x4"]) {
            Some("x2") => 2,
            Some(_) => 4,
            None => 1,
        };
        if registers != count * of_each {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        Ok(Matrices { address, space: i.space_at(&address), trans: i.has("trans") })
    }

    fn row(&self, w: &Warp, matrix: usize, row: usize) -> Lane {
        let lane = fragment::ldmatrix_address_lane(matrix as u32, row as u32);
        w.lane_at(&self.address, self.space, lane as usize)
    }

    /// Mask of the lanes that supply the row addresses of a matrix, and the addresses.
    fn rows(&self, w: &Warp, matrix: usize) -> (u32, [u64; 32]) {
        let (mut mask, mut addresses) = (0, [0; 32]);
        for row in 0..ROWS {
            let Lane { lane, address, .. } = self.row(w, matrix, row);
            mask |= 1 << lane;
            addresses[lane as usize] = address;
        }
        (mask, addresses)
    }

    /// Counts the bank conflicts of one matrix. All its rows are read or written at once.
    fn count_bank_conflicts(&self, w: &Warp, m: &mut Machine<'_>, matrix: usize) {
        if m.sanitize {
            let (mask, addresses) = self.rows(w, matrix);
            m.count_bank_conflicts(w, mask, &addresses, ROW_BYTES as u32);
        }
    }

    /// Cycles of shared memory that the access to one matrix takes.
    fn shared_cycles(&self, w: &Warp, matrix: usize) -> u64 {
        let (mask, addresses) = self.rows(w, matrix);
        timing::shared_cycles(mask, &addresses, ROW_BYTES as u32)
    }

    /// Fragment of a matrix in one register, with two elements per lane.
    fn fragment(&self, matrix: &Matrix) -> Row {
        let half = |lane: usize, half: u32| {
            let Position { row, column } = fragment::ldmatrix(lane as u32, half, self.trans);
            let at = column as usize * 2;
            u64::from(u16::from_le_bytes([matrix[row as usize][at], matrix[row as usize][at + 1]]))
        };
        std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16)
    }

    /// Matrix whose fragment is in a register. Inverse of [`fragment`](Self::fragment).
    fn matrix(&self, fragment: &Row) -> Matrix {
        let mut matrix = Matrix::default();
        for (lane, value) in fragment.iter().enumerate() {
            for half in 0..2 {
                let Position { row, column } = fragment::ldmatrix(lane as u32, half, self.trans);
                let bytes = ((value >> (16 * half)) as u16).to_le_bytes();
                matrix[row as usize][column as usize * 2..][..2].copy_from_slice(&bytes);
            }
        }
        matrix
    }
}

/// `ldmatrix registers, [address]`.
pub struct LdMatrix {
    out: Vec<Dst>,
    registers: Arc<[u32]>,
    from: Matrices,
    /// Bits of an element that is widened to a byte. `None`: elements keep their size.
    widened: Option<u32>,
    /// `true` for matrices with 16 rows.
    tall: bool,
}

/// Widens the 16 elements of `bits` bits at the start of a row to one byte each (PTX ISA, "ldmatrix": `.b6x16_p32`,
/// `.b4x16_p64`).
fn widen(row: &[u8; ROW_BYTES], bits: u32) -> [u8; ROW_BYTES] {
    let packed = u128::from_le_bytes(*row);
    std::array::from_fn(|element| (packed >> (element as u32 * bits)) as u8 & (u8::MAX >> (8 - bits)))
}

/// Fragment of a 16×16 matrix in its first or second register, with four elements per lane.
fn tall_fragment(halves: &[Matrix], register: u32) -> Row {
    std::array::from_fn(|lane| {
        let byte = |byte| {
            let Position { row, column } = fragment::ldmatrix_m16n16(lane as u32, register, byte);
            halves[row as usize / ROWS][row as usize % ROWS][column as usize]
        };
        u32::from_le_bytes([0, 1, 2, 3].map(byte)).into()
    })
}

impl Instruction for LdMatrix {
    fn decode(i: &mut Parsed<'_>) -> Result<LdMatrix> {
        let out = i.dst_vector(0)?;
        let registers = out.iter().filter_map(|d| d.register).collect();
        let widened = i.one_of(&["b4x16_p64", "b6x16_p32"]).map(|source| if source == "b4x16_p64" { 4 } else { 6 });
        let tall = i.has("m16n16");
        let from = Matrices::decode(i, 1, out.len(), if tall { 2 } else { 1 })?;
        Ok(LdMatrix { from, out, registers, widened, tall })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        if !m.launch.config.strict
            && let Some(race) = &mut m.race
        {
            race.reads_together(w.pc());
        }
        let mut matrices = [Matrix::default(); MOST_REGISTERS];
        // Undefined bits of the matrices, and the origin of some of them.
        let (mut undefined, mut origin) = ([Matrix::default(); MOST_REGISTERS], None);
        for (n, matrix) in matrices[..self.out.len()].iter_mut().enumerate() {
            for (row, bytes) in matrix.iter_mut().enumerate() {
                let from = self.from.row(w, n, row);
                match self.widened {
                    None => {
                        let unwritten = m.load_value(w, from, Mode::Read, bytes, false)?;
                        let copied =
                            if m.has_undefined(w) { m.undefined_bytes(w, from, ROW_BYTES as u32)? } else { None };
                        let here = (unwritten != 0).then(|| w.begins(Source::UnwrittenShared));
                        origin = origin.or(here).or(copied.map(|(_, origin)| origin));
                        let mask = unwritten | copied.map_or(0, |(mask, _)| mask);
                        for (byte, open) in undefined[n][row].iter_mut().enumerate() {
                            *open = if mask >> byte & 1 == 1 { u8::MAX } else { 0 };
                        }
                    }
                    Some(bits) => {
                        if !from.address.is_multiple_of(ROW_BYTES as u64) {
                            let text =
                                format!("the row address {:#x} in shared memory is not a multiple of 16", from.address);
                            return Err(Stop::new(FaultKind::Misaligned, text).lane(from.lane));
                        }
                        // The padding after the elements is not read.
                        for (at, word) in (from.address..).step_by(4).zip(bytes[..2 * bits as usize].chunks_mut(4)) {
                            m.load(w, Lane { address: at, ..from }, Mode::Read, word)?;
                        }
                        *bytes = widen(bytes, bits);
                    }
                }
            }
            self.from.count_bank_conflicts(w, m, n);
        }
        for (n, d) in self.out.iter().enumerate() {
            let fragment = |matrices: &[Matrix]| {
                if self.tall {
                    tall_fragment(&matrices[n / 2 * 2..][..2], n as u32 % 2)
                } else {
                    self.from.fragment(&matrices[n])
                }
            };
            d.write(w, mask, &fragment(&matrices));
            if let (Some(origin), Some(register)) = (origin, d.register) {
                let open = fragment(&undefined).into_iter().enumerate();
                w.undefined_results.extend(open.map(|(lane, bits)| Undefined { register, lane, bits, origin }));
            }
        }
        if let Some(timed) = &mut m.timed {
            let cycles = (0..self.out.len()).map(|n| self.from.shared_cycles(w, n)).sum();
            timed.access = timing::Access::Shared { cycles };
        }
        m.begin_load(w, &self.registers);
        Ok(Flow::Next)
    }
}

/// Columns of the 16×8 matrix of bytes whose fragment is in a register. A lane holds the same elements as of `mma`'s D
/// (PTX ISA, "stmatrix", fragment of `.m16n8`; CUTLASS's `SM100_U8x4_STSM_T`).
fn columns_of_bytes(fragment: &Row) -> Matrix {
    let mut matrix = Matrix::default();
    for (lane, value) in fragment.iter().enumerate() {
        for index in 0..4 {
            let Position { row, column } = fragment::mma_c(lane as u32, index);
            matrix[column as usize][row as usize] = (value >> (8 * index)) as u8;
        }
    }
    matrix
}

/// `stmatrix [address], registers`.
pub struct StMatrix {
    to: Matrices,
    /// `true` for matrices of 16×8 bytes, which are stored column by column.
    bytes: bool,
    from: Vec<Src>,
}

impl Instruction for StMatrix {
    fn decode(i: &mut Parsed<'_>) -> Result<StMatrix> {
        let from = i.src_vector(1, Type::B32)?;
        // `issue` marks the undefined bytes in memory.
        i.carries(|_, _| Vec::new());
        Ok(StMatrix { to: Matrices::decode(i, 0, from.len(), 1)?, bytes: i.has("m16n8"), from })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, _: u32) -> Stopped<Flow> {
        for (n, s) in self.from.iter().enumerate() {
            let fragment = w.get(*s);
            let matrix = if self.bytes { columns_of_bytes(&fragment) } else { self.to.matrix(&fragment) };
            for (row, bytes) in matrix.iter().enumerate() {
                m.store_value(w, self.to.row(w, n, row), Mode::Write, bytes)?;
            }
            if let Some(first) = (0..32).find(|&lane| m.sanitize && w.undefined_bits(*s, lane) != 0) {
                let bits: Row = std::array::from_fn(|lane| w.undefined_bits(*s, lane));
                let undefined = if self.bytes { columns_of_bytes(&bits) } else { self.to.matrix(&bits) };
                let origin = w.origin(*s, first);
                for (row, bytes) in undefined.iter().enumerate() {
                    let mask = (0..ROW_BYTES).fold(0, |mask, n| mask | u64::from(bytes[n] != 0) << n);
                    m.store_undefined(w, self.to.row(w, n, row), ROW_BYTES as u32, mask, origin)?;
                }
            }
            self.to.count_bank_conflicts(w, m, n);
        }
        Ok(Flow::Next)
    }
}

/// `movmatrix d, a`: transposes a matrix in registers.
pub fn movmatrix(i: &mut Parsed<'_>) -> Decoded {
    let (d, a) = (i.dst(0)?, i.src(1, Type::B32)?);
    Ok(Box::new(move |w, _, mask| {
        if w.all != u32::MAX {
            return Err(Stop::new(FaultKind::WarpDivergence, "movmatrix needs all 32 lanes"));
        }
        let value = w.get(a);
        let half = |lane: usize, half: u32| {
            let (from, side) = fragment::movmatrix_source(lane as u32, half);
            value[from as usize] >> (16 * side) & 0xffff
        };
        d.write(w, mask, &std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16));
        Ok(Flow::Next)
    }))
}
