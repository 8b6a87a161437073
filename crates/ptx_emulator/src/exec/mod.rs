//! Semantics of the instructions, with a file or folder for each family of opcodes. The opcode table ([`opcodes`])
//! names a handler for each form. A handler turns a parsed instruction into a step; [`instruction`] describes its
//! parts.

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
pub mod printf;
pub mod shared_matrix;
pub mod system_call;
pub mod tcgen05;
pub mod tensor_map;
pub mod undefined;
pub mod warp;
pub mod wgmma;
