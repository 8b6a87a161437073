//! `--timed`: the predicted time of a launch on a GPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, anyhow};
use clap::Args;
use ptx_emulator::{Card, Key, Listing, Timeline, trace};

use super::files::{read, write};

/// Options of the time prediction.
#[derive(Args)]
pub struct Clock {
    /// Predict the time on a GPU: h200 or b200. The run does not look for hazards.
    #[arg(long, value_name = "CARD", value_parser = Card::NAMES)]
    timed: Option<String>,
    /// Override a constant of the GPU (benches/lab/time-model.md lists them). May be given several times.
    #[arg(long, value_name = "NAME=VALUE", requires = "timed")]
    constant: Vec<String>,
    /// Skip arithmetic that no control flow depends on. The outputs are then meaningless.
    #[arg(long, requires = "timed")]
    no_values: bool,
    /// Simulate only N SMs, with their share of each grid's CTAs, of L2 and of DRAM. The outputs are then incomplete,
    /// and CTAs must not wait for each other.
    #[arg(long, value_name = "N", requires = "timed", value_parser = clap::value_parser!(u32).range(1..))]
    sample: Option<u32>,
    /// Listing of the machine code (`nvdisasm -gp -hex -c` of a cubin of `ptxas -lineinfo`), used for instruction
    /// costs. Default: run ptxas and nvdisasm from PATH, CUDA_PATH or a build folder.
    #[arg(long, value_name = "FILE", requires = "timed")]
    sass: Option<PathBuf>,
    /// Write a trace of some SMs for https://ui.perfetto.dev.
    #[arg(long, value_name = "FILE.json", requires = "timed")]
    trace: Option<PathBuf>,
    /// Write the trace as a picture.
    #[arg(long, value_name = "FILE.svg", requires = "timed")]
    picture: Option<PathBuf>,
}

impl Clock {
    /// Timeline for launches of a PTX file, if `--timed` was given.
    pub fn timeline(&self, ptx: &Path) -> Result<Option<Timeline>> {
        let Some(card) = self.timed.as_deref().and_then(Card::named) else { return Ok(None) };
        let set = |card: Card, constant: &String| card.with(constant).map_err(|text| anyhow!(text));
        let card = self.constant.iter().try_fold(card, set)?;
        let listing = match &self.sass {
            Some(path) => Some(Listing::parse(&read(path)?)),
            None => Listing::of_ptx(&read(ptx)?, card.arch),
        };
        let mut timeline = Timeline::new(card);
        listing.into_iter().for_each(|listing| timeline.add_listing(Arc::new(listing)));
        if self.no_values {
            timeline = timeline.without_values();
        }
        if let Some(multiprocessors) = self.sample {
            timeline = timeline.sampled(multiprocessors);
        }
        if self.trace.is_some() || self.picture.is_some() {
            timeline = timeline.drawn();
        }
        Ok(Some(timeline))
    }

    /// Writes the trace and the picture, if requested.
    pub fn draw(&self, timeline: &Timeline) -> Result<()> {
        let (spans, per_us) = (timeline.spans(), timeline.card().get(Key::Clock));
        if let Some(path) = &self.trace {
            write(path, &trace::events(spans, per_us).to_string())?;
        }
        if let Some(path) = &self.picture {
            let end = spans.iter().map(|span| span.to).max().unwrap_or(0);
            write(path, &trace::picture(spans, (0, end), per_us))?;
        }
        Ok(())
    }
}

/// Prints a prediction and the breakdown of its time.
pub fn print(timeline: &Timeline) {
    println!("predicted: {:.2} us on {}, by the model, not measured", timeline.predicted_us(), timeline.card().name);
    timeline.launches().iter().for_each(|launch| print!("{launch}"));
}
