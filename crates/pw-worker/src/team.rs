//! The part of a collective that crosses workers: the last local member to come sends what the others need from here,
//! takes what is needed from them, and then does the work for the members here, as if all were in one process.

use std::sync::{Mutex, PoisonError};

use pw_exec::ExecEvent;
use pw_hlo::Collective;
use pw_net::NetError;
use pw_net::gang::{FrameName, GangNet, Line};
use pw_pjrt::PjrtError;
use pw_types::{Code, GangPart, HostSlot, RunId};
use rustc_hash::FxHashMap;

use crate::convert;
use crate::exec::{ExecSender, Message};

/// The workers that run one program together with this one.
pub(crate) struct Team {
    net: GangNet,
    exec: ExecSender,
    /// Every member that is not here, and the worker that has it.
    elsewhere: FxHashMap<u32, HostSlot>,
    /// Of each group, by collective and lowest member: the last run that met there, and how often.
    meetings: Mutex<FxHashMap<(u32, u32), (u64, u32)>>,
}

/// Operands of ranks that are not here: bytes of all arrays, one after the other.
pub(crate) type Received = FxHashMap<usize, Vec<u8>>;

impl Team {
    pub(crate) fn new(net: GangNet, gang: &GangPart, exec: ExecSender) -> Team {
        let members = gang.others.iter().flat_map(|peer| peer.members.iter().map(|&member| (member, peer.slot)));
        Team { net, exec, elsewhere: members.collect(), meetings: Mutex::default() }
    }

    pub(crate) fn is_elsewhere(&self, member: u32) -> bool {
        self.elsewhere.contains_key(&member)
    }

    /// Whether this group has members on other workers.
    pub(crate) fn crosses(&self, group: &[u32]) -> bool {
        group.iter().any(|&member| self.is_elsewhere(member))
    }

    /// Exchanges the operands of a group. `operands[rank]` is empty for ranks that are not here.
    pub(crate) fn exchange(
        &self,
        run: u64,
        key: u32,
        collective: &Collective,
        group: &[u32],
        operands: &[Vec<&[u8]>],
    ) -> Result<Received, PjrtError> {
        let ranks = 0..group.len();
        let home = |rank: usize| self.elsewhere.get(&group[rank]).copied();
        let name = self.name(run, key, group);
        let first = |slot: Option<HostSlot>| ranks.clone().find(|&rank| home(rank) == slot).map_or(0, |rank| group[rank]);
        let mut peers: Vec<HostSlot> = ranks.clone().filter_map(home).collect();
        peers.sort_unstable();
        peers.dedup();
        let lines: Vec<Line> = peers.iter().map(|&peer| self.net.line(peer)).collect::<Result<_, _>>().map_err(|e| unavailable(&e))?;
        for (&peer, line) in peers.iter().zip(&lines) {
            let wanted = wanted(collective, group, |rank| home(rank) == Some(peer), |rank| home(rank).is_none());
            let parts: Vec<&[u8]> = wanted.iter().flat_map(|&rank| operands[rank].iter().copied()).collect();
            if !wanted.is_empty() {
                let name = FrameName { from: first(None), ..name };
                self.net.send(line, name, &parts, || self.late(run, peer)).map_err(|error| unavailable(&error))?;
            }
        }
        let mut received = Received::default();
        let bytes: usize = collective.arrays.iter().filter_map(|a| collective.sizes(a, group.len())).map(|(operand, _)| operand).sum();
        for (&peer, line) in peers.iter().zip(&lines) {
            let wanted = wanted(collective, group, |rank| home(rank).is_none(), |rank| home(rank) == Some(peer));
            if wanted.is_empty() {
                continue;
            }
            let name = FrameName { from: first(Some(peer)), ..name };
            let mut frame = self.net.receive(line, name, || self.late(run, peer)).map_err(|error| unavailable(&error))?;
            if frame.len() != bytes * wanted.len() {
                let text = format!("worker {peer} sent {} bytes for collective {key}, not {}", frame.len(), bytes * wanted.len());
                return Err(PjrtError::internal(text));
            }
            // From the back, so that nothing is moved.
            for &rank in wanted.iter().skip(1).rev() {
                let at = frame.len() - bytes;
                received.insert(rank, frame.split_off(at));
            }
            received.insert(wanted[0], frame);
        }
        Ok(received)
    }

    fn late(&self, run: u64, on: HostSlot) {
        self.exec.send(Message::Event(ExecEvent::Late { run: RunId(run), on }));
    }

    fn name(&self, run: u64, key: u32, group: &[u32]) -> FrameName {
        let group = group.iter().copied().min().unwrap_or_default();
        let mut meetings = self.meetings.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, count) = meetings.entry((key, group)).or_default();
        *count = if *last == run { *count + 1 } else { 0 };
        *last = run;
        FrameName { run, key, count: *count, group, from: 0 }
    }
}

/// The ranks among `has` whose operands some rank among `asks` needs.
fn wanted(collective: &Collective, group: &[u32], asks: impl Fn(usize) -> bool, has: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut needed = vec![false; group.len()];
    for to in (0..group.len()).filter(|&rank| asks(rank)) {
        let needs = pw_hlo::needs(collective, group, to);
        let all = needs.len() == group.len();
        needs.into_iter().for_each(|from| needed[from] = true);
        if all {
            break;
        }
    }
    (0..group.len()).filter(|&rank| needed[rank] && has(rank)).collect()
}

fn unavailable(error: &NetError) -> PjrtError {
    if let NetError::GivenUp(status) = error {
        return convert::error(status);
    }
    PjrtError::new(Code::Unavailable as i32, format!("a collective over several workers: {}", error.chain()))
}
