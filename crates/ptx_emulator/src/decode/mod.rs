//! Translation of the parsed module into decoded kernels: names become registers, addresses and labels, and each
//! instruction becomes a step. This module knows no opcode: [`kernel::decode`] takes the opcode table as an argument.

pub mod call;
pub mod error;
pub mod form;
pub mod kernel;
pub mod names;
pub mod opcode;
pub mod parsed;
