//! How the warpgroups of a block share its registers: [`Shape::registers`] as the instruction wants them, as constants.

use cuda_std::setmaxnreg::{setmaxnreg_dec, setmaxnreg_inc};

use crate::decoding::{Registers, Shape};

/// Gives the registers that the warpgroup that loads does not need to those that multiply.
///
/// # Safety
/// The whole warpgroup calls it together, once. The block was launched with the threads of this shape.
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

/// Takes a warpgroup that multiplies its registers.
///
/// # Safety
/// As [`give_registers`], which the warpgroup that loads calls.
#[inline(always)]
pub unsafe fn take_registers(shape: Shape) {
    // SAFETY: as above.
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
