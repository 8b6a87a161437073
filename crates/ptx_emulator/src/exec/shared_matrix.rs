//! Matrices in shared memory that `tcgen05` and `wgmma` address through descriptors. [`crate::hw::descriptor`] computes
//! the addresses of their 16-byte chunks.

use std::ops::Range;

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::hw::descriptor::{CHUNK_BYTES, DescriptorError, Major, SharedMatrix};
use crate::hw::matmul::gather;
use crate::machine::address::SHARED_BASE;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// Turns a descriptor error into a fault.
pub fn bad(error: DescriptorError) -> Box<Stop> {
    let kind = match error {
        DescriptorError::Unsupported(_) => FaultKind::Unsupported,
        _ => FaultKind::BadDescriptor,
    };
    Stop::new(kind, error.to_string())
}

/// Decodes a descriptor of a `tcgen05` instruction.
pub fn tcgen05_matrix(m: &Machine<'_>, lane: usize, bits: u64) -> Stopped<SharedMatrix> {
    let matrix = SharedMatrix::tcgen05(bits).map_err(|error| bad(error).lane(lane as u32))?;
    if !SharedMatrix::has_version(bits) {
        let text = format!("bit 46 of the shared-memory descriptor {bits:#x} is 0; tcgen05 requires 1");
        m.warn(Stop::new(FaultKind::BadDescriptor, text).lane(lane as u32))?;
    }
    Ok(matrix)
}

/// Records and checks the read of chunks in the shared memory of CTA `cta`, which must have been written.
pub fn track_chunks(
    m: &mut Machine<'_>,
    w: &Warp,
    agent: Option<&Agent>,
    cta: u32,
    chunks: impl Iterator<Item = u32>,
) -> Stopped<()> {
    let chunks: Vec<u32> = chunks.collect();
    track_order(m, w, agent, cta, &chunks)?;
    if !m.sanitize {
        return Ok(());
    }
    for &at in chunks.iter().filter(|&&at| !is_written(m, cta, at)) {
        let text = format!("a matrix at byte {} of shared memory was never written", at - SHARED_BASE);
        m.hazard(Stop::new(FaultKind::UninitializedShared, text))?;
    }
    if !m.ctas[cta as usize].shared.undefined.is_empty() {
        chunks.iter().try_for_each(|&at| m.check_undefined(cta, at, CHUNK_BYTES))?;
    }
    Ok(())
}

/// Whether some byte of a chunk in shared memory has been written.
pub fn is_written(m: &Machine<'_>, cta: u32, at: u32) -> bool {
    let defined: &[u8] = bytemuck::cast_slice(&m.ctas[cta as usize].shared.defined);
    defined[at as usize..at as usize + CHUNK_BYTES as usize] != [0; CHUNK_BYTES as usize]
}

/// Records the read of chunks in the shared memory of CTA `cta`, and checks its bounds and its order.
pub fn track_order(m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, cta: u32, chunks: &[u32]) -> Stopped<()> {
    m.reach_async(w, cta, agent);
    let memory = &m.ctas[cta as usize].shared;
    let size = memory.data.len() as u32;
    if let Some(at) = chunks.iter().find(|&&at| at < SHARED_BASE || at + CHUNK_BYTES > size) {
        let byte = i64::from(*at) - i64::from(SHARED_BASE);
        let text =
            format!("a matrix descriptor points to byte {byte} of the {} bytes of shared memory", size - SHARED_BASE);
        return Err(Stop::new(FaultKind::OutOfBounds, text));
    }
    let mut rest = chunks;
    while let (Some(race), Some(agent)) = (&mut m.race, agent)
        && let Err((number, conflict)) = race.agent_accesses(agent, cta, rest, CHUNK_BYTES, Mode::Read, w.pc())
    {
        let stop = m.conflict(Mode::Read, conflict, rest[number], CHUNK_BYTES);
        if conflict.observed || conflict.met {
            m.warn(stop)?
        } else {
            m.hazard(stop)?
        }
        rest = &rest[number + 1..];
    }
    Ok(())
}

/// A matrix in shared memory: rows of `row_bytes` along K.
#[derive(Clone, Copy)]
pub struct MatrixOperand {
    pub matrix: SharedMatrix,
    pub major: Major,
    pub row_bytes: u32,
    /// Bits of an element in shared memory.
    pub element_bits: u32,
}

impl MatrixOperand {
    /// Checks that the descriptor's layout allows elements of this size in this major order.
    pub fn check(self) -> Stopped<()> {
        self.matrix.check(self.major, self.element_bits, self.row_bytes).map_err(bad)
    }

    /// Records and checks the read of `rows`. If the matrix is contiguous along M or N, the read covers all rows up to
    /// `rows.end`.
    pub fn track(
        self,
        m: &mut Machine<'_>,
        w: &Warp,
        agent: Option<&Agent>,
        cta: u32,
        rows: Range<u32>,
    ) -> Stopped<()> {
        let element_bytes = self.element_bits / 8;
        let (lines, per_line) = match self.major {
            Major::K => (rows, self.row_bytes.div_ceil(CHUNK_BYTES)),
            Major::Mn => (0..self.row_bytes / element_bytes.max(1), (rows.end * element_bytes).div_ceil(CHUNK_BYTES)),
        };
        let chunk = |line| move |n| self.matrix.chunk_address(self.major, line, n);
        track_chunks(m, w, agent, cta, lines.flat_map(|line| (0..per_line).map(chunk(line))))
    }

    /// Returns the bytes of the first `rows` rows, row after row.
    pub fn gather(self, m: &Machine<'_>, cta: u32, rows: usize) -> Vec<u8> {
        let element = (self.element_bits as usize / 8).max(1);
        gather(&self.matrix, self.major, rows, self.row_bytes as usize, element, |at| chunk(m, cta, at))
    }
}

/// 16 bytes of a CTA's shared memory. The caller has checked the range.
pub fn chunk(m: &Machine<'_>, cta: u32, at: u32) -> [u8; CHUNK_BYTES as usize] {
    let data = &m.ctas[cta as usize].shared.data;
    let mut out = [0; CHUNK_BYTES as usize];
    out.copy_from_slice(&data[at as usize..at as usize + CHUNK_BYTES as usize]);
    out
}
