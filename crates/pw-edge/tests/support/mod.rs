//! A core played by the test, a raw client, and a worker's end of the data plane.
#![allow(dead_code, unreachable_pub)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use pw_edge::{EdgeConfig, EdgeError, Listeners};
use pw_net::data::{DataServer, UploadSink, UploadTarget};
use pw_proto::ifrt::{Attribute, attribute_map, pb};
use pw_types::*;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

pub use pb::ifrt_request::Request as Wire;
pub use pb::ifrt_response::Response as Body;

pub const DATA_TOKEN: &str = "between us";

/// Everything in these tests happens at once; this only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(30);

pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("still waiting: {what}"))
}

/// An edge, and the core's side of it.
pub struct Rig {
    pub address: String,
    /// Of the port for host callbacks.
    pub callbacks: String,
    pub to_edge: mpsc::UnboundedSender<Vec<ToEdge>>,
    pub events: mpsc::UnboundedReceiver<Event>,
    /// Most requests of all sessions that were in the inbox at a time.
    pub inbox_peak: Arc<AtomicUsize>,
    inbox: Arc<AtomicUsize>,
    pub served: tokio::task::JoinHandle<Result<(), EdgeError>>,
}

impl Rig {
    pub async fn start(config: EdgeConfig) -> Rig {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let channels = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let callbacks = channels.local_addr().expect("it is bound").to_string();
        let listeners = Listeners { clients: listener, callbacks: Some(channels) };
        let (to_edge, from_core) = mpsc::unbounded_channel();
        let (sender, events) = mpsc::unbounded_channel();
        let inbox = Arc::new(AtomicUsize::new(0));
        let inbox_peak = Arc::new(AtomicUsize::new(0));
        let (count, peak) = (Arc::clone(&inbox), Arc::clone(&inbox_peak));
        let emit = move |event| {
            if matches!(event, Event::Request { .. }) {
                peak.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            }
            let _ = sender.send(event);
        };
        let config = EdgeConfig { data_token: DATA_TOKEN.to_owned(), ..config };
        let served = tokio::spawn(pw_edge::serve(listeners, config, Arc::new(emit), from_core));
        Rig { address, callbacks, to_edge, events, inbox_peak, inbox, served }
    }

    pub fn tell(&self, messages: impl IntoIterator<Item = ToEdge>) {
        self.to_edge.send(messages.into_iter().collect()).expect("the edge is there");
    }

    pub async fn event(&mut self) -> Event {
        soon("an event", self.events.recv()).await.expect("the edge is there")
    }

    /// The next request, taken out of the inbox at once.
    pub async fn request(&mut self) -> (SessionId, OpId, Request) {
        match self.event().await {
            Event::Request { session, op, request, .. } => {
                self.consume(session, 1);
                (session, op, request)
            }
            other => panic!("{other:?} is no request"),
        }
    }

    pub fn consume(&self, session: SessionId, count: u32) {
        self.inbox.fetch_sub(count as usize, Ordering::SeqCst);
        self.tell([ToEdge::Consumed { session, count }]);
    }

    pub fn reply(&self, session: SessionId, op: OpId, result: Result<Reply, Status>) {
        self.tell([ToEdge::Reply { session, op, result }]);
    }

    pub async fn client(&self) -> Client {
        Client::connect(&self.address).await
    }

    /// A session that is ready.
    pub async fn session(&mut self, client: &Client) -> Session {
        let mut session = client.session(&[]).await;
        session.send(Wire::InitRequest(pb::InitRequest {})).await;
        let Event::SessionOpened { session: id, options } = self.event().await else { panic!("no session was opened") };
        let (platform_name, platform_version) = ("cpu".to_owned(), "0".to_owned());
        self.tell([ToEdge::SessionReady(SessionView { session: id, platform_name, platform_version, devices: Vec::new() })]);
        let response = session.response().await;
        let Some(Body::InitResponse(init)) = response.response else { panic!("{response:?}") };
        assert_eq!(init.session_id, id.0);
        session.id = id;
        session.name = options.name;
        session
    }
}

#[derive(Clone)]
pub struct Client {
    channel: Channel,
}

type Called<T> = Result<tonic::Response<T>, tonic::Status>;

impl Client {
    pub async fn connect(address: &str) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("it is an address");
        // A small window, so that a client that does not read is noticed soon.
        let endpoint = endpoint.initial_stream_window_size(64 << 10).initial_connection_window_size(8 << 20);
        Client { channel: soon("a connection", endpoint.connect()).await.expect("the edge listens") }
    }

    async fn grpc(&self) -> Grpc<Channel> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        soon("the channel", grpc.ready()).await.expect("the connection lives");
        grpc
    }

    pub async fn unary<Q, R>(&self, method: &'static str, message: Q) -> Called<R>
    where
        Q: Message + Send + 'static,
        R: Message + Default + Send + 'static,
    {
        let path = http::uri::PathAndQuery::from_static(method);
        soon(method, self.grpc().await.unary(tonic::Request::new(message), path, ProstCodec::<Q, R>::default())).await
    }

    pub async fn version(&self, min: i32, max: i32, serdes: i32) -> Result<(i32, i32), tonic::Status> {
        let version =
            |protocol_version, ifrt_serdes_version_number| Some(pb::IfrtProxyVersion { protocol_version, ifrt_serdes_version_number });
        let asked = pb::GrpcGetVersionRequest { min_version: version(min, 0), max_version: version(max, serdes) };
        let got = self.unary::<_, pb::GrpcGetVersionResponse>("/xla.ifrt.proxy.GrpcIfrtService/GetVersion", asked).await?;
        let got = got.into_inner().version.expect("a version");
        Ok((got.protocol_version, got.ifrt_serdes_version_number))
    }

    /// Opens a stream with these options.
    pub async fn session(&self, options: &[(&str, Attribute)]) -> Session {
        self.session_of(options).await
    }

    /// A stream whose requests are of another type.
    pub async fn session_of<Q: Message + Send + 'static>(&self, options: &[(&str, Attribute)]) -> Session<Q> {
        let metadata = pb::GrpcIfrtSessionMetadata {
            version: Some(pb::IfrtProxyVersion { protocol_version: 25, ifrt_serdes_version_number: 3 }),
            initialization_data: Some(attribute_map(options.iter().cloned())),
        };
        let (requests, stream) = mpsc::channel(64);
        let mut request = tonic::Request::new(ReceiverStream::new(stream));
        insert(&mut request, "ifrt-proxy-grpc-ifrt-session-metadata-bin", &metadata);
        let path = http::uri::PathAndQuery::from_static("/xla.ifrt.proxy.GrpcIfrtService/IfrtSession");
        let codec = ProstCodec::<Q, pb::IfrtResponse>::default();
        let responses = soon("a session", self.grpc().await.streaming(request, path, codec)).await.expect("it is accepted").into_inner();
        Session { id: SessionId(0), name: String::new(), requests, responses, next_op: 1 }
    }

    /// Begins to store a host buffer; its pieces come by the sender.
    pub fn store(&self, session: SessionId, handle: u64, size: i64) -> (mpsc::UnboundedSender<Bytes>, tokio::task::JoinHandle<Called<()>>) {
        let (pieces, stream) = mpsc::unbounded_channel();
        let stream = UnboundedReceiverStream::new(stream);
        let messages = tokio_stream::StreamExt::map(stream, |data| pb::GrpcHostBufferStoreRequest { data });
        let mut request = tonic::Request::new(messages);
        let metadata = pb::GrpcHostBufferStoreMetadata { session_id: session.0, handle, buffer_size: size };
        insert(&mut request, "ifrt-proxy-grpc-host-buffer-store-metadata-bin", &metadata);
        let client = self.clone();
        let call = tokio::spawn(async move {
            let path = http::uri::PathAndQuery::from_static("/xla.ifrt.proxy.GrpcIfrtService/HostBufferStore");
            let codec = ProstCodec::<pb::GrpcHostBufferStoreRequest, pb::GrpcHostBufferStoreResponse>::default();
            client.grpc().await.client_streaming(request, path, codec).await.map(|response| response.map(drop))
        });
        (pieces, call)
    }

    /// Stores `data` in messages of this size.
    pub fn store_all(&self, session: SessionId, handle: u64, data: &Bytes, message: usize) -> tokio::task::JoinHandle<Called<()>> {
        let (pieces, call) = self.store(session, handle, data.len() as i64);
        for at in (0..data.len()).step_by(message) {
            let _ = pieces.send(data.slice(at..data.len().min(at + message)));
        }
        call
    }

    pub async fn lookup(&self, session: SessionId, handle: u64) -> Result<Vec<u8>, tonic::Status> {
        let asked = pb::GrpcHostBufferLookupRequest { session_id: session.0, handle };
        let path = http::uri::PathAndQuery::from_static("/xla.ifrt.proxy.GrpcIfrtService/HostBufferLookup");
        let codec = ProstCodec::<pb::GrpcHostBufferLookupRequest, pb::GrpcHostBufferLookupResponse>::default();
        let call = self.grpc().await.server_streaming(tonic::Request::new(asked), path, codec).await;
        let mut stream = call?.into_inner();
        let (mut data, mut messages) = (Vec::new(), 0);
        while let Some(message) = soon("bytes of a host buffer", stream.message()).await? {
            data.extend_from_slice(&message.data);
            messages += 1;
        }
        assert!(messages > 0, "even an empty host buffer is one message");
        Ok(data)
    }
}

fn insert<T>(request: &mut tonic::Request<T>, name: &'static str, message: &impl Message) {
    let value = tonic::metadata::BinaryMetadataValue::from_bytes(&message.encode_to_vec());
    request.metadata_mut().insert_bin(name, value);
}

/// The client's end of a session stream.
pub struct Session<Q = pb::IfrtRequest> {
    pub id: SessionId,
    pub name: String,
    pub requests: mpsc::Sender<Q>,
    pub responses: tonic::Streaming<pb::IfrtResponse>,
    pub next_op: u64,
}

pub fn request(op: u64, user_context: u64, wire: Wire) -> pb::IfrtRequest {
    let request_metadata = Some(pb::RequestMetadata { op_id: op, user_context_id: user_context });
    pb::IfrtRequest { request_metadata, request: Some(wire) }
}

impl Session {
    pub async fn send(&mut self, wire: Wire) -> u64 {
        self.send_with(0, wire).await
    }

    pub async fn send_with(&mut self, user_context: u64, wire: Wire) -> u64 {
        let op = self.next_op;
        self.next_op += 1;
        soon("room for a request", self.requests.send(request(op, user_context, wire))).await.expect("the session lives");
        op
    }
}

impl<Q> Session<Q> {
    pub async fn response(&mut self) -> pb::IfrtResponse {
        soon("a response", self.responses.message()).await.expect("the session lives").expect("the session goes on")
    }

    /// The status of a response without a body.
    pub async fn error(&mut self) -> pb::StatusProto {
        let response = self.response().await;
        assert!(response.response.is_none(), "{response:?}");
        response.response_metadata.and_then(|metadata| metadata.status).expect("a status")
    }
}

pub fn destruct(array: u64) -> Wire {
    Wire::DestructArrayRequest(pb::DestructArrayRequest { array_handle: vec![array] })
}

pub fn copy_to_host(array: u64, buffer: u64) -> Wire {
    Wire::CopyToHostBufferRequest(pb::CopyToHostBufferRequest { array_handle: array, host_buffer_handle: buffer, byte_strides: None })
}

/// A worker's data plane, and what came in.
pub struct Worker {
    pub server: DataServer,
    pub address: String,
    pub landed: mpsc::UnboundedReceiver<Landed>,
    pub begun: mpsc::UnboundedReceiver<Handle>,
    pub slot: HostSlot,
}

/// How an upload, or a session, ended at the worker.
#[derive(Debug, PartialEq)]
pub enum Landed {
    Bytes(Handle, Vec<u8>),
    Failed(Handle, Status),
    Detached(SessionId),
}

struct Uploads(mpsc::UnboundedSender<Landed>, mpsc::UnboundedSender<Handle>);

impl UploadSink for Uploads {
    fn begin(&self, _: SessionId, buffer: Handle, total: u64) -> Result<Box<dyn UploadTarget>, Status> {
        let _ = self.1.send(buffer);
        Ok(Box::new(vec![0u8; total as usize]))
    }

    fn landed(&self, _: SessionId, buffer: Handle, target: Box<dyn UploadTarget>) {
        let bytes = target.into_any().downcast::<Vec<u8>>().expect("made above");
        let _ = self.0.send(Landed::Bytes(buffer, *bytes));
    }

    fn failed(&self, _: SessionId, buffer: Handle, status: Status) {
        let _ = self.0.send(Landed::Failed(buffer, status));
    }

    fn detached(&self, session: SessionId) {
        let _ = self.0.send(Landed::Detached(session));
    }
}

impl Worker {
    pub async fn start(slot: u32) -> Worker {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (sender, landed) = mpsc::unbounded_channel();
        let (begins, begun) = mpsc::unbounded_channel();
        let server = DataServer::start(listener, DATA_TOKEN.to_owned(), Arc::new(Uploads(sender, begins)));
        Worker { server, address, landed, begun, slot: HostSlot(slot) }
    }

    pub fn up(&self) -> ToEdge {
        ToEdge::WorkerUp { slot: self.slot, incarnation: Incarnation(1), data_address: self.address.clone() }
    }

    pub async fn next(&mut self) -> Landed {
        soon("an upload", self.landed.recv()).await.expect("the server lives")
    }
}

pub fn route(session: SessionId, buffer: u64, bytes: u64, hosts: &[u32]) -> ToEdge {
    ToEdge::Route { session, buffer: Handle(buffer), bytes, hosts: hosts.iter().map(|&slot| HostSlot(slot)).collect() }
}

/// Bytes that differ by position and by `seed`.
pub fn pattern(seed: u64, length: usize) -> Bytes {
    let word =
        |at: usize| (seed.wrapping_mul(0x9e37_79b9).wrapping_add(at as u64 / 8).wrapping_mul(0x2545_f491_4f6c_dd1d)).to_le_bytes()[at % 8];
    (0..length).map(word).collect::<Vec<u8>>().into()
}
