//! Workers and their devices: registration, loss, and the static resource manager that gives sessions their devices.

use pw_types::{Code, GrantSeq};
use pw_types::{
    HostSlot, Incarnation, PhysicalDeviceId, SessionDevice, SessionId, SessionOptions, SessionView, Status, VirtualDeviceId, WorkerInfo,
};

use crate::directory::Backing;

/// A device's place in the core's dense table; stable over restarts of its worker.
pub(crate) type DeviceKey = u32;

pub(crate) struct Worker {
    pub(crate) slot: HostSlot,
    pub(crate) incarnation: Incarnation,
    pub(crate) info: WorkerInfo,
    pub(crate) alive: bool,
    /// The last node ordered on this host: the chain that its exec core checks.
    pub(crate) last_seq: GrantSeq,
    /// Keys of its devices, by index.
    pub(crate) devices: Vec<DeviceKey>,
    /// Nodes granted here and not reported.
    pub(crate) granted: u32,
    pub(crate) bytes_in_use: Vec<u64>,
}

impl Worker {
    /// `worker 0 (host a, pid 12)`, for messages.
    pub(crate) fn describe(&self) -> String {
        format!("worker {} (host {}, pid {})", self.slot, self.info.host, self.info.pid)
    }
}

pub(crate) struct Device {
    pub(crate) physical: PhysicalDeviceId,
    /// Bytes that may be reserved; `None` = no limit.
    pub(crate) limit: Option<u64>,
    /// Order-time ledger.
    pub(crate) reserved: u64,
    /// Estimated device time of granted, unfinished gangs.
    pub(crate) window_ns: u64,
    /// Granted, unfinished gangs.
    pub(crate) window_gangs: u32,
    /// Sessions that were given this device.
    pub(crate) sessions: u32,
}

#[derive(Default)]
pub(crate) struct Membership {
    pub(crate) workers: Vec<Worker>,
    pub(crate) devices: Vec<Device>,
}

impl Membership {
    pub(crate) fn alive(&self) -> usize {
        self.workers.iter().filter(|w| w.alive).count()
    }

    pub(crate) fn worker(&self, slot: HostSlot) -> Option<&Worker> {
        self.workers.get(slot.0 as usize)
    }

    pub(crate) fn slot_of(&self, device: DeviceKey) -> HostSlot {
        self.devices[device as usize].physical.slot
    }

    /// Whether the worker that was told to make this backing still lives and has, or will have, its part on `device`.
    pub(crate) fn still_holds(&self, backing: &Backing, device: DeviceKey) -> bool {
        let slot = self.slot_of(device);
        let life = |w: &Worker| w.alive && backing.hosts.contains(&(slot, w.incarnation));
        !backing.failed.contains(&slot) && self.worker(slot).is_some_and(life)
    }

    pub(crate) fn index_of(&self, device: DeviceKey) -> u32 {
        self.devices[device as usize].physical.index
    }

    /// Puts a worker into its slot: the one it wants if that is free or its own dead one, else the first dead or a new one.
    pub(crate) fn join(&mut self, incarnation: Incarnation, wanted: Option<HostSlot>, info: WorkerInfo) -> Result<HostSlot, Status> {
        if info.devices.is_empty() {
            return Err(Status::invalid("a worker must have at least one device"));
        }
        let fits = |w: &Worker| !w.alive && w.info.devices.len() == info.devices.len();
        let slot = match wanted {
            Some(slot) => {
                let index = slot.0 as usize;
                if index > self.workers.len() {
                    return Err(Status::invalid(format!("slot {slot} asked for, but the next free one is {}", self.workers.len())));
                }
                if let Some(worker) = self.workers.get(index)
                    && !fits(worker)
                {
                    return Err(Status::new(
                        Code::AlreadyExists,
                        format!("slot {slot} is taken by {} with {} devices", worker.describe(), worker.info.devices.len()),
                    ));
                }
                index
            }
            None => self.workers.iter().position(fits).unwrap_or(self.workers.len()),
        };
        let slot_id = HostSlot(slot as u32);
        if slot == self.workers.len() {
            let first = self.devices.len() as u32;
            for index in 0..info.devices.len() as u32 {
                self.devices.push(Device {
                    physical: PhysicalDeviceId { slot: slot_id, index },
                    limit: None,
                    reserved: 0,
                    window_ns: 0,
                    window_gangs: 0,
                    sessions: 0,
                });
            }
            let devices = (first..self.devices.len() as u32).collect();
            let bytes_in_use = vec![0; info.devices.len()];
            let worker = Worker { slot: slot_id, incarnation, info, alive: true, last_seq: GrantSeq(0), devices, granted: 0, bytes_in_use };
            self.workers.push(worker);
        } else {
            let worker = &mut self.workers[slot];
            worker.incarnation = incarnation;
            worker.bytes_in_use = vec![0; info.devices.len()];
            worker.info = info;
            worker.alive = true;
            worker.last_seq = GrantSeq(0);
            worker.granted = 0;
        }
        let worker = &self.workers[slot];
        for (&key, device) in worker.devices.iter().zip(&worker.info.devices) {
            let state = &mut self.devices[key as usize];
            state.limit = device.memory_bytes;
            state.window_ns = 0;
            state.window_gangs = 0;
        }
        Ok(slot_id)
    }

    /// Chooses the devices of a session: all, or as many as asked, the least used first.
    pub(crate) fn allot(&mut self, options: &SessionOptions) -> Result<Vec<DeviceKey>, Status> {
        let mut keys: Vec<DeviceKey> = self.workers.iter().filter(|w| w.alive).flat_map(|w| w.devices.iter().copied()).collect();
        if let Some(wanted) = options.devices {
            if wanted == 0 || wanted as usize > keys.len() {
                return Err(Status::new(
                    Code::ResourceExhausted,
                    format!(
                        "session '{}' asks for {wanted} devices (PATHWAYS_SLICE), but {} devices on {} workers are registered",
                        options.name,
                        keys.len(),
                        self.alive()
                    ),
                ));
            }
            keys.sort_by_key(|&k| (self.devices[k as usize].sessions, k));
            keys.truncate(wanted as usize);
            keys.sort_unstable();
        }
        for &key in &keys {
            self.devices[key as usize].sessions += 1;
        }
        Ok(keys)
    }

    pub(crate) fn view(&self, session: SessionId, keys: &[DeviceKey]) -> SessionView {
        let devices: Vec<SessionDevice> = keys
            .iter()
            .enumerate()
            .map(|(id, &key)| {
                let physical = self.devices[key as usize].physical;
                let info = &self.workers[physical.slot.0 as usize].info;
                SessionDevice {
                    id: VirtualDeviceId(id as u32),
                    physical,
                    island: info.island,
                    platform_name: info.platform_name.clone(),
                    device: info.devices[physical.index as usize].clone(),
                }
            })
            .collect();
        let first = devices.first().map(|d| &self.workers[d.physical.slot.0 as usize].info);
        SessionView {
            session,
            platform_name: first.map(|i| i.platform_name.clone()).unwrap_or_default(),
            platform_version: first.map(|i| i.platform_version.clone()).unwrap_or_default(),
            devices,
        }
    }
}
