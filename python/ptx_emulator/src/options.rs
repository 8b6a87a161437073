//! Options of a launch.

use std::time::Duration;

use ptx_emulator::{Allow, Bounds, LaunchConfig, Level, Limit, Order, Schedule, Sums};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Shape and options of a launch, as Python gives them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared_bytes: u32,
    schedule: String,
    level: String,
    sums: String,
    allow: Vec<String>,
    keep_going: bool,
    global_races: bool,
    overlaps: bool,
    limit: Vec<String>,
}

/// Bounds of a search through the orders of a launch.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct SearchBounds {
    preemptions: Option<u32>,
    orders: u64,
    seconds: f64,
    every_fault: bool,
}

impl SearchBounds {
    /// Returns the library's bounds. A `ValueError` names the invalid bound.
    pub fn bounds(&self) -> PyResult<Bounds> {
        let time = Duration::try_from_secs_f64(self.seconds).map_err(|_| {
            PyValueError::new_err(format!("seconds: {}; expected a number that is not negative", self.seconds))
        })?;
        let SearchBounds { preemptions, orders, every_fault, .. } = *self;
        Ok(Bounds { preemptions, orders, time, every_fault, ..Bounds::default() })
    }
}

fn parse<T: std::str::FromStr<Err = String>>(name: &str, text: &str) -> PyResult<T> {
    text.parse().map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
}

impl Options {
    /// The order that the schedule names, if it is one.
    pub fn order(&self) -> PyResult<Option<Order>> {
        self.schedule.starts_with(Order::PREFIX).then(|| parse("schedule", &self.schedule)).transpose()
    }

    /// The library's configuration; its schedule is the default one if the options name an order. A `ValueError` names the option that is invalid.
    pub fn config(&self) -> PyResult<LaunchConfig> {
        let allow = self.allow.iter().map(|text| parse::<Allow>("allow", text)).collect::<PyResult<_>>()?;
        let mut config = LaunchConfig {
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            shared_bytes: self.shared_bytes,
            schedule: match self.order()? {
                Some(_) => Schedule::default(),
                None => parse("schedule", &self.schedule)?,
            },
            sums: parse::<Sums>("sums", &self.sums)?,
            allow,
            keep_going: self.keep_going,
            global_races: self.global_races,
            overlaps: self.overlaps,
            ..LaunchConfig::linear(1, 1).at_level(parse::<Level>("level", &self.level)?)
        };
        for text in &self.limit {
            config.limit(parse::<Limit>("limit", text)?);
        }
        Ok(config)
    }
}
