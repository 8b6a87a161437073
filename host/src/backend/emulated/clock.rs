//! Predicts the time of a step on a GPU: the emulator runs the launches with the GPU's clock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ptx_emulator::{Arg, Card, Device, Fault, LaunchConfig, Listing, Module, Report, Span, Time, Timeline};

use nvfp4_kernels::builds::Build;

/// Clock of a GPU, with the timeline of the last step.
pub(super) struct Clock {
    card: Card,
    values: bool,
    drawn: bool,
    /// Number of SMs that are run. `None` runs all SMs.
    sample: Option<u32>,
    timeline: Mutex<Timeline>,
    /// Machine code of kernels, by name. `None` if there is no ptxas.
    listings: Mutex<HashMap<&'static str, Option<Arc<Listing>>>>,
}

/// Warning about a prediction without machine code. The numbers are from one of the validated points
/// (benches/lab/time-model.md).
const PTX_ERROR: &str = "a time counted in PTX may be 44 % off, as for group-3 on a B200: 13.0 µs counted in PTX, 9.0 in machine code, 8.5 published";

/// Predicted time of a step on a GPU.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Time from the event before the first launch to the event after the last.
    pub microseconds: f64,
    /// The GPU whose clock was used.
    pub card: Card,
    /// Launches of the step, with a breakdown of their times.
    pub launches: Vec<Time>,
    /// Activity of some SMs in cycles. Empty unless requested.
    pub spans: Vec<Span>,
}

impl Prediction {
    /// Number of launches whose instructions were counted in PTX, because ptxas or nvdisasm is missing.
    pub fn without_machine_code(&self) -> usize {
        self.launches.iter().filter(|launch| !launch.from_machine_code).count()
    }

    /// Returns the prediction as JSON: the GPU, how instructions were counted, and the launches.
    pub fn json(&self) -> serde_json::Value {
        let missing = self.without_machine_code();
        let note = (missing > 0).then(|| self.note());
        serde_json::json!({
            "gpu": self.card.name,
            "counted_in_ptx": missing,
            "note": note,
            "launches": self.launches,
        })
    }

    /// Returns what a reader of a prediction without machine code must know.
    pub fn note(&self) -> String {
        format!(
            "{} of {} launches counted in PTX, because ptxas or nvdisasm is missing (`cargo xtask ptxas --install` and \
             `cargo xtask sass --install` bring them): {PTX_ERROR}",
            self.without_machine_code(),
            self.launches.len()
        )
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clock {
    pub fn new(card: Card, values: bool, drawn: bool) -> Self {
        let timeline = Mutex::new(Timeline::new(card.clone()));
        Self { card, values, drawn, sample: None, timeline, listings: Mutex::default() }
    }

    /// Returns a new clock for the same GPU that runs only some SMs.
    pub fn sampled(&self, multiprocessors: u32) -> Self {
        Self { sample: Some(multiprocessors), ..Self::new(self.card.clone(), self.values, self.drawn) }
    }

    /// Starts a step, with an empty L2 cache.
    pub fn begin(&self) {
        let mut timeline = Timeline::new(self.card.clone());
        if !self.values {
            timeline = timeline.without_values();
        }
        if self.drawn {
            timeline = timeline.drawn();
        }
        if let Some(multiprocessors) = self.sample {
            timeline = timeline.sampled(multiprocessors);
        }
        *lock(&self.timeline) = timeline;
    }

    /// Runs the next launch of the step. `ptx` is the text of the kernel of `build`.
    pub fn launch(
        &self,
        device: &mut Device,
        (build, ptx): (&Build, &str),
        (module, entry): (&Module, &str),
        config: &LaunchConfig,
        arguments: &[Arg],
    ) -> Result<Report, Fault> {
        let mut timeline = lock(&self.timeline);
        if let Some(listing) = self.listing(build, ptx) {
            timeline.add_listing(listing);
        }
        device.time(&mut timeline, module, entry, config, arguments)
    }

    fn listing(&self, build: &Build, ptx: &str) -> Option<Arc<Listing>> {
        // Code for a single architecture or family keeps its architecture. Other code is assembled for this GPU.
        let own = build.arch.ends_with(['a', 'f']);
        let arch = if own { build.arch } else { self.card.arch };
        let assemble = || Listing::of_ptx(ptx, arch).map(Arc::new);
        lock(&self.listings).entry(build.kernel).or_insert_with(assemble).clone()
    }

    pub fn prediction(&self) -> Prediction {
        let timeline = lock(&self.timeline);
        Prediction {
            microseconds: timeline.predicted_us(),
            card: self.card.clone(),
            launches: timeline.launches().to_vec(),
            spans: timeline.spans().to_vec(),
        }
    }
}
