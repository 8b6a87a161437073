//! The operation of a reducing copy, or of `red.async`.

use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::atomic;
use crate::hw::tensor_map::DataType;
use crate::machine::race::Mode;
use crate::types::Type;

/// The operation of a reducing copy, or of `red.async`.
#[derive(Clone, Copy)]
pub struct Reduction {
    ty: Type,
    update: atomic::Update,
}

impl Reduction {
    /// Decodes the reduction on elements of type `ty`. `None`: a plain copy.
    pub fn decode(i: &Parsed<'_>, ty: Type) -> Result<Option<Reduction>> {
        if i.has("reduce") { Reduction::named(i, ty).map(Some) } else { Ok(None) }
    }

    /// Decodes the reduction that the modifiers name.
    pub fn named(i: &Parsed<'_>, ty: Type) -> Result<Reduction> {
        let update = i.one_of(&atomic::REDUCTIONS).and_then(atomic::update);
        let update = update.ok_or_else(|| DecodeError::invalid("the reduction operation is missing"))?;
        Ok(Reduction { ty, update })
    }

    /// The same reduction on elements of a tensor. `None`: the tensor's type has no reductions.
    pub fn on(self, data: DataType) -> Option<Reduction> {
        let ty = match data {
            DataType::U32 => Type::U32,
            DataType::S32 => Type::S32,
            DataType::U64 => Type::U64,
            DataType::S64 => Type::S64,
            DataType::F16 => Type::F16,
            DataType::Bf16 => Type::BF16,
            DataType::F32 => Type::F32,
            _ => return None,
        };
        Some(Reduction { ty, ..self })
    }

    /// How the race detector sees the writes of a copy to global memory, with or without a reduction.
    pub fn mode(reduction: Option<Reduction>) -> Mode {
        // Each reduction has the semantics of `.relaxed.gpu`.
        if reduction.is_some() { Mode::Atomic } else { Mode::Write }
    }

    /// Combines the bytes `old` in memory with the arriving bytes `new`.
    pub fn apply(&self, old: &[u8], new: &[u8]) -> Vec<u8> {
        let size = self.ty.bytes() as usize;
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..size].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let pairs = old.chunks_exact(size).zip(new.chunks_exact(size));
        pairs.flat_map(|(a, b)| (self.update)(self.ty, word(a), word(b), 0).to_le_bytes()[..size].to_vec()).collect()
    }
}
