//! Loops as straight-line code.

/// Repeats a block with a constant index, because an array stays in registers only if all its indices are constants.
/// LLVM does not unroll loops with much code.
#[allow(unused_macros)] // not every kernel has such loops
macro_rules! unroll {
    ($index:ident in $($value:literal)*, $body:block) => {$({
        const $index: usize = $value;
        $body
    })*};
}
#[allow(unused_imports)]
pub(crate) use unroll;
