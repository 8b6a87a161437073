//! Converts NVFP4 weights between GGUF (llama.cpp) and the formats of Hugging Face's models, without rounding.
//!
//! | | GGUF | ModelOpt |
//! |---|---|---|
//! | values | blocks of 64 along K: four scales, then per 16 values eight bytes; byte j holds values j and j + 8 | one byte per two neighbors along K |
//! | scales | unsigned E4M3 | E4M3 |
//! | global scale | `X.scale`, one number or one per expert | `M.weight_scale_2` |
//!
//! Sources: the package `gguf` 0.19 (`quants.py`, `constants.py`), and llama.cpp's loader (`.scale` tensors).

mod from;
mod names;
mod read;
mod to;

pub use self::from::FromGguf;
use self::read::{SUPERBLOCK, SUPERBLOCK_BYTES};
pub use self::to::ToGguf;
use nvfp4_core::format::{BLOCK, e4m3};

/// Scales per block of GGUF.
const SCALES: usize = SUPERBLOCK / BLOCK;

/// Unpacks a row of GGUF's blocks to codes of two neighbors per byte, and scales. Returns the index of the first block with a
/// negative scale, if there is one.
fn unpack_row(row: &[u8], codes: &mut [u8], scales: &mut [u8]) -> Option<usize> {
    let out = codes.chunks_exact_mut(SUPERBLOCK / 2).zip(scales.chunks_exact_mut(SCALES));
    for (index, (block, (codes, scales))) in row.chunks_exact(SUPERBLOCK_BYTES).zip(out).enumerate() {
        let (stored, values) = block.split_at(SCALES);
        for (scale, &stored) in scales.iter_mut().zip(stored) {
            match stored {
                // llama.cpp reads the code of NaN as 0.
                0x7F => *scale = 0,
                stored if stored > e4m3::MAX_CODE => return Some(index),
                stored => *scale = stored,
            }
        }
        for (codes, values) in codes.chunks_exact_mut(BLOCK / 2).zip(values.chunks_exact(BLOCK / 2)) {
            let (low, high) = codes.split_at_mut(BLOCK / 4);
            for ((low, high), pair) in low.iter_mut().zip(high).zip(values.chunks_exact(2)) {
                *low = pair[0] & 0xF | pair[1] << 4;
                *high = pair[0] >> 4 | pair[1] & 0xF0;
            }
        }
    }
    None
}

/// Packs a row to GGUF's blocks; the reverse of [`unpack_row`].
fn pack_row(codes: &[u8], scales: &[u8], row: &mut [u8]) {
    let blocks = codes.chunks_exact(SUPERBLOCK / 2).zip(scales.chunks_exact(SCALES));
    for (block, (codes, scales)) in row.chunks_exact_mut(SUPERBLOCK_BYTES).zip(blocks) {
        let (stored, values) = block.split_at_mut(SCALES);
        stored.copy_from_slice(scales);
        for (values, codes) in values.chunks_exact_mut(BLOCK / 2).zip(codes.chunks_exact(BLOCK / 2)) {
            let (low, high) = codes.split_at(BLOCK / 4);
            for (pair, (low, high)) in values.chunks_exact_mut(2).zip(low.iter().zip(high)) {
                pair[0] = low & 0xF | high << 4;
                pair[1] = low >> 4 | high & 0xF0;
            }
        }
    }
}

/// Returns the row of Hugging Face's matrix that is row `row` of a query or key projection in a GGUF file of architecture
/// `llama`: there, the two halves of each head's rows alternate.
fn row_of_head(row: usize, head: usize) -> usize {
    let (of_head, within) = (row / head * head, row % head);
    of_head + within % 2 * (head / 2) + within / 2
}

/// Rows per head of a query or key projection whose rows are permuted; `None` for all other tensors.
fn permuted_head(file: &read::GgufFile, name: &str, rows: usize) -> Option<usize> {
    if file.text("general.architecture") != Some("llama") {
        return None;
    }
    let key = match name.rsplit('.').nth(1)? {
        "attn_q" => "llama.attention.head_count",
        "attn_k" => "llama.attention.head_count_kv",
        _ => return None,
    };
    let heads = file.number(key).or_else(|| file.number("llama.attention.head_count"))?;
    rows.checked_div(heads).filter(|head| *head > 0 && head * heads == rows && head.is_multiple_of(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::format::e2m1;

    #[test]
    fn packed_rows_are_unpacked_again() {
        let codes: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(37)).collect();
        let scales: Vec<u8> = (1..9).map(|i| i * 13).collect();
        let mut row = vec![0; 2 * SUPERBLOCK_BYTES];
        pack_row(&codes, &scales, &mut row);
        let (mut again, mut scales_again) = (vec![0; 64], vec![0; 8]);
        assert_eq!(unpack_row(&row, &mut again, &mut scales_again), None);
        assert_eq!((again, scales_again), (codes.clone(), scales));
        // The definition of the package `gguf`: the low nibbles of eight bytes are the first eight values.
        let value = |index: usize| e2m1::decode(codes[index / 2] >> (4 * (index % 2)));
        for block in 0..8 {
            for j in 0..8 {
                let byte = row[block / 4 * SUPERBLOCK_BYTES + SCALES + block % 4 * 8 + j];
                assert_eq!(e2m1::decode(byte), value(16 * block + j));
                assert_eq!(e2m1::decode(byte >> 4), value(16 * block + j + 8));
            }
        }
        row[1] = 0x80;
        assert_eq!(unpack_row(&row, &mut [0; 64], &mut [0; 8]), Some(0));
    }

    #[test]
    fn halves_of_a_head_alternate() {
        // `permute` of llama.cpp's converter: rows of a head as [2, half] become [half, 2].
        assert_eq!((0..8).map(|row| row_of_head(row, 4)).collect::<Vec<_>>(), [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
