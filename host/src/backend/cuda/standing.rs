//! Which kernels may compute on a card: those that have been verified on one, and those that a self-test there has found right. What
//! failed there is not used.
//!
//! This looks at verdicts alone. Nothing here tries a kernel or starts a process: that would take seconds, and an engine that opens a
//! device must not wait for it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use gpu_arch::Capability;

use super::verdicts::{Tried, Verdict, Verdicts};
use crate::error::Error;
use crate::kernels::builds::{self, Build};
use crate::kernels::linear::kernel_named;
use crate::kernels::moe::products_named;
use crate::kernels::subject::{Subject, UNFUSED, part_of};
use crate::kernels::{self, GroupedKernel};
use crate::plan::variant::{LaunchSchedule, Variant};
use crate::problem::Op;

/// A card, the code that runs on it, and what is known of that.
pub(super) struct Standing {
    pub card: Card,
    pub code: Code,
    pub verdicts: Verdicts,
}

/// What tells a card and its driver from others.
#[derive(Clone)]
pub(super) struct Card {
    pub name: String,
    pub capability: Capability,
    pub driver: String,
}

/// The code of kernels: the PTX built in, unless there are files.
#[derive(Default)]
pub(super) struct Code {
    /// Where cubin files are looked for.
    cubins: Option<PathBuf>,
    /// The kernel that was given as a file, with its place and its text.
    given: Option<(&'static str, PathBuf, Vec<u8>)>,
}

/// What machine code begins with.
const ELF: &[u8] = b"\x7fELF";

/// The code of a kernel for a card.
pub(super) struct KernelCode<'c> {
    pub bytes: Cow<'c, [u8]>,
    pub is_machine_code: bool,
    /// Where it is from.
    pub place: String,
}

impl Code {
    /// Reads the file that is given in place of a kernel, if one is.
    ///
    /// # Errors
    /// If it cannot be read, or is of no kernel.
    pub fn new(cubins: Option<PathBuf>, given: Option<PathBuf>) -> Result<Self, Error> {
        let read = |path: PathBuf| {
            let code = fs::read(&path).map_err(|source| Error::io(&path, source))?;
            let kernel = kernels::kernel_of(&code).map_err(|error| error.at(path.display()))?;
            Ok::<_, Error>((kernel.name(), path, code))
        };
        Ok(Self { cubins, given: given.map(read).transpose()? })
    }

    /// The kernel that was given as a file, and the file.
    pub fn given(&self) -> Option<(&'static str, &Path)> {
        self.given.as_ref().map(|(kernel, path, _)| (*kernel, path.as_path()))
    }

    /// A kernel's code: the file that was given for it, else machine code if there is a file of it, else the PTX built in.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of(&self, build: &'static Build, card: Capability) -> Result<KernelCode<'_>, Error> {
        if let Some((_, path, code)) = self.given.as_ref().filter(|(kernel, ..)| *kernel == build.kernel) {
            let (is_machine_code, place) = (code.starts_with(ELF), path.display().to_string());
            return Ok(KernelCode { bytes: code.into(), is_machine_code, place });
        }
        let cubin = self.cubins.as_ref().map(|folder| folder.join(builds::cubin_name(build, card)));
        if let Some(path) = cubin.filter(|path| path.exists()) {
            let code = fs::read(&path).map_err(|source| Error::io(&path, source))?;
            return Ok(KernelCode { bytes: code.into(), is_machine_code: true, place: path.display().to_string() });
        }
        let place = format!("kernel {} ({})", build.kernel, build.arch);
        Ok(KernelCode { bytes: build.ptx().as_bytes().into(), is_machine_code: false, place })
    }

    /// A number that changes with a kernel's code. What is built in is looked through once a process: some of it is tens of megabytes.
    fn hash(&self, build: &'static Build, card: Capability) -> Result<u64, Error> {
        static BUILT_IN: Mutex<BTreeMap<(&str, &str), u64>> = Mutex::new(BTreeMap::new());
        let code = self.of(build, card)?;
        if let Cow::Borrowed(bytes) = code.bytes
            && bytes.as_ptr() == build.ptx().as_ptr()
        {
            let mut known = BUILT_IN.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(*known.entry((build.kernel, build.arch)).or_insert_with(|| hash_of(bytes)));
        }
        Ok(hash_of(&*code.bytes))
    }
}

/// The same number in every process of a program: no random keys.
fn hash_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Standing {
    /// What a verdict on a subject is about here.
    ///
    /// # Errors
    /// If a file of code cannot be read.
    pub fn tried(&self, subject: Subject) -> Result<Tried, Error> {
        let Card { name, capability, driver } = self.card.clone();
        let kernels = subject.kernels(capability).into_iter().flatten();
        // Code of another kernel of a layer's products takes the place of the card's own.
        let given = self.code.given().map(|(given, _)| given);
        let given = given.filter(|given| match subject {
            Subject::Moe => products_named(given).is_some(),
            Subject::Linear => kernel_named(given).is_some(),
            _ => false,
        });
        let names = kernels.map(|kernel| kernel.name()).chain(given);
        let builds = names.filter_map(|kernel| builds::find(kernel, capability));
        let hashes = builds.map(|build| self.code.hash(build, capability)).collect::<Result<Vec<_>, Error>>()?;
        let code = format!("{:016x}", hash_of(&(env!("CARGO_PKG_VERSION"), hashes)));
        Ok(Tried { subject: subject.name().into(), code, card: name, capability, driver })
    }

    /// The verdict on a subject, if there is one.
    ///
    /// # Errors
    /// If its file is none, or a file of code cannot be read.
    pub fn verdict(&self, subject: Subject) -> Result<Option<Verdict>, Error> {
        // Text of megabytes is looked through for nothing otherwise.
        if !self.verdicts.exist() {
            return Ok(None);
        }
        self.verdicts.read(&self.tried(subject)?)
    }

    /// The kernel that computes groups here unasked, if one does: the first that is verified, or has passed. Says of others, which
    /// would come before it, why they do not.
    pub fn default_kernel(&self) -> (Option<GroupedKernel>, Vec<String>) {
        let (mut notes, mut default) = (Vec::new(), None);
        for kernel in GroupedKernel::all().filter(|kernel| Subject::Groups(*kernel).runs_on(self.card.capability)) {
            match self.why_not(Subject::Groups(kernel), |part| is_chosen(kernel, part)) {
                None => {
                    default = Some(kernel);
                    break;
                }
                Some(note) => notes.push(note),
            }
        }
        let instead = default.map_or("nothing".into(), |kernel| kernel.name().to_owned());
        notes.iter_mut().for_each(|note| note.push_str(&format!("; until then {instead} computes")));
        (default, notes)
    }

    /// Refuses a subject that is not to be used unasked.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with what is wrong and what to do.
    pub fn check(&self, subject: Subject) -> Result<(), Error> {
        self.why_not(subject, |_| true).map_or(Ok(()), |note| Err(Error::NotComputed(note)))
    }

    /// Why a subject is not used unasked; nothing if it is. Only some of its parts are of interest.
    fn why_not(&self, subject: Subject, of_interest: impl FnMut(&str) -> bool) -> Option<String> {
        let (name, card) = (subject.name(), self.card.words());
        match self.verdict(subject) {
            Ok(Some(verdict)) => verdict.failure(of_interest).map(|failed| {
                format!(
                    "{name} has failed its self-test on {card} ({failed}): `nvfp4 selftest --again` tries once more, --force \
                     (Verdicts::Ignored) does not ask"
                )
            }),
            // Nothing else computes these layers.
            Ok(None) if self.verdicts == Verdicts::Ignored && !matches!(subject, Subject::Groups(_)) => None,
            Ok(None) if subject.proven(self.card.capability) => None,
            Ok(None) => Some(format!("{name} has not proved itself on {card}: `nvfp4 selftest` lets it, once")),
            Err(_) if subject.proven(self.card.capability) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// Refuses what has failed here of a variant that a kernel computes: the instance that it names, or else those that may be chosen.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong and what to do.
    pub fn check_groups(&self, kernel: GroupedKernel, op: Op, variant: Variant) -> Result<(), Error> {
        let named = variant.instance.map(|name| part_of(op, name));
        self.refuse(kernel, |part| match &named {
            Some(named) => part == named,
            None => part.starts_with(op.name()) && is_chosen(kernel, part),
        })?;
        if variant.schedule == LaunchSchedule::Unfused {
            self.refuse(GroupedKernel::portable(), |part| part == UNFUSED)?;
        }
        Ok(())
    }

    fn refuse(&self, kernel: GroupedKernel, of_interest: impl FnMut(&str) -> bool) -> Result<(), Error> {
        let Ok(Some(verdict)) = self.verdict(Subject::Groups(kernel)) else { return Ok(()) };
        verdict.failure(of_interest).map_or(Ok(()), |failed| {
            Err(Error::Invalid(format!(
                "{} has failed its self-test on {} ({failed}); take another, or --force (Verdicts::Ignored)",
                kernel.name(),
                self.card.words()
            )))
        })
    }
}

impl Card {
    fn words(&self) -> String {
        format!("{} with driver {}", self.name, self.driver)
    }
}

/// Whether a part of a kernel's self-test runs an instance that is taken unasked.
fn is_chosen(kernel: GroupedKernel, part: &str) -> bool {
    [Op::Gated, Op::Plain].into_iter().any(|op| {
        let chosen = |name: &&str| kernel.get().chosen(op, name);
        kernel.instances(op).into_iter().filter(chosen).any(|name| part_of(op, name) == part)
    })
}
