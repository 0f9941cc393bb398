//! The `bellwire` binary: everything is in the library.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    bellwire::cli::main(bellwire::cli::Cli::parse())
}
