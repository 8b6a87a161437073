//! Fat binaries, which nvcc embeds: several images of one program for several architectures.
//!
//! A wrapper (`fatbinary_section.h`) points to a header of 16 bytes: magic, version, size of the header, size of the
//! rest. Each image has its own header: kind, its size, the payload's size, compute capability, flags, and the size
//! before compression. The offsets are as CUDA 13's `fatbinary` writes them and `cuobjdump` shows them.

use gpu_arch::{Arch, Capability};

use crate::code::{Code, INVALID_IMAGE, NO_BINARY_FOR_GPU};

/// Magic numbers of the wrapper (`FATBINC_MAGIC`) and of the header.
pub const WRAPPER: u32 = 0x4662_43b1;
pub const MAGIC: u32 = 0xba55_ed50;

const PTX: u16 = 1;
const ELF: u16 = 2;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;

/// Maximum size of unpacked PTX. A size in a damaged file must not use up all memory.
const MOST_BYTES: usize = 1 << 30;

/// Returns the architecture in the text's `.target`. An image's header has the architecture as a number with its suffix
/// in the flags, but the text states what the kernel was compiled for.
fn target(text: &str) -> Option<Arch> {
    let line = text.split(".target").nth(1)?;
    let end = line.find(['\n', ',', '/']).unwrap_or(line.len());
    line[..end].trim().parse().ok()
}

/// Returns `N` bytes at an offset. `None`: the bytes end before.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Returns the number of bytes of a fat binary according to its header.
pub fn size(header: &[u8; 16]) -> Option<usize> {
    let magic = u32::from_le_bytes(number(header, 0)?);
    let own = u16::from_le_bytes(number(header, 6)?);
    let rest = u64::from_le_bytes(number(header, 8)?);
    let size = usize::try_from(rest).ok()?.checked_add(own.into())?;
    (magic == MAGIC && size <= MOST_BYTES).then_some(size)
}

/// Returns the PTX in a fat binary that is best for a GPU.
///
/// # Errors
///
/// A code and a message for the user: the binary is damaged, or it has no PTX for this GPU.
pub fn ptx(bytes: &[u8], card: Capability) -> Result<String, (Code, String)> {
    let mut at: usize = number(bytes, 6).map_or(16, |own| u16::from_le_bytes(own).into());
    let mut texts: Vec<(Arch, String)> = Vec::new();
    let mut machine_code = Vec::new();
    let damaged = || (INVALID_IMAGE, "a fat binary embedded in the program is damaged; rebuild the program".to_owned());
    while at < bytes.len() {
        let image = read(bytes, at).ok_or_else(damaged)?;
        match image.kind {
            PTX => {
                let text = unpack(&image).ok_or_else(damaged)?;
                if let Some(arch) = target(&text) {
                    texts.push((arch, text));
                }
            }
            ELF => machine_code.push(format!("sm_{}", image.arch)),
            // Images of other kinds, such as NVVM IR, are for the linker.
            _ => {}
        }
        at = image.end;
    }
    let archs: Vec<String> = texts.iter().map(|(arch, _)| arch.to_string()).collect();
    let best = texts.into_iter().filter(|(arch, _)| arch.runs_on(card)).max_by_key(|(arch, _)| *arch);
    best.map(|(_, text)| text).ok_or_else(|| {
        let (major, minor) = card;
        let has = match (archs.is_empty(), machine_code.is_empty()) {
            (true, true) => "nothing".to_owned(),
            (true, false) => format!("machine code (SASS) for {} only", machine_code.join(", ")),
            (false, _) => format!("PTX for {} only", archs.join(", ")),
        };
        let text = format!(
            "a module contains {has}, but no PTX for compute capability {major}.{minor}; build it with \
             `nvcc -gencode arch=compute_{major}{minor}a,code=compute_{major}{minor}a`, or select another GPU with --gpu"
        );
        (NO_BINARY_FOR_GPU, text)
    })
}

/// An image of a fat binary.
struct Image<'b> {
    kind: u16,
    /// Compute capability as one number, such as 90.
    arch: u32,
    flags: u64,
    payload: &'b [u8],
    /// Bytes before compression.
    unpacked: usize,
    /// Offset of the next image.
    end: usize,
}

fn read(bytes: &[u8], at: usize) -> Option<Image<'_>> {
    let bytes_from = bytes.get(at..)?;
    let header: usize = u32::from_le_bytes(number(bytes_from, 4)?).try_into().ok()?;
    let padded: usize = u64::from_le_bytes(number(bytes_from, 8)?).try_into().ok()?;
    let packed: usize = u32::from_le_bytes(number(bytes_from, 16)?).try_into().ok()?;
    let flags = u64::from_le_bytes(number(bytes_from, 40)?);
    let unpacked: usize = u64::from_le_bytes(number(bytes_from, 56)?).try_into().ok()?;
    let payload = bytes_from.get(header..header.checked_add(padded)?)?;
    // Only a compressed image states its size without padding.
    let payload = if packed > 0 && flags & (LZ4 | ZSTD) != 0 { payload.get(..packed)? } else { payload };
    Some(Image {
        kind: u16::from_le_bytes(number(bytes_from, 0)?),
        arch: u32::from_le_bytes(number(bytes_from, 28)?),
        flags,
        payload,
        unpacked,
        end: at.checked_add(header)?.checked_add(padded)?,
    })
    .filter(|image| image.end > at)
}

fn unpack(image: &Image<'_>) -> Option<String> {
    if image.unpacked > MOST_BYTES {
        return None;
    }
    let bytes = if image.flags & ZSTD != 0 {
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(image.payload).ok()?;
        let mut bytes = Vec::new();
        let read = std::io::Read::take(&mut decoder, MOST_BYTES as u64);
        std::io::Read::read_to_end(&mut { read }, &mut bytes).ok()?;
        bytes
    } else if image.flags & LZ4 != 0 {
        lz4_flex::block::decompress(image.payload, image.unpacked).ok()?
    } else {
        image.payload.to_vec()
    };
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a fat binary with these images: kind, flags, payload, size before compression.
    fn fatbin(images: &[(u16, u64, &[u8], usize)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (kind, flags, payload, unpacked) in images {
            let padded = payload.len().next_multiple_of(8);
            let mut header = vec![0; 64];
            header[0..2].copy_from_slice(&kind.to_le_bytes());
            header[4..8].copy_from_slice(&64_u32.to_le_bytes());
            header[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
            header[16..20].copy_from_slice(&(payload.len() as u32).to_le_bytes());
            header[28..32].copy_from_slice(&90_u32.to_le_bytes());
            header[40..48].copy_from_slice(&flags.to_le_bytes());
            header[56..64].copy_from_slice(&(*unpacked as u64).to_le_bytes());
            body.extend(header);
            body.extend_from_slice(payload);
            body.resize(body.len() + padded - payload.len(), 0);
        }
        let mut all = MAGIC.to_le_bytes().to_vec();
        all.extend([1, 0, 16, 0]);
        all.extend((body.len() as u64).to_le_bytes());
        all.extend(body);
        all
    }

    fn text(target: &str) -> String {
        format!(".version 8.0\n.target {target}\n.address_size 64\n// {}\n", "padding ".repeat(50))
    }

    #[test]
    fn best_ptx_for_the_gpu_is_found_in_any_packing() {
        let texts = [text("sm_80"), text("sm_90a"), text("sm_100f")];
        let lz4 = lz4_flex::block::compress(texts[1].as_bytes());
        let zstd =
            ruzstd::encoding::compress_to_vec(texts[2].as_bytes(), ruzstd::encoding::CompressionLevel::Uncompressed);
        let bytes = fatbin(&[
            (PTX, 0, texts[0].as_bytes(), 0),
            (ELF, 0, b"\x7fELF", 0),
            (PTX, LZ4, &lz4, texts[1].len()),
            (PTX, ZSTD, &zstd, texts[2].len()),
        ]);
        assert_eq!(size(bytes[..16].try_into().unwrap()), Some(bytes.len()));
        for (card, found) in [((8, 9), &texts[0]), ((9, 0), &texts[1]), ((10, 3), &texts[2]), ((12, 0), &texts[0])] {
            assert_eq!(ptx(&bytes, card).as_ref(), Ok(found));
        }
        assert!(ptx(&bytes, (7, 5)).unwrap_err().1.contains("PTX for sm_80, sm_90a, sm_100f only"));
    }

    #[test]
    fn machine_code_alone_is_refused_with_a_build_flag() {
        let (code, words) = ptx(&fatbin(&[(ELF, 0, b"\x7fELF", 0)]), (9, 0)).unwrap_err();
        assert_eq!(code, NO_BINARY_FOR_GPU);
        assert!(words.contains("SASS) for sm_90 only") && words.contains("code=compute_90a"), "{words}");
    }

    #[test]
    fn truncated_fat_binary_is_refused() {
        let text = text("sm_90a");
        let whole = fatbin(&[(PTX, LZ4, &lz4_flex::block::compress(text.as_bytes()), text.len())]);
        for cut in 17..whole.len() {
            assert!(ptx(&whole[..cut], (9, 0)).is_err());
        }
    }
}
