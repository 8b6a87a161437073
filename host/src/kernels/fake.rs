//! What the kernels' rows in the fake driver share: operands read back from the addresses that descriptors lead to, multiplied by
//! the oracle. The fake device's memory is this process's.

use fake_cuda::Launch;
use kernels_gpu::format::OUTPUT_BF16;

use super::KERNELS;
use super::kernel::Kernel;
use crate::format::blocked::{self, BlockedScales};
use crate::format::{BLOCK, Matrix};
use crate::oracle::Reference;
use crate::problem::{Expert, Op, Step, TokenDtype, Weights};

/// Multiprocessors of the fake device where a test says nothing else.
pub(crate) const SMS: u32 = 4;

/// Does what the kernel of the launched entry does.
pub(crate) fn kernel(launch: &Launch<'_>) {
    let is_of = |kernel: &&&dyn Kernel| kernel.entries().iter().any(|entry| entry.name == launch.kernel);
    KERNELS.iter().find(is_of).expect("an entry of a kernel").fake(launch);
}

/// What a kernel was told of the output's type.
pub(super) fn out_dtype(code: u32) -> TokenDtype {
    if code == OUTPUT_BF16 { TokenDtype::Bf16 } else { TokenDtype::F16 }
}

/// An array in device memory.
///
/// # Safety
///
/// So many elements lie at the address, and nobody writes them meanwhile.
pub(super) unsafe fn slice<'a, T>(address: u64, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: `# Safety` above.
    unsafe { std::slice::from_raw_parts(address as *const T, count) }
}

/// An array in device memory, to write.
///
/// # Safety
///
/// There is room for so many elements at the address, which nobody else uses meanwhile.
pub(super) unsafe fn slice_mut<'a, T>(address: u64, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: `# Safety` above.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, count) }
}

/// A matrix of device memory.
///
/// # Safety
///
/// `rows × k` packed values lie at `values`, their scales in the blocked layout at `scales`.
pub(super) unsafe fn matrix(rows: u32, k: u32, values: u64, scales: u64, global: f32) -> Matrix<'static> {
    for address in [values, scales] {
        assert!(address.is_multiple_of(16), "{address:#x}");
    }
    let (rows, k) = (rows as usize, k as usize);
    // SAFETY: `# Safety` above says that both lie there.
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

/// Computes the output of tokens and projections whose global scales are alpha, and writes it to `c`.
///
/// # Safety
///
/// `c` has room for the output.
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
    // SAFETY: `# Safety` above asks for that room.
    unsafe { std::ptr::copy_nonoverlapping(bits.bits().as_ptr(), c as *mut u16, bits.bits().len()) };
}
