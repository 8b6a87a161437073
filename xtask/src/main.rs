//! Tasks of this workspace, one file per command.

mod accuracy;
mod additions;
mod bless;
mod build_ptx;
mod card;
mod counters;
mod dist;
mod document;
mod emulate;
mod experiments;
mod kernels;
mod loops;
mod others;
mod picture;
mod ptxas;
mod publish;
mod release;
mod sass;
mod snapshot;
mod table;
mod tidy;
mod time_model;
mod tools;
mod wgmma;
mod wheels;
mod work;
mod workspace;

use clap::Parser;

/// Tasks of this workspace
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Command {
    Accuracy(accuracy::Args),
    Additions(additions::Args),
    Bless(bless::Args),
    BuildPtx(build_ptx::Args),
    Card(card::Args),
    Counters(counters::Args),
    Dist(dist::Args),
    Experiments(experiments::Args),
    Kernels(kernels::Args),
    Others(others::Args),
    Picture(picture::Args),
    Ptxas(ptxas::Args),
    Publish(publish::Args),
    Sass(sass::Args),
    Snapshot(snapshot::Args),
    Tidy(tidy::Args),
    TimeModel(time_model::Args),
    Wheels(wheels::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Accuracy(args) => accuracy::run(&args),
        Command::Additions(args) => additions::run(&args),
        Command::Bless(args) => bless::run(&args),
        Command::BuildPtx(args) => build_ptx::run(&args),
        Command::Card(args) => card::run(&args),
        Command::Counters(args) => counters::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Experiments(args) => experiments::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Others(args) => others::run(&args),
        Command::Picture(args) => picture::run(&args),
        Command::Ptxas(args) => ptxas::run(&args),
        Command::Publish(args) => publish::run(&args),
        Command::Sass(args) => sass::run(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::TimeModel(args) => time_model::run(&args),
        Command::Wheels(args) => wheels::run(&args),
    }
}
