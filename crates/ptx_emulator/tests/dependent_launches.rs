//! Chains of overlapping launches (programmatic dependent launch): forbidden accesses are reported, and allowed
//! accesses are not. `tests/fail/grid_not_awaited.ptx` and `tests/manual` have programs with two launches.

use ptx_emulator::{Arg, Buffer, Device, DeviceConfig, Fault, FaultKind, LaunchConfig, Module};

const THREADS: u32 = 64;
const BYTES: u64 = 4 * THREADS as u64;

const WAIT: &str = "griddepcontrol.wait;";
const START_DEPENDENTS: &str = "griddepcontrol.launch_dependents;";
/// Each thread reads its word of buffer `p`, or writes it.
const READ: &str = "ld.global.u32 %r2, [%d3];";
const WRITE: &str = "st.global.u32 [%d3], %r1;";
const ADD: &str = "red.relaxed.gpu.global.add.u32 [%d3], 1;";
/// Thread 0 copies the buffer to shared memory and waits for the copy.
const COPY: &str = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%d1], 256, [%r3];
    COPIED: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra COPIED;";
/// Thread 0 writes the buffer from shared memory.
const COPY_BACK: &str = "st.shared.u32 [%r5], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r4], 256;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;";

/// A device with two buffers and a chain of launches.
struct Chain {
    device: Device,
    buffers: [Buffer; 2],
}

impl Chain {
    fn new() -> Chain {
        let mut device = Device::new(DeviceConfig::default());
        let buffers = [(); 2].map(|()| device.allocate(BYTES));
        Chain { device, buffers }
    }

    /// Launches a kernel with this body on one of the buffers.
    fn launch(&mut self, overlaps: bool, buffer: usize, body: &[&str]) -> Result<(), Fault> {
        let text = format!(
            ".version 8.7\n.target sm_90a\n.address_size 64\n.shared .align 16 .b8 tile[256];\n\
             .shared .align 8 .b64 bar;\n.visible .entry k(.param .u64 p)\n{{\n\
             .reg .pred %p<3>;\n.reg .b32 %r<6>;\n.reg .b64 %d<4>;\n\
             mov.u32 %r1, %tid.x;\nmov.u32 %r3, bar;\nmov.u32 %r4, tile;\nsetp.eq.u32 %p1, %r1, 0;\n\
             shl.b32 %r5, %r1, 2;\nadd.u32 %r5, %r5, %r4;\n\
             @%p1 mbarrier.init.shared.b64 [%r3], 1;\n@%p1 fence.mbarrier_init.release.cluster;\nbar.sync 0;\n\
             ld.param.u64 %d1, [p];\nmul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\n{}\nret;\n}}\n",
            body.join("\n")
        );
        let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let config = LaunchConfig { overlaps, ..LaunchConfig::linear(1, THREADS) };
        let args = [Arg::from(self.buffers[buffer])];
        self.device.launch(&module, "k", &config, &args).map(|_| ())
    }

    /// Launches a first grid, and a second grid that overlaps it.
    fn two(first: &[&str], second: &[&str]) -> Result<(), Fault> {
        let mut chain = Chain::new();
        chain.launch(false, 0, first).expect("the first grid is alone");
        chain.launch(true, 0, second)
    }
}

fn assert_race(outcome: Result<(), Fault>, with: &str) {
    let fault = outcome.expect_err("a race");
    assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
    assert!(fault.to_string().contains(with), "{fault}");
}

#[test]
fn access_without_wait_races_if_either_grid_writes() {
    for (first, second) in [(WRITE, READ), (READ, WRITE), (WRITE, WRITE), (WRITE, COPY), (WRITE, COPY_BACK)] {
        assert_race(Chain::two(&[first], &[second]), "no griddepcontrol.wait was executed in between");
        assert_race(Chain::two(&[first], &[second, WAIT]), "no griddepcontrol.wait was executed in between");
        Chain::two(&[first], &[WAIT, second]).unwrap();
    }
    assert_race(Chain::two(&[COPY_BACK], &[READ]), "wrote it");
    assert_race(Chain::two(&[COPY], &[WRITE]), "read it");
    Chain::two(&[READ], &[READ]).unwrap();
    Chain::two(&[READ], &[COPY]).unwrap();
}

#[test]
fn atomics_race_only_with_plain_accesses_of_the_previous_grid() {
    assert_race(Chain::two(&[WRITE], &[ADD]), "wrote it");
    assert_race(Chain::two(&[ADD], &[READ]), "wrote it");
    Chain::two(&[ADD], &[ADD]).unwrap();
    Chain::two(&[WRITE], &[WAIT, ADD]).unwrap();
}

#[test]
fn wait_covers_only_threads_ordered_after_it() {
    let of_others = ["@!%p1 bra OTHERS;", WAIT, "OTHERS:"];
    assert_race(Chain::two(&[WRITE], &[of_others.as_slice(), &[READ]].concat()), "no griddepcontrol.wait");
    Chain::two(&[WRITE], &[of_others.as_slice(), &["bar.sync 0;", READ]].concat()).unwrap();
    // Thread 0 copies, and all readers of the copy are ordered after its wait.
    Chain::two(&[WRITE], &[of_others.as_slice(), &[COPY, READ]].concat()).unwrap();
    // Thread 1 waits.
    let of_the_wrong = ["setp.ne.u32 %p2, %r1, 1;", "@%p2 bra OTHERS;", WAIT, "OTHERS:"];
    assert_race(Chain::two(&[WRITE], &[of_the_wrong.as_slice(), &[COPY]].concat()), "no griddepcontrol.wait");
}

#[test]
fn launch_without_overlap_starts_after_all_others() {
    let mut chain = Chain::new();
    chain.launch(true, 0, &[READ]).unwrap();
    chain.launch(false, 0, &[WRITE]).unwrap();
    chain.launch(true, 1, &[WRITE]).unwrap();
    chain.launch(false, 0, &[READ, WRITE]).unwrap();
    chain.launch(true, 1, &[WRITE]).unwrap();
}

#[test]
fn wait_does_not_reach_past_a_grid_that_did_not_wait() {
    for (middle, outcome) in [(vec![START_DEPENDENTS], true), (vec![START_DEPENDENTS, WAIT], false)] {
        let mut chain = Chain::new();
        chain.launch(false, 0, &[WRITE]).unwrap();
        chain.launch(true, 1, &middle).unwrap();
        let last = chain.launch(true, 0, &[WAIT, READ]);
        if outcome {
            assert_race(last, "no grid in between has waited");
        } else {
            last.unwrap();
        }
    }
}

#[test]
fn early_wait_protects_dependents_from_the_previous_grid() {
    let middles: [(&[&str], bool); 4] = [
        (&[START_DEPENDENTS, WAIT], true),
        (&[WAIT, START_DEPENDENTS], false),
        // Its exit lets dependents start.
        (&[WAIT], false),
        (&["@%p1 griddepcontrol.wait;", START_DEPENDENTS], true),
    ];
    for (middle, race) in middles {
        let mut chain = Chain::new();
        chain.launch(false, 0, &[WRITE]).unwrap();
        chain.launch(true, 1, middle).unwrap();
        let last = chain.launch(true, 0, &[READ]);
        assert_eq!(last.is_err(), race, "{middle:?}: {last:?}");
    }
}

#[test]
fn host_writes_belong_to_no_grid() {
    let mut chain = Chain::new();
    chain.launch(false, 1, &[WRITE]).unwrap();
    chain.device.write(chain.buffers[0], 0, &[1; BYTES as usize]);
    assert_eq!(chain.device.download::<u8>(chain.buffers[0]), [1; BYTES as usize]);
    chain.launch(true, 0, &[READ, WRITE]).unwrap();
}
