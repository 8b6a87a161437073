//! Decides which kernels may compute on a GPU: kernels verified on GPUs of its kind, and kernels whose self-test has
//! passed on this GPU. Instances that failed the self-test are not used, and a kernel without another instance is not
//! used either.
//!
//! This file only reads verdicts. It runs no kernel and starts no process: that would take seconds, and an engine must
//! not wait when it opens a device.

use std::borrow::Cow;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use gpu_arch::Capability;

use super::verdicts::{FailedPart, Tried, Verdict, Verdicts};
use crate::Error;
use crate::problem::Op;
use nvfp4_kernels::builds::{self, Build};
use nvfp4_kernels::kernel::{Kernel, refused_of};
use nvfp4_kernels::linear::kernel_named;
use nvfp4_kernels::moe::products_named;
use nvfp4_kernels::subject::{Subject, UNFUSED, odd_part_of, part_of};
use nvfp4_kernels::variant::{LaunchSchedule, Variant};
use nvfp4_kernels::{GroupedKernel, Refused, kernel_of};

/// A GPU, the code that runs on it, and the verdicts on this code.
pub(super) struct Standing {
    pub card: Card,
    pub code: Code,
    pub verdicts: Verdicts,
}

/// Identity of a GPU and its driver.
#[derive(Clone)]
pub(super) struct Card {
    pub name: String,
    pub capability: Capability,
    pub driver: String,
}

/// Code of the kernels: the built-in code, unless files replace it.
#[derive(Default)]
pub(super) struct Code {
    /// Folder in which cubin files are searched.
    cubins: Option<PathBuf>,
    /// Kernel that was given as a file, with the path and the content.
    given: Option<(&'static str, PathBuf, Vec<u8>)>,
}

/// First bytes of machine code.
const ELF: &[u8] = b"\x7fELF";

/// Code of one kernel for a GPU.
pub(super) struct KernelCode<'c> {
    pub bytes: Cow<'c, [u8]>,
    pub is_machine_code: bool,
    /// Whether the code was built into this program.
    pub is_built_in: bool,
    /// Source of the code, for error messages.
    pub place: String,
}

impl Code {
    /// Reads the given file that replaces a kernel, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read, or contains no entry of a kernel.
    pub fn new(cubins: Option<PathBuf>, given: Option<PathBuf>) -> Result<Self, Error> {
        let read = |path: PathBuf| {
            let code = fs::read(&path).map_err(|source| Error::io(&path, source))?;
            let kernel = kernel_of(&code).map_err(|error| error.at(path.display()))?;
            Ok::<_, Error>((kernel.name(), path, code))
        };
        Ok(Self { cubins, given: given.map(read).transpose()? })
    }

    /// Kernel that was given as a file, and the path.
    pub fn given(&self) -> Option<(&'static str, &Path)> {
        self.given.as_ref().map(|(kernel, path, _)| (*kernel, path.as_path()))
    }

    /// Returns the code of a kernel: the given file if it is for this kernel, else a cubin file if there is one, else
    /// the built-in machine code for this GPU, else the built-in PTX.
    ///
    /// # Errors
    /// [`Error::Io`] if the cubin file cannot be read.
    pub fn of(&self, build: &'static Build, card: Capability) -> Result<KernelCode<'_>, Error> {
        if let Some(file) = self.file(build, card)? {
            return Ok(file);
        }
        let Some(code) = build.machine_code(card) else { return Ok(Self::ptx(build)) };
        let place = format!("kernel {} (machine code for {})", build.kernel, code.arch);
        Ok(KernelCode { bytes: code.unpack().into(), is_machine_code: true, is_built_in: true, place })
    }

    /// Returns the built-in PTX of a kernel.
    pub fn ptx(build: &'static Build) -> KernelCode<'static> {
        let place = format!("kernel {} ({})", build.kernel, build.arch);
        KernelCode { bytes: build.ptx().as_bytes().into(), is_machine_code: false, is_built_in: true, place }
    }

    /// Returns the file that replaces the built-in code of a kernel, if there is one.
    fn file(&self, build: &Build, card: Capability) -> Result<Option<KernelCode<'_>>, Error> {
        if let Some((_, path, code)) = self.given.as_ref().filter(|(kernel, ..)| *kernel == build.kernel) {
            let (is_machine_code, place) = (code.starts_with(ELF), path.display().to_string());
            return Ok(Some(KernelCode { bytes: code.into(), is_machine_code, is_built_in: false, place }));
        }
        let cubin = self.cubins.as_ref().map(|folder| folder.join(builds::cubin_name(build, card)));
        let Some(path) = cubin.filter(|path| path.exists()) else { return Ok(None) };
        let bytes = fs::read(&path).map_err(|source| Error::io(&path, source))?.into();
        Ok(Some(KernelCode { bytes, is_machine_code: true, is_built_in: false, place: path.display().to_string() }))
    }

    /// Hash of a kernel's code. The hash of built-in code covers machine code and PTX: which of them the driver loads
    /// follows from the driver's version, which is part of a verdict's key.
    fn hash(&self, build: &'static Build, card: Capability) -> Result<u64, Error> {
        Ok(self.file(build, card)?.map_or_else(|| build.hash(card), |file| hash_of(&*file.bytes)))
    }
}

/// Hash without random keys, so that every process of a program computes the same number.
fn hash_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Standing {
    /// Returns the key of a verdict on a subject for this GPU.
    ///
    /// # Errors
    /// If a file of code cannot be read.
    pub fn tried(&self, subject: Subject) -> Result<Tried, Error> {
        let Card { name, capability, driver } = self.card.clone();
        let kernels = subject.kernels(capability).into_iter().flatten();
        // The given code of another kernel for a layer's products replaces the GPU's own kernel.
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

    /// Returns the verdict on a subject, if there is one.
    ///
    /// # Errors
    /// If the verdict's file is invalid, or a file of code cannot be read.
    pub fn verdict(&self, subject: Subject) -> Result<Option<Verdict>, Error> {
        // Without verdicts, skip hashing megabytes of code.
        if !self.verdicts.exist() {
            return Ok(None);
        }
        self.verdicts.read(&self.tried(subject)?)
    }

    /// Returns the instances that have failed self-tests on this GPU, with reasons. The plan does not choose them.
    pub fn refused(&self) -> Refused {
        let verdicts =
            Subject::of_card(self.card.capability).filter_map(|subject| self.verdict(subject).ok().flatten());
        Refused::new(verdicts.flat_map(|verdict| {
            verdict.failed.into_iter().flat_map(|failed| {
                let reason = failed.to_string();
                failed.instances.into_iter().map(move |entry| (entry, reason.clone()))
            })
        }))
    }

    /// Returns the default kernel for groups: the first kernel that is proven or has passed its self-test, or `None`.
    /// Also returns a note for each kernel that would come before the default, with the reason why it is not used, and
    /// for each subject whose instances are partly left out.
    pub fn default_kernel(&self, refused: &Refused) -> (Option<GroupedKernel>, Vec<String>) {
        let (mut notes, mut default) = (Vec::new(), None);
        for kernel in GroupedKernel::all().filter(|kernel| Subject::Groups(*kernel).runs_on(self.card.capability)) {
            match self.why_not(Subject::Groups(kernel), refused) {
                None => {
                    default = Some(kernel);
                    break;
                }
                Some(note) => notes.push(note),
            }
        }
        let instead = default.map_or("nothing".into(), |kernel| kernel.name().to_owned());
        notes.iter_mut().for_each(|note| note.push_str(&format!("; until then {instead} computes")));
        notes.extend(self.left_out(refused));
        (default, notes)
    }

    /// Returns a note for each kernel that is used without some of its instances.
    fn left_out<'r>(&'r self, refused: &'r Refused) -> impl Iterator<Item = String> + 'r {
        let used = Subject::of_card(self.card.capability).filter(|subject| self.why_not(*subject, refused).is_none());
        let mut kernels: Vec<&dyn Kernel> = Vec::new();
        for kernel in used.filter_map(|subject| subject.kernels(self.card.capability)).flatten() {
            if kernels.iter().all(|other| other.name() != kernel.name()) {
                kernels.push(kernel);
            }
        }
        kernels.into_iter().filter_map(|kernel| {
            let out: Vec<_> =
                refused_of(kernel, refused).map(|(entry, reason)| format!("{entry} ({reason})")).collect();
            let serve = kernel.entries().len() - out.len();
            (!out.is_empty()).then(|| {
                format!(
                    "{} is used without instances that have failed their self-test on {}: {}; {serve} other entries \
                     serve; run `nvfp4 selftest --again` to repeat the test",
                    kernel.name(),
                    self.card.words(),
                    out.join(", ")
                )
            })
        })
    }

    /// Refuses a subject that must not be used by default.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the reason and the remedy.
    pub fn check(&self, subject: Subject) -> Result<(), Error> {
        self.why_not(subject, &Refused::default()).map_or(Ok(()), |note| Err(Error::NotComputed(note)))
    }

    /// Returns the reason why a subject is not used by default, or `None` if it is used. A kernel of groups is used if it
    /// serves both operations without the refused instances, and a layer's kernels if no part has failed that belongs to
    /// all instances.
    fn why_not(&self, subject: Subject, refused: &Refused) -> Option<String> {
        let (name, card) = (subject.name(), self.card.words());
        match self.verdict(subject) {
            Ok(Some(verdict)) => failure(subject, &verdict, refused).map(|failed| {
                format!(
                    "{name} has failed its self-test on {card} ({failed}); run `nvfp4 selftest --again` to \
                     repeat the test, or use --force (Verdicts::Ignored) to ignore its verdict"
                )
            }),
            // No other kernel computes these layers.
            Ok(None) if self.verdicts == Verdicts::Ignored && !matches!(subject, Subject::Groups(_)) => None,
            Ok(None) if subject.proven(self.card.capability) => None,
            Ok(None) => Some(format!("{name} was not tested on {card}; run `nvfp4 selftest` once")),
            Err(_) if subject.proven(self.card.capability) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// Refuses a variant whose instance has failed on this GPU. If the variant names none, refuses a kernel without an
    /// instance that serves the operation.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the reason and the remedy.
    pub fn check_groups(
        &self,
        kernel: GroupedKernel,
        op: Op,
        variant: Variant,
        refused: &Refused,
    ) -> Result<(), Error> {
        self.refuse(kernel, |verdict| match variant.instance {
            Some(name) => {
                verdict.failure(|failed| failed.part == part_of(op, name) || failed.part == odd_part_of(op, name))
            }
            None => failure_of_op(kernel, op, verdict, refused),
        })?;
        if variant.schedule == LaunchSchedule::Unfused {
            self.refuse(GroupedKernel::portable(), |verdict| verdict.failure(|failed| failed.part == UNFUSED))?;
        }
        Ok(())
    }

    fn refuse(
        &self,
        kernel: GroupedKernel,
        failure: impl for<'v> FnOnce(&'v Verdict) -> Option<&'v FailedPart>,
    ) -> Result<(), Error> {
        let Ok(Some(verdict)) = self.verdict(Subject::Groups(kernel)) else { return Ok(()) };
        failure(&verdict).map_or(Ok(()), |failed| {
            Err(Error::Invalid(format!(
                "{} has failed its self-test on {} ({failed}); choose another kernel, or use --force \
                 (Verdicts::Ignored)",
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

/// Returns the failed part that keeps a subject from being used, if there is one.
fn failure<'v>(subject: Subject, verdict: &'v Verdict, refused: &Refused) -> Option<&'v FailedPart> {
    match subject {
        Subject::Groups(kernel) => {
            [Op::Gated, Op::Plain].into_iter().find_map(|op| failure_of_op(kernel, op, verdict, refused))
        }
        _ => verdict.failure(|failed| failed.instances.is_empty()),
    }
}

/// Returns the first failed part of an operation that a kernel does not serve without the refused instances.
fn failure_of_op<'v>(kernel: GroupedKernel, op: Op, verdict: &'v Verdict, refused: &Refused) -> Option<&'v FailedPart> {
    let kernel = kernel.get();
    let is_chosen = |failed: &FailedPart| {
        let mut names = kernel.instances(op).into_iter().filter(|name| kernel.chosen(op, name));
        names.any(|name| part_of(op, name) == failed.part)
    };
    (!kernel.serves(op, refused)).then(|| verdict.failure(is_chosen)).flatten()
}
