//! `pathways sim`.

use std::process::ExitCode;

use anyhow::Result;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run this one seed
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(_args: Args) -> Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
