//! Entries of Hopper's instances.

use cuda_std::kernel;

use super::{
    abi::{INSTANCES, Index, Instance, instances},
    kernel::{Built, Moe, entries},
};
use crate::moe::Launch;
use crate::units::OperandType;

instances!(entries);
