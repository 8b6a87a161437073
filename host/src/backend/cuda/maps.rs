//! Tensor maps, encoded by the driver.

use std::collections::HashMap;
use std::ffi::c_void;

use cuda_driver::sys::{self, CUtensorMap};

use super::device::Device;
use crate::Error;
use nvfp4_kernels::tensor_map::{MAP_BYTES, MapArguments};

/// Tensor maps of earlier steps. Every step uses the maps of weights again, and the maps of tokens if their addresses
/// and sizes are the same.
#[derive(Default)]
pub(super) struct MapCache {
    encoded: HashMap<MapArguments, [u8; MAP_BYTES]>,
}

impl MapCache {
    /// Returns the map of these arguments, from the cache if possible.
    ///
    /// # Errors
    /// If the driver refuses them.
    pub fn get(&mut self, device: &Device, arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
        /// Enough for the experts of a few layers. The cache is bounded, since maps of tokens that never occur again
        /// must not fill the memory.
        const MOST: usize = 1 << 14;

        if let Some(map) = self.encoded.get(arguments) {
            return Ok(*map);
        }
        if self.encoded.len() >= MOST {
            self.encoded.clear();
        }
        let map = encode(device, arguments)?;
        self.encoded.insert(*arguments, map);
        Ok(map)
    }
}

/// Encodes a tensor map.
pub(super) fn encode(device: &Device, arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
    const RANK: usize = 2;

    let MapArguments { address, row_bytes, row_pitch, rows, box_bytes, box_rows, swizzled } = *arguments;
    let swizzle = if swizzled { sys::CU_TENSOR_MAP_SWIZZLE_128B } else { sys::CU_TENSOR_MAP_SWIZZLE_NONE };
    let mut map = CUtensorMap { opaque: [0; 16] };
    let extents: [u64; RANK] = [row_bytes.into(), rows.into()];
    let strides: [u64; RANK - 1] = [row_pitch];
    let boxes: [u32; RANK] = [box_bytes, box_rows];
    let element_strides: [u32; RANK] = [1; RANK];
    // SAFETY: all arrays have the length that the rank requires, and `map` is a valid pointer. The driver does not
    // access `address`.
    device.check_raw(unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            RANK as u32,
            address as *mut c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            element_strides.as_ptr(),
            sys::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(bytemuck::cast(map.opaque))
}
