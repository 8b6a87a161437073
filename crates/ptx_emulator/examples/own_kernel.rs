//! Runs your own kernel in the emulator: PTX text, an entry and buffers. Prints a report, or the kernel's fault.
//!
//! ```sh
//! cargo run --release -p ptx_emulator --example own_kernel
//! ```

use ptx_emulator::{Arg, Device, DeviceConfig, LaunchConfig, Module, Schedule};

/// PTX that reverses 64 words through shared memory. Without the barrier it has a race.
fn reverse(barrier: &str) -> String {
    format!(
        ".version 8.0
.target sm_80
.address_size 64
.shared .align 4 .b8 words[256];
.visible .entry reverse(.param .u64 data) {{
    .reg .b32 %r<5>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [data];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    ld.global.u32 %r2, [%d3];
    mov.u32 %r3, words;
    mad.lo.u32 %r4, %r1, 4, %r3;
    st.shared.u32 [%r4], %r2;
    {barrier}
    sub.u32 %r1, 63, %r1;
    mad.lo.u32 %r4, %r1, 4, %r3;
    ld.shared.u32 %r2, [%r4];
    st.global.u32 [%d3], %r2;
    ret;
}}"
    )
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<u32> = (0..64).collect();
    for barrier in ["bar.sync 0;", ""] {
        let module = Module::parse(&reverse(barrier))?;
        let mut device = Device::new(DeviceConfig::default());
        let data = device.upload(&words);
        device.name(data, "data"); // name in faults
        let config = LaunchConfig { schedule: Schedule::Seed(1), ..LaunchConfig::linear(1, 64) };
        match device.launch(&module, "reverse", &config, &[Arg::from(data)]) {
            Ok(report) => {
                assert!(device.download::<u32>(data).iter().rev().eq(&words));
                println!("right, with {} bytes loaded from global memory", report.total.bytes.global_load);
            }
            Err(fault) => println!("{fault}"),
        }
    }
    Ok(())
}
