//! Errors as one line of text.

/// Returns an error and its causes on one line, each once.
pub fn message(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |line, cause| {
        let cause = nvfp4::printable(&cause.to_string());
        match line {
            _ if line.is_empty() => cause,
            // Some errors already contain the text of their cause.
            line if line.ends_with(&cause) => line,
            line => format!("{line}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn system_error_is_printed_once() {
        let error = io::Error::from(io::ErrorKind::NotFound);
        let library = nvfp4::Error::io("x".as_ref(), error);
        let line = message(&Err::<(), _>(library).context("a\nb").unwrap_err());
        assert_eq!(line, r"a\nb: x: entity not found");
        let driver = nvfp4::Error::Driver { call: "cuInit", device: "GPU".into(), source: "out of memory".into() };
        assert_eq!(message(&driver.into()), "cuInit failed on GPU: out of memory");
    }
}
