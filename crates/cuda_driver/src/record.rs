//! The last driver call that failed, kept for each thread.
//!
//! `cust` folds every code that it does not know into `UnknownError`, and does not say which call it was. A too old driver
//! and a cluster that does not fit have such codes. The forwarders see both code and call, and keep them here.

use std::cell::Cell;
use std::ffi::c_int;

/// The result of every driver call, as the C ABI has it: a plain number, since a new driver has codes of its own.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const SYMBOL_NOT_FOUND: Code = 302;
const NOT_READY: Code = 600;
const UNKNOWN: Code = 999;

/// A driver call that failed. It prints as the error alone: name, number and sentence, without the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function, as the driver names it, for instance `cuMemAlloc_v2`.
    pub call: &'static str,
    /// The `CUresult`, also where `cust` has no name for it.
    pub code: i32,
}

thread_local! {
    static LAST: Cell<Option<Failure>> = const { Cell::new(None) };
}

/// The last call of this thread that failed. A call that succeeds does not clear it, and "not ready" is no failure.
pub fn last_failure() -> Option<Failure> {
    LAST.try_with(Cell::get).ok().flatten()
}

/// Remembers a failure, and returns a code that `cust`'s enum has.
pub(crate) fn record(call: &'static str, code: Code) -> cust::sys::CUresult {
    if code != SUCCESS && code != NOT_READY {
        // A thread that is ending has no place to remember it, and nobody will ask.
        let _ = LAST.try_with(|last| last.set(Some(Failure { call, code })));
    }
    let code = if known_to_cust(code) { code } else { UNKNOWN };
    // SAFETY: `CUresult` is `repr(i32)`, and `known_to_cust` admits only its discriminants.
    unsafe { std::mem::transmute::<Code, cust::sys::CUresult>(code) }
}

/// The discriminants of `CUresult` in cust_raw 0.11.3.
fn known_to_cust(code: Code) -> bool {
    matches!(code,
        0..=8 | 34 | 100..=102 | 200..=202 | 205..=224 | 300..=304 | 400..=401 | 500 | 600
        | 700..=705 | 708..=720 | 800..=809 | 900..=911 | 999)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_newer_than_cust_becomes_unknown_and_keeps_its_number() {
        let invalid_cluster_size = 912;
        assert_eq!(record("cuLaunchKernelEx", invalid_cluster_size), cust::sys::CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(last_failure(), Some(Failure { call: "cuLaunchKernelEx", code: invalid_cluster_size }));
    }

    #[test]
    fn not_ready_is_an_answer_and_no_failure() {
        record("cuMemAlloc_v2", 2);
        assert_eq!(record("cuEventQuery", NOT_READY), cust::sys::CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(last_failure(), Some(Failure { call: "cuMemAlloc_v2", code: 2 }));
    }
}
