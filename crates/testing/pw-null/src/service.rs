//! The calls of the gRPC service, by path.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use crate::host_buffers::HostBuffers;
use crate::pb;
use crate::session::Session;
use crate::wire::{self, Body, Once, respond};

const SERVICE: &str = "/xla.ifrt.proxy.GrpcIfrtService/";
const STORE_HEADER: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";

#[derive(Clone)]
pub(crate) struct Service {
    buffers: Arc<HostBuffers>,
    devices: i32,
    sessions: Arc<AtomicU64>,
}

impl Service {
    pub(crate) fn new(buffers: Arc<HostBuffers>, devices: i32) -> Service {
        Service { buffers, devices, sessions: Arc::default() }
    }

    /// `None` = the call is unknown or malformed.
    async fn answer(self, request: http::Request<Body>) -> Option<http::Response<Body>> {
        let (head, body) = request.into_parts();
        Some(match head.uri.path().strip_prefix(SERVICE)? {
            "GetVersion" => {
                let asked: pb::GrpcGetVersionRequest = wire::unary(body).await?;
                respond(Once::of(&pb::GrpcGetVersionResponse { version: asked.max_version }))
            }
            "IfrtSession" => {
                let id = self.sessions.fetch_add(1, Ordering::Relaxed) + 1;
                respond(Session::new(id, self.devices, body, self.buffers))
            }
            "HostBufferStore" => {
                let meta: pb::GrpcHostBufferStoreMetadata = wire::binary_header(&head.headers, STORE_HEADER)?;
                self.buffers.store((meta.session_id, meta.handle), body).await;
                respond(Once::of(&pb::GrpcHostBufferStoreResponse {}))
            }
            "HostBufferLookup" => {
                let asked: pb::GrpcHostBufferLookupRequest = wire::unary(body).await?;
                respond(self.buffers.download((asked.session_id, asked.handle)))
            }
            "HostBufferDelete" => {
                let asked: pb::GrpcHostBufferDeleteRequest = wire::unary(body).await?;
                self.buffers.forget((asked.session_id, asked.handle));
                respond(Once::of(&pb::GrpcHostBufferDeleteResponse {}))
            }
            _ => return None,
        })
    }
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        let refused = || tonic::Status::unimplemented("the null server does not know this call").into_http();
        Box::pin(async move { Ok(service.answer(request).await.unwrap_or_else(refused)) })
    }
}
