//! Options of the driver. `ptx-emulator run` passes them in environment variables; the Python package sets them by calls
//! (`control.rs`).

use std::env;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ptx_emulator::{Allow, Level, Limit, Schedule, Sums, Timeline};

use crate::card::Card;

pub struct Options {
    pub card: Card,
    pub level: Level,
    pub schedule: Schedule,
    /// Run each launch in all its orders, for at most this time. `None`: in the order of the schedule.
    pub explore: Option<Duration>,
    /// How matrix instructions add floating-point products.
    pub sums: Sums,
    /// Hazards that are not reported.
    pub allow: Vec<Allow>,
    /// Continue after hazards.
    pub keep_going: bool,
    /// Let allocations of tensor memory of the two CTAs of a pair wait for each other.
    pub alloc_rendezvous: bool,
    /// Look for races of a grid in global memory.
    pub global_races: bool,
    /// Limits of each launch.
    pub limits: Vec<Limit>,
    /// GPU whose time is predicted. `None`: no time is predicted.
    pub clock: Option<ptx_emulator::Card>,
    /// With a clock: skip arithmetic that no control flow depends on.
    pub no_values: bool,
    /// File that receives a line of JSON per launch.
    pub log: Option<PathBuf>,
    /// Do not print faults, because the program shows them.
    pub quiet: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            card: Card::h200(),
            level: Level::Default,
            schedule: Schedule::default(),
            explore: None,
            sums: Sums::default(),
            allow: Vec::new(),
            keep_going: false,
            alloc_rendezvous: false,
            global_races: true,
            limits: Vec::new(),
            clock: None,
            no_values: false,
            log: None,
            quiet: false,
        }
    }
}

impl Options {
    /// Names of the options. The environment variable of an option is `PTX_EMULATOR_` and its name.
    const NAMES: [&str; 15] = [
        "GPU",
        "LEVEL",
        "SCHEDULE",
        "EXPLORE",
        "SUMS",
        "ALLOW",
        "KEEP_GOING",
        "ALLOC_RENDEZVOUS",
        "NO_GLOBAL_RACES",
        "LIMIT",
        "TIMED",
        "CONSTANTS",
        "NO_VALUES",
        "LOG",
        "QUIET",
    ];

    /// Returns a new timeline of the GPU whose time is predicted. `None`: no time is predicted.
    pub fn timeline(&self) -> Option<Timeline> {
        let timeline = self.clock.clone().map(Timeline::new);
        if self.no_values { timeline.map(Timeline::without_values) } else { timeline }
    }

    /// Reads the options from the environment. An option that is missing or invalid gets its default; the command has
    /// validated them.
    pub fn from_environment() -> Self {
        let mut options = Self::default();
        for name in Self::NAMES {
            if let Ok(value) = env::var(format!("PTX_EMULATOR_{name}")) {
                let _ = options.set(name, &value);
            }
        }
        options
    }

    /// Sets an option. An empty value is the default. A list has commas between its elements.
    ///
    /// # Errors
    /// The text of the error. The option keeps its value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        fn list<T: FromStr<Err = String>>(value: &str) -> Result<Vec<T>, String> {
            value.split(',').filter(|one| !one.is_empty()).map(str::parse).collect()
        }
        fn one<T: FromStr<Err = String>>(value: &str, otherwise: T) -> Result<T, String> {
            if value.is_empty() { Ok(otherwise) } else { value.parse() }
        }
        match name {
            "GPU" if value.is_empty() => self.card = Card::h200(),
            "GPU" => self.card = Card::by_name(value).ok_or_else(|| format!("`{value}` is not a GPU"))?,
            "LEVEL" => self.level = one(value, Level::Default)?,
            "SCHEDULE" => self.schedule = one(value, Schedule::default())?,
            "EXPLORE" if value.is_empty() => self.explore = None,
            "EXPLORE" => {
                let time = value.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                self.explore = Some(time.ok_or_else(|| format!("`{value}` is not a number of seconds"))?);
            }
            "SUMS" => self.sums = one(value, Sums::default())?,
            "ALLOW" => self.allow = list(value)?,
            "KEEP_GOING" => self.keep_going = !value.is_empty(),
            "ALLOC_RENDEZVOUS" => self.alloc_rendezvous = !value.is_empty(),
            "NO_GLOBAL_RACES" => self.global_races = value.is_empty(),
            "LIMIT" => self.limits = list(value)?,
            "TIMED" if value.is_empty() => self.clock = None,
            "TIMED" => {
                let card = ptx_emulator::Card::named(value);
                self.clock = Some(card.ok_or_else(|| format!("`{value}` is not a GPU with a time model"))?);
            }
            "CONSTANTS" => {
                let settings = value.split(',').filter(|setting| !setting.is_empty());
                let set = |card: ptx_emulator::Card, setting: &str| card.with(setting);
                self.clock = self.clock.take().map(|card| settings.clone().try_fold(card, set)).transpose()?;
            }
            "NO_VALUES" => self.no_values = !value.is_empty(),
            "QUIET" => self.quiet = !value.is_empty(),
            "LOG" => self.log = (!value.is_empty()).then(|| PathBuf::from(value)),
            _ => return Err(format!("`{name}` is not an option; expected one of {}", Self::NAMES.join(", "))),
        }
        Ok(())
    }
}
