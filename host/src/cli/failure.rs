//! Errors of commands with `--json`.

use std::io::Write;
use std::process::ExitCode;

use serde_json::json;

use super::message::message;

/// Returns the result of a command. With `--json`, an error is also an object on stdout.
pub fn with_json(
    json: bool,
    schema: u32,
    result: anyhow::Result<ExitCode>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    if let (true, Err(error)) = (json, &result) {
        let code = error.downcast_ref::<nvfp4::Error>().map(nvfp4::Error::code);
        writeln!(out, "{}", json!({"schema_version": schema, "error": message(error), "code": code}))?;
    }
    result
}
