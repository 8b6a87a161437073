//! Writes files and folders under a temporary name beside their target and renames them at the end. So an existing
//! target survives any failure, and no half-written file is mistaken for a model.
//!
//! A partial is named `.NAME.PROCESS-COUNT.partial`. It is removed on drop and when a signal ends the process
//! (`signals.rs`). Only SIGKILL or a crash of the machine leaves a partial behind. The writer of a partial holds a lock
//! on it; [`leftovers`] finds partials without a lock.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::signals::{Lock, Unfinished, uninterrupted};
use nvfp4_core::Error;

/// Ending of the names of partials.
const ENDING: &str = ".partial";

/// Maximum length of a file name, in bytes, that all usual file systems accept.
const LONGEST_NAME: usize = 255;

/// A file that is renamed to its target when it is complete, and removed if it never is.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: File,
    unfinished: Option<Unfinished>,
    /// Temporary path.
    at: PathBuf,
    /// Final path, with links followed.
    target: PathBuf,
    /// Final path as the caller gave it, for messages.
    shown: PathBuf,
    finished: bool,
}

impl PartialFile {
    /// Starts a file for `path`, which may be a symlink to a file. The new file gets the mode of an existing file.
    ///
    /// # Errors
    /// Returns the errors of [`check_file`], and an error if the folder cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let Target { path: target, existing } = file_target(path)?;
        let begun = begin(&target, |at, lock| {
            let file = OpenOptions::new().write(true).create_new(true).open(at)?;
            Ok((file, Unfinished::file(at, lock)))
        });
        let ((file, unfinished), at) = begun.map_err(cannot_write(path))?;
        let unfinished = Some(unfinished);
        let partial = Self { file, unfinished, at, target, shown: path.to_owned(), finished: false };
        // Without a lock, another process reports this file as a leftover, which is harmless.
        _ = partial.file.try_lock();
        if let Some(existing) = existing {
            partial.file.set_permissions(existing.permissions()).map_err(cannot_write(path))?;
        }
        Ok(partial)
    }

    /// Runs `write` and adds the file name to its error.
    ///
    /// # Errors
    /// Returns the error of `write`.
    pub(crate) fn write(&mut self, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<(), Error> {
        write(&mut self.file).map_err(cannot_write(&self.shown))
    }

    /// Writes bytes at an offset of the file; callable from any thread.
    ///
    /// # Errors
    /// Returns an error if the bytes cannot be written.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        #[cfg(unix)]
        let written = std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, offset);
        #[cfg(not(unix))]
        let written = {
            use std::io::{Seek, SeekFrom, Write};
            /// A file has one position, which all threads share.
            static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _turn = ONE_AT_A_TIME.lock();
            let mut file = &self.file;
            file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes))
        };
        written.map_err(cannot_write(&self.target))
    }

    /// Flushes the file to disk and renames it to its target.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or renamed.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let cannot_write = cannot_write(&self.shown);
        self.file.sync_all().map_err(&cannot_write)?;
        if self.at == self.target {
            // The file is in a partial folder, which is renamed later.
            self.finished = true;
            return Ok(());
        }
        let renamed = uninterrupted(|_| {
            std::fs::rename(&self.at, &self.target)?;
            drop(self.unfinished.take());
            Ok(())
        });
        renamed.map_err(&cannot_write)?;
        self.finished = true;
        sync_folder(folder_of(&self.target)).map_err(&cannot_write)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.finished {
            _ = std::fs::remove_file(&self.at);
        }
    }
}

/// A folder that is renamed to its target when it is complete, and removed if it never is.
#[derive(Debug)]
pub(crate) struct PartialFolder {
    unfinished: Option<Unfinished>,
    files: Vec<Unfinished>,
    at: PathBuf,
    target: Target,
    shown: PathBuf,
    /// Open folder that holds the lock.
    _folder: Option<File>,
}

impl PartialFolder {
    /// Starts a folder for `path`, which must not exist or be an empty folder. The new folder gets the mode of an
    /// existing folder.
    ///
    /// # Errors
    /// Returns the errors of [`check_folder`], and an error if the parent folder cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let target = folder_target(path)?;
        let begun = begin(&target.path, |at, lock| {
            std::fs::create_dir(at)?;
            Ok(Unfinished::folder(at, lock))
        });
        let (unfinished, at) = begun.map_err(cannot_write(path))?;
        let folder = File::open(&at).ok().filter(|folder| folder.try_lock().is_ok());
        let (unfinished, shown) = (Some(unfinished), path.to_owned());
        Ok(Self { unfinished, files: Vec::new(), at, target, shown, _folder: folder })
    }

    /// Starts a file in the folder. [`PartialFile::finish`] completes the file, [`PartialFolder::finish`] completes the
    /// folder.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub(crate) fn create_file(&mut self, name: &Path) -> Result<PartialFile, Error> {
        let (at, shown) = (self.at.join(name), self.shown.join(name));
        let made = uninterrupted(|lock| {
            let file = OpenOptions::new().write(true).create_new(true).open(&at)?;
            Ok((file, Unfinished::file(&at, lock)))
        });
        let (file, unfinished) = made.map_err(cannot_write(&shown))?;
        self.files.push(unfinished);
        Ok(PartialFile { file, unfinished: None, target: at.clone(), at, shown, finished: false })
    }

    /// Flushes the folder to disk and renames it to its target.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written or renamed.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let cannot_write = cannot_write(&self.shown);
        if let Some(existing) = &self.target.existing {
            std::fs::set_permissions(&self.at, existing.permissions()).map_err(&cannot_write)?;
        }
        sync_folder(&self.at).map_err(&cannot_write)?;
        let renamed = uninterrupted(|_| {
            std::fs::rename(&self.at, &self.target.path)?;
            self.files.clear();
            drop(self.unfinished.take());
            Ok(())
        });
        renamed.map_err(&cannot_write)?;
        sync_folder(folder_of(&self.target.path)).map_err(&cannot_write)
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        if self.unfinished.is_some() {
            _ = std::fs::remove_dir_all(&self.at);
        }
    }
}

/// Checks, before the work, that a file can be written to `path`.
///
/// # Errors
/// Returns an error if `path` is something other than a file, a dangling symlink or a mount point, if its parent folder
/// is missing, or if its name is too long.
pub fn check_file(path: &Path) -> Result<(), Error> {
    file_target(path).map(drop)
}

/// Checks, before the work, that a folder can be written to `path`.
///
/// # Errors
/// Returns an error if `path` is something other than an empty folder, or a mount point, if its parent folder is
/// missing, or if its name is too long.
pub fn check_folder(path: &Path) -> Result<(), Error> {
    folder_target(path).map(drop)
}

/// Returns the partials beside `path` whose writer no longer runs.
pub fn leftovers(path: &Path) -> Vec<PathBuf> {
    let Some((beginning, target)) = resolve(path).ok().and_then(|target| Some((beginning(&target.path)?, target.path)))
    else {
        return Vec::new();
    };
    let Ok(entries) = std::fs::read_dir(folder_of(&target)) else { return Vec::new() };
    let is_partial = |name: &std::ffi::OsStr| {
        let rest = name.as_encoded_bytes().strip_prefix(beginning.as_encoded_bytes());
        let middle = rest.and_then(|rest| rest.strip_suffix(ENDING.as_bytes()));
        middle.is_some_and(|middle| {
            !middle.is_empty() && middle.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
        })
    };
    let partials =
        entries.filter_map(|entry| Some(entry.ok()?.path()).filter(|path| path.file_name().is_some_and(is_partial)));
    let is_alone =
        |path: &PathBuf| !File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)));
    let mut left: Vec<PathBuf> = partials.filter(is_alone).collect();
    left.sort();
    left
}

/// Path to write, with its links followed.
#[derive(Debug)]
struct Target {
    path: PathBuf,
    /// Metadata of the existing file or folder; `None` if `path` does not exist.
    existing: Option<Metadata>,
}

impl Target {
    /// Returns `self` if the parent folder is writable.
    fn if_writable(self, path: &Path) -> Result<Self, Error> {
        check_writable(folder_of(&self.path)).map_err(cannot_write(path))?;
        Ok(self)
    }
}

fn file_target(path: &Path) -> Result<Target, Error> {
    let target = resolve(path)?;
    let Some(existing) = &target.existing else { return target.if_writable(path) };
    let what = if existing.is_dir() {
        "the path is a folder, not a regular file; give the path of a file, for example inside this folder"
    } else if !existing.is_file() {
        // Renaming would replace a device such as /dev/null.
        "the path exists and is not a regular file; give another output path"
    } else if is_mount_point(&target.path, existing) {
        "the path is a mount point, which cannot be replaced; give another output path"
    } else {
        return target.if_writable(path);
    };
    Err(Error::Invalid(what.into()).at(path.display()))
}

fn folder_target(path: &Path) -> Result<Target, Error> {
    let target = resolve(path)?;
    let Some(existing) = &target.existing else { return target.if_writable(path) };
    let is_empty = std::fs::read_dir(&target.path).is_ok_and(|mut entries| entries.next().is_none());
    let what = if !existing.is_dir() || !is_empty {
        "the path already exists; give the path of a new or an empty folder"
    } else if is_mount_point(&target.path, existing) {
        "the path is a mount point, which cannot be replaced; give the path of a new folder inside it"
    } else {
        return target.if_writable(path);
    };
    Err(Error::Invalid(what.into()).at(path.display()))
}

/// Follows the links of an output path and checks its surroundings.
fn resolve(path: &Path) -> Result<Target, Error> {
    let at = |error: Error| error.at(path.display());
    let no_name =
        || at(Error::Invalid("the path does not end in a file or folder name; give another output path".into()));
    let name = path.file_name().ok_or_else(no_name)?;
    let target = match std::fs::metadata(path) {
        Ok(existing) => {
            // A pipe on /dev/stdout has no canonical path; a later check refuses it.
            let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            Target { path, existing: Some(existing) }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if path.symlink_metadata().is_ok() {
                return Err(at(Error::Invalid("dangling symlink; remove it or restore its target".into())));
            }
            let folder = folder_of(path);
            if let Err(error) = std::fs::metadata(folder) {
                let what = format!("{error}: create the folder {} first", folder.display());
                return Err(at(Error::Invalid(what)).at("cannot write"));
            }
            Target { path: folder.canonicalize().map_err(cannot_write(path))?.join(name), existing: None }
        }
        Err(error) => return Err(cannot_write(path)(error)),
    };
    if target.path.file_name().is_none() {
        return Err(no_name());
    }
    Ok(target)
}

/// Checks that the mode and the file system of a folder allow new names.
#[cfg(unix)]
fn check_writable(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let folder = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: `folder` is a NUL-terminated string that lives through the call, and `access` accepts these flags.
    let allowed = unsafe { libc::access(folder.as_ptr(), libc::W_OK | libc::X_OK) } == 0;
    if allowed { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(not(unix))]
fn check_writable(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Calls `make` with the first free temporary name. A file system with a shorter limit for names makes this an error.
fn begin<T>(target: &Path, make: impl Fn(&Path, &Lock) -> std::io::Result<T>) -> std::io::Result<(T, PathBuf)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
    let beginning = beginning(target).ok_or_else(invalid)?;
    loop {
        let mut name = beginning.clone();
        name.push(format!("{}-{}{ENDING}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let at = folder_of(target).join(name);
        match uninterrupted(|lock| make(&at, lock)) {
            // A partial of another process with the same number exists.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => return made.map(|made| (made, at)),
        }
    }
}

/// Returns the prefix of the names of all partials of `target`; a long name of the target is cut to leave room for the
/// rest.
fn beginning(target: &Path) -> Option<OsString> {
    /// Two dots, two 32-bit numbers and a dash.
    const REST: usize = 2 + 10 + 10 + 1 + ENDING.len();
    let name = target.file_name()?;
    let mut beginning = OsString::from(".");
    if name.len() + REST <= LONGEST_NAME {
        beginning.push(name);
    } else {
        let name: String = name
            .to_string_lossy()
            .chars()
            .scan(0, |bytes, c| {
                *bytes += c.len_utf8();
                (*bytes + REST <= LONGEST_NAME).then_some(c)
            })
            .collect();
        beginning.push(name);
    }
    beginning.push(".");
    Some(beginning)
}

/// Returns the parent folder of a path.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Flushes the names in a folder to disk.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    // Only Unix can open folders.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

pub(crate) fn cannot_write(path: &Path) -> impl Fn(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |error| Error::io(&path, error).at("cannot write")
}

/// Returns `true` if the path is a mount point, which cannot be replaced by renaming.
#[cfg(target_os = "linux")]
fn is_mount_point(path: &Path, _: &Metadata) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: `statx` is plain data, for which zeros are valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: `path` is a NUL-terminated string, and `found` is a writable buffer of the type that the call fills.
    let done = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_BASIC_STATS, &mut found) } == 0;
    // Linux before 5.8 does not report mount points; there the rename fails after the work.
    done && found.stx_attributes_mask & found.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0
}

/// Returns `true` if the path is a mount point, which cannot be replaced by renaming: its device differs from its
/// parent's.
#[cfg(all(unix, not(target_os = "linux")))]
fn is_mount_point(path: &Path, existing: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(folder_of(path)).is_ok_and(|folder| folder.dev() != existing.dev())
}

#[cfg(not(unix))]
fn is_mount_point(_: &Path, _: &Metadata) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let mut file = PartialFile::create(path)?;
        file.write(|file| file.write_all(bytes))?;
        file.finish()
    }

    #[test]
    fn file_appears_only_when_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut file = PartialFile::create(&path).unwrap();
        file.write(|file| file.write_all(b"new")).unwrap();
        assert!(!path.exists());
        file.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        drop(PartialFile::create(&path).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn folder_appears_only_when_complete() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("model");
        let fill = |folder: &mut PartialFolder| {
            let mut file = folder.create_file(Path::new("a")).unwrap();
            file.write(|file| file.write_all(b"1")).unwrap();
            file.finish().unwrap();
            drop(folder.create_file(Path::new("unfinished")).unwrap());
        };
        let mut folder = PartialFolder::create(&path).unwrap();
        fill(&mut folder);
        assert!(folder.create_file(Path::new("a")).is_err(), "two files must not share a name");
        drop(folder);
        assert_eq!(names(outer.path()), [""; 0]);
        let mut folder = PartialFolder::create(&path).unwrap();
        fill(&mut folder);
        assert!(!path.exists());
        folder.finish().unwrap();
        assert_eq!(names(outer.path()), ["model"]);
        assert_eq!((names(&path), std::fs::read(path.join("a")).unwrap()), (vec!["a".into()], b"1".to_vec()));
    }

    #[test]
    fn names_up_to_the_maximum_length_are_written() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["n".repeat(255), "é".repeat(127), "x".into()] {
            write(&folder.path().join(&name), b"1").unwrap();
            std::fs::remove_file(folder.path().join(&name)).unwrap();
            PartialFolder::create(&folder.path().join(&name)).unwrap().finish().unwrap();
        }
        let message = write(&folder.path().join("n".repeat(256)), b"1").unwrap_err().to_string();
        assert!(message.contains("name too long"), "{message}");
    }

    #[test]
    fn targets_that_cannot_be_replaced_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        std::fs::create_dir(at("full")).unwrap();
        std::fs::write(at("full/file"), "").unwrap();
        std::fs::create_dir(at("empty")).unwrap();
        for (path, words) in [
            (at("full"), "the path is a folder, not a regular file; give the path of a file"),
            (at("empty"), "the path is a folder, not a regular file; give the path of a file"),
            (at("no/such"), "no/such: No such file or directory (os error 2): create the folder"),
            (at("file/x"), "Not a directory"),
            ("/dev/null".into(), "not a regular file"),
            ("/".into(), "does not end in a file or folder name"),
            ("..".into(), "does not end in a file or folder name"),
            ("".into(), "does not end in a file or folder name"),
        ] {
            let message = check_file(&path).unwrap_err().to_string();
            assert!(message.contains(words), "{}: {message}", path.display());
        }
        for (path, words) in [
            (at("full"), "the path already exists"),
            (at("file"), "the path already exists"),
            (at("no/such"), "create the folder"),
            ("/proc".into(), "the path already exists"),
        ] {
            let message = check_folder(&path).unwrap_err().to_string();
            assert!(message.contains(words), "{}: {message}", path.display());
        }
        assert!(
            check_folder(&at("empty")).is_ok() && check_folder(&at("new")).is_ok() && check_file(&at("new")).is_ok()
        );
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_modes_are_kept() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o7777;
        let set = |name: &str, mode| std::fs::set_permissions(at(name), PermissionsExt::from_mode(mode)).unwrap();
        std::fs::create_dir(at("elsewhere")).unwrap();
        std::fs::write(at("elsewhere/file"), "old").unwrap();
        set("elsewhere/file", 0o640);
        symlink(at("elsewhere/file"), at("link")).unwrap();
        write(&at("link"), b"new").unwrap();
        assert!(at("link").is_symlink());
        assert_eq!((std::fs::read(at("elsewhere/file")).unwrap(), mode("elsewhere/file")), (b"new".to_vec(), 0o640));

        std::fs::create_dir(at("elsewhere/empty")).unwrap();
        set("elsewhere/empty", 0o2750);
        symlink(at("elsewhere/empty"), at("link to folder")).unwrap();
        PartialFolder::create(&at("link to folder")).unwrap().finish().unwrap();
        assert!(at("link to folder").is_symlink());
        assert_eq!(mode("elsewhere/empty"), 0o2750);
        assert_eq!(names(&at("elsewhere")), ["empty", "file"]);

        symlink(at("nowhere"), at("dangling")).unwrap();
        for message in [check_file(&at("dangling")), check_folder(&at("dangling"))] {
            assert!(message.unwrap_err().to_string().contains("dangling symlink"));
        }
        symlink(at("loop"), at("loop")).unwrap();
        assert!(check_file(&at("loop")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn unwritable_folder_is_found_before_the_work() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o555)).unwrap();
        let path = folder.path().join("x");
        // A privileged user may write to any folder.
        let is_allowed = File::create(&path).is_ok();
        _ = std::fs::remove_file(&path);
        assert_eq!((check_file(&path).is_ok(), check_folder(&path).is_ok()), (is_allowed, is_allowed));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn mount_points_are_recognized() {
        let metadata = |path: &str| std::fs::metadata(path).unwrap();
        assert!(is_mount_point(Path::new("/proc"), &metadata("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self"), &metadata("/proc/self")));
    }

    #[test]
    fn leftovers_lists_only_partials_without_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (file, other) =
            (PartialFile::create(&path).unwrap(), PartialFolder::create(&folder.path().join("y")).unwrap());
        assert_eq!(leftovers(&path), [""; 0].map(PathBuf::from));
        for name in [".x.123-0.partial", ".x.y.123-0.partial", ".x..partial", ".x.1-0.part", "x.1-0.partial"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        // Earlier versions used random letters in the name.
        std::fs::create_dir(folder.path().join(".x.aB3dEf.partial")).unwrap();
        let found = leftovers(&path);
        let found: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(found, [".x.123-0.partial", ".x.aB3dEf.partial"]);
        drop((file, other));
    }
}
