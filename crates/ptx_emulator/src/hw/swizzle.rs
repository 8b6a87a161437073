//! Shared-memory swizzles: permutations of 8-, 16-, 32- or 64-byte pieces inside 128-byte lines.
//!
//! PTX ISA 5.5.7 (swizzling modes). The permutation is a function of the shared-memory byte *address*, not of the
//! offset in a tile: bits of the line number are xored into the piece number. A tile that does not start on a boundary
//! of the repeating pattern therefore starts in the middle of the pattern.

/// A swizzling mode with its atomicity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No permutation.
    #[default]
    None,
    /// 16-byte pieces within 32 bytes.
    B32,
    /// 16-byte pieces within 64 bytes.
    B64,
    /// 16-byte pieces; rows of 96 bytes (`sm_103a`).
    B96,
    /// 16-byte pieces within 128 bytes.
    B128,
    /// 32-byte pieces within 128 bytes.
    B128Atom32,
    /// 32-byte pieces within 128 bytes, and 8-byte halves of 16 bytes swapped in odd lines.
    B128Atom32Flip8,
    /// 64-byte pieces within 128 bytes.
    B128Atom64,
}

/// Bytes per shared-memory line. Bits of the line number are xored into the piece number.
pub const LINE_BYTES: u32 = 128;
const LINE_SHIFT: u32 = LINE_BYTES.trailing_zeros();

impl Swizzle {
    /// Swizzled address of the byte at linear address `address`. The function is its own inverse.
    pub const fn apply(self, address: u32) -> u32 {
        let line = address >> LINE_SHIFT;
        let flip = match self {
            Swizzle::None => 0,
            Swizzle::B32 | Swizzle::B96 => (line & 1) << 4,
            Swizzle::B64 => (line & 3) << 4,
            Swizzle::B128 => (line & 7) << 4,
            Swizzle::B128Atom32 => (line & 3) << 5,
            Swizzle::B128Atom32Flip8 => (line & 3) << 5 | (line & 1) << 3,
            Swizzle::B128Atom64 => (line & 1) << 6,
        };
        address ^ flip
    }

    /// Maximum size of a box's innermost dimension, in bytes. `None`: no limit.
    pub const fn span_bytes(self) -> Option<u32> {
        match self {
            Swizzle::None => None,
            Swizzle::B32 => Some(32),
            Swizzle::B64 => Some(64),
            Swizzle::B96 => Some(96),
            Swizzle::B128 | Swizzle::B128Atom32 | Swizzle::B128Atom32Flip8 | Swizzle::B128Atom64 => Some(128),
        }
    }

    /// Bytes that stay together: the longest run that [`Swizzle::apply`] keeps contiguous and in order.
    pub const fn atom_bytes(self) -> u32 {
        match self {
            Swizzle::None => LINE_BYTES,
            Swizzle::B32 | Swizzle::B64 | Swizzle::B96 | Swizzle::B128 => 16,
            Swizzle::B128Atom32 => 32,
            Swizzle::B128Atom32Flip8 => 8,
            Swizzle::B128Atom64 => 64,
        }
    }

    /// Period of the pattern in bytes (PTX ISA 5.5.7, "starting address of the repeating pattern").
    pub const fn pattern_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 | Swizzle::B96 => 256,
            Swizzle::B64 => 512,
            Swizzle::B128 | Swizzle::B128Atom32 | Swizzle::B128Atom32Flip8 | Swizzle::B128Atom64 => 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks a swizzle against a table of the manual: for each line and position, the 16-byte piece of the source
    /// there.
    fn check(swizzle: Swizzle, table: &[[u32; 8]]) {
        for line in 0..2 * table.len() {
            for place in 0..8 {
                let source = table[line % table.len()][place as usize];
                let from = line as u32 * 128 + source * 16;
                assert_eq!(
                    swizzle.apply(from),
                    line as u32 * 128 + place * 16,
                    "{swizzle:?} line {line} place {place}"
                );
            }
        }
    }

    #[test]
    fn patterns_match_the_tables_of_ptx_isa_5_5_7() {
        let identity = [0, 1, 2, 3, 4, 5, 6, 7];
        check(Swizzle::None, &[identity]);
        check(Swizzle::B32, &[identity, [1, 0, 3, 2, 5, 4, 7, 6]]);
        check(Swizzle::B96, &[identity, [1, 0, 3, 2, 5, 4, 7, 6]]);
        check(Swizzle::B64, &[identity, [1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [3, 2, 1, 0, 7, 6, 5, 4]]);
        check(
            Swizzle::B128,
            &[
                identity,
                [1, 0, 3, 2, 5, 4, 7, 6],
                [2, 3, 0, 1, 6, 7, 4, 5],
                [3, 2, 1, 0, 7, 6, 5, 4],
                [4, 5, 6, 7, 0, 1, 2, 3],
                [5, 4, 7, 6, 1, 0, 3, 2],
                [6, 7, 4, 5, 2, 3, 0, 1],
                [7, 6, 5, 4, 3, 2, 1, 0],
            ],
        );
        check(
            Swizzle::B128Atom32,
            &[identity, [2, 3, 0, 1, 6, 7, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3], [6, 7, 4, 5, 2, 3, 0, 1]],
        );
        check(Swizzle::B128Atom64, &[identity, [4, 5, 6, 7, 0, 1, 2, 3]]);
    }

    #[test]
    fn flip_swaps_eight_byte_halves_in_odd_lines() {
        let plain = Swizzle::B128Atom32;
        let flip = Swizzle::B128Atom32Flip8;
        assert_eq!(flip.apply(0x48), plain.apply(0x48));
        assert_eq!(flip.apply(128), plain.apply(128) + 8);
        assert_eq!(flip.apply(128 + 8), plain.apply(128));
        assert_eq!(flip.apply(256), plain.apply(256));
    }

    const ALL: [Swizzle; 8] = [
        Swizzle::None,
        Swizzle::B32,
        Swizzle::B64,
        Swizzle::B96,
        Swizzle::B128,
        Swizzle::B128Atom32,
        Swizzle::B128Atom32Flip8,
        Swizzle::B128Atom64,
    ];

    proptest! {
        #[test]
        fn swizzle_is_its_own_inverse_and_periodic(address in 0u32..1 << 18, which in 0usize..8) {
            let swizzle = ALL[which];
            let moved = swizzle.apply(address);
            prop_assert_eq!(swizzle.apply(moved), address);
            prop_assert_eq!(moved / LINE_BYTES, address / LINE_BYTES);
            prop_assert_eq!(swizzle.apply(address + swizzle.pattern_bytes()), moved + swizzle.pattern_bytes());
            let atom = address / swizzle.atom_bytes() * swizzle.atom_bytes();
            prop_assert_eq!(moved - swizzle.apply(atom), address - atom);
        }
    }
}
