//! Step 2: prepares rustc's IR for LLVM's optimizer, as text.
//!
//! * Every defined function and every inline-assembly call becomes `convergent`: LLVM may not make its execution depend
//!   on more conditions than the source does (LLVM Language Reference, "Convergent Operation Semantics"). `opt` removes
//!   the attribute again from functions that do not need it.
//! * Every function gets the architecture, because LLVM inlines only between functions of the same target CPU. The
//!   functions of `core` are compiled without one.
//! * Names lose the crates' hashes, because the hashes of a crate outside the workspace depend on its location. Comments,
//!   checksums of sources and source locations of inline assembly (`!srcloc`) are left out, because no pass reads them.
//!   Kernels whose crates all lie in one workspace then have the same IR in every checkout, and LLVM need not run again.
//!   For other kernels, rustc may order functions by the hashes.
//! * The launch bounds that `#[kernel]` stores in a static become attributes of the kernel. `llc` turns the attributes
//!   into `.maxntid`, `.minnctapersm` and `.reqnctapercluster`.
//!
//! This relies on rustc printing one definition, global or call per line.

use std::collections::{BTreeMap, HashMap, HashSet};

use rustc_demangle::try_demangle;

use crate::Arch;

/// Prefix of the static in which `#[kernel]` stores a u32 per entry of [`ATTRIBUTES`]. The kernel's name follows.
const LAUNCH_BOUNDS: &str = "__launch_bounds_";

/// LLVM's attributes for launch bounds: threads per CTA, CTAs per SM, CTAs per cluster.
const ATTRIBUTES: [&str; 3] = ["nvvm.maxntid", "nvvm.minctasm", "nvvm.cluster_dim"];

/// Beginning of the attribute that names a function's target CPU, up to the value.
const TARGET_CPU: &str = "\"target-cpu\"=\"";

/// Returns the prepared IR, or the line number (from 1) of an error and what was expected there.
pub(crate) fn prepare(ir: &str, arch: Arch) -> Result<String, (usize, String)> {
    let ir = &rename_constants(&rename(ir));
    let mut bounds = BTreeMap::new();
    let mut kept = Vec::new();
    for (index, line) in ir.lines().enumerate() {
        match launch_bounds(line).map_err(|reason| (index + 1, reason))? {
            Some((kernel, attributes)) => drop(bounds.insert(kernel, attributes)),
            None => kept.push((index + 1, line)),
        }
    }

    let mut out = String::with_capacity(ir.len() + ir.len() / 16);
    let mut places = HashSet::new();
    for (number, line) in kept {
        let is_place = line.split_once(" = ").is_some_and(|(name, _)| places.contains(name));
        if is_place || [";", "source_filename"].iter().any(|start| line.starts_with(start)) {
            continue;
        }
        if let Some(file) = plain_file(line) {
            out.extend([&*file, "\n"]);
            continue;
        }
        let line = line.split_once(", !srcloc ").map_or(line, |(line, place)| {
            places.insert(place);
            line
        });
        let at = if line.starts_with("define ") {
            line.find('@').and_then(|name| after_arguments(line, name))
        } else if let Some(asm) = inline_asm(line) {
            after_arguments(line, asm)
        } else if let Some((before, after)) = line.strip_prefix("attributes ").and_then(|_| target_cpu(line)) {
            out.extend([before, &arch.to_string(), after, "\n"]);
            continue;
        } else {
            out.extend([line, "\n"]);
            continue;
        };
        let at = at.ok_or_else(|| (number, "expected an argument list".to_owned()))?;
        out.extend([&line[..at], " convergent"]);
        if let Some(attributes) = defined_name(line).and_then(|name| bounds.remove(name)) {
            out.push_str(&attributes);
        }
        out.extend([&line[at..], "\n"]);
    }
    match bounds.pop_first() {
        Some((kernel, _)) => Err((1, format!("found launch bounds, but no definition of {kernel}"))),
        None => Ok(out),
    }
}

/// Returns a description of a source file (`!DIFile`) without checksum and codegen unit. The unit's name has the crate's
/// hash. `None`: the line describes no file.
fn plain_file(line: &str) -> Option<String> {
    let (number, file) = line.split_once(" = !DIFile(")?;
    let file = file.split_once(", checksumkind: ").map_or(file, |(file, _)| file).trim_end_matches(')');
    let file = match file.split_once("/@/") {
        Some((source, unit)) => source.to_owned() + &unit[unit.find('"')?..],
        None => file.to_owned(),
    };
    Some(format!("{number} = !DIFile({file})"))
}

/// Splits a line around the name of the target CPU in a group of attributes.
fn target_cpu(line: &str) -> Option<(&str, &str)> {
    let start = line.find(TARGET_CPU)? + TARGET_CPU.len();
    Some((&line[..start], &line[start + line[start..].find('"')?..]))
}

/// Replaces each word that begins with `start` by `new(word)`. If `new` returns `None`, the word stays. A word ends
/// before the first character that `continues` rejects.
fn replace_words<'a>(
    ir: &'a str,
    start: &str,
    continues: fn(char) -> bool,
    mut new: impl FnMut(&'a str) -> Option<String>,
) -> String {
    let mut out = String::with_capacity(ir.len());
    let mut rest = ir;
    while let Some(at) = rest.find(start) {
        let end = rest[at..].find(|c: char| !continues(c));
        let (before, word) = (&rest[..at], &rest[at..end.map_or(rest.len(), |end| at + end)]);
        rest = &rest[at + word.len()..];
        out.push_str(before);
        // `start` inside another name does not begin a word.
        let begins = !before.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        match begins.then(|| new(word)).flatten() {
            Some(new) => out.push_str(&new),
            None => out.push_str(word),
        }
    }
    out + rest
}

/// Replaces every mangled symbol by its demangled path without hashes, with the characters that PTX allows. If several symbols
/// would get the same name, the later ones get a number.
fn rename(ir: &str) -> String {
    let mut names = HashMap::new();
    let mut taken = HashSet::new();
    let continues = |c: char| c.is_ascii_alphanumeric() || c == '_';
    replace_words(ir, "_R", continues, |symbol| names.entry(symbol).or_insert_with(|| name(symbol, &mut taken)).clone())
}

/// Replaces the crate's hash by a number in the names of anonymous constants, `anon.HASH.N`.
fn rename_constants(ir: &str) -> String {
    let mut hashes = HashMap::new();
    let continues = |c: char| c.is_ascii_alphanumeric() || c == '.';
    replace_words(ir, "anon.", continues, |constant| {
        let (hash, index) = constant.strip_prefix("anon.")?.split_once('.')?;
        let next = hashes.len();
        Some(format!("anon.{}.{index}", hashes.entry(hash).or_insert(next)))
    })
}

/// Returns the unique name that replaces a symbol, and adds it to `taken`. `None`: the symbol is not mangled.
fn name(symbol: &str, taken: &mut HashSet<String>) -> Option<String> {
    let path = try_demangle(symbol).ok()?;
    let letters = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let name: String = format!("{path:#}").chars().map(letters).collect();
    let numbered = (2..).map(|number| format!("{name}__{number}"));
    [name.clone()].into_iter().chain(numbered).find(|name| taken.insert(name.clone()))
}

/// Returns the kernel and its attributes if `line` is a static with launch bounds.
fn launch_bounds(line: &str) -> Result<Option<(&str, String)>, String> {
    let Some((kernel, rest)) =
        line.strip_prefix('@').and_then(|line| line.strip_prefix(LAUNCH_BOUNDS)?.split_once(" = "))
    else {
        return Ok(None);
    };
    let bytes = if rest.contains(" zeroinitializer") {
        vec![0; 4 * ATTRIBUTES.len()]
    } else {
        let text = rest.split_once(" c\"").and_then(|(_, text)| text.split_once('"'));
        unescape(text.ok_or("expected a byte string of launch bounds")?.0)
    };
    let (words, []) = bytes.as_chunks::<4>() else {
        return Err("expected launch bounds as u32".to_owned());
    };
    if words.len() != ATTRIBUTES.len() {
        return Err(format!("expected {} u32 launch bounds", ATTRIBUTES.len()));
    }
    let mut attributes = String::new();
    for (name, value) in ATTRIBUTES.iter().zip(words) {
        match u32::from_le_bytes(*value) {
            0 => {}
            value => attributes.push_str(&format!(" \"{name}\"=\"{value}\"")),
        }
    }
    Ok(Some((kernel, attributes)))
}

/// Decodes an LLVM string constant. `\hh` is a byte in hexadecimal.
fn unescape(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = tail.get(..2).and_then(|hex| u8::from_str_radix(str::from_utf8(hex).ok()?, 16).ok());
        match escaped.filter(|_| *first == b'\\') {
            Some(byte) => (bytes.push(byte), rest = &tail[2..]),
            None => (bytes.push(*first), rest = tail),
        };
    }
    bytes
}

/// Returns the name of the function that `line` defines.
fn defined_name(line: &str) -> Option<&str> {
    let name = &line.strip_prefix("define ")?[line.find('@')? - "define ".len() + 1..];
    name.split('(').next()
}

/// Returns the index in `line` where the template of an inline-assembly call begins.
fn inline_asm(line: &str) -> Option<usize> {
    let call = line.find("call ")?;
    let asm = call + line[call..].find(" asm ")?;
    // The match is not inside a string, because the callee precedes all strings of a call.
    (!line[..asm].contains('"')).then(|| asm + line[asm..].find('"').unwrap_or(0))
}

/// Returns the index after the first closed parenthesis that follows `from`, strings excluded. Function attributes may
/// follow there.
fn after_arguments(line: &str, from: usize) -> Option<usize> {
    let (mut depth, mut quoted) = (0_usize, false);
    for (offset, byte) in line.bytes().enumerate().skip(from) {
        match byte {
            b'"' => quoted = !quoted,
            b'(' if !quoted => depth += 1,
            b')' if !quoted => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    let end = offset + 1;
                    let address = [" unnamed_addr", " local_unnamed_addr"];
                    let skipped =
                        address.iter().find(|word| line[end..].starts_with(**word)).map_or(0, |word| word.len());
                    return Some(end + skipped);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::prepare;
    use crate::Arch;

    #[test]
    fn only_definitions_and_assembly_become_convergent() {
        let ir = r#"
define internal i32 @"f(x)"(ptr dereferenceable(8) %x) unnamed_addr #1 {
  %1 = call { i32, i32 } asm sideeffect "shfl (\22) $0;", "=r,=r,r"(i32 ptrtoint (ptr @g to i32)) #4, !dbg !7
  tail call void asm "bar.sync 0;", ""()
  %2 = call i32 @asm(i32 1)
  ret i32 %2
}
declare void @h() #2"#;
        let expected = r#"
define internal i32 @"f(x)"(ptr dereferenceable(8) %x) unnamed_addr convergent #1 {
  %1 = call { i32, i32 } asm sideeffect "shfl (\22) $0;", "=r,=r,r"(i32 ptrtoint (ptr @g to i32)) convergent #4, !dbg !7
  tail call void asm "bar.sync 0;", ""() convergent
  %2 = call i32 @asm(i32 1)
  ret i32 %2
}
declare void @h() #2
"#;
        assert_eq!(prepare(ir, Arch::SM_80).unwrap(), expected);
    }

    #[test]
    fn every_function_gets_the_architecture() {
        let ir = |cpu: &str| format!("attributes #0 = {{ nounwind \"target-cpu\"=\"{cpu}\" }}\n");
        assert_eq!(prepare(&ir("sm_30"), Arch::SM_100F).unwrap(), ir("sm_100f"));
    }

    #[test]
    fn symbols_lose_their_crate_hashes() {
        let ir = |hash: &str| format!("call void @_RNvNtCs{hash}_11kernels_gpu4gemm4step(i32 %_R), !x\n");
        let here = prepare(&ir("gcz8MIeYDEN"), Arch::SM_80).unwrap();
        assert_eq!(here, "call void @kernels_gpu__gemm__step(i32 %_R), !x\n");
        assert_eq!(prepare(&ir("1htOsRJ2d81"), Arch::SM_80).unwrap(), here);
        // The same path in two versions of a crate.
        let both = prepare(&(ir("gcz8MIeYDEN") + &ir("1htOsRJ2d81") + &ir("gcz8MIeYDEN")), Arch::SM_80).unwrap();
        let names: Vec<_> = both.lines().map(|line| line.split(['@', '(']).nth(1).unwrap()).collect();
        assert_eq!(names, ["kernels_gpu__gemm__step", "kernels_gpu__gemm__step__2", "kernels_gpu__gemm__step"]);
    }

    #[test]
    fn prepared_ir_does_not_depend_on_the_checkout() {
        let ir = |[unit, first, second, checksum]: [&str; 4], place: u64| {
            format!(
                "; ModuleID = 'core.{unit}-cgu.0'\nsource_filename = \"core.{unit}-cgu.0\"\n\
                 @anon.{first}.0 = @anon.{second}.12, @anon.{first}.1\n  call void asm \"\", \"\"(), !dbg !1, !srcloc !4\n\
                 !2 = !DIFile(filename: \"lib.rs/@/core.{unit}-cgu.0\", directory: \"core\")\n\
                 !3 = !DIFile(filename: \"lib.rs\", directory: \"core\", checksumkind: CSK_MD5, checksum: \"{checksum}\")\n\
                 !4 = !{{i64 {place}}}\n!5 = !{{i64 4}}\n"
            )
        };
        let expected = r#"@anon.0.0 = @anon.1.12, @anon.0.1
  call void asm "", ""() convergent, !dbg !1
!2 = !DIFile(filename: "lib.rs", directory: "core")
!3 = !DIFile(filename: "lib.rs", directory: "core")
!5 = !{i64 4}
"#;
        let here = ir(["c7c3418c3f24446b", "9690475f", "36f1934b", "8f706ae0"], 3362813364662883);
        let there = ir(["73242620acfff16", "d3ec2c4b", "9690475f", "ae7ea7cf"], 3378099153272906);
        for ir in [here, there] {
            assert_eq!(prepare(&ir, Arch::SM_80).unwrap(), expected);
        }
    }

    #[test]
    fn launch_bounds_move_from_their_static_to_the_kernel() {
        let ir = r#"@__launch_bounds_k = constant [12 x i8] c"\80\01\00\00\01\00\00\00\02\00\00\00", align 4
@__launch_bounds_l = constant [12 x i8] c"a\00\00\00\00\00\00\00\00\00\00\00", align 4
define ptx_kernel void @k() unnamed_addr #0 {
define ptx_kernel void @l() #0 {
"#;
        let expected = r#"define ptx_kernel void @k() unnamed_addr convergent "nvvm.maxntid"="384" "nvvm.minctasm"="1" "nvvm.cluster_dim"="2" #0 {
define ptx_kernel void @l() convergent "nvvm.maxntid"="97" #0 {
"#;
        assert_eq!(prepare(ir, Arch::SM_80).unwrap(), expected);
    }

    #[test]
    fn launch_bounds_without_a_kernel_are_refused() {
        let ir = "@__launch_bounds_k = constant [12 x i8] zeroinitializer, align 4\n";
        assert!(prepare(ir, Arch::SM_80).unwrap_err().1.contains("no definition of k"));
    }
}
