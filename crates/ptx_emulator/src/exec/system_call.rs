//! Functions that the driver provides to every kernel: `__assertfail`, behind `assert`, and `vprintf`, behind `printf`
//! (CUDA C++ Programming Guide, "Assertion", "Formatted Output").

use crate::code::{Flow, Step};
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::printf::Options;
use crate::machine::address::Lane;
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::lanes;
use crate::parser::ast::Operand;
use crate::types::Space;

/// Bytes after which a string is cut off.
const LONGEST: u64 = 4096;

/// Decodes a call of `__assertfail` or `vprintf`. `None`: another function, or the module defines its own.
pub fn system_call(i: &mut Parsed<'_>) -> Result<Option<Step>> {
    let name =
        i.operands().iter().find_map(|operand| if let Operand::Name(name) = operand { Some(name) } else { None });
    let lists = |i: &Parsed<'_>, first: bool| -> Vec<Operand> {
        let at = i.operands().iter().position(|operand| matches!(operand, Operand::Name(_))).unwrap_or(0);
        let side = if first { &i.operands()[..at] } else { &i.operands()[at..] };
        side.iter()
            .find_map(|o| if let Operand::List(list) = o { Some(list.clone()) } else { None })
            .unwrap_or_default()
    };
    let (results, arguments) = (lists(i, true), lists(i, false));
    // The offset of each parameter, whose size must match.
    let offsets = |list: &[Operand], bytes: &[u32]| {
        list.iter().zip(bytes).map(|(a, bytes)| i.param_variable(a, *bytes)).collect::<Result<Vec<u32>>>()
    };
    match name.map(String::as_str) {
        Some("__assertfail") if !i.defines("__assertfail") => {
            let [message, file, line, function, _] = offsets(&arguments, &[8, 8, 4, 8, 8])?[..] else {
                return Err(DecodeError::invalid("`__assertfail` takes five arguments"));
            };
            Ok(Some(Box::new(move |w, m, mask| {
                let lane = mask.trailing_zeros() as usize;
                let text = |offset| text(m, parameter(w, lane, offset, 8));
                let line = parameter(w, lane, line, 4);
                let (message, file, function) = (text(message), text(file), text(function));
                let text = format!("assertion `{message}` failed in `{function}`, {file}:{line}");
                Err(Stop::new(FaultKind::Trap, text).lane(lane as u32))
            })))
        }
        Some("vprintf") if !i.defines("vprintf") => {
            let ([format, values], results) =
                (offsets(&arguments, &[8, 8])?[..].try_into().unwrap_or([0; 2]), offsets(&results, &[4])?);
            if arguments.len() != 2 {
                return Err(DecodeError::invalid("`vprintf` takes two arguments"));
            }
            Ok(Some(Box::new(move |w, m, mask| {
                for lane in lanes(mask) {
                    let format = text(m, parameter(w, lane, format, 8));
                    let (printed, count) = print(w, m, lane, &format, parameter(w, lane, values, 8))?;
                    m.output.push_str(&printed);
                    for &result in &results {
                        let at = lane * w.local_size() + result as usize;
                        w.local[at..at + 4].copy_from_slice(&count.to_le_bytes());
                        w.local_defined[at..at + 4].fill(true);
                    }
                }
                Ok(Flow::Next)
            })))
        }
        _ => Ok(None),
    }
}

/// Bits of an argument.
fn parameter(w: &Warp, lane: usize, offset: u32, bytes: usize) -> u64 {
    let at = lane * w.local_size() + offset as usize;
    w.local[at..at + bytes].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// A zero-terminated string in global or constant memory.
fn text(m: &Machine<'_>, address: u64) -> String {
    let byte = |at: u64| {
        let mut byte = [0];
        m.global.locate(at, 1).inspect(|(allocation, offset)| allocation.read(*offset, &mut byte));
        byte[0]
    };
    let bytes: Vec<u8> = (address..address + LONGEST).map(byte).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Formats the values at `at`, which are packed one after another, each aligned to its size. Returns the text and the
/// number of values, as CUDA's `printf` does.
fn print(w: &Warp, m: &mut Machine<'_>, lane: usize, format: &str, mut at: u64) -> Stopped<(String, u32)> {
    let (mut out, mut count) = (String::new(), 0u32);
    let mut rest = format;
    while let Some((before, specification)) = rest.split_once('%') {
        out.push_str(before);
        let end = specification
            .find(|c: char| !matches!(c, '-' | '+' | ' ' | '#' | '.' | '0'..='9' | 'l' | 'h' | 'z' | 'j' | 't'));
        let Some(end) = end else { return Ok((out + "%" + specification, count)) };
        let (flags, conversion) = (&specification[..end], specification[end..].chars().next().unwrap_or('%'));
        rest = &specification[end + conversion.len_utf8()..];
        let options = Options::parse(flags);
        let float = matches!(conversion, 'f' | 'F' | 'e' | 'E' | 'g' | 'G' | 'a' | 'A');
        let wide = options.is_wide() || float || matches!(conversion, 's' | 'p');
        let mut value = 0;
        if conversion != '%' {
            let size = if wide { 8 } else { 4 };
            at = at.next_multiple_of(size);
            let mut bytes = [0; 8];
            let from = Lane { lane: lane as u32, address: at, space: Space::Generic };
            m.load(w, from, Mode::Read, &mut bytes[..size as usize])?;
            value = u64::from_le_bytes(bytes);
            at += size;
            count += 1;
        }
        out += &match conversion {
            '%' => "%".into(),
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => options.integer(conversion, value),
            'p' => options.text(&format!("{value:#x}")),
            'c' => options.text(&char::from(value as u8).to_string()),
            's' => options.text(options.cut(&text(m, value))),
            _ if float => options.float(conversion, f64::from_bits(value)),
            other => return Err(Stop::unsupported(format!("`%{flags}{other}` in a `printf` format"))),
        };
    }
    Ok((out + rest, count))
}
