//! Runs queued work when something waits for it.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::code::{Code, NOT_PERMITTED};
use crate::handle::Handle;
use crate::queue::{Queue, order_of_graph};
use crate::state::{Driver, driver};
use crate::work::{HostFunction, Index, Launch, Work};

/// Durations of a copy and of a launch on the device's clock, in nanoseconds.
const COPY_TIME: u64 = 1_000_000;
const LAUNCH_TIME: u64 = 250_000;

thread_local! {
    /// Whether this thread runs a host function, which must not call the driver (CUDA driver API, cuLaunchHostFunc).
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

pub fn inside_host_function() -> bool {
    IN_HOST_FUNCTION.try_with(Cell::get).unwrap_or(false)
}

/// Runs queued operations in the given order.
///
/// # Errors
///
/// The reason why there is no such order, or the code of a kernel's fault.
pub fn run(order: impl FnOnce(&mut Queue) -> Result<Vec<Index>, Code>) -> Result<(), Code> {
    // One thread at a time: an operation that another thread has taken must end before the operations after it.
    static RUNNING: Mutex<()> = Mutex::new(());
    if inside_host_function() {
        return Err(NOT_PERMITTED);
    }
    let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let order = order(&mut driver().queue)?;
    for index in order {
        let Some(work) = driver().queue.take(index) else { continue };
        match work {
            Work::Pass(event) => {
                let mut driver = driver();
                let now = driver.clock;
                driver.queue.pass(event, index, now);
            }
            work => work_off(&work)?,
        }
    }
    driver().lost.map_or(Ok(()), Err)
}

/// Runs all queued work.
pub fn everything() -> Result<(), Code> {
    run(|queue| Ok(queue.all()))
}

/// Queues a host function on a stream. In a program, this call also runs the function and all work before it, because
/// the program's threads may wait for the function without calling the driver. During the function they may destroy the
/// stream.
pub fn host_function(
    mut driver: MutexGuard<'static, Driver>,
    stream: Handle,
    function: HostFunction,
) -> Result<(), Code> {
    let later = driver.test.is_some() || driver.queue.capture_of(stream)?.is_some();
    let index = driver.queue.push_after(stream, Work::Host(function), Vec::new())?;
    drop(driver);
    if later { Ok(()) } else { run(|queue| Ok(queue.up_to(index))) }
}

/// Makes the queued work run when the program ends.
pub fn at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn run_all() {
        let _ = std::panic::catch_unwind(everything);
    }
    // SAFETY: the function is in this library, which a program that has called it never closes.
    ONCE.call_once(|| unsafe {
        libc::atexit(run_all);
    });
}

/// Does the work of an operation, except for events, which `run` handles.
fn work_off(work: &Work) -> Result<(), Code> {
    let mut driver = driver();
    match work {
        Work::Launch(launch) => {
            if driver.timeline.is_none() {
                driver.clock += LAUNCH_TIME;
            }
            let follows = driver.last_launch.replace(launch.stream) == Some(launch.stream);
            return launch_one(driver, launch, follows);
        }
        Work::Graph(operations) => {
            drop(driver);
            return order_of_graph(operations).into_iter().try_for_each(|index| work_off(&operations[index].work));
        }
        Work::Host(function) => {
            drop(driver);
            IN_HOST_FUNCTION.set(true);
            function.call();
            IN_HOST_FUNCTION.set(false);
            return Ok(());
        }
        Work::Copy(copy) => {
            driver.clock += COPY_TIME;
            copy.run(&mut driver.memory);
        }
        Work::Fill(fill) => fill.run(&mut driver.memory),
        Work::Free(address) => driver.memory.free(*address)?,
        Work::Pass(_) | Work::Join => return Ok(()),
    }
    driver.last_launch = None;
    Ok(())
}

/// Runs a kernel in the emulator, or the test's function.
fn launch_one(mut driver: MutexGuard<'static, Driver>, launch: &Launch, follows: bool) -> Result<(), Code> {
    match driver.test.as_ref().map(|test| test.kernel) {
        None => crate::emulate::launch(&mut driver, launch, follows),
        Some(kernel) => {
            // The test's kernel must not run while this thread holds the driver's lock.
            drop(driver);
            if let Some(kernel) = kernel {
                crate::objects::call(kernel, launch);
            }
            Ok(())
        }
    }
}
