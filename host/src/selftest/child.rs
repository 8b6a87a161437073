//! A self-test in a process of its own, and the process that waits for it: a hang costs a time limit and a trap a new process.
//!
//! The child runs parts in order and says a line of JSON for each. A part that takes the device's context with it, or that the child
//! does not come back from, has failed; the next child goes on behind it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::problems::{self, Card, Part};
use crate::backend::cuda::{FailedPart, Options};
use crate::error::Error;
use crate::kernels::Subject;

/// How long the parent waits for a line of the child's.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Until the first part is done: the driver starts, and its compiler makes machine code of PTX.
    pub first: Duration,
    /// For each further part.
    pub part: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { first: Duration::from_secs(180), part: Duration::from_secs(30) }
    }
}

/// Called after each part, with how many there are.
pub type Progress<'p> = &'p dyn Fn(usize);

/// What a self-test has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Parts that were right.
    pub passed: Vec<String>,
    /// The others, and what was wrong.
    pub failed: Vec<FailedPart>,
}

/// Children of one self-test that may hang or trap; what is not tried then has failed.
const MAX_LOST: usize = 3;

/// How long a process that was killed may take to go: its driver frees what it had on the device.
const MAX_END: Duration = Duration::from_secs(10);

/// What a child says, a line each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    /// The device is open.
    Ready,
    /// The part was right.
    Right,
    /// It was wrong, in words.
    Wrong(String),
    /// The driver failed in it. The child ends, since the context may be lost.
    Lost(String),
    /// It could not be tried, which says nothing of the kernel.
    Untried(String),
}

/// The child: tries the parts of a subject from number `from` on, and says on `out` what came of each.
///
/// # Errors
/// If the device cannot be opened, or nobody listens.
pub fn serve(
    subject: Subject,
    from: usize,
    ordinal: u32,
    options: &Options,
    out: &mut impl Write,
) -> Result<(), Error> {
    let mut say = |said: &Said| {
        let line = serde_json::to_string(said).expect("words");
        let told = writeln!(out, "{line}").and_then(|()| out.flush());
        told.map_err(|error| Error::io("standard output".as_ref(), error))
    };
    let mut card = Card::open(ordinal, options)?;
    say(&Said::Ready)?;
    for part in problems::parts(subject).iter().skip(from) {
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

/// Whether the device's memory is taken, by another process perhaps.
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

/// The parent: has a subject tried, part by part. `command` is that of a process which calls [`serve`] from a part on, with its standard
/// output.
///
/// # Errors
/// If it cannot be tried: no process starts, the device cannot be opened, or its memory is taken. That is no verdict.
pub fn prove(
    subject: Subject,
    command: &dyn Fn(usize) -> Command,
    limits: Limits,
    progress: Progress<'_>,
) -> Result<Proof, Error> {
    let parts = problems::parts(subject);
    let (mut proof, mut lost) = (Proof::default(), 0);
    let mut note = |part: &Part, why: Option<String>| {
        match why {
            None => proof.passed.push(part.name.clone()),
            Some(why) => proof.failed.push(FailedPart { part: part.name.clone(), why }),
        }
        progress(parts.len());
    };
    let cannot = |why: String| Error::Invalid(why).at(format_args!("self-test of {}", subject.name()));
    let mut done = 0;
    while done < parts.len() && lost < MAX_LOST {
        let mut child = Tried::start(command(done)).map_err(|error| cannot(format!("no process starts: {error}")))?;
        match child.hear(limits.first) {
            Heard::Said(Said::Ready) => {}
            heard => return Err(cannot(format!("the device was not opened: {}", child.end(heard, limits.first)))),
        }
        let mut limit = limits.first;
        for part in &parts[done..] {
            done += 1;
            let why = match child.hear(limit) {
                Heard::Said(Said::Untried(why)) => return Err(cannot(why)),
                Heard::Said(Said::Right) => None,
                Heard::Said(Said::Wrong(why)) => Some(why),
                lost_in_it => {
                    lost += 1;
                    note(part, Some(child.end(lost_in_it, limit)));
                    break;
                }
            };
            note(part, why);
            limit = limits.part;
        }
    }
    for part in &parts[done..] {
        note(part, Some(format!("not tried, since {MAX_LOST} parts before it took their process with them")));
    }
    Ok(proof)
}

/// A child that is tried.
struct Tried {
    child: Child,
    lines: Receiver<Line>,
    /// What it wrote last to its standard error.
    last_words: String,
}

/// A line of the child's.
enum Line {
    Out(String),
    Error(String),
}

/// What came of waiting for the child.
enum Heard {
    Said(Said),
    /// It has closed its output.
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

    /// Waits for what the child says next.
    fn hear(&mut self, limit: Duration) -> Heard {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                // A driver may write lines of its own.
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

    /// Ends the child, and says how it came to that.
    fn end(&mut self, heard: Heard, limit: Duration) -> String {
        // One that has closed its output is ending by itself, and its status says how.
        let status = self.stop(if matches!(heard, Heard::End) { MAX_END } else { Duration::ZERO });
        let ended = match heard {
            Heard::Nothing => return format!("it hung: no answer within {} s", limit.as_secs_f32()),
            Heard::Said(Said::Lost(why)) => return why,
            Heard::Said(_) => return "an answer to another question".into(),
            Heard::End => {
                status.map_or("its process does not end".into(), |status| format!("its process ended ({status})"))
            }
        };
        if self.last_words.is_empty() { ended } else { format!("{ended}, {}", crate::printable(&self.last_words)) }
    }

    /// Kills the child if it still runs after so long. What a driver holds up does not hold this process up.
    fn stop(&mut self, patience: Duration) -> Option<ExitStatus> {
        let begin = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begin.elapsed() < patience + MAX_END => {
                    if begin.elapsed() >= patience {
                        // It may have ended by itself since.
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

/// Sends each line of a pipe, until it is closed or nobody wants more.
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
