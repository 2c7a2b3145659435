//! Workers and their devices: registration, loss, and the static resource manager that gives sessions their devices.

use pw_types::{Code, GrantSeq, Traffic};
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
    pub(crate) traffic: Traffic,
}

/// Slots that may be asked for.
const SLOTS_MAX: u32 = 1 << 16;

impl Worker {
    fn vacant(slot: HostSlot) -> Worker {
        let info = WorkerInfo {
            host: String::new(),
            pid: 0,
            build: String::new(),
            platform_name: String::new(),
            platform_version: String::new(),
            data_address: String::new(),
            gang_address: String::new(),
            island: 0,
            devices: Vec::new(),
            test_targets: Vec::new(),
        };
        Worker {
            slot,
            incarnation: Incarnation(0),
            info,
            alive: false,
            last_seq: GrantSeq(0),
            devices: Vec::new(),
            granted: 0,
            bytes_in_use: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    /// Nobody has had this slot yet.
    pub(crate) fn is_vacant(&self) -> bool {
        self.devices.is_empty()
    }

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

impl Device {
    fn new(physical: PhysicalDeviceId) -> Device {
        Device { physical, limit: None, reserved: 0, window_ns: 0, window_gangs: 0, sessions: 0 }
    }
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
        // A vacant slot fits anybody; one whose worker is lost keeps its devices.
        let fits = |w: &Worker| !w.alive && (w.is_vacant() || w.info.devices.len() == info.devices.len());
        let slot = match wanted {
            Some(slot) if slot.0 >= SLOTS_MAX => {
                return Err(Status::invalid(format!("slot {slot} asked for; slots go up to {}", SLOTS_MAX - 1)));
            }
            Some(slot) => {
                if let Some(worker) = self.workers.get(slot.0 as usize)
                    && !fits(worker)
                {
                    return Err(Status::new(
                        Code::AlreadyExists,
                        format!("slot {slot} is taken by {} with {} devices", worker.describe(), worker.info.devices.len()),
                    ));
                }
                slot.0 as usize
            }
            None => self.workers.iter().position(fits).unwrap_or(self.workers.len()),
        };
        // Workers that ask for their slots may come in any order: the slots before stay vacant until theirs come.
        while self.workers.len() <= slot {
            self.workers.push(Worker::vacant(HostSlot(self.workers.len() as u32)));
        }
        if self.workers[slot].is_vacant() {
            let first = self.devices.len() as u32;
            let count = info.devices.len() as u32;
            let slot_id = HostSlot(slot as u32);
            self.devices.extend((0..count).map(|index| Device::new(PhysicalDeviceId { slot: slot_id, index })));
            self.workers[slot].devices = (first..first + count).collect();
        }
        let slot_id = HostSlot(slot as u32);
        let worker = &mut self.workers[slot];
        worker.incarnation = incarnation;
        worker.bytes_in_use = vec![0; info.devices.len()];
        worker.traffic = Traffic::default();
        worker.info = info;
        worker.alive = true;
        worker.last_seq = GrantSeq(0);
        worker.granted = 0;
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
            keys.sort_unstable_by_key(|&k| self.devices[k as usize].physical);
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
