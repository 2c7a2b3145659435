//! The controller and the edge, as far as a worker sees them.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pw_net::control::{Answer, ControlReader, ControlWriter, ControllerFrame, Hello, Sequence, Stamp, WorkerFrame, accept};
use pw_net::data::{DataClient, DownloadSink};
use pw_types::*;
use pw_worker::{WorkerConfig, WorkerError, run};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub(crate) const SESSION: SessionId = SessionId(77);
const WAIT: Duration = Duration::from_secs(60);

pub(crate) fn config(plugin: &Path, cache_dir: &Path, controller: String, test_targets: bool) -> WorkerConfig {
    let this = std::env::current_exe().expect("this program");
    let child: [OsString; 6] =
        [this.into(), "compile-child".into(), plugin.into(), cache_dir.into(), "4".into(), test_targets.to_string().into()];
    WorkerConfig {
        controller,
        token: "secret".to_owned(),
        plugin: plugin.to_owned(),
        devices: Some(4),
        device_memory: Some(1 << 30),
        cache_dir: cache_dir.to_owned(),
        test_targets,
        lapack: Default::default(),
        island: 0,
        slot: None,
        listen_data: "127.0.0.1:0".parse().expect("an address"),
        gang_port: 0,
        advertise: None,
        host: "localhost".to_owned(),
        build: "test".to_owned(),
        compile_child: child.to_vec(),
        parent_pid: None,
    }
}

/// One worker and the other ends of its connections.
pub(crate) struct Controller {
    pub(crate) info: WorkerInfo,
    pub(crate) worker: JoinHandle<Result<(), WorkerError>>,
    pub(crate) edge: DataClient,
    pub(crate) downloads: Arc<Downloads>,
    reader: ControlReader,
    writer: ControlWriter,
    sequence: Sequence<Stamp>,
    reports: VecDeque<Report>,
    pub(crate) memory: Vec<u64>,
    seq: u64,
    run: u64,
}

impl Controller {
    pub(crate) async fn start(plugin: &Path, cache_dir: &Path, test_targets: bool) -> Controller {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let worker = tokio::spawn(run(config(plugin, cache_dir, address, test_targets)));
        let accepted = tokio::time::timeout(WAIT, listener.accept()).await;
        let Ok(Ok((tcp, _))) = accepted else { panic!("no worker came: {:?}", worker.await) };
        let (mut reader, mut writer) = accept(tcp).await.expect("a greeting");
        let Some(Hello::Worker { incarnation, info, token, .. }) = reader.next().await.expect("a hello") else { panic!("no worker") };
        assert_eq!(token, "secret");
        writer.send(&Answer::Welcome { slot: HostSlot(0), incarnation, received: 0 }).await.expect("a welcome");
        let downloads = Arc::new(Downloads::default());
        let edge = DataClient::connect(&info.data_address, "secret", downloads.clone()).await.expect("a data plane");
        edge.attach(SESSION).await.expect("attached");
        let sequence = Sequence::new(incarnation, 1 << 20);
        let (reports, memory) = (VecDeque::new(), Vec::new());
        Controller { info, worker, edge, downloads, reader, writer, sequence, reports, memory, seq: 0, run: 0 }
    }

    pub(crate) async fn send(&mut self, commands: Vec<Command>) {
        let Stamp { seq, ack, incarnation } = *self.sequence.send(|stamp| stamp).expect("room");
        self.writer.send(&ControllerFrame { seq, ack, incarnation, commands }).await.expect("sent");
    }

    pub(crate) fn order(&mut self) -> NodeOrder {
        let previous = GrantSeq(self.seq);
        self.seq += 1;
        self.run += 1;
        NodeOrder { run: RunId(self.run), seq: GrantSeq(self.seq), previous, session: SESSION }
    }

    /// The next report that is not about memory or traffic.
    pub(crate) async fn report(&mut self) -> Report {
        loop {
            match self.reports.pop_front() {
                Some(Report::Memory { bytes_in_use }) => self.memory = bytes_in_use,
                Some(Report::Traffic(_)) => {}
                Some(report) => return report,
                None => self.receive().await,
            }
        }
    }

    /// Takes one frame.
    pub(crate) async fn receive(&mut self) {
        let frame = tokio::time::timeout(WAIT, self.reader.next::<WorkerFrame>()).await.expect("a frame in time");
        let frame = frame.expect("a good frame").expect("the worker goes on");
        let stamp = Stamp { seq: frame.seq, ack: frame.ack, incarnation: frame.incarnation };
        self.sequence.receive(stamp, frame.reports.is_empty()).expect("frames in order");
        self.reports.extend(frame.reports);
    }

    pub(crate) async fn finished(&mut self, wanted: RunId) -> Result<u64, Status> {
        match self.report().await {
            Report::Finished { run, device_ns, result } if run == wanted => result.map(|()| device_ns),
            other => panic!("waiting for run {wanted}, got {other:?}"),
        }
    }

    pub(crate) async fn compile(&mut self, id: u64, program: Vec<u8>, devices: &[u32]) -> Result<Arc<CompileReport>, Status> {
        let options = if devices.len() == 4 { Bytes::from_static(crate::programs::OPTIONS) } else { Bytes::new() };
        let partitions = devices.len() as u32;
        let executable = ExecutableId(id);
        let command = CompileCommand { executable, program: program.into(), options, devices: devices.to_vec(), replicas: 1, partitions };
        self.send(vec![Command::Compile(command)]).await;
        match self.report().await {
            Report::Compiled { executable, result } if executable.0 == id => result,
            other => panic!("waiting for a compile, got {other:?}"),
        }
    }

    pub(crate) async fn load(&mut self, id: u64, report: &CompileReport) {
        self.send(vec![Command::Load { executable: ExecutableId(id), fingerprint: report.fingerprint.clone(), gang: None }]).await;
        assert_eq!(self.report().await, Report::Loaded { executable: ExecutableId(id), result: Ok(()) });
    }

    pub(crate) async fn program(&mut self, id: u64, program: Vec<u8>, devices: &[u32]) -> Arc<CompileReport> {
        let report = self.compile(id, program, devices).await.expect("it compiles");
        self.load(id, &report).await;
        report
    }

    pub(crate) fn launch(&mut self, executable: u64, arguments: &[(RunId, u32, bool)]) -> (RunId, Command) {
        let order = self.order();
        let arguments = arguments.iter().map(|&(run, count, donate)| {
            let buffer = BufferId { run, output: 0 };
            Argument { segments: vec![Segment { buffer, first: 0, count }], donate }
        });
        let launch = Launch { order, executable: ExecutableId(executable), arguments: arguments.collect(), launch_id: 0 };
        (order.run, Command::Launch(launch))
    }

    /// Uploads an array; each device takes all of it, or its region.
    pub(crate) async fn upload(&mut self, data: &[f32], dims: &[i64], targets: Vec<(u32, Option<Region>)>) -> RunId {
        let order = self.order();
        let buffer = Handle(order.run.0);
        let shards = targets.len() as u32;
        let targets = (0..).zip(targets).map(|(shard, (device, region))| HostWriteTarget { shard, device, region }).collect();
        let source = HostWriteSource { buffer, dtype: DType::F32, dims: dims.to_vec(), byte_strides: None, targets };
        self.send(vec![Command::HostWrite(HostWrite { order, sender: order.session, sources: vec![source], memory_kind: None, shards })])
            .await;
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.edge.put_begin(SESSION, buffer, bytes.len() as u64).await.expect("begun");
        if !bytes.is_empty() {
            self.edge.put_chunk(SESSION, buffer, bytes.into()).await.expect("sent");
        }
        self.finished(order.run).await.expect("uploaded");
        order.run
    }

    /// The whole array out of pieces: shard and its region.
    pub(crate) async fn fetch(
        &mut self,
        run: RunId,
        dims: &[i64],
        byte_strides: Option<Vec<i64>>,
        pieces: &[(u32, Option<Region>)],
    ) -> Result<Vec<f32>, Status> {
        let order = self.order();
        let buffer = Handle(order.run.0);
        let pieces = pieces.iter().map(|(shard, region)| HostReadPiece {
            source: ShardId { buffer: BufferId { run, output: 0 }, shard: *shard },
            region: region.clone(),
        });
        let read = HostRead { order, buffer, dtype: DType::F32, dims: dims.to_vec(), byte_strides, pieces: pieces.collect() };
        self.send(vec![Command::HostRead(read)]).await;
        let finished = self.finished(order.run).await;
        let bytes = self.downloads.take(&self.edge, buffer).await?;
        finished?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect())
    }

    pub(crate) async fn free(&mut self, runs: &[RunId]) {
        let buffers = runs.iter().map(|&run| BufferId { run, output: 0 }).collect();
        self.send(vec![Command::Free { buffers }]).await;
    }
}

#[derive(Default)]
pub(crate) struct Downloads {
    entries: Mutex<BTreeMap<Handle, Download>>,
    changed: tokio::sync::Notify,
}

struct Download {
    total: u64,
    bytes: Vec<u8>,
    failed: Option<Status>,
}

impl Downloads {
    pub(crate) async fn take(&self, edge: &DataClient, buffer: Handle) -> Result<Vec<u8>, Status> {
        let mut pulled = false;
        loop {
            let (done, total) = match self.entries.lock().expect("the lock").get(&buffer) {
                None => (false, 0),
                Some(d) => (d.failed.is_some() || d.bytes.len() as u64 == d.total, d.total),
            };
            if done {
                let download = self.entries.lock().expect("the lock").remove(&buffer).expect("just seen");
                return download.failed.map_or(Ok(download.bytes), Err);
            }
            if total > 0 && !pulled {
                pulled = true;
                edge.pull(SESSION, buffer, total).await.expect("pulled");
            }
            tokio::time::timeout(WAIT, self.changed.notified()).await.expect("bytes in time");
        }
    }

    fn change(&self, buffer: Handle, total: u64, f: impl FnOnce(&mut Download)) {
        let mut entries = self.entries.lock().expect("the lock");
        f(entries.entry(buffer).or_insert(Download { total, bytes: Vec::new(), failed: None }));
        self.changed.notify_one();
    }
}

impl DownloadSink for Downloads {
    fn offered(&self, _: SessionId, buffer: Handle, total: u64) {
        self.change(buffer, total, |_| {});
    }

    fn chunk(&self, _: SessionId, buffer: Handle, data: Bytes) {
        self.change(buffer, 0, |d| d.bytes.extend_from_slice(&data));
    }

    fn failed(&self, _: SessionId, buffer: Handle, status: Status) {
        self.change(buffer, 0, |d| d.failed = Some(status));
    }

    fn disconnected(&self, _: &str) {}
}
