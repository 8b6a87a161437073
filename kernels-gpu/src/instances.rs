//! Macro for a kernel's list of instances. Each instance is compiled as a separate entry.
//!
//! A kernel's ABI has a macro that passes its list on, one instance per line: `entry = gated(64).stages(4);`. The left
//! side is the entry's name. The right side builds the instance; its last call, `stages`, checks that the whole
//! instance fits the hardware. This file has the part that host and device share. The kernels make the entries.

/// Makes `INSTANCES` and `Index` from a list. `Instance` is the kernel's own type, with a field `entry`.
///
/// An instance that fails its check is a compile error at its own line of the list, because the check is called from
/// there.
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

        /// Instances by name: the index of each one in [`INSTANCES`].
        #[allow(dead_code, non_camel_case_types, reason = "names of entries, which only kernels use")]
        pub(super) enum Index { $($entry),* }
    };
}
pub(crate) use table;
