//! The command `nvfp4`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
