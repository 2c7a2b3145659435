//! Compiles the client protocol's messages. It stands beside the house, so it makes its own from the one schema.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../../../proto");
    println!("cargo::rerun-if-changed={}", root.join("ifrt").display());
    let files = ["value", "session", "grpc"].map(|name| root.join("ifrt").join(name).with_extension("proto"));
    let descriptors = protox::compile(files, [&root])?;
    tonic_prost_build::configure().build_client(false).build_server(false).bytes(".").compile_fds(descriptors)?;
    Ok(())
}
