//! A progress bar on stderr, for work that takes over a second in a terminal.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time before the bar appears.
const PATIENCE: Duration = Duration::from_secs(1);

/// A progress bar that appears after one second and disappears on drop.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    shown: AtomicBool,
}

impl Progress {
    /// Starts work of `total` units; shows nothing yet.
    pub fn new(label: &'static str, total: usize) -> Self {
        let style = ProgressStyle::with_template("{msg:12} {wide_bar} {percent:>3} %  {eta} left")
            .expect("the template is constant and tested");
        let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::hidden());
        Self { bar: bar.with_style(style).with_message(label), started: Instant::now(), shown: AtomicBool::new(false) }
    }

    /// Adds completed units; callable from any thread.
    pub fn add(&self, units: usize) {
        self.bar.inc(units as u64);
        if self.started.elapsed() > PATIENCE && !self.shown.swap(true, Ordering::Relaxed) {
            // indicatif draws nothing if stderr is not a terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_template_is_valid() {
        super::Progress::new("verifying", 3).add(1);
    }
}
