//! Splits PTX text into tokens (PTX ISA, "Syntax"). No text causes a panic.

use super::error::ParseError;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token<'a> {
    /// Identifier, opcode or register: `%r1`, `$L__1`, `add`.
    Word(&'a str),
    /// `.name`, without the dot, with any `::` parts.
    Dot(&'a str),
    /// Number as written.
    Number(&'a str),
    /// String, without its quotes.
    Text(&'a str),
    /// Punctuation. `<<` and `>>` are two tokens each.
    Punct(char),
    End,
}

/// Splits `text` into tokens with their line numbers (from 1). The last token is `End`.
pub fn tokenize(text: &str) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::with_capacity(bytes.len() / 4);
    let (mut i, mut line) = (0, 1u32);
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'$';
    let scan = |from: usize, accept: &dyn Fn(u8) -> bool| {
        from + bytes[from..].iter().position(|&b| !accept(b)).unwrap_or(bytes.len() - from)
    };
    while i < bytes.len() {
        let b = bytes[i];
        let start = i;
        match b {
            b'\n' => {
                line += 1;
                i += 1;
            }
            b' ' | b'\t' | b'\r' | b'\x0c' | 0 => i += 1,
            b'/' if bytes.get(i + 1) == Some(&b'/') => i = scan(i, &|b| b != b'\n'),
            b'/' if bytes.get(i + 1) == Some(&b'*') => {
                let end = text[i + 2..].find("*/").map(|n| i + 2 + n + 2);
                let end = end.ok_or_else(|| ParseError::new(line, "this comment is not closed; add `*/`"))?;
                line += bytes[i..end].iter().filter(|&&b| b == b'\n').count() as u32;
                i = end;
            }
            b'#' => i = scan(i, &|b| b != b'\n'),
            b'"' => {
                let end = scan(i + 1, &|b| b != b'"' && b != b'\n');
                if bytes.get(end) != Some(&b'"') {
                    return Err(ParseError::new(
                        line,
                        "this string is not closed on its line; add the closing quotation mark",
                    ));
                }
                tokens.push((Token::Text(&text[i + 1..end]), line));
                i = end + 1;
            }
            b'.' if bytes.get(i + 1).is_some_and(|&b| word(b)) => {
                i = scan(i + 1, &word);
                // `::` joins the parts of one modifier.
                while bytes[i..].starts_with(b"::") && bytes.get(i + 2).is_some_and(|&b| word(b)) {
                    i = scan(i + 2, &word);
                }
                tokens.push((Token::Dot(&text[start + 1..i]), line));
            }
            b'0'..=b'9' => {
                i = scan(i, &|b| b.is_ascii_alphanumeric());
                let hex = bytes[start] == b'0'
                    && matches!(bytes.get(start + 1), Some(b'x' | b'X' | b'f' | b'F' | b'd' | b'D' | b'b' | b'B'));
                if !hex {
                    if bytes.get(i) == Some(&b'.') && bytes.get(i + 1).is_some_and(u8::is_ascii_digit) {
                        i = scan(i + 1, &|b| b.is_ascii_alphanumeric());
                    } else if bytes.get(i) == Some(&b'.') && !bytes.get(i + 1).is_some_and(|&b| word(b)) {
                        i += 1;
                    }
                    if matches!(bytes[i - 1], b'e' | b'E') && matches!(bytes.get(i), Some(b'+' | b'-')) {
                        i = scan(i + 1, &|b| b.is_ascii_digit());
                    }
                }
                tokens.push((Token::Number(&text[start..i]), line));
            }
            b if word(b) || b == b'%' => {
                i = scan(i + 1, &word);
                tokens.push((Token::Word(&text[start..i]), line));
            }
            b if b.is_ascii_graphic() => {
                tokens.push((Token::Punct(b as char), line));
                i += 1;
            }
            _ => return Err(ParseError::new(line, format!("unexpected byte {b:#04x}"))),
        }
    }
    tokens.push((Token::End, line));
    Ok(tokens)
}

/// Parses an integer literal: decimal, `0x…`, `0b…` or octal, with an optional `U`.
pub fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix(['U', 'u']).unwrap_or(text);
    if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        u64::from_str_radix(hex, 16).ok()
    } else if let Some(bin) = digits.strip_prefix("0b").or_else(|| digits.strip_prefix("0B")) {
        u64::from_str_radix(bin, 2).ok()
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(&digits[1..], 8).ok()
    } else {
        digits.parse().ok()
    }
}
