//! Shared parts of the kernels' implementations for the fake driver. Operands are read from the addresses in the
//! descriptors and multiplied by the oracle. The fake device's memory is process memory.

use fake_cuda::Launch;
use kernels_gpu::format::OUTPUT_BF16;

use super::KERNELS;
use super::kernel::Kernel;
use nvfp4_core::format::blocked::{self, BlockedScales};
use nvfp4_core::format::{BLOCK, Matrix};
use nvfp4_core::oracle::Reference;
use nvfp4_core::problem::{Expert, Op, Step, TokenDtype, Weights};

/// Default number of SMs of the fake device.
pub const SMS: u32 = 4;

/// Computes the launched entry.
pub fn kernel(launch: &Launch<'_>) {
    let is_of = |kernel: &&&dyn Kernel| kernel.entries().iter().any(|entry| entry.name == launch.kernel);
    KERNELS.iter().find(is_of).expect("the launch names an entry of a kernel").fake(launch);
}

/// Returns the output type for its code in a parameter.
pub(super) fn out_dtype(code: u32) -> TokenDtype {
    if code == OUTPUT_BF16 { TokenDtype::Bf16 } else { TokenDtype::F16 }
}

/// Returns an array in device memory.
///
/// # Safety
///
/// The address is valid for reads of `count` elements, and nobody writes them while the slice lives.
pub(super) unsafe fn slice<'a, T>(address: u64, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees `count` readable elements that nobody writes while the slice lives.
    unsafe { std::slice::from_raw_parts(address as *const T, count) }
}

/// Returns a writable array in device memory.
///
/// # Safety
///
/// The address is valid for writes of `count` elements, and nobody else accesses them while the slice lives.
pub(super) unsafe fn slice_mut<'a, T>(address: u64, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: the caller guarantees `count` writable elements that nobody else accesses while the slice lives.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, count) }
}

/// Returns a matrix in device memory.
///
/// # Safety
///
/// `values` is valid for reads of `rows · k / 2` bytes, and `scales` for reads of `blocked::len(rows, k / 16)` bytes.
/// Nobody writes either while the matrix is copied.
pub(super) unsafe fn matrix(rows: u32, k: u32, values: u64, scales: u64, global: f32) -> Matrix<'static> {
    for address in [values, scales] {
        assert!(address.is_multiple_of(16), "{address:#x}");
    }
    let (rows, k) = (rows as usize, k as usize);
    // SAFETY: the caller guarantees `rows · k / 2` readable bytes at `values`, `blocked` at `scales`, and no writers.
    let (values, scales) = unsafe {
        let blocked = blocked::len(rows, k / BLOCK);
        (
            std::slice::from_raw_parts(values as *const u8, rows * k / 2),
            std::slice::from_raw_parts(scales as *const u8, blocked),
        )
    };
    let scales = BlockedScales::new(rows, k / BLOCK, scales).unwrap().to_linear();
    Matrix::new(rows, k, values.to_vec(), scales, global).unwrap()
}

/// Returns the dot product of two rows. Eight partial sums let the compiler use vectors.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| a * b);
    sums.into_iter().chain(rest).sum()
}

/// Computes the output of tokens and projections whose global scales are alpha, and writes it to `c`.
///
/// # Safety
///
/// `c` is valid for writes of one `u16` per token and column of C, and nobody else accesses them.
pub(super) unsafe fn multiply(
    op: Op,
    dtype: TokenDtype,
    tokens: Matrix<'static>,
    of: impl Fn(usize) -> Matrix<'static>,
    c: u64,
) {
    assert!(c.is_multiple_of(16), "{c:#x}");
    let expert = match op {
        Op::Gated => Expert::Gated { gate: of(0), up: of(1) },
        Op::Plain => Expert::Plain(of(0)),
    };
    let weights = Weights::new(op, vec![expert]).unwrap();
    let step = Step::new(&weights, vec![tokens], dtype).unwrap();
    let bits = Reference::new(&weights, &step).output(&step);
    // SAFETY: `bits` owns its elements; the caller guarantees the same number of writable elements at `c`, which nobody
    // else accesses.
    unsafe { std::ptr::copy_nonoverlapping(bits.bits().as_ptr(), c as *mut u16, bits.bits().len()) };
}
