//! The null server: what the stock IFRT proxy client itself allows.
//!
//! It answers every request at once, computes nothing and keeps no values: uploads are dropped, downloads are zeros. What a
//! client reaches against it is the floor of every figure about the client's path (`pathways bench`). Programs tell it how many
//! devices and results they have by their name, `pwnull_<devices>x<results>`; results have the shapes of the arguments.
//!
//! Host buffers bypass the gRPC codec, as in the edge. One thread does everything that is measured. Not a server for anything but measuring:
//! what is malformed ends the connection or the process.

mod host_buffers;
mod service;
mod session;
mod wire;

/// What the build script made of `proto/ifrt`.
#[allow(clippy::all, dead_code, unreachable_pub, missing_docs, rustdoc::all)]
mod pb {
    include!(concat!(env!("OUT_DIR"), "/xla.ifrt.proxy.rs"));
}

use std::error::Error;
use std::net::Ipv4Addr;
use std::sync::Arc;

use clap::Parser;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;

/// Answer stock JAX at once and compute nothing: the floor of the benches.
///
/// Prints its port, then serves until it is killed. Point a client to it with JAX_PLATFORMS=proxy
/// JAX_BACKEND_TARGET=grpc://127.0.0.1:PORT. The defaults of the windows are those with which the client's bulk transfers
/// are fastest.
#[derive(Parser)]
#[command(name = "pathways-null", version, max_term_width = 110)]
struct Args {
    /// Port to listen on, on loopback only; 0 = any free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Devices that a client sees
    #[arg(long, default_value_t = 8)]
    devices: i32,
    /// HTTP/2 window of one stream, in bytes: what a client may send ahead in one upload
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20)]
    stream_window: u32,
    /// HTTP/2 window of one connection, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20)]
    connection_window: u32,
    /// Largest HTTP/2 frame, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20)]
    frame: u32,
    /// Bytes of one message of a download
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    chunk: usize,
    /// End when standard input is closed, so with the process that holds its other end
    #[arg(long)]
    with_stdin: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.with_stdin {
        std::thread::spawn(|| {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            std::process::exit(0);
        });
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: Args) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await?;
    println!("{}", listener.local_addr()?.port());
    let service = service::Service::new(Arc::new(host_buffers::HostBuffers::new(args.chunk)), args.devices);
    tonic::transport::Server::builder()
        .initial_stream_window_size(args.stream_window)
        .initial_connection_window_size(args.connection_window)
        .max_frame_size(args.frame)
        .serve_with_incoming(service, TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await?;
    Ok(())
}
