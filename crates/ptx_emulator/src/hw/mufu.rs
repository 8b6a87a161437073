//! `ex2.approx.ftz.f32` and `rcp.approx.ftz.f32` to the bit, as an H100 computes them (`MUFU.EX2` and `MUFU.RCP`).
//!
//! The unit has a table of parabolas (Oberman and Siu, "A High-Performance Area-Efficient Multifunction Interpolator", ARITH
//! 2005). The upper bits of the argument's fraction select a parabola, and the others are the place on it. The square of the
//! place is the sum of its partial products from 2⁻¹⁵ on; smaller ones are left out. The value is cut to 24 bits.
//!
//! The tables below were computed from a card's results for all 2²³ fractions, and give all of them
//! (`benches/probes/approximations.cu`). Other architectures were not asked.

/// Bits of an f32's fraction.
const FRACTION_BITS: u32 = 23;

/// Value of the bit above the fraction.
const ONE: u32 = 1 << FRACTION_BITS;

/// Bias of an f32's exponent.
const BIAS: i32 = 127;

/// Weight of the smallest partial products of a square, as a negative power of two.
const SQUARE_BITS: u32 = 15;

/// Fraction bits of an interpolated value, in units of its last place.
const VALUE_BITS: u32 = 17;

/// A table of parabolas over the interval of a fraction.
struct Table<const N: usize> {
    /// Value at the beginning in quarters of the last place, slope and curvature in the last place per parabola.
    parabolas: [[i32; 3]; N],
    /// Constant that is added before the value is cut, in units of 2⁻¹⁷ of the last place. It makes up for the missing partial
    /// products. The four values from this one on give the same results.
    addend: i64,
}

impl<const N: usize> Table<N> {
    /// Number of bits of the place on a parabola.
    const PLACE_BITS: u32 = FRACTION_BITS - N.ilog2();

    /// Returns the function's value for a fraction, in units of the last place of a significand.
    fn value(&self, fraction: u32) -> u32 {
        let [first, slope, curvature] = self.parabolas[(fraction >> Self::PLACE_BITS) as usize].map(i64::from);
        let place = fraction & ((1 << Self::PLACE_BITS) - 1);
        let linear = (slope * i64::from(place)) << (VALUE_BITS - Self::PLACE_BITS);
        let quadratic = (curvature * i64::from(square(place, Self::PLACE_BITS))) << (VALUE_BITS - SQUARE_BITS);
        (((first << (VALUE_BITS - 2)) + linear + quadratic + self.addend) >> VALUE_BITS) as u32
    }
}

/// Returns the square of `place`, a fraction of `bits` bits, in units of 2⁻¹⁵, without smaller partial products.
fn square(place: u32, bits: u32) -> u32 {
    let least = 2 * bits - SQUARE_BITS;
    let mut sum = 0;
    let mut left = place;
    while left != 0 {
        let bit = left.trailing_zeros();
        left &= left - 1;
        // Two products of different bits are one product of twice the weight.
        let least_other = (bit + 1).max(least.saturating_sub(bit + 1));
        sum += u64::from(place >> least_other << least_other) << (bit + 1);
        if 2 * bit >= least {
            sum += 1 << (2 * bit);
        }
    }
    (sum >> least) as u32
}

/// `ex2.approx.ftz.f32`. The argument becomes an integer and a fraction of 23 bits; smaller bits are cut off its magnitude. A
/// negative argument's fraction is the complement of the magnitude's fraction, unless this is 0.
pub fn ex2_ftz(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    // Beyond this magnitude, the result is 0 or infinite.
    let magnitude = (x.abs().min(256.0) * ONE as f32) as u32;
    let (integer, fraction) = ((magnitude >> FRACTION_BITS) as i32, magnitude & (ONE - 1));
    let (exponent, fraction) = match (x < 0.0, fraction) {
        (false, fraction) => (integer, fraction),
        (true, 0) => (-integer, 0),
        (true, fraction) => (-integer - 1, ONE - 1 - fraction),
    };
    match exponent + BIAS {
        ..=0 => 0.0,
        255.. => f32::INFINITY,
        exponent => f32::from_bits((exponent as u32) << FRACTION_BITS | EX2.value(fraction) & (ONE - 1)),
    }
}

/// `rcp.approx.ftz.f32`.
pub fn rcp_ftz(x: f32) -> f32 {
    let (exponent, fraction) = ((x.abs().to_bits() >> FRACTION_BITS) as i32, x.to_bits() & (ONE - 1));
    let magnitude = match exponent {
        255 if fraction != 0 => return x,
        255 => 0.0,
        0 => f32::INFINITY,
        _ => {
            // 1 to 2, in units of the last place below 1.
            let value = RCP.value(fraction);
            let (exponent, value) =
                if value == 2 * ONE { (2 * BIAS - exponent, ONE) } else { (2 * BIAS - 1 - exponent, value) };
            if exponent > 0 { f32::from_bits((exponent as u32) << FRACTION_BITS | value & (ONE - 1)) } else { 0.0 }
        }
    };
    magnitude.copysign(x)
}

/// 2ˣ from 1 to 2.
#[rustfmt::skip]
static EX2: Table<64> = Table { addend: 24456, parabolas: [
    [33554435, 90852, 494], [33919818, 91840, 501], [34289182, 92840, 506], [34662565, 93852, 511],
    [35040018, 94872, 518], [35421577, 95908, 521], [35807292, 96952, 527], [36197209, 98008, 532],
    [36591372, 99072, 541], [36989825, 100152, 546], [37392616, 101244, 551], [37799797, 102344, 559],
    [38211409, 103460, 564], [38627504, 104588, 568], [39048131, 105724, 577], [39473337, 106876, 583],
    [39903173, 108040, 589], [40337690, 109216, 596], [40776937, 110408, 600], [41220970, 111608, 609],
    [41669836, 112824, 615], [42123592, 114052, 622], [42582286, 115296, 627], [43045977, 116552, 633],
    [43514717, 117820, 641], [43988561, 119104, 647], [44467565, 120400, 655], [44951786, 121712, 661],
    [45441278, 123036, 670], [45936101, 124376, 677], [46436314, 125728, 686], [46941971, 127100, 691],
    [47453135, 128484, 699], [47969867, 129884, 705], [48492225, 131296, 715], [49020269, 132728, 721],
    [49554065, 134172, 730], [50093674, 135632, 739], [50639159, 137108, 748], [51190582, 138604, 753],
    [51748011, 140112, 763], [52311510, 141636, 773], [52881146, 143180, 779], [53456983, 144740, 787],
    [54039091, 146316, 796], [54627538, 147908, 806], [55222393, 149520, 813], [55823725, 151148, 822],
    [56431607, 152792, 833], [57046106, 154456, 842], [57667297, 156140, 849], [58295254, 157840, 858],
    [58930048, 159556, 870], [59571754, 161296, 877], [60220447, 163052, 887], [60876205, 164828, 896],
    [61539104, 166620, 909], [62209220, 168436, 917], [62886634, 170272, 925], [63571424, 172124, 938],
    [64263672, 174000, 946], [64963458, 175892, 959], [65670863, 177808, 969], [66385972, 179744, 980],
] };

/// 1/x for x from 1 to 2.
#[rustfmt::skip]
static RCP: Table<128> = Table { addend: 8092, parabolas: [
    [67108864, -131068, 1013], [66588642, -129044, 989], [66076422, -127066, 966], [65572021, -125134, 945],
    [65075262, -123244, 923], [64585976, -121398, 902], [64103992, -119594, 883], [63629146, -117828, 863],
    [63161284, -116102, 845], [62700254, -114414, 827], [62245905, -112762, 809], [61798091, -111144, 791],
    [61356677, -109562, 774], [60921524, -108014, 758], [60492499, -106498, 742], [60069474, -105014, 727],
    [59652325, -103560, 711], [59240930, -102136, 696], [58835170, -100742, 682], [58434930, -99376, 669],
    [58040099, -98038, 656], [57650569, -96726, 642], [57266231, -95442, 631], [56886986, -94182, 618],
    [56512729, -92946, 605], [56143366, -91736, 594], [55778798, -90548, 582], [55418934, -89384, 572],
    [55063686, -88242, 561], [54712961, -87120, 549], [54366677, -86022, 540], [54024747, -84942, 529],
    [53687093, -83884, 519], [53353633, -82846, 510], [53024288, -81826, 501], [52698987, -80824, 490],
    [52377651, -79842, 482], [52060212, -78878, 474], [51746596, -77930, 465], [51436737, -77000, 457],
    [51130565, -76086, 449], [50828017, -75188, 441], [50529029, -74306, 433], [50233538, -73440, 426],
    [49941482, -72588, 418], [49652803, -71752, 412], [49367442, -70928, 403], [49085342, -70120, 397],
    [48806449, -69326, 390], [48530705, -68544, 383], [48258060, -67776, 377], [47988464, -67022, 371],
    [47721861, -66280, 366], [47458204, -65548, 358], [47197444, -64830, 353], [46939534, -64124, 348],
    [46684429, -63428, 341], [46432082, -62746, 337], [46182446, -62072, 331], [45935480, -61410, 326],
    [45691143, -60758, 320], [45449392, -60118, 316], [45210185, -59486, 310], [44973481, -58864, 305],
    [44739244, -58254, 302], [44507436, -57652, 297], [44278016, -57058, 291], [44050948, -56474, 287],
    [43826199, -55900, 283], [43603730, -55334, 279], [43383510, -54776, 274], [43165503, -54228, 271],
    [42949675, -53686, 266], [42735995, -53154, 263], [42524430, -52628, 258], [42314950, -52112, 256],
    [42107525, -51602, 251], [41902122, -51100, 248], [41698714, -50604, 243], [41497270, -50116, 240],
    [41297764, -49636, 237], [41100168, -49162, 233], [40904453, -48696, 231], [40710593, -48234, 226],
    [40518561, -47780, 223], [40328333, -47334, 222], [40139883, -46892, 218], [39953186, -46456, 214],
    [39768218, -46028, 212], [39584955, -45604, 208], [39403371, -45186, 205], [39223448, -44776, 204],
    [39045159, -44368, 199], [38868484, -43968, 197], [38693401, -43574, 196], [38519888, -43184, 193],
    [38347924, -42798, 189], [38177489, -42418, 186], [38008563, -42044, 184], [37841123, -41674, 182],
    [37675154, -41310, 180], [37510633, -40950, 178], [37347543, -40594, 175], [37185866, -40244, 173],
    [37025582, -39898, 171], [36866673, -39556, 169], [36709124, -39218, 166], [36552915, -38886, 165],
    [36398030, -38556, 161], [36244452, -38232, 160], [36092164, -37912, 159], [35941151, -37594, 155],
    [35791396, -37282, 154], [35642884, -36974, 153], [35495599, -36668, 150], [35349528, -36368, 149],
    [35204652, -36070, 147], [35060959, -35776, 145], [34918436, -35486, 143], [34777064, -35200, 143],
    [34636835, -34916, 140], [34497732, -34636, 138], [34359741, -34360, 137], [34222849, -34086, 135],
    [34087044, -33816, 133], [33952313, -33550, 132], [33818641, -33286, 131], [33686019, -33026, 130],
] };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hw::approx::Function;

    /// FNV-1a of 2²³ results, as `approximations.cu` prints it.
    fn hash(function: Function, x: impl Fn(u32) -> u32) -> u64 {
        let of = |x| function.approx_f32(f32::from_bits(x), true).to_bits();
        (0..ONE).fold(0xcbf2_9ce4_8422_2325, |hash, i| (hash ^ u64::from(of(x(i)))).wrapping_mul(0x100_0000_01b3))
    }

    /// Bits of an f32 that look random; all exponents, infinities and NaN are among them.
    fn any(i: u32) -> u32 {
        let mut z = (u64::from(i) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z ^= z >> 29;
        z = z.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ z >> 32) as u32
    }

    /// Arguments of both signs and of magnitudes from 2⁻³¹ to 2.
    fn small(i: u32) -> u32 {
        let fraction = i.wrapping_mul(2_654_435_761) >> 9;
        (i >> 17 & 1) << 31 | (127 - (i >> 18 & 31)) << FRACTION_BITS | fraction
    }

    /// The hashes are those of an H100.
    #[test]
    fn results_are_those_of_a_card() {
        let from = |first: f32| move |i| first.to_bits() | i;
        assert_eq!(hash(Function::Ex2, from(1.0)), 0x3f0f_3852_f2fa_7edb);
        assert_eq!(hash(Function::Ex2, from(-1.0)), 0xbf4f_30a3_7a9d_5b98);
        assert_eq!(hash(Function::Ex2, small), 0x8011_5963_cc6d_d123);
        assert_eq!(hash(Function::Ex2, any), 0x9d59_51ae_15e9_8edd);
        assert_eq!(hash(Function::Rcp, from(1.0)), 0xfa72_a6c6_9827_4964);
        assert_eq!(hash(Function::Rcp, from(-1.0)), 0x5435_f48b_9827_4964);
        assert_eq!(hash(Function::Rcp, small), 0x7c8e_2beb_9a4c_1297);
        assert_eq!(hash(Function::Rcp, any), 0xe411_f689_e723_4fea);
    }
}
