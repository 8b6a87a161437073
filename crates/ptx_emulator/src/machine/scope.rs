//! Scopes of strong accesses and fences (PTX ISA, "Memory Consistency Model: Scope").

/// Set of threads that an operation addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    Cta,
    Cluster,
    /// `.gpu` or `.sys`: the emulator has only one device.
    #[default]
    Gpu,
}

impl Scope {
    /// Modifiers that name a scope.
    pub const NAMES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];

    /// The scope that a modifier names.
    pub fn named(name: &str) -> Scope {
        match name {
            "cta" => Scope::Cta,
            "cluster" => Scope::Cluster,
            _ => Scope::Gpu,
        }
    }

    /// Name of the scope as a PTX modifier.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Cta => ".cta",
            Scope::Cluster => ".cluster",
            Scope::Gpu => ".gpu",
        }
    }
}

/// Location of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The cluster's number in the grid.
    pub cluster: u32,
    /// The CTA's rank in its cluster.
    pub cta: u32,
}

impl Origin {
    /// Whether two operations with this scope, one at each origin, include each other's threads.
    pub fn shares(self, other: Origin, scope: Scope) -> bool {
        match scope {
            Scope::Cta => self == other,
            Scope::Cluster => self.cluster == other.cluster,
            Scope::Gpu => true,
        }
    }
}
