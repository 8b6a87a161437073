//! The entries of the instances for sm_120.

use cuda_std::kernel;

use super::abi::{INSTANCES, Index, instances};
use crate::{
    units::OperandType,
    wgmma::moe_sm90::{
        abi::{Instance, Launch},
        kernel::{Built, Moe, entries},
    },
};

instances!(entries);
