//! Instances that the plan must not choose on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

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

    /// Returns the refused entries, with reasons.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(entry, reason)| (entry.as_str(), reason.as_str()))
    }
}
