//! The time of a step on a card, predicted: the emulator's launches by its clock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ptx_emulator::{Arg, Card, Device, Fault, LaunchConfig, Listing, Module, Report, Span, Time, Timeline};

use crate::kernels::builds::Build;

/// A card's clock, and the time of the last step.
pub(super) struct Clock {
    card: Card,
    values: bool,
    drawn: bool,
    /// Multiprocessors that are run, if not all.
    sample: Option<u32>,
    timeline: Mutex<Timeline>,
    /// The machine code of kernels, by name; `None` where there is no ptxas.
    listings: Mutex<HashMap<&'static str, Option<Arc<Listing>>>>,
}

/// The time of a step on a card.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// From the event before the first launch to the one behind the last.
    pub microseconds: f64,
    /// The card.
    pub card: Card,
    /// Its launches, and where their time went.
    pub launches: Vec<Time>,
    /// What some multiprocessors did, in cycles, if it was to be drawn.
    pub spans: Vec<Span>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clock {
    pub fn new(card: Card, values: bool, drawn: bool) -> Self {
        let timeline = Mutex::new(Timeline::new(card.clone()));
        Self { card, values, drawn, sample: None, timeline, listings: Mutex::default() }
    }

    /// The same clock of some multiprocessors.
    pub fn sampled(&self, multiprocessors: u32) -> Self {
        Self { sample: Some(multiprocessors), ..Self::new(self.card.clone(), self.values, self.drawn) }
    }

    /// A step begins, with nothing in L2.
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

    /// The next launch of the step, of a build's kernel with this text.
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
        // What is not for one card or family alone is assembled for this one.
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
