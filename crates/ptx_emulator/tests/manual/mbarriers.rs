//! mbarriers (PTX ISA, "Parallel Synchronization: mbarrier"). The rules come from "Phase Completion of the mbarrier
//! Object", "Arrive-on", "Expect-tx" and "Complete-tx operation":
//!
//! - An arrival subtracts its count from the pending count.
//! - expect-tx adds to the tx-count, and complete-tx subtracts from it.
//! - When both counts are zero, the phase is complete and the next phase begins. Its pending count is the expected
//!   count, which `arrive_drop` lowers.
//! - `test_wait.parity` is true for the phase before the current phase, and false for the current phase. With a state,
//!   it is true once the phase of the state is complete.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, module, poison, program};

#[derive(Clone, Copy)]
enum Step {
    Arrive(u32),
    ArriveExpect(u32),
    Drop(u32),
    Expect(u32),
    Complete(u32),
    TestParity(u32),
    /// Tests whether the phase of the latest arrival is complete.
    TestState,
}

/// State of one object by the manual's rules.
struct Object {
    expected: u32,
    pending: u32,
    bytes: i64,
    phase: u32,
}

impl Object {
    fn step(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.expected;
        }
    }
}

fn sequence(name: &str, count: u32, steps: &[Step]) -> Program {
    let mut body = format!("ld.param.u64 %d1, [out];\nmov.u32 %r3, bar;\nmbarrier.init.shared.b64 [%r3], {count};\n");
    let mut object = Object { expected: count, pending: count, bytes: 0, phase: 0 };
    let mut state = 0;
    let mut want = Vec::new();
    for &step in steps {
        let mut test = |instruction: String, complete: bool| {
            let at = 4 * want.len();
            want.push(u32::from(complete));
            format!("{instruction}selp.u32 %r4, 1, 0, %p1;\nst.global.u32 [%d1+{at}], %r4;\n")
        };
        body += &match step {
            Step::Arrive(n) => {
                state = object.phase;
                object.pending -= n;
                format!("mbarrier.arrive.shared.b64 %d2, [%r3], {n};\n")
            }
            Step::ArriveExpect(bytes) => {
                state = object.phase;
                object.bytes += i64::from(bytes);
                object.pending -= 1;
                format!("mbarrier.arrive.expect_tx.shared.b64 %d2, [%r3], {bytes};\n")
            }
            Step::Drop(n) => {
                state = object.phase;
                object.expected -= n;
                object.pending -= n;
                format!("mbarrier.arrive_drop.shared.b64 %d2, [%r3], {n};\n")
            }
            Step::Expect(bytes) => {
                object.bytes += i64::from(bytes);
                format!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], {bytes};\n")
            }
            Step::Complete(bytes) => {
                object.bytes -= i64::from(bytes);
                format!("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], {bytes};\n")
            }
            Step::TestParity(parity) => test(
                format!("mbarrier.test_wait.parity.shared.b64 %p1, [%r3], {parity};\n"),
                object.phase % 2 != parity,
            ),
            Step::TestState => test("mbarrier.test_wait.shared.b64 %p1, [%r3], %d2;\n".into(), object.phase > state),
        };
        object.step();
    }
    let buffers = json!({"out": poison(want.len())});
    program(
        name,
        module(HOPPER, ".shared .align 8 .b64 bar;", ".param .u64 out", &body),
        json!({"args": [{"pointer": "out"}], "buffers": buffers}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    use Step::*;
    let both = [TestParity(0), TestParity(1)];
    let phases =
        [&both[..], &[Arrive(1)], &both, &[TestState, Arrive(2), TestState], &both, &[Arrive(3), TestState], &both];
    let bytes = [
        &[ArriveExpect(256), TestState][..],
        &[Complete(128), TestState, TestParity(0), Complete(128), TestState, TestParity(0), TestParity(1)],
        // Bytes that arrive before the arrival that expects them.
        &[Expect(64), Complete(64), TestParity(1), Arrive(1), TestState, TestParity(0), TestParity(1)],
    ];
    let dropped = [Drop(2), TestState, Arrive(1), TestState, TestParity(0), Arrive(1), TestState, TestParity(1)];
    vec![
        sequence("mbarrier phases", 3, &phases.concat()),
        sequence("mbarrier transaction bytes", 1, &bytes.concat()),
        sequence("mbarrier.arrive_drop", 3, &dropped),
    ]
}
