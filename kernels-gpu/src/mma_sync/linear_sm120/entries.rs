//! The entries of this kernel's instances.

use cuda_std::{kernel, tensor_map_of_parameter};

use super::abi::{INSTANCES, Index, instances};
use crate::{
    units::OperandType,
    wgmma::linear_sm90::{
        abi::Launch,
        by_warp::{
            abi::Instance,
            kernel::{Built, ByWarp, entries},
        },
    },
};

instances!(entries);
