//! Memory for weights: gigabytes, written once and then read sequentially.

use std::marker::PhantomData;
use std::ops::Deref;

use bytemuck::Pod;
use memmap2::MmapMut;
use rayon::prelude::*;

use crate::Error;

/// A slice in its own memory pages, which are huge pages if the system has them. With small pages, a step that mostly
/// reads weights spends up to a tenth of its time on address translation.
pub(super) struct Pages<T> {
    map: MmapMut,
    items: PhantomData<T>,
}

impl<T: Pod + Send> Pages<T> {
    /// Writes the items into new pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the memory cannot be allocated.
    pub fn collect(items: impl IndexedParallelIterator<Item = T>) -> Result<Self, Error> {
        let bytes = items.len() * size_of::<T>();
        let mut map = MmapMut::map_anon(bytes)
            .map_err(|error| Error::Invalid(format!("cannot allocate {bytes} bytes for weights: {error}")))?;
        #[cfg(target_os = "linux")]
        {
            // Only advice: a system without huge pages gives small pages.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        bytemuck::cast_slice_mut(&mut map).par_iter_mut().zip(items).for_each(|(place, item)| *place = item);
        Ok(Self { map, items: PhantomData })
    }
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.map)
    }
}
