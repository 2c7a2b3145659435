//! The gRPC service: which call is what, and which version is spoken.

use std::convert::Infallible;
use std::io::Read as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pw_proto::ifrt::{self, PROTOCOL_VERSIONS, pb};
use pw_types::{Code, Handle, SessionId, Status};

use crate::connection::ConnectionHandle;
use crate::downloads::Lookup;
use crate::grpc::{self, Body, Messages};
use crate::hub::Hub;
use crate::session::{self, Responses, Session};
use crate::uploads;

const SERVICE: &str = "/xla.ifrt.proxy.GrpcIfrtService/";
const SESSION_HEADER: &str = "ifrt-proxy-grpc-ifrt-session-metadata-bin";
const STORE_HEADER: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";

type Response = http::Response<Body>;

#[derive(Clone)]
pub(crate) struct Service {
    hub: Arc<Hub>,
}

impl Service {
    pub(crate) fn new(hub: Arc<Hub>) -> Service {
        Service { hub }
    }
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let hub = Arc::clone(&self.hub);
        Box::pin(async move { Ok(call(hub, request).await.unwrap_or_else(|status| grpc::refuse(&status))) })
    }
}

async fn call(hub: Arc<Hub>, request: http::Request<Body>) -> Result<Response, Status> {
    let (head, body) = request.into_parts();
    match head.uri.path().strip_prefix(SERVICE) {
        Some("GetVersion") => {
            let asked: pb::GrpcGetVersionRequest = grpc::unary(body).await?;
            let version = Some(version(&asked)?);
            Ok(grpc::respond(grpc::Once::of(&pb::GrpcGetVersionResponse { version })))
        }
        Some("IfrtSession") => Ok(open(hub, &head, body)),
        Some("HostBufferStore") => {
            let meta: pb::GrpcHostBufferStoreMetadata = grpc::binary_header(&head.headers, STORE_HEADER)?;
            let total = u64::try_from(meta.buffer_size).map_err(|_| Status::invalid("the size of a host buffer is negative"))?;
            let session = find(&hub, meta.session_id)?;
            // A task of its own, so that a call that the client breaks off is still brought to its end.
            let store = tokio::spawn(uploads::store(hub, session, Handle(meta.handle), total, body));
            store.await.unwrap_or_else(|_| Err(Status::internal("a host buffer could not be stored")))?;
            Ok(grpc::respond(grpc::Once::of(&pb::GrpcHostBufferStoreResponse {})))
        }
        Some("HostBufferLookup") => {
            let asked: pb::GrpcHostBufferLookupRequest = grpc::unary(body).await?;
            let session = find(&hub, asked.session_id)?;
            Ok(grpc::respond(Lookup::new(session, Handle(asked.handle))?))
        }
        Some("HostBufferDelete") => {
            let asked: pb::GrpcHostBufferDeleteRequest = grpc::unary(body).await?;
            if let Some(session) = hub.session(SessionId(asked.session_id)) {
                session.downloads.forget(&session, Handle(asked.handle));
            }
            Ok(grpc::respond(grpc::Once::of(&pb::GrpcHostBufferDeleteResponse {})))
        }
        Some("HostBufferReadFromDisk") => Err(Status::unimplemented(
            "host buffers through a shared directory are not served: unset IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY",
        )),
        _ => Err(Status::unimplemented(format!("{} is no call of this server", head.uri.path()))),
    }
}

fn find(hub: &Hub, session: u64) -> Result<Arc<Session>, Status> {
    let session = SessionId(session);
    hub.session(session).ok_or_else(|| uploads::unknown_session(session))
}

/// The newest protocol that both speak. The other number has no meaning for us, and works only at the client's maximum.
fn version(asked: &pb::GrpcGetVersionRequest) -> Result<pb::IfrtProxyVersion, Status> {
    let min = asked.min_version.unwrap_or_default();
    let max = asked.max_version.unwrap_or_default();
    let (ours_min, ours_max) = (*PROTOCOL_VERSIONS.start(), *PROTOCOL_VERSIONS.end());
    let protocol_version = max.protocol_version.min(ours_max);
    if protocol_version < min.protocol_version.max(ours_min) {
        return Err(Status::new(
            Code::FailedPrecondition,
            format!(
                "this client speaks IFRT proxy protocol {} to {} and this pathways-rs server {ours_min} to {ours_max}: use another jaxlib \
                 (0.8.0 and later are served) or another server",
                min.protocol_version, max.protocol_version
            ),
        ));
    }
    Ok(pb::IfrtProxyVersion { protocol_version, ifrt_serdes_version_number: max.ifrt_serdes_version_number })
}

/// Begins a session. What is wrong with it is told in the answer to its first request: the status of the stream itself does
/// not reach the user.
fn open(hub: Arc<Hub>, head: &http::request::Parts, body: Body) -> Response {
    let asked = grpc::binary_header(&head.headers, SESSION_HEADER).and_then(|meta: pb::GrpcIfrtSessionMetadata| {
        let version = meta.version.unwrap_or_default().protocol_version;
        if !PROTOCOL_VERSIONS.contains(&version) {
            return Err(Status::new(Code::FailedPrecondition, format!("a session in IFRT proxy protocol {version} cannot be served")));
        }
        Ok(ifrt::attributes(meta.initialization_data.unwrap_or_default()))
    });
    let session = loop {
        let id = random_id();
        if id.0 != 0 && hub.session(id).is_none() {
            break Session::new(id, &hub);
        }
    };
    let connection = head.extensions.get::<ConnectionHandle>().cloned();
    let (responses, taken) = Responses::new(Arc::clone(&session));
    tokio::spawn(async move {
        let wait = hub.config.unread_wait;
        session::read(hub, session, asked, Messages::new(body)).await;
        // What was answered before the end is still read by an honest client.
        if tokio::time::timeout(wait, taken).await.is_err() {
            tracing::warn!("a client that does not read its responses is cut off");
            if let Some(connection) = connection {
                connection.end();
            }
        }
    });
    grpc::respond(responses)
}

/// Not to be guessed: whoever knows it can read and write the session's host buffers.
fn random_id() -> SessionId {
    use std::hash::{BuildHasher, Hasher};
    let mut bytes = [0; 8];
    match std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)) {
        Ok(()) => SessionId::of_client(u64::from_ne_bytes(bytes)),
        // Keyed by the operating system too.
        Err(_) => SessionId::of_client(std::hash::RandomState::new().build_hasher().finish()),
    }
}
