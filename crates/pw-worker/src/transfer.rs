//! Copies, uploads into device buffers, and downloads out of them. They run on threads of their own, except what is
//! so small that handing it over would cost more.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use pw_exec::{ExecEvent, Part, StartCopy, StartRead, StartWrite};
use pw_net::data::{DataServer, DownloadSource};
use pw_pjrt::{AlignedBlock, Buffer, Client, HostBytes, HostView, PjrtError};
use pw_types::dtype::{describe, host_bytes};
use pw_types::{Code, HostRead, HostWriteSource, Region, Status};

use crate::boxes::{extent, locate, scatter};
use crate::convert;
use crate::exec::{ExecSender, Message};
use crate::store::{Stored, ViewGuard};

/// Up to so many bytes a transfer is done at once, on `Exec`.
const SMALL_BYTES: usize = 64 << 10;

pub(crate) enum TransferJob {
    Copy { start: Arc<StartCopy>, sources: Vec<Arc<Stored>>, output: Arc<Stored> },
    Write { start: Arc<StartWrite>, blocks: Vec<AlignedBlock>, output: Arc<Stored> },
    Read { start: Arc<StartRead>, sources: Vec<Arc<Stored>> },
}

/// What transfers work with.
#[derive(Clone)]
pub(crate) struct Transfers {
    pub(crate) client: Client,
    pub(crate) data: DataServer,
}

impl TransferJob {
    pub(crate) fn is_small(&self) -> bool {
        match self {
            TransferJob::Copy { .. } => false,
            TransferJob::Write { blocks, .. } => blocks.iter().map(|b| b.len()).sum::<usize>() <= SMALL_BYTES,
            // One whole piece is offered where it lies.
            TransferJob::Read { start, .. } => {
                is_whole(&start.command) || host_bytes(start.command.dtype, &start.command.dims).is_some_and(|n| n <= SMALL_BYTES as u64)
            }
        }
    }
}

/// Serves transfers until nobody can ask for any.
pub(crate) fn serve(jobs: &Receiver<TransferJob>, transfers: &Transfers, exec: &ExecSender) {
    while let Ok(job) = jobs.recv() {
        exec.send(Message::Event(transfers.run(job)));
    }
}

impl Transfers {
    pub(crate) fn run(&self, job: TransferJob) -> ExecEvent {
        match job {
            TransferJob::Copy { start, sources, output } => {
                let made = self.copy(&start, &sources);
                ExecEvent::CopyDone { run: start.run, result: publish(made, &output) }
            }
            TransferJob::Write { start, blocks, output } => {
                let made = self.write(&start, blocks).map_err(Arc::new);
                ExecEvent::WriteDone { run: start.command.order.run, result: publish(made, &output) }
            }
            TransferJob::Read { start, sources } => {
                let order = start.command.order;
                let (bytes, result) = match read(&start, &sources) {
                    Ok(source) => {
                        let bytes = source.bytes().len() as u64;
                        self.data.offer(order.session, start.command.buffer, source, Box::new(|| {}));
                        (bytes, Ok(()))
                    }
                    Err(status) => {
                        self.data.offer_failed(order.session, start.command.buffer, Status::clone(&status));
                        (0, Err(status))
                    }
                };
                ExecEvent::ReadDone { run: order.run, bytes, result }
            }
        }
    }

    fn copy(&self, start: &StartCopy, sources: &[Arc<Stored>]) -> Result<Vec<Option<Buffer>>, Arc<Status>> {
        let mut made = Vec::with_capacity(start.items.len());
        for (item, stored) in start.items.iter().zip(sources) {
            let source = stored.get(item.shard)?;
            let copied = source.copy_to_memory(item.device as usize, Some(&item.memory_kind));
            let buffer = copied.or_else(|error| self.copy_through_host(source, item.device as usize, &item.memory_kind, error));
            made.push(Some(buffer.map_err(|e| failed("copy", e))?));
        }
        // They run side by side.
        made.iter().flatten().try_for_each(|b| b.ready_event().and_then(|e| e.wait())).map_err(|e| failed("copy", e))?;
        Ok(made)
    }

    /// For copies that the plugin does not do, such as to the same memory.
    fn copy_through_host(&self, source: &Buffer, device: usize, kind: &str, refused: PjrtError) -> Result<Buffer, PjrtError> {
        let known = matches!(Code::from_number(refused.code), Code::Unimplemented | Code::InvalidArgument);
        if !known {
            return Err(refused);
        }
        let mut block = AlignedBlock::to_fill(source.host_size()?);
        source.to_host(&mut block)?;
        self.client.buffer_from_host(HostBytes::owned(block), source.element_type()?, &source.dims()?, None, device, Some(kind))
    }

    /// By shard of the output; `None` for those of other workers.
    fn write(&self, start: &StartWrite, blocks: Vec<AlignedBlock>) -> Result<Vec<Option<Buffer>>, Status> {
        let command = &start.command;
        let mut made: Vec<Option<Buffer>> = vec![None; command.shards as usize];
        for (source, block) in command.sources.iter().zip(blocks) {
            self.write_source(source, block, command.memory_kind.as_deref(), &mut made)?;
        }
        made.iter().flatten().try_for_each(|b| b.ready_event().and_then(|e| e.wait())).map_err(convert::status)?;
        Ok(made)
    }

    fn write_source(
        &self,
        source: &HostWriteSource,
        block: AlignedBlock,
        kind: Option<&str>,
        made: &mut [Option<Buffer>],
    ) -> Result<(), Status> {
        let element_type = convert::buffer_type(source.dtype)?;
        let whole = extent(source.dtype, &source.dims, source.byte_strides.as_deref())?;
        if block.len() < whole.bytes {
            let what = describe(source.dtype, &source.dims);
            let text = format!("host buffer {} has {} bytes, {what} needs {}", source.buffer, block.len(), whole.bytes);
            return Err(Status::invalid(text));
        }
        let all = Region { start: vec![0; source.dims.len()], dims: source.dims.clone() };
        let regions: Vec<&Region> = source.targets.iter().map(|t| t.region.as_ref().unwrap_or(&all)).collect();
        let ranges = regions.iter().map(|region| {
            let (offset, bytes) = locate(source.dtype, &whole.strides, region);
            offset..offset + bytes
        });
        let parts = split(block, &ranges.collect::<Vec<_>>()).map_err(convert::status)?;
        for ((target, region), bytes) in source.targets.iter().zip(regions).zip(parts) {
            let (device, strides) = (target.device as usize, Some(&whole.strides[..]));
            let buffer = self.client.buffer_from_host(bytes, element_type, &region.dims, strides, device, kind);
            made[target.shard as usize] = Some(buffer.map_err(convert::status)?);
        }
        Ok(())
    }
}

/// Pieces of a block: exclusive where none overlaps another, so that the plugin may reuse their memory.
fn split(block: AlignedBlock, ranges: &[Range<usize>]) -> Result<Vec<HostBytes>, PjrtError> {
    let mut sorted: Vec<&Range<usize>> = ranges.iter().filter(|r| !r.is_empty()).collect();
    sorted.sort_by_key(|r| r.start);
    if sorted.windows(2).all(|pair| pair[0].end <= pair[1].start) {
        return block.into_parts(ranges);
    }
    let block = Arc::new(block);
    ranges.iter().map(|range| HostBytes::shared(block.clone(), range.clone())).collect()
}

/// Fills the output, or poisons it. Gives the bytes by shard.
fn publish(made: Result<Vec<Option<Buffer>>, Arc<Status>>, output: &Stored) -> Result<Vec<u64>, Arc<Status>> {
    let sized = made.and_then(|buffers| {
        let size = |b: &Option<Buffer>| b.as_ref().map_or(Ok(0), |b| b.on_device_size().map(|n| n as u64));
        let sizes = buffers.iter().map(size).collect::<Result<Vec<u64>, PjrtError>>().map_err(|e| failed("transfer", e))?;
        Ok((buffers, sizes))
    });
    match sized {
        Ok((buffers, sizes)) => {
            for (shard, (buffer, &bytes)) in buffers.into_iter().zip(&sizes).enumerate() {
                if let Some(buffer) = buffer {
                    output.fill(shard, buffer, bytes);
                }
            }
            Ok(sizes)
        }
        Err(status) => {
            output.poison(&status);
            Err(status)
        }
    }
}

fn failed(what: &str, error: PjrtError) -> Arc<Status> {
    let mut status = convert::status(error);
    status.message = format!("{what}: {}", status.message);
    Arc::new(status)
}

/// One piece, dense, all of the array.
fn is_whole(read: &HostRead) -> bool {
    let dense = match (&read.byte_strides, extent(read.dtype, &read.dims, None)) {
        (None, _) => true,
        (Some(given), Ok(extent)) => given.iter().zip(&extent.strides).zip(&read.dims).all(|((g, e), &dim)| g == e || dim <= 1),
        (Some(_), Err(_)) => false,
    };
    dense && matches!(&read.pieces[..], [piece] if piece.region.is_none())
}

/// Bytes of a buffer, where they lie.
struct Viewed {
    view: HostView,
    _guard: ViewGuard,
}

impl DownloadSource for Viewed {
    fn bytes(&self) -> &[u8] {
        &self.view
    }
}

struct Assembled(AlignedBlock);

impl DownloadSource for Assembled {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes of one whole shard, dense: where they lie, if the plugin shows them.
pub(crate) fn shard_bytes(stored: &Arc<Stored>, shard: u32) -> Result<Arc<dyn DownloadSource>, Arc<Status>> {
    let buffer = stored.get(shard)?;
    let guard = stored.view(shard);
    match buffer.host_view().map_err(|e| failed("move", e))? {
        Some(view) => Ok(Arc::new(Viewed { view, _guard: guard })),
        None => {
            let mut block = AlignedBlock::to_fill(buffer.host_size().map_err(|e| failed("move", e))?);
            buffer.to_host(&mut block).map_err(|e| failed("move", e))?;
            Ok(Arc::new(Assembled(block)))
        }
    }
}

fn read(start: &StartRead, sources: &[Arc<Stored>]) -> Result<Arc<dyn DownloadSource>, Arc<Status>> {
    let command = &start.command;
    if let ([Part { first, .. }], [stored], true) = (&start.sources[..], sources, is_whole(command)) {
        let buffer = stored.get(*first)?;
        let guard = stored.view(*first);
        if let Some(view) = buffer.host_view().map_err(|e| failed("fetch", e))? {
            return Ok(Arc::new(Viewed { view, _guard: guard }));
        }
    }
    assemble(start, sources).map(|block| Arc::new(Assembled(block)) as Arc<dyn DownloadSource>)
}

/// Puts the pieces together in host memory.
fn assemble(start: &StartRead, sources: &[Arc<Stored>]) -> Result<AlignedBlock, Arc<Status>> {
    let command = &start.command;
    let whole = extent(command.dtype, &command.dims, command.byte_strides.as_deref()).map_err(Arc::new)?;
    let mut block = AlignedBlock::zeroed(whole.bytes);
    let all = Region { start: vec![0; command.dims.len()], dims: command.dims.clone() };
    for ((piece, part), stored) in command.pieces.iter().zip(&start.sources).zip(sources) {
        let buffer = stored.get(part.first)?;
        let region = piece.region.as_ref().unwrap_or(&all);
        let (offset, _) = locate(command.dtype, &whole.strides, region);
        let element = command.dtype.host_bytes() as usize;
        if element == 0 {
            // A token: there, and no bytes.
            continue;
        }
        let mut put = |bytes: &[u8]| scatter(&mut block[offset..], &whole.strides, bytes, &region.dims, element);
        match buffer.host_view().map_err(|e| failed("fetch", e))? {
            Some(view) => put(&view),
            None => put(&buffer.to_vec().map_err(|e| failed("fetch", e))?),
        }
    }
    Ok(block)
}
