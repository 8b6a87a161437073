//! Images that a program loads: PTX text, alone or in a fat binary, and what it is decoded to.

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use gpu_arch::Capability;
use ptx_emulator::Listing;

use crate::code::{Code as ErrorCode, INVALID_IMAGE};
use crate::entries::{self, Entries};
use crate::fatbin;

/// A module's code. It outlives the module where launches of it are queued.
pub struct Code {
    text: String,
    pub entries: Entries,
    /// The decoded text: of a large one that takes long, and a test never asks for it.
    decoded: OnceLock<Result<ptx_emulator::Module, String>>,
    /// Its machine code; nothing where there is no ptxas.
    listing: OnceLock<Option<Arc<Listing>>>,
}

impl Code {
    /// The decoded text.
    ///
    /// # Errors
    ///
    /// What the emulator says about the text.
    pub fn decoded(&self) -> Result<&ptx_emulator::Module, String> {
        let decode = || ptx_emulator::Module::parse(&self.text).map_err(|error| error.to_string());
        self.decoded.get_or_init(decode).as_ref().map_err(Clone::clone)
    }

    /// Its machine code for an architecture, which must be the same each time.
    pub fn listing(&self, arch: &str) -> Option<Arc<Listing>> {
        self.listing.get_or_init(|| Listing::of_ptx(&self.text, arch).map(Arc::new)).clone()
    }
}

/// A refused image: the code, and what the compiler would say.
pub type Refusal = (ErrorCode, String);

/// The code in an image; nothing where it is machine code.
///
/// # Safety
///
/// `image` is what `cuModuleLoadData` takes: a C string of PTX, an ELF file, a fat binary or its wrapper.
pub unsafe fn code(image: *const u8, card: Capability) -> Result<Option<Arc<Code>>, Refusal> {
    // SAFETY: any image is at least a NUL; the first bytes are looked at one after another.
    let begins = |magic: &[u8]| (0..magic.len()).all(|at| unsafe { *image.add(at) } == magic[at]);
    let ptx = if begins(&fatbin::WRAPPER.to_le_bytes()) {
        // SAFETY: `__fatBinC_Wrapper_t` (fatbinary_section.h): magic, version, and the address of the binary.
        let inner = unsafe { image.add(8).cast::<*const u8>().read_unaligned() };
        if inner.is_null() {
            return Err((INVALID_IMAGE, "a fat binary's wrapper is empty".into()));
        }
        // SAFETY: the wrapper leads to a fat binary.
        unsafe { in_fatbin(inner, card)? }
    } else if begins(&fatbin::MAGIC.to_le_bytes()) {
        // SAFETY: it begins as a fat binary does.
        unsafe { in_fatbin(image, card)? }
    } else if begins(b"\x7fELF") {
        return Ok(None);
    } else {
        // SAFETY: neither of the binary formats, so a C string.
        unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned()
    };
    let entries = entries::entries(&ptx, card).map_err(|(code, complaint)| (code, complaint.to_owned()))?;
    Ok(Some(Arc::new(Code { text: ptx, entries, decoded: OnceLock::new(), listing: OnceLock::new() })))
}

/// The PTX of a fat binary.
///
/// # Safety
///
/// `image` leads to as many bytes as its header says.
unsafe fn in_fatbin(image: *const u8, card: Capability) -> Result<String, Refusal> {
    let damaged = || (INVALID_IMAGE, "this is no fat binary".to_owned());
    // SAFETY: a fat binary begins with a header of 16 bytes.
    let header = unsafe { image.cast::<[u8; 16]>().read_unaligned() };
    let size = fatbin::size(&header).ok_or_else(damaged)?;
    // SAFETY: that many bytes follow, as its header says.
    fatbin::ptx(unsafe { std::slice::from_raw_parts(image, size) }, card)
}
