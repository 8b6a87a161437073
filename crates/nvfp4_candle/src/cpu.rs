//! Access to candle's memory on the CPU.

use candle_core::{CpuStorage, Layout, Result, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use nvfp4::problem::TokenDtype;

/// Returns the elements of a contiguous tensor.
pub fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("expected a contiguous tensor") };
    Ok(&storage.as_slice::<T>()?[start..end])
}

/// Returns the bits of contiguous tokens.
pub fn token_bits<'a>(storage: &'a CpuStorage, layout: &Layout, dtype: TokenDtype) -> Result<&'a [u16]> {
    match dtype {
        TokenDtype::Bf16 => Ok(elements::<half::bf16>(storage, layout)?.reinterpret_cast()),
        TokenDtype::F16 => Ok(elements::<half::f16>(storage, layout)?.reinterpret_cast()),
    }
}

/// Makes tokens from their bits.
pub fn tokens(bits: Vec<u16>, dtype: TokenDtype) -> CpuStorage {
    match dtype {
        TokenDtype::Bf16 => CpuStorage::BF16(bits.reinterpret_into()),
        TokenDtype::F16 => CpuStorage::F16(bits.reinterpret_into()),
    }
}
