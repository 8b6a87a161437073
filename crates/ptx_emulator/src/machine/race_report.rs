//! Text of the report of a race in global memory.

use super::grid_races::{LINE, Meeting, Order, Record};
use super::race::Mode;
use super::state::Launch;
use crate::config::fault::{FaultKind, Stop};

impl Launch<'_> {
    /// Description of the thread or operation that made an access.
    fn name_accessor(&self, record: &Record, byte: u32) -> String {
        let operation = if record.issuer.is_some() { "an asynchronous operation of " } else { "" };
        let ([x, y, z], warp, lane) = self.thread(record.origin.cluster, record.issuer.unwrap_or(record.number(byte)));
        format!("{operation}CTA ({x}, {y}, {z}), warp {warp}, lane {lane}")
    }

    /// The race as a fault of the later access. The instructions of both accesses are in the fault.
    pub fn race(&self, meeting: &Meeting) -> Box<Stop> {
        let Meeting { earlier, later, address, order, .. } = meeting;
        let byte = (address % LINE) as u32;
        let kind = match (order, earlier.issuer.is_some(), later.mode.reads()) {
            (Order::Unproxied, ..) => FaultKind::MissingProxyFence,
            (_, false, _) => FaultKind::DataRace,
            (_, true, true) => FaultKind::ReadInFlight,
            (_, true, false) => FaultKind::OverwriteInFlight,
        };
        let did = |mode: Mode| match mode {
            Mode::Read => "read",
            Mode::StrongRead => "strong read",
            Mode::Atomic => "strong write",
            Mode::Write | Mode::SameValue => "write",
        };
        let both_strong = earlier.mode.is_strong() && later.mode.is_strong();
        let missing = match order {
            _ if both_strong => "and the two accesses are not ordered",
            Order::Known | Order::Unproxied => "the two accesses are ordered, but no proxy fence separates them",
            Order::Drawn => {
                "and a fence is missing: an atomic observed the write without acquire semantics and without a fence after it"
            }
            Order::Polled => {
                "and a fence is missing: a strong load observed the write without acquire semantics and without a fence after it"
            }
            Order::Unknown if meeting.silent => {
                "and a fence is missing there: the flag is written without release semantics and without a fence before it"
            }
            Order::Unknown => "and the two accesses are not ordered",
        };
        let scopes = if both_strong {
            let narrow = earlier.scope.min(later.scope).name();
            format!("; strong accesses of scope {narrow} do not include both threads")
        } else {
            String::new()
        };
        let did_before = if earlier.mode.reads() { "read" } else { "wrote" };
        let other = format!("{} {did_before} it, {missing}{scopes}", self.name_accessor(earlier, byte));
        let text = format!("{} of {}", did(later.mode), self.global.describe(*address));
        let mut stop = Stop::new(kind, text).other(other, Some(earlier.pc));
        stop.pc = Some(later.pc);
        if later.issuer.is_none() { stop.lane(later.lane(byte)) } else { stop }
    }

    /// CTA and warp of the later access's thread.
    pub fn later_thread(&self, meeting: &Meeting) -> ([u32; 3], u32) {
        let later = &meeting.later;
        let number = later.issuer.unwrap_or(later.number((meeting.address % LINE) as u32));
        let (cta, warp, _) = self.thread(later.origin.cluster, number);
        (cta, warp)
    }
}
