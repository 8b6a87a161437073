//! The entries of Hopper's instances.

use cuda_std::kernel;

use super::{
    abi::{INSTANCES, Index, Instance, Launch, instances},
    kernel::{Built, Moe, entries},
};
use crate::units::OperandType;

instances!(entries);
