//! Programmatic dependent launch: `griddepcontrol` (PTX ISA, "Parallel Synchronization: griddepcontrol"; CUDA
//! programming guide, "Programmatic Dependent Launch and Synchronization").
//!
//! - `launch_dependents` allows dependent grids to be scheduled. Without dependents it does nothing.
//! - `.wait` "causes the executing thread to wait until all prerequisite grids in flight have completed". Their memory
//!   operations are then visible. A first launch has no prerequisite grid.
//! - `.wait` belongs to one thread. Other threads are ordered after it by any synchronization with that thread.
//!
//! The programs launch a kernel twice, the second launch overlapping the first. It adds one to the words of `in` and
//! stores the result in `between`, and from there in `out`.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, INIT_BARRIER, await_phase, module, poison, program};

const THREADS: u32 = 64;

/// PTX that computes the addresses of the thread's word in the input buffer (`%d4`) and in the output buffer (`%d5`),
/// and of the buffers (`%d1`, `%d2`).
const PLACES: &str = "ld.param.u64 %d1, [from];\nld.param.u64 %d2, [to];\nmul.wide.u32 %d3, %r1, 4;\n\
                      add.u64 %d4, %d1, %d3;\nadd.u64 %d5, %d2, %d3;\n";

/// PTX that lets dependents start, and sets `%p1` in thread 0, which executes some instructions alone.
const START_DEPENDENTS: &str = "griddepcontrol.launch_dependents;\nsetp.eq.u32 %p1, %r1, 0;\n";

/// A kernel that loads its word into `%r2`, launched twice.
fn twice(name: &str, declarations: &str, body: &str) -> Program {
    let body = format!("{PLACES}{START_DEPENDENTS}{body}add.u32 %r4, %r2, 1;\nst.global.u32 [%d5], %r4;\n");
    let numbers = |more: u32| (0..THREADS).map(|thread| 3 * thread + more).collect::<Vec<_>>();
    program(
        name,
        module(HOPPER, declarations, ".param .u64 from, .param .u64 to", &body),
        json!({"block": [THREADS, 1, 1],
               "overlaps": [{"pointer": "in"}, {"pointer": "between"}],
               "args": [{"pointer": "between"}, {"pointer": "out"}],
               "buffers": {"in": {"u32": numbers(0)}, "between": poison(64), "out": poison(64)}}),
        &[("between", numbers(1)), ("out", numbers(2))],
    )
}

fn alone() -> Program {
    let body = "griddepcontrol.wait;\nld.param.u64 %d1, [out];\nmul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\n\
                st.global.u32 [%d3], %r1;\ngriddepcontrol.launch_dependents;\n";
    program(
        "griddepcontrol",
        module(HOPPER, "", ".param .u64 out", body),
        json!({"block": [THREADS, 1, 1], "args": [{"pointer": "out"}], "buffers": {"out": poison(64)}}),
        &[("out", (0..THREADS).collect())],
    )
}

fn every_thread_waits() -> Program {
    twice("griddepcontrol.wait in every thread", "", "griddepcontrol.wait;\nld.global.u32 %r2, [%d4];\n")
}

fn one_thread_waits_before_a_barrier() -> Program {
    let body = "@%p1 griddepcontrol.wait;\nbar.sync 0;\nld.global.u32 %r2, [%d4];\n";
    twice("griddepcontrol.wait in one thread, then a barrier", "", body)
}

/// Only the waiting thread loads, for all threads. The mbarrier on which the copy completes orders the others after it.
fn one_thread_waits_and_copies() -> Program {
    const BYTES: u32 = 4 * THREADS;
    let declarations = ".shared .align 16 .b8 tile[256];\n.shared .align 8 .b64 bar;";
    let body = format!(
        "{INIT_BARRIER}mov.u32 %r5, tile;\n@!%p1 bra LOADED;\ngriddepcontrol.wait;\n\
         mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {BYTES};\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d1], {BYTES}, [%r3];\nLOADED:\n\
         {}shl.b32 %r6, %r1, 2;\nadd.u32 %r6, %r5, %r6;\nld.shared.u32 %r2, [%r6];\n",
        await_phase(0, "WAIT")
    );
    twice("griddepcontrol.wait in the thread that copies", declarations, &body)
}

/// Both grids count without a wait: strong accesses do not race with each other.
fn both_grids_count() -> Program {
    let body = format!("{START_DEPENDENTS}ld.param.u64 %d1, [count];\nred.relaxed.gpu.global.add.u32 [%d1], 1;\n");
    program(
        "red of two grids that overlap",
        module(HOPPER, "", ".param .u64 count", &body),
        json!({"block": [THREADS, 1, 1], "overlaps": [{"pointer": "count"}], "args": [{"pointer": "count"}],
               "buffers": {"count": {"bytes": 4, "fill": "zero"}}}),
        &[("count", vec![2 * THREADS])],
    )
}

pub fn programs() -> Vec<Program> {
    vec![
        alone(),
        every_thread_waits(),
        one_thread_waits_before_a_barrier(),
        one_thread_waits_and_copies(),
        both_grids_count(),
    ]
}
