//! Names of kernels, for people.

/// The most characters of a name that are shown.
const LONGEST: usize = 120;

/// A name as its source has it, cut if it is long. Rust and C++ compilers mangle names.
pub fn readable(name: &str) -> String {
    let rust = rustc_demangle::try_demangle(name).map(|demangled| format!("{demangled:#}"));
    let cpp = || cpp_demangle::Symbol::new(name).ok()?.demangle(&cpp_demangle::DemangleOptions::default()).ok();
    let text = rust.ok().or_else(cpp).unwrap_or_else(|| name.to_owned());
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mangled_names_are_read_and_long_ones_cut() {
        assert_eq!(readable("gemm_kernel"), "gemm_kernel");
        assert_eq!(readable("_Z6reducePKfPfj"), "reduce(float const*, float*, unsigned int)");
        assert_eq!(readable("_RNvC7kernels4gemm"), "kernels::gemm");
        assert_eq!(readable("_ZN7kernels4gemm17h0123456789abcdefE"), "kernels::gemm");
        assert_eq!(readable(&"x".repeat(500)).len(), LONGEST + 3);
    }
}
