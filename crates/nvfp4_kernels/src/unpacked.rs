//! Decodes weights that are packed for an operand type. Only tests and the fake driver need it.

use kernels_gpu::units::OperandType;
use nvfp4_core::format::{e2m1, e4m3};

/// Nibbles per packed word.
const NIBBLES: usize = 8;

/// Tables for decoding packed words and scales, made by packing every code.
pub(crate) struct Unpacked {
    /// Bits of a packed word that belong to each of its nibbles.
    masks: [u32; NIBBLES],
    /// Packed bits of each code in each nibble.
    codes: [[u32; 16]; NIBBLES],
    /// Number of each packed scale.
    scales: [Option<f64>; 256],
}

impl Unpacked {
    pub(crate) fn new(operand_type: OperandType) -> Self {
        let packed = |code: u32, nibble: usize| operand_type.pack(code << (4 * nibble));
        let mut scales = [None; 256];
        for code in 0..=e4m3::MAX_CODE {
            scales[usize::from(operand_type.pack_scale(code))] = Some(e4m3::VALUES[usize::from(code)].into());
        }
        Self {
            masks: std::array::from_fn(|nibble| packed(0xf, nibble)),
            codes: std::array::from_fn(|nibble| std::array::from_fn(|code| packed(code as u32, nibble))),
            scales,
        }
    }

    /// Returns the e2m1 code in a nibble of a packed word.
    pub(crate) fn code(&self, word: u32, nibble: u32) -> u8 {
        let (bits, codes) = (word & self.masks[nibble as usize], &self.codes[nibble as usize]);
        // Without a branch, the compiler compares several codes at once.
        let code = codes.iter().enumerate().fold(0, |code, (at, &packed)| code | if packed == bits { at } else { 0 });
        assert_eq!(codes[code], bits, "every packed nibble is a code");
        code as u8
    }

    /// Returns the number in a nibble of a packed word, without its scale.
    pub(crate) fn number(&self, word: u32, nibble: u32) -> f64 {
        e2m1::decode(self.code(word, nibble)).into()
    }

    /// Returns the number of a packed scale.
    pub(crate) fn scale(&self, packed: u8) -> f64 {
        self.scales[usize::from(packed)].expect("the byte is a packed scale")
    }
}
