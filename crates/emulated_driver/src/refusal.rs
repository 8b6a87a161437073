//! Messages about features that are not emulated. Each message is printed once, so that a loop does not fill the
//! screen.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::code::{Code, NOT_SUPPORTED};

/// Prints a message to the user the first time it occurs.
pub fn once(words: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(words.to_owned()) {
        eprintln!("ptx-emulator: refused: {words}");
    }
}

pub fn managed_memory() {
    once("managed memory (cudaMallocManaged, __managed__) is not emulated; use cudaMalloc and copies");
}

/// Refuses private tables. NVIDIA's own runtime, and libraries that contain it such as cuBLAS, request tables from the
/// driver that no header describes.
pub fn private_tables() -> Code {
    once(
        "the program requests private tables of NVIDIA's driver, because it contains NVIDIA's CUDA runtime, which runs on \
         NVIDIA's driver only; build it with `nvcc -cudart shared`; libraries such as cuBLAS cannot be emulated",
    );
    NOT_SUPPORTED
}
