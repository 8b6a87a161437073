//! The kernels' PTX, executed by the emulator: no fault under any schedule, and the oracle's numbers.

use nvfp4::backend::emulated::{Emulated, FaultKind, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::generate::Generator;
use nvfp4::problem::{Group, Op, OutDtype, Step};
use nvfp4::{Output, shape};
use nvfp4_tests::{Inputs, check_on, groups, inputs};

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

fn emulated(arch: &str, schedule: Schedule) -> Emulated {
    Emulated::new(arch, Options { schedule, ..Options::default() }).expect("a kernel for this architecture")
}
