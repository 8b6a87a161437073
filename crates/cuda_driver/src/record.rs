//! The last failed driver call of each thread.
//!
//! `cust` maps every code that it does not know to `UnknownError`, and does not tell which call failed. A driver that
//! is too old and a cluster that does not fit have such codes. The forwarders see both the code and the call, and
//! record them here.

use std::cell::Cell;
use std::ffi::c_int;

/// Result of a driver call in the C ABI: a plain number, because a newer driver may return codes that `cust` lacks.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const SYMBOL_NOT_FOUND: Code = 302;
const NOT_READY: Code = 600;
const UNKNOWN: Code = 999;

/// A failed driver call. It is displayed as the error only: name, number and description, without the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Name of the driver's function, for example `cuMemAlloc_v2`.
    pub call: &'static str,
    /// The `CUresult`. `cust` may have no name for it.
    pub code: i32,
}

thread_local! {
    static LAST: Cell<Option<Failure>> = const { Cell::new(None) };
}

/// Returns the last failed call of this thread. A call that succeeds does not clear it, and "not ready" is not a
/// failure.
pub fn last_failure() -> Option<Failure> {
    LAST.try_with(Cell::get).ok().flatten()
}

/// Records a failure, and returns a code that `cust`'s enum contains.
pub(crate) fn record(call: &'static str, code: Code) -> cust::sys::CUresult {
    if code != SUCCESS && code != NOT_READY {
        // While a thread ends, its storage may be gone. Then nobody can read the failure either.
        let _ = LAST.try_with(|last| last.set(Some(Failure { call, code })));
    }
    let code = if known_to_cust(code) { code } else { UNKNOWN };
    // SAFETY: `CUresult` is `repr(i32)`, and `known_to_cust` admits only its discriminants.
    unsafe { std::mem::transmute::<Code, cust::sys::CUresult>(code) }
}

/// Whether `code` is a discriminant of `CUresult` in cust_raw 0.11.3.
fn known_to_cust(code: Code) -> bool {
    matches!(code,
        0..=8 | 34 | 100..=102 | 200..=202 | 205..=224 | 300..=304 | 400..=401 | 500 | 600
        | 700..=705 | 708..=720 | 800..=809 | 900..=911 | 999)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_that_cust_lacks_becomes_unknown_and_is_recorded() {
        let invalid_cluster_size = 912;
        assert_eq!(record("cuLaunchKernelEx", invalid_cluster_size), cust::sys::CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(last_failure(), Some(Failure { call: "cuLaunchKernelEx", code: invalid_cluster_size }));
    }

    #[test]
    fn not_ready_is_not_a_failure() {
        record("cuMemAlloc_v2", 2);
        assert_eq!(record("cuEventQuery", NOT_READY), cust::sys::CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(last_failure(), Some(Failure { call: "cuMemAlloc_v2", code: 2 }));
    }
}
