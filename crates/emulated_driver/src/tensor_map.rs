//! Tensor maps in the encoding of the emulator. On a GPU they are opaque.

use std::ffi::{c_int, c_uint};

use ptx_emulator::{DataType, Interleave, L2Promotion, OobFill, Swizzle, TensorMap};

use crate::call::{Needs, array, enter, functions, put};
use crate::code::INVALID_VALUE;

/// `CUtensorMapInterleave`, `CUtensorMapSwizzle`, `CUtensorMapL2promotion`, `CUtensorMapFloatOOBfill`, in cuda.h's
/// order.
const INTERLEAVES: [Interleave; 3] = [Interleave::None, Interleave::B16, Interleave::B32];
const SWIZZLES: [Swizzle; 7] = [
    Swizzle::None,
    Swizzle::B32,
    Swizzle::B64,
    Swizzle::B128,
    Swizzle::B128Atom32,
    Swizzle::B128Atom32Flip8,
    Swizzle::B128Atom64,
];
const PROMOTIONS: [L2Promotion; 4] = [L2Promotion::None, L2Promotion::B64, L2Promotion::B128, L2Promotion::B256];
const FILLS: [OobFill; 2] = [OobFill::Zero, OobFill::Nan];

fn pick<T: Copy>(list: &[T], number: c_uint) -> Result<T, crate::code::Code> {
    list.get(number as usize).copied().ok_or(INVALID_VALUE)
}

functions! {
    fn cuTensorMapEncodeTiled(
        map: *mut [u8; 128], data_type: c_uint, rank: c_uint, address: u64, extents: *const u64, strides: *const u64,
        r#box: *const c_uint, element_strides: *const c_uint, interleave: c_uint, swizzle: c_uint, promotion: c_uint,
        outside: c_uint,
    ) {
        let driver = enter(NAME, Needs::Nothing)?;
        let rank = rank as usize;
        if map.is_null() || !(1..=5).contains(&rank) { return Err(INVALID_VALUE); }
        let tiled = TensorMap::tiled(
            DataType::from_driver(data_type).ok_or(INVALID_VALUE)?,
            address,
            &array(extents, rank)?,
            &array(strides, rank - 1)?,
            &array(r#box, rank)?,
            &array(element_strides, rank)?,
            pick(&INTERLEAVES, interleave)?,
            pick(&SWIZZLES, swizzle)?,
            pick(&PROMOTIONS, promotion)?,
            pick(&FILLS, outside)?,
        );
        let tiled = tiled.map_err(|rule| {
            if driver.test.is_none() { eprintln!("ptx-emulator: cuTensorMapEncodeTiled: {rule}"); }
            INVALID_VALUE
        })?;
        if driver.test.is_some() {
            // The whole tensor must lie in one allocation.
            let last = tiled.dims[1..rank].iter().zip(&tiled.strides).map(|(dim, stride)| (dim - 1) * stride);
            let row = tiled.dims[0] * u64::from(tiled.data_type.bits()) / 8;
            driver.memory.within(address, (last.sum::<u64>() + row) as usize)?;
        }
        put(map, tiled.to_bytes())
    }
    fn cuTensorMapReplaceAddress(map: *mut [u8; 128], address: u64) {
        let _driver = enter(NAME, Needs::Nothing)?;
        let mut tiled = TensorMap::from_bytes(&crate::call::get(map)?).map_err(|_| INVALID_VALUE)?;
        tiled.global_address = address;
        tiled.validate().map_err(|_| INVALID_VALUE)?;
        put(map, tiled.to_bytes())
    }
    fn cuTensorMapEncodeIm2col(
        map: *mut [u8; 128], data_type: c_uint, rank: c_uint, address: u64, extents: *const u64, strides: *const u64,
        lower: *const c_int, upper: *const c_int, channels: c_uint, pixels: c_uint, element_strides: *const c_uint,
        interleave: c_uint, swizzle: c_uint, promotion: c_uint, outside: c_uint,
    ) {
        let driver = enter(NAME, Needs::Nothing)?;
        let rank = rank as usize;
        if map.is_null() || !(3..=5).contains(&rank) { return Err(INVALID_VALUE); }
        let type_of = DataType::from_driver(data_type).ok_or(INVALID_VALUE)?;
        // The box of one row of channels. `im2col` checks the box of pixels.
        let mut row = vec![1; rank];
        row[0] = channels;
        let tiled = TensorMap::tiled(
            type_of,
            address,
            &array(extents, rank)?,
            &array(strides, rank - 1)?,
            &row,
            &array(element_strides, rank)?,
            pick(&INTERLEAVES, interleave)?,
            pick(&SWIZZLES, swizzle)?,
            pick(&PROMOTIONS, promotion)?,
            pick(&FILLS, outside)?,
        );
        let (lower, upper) = (array(lower, rank - 2)?, array(upper, rank - 2)?);
        let im2col = tiled.and_then(|tiled| tiled.im2col(&lower, &upper, channels, pixels)).map_err(|rule| {
            if driver.test.is_none() { eprintln!("ptx-emulator: cuTensorMapEncodeIm2col: {rule}"); }
            INVALID_VALUE
        })?;
        put(map, im2col.to_bytes())
    }
}
