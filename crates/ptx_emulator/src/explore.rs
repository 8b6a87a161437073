//! `--explore`: all orders of a launch.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use ptx_emulator::launch_json::{LaunchFile, Prepared};
use ptx_emulator::{Bounds, Order};

use super::exit;

/// Options of the search through all orders.
#[derive(Args)]
pub struct Explore {
    /// Run the launch in all orders that its warps and asynchronous operations can take, up to the bounds. Of orders
    /// that give the same result because they differ only in independent steps, one is run. The first fault ends the
    /// search, and is printed with a short order that shows it.
    #[arg(long, conflicts_with_all = ["timed", "schedule"])]
    explore: bool,
    /// Explore only orders in which warps that could run on let another warp run at most N times.
    #[arg(long, value_name = "N", requires = "explore")]
    preemptions: Option<u32>,
    /// Maximum number of orders.
    #[arg(long, value_name = "N", requires = "explore", default_value = "100000")]
    orders: u64,
    /// Maximum time of the search in seconds.
    #[arg(long, value_name = "S", requires = "explore", default_value = "60")]
    seconds: f64,
    /// Go on behind orders with a fault, and list each fault once.
    #[arg(long, requires = "explore")]
    every_fault: bool,
}

impl Explore {
    /// The bounds, if orders are to be explored.
    pub fn bounds(&self) -> Option<Bounds> {
        let time = Duration::try_from_secs_f64(self.seconds).unwrap_or(Duration::MAX);
        let Explore { preemptions, orders, every_fault, .. } = *self;
        self.explore.then_some(Bounds { preemptions, orders, time, every_fault, ..Bounds::default() })
    }
}

/// The order to replay, if the schedule is one. Another schedule goes to the launch file.
pub fn order(file: &mut LaunchFile, schedule: Option<String>) -> Result<Option<Order>> {
    let schedule = schedule.or(file.schedule.take());
    match schedule {
        Some(text) if text.starts_with(Order::PREFIX) => Ok(Some(text.parse().map_err(|text: String| anyhow!(text))?)),
        other => {
            file.schedule = other;
            Ok(None)
        }
    }
}

/// Explores the orders of a launch, and prints the result.
pub fn explore(prepared: &mut Prepared, bounds: &Bounds, json: bool) -> Result<ExitCode> {
    let found = match prepared.explore(bounds)? {
        Ok(found) => found,
        Err(fault) => {
            println!("{}", if json { serde_json::to_string(&fault)? } else { fault.to_string() });
            return Ok(ExitCode::from(exit::of(&fault)));
        }
    };
    if json {
        println!("{}", serde_json::to_string(&found)?);
    } else {
        print!("{found}");
    }
    if !found.failures.is_empty() {
        return Ok(ExitCode::from(exit::FAULT));
    }
    prepared.save().context("writing the buffers")?;
    Ok(ExitCode::SUCCESS)
}
