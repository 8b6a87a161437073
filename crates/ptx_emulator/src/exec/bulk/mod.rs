//! Bulk and tensor copies by the async proxy (PTX ISA, "Data Movement: cp.async.bulk, cp.reduce.async.bulk,
//! cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.commit_group, cp.async.bulk.wait_group, st.async").
//! [`crate::hw::tensor_map`] computes which bytes a tensor copy moves.
//!
//! A copy into shared memory signals an mbarrier for each receiving CTA (`target`). A copy out of shared memory belongs
//! to a bulk group of the issuing thread (`groups`).

pub mod groups;
pub mod linear;
pub mod reduction;
pub mod shared;
pub mod st_async;
pub mod target;
pub mod tensor;
