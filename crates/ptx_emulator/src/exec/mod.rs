//! What each instruction does. One file a family of opcodes; each handler turns a parsed instruction into a step. The
//! table of opcodes names the handlers.

pub mod alu;
pub mod atomic;
pub mod barrier;
pub mod bulk;
pub mod cluster;
pub mod compare;
pub mod control;
pub mod convert;
pub mod cp_async;
pub mod float;
pub mod instruction;
pub mod lane;
pub mod launch_control;
pub mod matrix;
pub mod mbarrier;
pub mod memory;
pub mod mov;
pub mod opcodes;
pub mod shared_matrix;
pub mod tcgen05;
pub mod tensor_map;
pub mod warp;
pub mod wgmma;
