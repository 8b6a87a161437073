//! Instances that the plan must not choose on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::kernel::Kernel;
use nvfp4_core::Error;

/// Instances that have failed a self-test on a device, with reasons. The plan chooses among the others. The default
/// refuses none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused(Arc<BTreeMap<String, String>>);

impl Refused {
    /// Refuses entries, each with the reason. The first reason of an entry counts.
    pub fn new(entries: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut reasons = BTreeMap::new();
        for (entry, reason) in entries {
            reasons.entry(entry).or_insert(reason);
        }
        Self(Arc::new(reasons))
    }

    /// Whether no entry is refused.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an entry is refused.
    pub fn contains(&self, entry: &str) -> bool {
        self.0.contains_key(entry)
    }

    /// Returns the refused entries of a kernel, with reasons.
    pub fn of<'r>(&'r self, kernel: &(impl Kernel + ?Sized)) -> impl Iterator<Item = (&'r str, &'r str)> {
        let entries = kernel.entries();
        let all = self.0.iter().map(|(entry, reason)| (entry.as_str(), reason.as_str()));
        all.filter(move |(entry, _)| entries.iter().any(|of_kernel| of_kernel.name == *entry))
    }

    /// Returns the error of a computation that none of a kernel's other instances supports.
    pub fn error(&self, kernel: &(impl Kernel + ?Sized)) -> Error {
        let reasons: Vec<_> = self.of(kernel).map(|(entry, reason)| format!("{entry} ({reason})")).collect();
        Error::NotComputed(format!(
            "no instance of {} is left for these sizes; failed in the self-test on this device: {}; run `nvfp4 selftest \
             --again` to repeat the test, or use --force (Verdicts::Ignored) to ignore its verdict",
            kernel.name(),
            reasons.join(", ")
        ))
    }
}
