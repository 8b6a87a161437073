//! A launch as every kernel's plan creates it: the entry, its grid, and the descriptors that the entry's parameter
//! points to.

use kernels_gpu::format::{OUTPUT_BF16, OUTPUT_F16};

use super::group::Address;
use super::tensor_map::{MAP_BYTES, MapArguments};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// Alignment of every launch's descriptors and of every piece of [`Scratch`].
pub const ALIGNMENT: u64 = 256;

/// The grid of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Name of the kernel's entry.
    pub entry: &'static str,
    /// CTAs along x. 0: there is nothing to compute.
    pub blocks: u32,
    /// CTAs of a cluster along x, as the entry requires. 1: no clusters.
    pub cluster: u32,
    /// Threads per CTA along x.
    pub threads: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
    /// Whether the grid may begin while the previous grid of the stream runs. If it needs that grid's results, it waits
    /// itself (`griddepcontrol.wait`).
    pub overlaps: bool,
}

impl Grid {
    /// Maximum CTAs along x (CUDA programming guide, "Technical Specifications per Compute Capability").
    pub const MAX_BLOCKS: u64 = (1 << 31) - 1;

    /// Converts a number of CTAs along x.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it exceeds [`Self::MAX_BLOCKS`].
    pub fn blocks(blocks: u64) -> Result<u32, Error> {
        if blocks <= Self::MAX_BLOCKS { Ok(blocks as u32) } else { Err(Error::TooLarge) }
    }

    /// Creates a grid without clusters or dynamic shared memory that begins when the previous grid has ended.
    pub fn linear(entry: &'static str, blocks: u32, threads: u32) -> Self {
        Self { entry, blocks, cluster: 1, threads, shared_bytes: 0, overlaps: false }
    }
}

/// Assigns consecutive CTAs of a grid to several pieces of work.
#[derive(Default)]
pub struct BlockCount(u64);

impl BlockCount {
    /// Returns the first CTA of the next piece, which takes `blocks` CTAs.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the total exceeds the maximum of a grid.
    pub fn take(&mut self, blocks: u64) -> Result<u32, Error> {
        let first = self.0;
        self.0 = first.checked_add(blocks).filter(|end| *end <= Grid::MAX_BLOCKS).ok_or(Error::TooLarge)?;
        Ok(first as u32)
    }

    /// Number of CTAs of all pieces.
    pub fn total(&self) -> u32 {
        self.0 as u32
    }
}

/// Selects the entry for f16 or for bf16.
pub(super) fn entry_of([f16, bf16]: [&'static str; 2], dtype: TokenDtype) -> &'static str {
    match dtype {
        TokenDtype::F16 => f16,
        TokenDtype::Bf16 => bf16,
    }
}

/// Returns the address of the next `bytes` bytes.
pub(crate) fn take(end: &mut Address, bytes: u64) -> Address {
    let at = *end;
    *end = (at + bytes).next_multiple_of(ALIGNMENT);
    at
}

/// Returns the code of the output type for kernels.
pub fn output_code(out_dtype: TokenDtype) -> u32 {
    match out_dtype {
        TokenDtype::F16 => OUTPUT_F16,
        TokenDtype::Bf16 => OUTPUT_BF16,
    }
}

/// Bytes of a kernel's parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter(Vec<u8>);

impl Parameter {
    /// Creates a parameter with the bytes of `value`.
    pub fn new<T: bytemuck::NoUninit>(value: T) -> Self {
        Self(bytemuck::bytes_of(&value).to_vec())
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Function that writes descriptors and returns the parameter that points to them.
type Describe = Box<dyn Fn(&mut Writer<'_>) -> Result<Parameter, Error>>;

/// A launch whose descriptors have no address yet.
pub struct Launch {
    /// Name of the kernel that the entry belongs to.
    pub kernel: &'static str,
    /// CTAs, threads per CTA, cluster size and shared memory.
    pub grid: Grid,
    bytes: usize,
    describe: Describe,
}

impl Launch {
    /// Creates a launch with descriptors of `bytes` bytes, which `describe` writes.
    pub fn new(
        kernel: &'static str,
        grid: Grid,
        bytes: usize,
        describe: impl Fn(&mut Writer<'_>) -> Result<Parameter, Error> + 'static,
    ) -> Self {
        Self { kernel, grid, bytes: bytes.next_multiple_of(ALIGNMENT as usize), describe: Box::new(describe) }
    }

    /// Creates a launch whose descriptors are one array. `parameter` builds the parameter from the array's address and
    /// length.
    pub fn of_array<T: bytemuck::NoUninit, P: bytemuck::NoUninit>(
        kernel: &'static str,
        grid: Grid,
        array: Vec<T>,
        parameter: impl Fn(Address, u32) -> P + 'static,
    ) -> Self {
        Self::new(kernel, grid, size_of_val(&*array), move |writer| {
            Ok(Parameter::new(parameter(writer.array(&array), array.len() as u32)))
        })
    }

    /// Creates a launch without descriptors.
    pub fn of_parameter(kernel: &'static str, grid: Grid, parameter: impl bytemuck::NoUninit) -> Self {
        Self::new(kernel, grid, 0, move |_| Ok(Parameter::new(parameter)))
    }

    /// Bytes of the descriptors, rounded up to a multiple of [`ALIGNMENT`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes the descriptors for the address `address`, a multiple of [`ALIGNMENT`], and returns the parameter that
    /// points to them. `encode` encodes a tensor map.
    ///
    /// # Errors
    /// Errors of `encode`.
    ///
    /// # Panics
    /// If the length of `to` is not [`Launch::bytes`].
    pub fn write(
        &self,
        address: Address,
        to: &mut [u8],
        encode: &mut dyn FnMut(&MapArguments) -> Result<[u8; MAP_BYTES], Error>,
    ) -> Result<Parameter, Error> {
        assert_eq!(to.len(), self.bytes, "the buffer has exactly the size of the descriptors");
        (self.describe)(&mut Writer { address, to, written: 0, encode })
    }
}

/// Buffer into which descriptors are written one after the other.
pub struct Writer<'a> {
    address: Address,
    to: &'a mut [u8],
    written: usize,
    encode: &'a mut dyn FnMut(&MapArguments) -> Result<[u8; MAP_BYTES], Error>,
}

impl Writer<'_> {
    /// Writes an array and returns its address.
    pub fn array<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> Address {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.written;
        self.to[at..][..bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
        self.address + at as u64
    }

    /// Encodes a tensor map.
    ///
    /// # Errors
    /// If the device refuses the arguments.
    pub fn encode(&mut self, arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
        (self.encode)(arguments)
    }

    /// Encodes and writes a tensor map, and returns its address.
    ///
    /// # Errors
    /// If the device refuses the arguments.
    pub fn tensor_map(&mut self, arguments: &MapArguments) -> Result<Address, Error> {
        let map = self.encode(arguments)?;
        Ok(self.array(&map))
    }
}

/// Allocates device memory for intermediate results between launches, upward from an address.
pub struct Scratch(Address);

impl Scratch {
    /// Creates memory that starts at an address, a multiple of [`ALIGNMENT`].
    pub fn new(address: Address) -> Self {
        Self(address)
    }

    /// Returns the address of the next `bytes` bytes, a multiple of [`ALIGNMENT`].
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn take(&mut self, bytes: u64) -> Result<Address, Error> {
        let end = self.0.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        Ok(std::mem::replace(&mut self.0, end.ok_or(Error::TooLarge)?))
    }

    /// End of all allocated memory.
    pub fn end(&self) -> Address {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_consecutive() {
        let grid = Grid::linear("entry", 1, 32);
        let arguments = MapArguments::values(0x40, 3, 64, 128, 8);
        let launch = Launch::new("kernel", grid, 4 * 2 + MAP_BYTES, move |writer| {
            let map = writer.tensor_map(&arguments)?;
            Ok(Parameter::new([map, writer.array(&[7_u32, 8])]))
        });
        let mut to = vec![0; launch.bytes()];
        let parameter = launch.write(0x1000, &mut to, &mut |of| Ok([of.rows as u8; MAP_BYTES])).unwrap();
        assert_eq!(parameter.bytes(), bytemuck::bytes_of(&[0x1000_u64, 0x1080]));
        assert_eq!((to.len(), to[127], to[128], to[132]), (256, 3, 7, 8));
    }

    #[test]
    fn blocks_are_numbered_up_to_the_grid_limit() {
        let mut blocks = BlockCount::default();
        assert_eq!([3, 0, 5].map(|count| blocks.take(count).unwrap()), [0, 3, 3]);
        assert_eq!(blocks.total(), 8);
        assert!(blocks.take(Grid::MAX_BLOCKS - 8).is_ok());
        for huge in [1, u64::MAX] {
            assert!(matches!(blocks.take(huge), Err(Error::TooLarge)));
        }
    }
}
