//! Types that are passed by value.

use std::ffi::{c_int, c_uint};

/// A handle: a number that the driver looks up.
pub type Handle = usize;

/// `dim3`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

/// `cudaExtent`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// `cudaPitchedPtr`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PitchedPointer {
    pub address: u64,
    pub pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// Handle of a stream. A separate type, so that the null stream differs from other zeros.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq)]
pub struct Stream(pub Handle);

/// `cudaStreamPerThread`.
const PER_THREAD: Handle = 2;

/// Arguments of functions with a default stream per thread. In these functions the null stream stands for the stream of
/// the calling thread.
pub trait PerThread: Sized {
    fn own(self) -> Self {
        self
    }
}

impl PerThread for Stream {
    fn own(self) -> Self {
        if self.0 == 0 { Self(PER_THREAD) } else { self }
    }
}

impl<T> PerThread for *const T {}
impl<T> PerThread for *mut T {}
impl PerThread for usize {}
impl PerThread for u64 {}
impl PerThread for c_int {}
impl PerThread for u32 {}
impl PerThread for Dim3 {}
impl PerThread for Extent {}
impl PerThread for PitchedPointer {}
