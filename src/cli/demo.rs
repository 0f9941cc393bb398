//! `bellwire demo`

use clap::Args;

use super::Failure;
use crate::config::Config;

/// Write events, kill a relay midway, and count what arrives.
#[derive(Args, Debug)]
pub(super) struct Arguments {}

pub(super) async fn run(_: Config, _: Arguments) -> Result<u8, Failure> {
    Ok(0)
}
