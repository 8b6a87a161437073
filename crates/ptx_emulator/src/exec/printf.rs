//! Conversions of `printf`, with the text that C's library gives.

/// Options between `%` and the conversion: `-+ #0`, width, precision and size.
pub struct Options<'a> {
    left: bool,
    plus: bool,
    space: bool,
    alternative: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
    size: &'a str,
}

impl<'a> Options<'a> {
    pub fn parse(text: &'a str) -> Self {
        let numbers = text.trim_start_matches(['-', '+', ' ', '#', '0']);
        let flags = &text[..text.len() - numbers.len()];
        let digits = numbers.trim_end_matches(['l', 'h', 'z', 'j', 't']);
        let (width, precision) = match digits.split_once('.') {
            // A precision without digits is zero.
            Some((width, precision)) => (width, Some(precision.parse().unwrap_or(0))),
            None => (digits, None),
        };
        Options {
            left: flags.contains('-'),
            plus: flags.contains('+'),
            space: flags.contains(' '),
            alternative: flags.contains('#'),
            zeros: flags.contains('0'),
            width: width.parse().unwrap_or(0),
            precision,
            size: &numbers[digits.len()..],
        }
    }

    /// Whether an integer has 64 bits.
    pub fn is_wide(&self) -> bool {
        self.size.contains(['l', 'z', 'j', 't'])
    }

    /// Text of an integer. `conversion`: one of `diuxXo`.
    pub fn integer(&self, conversion: char, value: u64) -> String {
        let signed = if self.is_wide() { value as i64 } else { i64::from(value as u32 as i32) };
        let (negative, digits) = match conversion {
            'd' | 'i' => (signed < 0, signed.unsigned_abs().to_string()),
            'x' => (false, format!("{value:x}")),
            'X' => (false, format!("{value:X}")),
            'o' => (false, format!("{value:o}")),
            _ => (false, value.to_string()),
        };
        let digits = format!("{digits:0>0$}", self.precision.unwrap_or(1));
        let prefix = match conversion {
            'd' | 'i' => self.sign(negative),
            'x' if self.alternative && value != 0 => "0x",
            'X' if self.alternative && value != 0 => "0X",
            'o' if self.alternative && !digits.starts_with('0') => "0",
            _ => "",
        };
        self.padded(prefix, &digits, self.zeros && self.precision.is_none())
    }

    /// Text of a floating-point number. `conversion`: one of `fFeEgGaA`.
    pub fn float(&self, conversion: char, value: f64) -> String {
        let prefix = self.sign(value.is_sign_negative() && !value.is_nan());
        let magnitude = value.abs();
        let lower = conversion.to_ascii_lowercase();
        let (prefix, digits) = if !value.is_finite() {
            (prefix.to_string(), if value.is_nan() { "nan" } else { "inf" }.to_string())
        } else if lower == 'a' {
            (format!("{prefix}0x"), hexadecimal(magnitude, self.precision, self.alternative))
        } else {
            let precision = self.precision.unwrap_or(6);
            let digits = match lower {
                'f' => fixed(magnitude, precision, self.alternative),
                'e' => exponential(magnitude, precision, self.alternative),
                _ => general(magnitude, precision.max(1), self.alternative),
            };
            (prefix.to_string(), digits)
        };
        let text = self.padded(&prefix, &digits, self.zeros && value.is_finite());
        if conversion.is_ascii_uppercase() { text.to_ascii_uppercase() } else { text }
    }

    /// Text of anything else.
    pub fn text(&self, text: &str) -> String {
        self.padded("", text, false)
    }

    /// The characters of a string that are printed.
    pub fn cut<'t>(&self, text: &'t str) -> &'t str {
        let end = self.precision.and_then(|most| text.char_indices().nth(most));
        end.map_or(text, |(at, _)| &text[..at])
    }

    fn sign(&self, negative: bool) -> &'static str {
        match (negative, self.plus, self.space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        }
    }

    fn padded(&self, prefix: &str, digits: &str, zeros: bool) -> String {
        let missing = self.width.saturating_sub(prefix.chars().count() + digits.chars().count());
        match (self.left, zeros) {
            (true, _) => format!("{prefix}{digits}{}", " ".repeat(missing)),
            (_, true) => format!("{prefix}{}{digits}", "0".repeat(missing)),
            _ => format!("{}{prefix}{digits}", " ".repeat(missing)),
        }
    }
}

fn fixed(value: f64, precision: usize, point: bool) -> String {
    let text = format!("{value:.precision$}");
    if point && precision == 0 { text + "." } else { text }
}

fn exponential(value: f64, precision: usize, point: bool) -> String {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').expect("Rust's exponential form has an e");
    let exponent: i32 = exponent.parse().expect("Rust's exponent is a number");
    let point = if point && precision == 0 { "." } else { "" };
    format!("{digits}{point}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// `%g`: the shorter of the two forms, with `precision` significant digits and without zeros at the end.
fn general(value: f64, precision: usize, keep_zeros: bool) -> String {
    let text = exponential(value, precision - 1, false);
    let (_, exponent) = text.split_once('e').expect("the form has an e");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    let short = |digits: &str| match digits.contains('.') && !keep_zeros {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => digits.to_string(),
    };
    if exponent < -4 || exponent >= precision as i32 {
        let text = exponential(value, precision - 1, keep_zeros);
        let (digits, exponent) = text.split_once('e').expect("the form has an e");
        return format!("{}e{exponent}", short(digits));
    }
    short(&fixed(value, (precision as i32 - 1 - exponent) as usize, keep_zeros))
}

/// `%a` behind `0x`. Without a precision, all digits that are not zero.
fn hexadecimal(value: f64, precision: Option<usize>, point: bool) -> String {
    let bits = value.to_bits();
    let (mut lead, mut fraction) = (u64::from(bits >> 52 != 0), bits & ((1 << 52) - 1));
    let exponent = match (bits >> 52 & 0x7ff) as i32 {
        0 if fraction == 0 => 0,
        0 => -1022,
        biased => biased - 1023,
    };
    let count = precision.unwrap_or(13);
    if count < 13 {
        // To nearest, ties to even.
        let (whole, dropped) = (lead << 52 | fraction, 52 - 4 * count as u32);
        let (kept, rest, half) = (whole >> dropped, whole & ((1 << dropped) - 1), 1u64 << (dropped - 1));
        let rounded = (kept + u64::from(rest > half || rest == half && kept & 1 == 1)) << dropped;
        (lead, fraction) = (rounded >> 52, rounded & ((1 << 52) - 1));
    }
    let digits = format!("{fraction:013x}");
    let digits = match precision {
        Some(count) if count <= 13 => digits[..count].to_string(),
        Some(count) => format!("{digits:0<count$}"),
        None => digits.trim_end_matches('0').to_string(),
    };
    let point = if point || !digits.is_empty() { "." } else { "" };
    format!("{lead}{point}{digits}p{exponent:+}")
}

#[cfg(test)]
mod tests {
    use super::Options;

    #[test]
    fn numbers_have_the_text_of_c() {
        // Printed by glibc 2.36.
        let cases = [
            ("", 'a', 1.0, "0x1p+0"),
            ("", 'a', -2.5, "-0x1.4p+1"),
            ("", 'a', 0.1, "0x1.999999999999ap-4"),
            ("", 'a', 0.0, "0x0p+0"),
            ("", 'a', 5e-324, "0x0.0000000000001p-1022"),
            (".2", 'a', 0.1, "0x1.9ap-4"),
            (".0", 'a', 1.5, "0x2p+0"),
            ("", 'A', 26.0, "0X1.AP+4"),
            ("", 'e', 12345.678, "1.234568e+04"),
            (".0", 'e', 0.00025, "3e-04"),
            ("", 'E', 1e100, "1.000000E+100"),
            ("", 'g', 0.0001, "0.0001"),
            ("", 'g', 0.00001, "1e-05"),
            ("", 'g', 1e6, "1e+06"),
            ("", 'g', 123456.0, "123456"),
            ("", 'g', 0.1, "0.1"),
            (".3", 'g', 9999.0, "1e+04"),
            ("#", 'g', 1.0, "1.00000"),
            ("+", 'f', 1.0, "+1.000000"),
            (" .1", 'f', 1.25, " 1.2"),
            ("08.2", 'f', -1.5, "-0001.50"),
            ("-8.2", 'f', 1.5, "1.50    "),
            ("8", 'f', f64::NEG_INFINITY, "    -inf"),
            ("08", 'g', f64::NAN, "     nan"),
        ];
        for (options, conversion, value, text) in cases {
            assert_eq!(Options::parse(options).float(conversion, value), text, "%{options}{conversion} of {value}");
        }
    }

    #[test]
    fn integers_have_the_text_of_c() {
        let cases = [
            ("", 'd', u64::from(-7i32 as u32), "-7"),
            ("ll", 'd', -7i64 as u64, "-7"),
            ("05", 'd', u64::from(-7i32 as u32), "-0007"),
            ("+", 'i', 7, "+7"),
            ("5.3", 'u', 7, "  007"),
            ("#", 'x', 255, "0xff"),
            ("#010", 'X', 255, "0X000000FF"),
            ("#", 'o', 8, "010"),
            ("-4", 'd', 7, "7   "),
        ];
        for (options, conversion, value, text) in cases {
            assert_eq!(Options::parse(options).integer(conversion, value), text, "%{options}{conversion} of {value}");
        }
    }
}
