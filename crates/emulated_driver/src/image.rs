//! Images that a program loads: PTX text, alone or in a fat binary, and the decoded module.

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use gpu_arch::Capability;
use ptx_emulator::Listing;

use crate::code::{Code as ErrorCode, INVALID_IMAGE};
use crate::entries::{self, Entries};
use crate::fatbin;

/// Code of a module. It outlives the module while launches of it are queued.
pub struct Code {
    text: String,
    pub entries: Entries,
    /// The decoded text. Decoding a large text takes long and tests do not need it, so it is decoded on first use.
    decoded: OnceLock<Result<ptx_emulator::Module, String>>,
    /// Machine code of the text. `None`: there is no ptxas.
    listing: OnceLock<Option<Arc<Listing>>>,
}

impl Code {
    /// Returns the decoded text.
    ///
    /// # Errors
    ///
    /// The emulator's message about the text.
    pub fn decoded(&self) -> Result<&ptx_emulator::Module, String> {
        let decode = || ptx_emulator::Module::parse(&self.text).map_err(|error| error.to_string());
        self.decoded.get_or_init(decode).as_ref().map_err(Clone::clone)
    }

    /// Returns the machine code for an architecture, which must be the same in every call. `None`: there is no ptxas.
    pub fn listing(&self, arch: &str) -> Option<Arc<Listing>> {
        self.listing.get_or_init(|| Listing::of_ptx(&self.text, arch).map(Arc::new)).clone()
    }
}

/// A refused image: the code, and the compiler's message.
pub type Refusal = (ErrorCode, String);

/// Returns the code in an image. `None`: the image is machine code.
///
/// # Safety
///
/// `image` is valid input for `cuModuleLoadData`: a C string of PTX, an ELF file, a fat binary or its wrapper.
pub unsafe fn code(image: *const u8, card: Capability) -> Result<Option<Arc<Code>>, Refusal> {
    // SAFETY: every image ends with a NUL or is longer than the magic. Bytes are compared one by one, up to a
    // difference.
    let begins = |magic: &[u8]| (0..magic.len()).all(|at| unsafe { *image.add(at) } == magic[at]);
    let ptx = if begins(&fatbin::WRAPPER.to_le_bytes()) {
        // SAFETY: the magic marks a `__fatBinC_Wrapper_t` (fatbinary_section.h): magic, version, address of the binary.
        let inner = unsafe { image.add(8).cast::<*const u8>().read_unaligned() };
        if inner.is_null() {
            return Err((INVALID_IMAGE, "the wrapper of a fat binary contains no address".into()));
        }
        // SAFETY: the caller guarantees that the wrapper points to a fat binary.
        unsafe { in_fatbin(inner, card)? }
    } else if begins(&fatbin::MAGIC.to_le_bytes()) {
        // SAFETY: the magic marks a fat binary, which the caller guarantees to be complete.
        unsafe { in_fatbin(image, card)? }
    } else if begins(b"\x7fELF") {
        return Ok(None);
    } else {
        // SAFETY: the image has no magic of a binary format, so the caller guarantees a C string.
        unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned()
    };
    let entries = entries::entries(&ptx, card).map_err(|(code, complaint)| (code, complaint.to_owned()))?;
    Ok(Some(Arc::new(Code { text: ptx, entries, decoded: OnceLock::new(), listing: OnceLock::new() })))
}

/// Returns the PTX of a fat binary.
///
/// # Safety
///
/// `image` is valid for reads of the number of bytes that its header states.
unsafe fn in_fatbin(image: *const u8, card: Capability) -> Result<String, Refusal> {
    let damaged = || (INVALID_IMAGE, "the image is not a valid fat binary".to_owned());
    // SAFETY: the caller guarantees a fat binary, which begins with a header of 16 bytes.
    let header = unsafe { image.cast::<[u8; 16]>().read_unaligned() };
    let size = fatbin::size(&header).ok_or_else(damaged)?;
    // SAFETY: the caller guarantees that the number of bytes in the header is readable.
    fatbin::ptx(unsafe { std::slice::from_raw_parts(image, size) }, card)
}
