//! Readable names of kernels.

/// Maximum number of characters shown of a name.
const LONGEST: usize = 120;

/// Returns a kernel's demangled name, cut to 120 characters. Rust and C++ compilers mangle names.
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
    fn mangled_names_are_demangled_and_long_names_cut() {
        assert_eq!(readable("gemm_kernel"), "gemm_kernel");
        assert_eq!(readable("_Z6reducePKfPfj"), "reduce(float const*, float*, unsigned int)");
        assert_eq!(readable("_RNvC7kernels4gemm"), "kernels::gemm");
        assert_eq!(readable("_ZN7kernels4gemm17h0123456789abcdefE"), "kernels::gemm");
        assert_eq!(readable(&"x".repeat(500)).len(), LONGEST + 3);
    }
}
