//! Verdicts of self-tests, one file each in the user's cache. This file knows neither how kernels are tested nor what
//! follows from a verdict.
//!
//! A verdict belongs to a subject with its code, a GPU and a driver. If any of them differs, there is no verdict. Each
//! file is written under another name and renamed, so that no reader sees a part of it and processes that write at once
//! do not mix their files. A file that cannot be read counts as no verdict, and an error is reported.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use gpu_arch::Capability;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::files::read_bounded;

/// Location of the verdicts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdicts {
    /// The folder `nvfp4/selftest` in the user's cache: under `XDG_CACHE_HOME`, or under `.cache` in the home
    /// directory.
    #[default]
    UserCache,
    /// Another folder.
    Folder(PathBuf),
    /// No location: no verdict is read or written, so no kernel counts as tested.
    Ignored,
}

/// Key of a verdict: the tested code, and the GPU with its driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// Name of a [`Subject`](nvfp4_kernels::Subject).
    pub subject: String,
    /// Hash of the code of the subject's kernels and of this library's version.
    pub code: String,
    /// Name of the GPU as reported by its driver.
    pub card: String,
    /// Compute capability of the GPU.
    pub capability: Capability,
    /// Version of the driver.
    pub driver: String,
}

/// Result of a self-test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The tested code, and the GPU with its driver.
    #[serde(flatten)]
    pub tried: Tried,
    /// Parts that passed.
    pub passed: Vec<String>,
    /// Parts that failed.
    pub failed: Vec<FailedPart>,
}

/// A part of a self-test that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedPart {
    /// Name of the part, for instance `gated t64`.
    pub part: String,
    /// Reason of the failure.
    pub why: String,
    /// Entries that the plan does not choose because of this failure. Empty: the failure belongs to no instance that the
    /// plan chooses.
    pub instances: Vec<String>,
}

/// Maximum size of a verdict's file. A verdict takes some kilobytes.
const MAX_BYTES: usize = 1 << 20;

impl Verdicts {
    /// Returns the folder, or `None` for [`Verdicts::Ignored`].
    ///
    /// # Errors
    /// [`Error::Invalid`] if the user has no home directory.
    pub fn folder(&self) -> Result<Option<PathBuf>, Error> {
        match self {
            Self::Ignored => Ok(None),
            Self::Folder(folder) => Ok(Some(folder.clone())),
            Self::UserCache => {
                // The specification says to ignore relative paths (XDG Base Directory Specification, "Basics").
                let of_user = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
                let cache = of_user.or_else(|| Some(env::home_dir()?.join(".cache")));
                let text = "there is no home directory for the verdicts of self-tests; set XDG_CACHE_HOME";
                cache.map(|cache| Some(cache.join("nvfp4/selftest"))).ok_or_else(|| Error::Invalid(text.into()))
            }
        }
    }

    /// Whether the folder exists.
    pub(super) fn exist(&self) -> bool {
        self.folder().is_ok_and(|folder| folder.is_some_and(|folder| folder.exists()))
    }

    /// Reads the verdict with this key, if there is one.
    ///
    /// # Errors
    /// If its file cannot be read or is not a verdict.
    pub fn read(&self, tried: &Tried) -> Result<Option<Verdict>, Error> {
        let Ok(Some(folder)) = self.folder() else { return Ok(None) };
        let path = folder.join(tried.file_name());
        if !path.exists() {
            return Ok(None);
        }
        let text = read_bounded(&path, MAX_BYTES, "a verdict of `nvfp4 selftest`")?;
        let verdict: Verdict = serde_json::from_slice(&text).map_err(|error| {
            Error::Invalid(format!("not a verdict of a self-test ({error}); run `nvfp4 selftest` again"))
                .at(path.display())
        })?;
        // File names keep only letters, digits and points of GPU names, so two GPUs may share a file name.
        Ok((verdict.tried == *tried).then_some(verdict))
    }

    /// Writes a verdict and replaces an earlier one. Returns the file's path, or `None` for [`Verdicts::Ignored`].
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written, and the errors of [`Verdicts::folder`].
    pub fn write(&self, verdict: &Verdict) -> Result<Option<PathBuf>, Error> {
        let Some(folder) = self.folder()? else { return Ok(None) };
        fs::create_dir_all(&folder).map_err(|error| Error::io(&folder, error))?;
        let path = folder.join(verdict.tried.file_name());
        let text = serde_json::to_string_pretty(verdict).expect("a verdict has only strings and numbers") + "\n";
        write_whole(&folder, &path, text.as_bytes()).map_err(|error| Error::io(&path, error))?;
        Ok(Some(path))
    }
}

/// Writes a file in `folder` under another name, then renames it to `path`.
fn write_whole(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    // Other users may read the verdicts of a shared folder, if the umask allows it.
    #[cfg(unix)]
    builder.permissions(<fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
    let mut file = builder.suffix(".partial").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

impl Tried {
    /// File name of the verdict.
    fn file_name(&self) -> PathBuf {
        let Self { subject, code, card, driver, .. } = self;
        let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        Path::new(&format!("{subject}.{}.{}.{code}.json", plain(card), plain(driver))).into()
    }
}

impl Verdict {
    /// Returns the first failed part that is `of_interest`.
    pub fn failure(&self, of_interest: impl Fn(&FailedPart) -> bool) -> Option<&FailedPart> {
        self.failed.iter().find(|failed| of_interest(failed))
    }
}

impl std::fmt::Display for FailedPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.part, self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(card: &str) -> Verdict {
        let tried = Tried {
            subject: "gated_sm100".into(),
            code: "0123456789abcdef".into(),
            card: card.into(),
            capability: (10, 0),
            driver: "13.0 (580.65)".into(),
        };
        let failed = FailedPart {
            part: "gated t8".into(),
            why: "1 of 9 elements is wrong".into(),
            instances: vec!["gated_sm100_t8".into()],
        };
        Verdict { tried, passed: vec!["plain t8".into()], failed: vec![failed] }
    }

    #[test]
    fn verdicts_belong_to_one_card_driver_and_code() {
        let folder = tempfile::tempdir().unwrap();
        let verdicts = Verdicts::Folder(folder.path().join("not/there/yet"));
        let verdict = verdict("NVIDIA B200");
        assert_eq!(verdicts.read(&verdict.tried).unwrap(), None);
        let path = verdicts.write(&verdict).unwrap().unwrap();
        assert!(path.ends_with("gated_sm100.NVIDIA-B200.13.0--580.65-.".to_owned() + &verdict.tried.code + ".json"));
        assert_eq!(verdicts.read(&verdict.tried).unwrap().as_ref(), Some(&verdict));
        for other in [
            Tried { card: "NVIDIA B300".into(), ..verdict.tried.clone() },
            // This name gives the same file name.
            Tried { card: "NVIDIA-B200".into(), ..verdict.tried.clone() },
            Tried { driver: "13.1".into(), ..verdict.tried.clone() },
            Tried { code: "0123456789abcdee".into(), ..verdict.tried.clone() },
            Tried { capability: (10, 3), ..verdict.tried.clone() },
        ] {
            assert_eq!(verdicts.read(&other).unwrap(), None, "{other:?}");
        }
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no partial file is left");
    }

    #[test]
    fn invalid_files_are_reported_with_their_path() {
        let folder = tempfile::tempdir().unwrap();
        let (verdicts, verdict) = (Verdicts::Folder(folder.path().into()), verdict("NVIDIA B200"));
        let path = verdicts.write(&verdict).unwrap().unwrap();
        let whole = fs::read(&path).unwrap();
        for broken in [&whole[..whole.len() / 2], b"", b"{}", b"\xFF"] {
            fs::write(&path, broken).unwrap();
            let error = verdicts.read(&verdict.tried).unwrap_err().to_string();
            assert!(error.starts_with(&*path.to_string_lossy()) && error.contains("nvfp4 selftest"), "{error}");
        }
        verdicts.write(&verdict).unwrap();
        assert_eq!(verdicts.read(&verdict.tried).unwrap(), Some(verdict));
    }

    #[test]
    fn errors_name_a_folder_that_cannot_be_made() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let verdicts = Verdicts::Folder(file.path().join("below"));
        let error = verdicts.write(&verdict("NVIDIA B200")).unwrap_err().to_string();
        assert!(error.starts_with(&*file.path().to_string_lossy()), "{error}");
        assert_eq!(Verdicts::Ignored.write(&verdict("NVIDIA B200")).unwrap(), None);
    }
}
