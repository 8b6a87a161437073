//! Properties that a GPU reports: name, memory, attributes.

use std::collections::BTreeMap;
use std::ffi::c_int;

/// Maximum CTAs of a cluster by default.
pub const PORTABLE_CLUSTER: u32 = 8;
/// Maximum CTAs per cluster before compute capability 12.0, for a function with `NON_PORTABLE_CLUSTER`.
const LARGEST_CLUSTER: u32 = 16;

/// A GPU.
#[derive(Clone)]
pub struct Card {
    pub name: &'static str,
    /// Bytes of device memory.
    pub memory: usize,
    attributes: BTreeMap<c_int, c_int>,
    /// Value of attributes that are not in the list. `None`: an attribute that is not in the list is an error.
    otherwise: Option<c_int>,
}

/// The `CUdevice_attribute` numbers (cuda.h) that differ between GPUs or are used in this crate.
pub mod attribute {
    use std::ffi::c_int;

    pub const CLOCK_KHZ: c_int = 13;
    pub const MULTIPROCESSORS: c_int = 16;
    pub const MEMORY_CLOCK_KHZ: c_int = 36;
    pub const MEMORY_BUS_BITS: c_int = 37;
    pub const L2_BYTES: c_int = 38;
    pub const THREADS_OF_A_MULTIPROCESSOR: c_int = 39;
    pub const MAJOR: c_int = 75;
    pub const MINOR: c_int = 76;
    pub const SHARED_BYTES_OF_A_MULTIPROCESSOR: c_int = 81;
    pub const REGISTERS_OF_A_MULTIPROCESSOR: c_int = 82;
    pub const SHARED_BYTES_OF_A_BLOCK_BY_OPT_IN: c_int = 97;
    pub const BLOCKS_OF_A_MULTIPROCESSOR: c_int = 106;
    pub const SHARED_BYTES_RESERVED: c_int = 111;
}

/// Answers of `cuDeviceGetAttribute` on an H200 with driver 580. Features that the emulator lacks are 0: managed
/// memory, virtual memory management, sparse texture arrays, stream memory operations, sharing between processes.
const H200: &[(c_int, c_int)] = &[
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    (5, 2147483647),
    (6, 65535),
    (7, 65535),
    (8, 49152),
    (9, 65536),
    (10, 32),
    (11, 2147483647),
    (12, 65536),
    (13, 1980000),
    (14, 512),
    (15, 1),
    (16, 132),
    (17, 0),
    (18, 0),
    (19, 1),
    (20, 0),
    (21, 131072),
    (22, 131072),
    (23, 65536),
    (24, 16384),
    (25, 16384),
    (26, 16384),
    (27, 32768),
    (28, 32768),
    (29, 2048),
    (30, 512),
    (31, 1),
    (32, 1),
    (33, 0),
    (34, 6),
    (35, 0),
    (36, 3201000),
    (37, 6016),
    (38, 62914560),
    (39, 2048),
    (40, 3),
    (41, 1),
    (42, 32768),
    (43, 2048),
    (44, 0),
    (45, 32768),
    (46, 32768),
    (47, 8192),
    (48, 8192),
    (49, 32768),
    (50, 0),
    (51, 32),
    (52, 32768),
    (53, 32768),
    (54, 2046),
    (55, 32768),
    (56, 131072),
    (57, 65536),
    (58, 16384),
    (59, 16384),
    (60, 16384),
    (61, 32768),
    (62, 2048),
    (63, 32768),
    (64, 32768),
    (65, 2048),
    (66, 32768),
    (67, 32768),
    (68, 2046),
    (69, 268435456),
    (70, 131072),
    (71, 65000),
    (72, 2097120),
    (73, 32768),
    (74, 32768),
    (75, 9),
    (76, 0),
    (77, 32768),
    (78, 1),
    (79, 1),
    (80, 1),
    (81, 233472),
    (82, 65536),
    (83, 0),
    (84, 0),
    (85, 0),
    (86, 0),
    (87, 2),
    (88, 0),
    (89, 0),
    (90, 1),
    (91, 1),
    (92, 0),
    (93, 0),
    (94, 0),
    (95, 1),
    (96, 0),
    (97, 232448),
    (98, 0),
    (99, 1),
    (100, 0),
    (101, 0),
    (102, 0),
    (103, 0),
    (104, 0),
    (105, 0),
    (106, 32),
    (107, 0),
    (108, 39321600),
    (109, 134217728),
    (110, 0),
    (111, 1024),
    (112, 0),
    (113, 1),
    (114, 0),
    (115, 1),
    (116, 0),
    (117, 0),
    (118, 0),
    (119, 0),
    (120, 1),
    (121, 0),
    (122, 0),
    (123, 0),
    (124, 0),
    (125, 0),
    (126, 4),
    (127, 1),
    (128, 0),
    (129, 0),
    (130, 0),
    (131, -1),
    (132, 0),
    (133, 0),
    (134, 0),
];

impl Card {
    /// Returns a GPU by its name on the command line.
    pub fn by_name(name: &str) -> Option<Self> {
        match name {
            "h200" => Some(Self::h200()),
            "b200" => Some(Self::b200()),
            "rtx-5090" => Some(Self::rtx_5090()),
            _ => None,
        }
    }

    pub fn h200() -> Self {
        let attributes = H200.iter().copied().collect();
        Self { name: "NVIDIA H200", memory: 150_109_880_320, attributes, otherwise: None }
    }

    /// A B200: compute capability 10.0, 148 SMs, 8192 bits of HBM3e, 180 GB (data sheet). All limits of a kernel are
    /// the same as on an H200 (CUDA programming guide, "Compute capabilities").
    pub fn b200() -> Self {
        let mut card = Self { name: "NVIDIA B200", memory: 180 * 1_000_000_000, ..Self::h200() };
        card.attributes.extend([
            (attribute::CLOCK_KHZ, 1_965_000),
            (attribute::MULTIPROCESSORS, 148),
            (attribute::MEMORY_CLOCK_KHZ, 3_996_000),
            (attribute::MEMORY_BUS_BITS, 8192),
            (attribute::L2_BYTES, 126 << 20),
            (attribute::MAJOR, 10),
            (attribute::MINOR, 0),
        ]);
        card
    }

    /// A GeForce RTX 5090: compute capability 12.0, 170 SMs, 512 bits of GDDR7, 32 GB (data sheet), with the limits per
    /// SM of compute capability 12.0 (CUDA programming guide, "Compute capabilities").
    pub fn rtx_5090() -> Self {
        let mut card = Self { name: "NVIDIA GeForce RTX 5090", memory: 32 << 30, ..Self::h200() };
        card.attributes.extend([
            (attribute::CLOCK_KHZ, 2_407_000),
            (attribute::MULTIPROCESSORS, 170),
            (attribute::MEMORY_CLOCK_KHZ, 14_001_000),
            (attribute::MEMORY_BUS_BITS, 512),
            (attribute::L2_BYTES, 96 << 20),
            (attribute::THREADS_OF_A_MULTIPROCESSOR, 1536),
            (attribute::MAJOR, 12),
            (attribute::MINOR, 0),
            (attribute::SHARED_BYTES_OF_A_MULTIPROCESSOR, 100 << 10),
            (attribute::SHARED_BYTES_OF_A_BLOCK_BY_OPT_IN, 99 << 10),
            (attribute::BLOCKS_OF_A_MULTIPROCESSOR, 24),
        ]);
        card
    }

    /// The GPU of tests.
    pub fn of_tests(major: c_int, minor: c_int, multiprocessors: c_int) -> Self {
        let attributes = [
            (attribute::MULTIPROCESSORS, multiprocessors),
            (attribute::MAJOR, major),
            (attribute::MINOR, minor),
            (attribute::SHARED_BYTES_OF_A_MULTIPROCESSOR, 227 << 10),
            (attribute::SHARED_BYTES_OF_A_BLOCK_BY_OPT_IN, 227 << 10),
            (attribute::THREADS_OF_A_MULTIPROCESSOR, 2048),
            (attribute::BLOCKS_OF_A_MULTIPROCESSOR, 2),
            (attribute::REGISTERS_OF_A_MULTIPROCESSOR, 65_536),
            (attribute::SHARED_BYTES_RESERVED, 0),
        ];
        Self { name: "Fake GPU", memory: 8 << 30, attributes: attributes.into(), otherwise: Some(1) }
    }

    /// Returns an attribute. `None`: cuda.h has no attribute of this number.
    pub fn attribute(&self, number: c_int) -> Option<c_int> {
        self.attributes.get(&number).copied().or(self.otherwise)
    }

    /// Returns an attribute as an unsigned number. 0: the attribute is missing or negative.
    pub fn count(&self, number: c_int) -> u64 {
        self.attribute(number).and_then(|value| value.try_into().ok()).unwrap_or(0)
    }

    /// Returns the compute capability: major, minor.
    pub fn capability(&self) -> (u32, u32) {
        (self.count(attribute::MAJOR) as u32, self.count(attribute::MINOR) as u32)
    }

    /// Returns the maximum number of CTAs of a cluster of a function with `NON_PORTABLE_CLUSTER`.
    pub fn largest_cluster(&self) -> u32 {
        if self.capability().0 == 12 { PORTABLE_CLUSTER } else { LARGEST_CLUSTER }
    }
}
