//! `tcgen05.cp`: copies from shared memory to tensor memory.

use rustc_hash::FxHashSet;

use super::cells::{CtaGroup, cell, offset};
use super::turn::Turn;
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::exec::shared_matrix::{chunk, is_written, tcgen05_matrix, track_order};
use crate::hw::descriptor::CHUNK_BYTES;
use crate::hw::tmem::{Address as Cell, CopyShape};
use crate::machine::race::Mode;
use crate::machine::state::{Effect, Machine};
use crate::machine::tensor_core::Kind;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::timing::work::Work;
use crate::types::Type;

/// `tcgen05.cp [to], descriptor`.
pub struct Cp {
    group: CtaGroup,
    shape: CopyShape,
    to: Address,
    from: Src,
}

impl Instruction for Cp {
    fn decode(i: &mut Parsed<'_>) -> Result<Cp> {
        let shape = match i.one_of(&["128x256b", "4x256b", "128x128b", "64x128b", "32x128b"]) {
            Some("128x256b") => CopyShape::L128x256b,
            Some("4x256b") => CopyShape::L4x256b,
            Some("128x128b") => CopyShape::L128x128b,
            Some("64x128b") if i.has("warpx2::02_13") => CopyShape::L64x128bPairs02And13,
            Some("64x128b") => CopyShape::L64x128bPairs01And23,
            _ => CopyShape::L32x128bAll,
        };
        Ok(Cp { group: CtaGroup::decode(i)?, shape, to: i.address(0)?, from: i.src(1, Type::B64)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let pipelined: &[Kind] = if self.shape == CopyShape::L4x256b { &[Kind::Cp, Kind::Shift] } else { &[Kind::Cp] };
        for lane in lanes(mask) {
            let matrix = tcgen05_matrix(m, lane, w.lane(self.from, lane))?;
            let base = cell(w, &self.to, lane);
            let ctas = self.group.ctas(w, m)?;
            let turn = Turn::take(m, w, lane, Kind::Cp, pipelined);
            let mut moves = Vec::new();
            self.shape.visit(&matrix, |chunk, cell| moves.push((chunk, offset(base, cell))));
            for &cta in &ctas {
                let chunks: Vec<u32> = moves.iter().map(|c| c.0).collect();
                track_order(m, w, turn.agent(), cta, &chunks)?;
                for (_, cell) in &moves {
                    m.tmem_access(cta, *cell, CHUNK_BYTES / 4, turn.agent(), Mode::Write, w.pc())?;
                }
            }
            turn.start(m, w, Copy { ctas, moves });
        }
        Ok(Flow::Next)
    }
}

/// Chunks of shared memory and their destination cells, the same in each CTA.
struct Copy {
    ctas: Vec<u32>,
    moves: Vec<(u32, Cell)>,
}

impl Effect for Copy {
    fn work(&self) -> Work {
        // A chunk with several destinations is read once.
        let chunks: FxHashSet<u32> = self.moves.iter().map(|&(chunk, _)| chunk).collect();
        Work::Copy { ctas: self.ctas.clone(), bytes: chunks.len() as u64 * u64::from(CHUNK_BYTES) }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        for &cta in &self.ctas {
            for &(from, cell) in &self.moves {
                let words: [u32; CHUNK_BYTES as usize / 4] = bytemuck::cast(chunk(m, cta, from));
                m.tmem_write_row(cta, cell, &words.map(u32::from_le));
                // Kernels copy padding that no product reads.
                if !is_written(m, cta, from) {
                    m.tmem_undefine_row(cta, cell, words.len());
                }
            }
        }
        m.progress += 1;
        Ok(())
    }
}
