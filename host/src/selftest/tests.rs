//! Self-tests on a driver whose kernels are Rust functions: correct, wrong in one bit, hanging, or trapping.

use std::collections::BTreeSet;
use std::env;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fake_cuda::{FakeCuda, Launch};
use kernels_gpu::tcgen05::gated_sm100::abi;

use super::child::Limits;
use super::problems::{ALL_SMS, Card, Fault, Part, parts};
use super::*;
use crate::backend::cuda::{Cuda, FailedPart, Verdicts};
use crate::generate::{self, Generator};
use crate::problem::{Group, Op, Weights};
use nvfp4_kernels::fake::{SMS, kernel};
use nvfp4_kernels::kernel::Kernel;
use nvfp4_kernels::{GroupedKernel, KERNELS};

/// Environment variable with the behavior of the child's driver.
const DRIVER: &str = "NVFP4_TEST_DRIVER";
/// Environment variable with the name of the subject that the child tests.
const SUBJECT: &str = "NVFP4_TEST_SUBJECT";
/// Environment variable with the first part that the child runs.
const FROM: &str = "NVFP4_TEST_FROM";

/// Instance that gives a wrong result; it can be chosen by name.
const WRONG: &str = "plain_sm100_t64";
const WRONG_PART: &str = "plain t64";

fn blackwell() -> Subject {
    Subject::named("gated_sm100").unwrap()
}

fn fake(major: i32, minor: i32, kernel: fn(&Launch)) -> FakeCuda {
    let fake = fake_cuda::install();
    // Blackwell's fake kernels expect a fixed number of SMs; Hopper's parts need more.
    fake.set_device(major, minor, if major == 9 { 132 } else { SMS as i32 });
    fake.on_launch(kernel);
    fake
}

/// Flips the last bit of a group's last element.
fn wrong_in_a_bit(launch: &Launch) {
    kernel(launch);
    if launch.kernel == WRONG {
        // SAFETY: the launch comes from a self-test, so its operands are alive and lie where the backend put them.
        unsafe {
            let parameter: abi::Launch = launch.parameter(0);
            let abi::Record { group, .. } = *(parameter.records as *const abi::Record);
            *(group.c as *mut u16).add((group.m * group.n) as usize - 1) ^= 1;
        }
    }
}

/// Instance of linear layers that hangs.
const HANGING: &str = "linear_sm80_bf16_t16";

fn hanging(launch: &Launch) {
    if [WRONG, HANGING].contains(&launch.kernel) {
        std::thread::sleep(Duration::from_secs(3600));
    }
    kernel(launch);
}

fn ending(launch: &Launch) {
    if launch.kernel == WRONG {
        eprintln!("the driver's last words");
        std::process::exit(7);
    }
    kernel(launch);
}

#[test]
#[ignore = "child process of other tests"]
fn child() {
    /// `CUDA_ERROR_LAUNCH_FAILED`, as after a trap, and `CUDA_ERROR_OUT_OF_MEMORY` (cuda.h).
    const TRAP: i32 = 719;
    const OUT_OF_MEMORY: i32 = 2;
    let (driver, from) = (env::var(DRIVER).unwrap(), env::var(FROM).unwrap().parse().unwrap());
    let fake = fake(
        10,
        0,
        match &driver[..] {
            "a bit" => wrong_in_a_bit,
            "hangs" => hanging,
            "ends" => ending,
            _ => kernel,
        },
    );
    match (&driver[..], from) {
        ("traps once", 0) | ("always traps", _) => fake.fail_next("cuEventElapsedTime", TRAP),
        ("is full", _) => fake.fail_next("cuMemAlloc_v2", OUT_OF_MEMORY),
        ("has no device", _) => fake.set_device_count(0),
        _ => {}
    }
    let subject = Subject::named(&env::var(SUBJECT).unwrap()).unwrap();
    serve(subject, from, 0, &Options::default(), &mut std::io::stdout()).unwrap();
}

/// Tests the Blackwell kernel in processes whose driver behaves as named.
fn tried(driver: &str) -> Result<Proof, Error> {
    tried_of(blackwell(), driver)
}

fn tried_of(subject: Subject, driver: &str) -> Result<Proof, Error> {
    let command = |from: usize| {
        let mut command = Command::new(env::current_exe().unwrap());
        // With one thread, libtest writes the beginning of a line before the test runs.
        command.args(["selftest::tests::child", "--exact", "--ignored", "--nocapture", "--test-threads=2"]);
        command.env(DRIVER, driver).env(SUBJECT, subject.name()).env(FROM, from.to_string());
        command
    };
    let limits = Limits { first: Duration::from_secs(60), part: Duration::from_secs(10) };
    prove(subject, &command, limits, &|_| ())
}

/// Returns the failed parts; every part must have run.
fn failed(driver: &str) -> Vec<FailedPart> {
    let Proof { passed, failed } = tried(driver).unwrap();
    assert_eq!(passed.len() + failed.len(), parts(blackwell()).len());
    failed
}

#[test]
fn correct_kernel_passes() {
    assert_eq!(failed("is right"), []);
}

#[test]
fn one_wrong_bit_fails_only_its_instance() {
    let failed = failed("a bit");
    let [failed] = &failed[..] else { panic!("{failed:?}") };
    assert_eq!(failed.part, WRONG_PART);
    assert!(
        failed.why.starts_with("1 of ") && failed.why.contains("the first group 0, row 199, column 135"),
        "{failed}"
    );
}

#[test]
fn parts_after_a_hang_are_tested() {
    let begin = Instant::now();
    let failed = failed("hangs");
    let [failed] = &failed[..] else { panic!("{failed:?}") };
    assert_eq!(failed.to_string(), format!("{WRONG_PART}: it hung: no answer within 10 s"));
    assert!(begin.elapsed() < Duration::from_secs(180));
}

#[test]
fn hanging_instance_of_many_parts_costs_one_time_limit() {
    let Proof { passed, failed } = tried_of(Subject::Linear, "hangs").unwrap();
    assert_eq!(passed.len() + failed.len(), parts(Subject::Linear).len());
    assert!(failed.len() > 2 && !passed.is_empty(), "{failed:?}");
    for (index, failed) in failed.iter().enumerate() {
        assert_eq!(failed.instances, [HANGING], "{failed}");
        let expected = match index {
            0 => "it hung: no answer within 10 s".to_owned(),
            _ => format!("not tested, because an earlier part with {HANGING} ended its process"),
        };
        assert_eq!(failed.why, expected);
    }
}

#[test]
fn trap_or_exit_fails_the_running_part() {
    let first = &parts(blackwell())[0].name;
    let trapped = failed("traps once");
    let [trap] = &trapped[..] else { panic!("{trapped:?}") };
    assert!(trap.part == *first && trap.why.contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{trap}");
    let ended = failed("ends");
    let [end] = &ended[..] else { panic!("{ended:?}") };
    assert_eq!((&end.part[..], end.why.contains("exit status: 7")), (WRONG_PART, true), "{end}");
    assert!(end.why.contains("the driver's last words"), "{end}");
}

#[test]
fn test_of_an_always_trapping_kernel_stops_early() {
    let failed = failed("always traps");
    assert_eq!(failed.len(), parts(blackwell()).len());
    assert!(
        failed[2].why.contains("719") && failed[3].why.starts_with("not tested, because 3 earlier parts"),
        "{failed:?}"
    );
}

#[test]
fn test_that_cannot_run_gives_no_verdict() {
    let error = tried("is full").unwrap_err().to_string();
    assert!(error.starts_with("self-test of gated_sm100: ") && error.contains("out of memory"), "{error}");
    let error = tried("has no device").unwrap_err().to_string();
    assert!(error.starts_with("self-test of gated_sm100: cannot open the device: its process ended"), "{error}");
    let nothing = |_: usize| Command::new("/no/such/program");
    let error = prove(blackwell(), &nothing, Limits::default(), &|_| ()).unwrap_err().to_string();
    assert!(error.contains("cannot start a process"), "{error}");
}

/// Names of the launched entries.
static LAUNCHED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn noted(launch: &Launch) {
    LAUNCHED.lock().unwrap().insert(launch.kernel.to_owned());
    kernel(launch);
}

/// Environment variable with the major compute capability of the card of [`child_of_a_card`].
const CARD: &str = "NVFP4_TEST_CARD";
/// Environment variable with the name of the check of [`child_of_a_card`].
const CHECK: &str = "NVFP4_TEST_CHECK";

/// Runs a check of a whole card in a process of its own: all tests of a process share one driver, and take turns.
fn check_card(check: &str, major: i32) {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["selftest::tests::child_of_a_card", "--exact", "--ignored", "--nocapture"]);
    let output = child.env(CHECK, check).env(CARD, major.to_string()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let is_run = text.contains("1 passed");
    assert!(output.status.success() && is_run, "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "child process of other tests"]
fn child_of_a_card() {
    let major = env::var(CARD).unwrap().parse().unwrap();
    match &env::var(CHECK).unwrap()[..] {
        "every entry" => check_every_entry(major),
        "every instance" => check_every_instance(major),
        other => panic!("{other}: no such check"),
    }
}

#[test]
fn every_launchable_entry_is_launched_and_correct_on_hopper() {
    check_card("every entry", 9);
}

#[test]
fn every_launchable_entry_is_launched_and_correct_on_blackwell() {
    check_card("every entry", 10);
}

#[test]
fn every_launchable_entry_is_launched_and_correct_on_rtx_blackwell() {
    check_card("every entry", 12);
}

/// Runs all parts of a card's self-tests on correct kernels. Together they launch every entry.
fn check_every_entry(major: i32) {
    let card = (major as u32, 0);
    let _fake = fake(major, 0, noted);
    let mut device = Card::open(0, &Options::default()).unwrap();
    for subject in Subject::of_card(card) {
        let mut launched = BTreeSet::new();
        for part in parts(subject) {
            LAUNCHED.lock().unwrap().clear();
            assert_eq!(part.run(&mut device).unwrap(), None, "{}: {}", subject.name(), part.name);
            let of_part = LAUNCHED.lock().unwrap().clone();
            let planned = part.instances(&device).unwrap();
            assert!(planned.iter().all(|entry| of_part.contains(entry)), "{}: {of_part:?}", part.name);
            launched.extend(of_part);
        }
        // Only one of the packing entries runs, depending on the tensor cores.
        let packs = |name: &str| name.starts_with("moe_pack");
        // Only Hopper's products need sorted rows of 16-bit tokens.
        let sorts = (card, subject) == ((9, 0), Subject::Moe);
        for entry in subject.kernels(card).unwrap().into_iter().flat_map(|kernel| kernel.entries()) {
            if entry.name == "moe_expand" && !sorts {
                continue;
            }
            let is_launched = launched.iter().any(|name| name == entry.name || packs(name) && packs(entry.name));
            assert!(is_launched, "{}: no part launches {}", subject.name(), entry.name);
        }
    }
}

/// Name of the entry that gives wrong results.
static WRONG_ENTRY: Mutex<String> = Mutex::new(String::new());

/// Notes the launch. If it is of the wrong entry, changes the first number of its result, or computes nothing if the
/// entry does not multiply.
fn wrong_in_one_entry(launch: &Launch) {
    LAUNCHED.lock().unwrap().insert(launch.kernel.to_owned());
    let is_wrong = *WRONG_ENTRY.lock().unwrap() == launch.kernel;
    // SAFETY: the launch comes from a self-test, so its operands are alive and lie where the backend put them.
    let c = if is_wrong { unsafe { address_of_c(launch) } } else { None };
    if !is_wrong || c.is_some() {
        kernel(launch);
    }
    if let Some(c) = c {
        // SAFETY: the result has a first number, because no self-test is without tokens and columns.
        unsafe { *(c as *mut u16) ^= 0x4000 };
    }
}

/// Returns the address of the result of a launch that multiplies.
///
/// # Safety
///
/// The launch comes from a self-test.
unsafe fn address_of_c(launch: &Launch) -> Option<u64> {
    use kernels_gpu::mma_sync::{gated_sm120, moe_few_sm90};
    use kernels_gpu::wgmma::{gated_sm90, moe_fp8_sm90};
    use kernels_gpu::{linear, moe, routed, simt::gated_simt, tcgen05::gated_sm100};

    let is_it = |kernel: &&&dyn Kernel| kernel.entries().iter().any(|entry| entry.name == launch.kernel);
    let kernel = KERNELS.iter().find(is_it).expect("the launch names an entry of a kernel").name();
    // SAFETY: these are the parameters of these kernels, whose arrays lie in the process's memory.
    unsafe {
        Some(match kernel {
            "gated_sm100" => {
                (*(launch.parameter::<gated_sm100::abi::Launch>(0).records as *const gated_sm100::abi::Record)).group.c
            }
            "gated_sm90" if launch.kernel.contains("_t") => {
                (*(launch.parameter::<gated_sm90::abi::Launch>(0).tiles as *const gated_sm90::abi::Tile)).group.c
            }
            "gated_sm120" => {
                (*(launch.parameter::<gated_sm120::abi::Launch>(0).groups as *const gated_sm120::abi::Group)).c
            }
            "gated_simt" => {
                (*(launch.parameter::<gated_simt::abi::Launch>(0).groups as *const gated_simt::abi::Group)).c
            }
            "moe_sm80" | "moe_sm90" | "moe_sm120" => launch.parameter::<moe::Launch>(0).c,
            "moe_fp8_sm90" => launch.parameter::<moe_fp8_sm90::abi::Launch>(0).c,
            "moe_sm100" | "moe_nvfp4_sm120" => match launch.parameter::<routed::Launch>(0) {
                routed::Launch { c: 0, quantized, .. } => quantized.values,
                routed::Launch { c, .. } => c,
            },
            "moe_few_sm90" if launch.kernel.contains("gate_up") => {
                launch.parameter::<moe_few_sm90::abi::GateUp>(0).intermediate
            }
            "moe_few_sm90" => launch.parameter::<moe_few_sm90::abi::Down>(0).output,
            "linear_sm80" | "linear_sm90" | "linear_sm120" => launch.parameter::<linear::Launch>(0).c,
            _ => return None,
        })
    }
}

/// Makes one instance of a GPU's kernels wrong at a time. The self-test must report this instance alone. Then the plan must
/// use other instances, or return an error that names the wrong instance if nothing replaces it. After a self-test that
/// passes, the plan must use all instances again.
fn check_every_instance(major: i32) {
    let _fake = fake(major, 0, wrong_in_one_entry);
    let folder = tempfile::tempdir().unwrap();
    let options = Options { verdicts: Verdicts::Folder(folder.path().into()), ..Options::default() };
    let mut tested = Card::open(0, &options).unwrap();
    let mut irreplaceable = BTreeSet::new();
    for subject in Subject::of_card((major as u32, 0)).filter(|subject| *subject != Subject::Router) {
        let parts = parts(subject);
        let planned: Vec<_> = parts.iter().map(|part| part.instances(&tested).unwrap()).collect();
        let instances: BTreeSet<_> = planned.iter().flatten().cloned().collect();
        let keep = |failed: Vec<FailedPart>| {
            let is_right = |part: &&String| failed.iter().all(|failed| failed.part != **part);
            let passed = parts.iter().map(|part| &part.name).filter(is_right).cloned().collect();
            record(0, &options, subject, &Proof { passed, failed }).unwrap();
            Card::judged(0, options.clone())
        };
        for entry in &instances {
            entry.clone_into(&mut WRONG_ENTRY.lock().unwrap());
            // Layers have many parts with the instance: the last one is tried, or the last one and another one.
            let of_entry: Vec<_> = parts.iter().zip(&planned).filter(|(_, planned)| planned.contains(entry)).collect();
            let tried = if is_full() { 2 } else { 1 };
            let step = of_entry.len().div_ceil(tried);
            let of_entry: Vec<_> = of_entry.into_iter().rev().map(|(part, _)| part).step_by(step).collect();
            let mut failed = Vec::new();
            for part in &of_entry {
                let fault = part.run(&mut tested).unwrap().unwrap_or_else(|| panic!("{}: {entry} passed", part.name));
                assert_eq!(fault.instances, [&**entry], "{}: {}", part.name, fault.why);
                failed.push(FailedPart { part: part.name.clone(), why: fault.why, instances: fault.instances });
            }
            let mut judged = keep(failed).unwrap();
            let notes = judged.with_sms(ALL_SMS).unwrap().info().notes.clone();
            assert!(notes.iter().any(|note| note.contains(&format!(" {entry} ("))), "{entry}: {notes:?}");
            let is_launched = is_full() || instances.first() == Some(entry) || instances.last() == Some(entry);
            if !check_plan_without(entry, subject, &of_entry, &mut judged, is_launched) {
                irreplaceable.insert(entry.clone());
            }
        }
        WRONG_ENTRY.lock().unwrap().clear();
        let judged = keep(vec![]).unwrap();
        for part in &parts {
            assert_eq!(part.instances(&judged).unwrap(), part.instances(&tested).unwrap(), "{}", part.name);
        }
    }
    assert_eq!(irreplaceable, if major == 9 { irreplaceable_on_hopper() } else { BTreeSet::new() });
}

/// Checks that the plan does not choose a failed instance for parts that it has chosen it for. Returns `false` if the plan
/// finds no other instance for a part. `is_launched`: runs the parts too.
fn check_plan_without(entry: &str, subject: Subject, parts: &[&Part], judged: &mut Card, is_launched: bool) -> bool {
    let by_plan = match subject {
        Subject::Groups(kernel) => [Op::Gated, Op::Plain].map(|op| Part::of_plan(kernel, op)).into(),
        _ => Vec::new(),
    };
    let mut is_replaced = true;
    LAUNCHED.lock().unwrap().clear();
    for part in parts.iter().copied().chain(&by_plan) {
        let is_by_name = matches!(subject, Subject::Groups(_)) && !part.name.ends_with("by the plan");
        let result = if is_launched {
            part.run(judged)
        } else {
            let planned = part.instances(judged);
            let is_chosen = |planned: &Vec<String>| !is_by_name && planned.iter().any(|name| name == entry);
            assert!(!planned.as_ref().is_ok_and(is_chosen), "the plan has chosen {entry}");
            planned.map(|_| None)
        };
        match result {
            Ok(fault) if is_by_name && is_launched => {
                let why = fault.expect("a failed instance is refused by name").why;
                assert!(why.contains("failed its self-test on Fake GPU with driver 13.0 ("), "{why}");
            }
            Ok(fault) => assert_eq!(fault, None, "{} without {entry}", part.name),
            Err(error) => {
                assert!(error.to_string().contains(entry), "{} without {entry}: {error}", part.name);
                is_replaced = false;
            }
        }
    }
    assert!(!LAUNCHED.lock().unwrap().contains(entry), "the plan has chosen {entry}");
    is_replaced
}

/// `true` if the environment variable `NVFP4_FULL_TESTS` is set. The tests then launch parts again without each failed instance.
/// Otherwise, they do so for the first and the last instance of a subject, and only ask the plan about the other instances.
fn is_full() -> bool {
    env::var_os("NVFP4_FULL_TESTS").is_some()
}

/// Instances that have no replacement in layers of more than 512 experts with few tokens. Other instances with small
/// tiles support up to 512 experts, and the workspace of few rows has no room for sorted rows.
fn irreplaceable_on_hopper() -> BTreeSet<String> {
    let names = ["gated_f16_t16", "gated_f16_t16_curves", "plain_f16_t16"];
    let of_both_types = names.into_iter().flat_map(|name| [name.to_owned(), name.replace("f16", "bf16")]);
    of_both_types.map(|name| format!("moe_{name}")).collect()
}

#[test]
fn wrong_instance_alone_is_left_out_on_hopper() {
    check_card("every instance", 9);
}

#[test]
fn wrong_instance_alone_is_left_out_on_blackwell() {
    check_card("every instance", 10);
}

#[test]
fn wrong_instance_alone_is_left_out_on_rtx_blackwell() {
    check_card("every instance", 12);
}

#[test]
fn wrong_instance_alone_is_left_out_on_ampere() {
    check_card("every instance", 8);
}

#[test]
fn tiles_at_odd_scale_columns_have_parts_of_their_own() {
    let _fake = fake(10, 0, wrong_in_one_entry);
    let mut card = Card::open(0, &Options::default()).unwrap();
    let odd: Vec<_> = parts(blackwell()).into_iter().filter(|part| part.name.contains(" at odd ")).collect();
    let names = ["gated t32", "gated t96", "plain t32", "plain t96"];
    assert_eq!(
        odd.iter().map(|part| &*part.name).collect::<Vec<_>>(),
        names.map(|name| format!("{name} at odd scale columns"))
    );
    for part in odd {
        LAUNCHED.lock().unwrap().clear();
        let (op, rest) = part.name.split_once(' ').unwrap();
        let entry = format!("{op}_sm100_{}", &rest[..3]);
        entry.clone_into(&mut WRONG_ENTRY.lock().unwrap());
        let Fault { instances, .. } = part.run(&mut card).unwrap().expect("the instance is wrong everywhere");
        WRONG_ENTRY.lock().unwrap().clear();
        assert_eq!((instances, LAUNCHED.lock().unwrap().contains(&entry)), (vec![], true));
    }
}

#[test]
fn wrong_launch_that_does_not_multiply_refuses_its_subject() {
    let _fake = fake(10, 0, wrong_in_one_entry);
    let folder = tempfile::tempdir().unwrap();
    let options = Options { verdicts: Verdicts::Folder(folder.path().into()), ..Options::default() };
    let mut card = Card::open(0, &options).unwrap();
    for (subject, entry) in [(Subject::Moe, "moe_combine_bf16"), (Subject::Nvfp4, "moe_quantize_nvfp4_bf16")] {
        entry.clone_into(&mut WRONG_ENTRY.lock().unwrap());
        let mut failed = Vec::new();
        for part in parts(subject).into_iter().filter(|part| !part.name.starts_with("a linear layer")) {
            if let Some(Fault { why, instances }) = part.run(&mut card).unwrap() {
                assert_eq!(instances, [""; 0], "{entry}: {why}");
                failed.push(FailedPart { part: part.name, why, instances });
            }
        }
        WRONG_ENTRY.lock().unwrap().clear();
        record(0, &options, subject, &Proof { passed: vec![], failed }).unwrap();
        let error = parts(subject)[0].run(&mut Card::judged(0, options.clone()).unwrap()).unwrap_err().to_string();
        let expected = format!("{} has failed its self-test on Fake GPU with driver ", subject.name());
        assert!(error.starts_with(&expected), "{error}");
    }
}

fn weights() -> Weights<'static> {
    generate::weights(Generator::Gaussian, Op::Plain, &[Group { m: 1, n: 8, k: 64 }], 1).unwrap()
}

/// Returns the title of the kernel that computes plain products with these verdicts, or the reason why none does.
fn computes(verdicts: &Verdicts, variant: &str) -> Result<String, String> {
    let gpu = Cuda::open_with(0, Options { verdicts: verdicts.clone(), ..Options::default() });
    let layer = gpu.and_then(|gpu| gpu.with_variant(variant.parse()?)?.prepare_layer(&weights()));
    layer.map(|layer| crate::backend::Layer::kernel(&layer).to_owned()).map_err(|error| error.to_string())
}

#[test]
fn only_a_passed_kernel_is_the_default() {
    let _fake = fake(10, 0, kernel);
    let folder = tempfile::tempdir().unwrap();
    let verdicts = Verdicts::Folder(folder.path().into());
    let options = Options { verdicts: verdicts.clone(), ..Options::default() };
    let notes = || Cuda::open_with(0, options.clone()).unwrap().info().notes.clone();
    let all: Vec<_> = parts(blackwell()).into_iter().map(|part| part.name).collect();
    let keep = |failing: &[&str]| {
        let (failed, passed) = all.iter().cloned().partition::<Vec<_>, _>(|part| failing.contains(&&part[..]));
        let failed = failed.into_iter().map(|part| {
            let instances = if part.contains("odd") { vec![] } else { vec![part.replace(' ', "_sm100_")] };
            FailedPart { part, why: "it hung".into(), instances }
        });
        let failed = failed.collect();
        record(0, &options, blackwell(), &Proof { passed, failed }).unwrap()
    };

    assert_eq!(recorded(0, &options, blackwell()).unwrap(), None);
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_simt");
    let note = &notes()[0];
    assert!(note.starts_with("gated_sm100 was not tested on Fake GPU with driver "), "{note}");
    assert!(note.contains("`nvfp4 selftest`") && note.ends_with("until then gated_simt computes"), "{note}");

    let verdict = keep(&[]);
    assert_eq!(recorded(0, &options, blackwell()).unwrap(), Some(verdict));
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_sm100");
    assert_eq!(notes(), [""; 0]);

    // If an instance that is never chosen fails, only this instance is refused.
    keep(&["plain t64_tma"]);
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_sm100");
    assert_eq!(computes(&verdicts, "t64").unwrap(), "plain_sm100");
    let refused = computes(&verdicts, "gated_sm100,t64_tma").unwrap_err();
    assert!(refused.starts_with("gated_sm100 has failed its self-test on Fake GPU"), "{refused}");
    assert!(refused.contains("(plain t64_tma: it hung); choose another kernel, or use --force"), "{refused}");
    assert_eq!(computes(&Verdicts::Ignored, "gated_sm100,t64_tma").unwrap(), "plain_sm100");

    // If an instance fails that the plan chooses, the plan chooses another.
    keep(&[WRONG_PART]);
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_sm100");
    let expected = "gated_sm100 is used without instances that have failed their self-test on Fake GPU with driver ";
    assert!(notes()[0].starts_with(expected), "{:?}", notes());
    assert!(notes()[0].contains(": plain_sm100_t64 (plain t64: it hung); 45 other entries serve"), "{:?}", notes());
    assert!(computes(&verdicts, "gated_sm100,t64").unwrap_err().contains("plain t64: it hung"));
    assert_eq!(computes(&verdicts, "gated_sm100,t128").unwrap(), "plain_sm100");
    assert_eq!(computes(&Verdicts::Ignored, "gated_sm100,t64").unwrap(), "plain_sm100");

    // Tiles at odd columns of scales matter only to a caller who names their instance.
    keep(&["plain t96 at odd scale columns"]);
    assert_eq!((computes(&verdicts, "persistent").unwrap(), notes()), ("plain_sm100".into(), vec![]));
    assert!(computes(&verdicts, "gated_sm100,t96").unwrap_err().contains("plain t96 at odd scale columns: it hung"));

    // Without an instance for any number of tokens, the kernel is not used.
    let all_plain: Vec<_> = all.iter().map(|part| &part[..]).filter(|part| part.starts_with("plain ")).collect();
    keep(&all_plain);
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_simt");
    assert!(notes()[0].contains("failed its self-test") && notes()[0].contains("--again"), "{:?}", notes());
    assert!(computes(&verdicts, "gated_sm100").unwrap_err().contains(": it hung"));
    assert_eq!(computes(&Verdicts::Ignored, "gated_sm100").unwrap(), "plain_sm100");
    // Subjects without a verdict behave as without verdicts.
    assert_eq!(computes(&Verdicts::Ignored, "persistent").unwrap(), "plain_simt");

    // A truncated verdict file counts as missing, and is reported.
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&file, "{").unwrap();
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_simt");
    assert!(notes()[0].contains("not a verdict of a self-test"), "{:?}", notes());
}

#[test]
fn verified_kernel_runs_until_a_test_fails() {
    let _fake = fake(9, 0, kernel);
    let folder = tempfile::tempdir().unwrap();
    let verdicts = Verdicts::Folder(folder.path().into());
    let options = Options { verdicts: verdicts.clone(), ..Options::default() };
    let open = || Cuda::open_with(0, options.clone()).unwrap();
    let card = Card::open(0, &options).unwrap();
    let fail = |subject: Subject| {
        // The failed part of a layer is one of launches that do not multiply.
        let is_of_groups = matches!(subject, Subject::Groups(_));
        let failed = parts(subject).into_iter().map(|part| FailedPart {
            instances: if is_of_groups { part.instances(&card).unwrap() } else { Vec::new() },
            part: part.name,
            why: "it hung".into(),
        });
        record(0, &options, subject, &Proof { passed: vec![], failed: failed.collect() }).unwrap();
    };
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_sm90");
    assert!(open().moe_launcher().is_ok() && open().linear_launcher().is_ok() && open().router_launcher().is_ok());

    for name in ["moe", "linear", "router"] {
        fail(Subject::named(name).unwrap());
    }
    for refused in [open().moe_launcher().err(), open().linear_launcher().err(), open().router_launcher().err()] {
        let refused = refused.unwrap().to_string();
        assert!(refused.contains("has failed its self-test on Fake GPU"), "{refused}");
    }
    let ignored = Cuda::open_with(0, Options { verdicts: Verdicts::Ignored, ..options.clone() }).unwrap();
    assert!(ignored.moe_launcher().is_ok());

    fail(Subject::Groups(GroupedKernel::named("gated_sm90").unwrap()));
    assert_eq!(computes(&verdicts, "persistent").unwrap(), "plain_simt");
    fail(Subject::Groups(GroupedKernel::portable()));
    let error = Cuda::open_with(0, options.clone()).err().unwrap();
    assert!(error.is_no_device() && error.to_string().contains("gated_simt has failed"), "{error}");
}
