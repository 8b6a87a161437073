//! Common code of the benches that needs criterion or the `gemm` crate. It is not in the library, so other builds need
//! neither.
#![allow(dead_code, reason = "each bench uses a part")]

pub mod rival;

use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};

/// Returns settings with which all benches together take a few minutes on two cores.
pub fn criterion() -> Criterion {
    let criterion = Criterion::default().sample_size(10);
    criterion.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).configure_from_args()
}

/// Runs a bench and returns its median in seconds, warm-up included. `None`: a filter excludes it.
pub fn measure(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut routine: impl FnMut()) -> Option<f64> {
    let mut seconds = Vec::new();
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            (0..iterations).for_each(|_| routine());
            let elapsed = start.elapsed();
            seconds.push(elapsed.as_secs_f64() / iterations as f64);
            elapsed
        });
    });
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}
