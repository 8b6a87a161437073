//! Operations of instructions and asynchronous operations on the state, with the checks of each access.

mod dropped_reads;
pub mod grid;
pub mod mbarrier;
pub mod memory;
pub mod order;
pub mod requests;
pub mod row;
pub mod tensor_memory;
