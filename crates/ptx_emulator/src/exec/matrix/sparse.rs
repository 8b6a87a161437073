//! Metadata of a sparse A in registers (PTX ISA, "mma.sp", "wgmma.mma_async.sp": "Sparse matrix storage").

use super::product::register;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::sparse::{self, Twice};
use crate::machine::warp::Warp;
use crate::operand::{Row, Src};

/// Metadata and sparsity selector.
pub struct MetadataOperand {
    register: Src,
    selector: u32,
    unit: usize,
    groups: usize,
}

impl MetadataOperand {
    /// Decodes operands `n` and `n + 1`. The elements of A have `bits` bits in its registers, and A has `k` columns.
    pub fn decode(i: &mut Parsed<'_>, n: usize, bits: u32, k: usize) -> Result<MetadataOperand> {
        let register = register(i, n)?;
        let selector = i.constant(n + 1, "the sparsity selector")? as u32;
        let groups = sparse::groups(bits, k);
        // One, two or all four lanes of each group of four hold the metadata.
        if ![4, 8, 16].contains(&groups) || selector as usize >= 16 / groups {
            return Err(DecodeError::invalid("the sparsity selector names no lanes"));
        }
        Ok(MetadataOperand { register, selector, unit: sparse::unit_bytes(bits), groups })
    }

    /// Reads the metadata from the warp's registers.
    pub fn read(&self, w: &Warp) -> Metadata {
        Metadata { registers: w.get(self.register), selector: self.selector, unit: self.unit, groups: self.groups }
    }
}

/// Metadata of a warp's 16 rows.
pub struct Metadata {
    registers: Row,
    selector: u32,
    unit: usize,
    groups: usize,
}

impl Metadata {
    /// Expands the stored rows of `row_bytes` bytes each to dense rows.
    pub fn dense(&self, rows: &[u8], row_bytes: usize) -> Stopped<Vec<u8>> {
        let bits = |row: usize, group: usize| {
            let bytes = self.unit == 1;
            let (lane, bit) = sparse::mma_place(row as u32, group as u32, self.groups as u32, bytes, self.selector);
            self.registers[lane as usize] as u32 >> bit & 15
        };
        sparse::dense(rows, row_bytes, self.unit, bits).map_err(twice)
    }
}

/// Fault for metadata with which a GPU's result is undefined.
pub fn twice(Twice { row, group }: Twice) -> Box<Stop> {
    let text = format!("the metadata of row {row} of A puts two elements in one position, in group {group} along K");
    Stop::new(FaultKind::InvalidOperand, text)
}
