//! From the parsed module to decoded kernels: names become registers, addresses and labels, and each instruction
//! becomes a step. Knows no opcode: the table of opcodes is given to it ([`kernel::decode`]).

pub mod call;
pub mod error;
pub mod form;
pub mod kernel;
pub mod names;
pub mod opcode;
pub mod parsed;
