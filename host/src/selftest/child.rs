//! A self-test in a separate process, and the parent process that waits for it: a hang costs a time limit, and a trap
//! costs a process.
//!
//! The child runs parts in order and writes a line of JSON for each. A part that destroys the device's context, or from
//! which the child does not return, has failed; the next child continues with the part after it.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::problems::{self, Card, Fault, Part};
use crate::Error;
use crate::backend::cuda::{FailedPart, Options};
use nvfp4_kernels::Subject;

/// How long the parent waits for a line of the child.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limit until the first part is done; the driver starts and compiles the PTX in this time.
    pub first: Duration,
    /// Limit for each further part.
    pub part: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { first: Duration::from_secs(180), part: Duration::from_secs(30) }
    }
}

/// Called after each part with the total number of parts.
pub type Progress<'p> = &'p dyn Fn(usize);

/// Result of a self-test.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Names of the parts with correct results.
    pub passed: Vec<String>,
    /// Failed parts, with reasons.
    pub failed: Vec<FailedPart>,
}

/// Maximum number of children of a self-test that may hang or trap; the remaining parts then count as failed.
const MAX_LOST: usize = 3;

/// How long a killed process may take to end; its driver frees its device memory in this time.
const MAX_END: Duration = Duration::from_secs(10);

/// Message of a child, one per line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    /// The device is open. For each part: the instances that its failure refuses ([`Part::instances`]).
    Ready(Vec<Vec<String>>),
    /// The part's result was correct.
    Right,
    /// The part's result was wrong.
    Wrong(Fault),
    /// The driver failed in the part. The child ends, because the context may be lost.
    Lost(String),
    /// The part could not run, which says nothing about the kernel.
    Untried(String),
}

/// The child: runs the parts of a subject from number `from` on, and writes each result to `out`.
///
/// # Errors
/// Returns an error if the device cannot be opened, or `out` is closed.
pub fn serve(
    subject: Subject,
    from: usize,
    ordinal: u32,
    options: &Options,
    out: &mut impl Write,
) -> Result<(), Error> {
    let mut say = |said: &Said| {
        let line = serde_json::to_string(said).expect("a message has only strings");
        let told = writeln!(out, "{line}").and_then(|()| out.flush());
        told.map_err(|error| Error::io("standard output".as_ref(), error))
    };
    let mut card = Card::open(ordinal, options)?;
    let parts = problems::parts(subject);
    say(&Said::Ready(parts.iter().map(|part| part.instances(&card)).collect::<Result<_, _>>()?))?;
    for part in parts.iter().skip(from) {
        let said = try_part(part, &mut card);
        say(&said)?;
        if !matches!(said, Said::Right | Said::Wrong(_)) {
            break;
        }
    }
    Ok(())
}

fn try_part(part: &Part, card: &mut Card) -> Said {
    match part.run(card) {
        Ok(None) => Said::Right,
        Ok(Some(wrong)) => Said::Wrong(wrong),
        Err(error) if is_out_of_memory(&error) => Said::Untried(error.to_string()),
        Err(error) => Said::Lost(error.to_string()),
    }
}

/// Returns `true` if the device has no free memory, perhaps because of another process.
fn is_out_of_memory(error: &Error) -> bool {
    /// `CUDA_ERROR_OUT_OF_MEMORY` (cuda.h).
    const OUT_OF_MEMORY: i32 = 2;
    match error {
        Error::At { error, .. } => is_out_of_memory(error),
        Error::Driver { source, .. } => {
            source.downcast_ref::<cuda_driver::Failure>().is_some_and(|failure| failure.code == OUT_OF_MEMORY)
        }
        _ => false,
    }
}

/// The parent: tests a subject part by part. `command(part)` returns a command whose process calls [`serve`] with
/// `from = part` and its standard output.
///
/// # Errors
/// Returns an error, and no verdict, if the test cannot run: no process starts, the device cannot be opened, or its
/// memory is full.
pub fn prove(
    subject: Subject,
    command: &dyn Fn(usize) -> Command,
    limits: Limits,
    progress: Progress<'_>,
) -> Result<Proof, Error> {
    let parts = problems::parts(subject);
    let (mut proof, mut lost) = (Proof::default(), 0);
    // Instances of each part, of the parts that ended their process, and of the parts that passed.
    let mut instances: Vec<Vec<String>> = Vec::new();
    let (mut ended, mut right) = (BTreeSet::new(), BTreeSet::new());
    // Parts that are not tested, with the reason.
    let mut untested = Vec::new();
    let cannot = |why: String| Error::Invalid(why).at(format_args!("self-test of {}", subject.name()));
    let mut done = 0;
    while done < parts.len() && lost < MAX_LOST {
        // An instance that hangs is launched by many parts of a layer, and each would take a time limit.
        let ended_before = |of_part: &Vec<String>, ended: &BTreeSet<String>| {
            of_part.iter().find(|entry| ended.contains(*entry)).cloned()
        };
        if let Some(entry) = instances.get(done).and_then(|of_part| ended_before(of_part, &ended)) {
            untested.push((done, format!("not tested, because an earlier part with {entry} ended its process")));
            done += 1;
            progress(parts.len());
            continue;
        }
        let mut child =
            Tried::start(command(done)).map_err(|error| cannot(format!("cannot start a process: {error}")))?;
        match child.hear(limits.first) {
            Heard::Said(Said::Ready(of_parts)) if of_parts.len() == parts.len() => instances = of_parts,
            heard => return Err(cannot(format!("cannot open the device: {}", child.end(heard, limits.first)))),
        }
        let mut limit = limits.first;
        for (part, of_part) in parts.iter().zip(&instances).skip(done) {
            if ended_before(of_part, &ended).is_some() {
                break;
            }
            done += 1;
            let heard = child.hear(limit);
            progress(parts.len());
            let part = part.name.clone();
            match heard {
                Heard::Said(Said::Untried(why)) => return Err(cannot(why)),
                Heard::Said(Said::Right) => {
                    right.extend(of_part.iter().cloned());
                    proof.passed.push(part);
                }
                Heard::Said(Said::Wrong(Fault { why, instances })) => {
                    proof.failed.push(FailedPart { part, why, instances });
                }
                lost_in_it => {
                    lost += 1;
                    ended.extend(of_part.iter().cloned());
                    let why = child.end(lost_in_it, limit);
                    proof.failed.push(FailedPart { part, why, instances: of_part.clone() });
                    break;
                }
            }
            limit = limits.part;
        }
    }
    let after = (done..parts.len()).map(|index| {
        progress(parts.len());
        (index, format!("not tested, because {MAX_LOST} earlier parts ended their process"))
    });
    for (index, why) in untested.into_iter().chain(after) {
        // An instance that a part with a right result launches is tested there.
        let of_part = &instances[index];
        let not_right: Vec<_> = of_part.iter().filter(|entry| !right.contains(*entry)).cloned().collect();
        let instances = if not_right.is_empty() { of_part.clone() } else { not_right };
        proof.failed.push(FailedPart { part: parts[index].name.clone(), why, instances });
    }
    Ok(proof)
}

/// A running child.
struct Tried {
    child: Child,
    lines: Receiver<Line>,
    /// Last line that the child wrote to its standard error.
    last_words: String,
}

/// A line of the child's output.
enum Line {
    Out(String),
    Error(String),
}

/// Result of waiting for the child.
enum Heard {
    Said(Said),
    /// The child closed its output.
    End,
    Nothing,
}

impl Tried {
    fn start(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (out, error) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let (sender, lines) = channel();
        read_lines(out, sender.clone(), Line::Out);
        read_lines(error, sender, Line::Error);
        Ok(Self { child, lines, last_words: String::new() })
    }

    /// Waits for the child's next message.
    fn hear(&mut self, limit: Duration) -> Heard {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                // The driver may write lines too.
                Ok(Line::Out(line)) => {
                    if let Ok(said) = serde_json::from_str(&line) {
                        return Heard::Said(said);
                    }
                }
                Ok(Line::Error(line)) if line.trim().is_empty() => {}
                Ok(Line::Error(line)) => self.last_words = line,
                Err(RecvTimeoutError::Disconnected) => return Heard::End,
                Err(RecvTimeoutError::Timeout) => return Heard::Nothing,
            }
        }
    }

    /// Ends the child; returns the reason as text.
    fn end(&mut self, heard: Heard, limit: Duration) -> String {
        // A child that closed its output is ending by itself; its status tells the reason.
        let status = self.stop(if matches!(heard, Heard::End) { MAX_END } else { Duration::ZERO });
        let ended = match heard {
            Heard::Nothing => return format!("it hung: no answer within {} s", limit.as_secs_f32()),
            Heard::Said(Said::Lost(why)) => return why,
            Heard::Said(_) => return "the process sent an unexpected message".into(),
            Heard::End => {
                status.map_or("its process does not end".into(), |status| format!("its process ended ({status})"))
            }
        };
        if self.last_words.is_empty() { ended } else { format!("{ended}, {}", crate::printable(&self.last_words)) }
    }

    /// Kills the child if it still runs after `patience`. A child that the driver blocks does not block this process.
    fn stop(&mut self, patience: Duration) -> Option<ExitStatus> {
        let begin = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begin.elapsed() < patience + MAX_END => {
                    if begin.elapsed() >= patience {
                        // The child may have ended by itself in the meantime.
                        let _ = self.child.kill();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                _ => return None,
            }
        }
    }
}

impl Drop for Tried {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Sends each line of a pipe until the pipe or the receiver is closed.
fn read_lines(pipe: impl std::io::Read + Send + 'static, to: Sender<Line>, line: fn(String) -> Line) {
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while pipe.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            if to.send(line(String::from_utf8_lossy(&bytes).into_owned())).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}
