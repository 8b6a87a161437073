//! Distribution of a CTA's registers among its warpgroups: [`Shape::registers`] as constants, as `setmaxnreg` requires.

use cuda_std::setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc};

use crate::decoding::{Registers, Shape};

/// Releases the registers that the loading warpgroup does not need, for the warpgroups that multiply.
///
/// # Safety
/// The whole warpgroup calls this together, once. The CTA was launched with this shape's number of threads.
#[inline(always)]
pub unsafe fn give_registers(shape: Shape) {
    // SAFETY: the whole warpgroup is here, once; `Registers::check` compares these counts with the threads of the
    // launch.
    unsafe {
        if shape.consumers == 1 {
            setmaxnreg_dec::<{ Registers::OF_ONE_CONSUMER.producer }>();
        } else if shape.consumers == 2 {
            setmaxnreg_dec::<{ Registers::OF_TWO_CONSUMERS.producer }>();
        } else {
            setmaxnreg_dec::<{ Registers::OF_FOUR_CONSUMERS.producer }>();
        }
    }
}

/// Takes the additional registers of a warpgroup that multiplies.
///
/// # Safety
/// The whole warpgroup calls this together, once. The CTA was launched with this shape's number of threads, and its
/// loading warpgroup calls [`give_registers`].
#[inline(always)]
pub unsafe fn take_registers(shape: Shape) {
    // SAFETY: the whole warpgroup is here, once; `Registers::check` compares these counts with the threads of the
    // launch.
    unsafe {
        if shape.consumers == 1 {
            setmaxnreg_inc::<{ Registers::OF_ONE_CONSUMER.consumer }>();
        } else if shape.consumers == 2 {
            setmaxnreg_inc::<{ Registers::OF_TWO_CONSUMERS.consumer }>();
        } else {
            setmaxnreg_inc::<{ Registers::OF_FOUR_CONSUMERS.consumer }>();
        }
    }
}
