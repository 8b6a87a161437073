//! The entries of Hopper's instances.

use cuda_std::{kernel, tensor_map_of_parameter};

use super::{
    abi::{INSTANCES, Index, Instance, instances},
    kernel::{Built, ByWarp, entries},
};
use crate::{units::OperandType, wgmma::linear_sm90::abi::Launch};

instances!(entries);
