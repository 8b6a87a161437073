//! The kernel, with four elements per thread.

use cuda_std::{
    convert::cvt_f32_f16,
    global::{GlobalAddress, ld_global_nc_b64_or_zero, st_global_b64},
    kernel, thread,
};

use crate::{
    epilogue::{convert, silu},
    format::OUTPUT_BF16,
    layer::silu_mul::abi::{BLOCK_ELEMENTS, Launch, Segment, THREAD_ELEMENTS, THREADS},
    schedule::last_begun,
};

/// Bytes per element.
const ELEMENT_BYTES: u64 = 2;

/// Computes all segments.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = THREADS)]
pub unsafe fn silu_mul(launch: Launch) {
    let (block, segments) = (thread::block_idx_x(), launch.segments as *const Segment);
    // SAFETY: the indices are below `segment_count`, and nobody writes the array while the kernel runs.
    let segment = unsafe {
        let index = last_begun(launch.segment_count, block, |index| (*segments.add(index as usize)).first_block);
        *segments.add(index as usize)
    };
    let first = u64::from(block - segment.first_block) * u64::from(BLOCK_ELEMENTS)
        + u64::from(thread::thread_idx_x() * THREAD_ELEMENTS);
    if first >= segment.elements {
        return;
    }
    let at = |matrix: u64| GlobalAddress::new(matrix) + first * ELEMENT_BYTES;
    // SAFETY: only this thread computes these four elements. They are inside of all three matrices, since a segment has
    // a multiple of four elements.
    unsafe {
        let gate = decode(launch.format, ld_global_nc_b64_or_zero(true, at(segment.gate)));
        let up = decode(launch.format, ld_global_nc_b64_or_zero(true, at(segment.up)));
        let [a, b, c, d] = core::array::from_fn(|index| silu(gate[index]) * up[index]);
        let (low, high) = (convert(launch.format, a, b), convert(launch.format, c, d));
        st_global_b64(at(segment.c), u64::from(high) << 32 | u64::from(low));
    }
}

/// Decodes four elements of format `format`: [`OUTPUT_BF16`], or otherwise f16.
#[inline(always)]
fn decode(format: u32, elements: u64) -> [f32; THREAD_ELEMENTS as usize] {
    core::array::from_fn(|index| {
        let bits = (elements >> (16 * index)) as u16;
        // A bfloat16 is the upper half of an f32.
        if format == OUTPUT_BF16 { f32::from_bits(u32::from(bits) << 16) } else { cvt_f32_f16(bits) }
    })
}
