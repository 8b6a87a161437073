//! Bulk and tensor copies by the async proxy (PTX ISA, "Data Movement: cp.async.bulk, cp.reduce.async.bulk,
//! cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.commit_group, cp.async.bulk.wait_group, st.async").
//! Which bytes a tensor copy moves is in [`crate::hw::tensor_map`].
//!
//! A copy into shared memory signals an mbarrier for each CTA that receives it (`target`); a copy out of it belongs to
//! a group of its thread (`groups`).

pub mod groups;
pub mod linear;
pub mod reduction;
pub mod shared;
pub mod st_async;
pub mod target;
pub mod tensor;
