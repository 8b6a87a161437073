//! A process that ends leaves no half-written file, and a file truncated during reading is an error. A child process
//! (this test binary again) writes or reads; the parent sends signals, sets limits and truncates files.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use model_files::{Tensors, f32s, raw};
use nvfp4::checkpoint::{Checkpoint, TensorFile, TensorWriter, handle_signals};
use nvfp4::checkpoint::{Conversion, Dtype, Format, Options};

const PART: &str = "NVFP4_TEST_CHILD";

/// Bytes that a child writes; more than the limit that the file-size test sets.
const BYTES: usize = 1 << 20;

/// Role of a child process; does nothing in the parent.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    handle_signals();
    let say = |what: &str| {
        // `println!` would be captured by the test harness.
        writeln!(std::io::stderr(), "{what}").unwrap();
    };
    let wait = || _ = std::io::stdin().read(&mut [0]).unwrap();
    let writer = || TensorWriter::create("out.safetensors".as_ref(), None, vec![("a".into(), Dtype::U8, vec![BYTES])]);
    match &part[..] {
        "write" => {
            let _writer = writer().unwrap();
            say("ready");
            wait();
        }
        "write folder" => {
            let checkpoint = Checkpoint::open("in".as_ref()).unwrap();
            let conversion = Conversion::new(&checkpoint, &Options::new(Format::ModelOpt, &|_| true)).unwrap();
            let mut said = false;
            let written = conversion.write("out".as_ref(), |_| {
                if !std::mem::replace(&mut said, true) {
                    say("ready");
                    wait();
                }
            });
            written.unwrap();
        }
        "write beyond a limit" => {
            let error = writer().and_then(|mut writer| writer.write("a", &[0; BYTES])).unwrap_err();
            say(&format!("ready {error}"));
        }
        "allocate" => {
            let _writer = writer().unwrap();
            say("ready");
            wait();
            std::hint::black_box(vec![1u8; isize::MAX as usize]);
        }
        "read" => {
            let file = TensorFile::open("in.safetensors".as_ref()).unwrap();
            say("ready");
            wait();
            let sum: u64 = file.tensor("a").unwrap().data.iter().map(|&byte| u64::from(byte)).sum();
            say(&format!("{sum} {:?}", file.check_unchanged().map_err(|error| error.to_string())));
        }
        other => panic!("{other}"),
    }
}

struct Running {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Running {
    /// Starts a child and waits until it is ready; returns its other output.
    fn begin(folder: &Path, part: &str, before: fn()) -> (Self, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.current_dir(folder).env(PART, part).args(["--exact", "child", "--nocapture"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: `before` calls only `setrlimit` and `signal`, which are safe between fork and exec.
        unsafe {
            command.pre_exec(move || {
                // `nohup` and background shells ignore some signals, and children inherit this.
                for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                before();
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut running = Self { child, stderr };
        let said = running.line();
        let said = said.strip_prefix("ready").unwrap_or_else(|| panic!("{part}: {said}")).trim().to_owned();
        (running, said)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).unwrap();
        line
    }

    fn go_on(&mut self) {
        self.child.stdin.take().unwrap().write_all(b"x").unwrap();
    }

    fn kill(&self, signal: i32) {
        // SAFETY: the child was not waited for, so its process id is still valid.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Returns the signal that ended the child.
    fn signal(mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes a sharded model in floats.
fn write_model(folder: &Path) {
    std::fs::create_dir(folder.join("in")).unwrap();
    let mut tensors = Tensors::default();
    for layer in 0..4 {
        tensors.set(format!("model.layers.{layer}.mlp.gate_proj.weight"), f32s(&[8, 16], &[1.0; 128]));
    }
    tensors.write_sharded(&folder.join("in"), 2);
}

#[test]
fn ending_signals_leave_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("out.safetensors"), "old").unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGXCPU, libc::SIGUSR1] {
        let (child, _) = Running::begin(folder, "write", || ());
        assert_eq!(names(folder).len(), 2, "the old file and a partial");
        child.kill(signal);
        assert_eq!(child.signal(), Some(signal));
        assert_eq!(names(folder), ["out.safetensors"], "signal {signal}");
        assert_eq!(std::fs::read(folder.join("out.safetensors")).unwrap(), b"old");
    }
}

#[test]
fn unfinished_folder_is_removed_with_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_model(folder);
    let (child, _) = Running::begin(folder, "write folder", || ());
    assert_eq!(names(folder).len(), 2);
    child.kill(libc::SIGTERM);
    assert_eq!(child.signal(), Some(libc::SIGTERM));
    assert_eq!(names(folder), ["in"]);
}

#[test]
fn ignored_signal_stays_ignored() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let (mut child, _) = Running::begin(folder.path(), "write folder", || {
        // SAFETY: `signal` takes plain integers.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    });
    child.kill(libc::SIGHUP);
    child.go_on();
    assert_eq!(child.signal(), None);
    assert_eq!(names(folder.path()), ["in", "out"]);
}

#[test]
fn exceeded_file_size_limit_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (child, said) = Running::begin(folder.path(), "write beyond a limit", || {
        let limit = libc::rlimit { rlim_cur: BYTES as u64 / 2, rlim_max: BYTES as u64 / 2 };
        // SAFETY: the pointer refers to a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
    });
    assert!(said.starts_with("cannot write: ") && said.contains("out.safetensors: File too large"), "{said}");
    assert_eq!((child.signal(), names(folder.path())), (None, vec![]));
}

#[test]
fn failed_allocation_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, _) = Running::begin(folder.path(), "allocate", || ());
    assert_eq!(names(folder.path()).len(), 1);
    child.go_on();
    assert_eq!((child.signal(), names(folder.path())), (Some(libc::SIGABRT), vec![]));
}

#[test]
fn leftovers_of_sigkill_are_found_by_the_next_run() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.safetensors");
    let (child, _) = Running::begin(folder.path(), "write", || ());
    assert!(nvfp4::checkpoint::leftovers(&target).is_empty(), "its writer lives");
    child.kill(libc::SIGKILL);
    assert_eq!(child.signal(), Some(libc::SIGKILL));
    let left = nvfp4::checkpoint::leftovers(&target);
    assert_eq!(
        left.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect::<Vec<_>>(),
        names(folder.path())
    );
    assert_eq!(left.len(), 1);
}

#[test]
fn file_changed_while_mapped_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    type Change = fn(&Path);
    let cut: Change = |path| std::fs::File::options().write(true).open(path).unwrap().set_len(100).unwrap();
    let emptied: Change = |path| std::fs::write(path, "").unwrap();
    let changed: Change = |path| {
        std::thread::sleep(Duration::from_millis(20));
        let file = std::fs::File::options().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], 1000).unwrap();
    };
    for (change, words) in [(cut, "truncated while"), (emptied, "truncated while"), (changed, "changed while")] {
        let mut tensors = Tensors::default();
        tensors.set("a", raw(Dtype::U8, &[BYTES], &vec![3; BYTES])).write(&path);
        let (mut child, _) = Running::begin(folder.path(), "read", || ());
        change(&path);
        child.go_on();
        let line = child.line();
        assert!(line.contains("in.safetensors: the file ") && line.contains(words), "{words}: {line}");
        assert_eq!(child.signal(), None);
    }
}

#[test]
fn file_replaced_while_mapped_stays_readable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let tensors = |byte| {
        let mut tensors = Tensors::default();
        tensors.set("a", raw(Dtype::U8, &[BYTES], &vec![byte; BYTES])).clone()
    };
    tensors(3).write(&path);
    let (mut child, _) = Running::begin(folder.path(), "read", || ());
    std::fs::rename(tensors(4).write(&folder.path().join("new")), &path).unwrap();
    child.go_on();
    assert_eq!(child.line(), format!("{} Ok(())\n", 3 * BYTES));
}

/// Signals at random moments leave either the complete folder or nothing.
#[test]
fn signals_never_leave_a_partial_folder() {
    let outer = tempfile::tempdir().unwrap();
    write_model(outer.path());
    for round in 0..20u64 {
        let (mut child, _) = Running::begin(outer.path(), "write folder", || ());
        child.go_on();
        std::thread::sleep(Duration::from_micros(97 * round));
        child.kill(libc::SIGTERM);
        child.signal();
        match &names(outer.path())[..] {
            [input] => assert_eq!(input, "in"),
            [input, output] => {
                assert_eq!((&input[..], &output[..]), ("in", "out"));
                Checkpoint::open(&outer.path().join("out")).expect("complete");
                std::fs::remove_dir_all(outer.path().join("out")).unwrap();
            }
            other => panic!("round {round}: {other:?}"),
        }
    }
}
