//! An order of a launch's steps, and the bounds of a search through all orders.

use std::fmt;
use std::time::Duration;

use super::fault::Fault;
use super::report::Report;

/// Something that makes steps: a warp, or an asynchronous operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Agent {
    /// A warp.
    Warp {
        /// Number of the cluster in the grid.
        cluster: u32,
        /// Number of the warp in the cluster.
        warp: u32,
    },
    /// An asynchronous operation: a copy, a matrix product, an arrival.
    Operation {
        /// Number of the cluster in the grid.
        cluster: u32,
        /// Number in the cluster of the warp that issued the operation.
        warp: u32,
        /// Number of the operation among its warp's operations, from 1.
        number: u32,
    },
}

impl Agent {
    /// Number of the agent's cluster in the grid.
    pub fn cluster(self) -> u32 {
        match self {
            Agent::Warp { cluster, .. } | Agent::Operation { cluster, .. } => cluster,
        }
    }

    /// Number in the cluster of the warp, or of the warp that issued the operation.
    pub fn warp(self) -> u32 {
        match self {
            Agent::Warp { warp, .. } | Agent::Operation { warp, .. } => warp,
        }
    }
}

impl fmt::Display for Agent {
    /// Writes `c0w1` for warp 1 of cluster 0, and `c0w1o2` for the second operation that it issued.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Agent::Warp { cluster, warp } => write!(f, "c{cluster}w{warp}"),
            Agent::Operation { cluster, warp, number } => write!(f, "c{cluster}w{warp}o{number}"),
        }
    }
}

impl std::str::FromStr for Agent {
    type Err = String;

    fn from_str(s: &str) -> Result<Agent, String> {
        let parse = || {
            let (cluster, rest) = s.strip_prefix('c')?.split_once('w')?;
            let cluster = cluster.parse().ok()?;
            Some(match rest.split_once('o') {
                Some((warp, number)) => {
                    Agent::Operation { cluster, warp: warp.parse().ok()?, number: number.parse().ok()? }
                }
                None => Agent::Warp { cluster, warp: rest.parse().ok()? },
            })
        };
        parse().ok_or_else(|| format!("`{s}` is no warp, such as c0w1, and no operation, such as c0w1o2"))
    }
}

/// The agents that make a launch's steps, one after the other. After the last of them, each warp runs on for as long as
/// it can, and operations complete when no warp can run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order(pub Vec<Agent>);

impl Order {
    /// Beginning of the text form.
    pub const PREFIX: &str = "order:";

    /// The agents in turn, each with the number of its steps.
    fn runs(&self) -> Vec<(Agent, usize)> {
        let mut runs: Vec<(Agent, usize)> = Vec::new();
        for &agent in &self.0 {
            match runs.last_mut() {
                Some((last, times)) if *last == agent => *times += 1,
                _ => runs.push((agent, 1)),
            }
        }
        runs
    }
}

impl fmt::Display for Order {
    /// Writes the form that [`Order::from_str`](std::str::FromStr) reads, such as `order:c0w0*3,c0w1,c0w0o1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = |(agent, times): (Agent, usize)| match times {
            1 => agent.to_string(),
            _ => format!("{agent}*{times}"),
        };
        let runs: Vec<String> = self.runs().into_iter().map(run).collect();
        write!(f, "{}{}", Order::PREFIX, runs.join(","))
    }
}

impl std::str::FromStr for Order {
    type Err = String;

    /// Parses `order:` and agents with commas in between. `*N` behind an agent stands for N steps.
    fn from_str(s: &str) -> Result<Order, String> {
        /// Maximum number of steps of an order.
        const MOST: usize = 1 << 24;
        let list = s.trim().strip_prefix(Order::PREFIX).ok_or_else(|| format!("`{s}` does not begin with `order:`"))?;
        let mut agents = Vec::new();
        for part in list.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (agent, times) = part.split_once('*').unwrap_or((part, "1"));
            let times = times.parse::<usize>().ok().filter(|times| *times <= MOST - agents.len());
            let times =
                times.ok_or_else(|| format!("`{part}`: expected a number of at most {MOST} steps behind `*`"))?;
            agents.extend(std::iter::repeat_n(agent.parse::<Agent>()?, times));
        }
        Ok(Order(agents))
    }
}

impl serde::Serialize for Order {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Bounds of a search through the orders of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Maximum number of times in an order that a warp which could run on must let another warp run. `None`: any number.
    pub preemptions: Option<u32>,
    /// Maximum number of orders.
    pub orders: u64,
    /// Maximum time.
    pub time: Duration,
    /// `true`: of orders that differ only in steps that do not depend on each other, run one. `false`: run all.
    pub reduction: bool,
    /// `true`: go on behind an order with a fault, and list each fault once. `false`: the first fault ends the search.
    pub every_fault: bool,
}

impl Default for Bounds {
    /// At most 100,000 orders and 60 s, any number of preemptions, with reduction, up to the first fault.
    fn default() -> Bounds {
        Bounds {
            preemptions: None,
            orders: 100_000,
            time: Duration::from_secs(60),
            reduction: true,
            every_fault: false,
        }
    }
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// No order is left.
    Whole,
    /// An order has a fault.
    Fault,
    /// The orders that are left need more preemptions than allowed.
    Preemptions,
    /// The maximum number of orders.
    Orders,
    /// The maximum time.
    Time,
}

/// An order with a fault.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Failure {
    /// The fault.
    pub fault: Fault,
    /// Order that shows the fault, with the fewest preemptions that the search for a shorter order has found.
    pub order: Order,
    /// Number of times in the order that a warp which could run on lets another warp run.
    pub preemptions: u32,
}

/// Result of a search through the orders of a launch.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Exploration {
    /// Why the search ended.
    pub end: End,
    /// Number of orders that ran to their end.
    pub orders: u64,
    /// Number of orders that were given up on the way, because they only repeat others.
    pub repeated: u64,
    /// Number of steps of the longest order.
    pub steps: usize,
    /// Number of different contents of global memory that the orders without a fault end with.
    pub results: usize,
    /// Report of the first order without a fault.
    pub report: Option<Report>,
    /// Each fault, with an order that shows it.
    pub failures: Vec<Failure>,
}

impl Exploration {
    /// A search that has found nothing yet.
    pub(crate) fn new() -> Exploration {
        Exploration {
            end: End::Whole,
            orders: 0,
            repeated: 0,
            steps: 0,
            results: 0,
            report: None,
            failures: Vec::new(),
        }
    }
}

/// A number with the noun in the form that it needs.
fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

impl fmt::Display for Exploration {
    /// Writes the faults with their orders, and how far the search came.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Failure { fault, order, preemptions } in &self.failures {
            let preemptions = count((*preemptions).into(), "preemption");
            writeln!(f, "{fault}\n  in an order with {preemptions}; replay it with --schedule {order}")?;
        }
        let orders = count(self.orders, "order");
        match self.end {
            End::Whole => write!(f, "explored whole: {orders}")?,
            End::Fault => write!(f, "a fault after {orders}")?,
            End::Preemptions => write!(f, "bound of preemptions reached after {orders}")?,
            End::Orders => write!(f, "bound of orders reached after {orders}")?,
            End::Time => write!(f, "bound of time reached after {orders}")?,
        }
        writeln!(
            f,
            " of up to {}, {} ({} given up as repetitions)",
            count(self.steps as u64, "step"),
            count(self.results as u64, "result"),
            count(self.repeated, "order"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_reads_back() {
        let text = "order:c0w0*3,c0w1,c1w2o7,c0w0";
        let order: Order = text.parse().unwrap();
        assert_eq!((order.0.len(), order.to_string()), (6, text.to_owned()));
        assert_eq!("order:".parse(), Ok(Order::default()));
    }

    #[test]
    fn bad_orders_are_errors() {
        for text in ["c0w0", "order:w0", "order:c0w0*x", "order:c0w0o", "order:c0w0*99999999999"] {
            assert!(text.parse::<Order>().is_err(), "{text}");
        }
    }
}
