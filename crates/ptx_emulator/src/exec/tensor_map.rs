//! Tensor maps edited on the device (PTX ISA, "Data Movement: tensormap.replace", "Parallel Synchronization:
//! tensormap.cp_fenceproxy").

use super::bulk::{bad_map, read_map};
use super::mbarrier::lane_at;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::tensor_map::{Field, OBJECT_BYTES};
use crate::machine::address::{Lane, Spot};
use crate::machine::race::Mode;
use crate::operand::{Src, lanes};
use crate::types::{Space, Type};

/// Bytes that are read and written at a time.
const WORD: usize = 16;

pub fn replace(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let space = i.space_at(&a);
    let array = i.one_of(&["box_dim", "global_dim", "global_stride", "element_stride"]);
    let ordinal = match (array, i.operands().len()) {
        (Some(_), 3) => match i.src(1, Type::U32)? {
            Src::Constant(n) => n as usize,
            Src::Register(_) => return Err(DecodeError::invalid("the ordinal is a constant")),
        },
        (None, 2) => 0,
        _ => return Err(DecodeError::invalid("wrong number of operands")),
    };
    let field = match array.or(i.one_of(&[
        "global_address",
        "rank",
        "elemtype",
        "interleave_layout",
        "swizzle_mode",
        "swizzle_atomicity",
        "fill_mode",
    ])) {
        Some("box_dim") => Field::BoxDim(ordinal),
        Some("global_dim") => Field::GlobalDim(ordinal),
        Some("global_stride") => Field::GlobalStride(ordinal),
        Some("element_stride") => Field::ElementStride(ordinal),
        Some("global_address") => Field::GlobalAddress,
        Some("rank") => Field::Rank,
        Some("elemtype") => Field::ElemType,
        Some("interleave_layout") => Field::InterleaveLayout,
        Some("swizzle_mode") => Field::SwizzleMode,
        Some("swizzle_atomicity") => Field::SwizzleAtomicity,
        _ => Field::FillMode,
    };
    let value = i.src(i.operands().len() - 1, i.ty().unwrap_or(Type::B32))?;
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let mut map = read_map(m, w, &a, space, lane)?;
            map.replace(field, w.lane(value, lane)).map_err(|e| bad_map(e, lane))?;
            let at = lane_at(w, &a, space, lane);
            for (n, word) in map.to_bytes().chunks_exact(WORD).enumerate() {
                let at = Lane { address: at.address + (n * WORD) as u64, ..at };
                m.store(w, at, Mode::Write, word)?;
            }
        }
        Ok(Flow::Next)
    }))
}

/// `tensormap.cp_fenceproxy`: copies the object from shared to global memory, and makes it visible to the tensor-map
/// proxy.
pub fn cp_fenceproxy(i: &mut Parsed<'_>) -> Decoded {
    let (to, from) = (i.address(0)?, i.address(1)?);
    match i.src(2, Type::U32)? {
        Src::Constant(n) if n == OBJECT_BYTES as u64 => {}
        _ => return Err(DecodeError::invalid("the size is 128")),
    }
    Ok(Box::new(move |w, m, mask| {
        // All lanes name the same objects; the copy is the warp's.
        let lane = mask.trailing_zeros() as usize;
        let mut bytes = [0; OBJECT_BYTES];
        for n in 0..OBJECT_BYTES / WORD {
            let at = lane_at(w, &from, Space::Shared, lane);
            let at = Lane { address: at.address + (n * WORD) as u64, ..at };
            m.load(w, at, Mode::Read, &mut bytes[n * WORD..(n + 1) * WORD])?;
        }
        let at = lane_at(w, &to, Space::Global, lane);
        match m.resolve(w, at, OBJECT_BYTES as u32)? {
            Spot::Global(allocation, offset) => {
                m.track_global(w, lane as u32, (allocation, offset), OBJECT_BYTES as u64, Mode::Write)?;
                allocation.write(offset, &bytes);
                m.buffers[allocation.index].stored += OBJECT_BYTES as u64;
            }
            _ => return Err(Stop::new(FaultKind::OutOfBounds, "an address in global memory expected")),
        }
        Ok(Flow::Next)
    }))
}
