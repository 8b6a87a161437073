//! Computes the constants of the time model from the measured lines.

use ptx_emulator::{Card, Key};

use crate::lines::{Line, Lines};

/// Cycles of a probe's loop besides the waiting: its own instructions.
const LOOP: f64 = 20.0;

/// Returns a constant in the unit of its key. `None`: it was not measured.
fn constant(key: Key, lines: &Lines, multiprocessors: u32) -> Option<Line> {
    let same = |name: &str| lines.combine([name], |[value]| value);
    let first = |options: [Option<Line>; 4]| options.into_iter().flatten().next();
    match key {
        Key::Clock => same("clock"),
        Key::LaunchFloor => same("launch-floor"),
        Key::LaunchGap => same("launch-gap"),
        Key::DependentStart => same("dependent-start+grid-end"),
        Key::CtaStart => same("cta-start"),
        Key::GridEnd => lines.combine(["grid-end", "clock"], |[ns, mhz]| ns * mhz / 1e3),
        Key::SharedLatency => same("shared-latency"),
        Key::L1Latency => same("l1-latency"),
        Key::SharedBytes => same("shared-bytes"),
        Key::L2Latency => same("l2-latency"),
        Key::DramLatency => same("dram-latency"),
        Key::TmaLatency => {
            let copy = format!("copy-dram-512-x1-on-{multiprocessors}");
            lines.combine([&copy, "dram-latency", "mbarrier-wake+arrive"], |[copy, load, wake]| copy - load - wake)
        }
        Key::TmaBytes => lines.combine(["copy-l2-16384-x1-on-1", "copy-l2-4096-x1-on-1"], |[long, short]| {
            f64::from(16384 - 4096) / (long - short)
        }),
        Key::Intake => ["copy-l2-16384-x8-on-1", "copy-l2-16384-x4-on-1"]
            .iter()
            .find_map(|name| lines.combine([name], |[cycles]| 16384.0 / cycles)),
        Key::L2Bytes => {
            ["copy-l2-16384-x8-same-for-1-rate", "copy-l2-16384-x4-same-for-1-rate"].iter().find_map(|name| same(name))
        }
        Key::Neighbors => [8, 4].iter().find_map(|stages| {
            let [alone, two] = [1, 2].map(|sharers| format!("copy-l2-16384-x{stages}-same-for-{sharers}"));
            lines.combine([&alone, &two], |[alone, two]| alone / two)
        }),
        Key::DramBytes => same("dram-bandwidth"),
        Key::MbarrierWake => lines.combine(["mbarrier-wake+arrive"], |[both]| both - LOOP),
        Key::BarrierLatency => same("barrier-latency-4-warps"),
        // The probe's loop itself takes 6 cycles.
        Key::ClusterBarrier => lines.combine(["cluster-barrier-relaxed"], |[relaxed]| relaxed - 6.0),
        Key::ClusterFence => {
            lines.combine(["cluster-barrier", "cluster-barrier-relaxed"], |[both, relaxed]| both - relaxed)
        }
        Key::ClusterLatency => {
            lines.combine(["cluster-store+wake", "mbarrier-wake+arrive"], |[remote, local]| remote - local)
        }
        Key::TensorRate => first([
            lines.combine(["wgmma-n256"], |[cycles]| f64::from(64 * 256 * 16) / cycles),
            // A product of 4-bit numbers is a quarter of a product of f16.
            lines.combine(["mma-m128-n256"], |[cycles]| f64::from(128 * 256 * 64 / 4) / cycles),
            // Eight warps, four chains.
            lines.combine(["mma-m16n8k64-mxf4nvf4-4-chains-on-8-warps"], |[link]| {
                f64::from(16 * 8 * 64 / 4 * 32) / link
            }),
            lines.combine(["mma-m16n8k16-4-chains-on-8-warps"], |[link]| f64::from(16 * 8 * 16 * 32) / link),
        ]),
        // Each quarter of the SM has eight products of two warps per link.
        Key::MmaLatency => lines
            .combine(["mma-m16n8k16-1-chain", "mma-m16n8k16-4-chains-on-8-warps"], |[chain, link]| chain - link / 8.0),
        Key::MatrixLatency => first([same("wgmma-n64-latency"), waited("mma-m128-n128", lines), None, None]),
        Key::PairLatency => waited("mma-pair-m256-n128", lines),
        Key::MatrixFloor => same("wgmma-n8"),
        Key::TmemBytes => lines.combine(["tcgen05-ld-32x32b.x64", "tcgen05-ld-32x32b.x16"], |[long, short]| {
            f64::from((64 - 16) * 128) / (long - short)
        }),
        Key::TmemLatency => lines
            .combine(["tcgen05-ld-32x32b.x64", "tcgen05-ld-32x32b.x16"], |[long, short]| short - (long - short) / 3.0),
        Key::CopyBytes => lines.combine(["tcgen05-cp-32x128b-warpx4"], |[cycles]| 512.0 / cycles),
        Key::L1Part
        | Key::FarLatency
        | Key::GpuFence
        | Key::SystemFence
        | Key::DramBanks
        | Key::DramPage
        | Key::L2Capacity
        | Key::SumsDelay
        | Key::Release
        | Key::GenericStall => None,
    }
}

/// Returns the time of an MMA with its commit, minus its time in the tensor core and the time of the wait.
fn waited(name: &str, lines: &Lines) -> Option<Line> {
    lines.combine([&format!("{name}-alone"), name, "mbarrier-wake+arrive"], |[alone, more, wake]| alone - more - wake)
}

/// Returns what the model predicts for the measured value of a key.
fn modeled(card: &Card, key: Key) -> f64 {
    match key {
        // Half of the probe's lines are on the other die.
        Key::L2Latency => card.get(key) + card.get(Key::FarLatency) / 2.0,
        _ => card.get(key),
    }
}

/// Prints a table of the measured constants, beside the model's values if the model has this GPU.
pub fn print(lines: &Lines, multiprocessors: u32, card: Option<&Card>) {
    println!("\n| constant | unit | model | measured | least | most |\n|---|---|---:|---:|---:|---:|");
    let mut missing = Vec::new();
    for &key in Key::ALL {
        let Some(line) = constant(key, lines, multiprocessors) else {
            missing.push(key.name());
            continue;
        };
        let models = card.map_or("-".to_owned(), |card| modeled(card, key).to_string());
        let [median, least, most] = line.spread();
        println!("| {} | {} | {models} | {median:.1} | {least:.1} | {most:.1} |", key.name(), key.unit());
    }
    println!("\n# not measured here: {}", missing.join(", "));
}
