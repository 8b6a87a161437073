//! Reports of launches, and faults as JSON.

use ptx_emulator::{Exploration, Fault, Time};
use pyo3::prelude::*;
use serde_json::{Value, json};

/// Counters of a launch that ended.
#[pyclass(frozen, module = "ptx_emulator._native")]
pub struct Report {
    pub report: ptx_emulator::Report,
    /// Predicted time of the launch on a GPU.
    pub time: Option<Time>,
}

#[pymethods]
impl Report {
    /// Number of CTAs.
    #[getter]
    fn ctas(&self) -> u64 {
        self.report.ctas
    }

    /// Output of `printf`.
    #[getter]
    fn output(&self) -> &str {
        &self.report.output
    }

    /// Number of warnings, and of hazards that the launch continued after.
    #[getter]
    fn found(&self) -> (usize, usize) {
        (self.report.warnings.len(), self.report.hazards.len())
    }

    /// All counters, warnings and hazards, and the prediction, as JSON.
    fn json(&self) -> String {
        let mut value = json!(self.report);
        for (list, found, word) in
            [("warnings", &self.report.warnings, "warning"), ("hazards", &self.report.hazards, "fault")]
        {
            value[list] = found
                .iter()
                .map(|one| {
                    let mut fields = json!(one);
                    fields["text"] = one.display(word).to_string().into();
                    fields["remedy"] = one.fault.kind.remedy().into();
                    fields
                })
                .collect();
        }
        value["time"] = self.time.as_ref().map_or(Value::Null, |time| json!(time));
        value.to_string()
    }

    fn __str__(&self) -> String {
        let time = self.time.as_ref().map(|time| {
            let microseconds = time.end_us - time.start_us;
            format!("predicted: {microseconds:.2} us, by the model, not measured\n{time}")
        });
        format!("{}{}", self.report, time.unwrap_or_default())
    }
}

/// The fields of a fault, its text and its remedy.
fn described(fault: &Fault) -> Value {
    let mut fields = json!(fault);
    fields["text"] = fault.to_string().into();
    fields["remedy"] = fault.kind.remedy().into();
    fields
}

/// A fault as JSON: its fields, its text and its remedy.
pub fn fault(fault: &Fault) -> String {
    described(fault).to_string()
}

/// The result of a search through all orders as JSON, with its text.
pub fn exploration(found: &Exploration) -> String {
    let mut value = json!(found);
    value["failures"] = found
        .failures
        .iter()
        .map(|failure| json!({"fault": described(&failure.fault), "order": failure.order, "preemptions": failure.preemptions}))
        .collect();
    value["text"] = found.to_string().into();
    value.to_string()
}
