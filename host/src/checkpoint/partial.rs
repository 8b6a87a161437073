//! Files and folders that are written under a temporary name beside their place and then renamed, so that what is there
//! outlives any failure, and nothing half-written is ever taken for a model.
//!
//! A partial is called `.NAME.PROCESS-COUNT.partial`. It is removed when it is dropped, and when a signal ends the process
//! (`signals.rs`). Only SIGKILL and a crash of the machine leave one: [`leftovers`] finds it, by the lock that a
//! living writer holds on it.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Error;
use crate::signals::{Unfinished, uninterrupted};

/// How names end that are not final.
const ENDING: &str = ".partial";

/// The longest name of a file, in bytes, that every usual file system takes.
const LONGEST_NAME: usize = 255;

/// A file that takes its place when it is complete, and vanishes if it never is.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: File,
    unfinished: Option<Unfinished>,
    /// Where it is written.
    at: PathBuf,
    /// Where it belongs.
    target: PathBuf,
    /// That by the name that was asked for, for messages.
    shown: PathBuf,
    finished: bool,
}

impl PartialFile {
    /// Begins a file for `path`, which may be a link to one. The mode of a file that is there is kept.
    ///
    /// # Errors
    /// As [`check_file`], and if the folder cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let Target { path: target, existing } = file_target(path)?;
        let begun = begin(&target, |at| {
            let file = OpenOptions::new().write(true).create_new(true).open(at)?;
            Ok((file, Unfinished::file(at)))
        });
        let ((file, unfinished), at) = begun.map_err(cannot_write(path))?;
        let unfinished = Some(unfinished);
        let partial = Self { file, unfinished, at, target, shown: path.to_owned(), finished: false };
        // Without a lock it is taken for an old one, which is said and does no harm.
        _ = partial.file.try_lock();
        if let Some(existing) = existing {
            partial.file.set_permissions(existing.permissions()).map_err(cannot_write(path))?;
        }
        Ok(partial)
    }

    /// Runs some writing, and names the file if it fails.
    ///
    /// # Errors
    /// That of `write`.
    pub(crate) fn write(&mut self, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<(), Error> {
        write(&mut self.file).map_err(cannot_write(&self.shown))
    }

    /// Writes bytes to a place in the file; from any thread.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        #[cfg(unix)]
        let written = std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, offset);
        #[cfg(not(unix))]
        let written = {
            use std::io::{Seek, SeekFrom, Write};
            /// A file has one position, which all threads would move.
            static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _turn = ONE_AT_A_TIME.lock();
            let mut file = &self.file;
            file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes))
        };
        written.map_err(cannot_write(&self.target))
    }

    /// Waits until the disk has the file, and puts it in its place.
    ///
    /// # Errors
    /// If it cannot be written or renamed.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let cannot_write = cannot_write(&self.shown);
        self.file.sync_all().map_err(&cannot_write)?;
        if self.at == self.target {
            // It is in a partial folder, which is still to be renamed.
            self.finished = true;
            return Ok(());
        }
        let renamed = uninterrupted(|| {
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

/// A folder that takes its place when it is complete, and vanishes if it never is.
#[derive(Debug)]
pub(crate) struct PartialFolder {
    unfinished: Option<Unfinished>,
    files: Vec<Unfinished>,
    at: PathBuf,
    target: Target,
    shown: PathBuf,
    /// Holds the lock.
    _folder: Option<File>,
}

impl PartialFolder {
    /// Begins a folder for `path`, where nothing or an empty folder may be; the mode of that is kept.
    ///
    /// # Errors
    /// As [`check_folder`], and if the folder around it cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let target = folder_target(path)?;
        let begun = begin(&target.path, |at| {
            std::fs::create_dir(at)?;
            Ok(Unfinished::folder(at))
        });
        let (unfinished, at) = begun.map_err(cannot_write(path))?;
        let folder = File::open(&at).ok().filter(|folder| folder.try_lock().is_ok());
        let (unfinished, shown) = (Some(unfinished), path.to_owned());
        Ok(Self { unfinished, files: Vec::new(), at, target, shown, _folder: folder })
    }

    /// Begins a file of this name in it. [`PartialFile::finish`] completes the file, [`PartialFolder::finish`] both.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn create_file(&mut self, name: &Path) -> Result<PartialFile, Error> {
        let (at, shown) = (self.at.join(name), self.shown.join(name));
        let made = uninterrupted(|| {
            let file = OpenOptions::new().write(true).create_new(true).open(&at)?;
            Ok((file, Unfinished::file(&at)))
        });
        let (file, unfinished) = made.map_err(cannot_write(&shown))?;
        self.files.push(unfinished);
        Ok(PartialFile { file, unfinished: None, target: at.clone(), at, shown, finished: false })
    }

    /// Puts the folder in its place once the disk has it.
    ///
    /// # Errors
    /// If it cannot be written or renamed.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let cannot_write = cannot_write(&self.shown);
        if let Some(existing) = &self.target.existing {
            std::fs::set_permissions(&self.at, existing.permissions()).map_err(&cannot_write)?;
        }
        sync_folder(&self.at).map_err(&cannot_write)?;
        let renamed = uninterrupted(|| {
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
/// If something other than a file is there, a link to nothing, or a mount point; if the folder around it is missing or the
/// name too long.
pub fn check_file(path: &Path) -> Result<(), Error> {
    file_target(path).map(drop)
}

/// Checks, before the work, that a folder can be written to `path`.
///
/// # Errors
/// If something other than an empty folder is there, or a mount point; if the folder around it is missing or the name too
/// long.
pub fn check_folder(path: &Path) -> Result<(), Error> {
    folder_target(path).map(drop)
}

/// What earlier writers of `path` left unfinished beside it: partials whose process is gone.
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

/// A place to write, its links followed.
#[derive(Debug)]
struct Target {
    path: PathBuf,
    /// What is there.
    existing: Option<Metadata>,
}

impl Target {
    /// Itself, if the folder around it may be written.
    fn if_writable(self, path: &Path) -> Result<Self, Error> {
        check_writable(folder_of(&self.path)).map_err(cannot_write(path))?;
        Ok(self)
    }
}

fn file_target(path: &Path) -> Result<Target, Error> {
    let target = resolve(path)?;
    let Some(existing) = &target.existing else { return target.if_writable(path) };
    let what = if existing.is_dir() {
        "it is there and not a regular file but a folder; give the name of a file, perhaps in it"
    } else if !existing.is_file() {
        // Renaming would replace a device such as /dev/null.
        "it is there and not a regular file; give another name to write"
    } else if is_mount_point(&target.path, existing) {
        "it is a mount point, which cannot be replaced; give another name to write"
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
        "it is there already; give the name of a new or an empty folder"
    } else if is_mount_point(&target.path, existing) {
        "it is a mount point, which cannot be replaced; give the name of a new folder in it"
    } else {
        return target.if_writable(path);
    };
    Err(Error::Invalid(what.into()).at(path.display()))
}

/// Follows the links of a path to write and checks what is around it.
fn resolve(path: &Path) -> Result<Target, Error> {
    let at = |error: Error| error.at(path.display());
    let no_name = || at(Error::Invalid("not a name to write; give that of a file or a folder".into()));
    let name = path.file_name().ok_or_else(no_name)?;
    let target = match std::fs::metadata(path) {
        Ok(existing) => {
            // A pipe on /dev/stdout has no name of its own; it is refused in any case.
            let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            Target { path, existing: Some(existing) }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if path.symlink_metadata().is_ok() {
                return Err(at(Error::Invalid("it is a link to nothing; remove it, or make what it points to".into())));
            }
            let folder = folder_of(path);
            if let Err(error) = std::fs::metadata(folder) {
                let what = format!("{error}: make the folder {} first", folder.display());
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

/// Whether names may be added to a folder: its mode and its file system allow it.
#[cfg(unix)]
fn check_writable(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let folder = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: a C string, and flags that `access` takes.
    let allowed = unsafe { libc::access(folder.as_ptr(), libc::W_OK | libc::X_OK) } == 0;
    if allowed { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(not(unix))]
fn check_writable(_: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Makes something under the first temporary name that is free. Where the folder is on a file system of its own that
/// takes shorter names only, that is the error.
fn begin<T>(target: &Path, make: impl Fn(&Path) -> std::io::Result<T>) -> std::io::Result<(T, PathBuf)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
    let beginning = beginning(target).ok_or_else(invalid)?;
    loop {
        let mut name = beginning.clone();
        name.push(format!("{}-{}{ENDING}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let at = folder_of(target).join(name);
        match uninterrupted(|| make(&at)) {
            // Of a process that had the same number.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => return made.map(|made| (made, at)),
        }
    }
}

/// How the names of partials of `target` begin: with as much of its name as leaves room for the rest.
fn beginning(target: &Path) -> Option<OsString> {
    /// Two dots, two numbers of 32 bits and a dash.
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

/// The folder around a path.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Waits until the disk has the names in a folder.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    // Other systems do not open folders.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

pub(crate) fn cannot_write(path: &Path) -> impl Fn(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |error| Error::io(&path, error).at("cannot write")
}

/// Whether something is mounted at a path, so that it cannot be renamed over.
#[cfg(target_os = "linux")]
fn is_mount_point(path: &Path, _: &Metadata) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: `statx` is plain data, for which zeros are valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and the buffer is of the type that is asked for.
    let done = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_BASIC_STATS, &mut found) } == 0;
    // Linux before 5.8 does not say; the rename then fails after the work.
    done && found.stx_attributes_mask & found.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0
}

/// Whether something is mounted at a path, so that it cannot be renamed over: told by its device.
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
    fn a_file_has_its_name_only_when_it_is_complete() {
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
    fn a_folder_has_its_name_only_when_it_is_complete() {
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
        assert!(folder.create_file(Path::new("a")).is_err(), "two files of one name");
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
    fn names_up_to_the_longest_are_written() {
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
    fn what_cannot_be_replaced_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        std::fs::create_dir(at("full")).unwrap();
        std::fs::write(at("full/file"), "").unwrap();
        std::fs::create_dir(at("empty")).unwrap();
        for (path, words) in [
            (at("full"), "but a folder; give the name of a file"),
            (at("empty"), "but a folder; give the name of a file"),
            (at("no/such"), "no/such: No such file or directory (os error 2): make the folder"),
            (at("file/x"), "Not a directory"),
            ("/dev/null".into(), "not a regular file"),
            ("/".into(), "not a name to write"),
            ("..".into(), "not a name to write"),
            ("".into(), "not a name to write"),
        ] {
            let message = check_file(&path).unwrap_err().to_string();
            assert!(message.contains(words), "{}: {message}", path.display());
        }
        for (path, words) in [
            (at("full"), "it is there already"),
            (at("file"), "it is there already"),
            (at("no/such"), "make the folder"),
            ("/proc".into(), "it is there already"),
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
    fn links_are_followed_and_modes_kept() {
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
            assert!(message.unwrap_err().to_string().contains("a link to nothing"));
        }
        symlink(at("loop"), at("loop")).unwrap();
        assert!(check_file(&at("loop")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_may_not_be_written_is_known_before() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o555)).unwrap();
        let path = folder.path().join("x");
        // Who may write everywhere, may write there.
        let is_allowed = File::create(&path).is_ok();
        _ = std::fs::remove_file(&path);
        assert_eq!((check_file(&path).is_ok(), check_folder(&path).is_ok()), (is_allowed, is_allowed));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn mount_points_are_known() {
        let metadata = |path: &str| std::fs::metadata(path).unwrap();
        assert!(is_mount_point(Path::new("/proc"), &metadata("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self"), &metadata("/proc/self")));
    }

    #[test]
    fn what_a_killed_writer_left_is_found_and_what_is_being_written_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (file, other) =
            (PartialFile::create(&path).unwrap(), PartialFolder::create(&folder.path().join("y")).unwrap());
        assert_eq!(leftovers(&path), [""; 0].map(PathBuf::from));
        for name in [".x.123-0.partial", ".x.y.123-0.partial", ".x..partial", ".x.1-0.part", "x.1-0.partial"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        // Of an earlier version, which drew letters.
        std::fs::create_dir(folder.path().join(".x.aB3dEf.partial")).unwrap();
        let found = leftovers(&path);
        let found: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(found, [".x.123-0.partial", ".x.aB3dEf.partial"]);
        drop((file, other));
    }
}
