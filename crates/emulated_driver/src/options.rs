//! Options that `ptx-emulator run` passes to the driver in environment variables.

use std::env;
use std::path::PathBuf;

use ptx_emulator::{Allow, Level, Limit, Schedule, Sums};

use crate::card::Card;

pub struct Options {
    pub card: Card,
    pub level: Level,
    pub schedule: Schedule,
    /// How matrix instructions add floating-point products.
    pub sums: Sums,
    /// Hazards that are not reported.
    pub allow: Vec<Allow>,
    /// Continue after hazards.
    pub keep_going: bool,
    /// Look for races of a grid in global memory.
    pub global_races: bool,
    /// Limits of each launch.
    pub limits: Vec<Limit>,
    /// GPU whose clock launches run by. `None`: no clock.
    pub clock: Option<ptx_emulator::Card>,
    /// With a clock: skip arithmetic that no control flow depends on.
    pub no_values: bool,
    /// File that receives a line of JSON per launch.
    pub log: Option<PathBuf>,
}

impl Options {
    /// Reads `PTX_EMULATOR_GPU`, `_LEVEL`, `_SCHEDULE`, `_SUMS`, `_ALLOW`, `_KEEP_GOING`, `_NO_GLOBAL_RACES`,
    /// `_LIMIT`, `_TIMED`, `_CONSTANTS`, `_NO_VALUES`, `_LOG`. A variable that is missing or invalid gets its default; the command
    /// has validated them.
    pub fn from_environment() -> Self {
        let variable = |name: &str| env::var(format!("PTX_EMULATOR_{name}")).ok();
        Self {
            card: variable("GPU").and_then(|name| Card::by_name(&name)).unwrap_or_else(Card::h200),
            level: variable("LEVEL").and_then(|text| text.parse().ok()).unwrap_or(Level::Default),
            schedule: variable("SCHEDULE").and_then(|text| text.parse().ok()).unwrap_or_default(),
            sums: variable("SUMS").and_then(|text| text.parse().ok()).unwrap_or_default(),
            allow: variable("ALLOW")
                .iter()
                .flat_map(|list| list.split(','))
                .filter_map(|one| one.parse().ok())
                .collect(),
            keep_going: variable("KEEP_GOING").is_some_and(|text| !text.is_empty()),
            global_races: variable("NO_GLOBAL_RACES").is_none_or(|text| text.is_empty()),
            limits: variable("LIMIT")
                .iter()
                .flat_map(|list| list.split(','))
                .filter_map(|one| one.parse().ok())
                .collect(),
            clock: variable("TIMED").and_then(|name| ptx_emulator::Card::named(&name)).map(|card| {
                let constants = variable("CONSTANTS").unwrap_or_default();
                let settings = constants.split(',').filter(|setting| !setting.is_empty());
                settings.fold(card, |card, setting| card.clone().with(setting).unwrap_or(card))
            }),
            no_values: variable("NO_VALUES").is_some_and(|text| !text.is_empty()),
            log: env::var_os("PTX_EMULATOR_LOG").map(PathBuf::from),
        }
    }
}
