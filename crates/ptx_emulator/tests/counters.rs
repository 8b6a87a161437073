//! Counters of reports, for programs whose counts are known by hand.

use ptx_emulator::{Arg, Device, DeviceConfig, LaunchConfig, Module, Report};

/// Runs the body of an entry with `threads` threads. The two parameters are addresses of 128 zeroed bytes each.
fn run(body: &str, threads: u32) -> Report {
    let ptx = format!(
        ".version 8.7\n.target sm_90a\n.address_size 64\n\
         .visible .entry k(.param .u64 a, .param .u64 b) {{\n\
         .reg .b32 %r<20>;\n.reg .f32 %f<12>;\n.reg .b64 %d<8>;\n.reg .pred %p<4>;\n\
         .shared .align 128 .b8 tile[512];\n.shared .align 8 .b64 barrier;\n\
         ld.param.u64 %d0, [a];\nld.param.u64 %d1, [b];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, tile;\nmov.u32 %r2, barrier;\n\
         {body}\nret;\n}}"
    );
    let module = Module::parse(&ptx).unwrap();
    let mut device = Device::new(DeviceConfig::default());
    let args: Vec<Arg> = (0..2).map(|_| device.upload(&[0_u8; 128]).into()).collect();
    device.launch(&module, "k", &LaunchConfig::linear(1, threads), &args).unwrap()
}

const MMA: &str =
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r4, %r5}, {%r6}, {%f4, %f5, %f6, %f7};";

#[test]
fn load_distance_counts_matrix_operations_until_the_use() {
    let zero = "mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0;
        mov.f32 %f4, 0f00000000; mov.f32 %f5, 0f00000000; mov.f32 %f6, 0f00000000; mov.f32 %f7, 0f00000000;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r2], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0;";
    let copy = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 16, [%r2];";
    let wait = |phase| {
        format!("wait{phase}: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], {phase}; @!%p1 bra.uni wait{phase};")
    };
    let [first, second] = [0, 1].map(wait);
    let report = run(&format!("{zero}\n{copy}\n{MMA}\n{MMA}\n{first}\n{MMA}\n{copy}\n{second}"), 32);
    let total = &report.total;
    assert_eq!((total.loads.phases, total.loads.overlapped, total.loads.matrix_operations), (2, 1, 2));
    assert_eq!((total.loads.overlap(), total.loads.mean_distance()), (0.5, 1.0));
    assert_eq!((total.matrix_operations, total.matrix_multiply_adds), (3, 3 * 16 * 8 * 8));
    assert_eq!(report.useful_share(16 * 8 * 8), 1.0 / 3.0);
}

#[test]
fn buffers_count_moved_and_distinct_bytes() {
    let report = run(
        "setp.ne.u32 %p0, %r0, 0; @%p0 ret;
         mbarrier.init.shared.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster;
         mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 64, [%r2];
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+64], [%d0], 64, [%r2];
         wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra wait;
         ld.shared.u32 %r3, [%r1];
         st.global.u32 [%d1], %r3;
         cp.async.bulk.global.shared::cta.bulk_group [%d1+64], [%r1], 32;
         cp.async.bulk.commit_group;
         cp.async.bulk.wait_group 0;",
        32,
    );
    let [a, b] = &report.buffers[..] else { panic!("{:?}", report.buffers) };
    assert_eq!((a.bytes, a.loaded, a.bulk_loaded, a.distinct_loaded, a.distinct_stored), (128, 0, 128, 64, 0));
    assert_eq!((b.stored, b.bulk_stored, b.distinct_stored, b.distinct_loaded), (4, 32, 64, 0));
    assert_eq!((report.dram_read_bytes, report.dram_write_bytes), (64, 64));
    let total = &report.total;
    assert_eq!((total.bulk.global_load, total.bulk.shared_store), (128, 128));
    assert_eq!((total.bulk.shared_load, total.bulk.global_store), (32, 32));
    assert_eq!((total.bytes.shared_load, total.bytes.global_store), (4, 4));
}

#[test]
fn waiting_warp_counts_the_steps_of_others() {
    let work = "add.u32 %r3, %r3, 1;\n".repeat(100);
    let report =
        run(&format!("mov.u32 %r3, 0; setp.lt.u32 %p0, %r0, 32; @%p0 bra meet;\n{work}\nmeet: bar.sync 0;"), 64);
    let [idle, busy] = &report.roles[..] else { panic!("{:?}", report.roles) };
    assert!(idle.waited_steps >= 100 && busy.waited_steps < 10, "{} {}", idle.waited_steps, busy.waited_steps);
    assert!(report.cta_steps >= report.total.warp_instructions);
    assert!(report.waiting_share(idle) > 0.5 && report.waiting_share(idle) < 1.0);
}

#[test]
fn matrix_rows_in_the_same_bank_conflict() {
    let conflicts = |stride: u32| {
        let body = format!(
            "shl.b32 %r3, %r0, 4; add.u32 %r3, %r1, %r3; st.shared.v4.b32 [%r3], {{%r0, %r0, %r0, %r0}}; bar.warp.sync -1;
             and.b32 %r4, %r0, 7; mul.lo.u32 %r4, %r4, {stride}; add.u32 %r4, %r1, %r4;
             ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, [%r4];"
        );
        run(&body, 32).total.bank_conflicts
    };
    // 8 rows of 16 bytes. Adjacent rows are 32 words, one per bank.
    assert_eq!([16, 32, 64].map(conflicts), [0, 1, 3]);
}
