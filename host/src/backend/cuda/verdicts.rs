//! Verdicts of self-tests, a file each in the user's cache. Knows neither how a kernel is tried nor what follows from it.
//!
//! A verdict is of what was tried, on a card, with a driver. If any of the three differs, there is no verdict. Files are written beside
//! and renamed, so that no reader sees half of one and processes that write at once do not mix; a file that cannot be read counts as
//! none, and is said.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

use gpu_arch::Capability;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::files::read_bounded;

/// Where verdicts are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdicts {
    /// The folder `nvfp4/selftest` of the user's cache: below `XDG_CACHE_HOME`, or `.cache` of the home directory.
    #[default]
    UserCache,
    /// Another folder.
    Folder(PathBuf),
    /// Nowhere: as if nothing had been tried.
    Ignored,
}

/// What was tried, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The name of a [`Subject`](crate::kernels::Subject).
    pub subject: String,
    /// A number that changes with the code of its kernels, and with this library's version.
    pub code: String,
    /// The card's name, as its driver says it.
    pub card: String,
    /// Its compute capability.
    pub capability: Capability,
    /// The driver's version.
    pub driver: String,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// What was tried, and where.
    #[serde(flatten)]
    pub tried: Tried,
    /// The parts that were right.
    pub passed: Vec<String>,
    /// The others.
    pub failed: Vec<FailedPart>,
}

/// A part of a self-test that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedPart {
    /// Which: `gated t64`, for instance.
    pub part: String,
    /// How.
    pub why: String,
}

/// A verdict is some kilobytes.
const MAX_BYTES: usize = 1 << 20;

impl Verdicts {
    /// The folder, if there is one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the user has no home directory.
    pub fn folder(&self) -> Result<Option<PathBuf>, Error> {
        match self {
            Self::Ignored => Ok(None),
            Self::Folder(folder) => Ok(Some(folder.clone())),
            Self::UserCache => {
                // Relative paths are to be ignored (XDG Base Directory Specification, "Basics").
                let of_user = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
                let cache = of_user.or_else(|| Some(env::home_dir()?.join(".cache")));
                let text = "no home directory to keep verdicts of self-tests in; set XDG_CACHE_HOME";
                cache.map(|cache| Some(cache.join("nvfp4/selftest"))).ok_or_else(|| Error::Invalid(text.into()))
            }
        }
    }

    /// Whether there is a folder of them at all.
    pub(super) fn exist(&self) -> bool {
        self.folder().is_ok_and(|folder| folder.is_some_and(|folder| folder.exists()))
    }

    /// The verdict on something, if there is one.
    ///
    /// # Errors
    /// If there is a file for it that cannot be read, or is none.
    pub fn read(&self, tried: &Tried) -> Result<Option<Verdict>, Error> {
        let Ok(Some(folder)) = self.folder() else { return Ok(None) };
        let path = folder.join(tried.file_name());
        if !path.exists() {
            return Ok(None);
        }
        let text = read_bounded(&path, MAX_BYTES, "a verdict of `nvfp4 selftest`")?;
        let verdict: Verdict = serde_json::from_slice(&text).map_err(|error| {
            Error::Invalid(format!("no verdict of a self-test ({error}); run `nvfp4 selftest` again"))
                .at(path.display())
        })?;
        // Names of cards are shortened to letters and digits in a file's name.
        Ok((verdict.tried == *tried).then_some(verdict))
    }

    /// Keeps a verdict, in place of an earlier one. Returns its file; none if verdicts are nowhere.
    ///
    /// # Errors
    /// [`Error::Io`], or as [`Verdicts::folder`].
    pub fn write(&self, verdict: &Verdict) -> Result<Option<PathBuf>, Error> {
        let Some(folder) = self.folder()? else { return Ok(None) };
        fs::create_dir_all(&folder).map_err(|error| Error::io(&folder, error))?;
        let path = folder.join(verdict.tried.file_name());
        let beside = path.with_extension(format!("{}.partial", process::id()));
        let text = serde_json::to_string_pretty(verdict).expect("words and numbers") + "\n";
        let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, &path));
        written.map_err(|error| {
            // Nobody can be told if that fails too.
            let _ = fs::remove_file(&beside);
            Error::io(&path, error)
        })?;
        Ok(Some(path))
    }
}

impl Tried {
    /// The name of its verdict's file.
    fn file_name(&self) -> PathBuf {
        let Self { subject, code, card, driver, .. } = self;
        let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        Path::new(&format!("{subject}.{}.{}.{code}.json", plain(card), plain(driver))).into()
    }
}

impl Verdict {
    /// The first part that failed, of those asked for.
    pub fn failure(&self, mut of_interest: impl FnMut(&str) -> bool) -> Option<&FailedPart> {
        self.failed.iter().find(|failed| of_interest(&failed.part))
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
        let failed = FailedPart { part: "gated t8".into(), why: "1 of 9 elements is wrong".into() };
        Verdict { tried, passed: vec!["plain t8".into()], failed: vec![failed] }
    }

    #[test]
    fn a_verdict_comes_back_and_is_of_one_card_one_driver_and_one_code() {
        let folder = tempfile::tempdir().unwrap();
        let verdicts = Verdicts::Folder(folder.path().join("not/there/yet"));
        let verdict = verdict("NVIDIA B200");
        assert_eq!(verdicts.read(&verdict.tried).unwrap(), None);
        let path = verdicts.write(&verdict).unwrap().unwrap();
        assert!(path.ends_with("gated_sm100.NVIDIA-B200.13.0--580.65-.".to_owned() + &verdict.tried.code + ".json"));
        assert_eq!(verdicts.read(&verdict.tried).unwrap().as_ref(), Some(&verdict));
        for other in [
            Tried { card: "NVIDIA B300".into(), ..verdict.tried.clone() },
            // The same file.
            Tried { card: "NVIDIA-B200".into(), ..verdict.tried.clone() },
            Tried { driver: "13.1".into(), ..verdict.tried.clone() },
            Tried { code: "0123456789abcdee".into(), ..verdict.tried.clone() },
            Tried { capability: (10, 3), ..verdict.tried.clone() },
        ] {
            assert_eq!(verdicts.read(&other).unwrap(), None, "{other:?}");
        }
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_file_that_is_no_verdict_is_an_error_with_its_path() {
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
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let verdicts = Verdicts::Folder(file.path().join("below"));
        let error = verdicts.write(&verdict("NVIDIA B200")).unwrap_err().to_string();
        assert!(error.starts_with(&*file.path().to_string_lossy()), "{error}");
        assert_eq!(Verdicts::Ignored.write(&verdict("NVIDIA B200")).unwrap(), None);
    }
}
