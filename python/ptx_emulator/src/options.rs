//! Options of a launch.

use ptx_emulator::{Allow, LaunchConfig, Level, Limit, Schedule, Sums};
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

fn parse<T: std::str::FromStr<Err = String>>(name: &str, text: &str) -> PyResult<T> {
    text.parse().map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
}

impl Options {
    /// The library's configuration. A `ValueError` names the option that is invalid.
    pub fn config(&self) -> PyResult<LaunchConfig> {
        let allow = self.allow.iter().map(|text| parse::<Allow>("allow", text)).collect::<PyResult<_>>()?;
        let mut config = LaunchConfig {
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            shared_bytes: self.shared_bytes,
            schedule: parse::<Schedule>("schedule", &self.schedule)?,
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
