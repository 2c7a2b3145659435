//! Moves between workers: the commands of the two ends. Bytes go straight from the one to the other (invariant A6).

use pw_types::{Command, Handle, HostWrite, HostWriteSource, HostWriteTarget, NodeOrder, SendItem, SendShards, SessionId, ShardId};

use crate::Core;
use crate::graph::{Work, sent_once};

impl Core {
    /// The share of the sender.
    pub(crate) fn send_command(&self, order: NodeOrder, work: &Work) -> Command {
        let Work::Move { from, to, items, first_key, .. } = work else { unreachable!("only moves are sent") };
        let worker = |slot: &pw_types::HostSlot| &self.members.workers[slot.0 as usize];
        let item = |(key, (source, _)): (u64, (crate::directory::Piece, _))| SendItem {
            source: ShardId { buffer: self.directory.get(source.backing).id, shard: source.first },
            buffer: Handle(key),
        };
        Command::Send(SendShards {
            order,
            address: worker(to).info.data_address.clone(),
            receiver: worker(to).incarnation,
            sender: SessionId::of_worker(worker(from).incarnation),
            items: (*first_key..).zip(sent_once(items)).map(item).collect(),
        })
    }

    /// The share of the receiver.
    pub(crate) fn receive_command(&self, order: NodeOrder, work: &Work) -> Command {
        let Work::Move { from, items, memory_kind, first_key, .. } = work else { unreachable!("only moves are received") };
        let target = |shard: u32| HostWriteTarget { shard, device: items[shard as usize].device, region: None };
        let source = |(key, (piece, outputs)): (u64, (crate::directory::Piece, smallvec::SmallVec<[u32; 4]>))| {
            let backing = self.directory.get(piece.backing);
            HostWriteSource {
                buffer: Handle(key),
                dtype: backing.dtype,
                dims: backing.shard_dims.to_vec(),
                byte_strides: None,
                targets: outputs.into_iter().map(target).collect(),
            }
        };
        Command::HostWrite(HostWrite {
            order,
            sender: SessionId::of_worker(self.members.workers[from.0 as usize].incarnation),
            sources: (*first_key..).zip(sent_once(items)).map(source).collect(),
            memory_kind: memory_kind.as_deref().map(str::to_owned),
            shards: items.len() as u32,
        })
    }
}
