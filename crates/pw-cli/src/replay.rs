//! `pathways replay`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A log written by `pathways controller --record FILE`
    file: PathBuf,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    let summary = pw_controller::replay(&args.file, |s| {
        if s.turns % 10_000 == 0 {
            eprintln!("{} turns, {} events", s.turns, s.events);
        }
    })?;
    println!("{} events in {} turns gave the same {} effects", summary.events, summary.turns, summary.effects);
    Ok(ExitCode::SUCCESS)
}
