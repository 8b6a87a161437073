//! Runs PTX on the CPU and finds its bugs.
//!
//! A [`Module`] is PTX text, parsed and decoded. A [`Device`] has global memory and launches a module's entries. The
//! result of a launch is a [`Report`] of counters, or the [`Fault`] of the kernel with its place.
//!
//! ```
//! use ptx_emulator::{Arg, Device, DeviceConfig, LaunchConfig, Module};
//!
//! let module = Module::parse(
//!     ".version 8.0
//!      .target sm_80
//!      .address_size 64
//!      .visible .entry double(.param .u64 p) {
//!          .reg .b32 %r<3>; .reg .b64 %d<4>;
//!          ld.param.u64 %d1, [p];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %d2, %r1, 4;
//!          add.u64 %d3, %d1, %d2;
//!          ld.global.u32 %r2, [%d3];
//!          shl.b32 %r2, %r2, 1;
//!          st.global.u32 [%d3], %r2;
//!          ret;
//!      }",
//! )?;
//! let mut device = Device::new(DeviceConfig::default());
//! let data = device.upload(&[1u32, 2, 3, 4]);
//! let report = device.launch(&module, "double", &LaunchConfig::linear(1, 4), &[data.into()])?;
//! assert_eq!(device.download::<u32>(data), [2, 4, 6, 8]);
//! assert_eq!(report.total.bytes.global_load, 16);
//! // One thread too many reads past the end.
//! let fault = device.launch(&module, "double", &LaunchConfig::linear(1, 5), &[data.into()]).unwrap_err();
//! assert_eq!((fault.lane, fault.place.unwrap().line), (Some(4), 10));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Modules from the bottom layer up: each imports only from itself and from the modules before it. See the README.
mod config;
pub mod hw;
mod parser;
mod random;
mod types;

mod operand;

mod timing;

mod machine;

mod code;

mod decode;

mod exec;

mod scheduler;

mod device;

mod explorer;
pub mod launch_json;
mod module;
pub mod program;
mod timed;

pub use code::Kernel;
pub use config::fault::{Fault, FaultKind, Party, Place, Warning};
pub use config::launch::{Allow, DeviceConfig, LaunchConfig, Level, Limit, Param, Schedule, Sums};
pub use config::names::readable;
pub use config::order::{Agent, Bounds, End, Exploration, Failure, Order};
pub use config::report::{BufferTraffic, Class, Loads, Report, Role, Traffic};
pub use decode::opcode::Opcode;
pub use device::{Arg, Buffer, Device};
pub use exec::opcodes::{OPCODES, coverage};
pub use hw::swizzle::Swizzle;
pub use hw::tensor_map::{DataType, Interleave, L2Promotion, OobFill, TensorMap, TensorMapError};
pub use module::Module;
pub use parser::error::ParseError;
pub use timed::Timeline;
pub use timing::card::{Card, Constant, Key, Origin};
pub use timing::report::{Phase, RoleTime, Span, Time, Unit, Why};
pub use timing::sass::Listing;
pub use timing::trace;
