//! How a kernel lists its instances: the ways in which it is built, each with an entry of its own.
//!
//! A kernel's ABI has a macro that passes its list on, one instance a line: `entry = gated(64).stages(4);`. The left side
//! is the entry's name. The right side names what the instance is built from; its last word, `stages`, checks that all of
//! it fits the hardware. Here is what host and device both make of the list; the entries are made in the kernel.

/// Makes `INSTANCES` and `Index` of a list. `Instance` is the kernel's own type, with a field `entry`.
///
/// An instance that does not pass its check is an error at its own line of the list: the check is called from there.
macro_rules! table {
    ($($entry:ident = $instance:expr;)*) => {
        /// Every instance of the kernel.
        pub const INSTANCES: &[Instance] = {
            $(
                #[allow(non_upper_case_globals)]
                const $entry: Instance = Instance { entry: stringify!($entry), ..$instance };
            )*
            &[$($entry),*]
        };

        /// The instances by name: where each is in [`INSTANCES`].
        #[allow(dead_code, non_camel_case_types, reason = "the names of entries; kernels alone use them")]
        pub(super) enum Index { $($entry),* }
    };
}
pub(crate) use table;
