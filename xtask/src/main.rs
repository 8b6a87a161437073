//! This workspace's own tasks: one file a command.

fn main() {}
