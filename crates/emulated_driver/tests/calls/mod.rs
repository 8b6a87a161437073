//! Random calls of a library's functions, for the driver and the runtime: in any order, with any handles.

use std::ffi::{c_int, c_void};

use libloading::Library;
use proptest::prelude::*;

/// An argument of a call.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A handle or a device address: a known one or any number.
    Handle,
    /// A number: a size, a flag, an attribute.
    Number,
    /// Memory for a result. Later calls may use a handle that the call stores there.
    Out,
    /// Host memory of zeros.
    Host,
    /// Host memory of ones.
    Ones,
    /// An image of PTX.
    Image,
    /// The name of an entry or of a variable.
    Name,
    /// A host function.
    Function,
    /// This number.
    Fixed(usize),
}

use Kind::{Fixed, Function, Handle, Host, Image, Name, Number, Ones, Out};

/// Name and arguments of a function.
pub type Signature = (&'static str, &'static [Kind]);

const PTX: &std::ffi::CStr = c".version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .b8 k_variable[16];
.visible .entry k(.param .u32 n) { ret; }
";

/// Generates calls: the index of one of `count` functions, and a number per argument. Half of the cases start with the
/// calls `begin`, which most others need.
pub fn calls(count: usize, begin: &'static [usize]) -> impl Strategy<Value = Vec<(usize, [u16; 12])>> {
    let begin = prop::sample::select(vec![&[][..], begin]);
    let random = prop::collection::vec((0..count, any::<[u16; 12]>()), 1..80);
    (begin, random).prop_map(|(begin, random)| {
        let begin = begin.iter().map(|&call| (call, [0; 12]));
        begin.chain(random).collect()
    })
}

/// Words of the memory that a call may read or write.
const ROOM: usize = 4096;

extern "C" fn host_function(_data: *mut c_void) {}

/// Opens a library that lies beside the test.
pub fn library(name: &str) -> Library {
    let test = std::env::current_exe().unwrap();
    // SAFETY: the library is Rust code without initializers.
    unsafe { Library::new(test.with_file_name(name)) }.unwrap()
}

type Call =
    unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, usize) -> c_int;

/// Makes the calls, then the calls `end`. Each must return a code, and none may panic: a panic returns 999.
pub fn make(
    library: &Library,
    signatures: &[Signature],
    calls: Vec<(usize, [u16; 12])>,
    end: &[&str],
) -> Result<(), TestCaseError> {
    let mut handles: Vec<usize> = vec![0, 1, 2, 0xC0, usize::MAX, 0xdead_beef, 0x1_0000_0000];
    // Kept until the end, because queued copies still use the memory.
    let mut rooms: Vec<Box<[u64; ROOM]>> = Vec::new();
    for (call, numbers) in calls {
        let (name, kinds) = signatures[call];
        let mut arguments = [0; 12];
        let mut outs = Vec::new();
        for ((argument, kind), number) in arguments.iter_mut().zip(kinds).zip(numbers) {
            let number = usize::from(number);
            let mut room = |value: u64| {
                rooms.push(Box::new([value; ROOM]));
                rooms.last_mut().unwrap().as_mut_ptr() as usize
            };
            *argument = match kind {
                // Recent handles are likelier, because most calls need one of them.
                Handle if number % 3 == 0 => handles[handles.len() - 1 - number / 3 % handles.len().min(4)],
                Handle => handles[number % handles.len()],
                // Small numbers are likelier. None is larger than the memory, in handles or in bytes.
                Number if number % 2 == 0 => number / 2 % 8,
                Number => number % ROOM,
                Out => {
                    outs.push(room(handles[number % handles.len()] as u64));
                    *outs.last().unwrap()
                }
                Host => room(0),
                Ones => room(1),
                Image if number % 4 == 3 => c"nonsense".as_ptr() as usize,
                Image => PTX.as_ptr() as usize,
                Name if number % 4 == 3 => c"k_variable".as_ptr() as usize,
                Name => c"k".as_ptr() as usize,
                Function => host_function as *const () as usize,
                Fixed(number) => *number,
            };
        }
        // SAFETY: integers and pointers are passed alike, and a callee ignores the arguments after its last.
        let code = unsafe {
            let function = library.get::<Call>(name).unwrap();
            let [a, b, c, d, e, f, g, h, i, j, k, l] = arguments;
            function(a, b, c, d, e, f, g, h, i, j, k, l)
        };
        prop_assert!((0..1000).contains(&code), "{name}: {code}");
        prop_assert_ne!(code, 999, "{} panicked", name);
        if code == 0 {
            // SAFETY: each `out` points to a word of the memory, which is kept until the end.
            handles.extend(outs.iter().map(|out| unsafe { *(*out as *const usize) }));
        }
    }
    // SAFETY: integers and pointers are passed alike, and a callee ignores the arguments after its last. Queued work
    // uses memory of this case, which is still alive.
    unsafe {
        for name in end {
            library.get::<Call>(*name).unwrap()(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        }
    }
    Ok(())
}
