//! What the user is told where something is not emulated: each reason once, so that a loop does not fill the screen.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::code::{Code, NOT_SUPPORTED};

/// Says a reason to the user, the first time.
pub fn once(words: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(words.to_owned()) {
        eprintln!("ptx-emulator: refused: {words}");
    }
}

pub fn managed_memory() {
    once("managed memory (cudaMallocManaged, __managed__) is not emulated; use cudaMalloc and copies");
}

/// NVIDIA's own runtime, and libraries with it inside such as cuBLAS, ask the driver for tables that no header describes.
pub fn private_tables() -> Code {
    once(
        "the program asks for private tables of NVIDIA's driver: it has NVIDIA's CUDA runtime inside, which runs on \
         NVIDIA's driver only. Build it with `nvcc -cudart shared`; libraries such as cuBLAS cannot be emulated",
    );
    NOT_SUPPORTED
}
