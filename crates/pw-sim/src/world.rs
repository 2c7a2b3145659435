//! The simulated cluster: one real core, real exec cores, links, an edge and clients, played from one seed.

mod workers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use pw_core::{Core, CoreConfig, Effect, Effects};
use pw_proto::control::{ControllerFrame, LogRecord, Wire};
use pw_types::*;

use crate::client::Client;
use crate::edge::Edge;
use crate::failure::{Check, Invariant, violation};
use crate::gang::Operands;
use crate::link::{Agenda, Link};
use crate::model::{Model, Session, Then, Work};
use crate::order::{Order, WindowRule};
use crate::plant::{Plant, Planter};
use crate::program::{Program, Programs};
use crate::rng::{Digest, Rng};
use crate::worker::{Note, Offer, Worker};
use crate::{Options, Summary};

/// Lines of history that are kept.
const HISTORY_MAX: usize = 40;

/// What happens at a point in time.
enum Action {
    /// A client makes its next request.
    Step(SessionId),
    /// An event reaches the controller.
    Inbox(Event),
    CoreTurn,
    /// A frame reaches a worker.
    ToWorker(HostSlot, Incarnation, Bytes),
    /// A frame reaches the controller.
    FromWorker(HostSlot, Incarnation, Bytes),
    Worker(HostSlot, Incarnation, Note),
    Data(HostSlot, Incarnation, Data),
    Offer(Offer),
    /// The bytes of a host buffer are at the edge, or will not come.
    Stream(SessionId, Handle, Result<u64, Status>),
    Kill(HostSlot),
    Close(SessionId),
}

/// On the data plane, to a worker.
#[derive(Debug)]
pub(crate) enum Data {
    Put {
        session: SessionId,
        buffer: Handle,
        content: Result<u64, Status>,
    },
    Detach(SessionId),
    /// Of a life of another worker.
    Operands(Incarnation, Operands),
    /// The connection over which this worker's operands come is gone.
    Broken(HostSlot),
}

/// The controller's and the data plane's ends of the connection to one life of a worker.
#[derive(Default)]
struct Connection {
    incarnation: Incarnation,
    sent: u64,
    received: u64,
    commands: Link,
    reports: Link,
    data: Link,
    offers: Link,
}

pub(crate) struct World {
    options: Options,
    pub(crate) history: VecDeque<String>,
    trace: bool,
    rng: Rng,
    agenda: Agenda<Action>,
    pub(crate) config: CoreConfig,
    core: Core,
    inbox: Vec<Event>,
    turn_due: bool,
    model: Model,
    programs: Programs,
    workers: Vec<Option<Worker>>,
    /// What the last life of each had compiled.
    caches: Vec<BTreeMap<ExecutableId, (usize, Vec<u32>)>>,
    connections: Vec<Connection>,
    next_incarnation: u64,
    devices: usize,
    ahead_max: u32,
    memory: Option<u64>,
    edge: Edge,
    to_core: Link,
    clients: BTreeMap<SessionId, Client>,
    planter: Planter,
    /// Killed, and vanished, once so many requests have been made.
    kill_at: Option<u64>,
    vanish_at: Option<u64>,
    rejoins: bool,
    /// Encoded [`LogRecord`]s.
    pub(crate) log: Vec<Bytes>,
    digest: Digest,
    summary: Summary,
}

impl World {
    pub(crate) fn new(options: &Options, trace: bool) -> World {
        let mut rng = Rng::new(options.seed);
        let or = |wanted: u32, chosen: u64| if wanted == 0 { chosen } else { u64::from(wanted) };
        let workers = or(options.workers, rng.between(1, 3)) as usize;
        let devices = or(options.devices, rng.between(1, 4)) as usize;
        let sessions = or(options.sessions, rng.between(1, 4)) as u32;
        let steps = or(options.steps, rng.between(20, 160)) as u32;
        let memory = rng.pick(&[None, None, Some(700), Some(1500), Some(3000)]);
        let (rule, config) = rules(workers, options.plant == Some(Plant::WideWindow), &mut rng);
        let ahead_max = rng.pick(&[1, 2, 32]);
        let programs: Programs = (0..8).map(|id| Program::random(id, devices as u32, workers as u32, &mut rng)).collect();
        let total = u64::from(steps) * u64::from(sessions);
        let rejoins = rng.per_mille(600);
        // Without its only worker a cluster has little to do.
        let earliest = if rejoins || workers > 1 { total / 4 } else { total * 3 / 4 };
        let kill_at = rng.per_mille(400).then(|| rng.between(earliest, total));
        let vanish_at = rng.per_mille(400).then(|| rng.between(total / 4, total));
        let order = Order::new(workers, devices, rule, memory);
        let clients = (1..=sessions).map(|number| {
            let client = Client::new(programs.clone(), devices, steps, number, &mut rng);
            (SessionId(1000 + u64::from(number)), client)
        });
        World {
            history: VecDeque::new(),
            trace,
            agenda: Agenda::new(),
            core: Core::new(config.clone()),
            config,
            inbox: Vec::new(),
            turn_due: false,
            clients: clients.collect(),
            model: Model::new(programs.clone(), order),
            programs,
            workers: (0..workers).map(|_| None).collect(),
            caches: vec![BTreeMap::new(); workers],
            connections: (0..workers).map(|_| Connection::default()).collect(),
            next_incarnation: 0,
            devices,
            ahead_max,
            memory,
            edge: Edge::default(),
            to_core: Link::default(),
            planter: Planter::new(options.plant, options.seed),
            kill_at,
            vanish_at,
            rejoins,
            log: Vec::new(),
            digest: Digest::new(),
            summary: Summary {
                seed: options.seed,
                workers: workers as u32,
                devices: devices as u32,
                sessions,
                steps,
                ..Summary::default()
            },
            rng,
            options: options.clone(),
        }
    }

    fn say(&mut self, line: impl FnOnce() -> String) {
        if !self.trace {
            return;
        }
        let line = format!("{:>12} {}", self.agenda.now, line());
        if self.options.verbose {
            eprintln!("{line}");
        }
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(line);
    }

    /// Plays everything; the checks run all the time.
    pub(crate) fn run(&mut self) -> Check<Summary> {
        for slot in 0..self.workers.len() {
            self.join(slot);
        }
        let ids: Vec<SessionId> = self.clients.keys().copied().collect();
        for &session in &ids {
            let (weight, some) = (self.rng.between(1, 3) as u32, self.rng.per_mille(200));
            let all = (self.workers.len() * self.devices) as u64;
            let devices = some.then(|| self.rng.between(1, all) as u32);
            let options = SessionOptions { name: format!("client{session}"), weight, devices };
            self.edge.open(session);
            self.model.sessions.insert(session, Session::default());
            let at = self.to_core.arrival(self.agenda.now, &mut self.rng);
            self.agenda.at(at, Action::Inbox(Event::SessionOpened { session, options }));
            self.agenda.after(1_000_000, Action::Step(session));
        }
        self.play()?;
        self.model.all_done()?;
        self.edge.all_done()?;
        if let Some(((session, buffer), read)) = self.model.fetches.iter().find(|(_, r)| !self.may_have_lost(&r.devices)) {
            let text = format!("session {session} never gets the bytes of host buffer {buffer}: {read:?}");
            return violation(Invariant::A9Answers, text);
        }
        for session in ids {
            self.close(session);
        }
        self.play()?;
        self.check_empty()?;
        self.summary.nodes = self.model.nodes.len() as u64;
        self.summary.grants = self.model.order.grants;
        self.summary.launches += self.workers.iter().flatten().map(|w| w.launches).sum::<u64>();
        self.summary.faults = self.model.nodes.iter().filter(|n| !n.own.is_empty()).count() as u64;
        self.summary.exhausted = self.model.nodes.iter().filter(|n| n.own_exhausted).count() as u64;
        self.summary.virtual_ns = self.agenda.now;
        self.summary.digest = self.digest.0;
        Ok(self.summary.clone())
    }

    fn may_have_lost(&self, devices: &[usize]) -> bool {
        devices.iter().any(|&d| self.model.order.ever_lost(self.model.order.slot_of(d)))
    }

    fn check_empty(&self) -> Check {
        self.model.all_freed(self.workers.len())?;
        self.workers.iter().flatten().try_for_each(Worker::all_gone)?;
        match self.core.leftovers() {
            None => Ok(()),
            Some(text) => violation(Invariant::A7References, format!("the core keeps {text}")),
        }
    }

    fn play(&mut self) -> Check {
        while let Some(action) = self.agenda.pop() {
            self.act(action)?;
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> Check {
        match action {
            Action::Step(session) => {
                self.step(session);
                Ok(())
            }
            Action::Inbox(event) => {
                self.post(event);
                Ok(())
            }
            Action::CoreTurn => self.core_turn(),
            Action::ToWorker(slot, incarnation, bytes) => self.frame_at_worker(slot, incarnation, bytes),
            Action::FromWorker(slot, incarnation, bytes) => self.frame_at_controller(slot, incarnation, bytes),
            Action::Worker(slot, incarnation, note) => self.with_worker(slot, incarnation, |worker, around| worker.note(note, around)),
            Action::Data(slot, incarnation, data) => self.data_at_worker(slot, incarnation, data),
            Action::Offer(offer) => {
                self.say(|| format!("offer {offer:?}"));
                self.summary.fetches += u64::from(offer.result.is_ok());
                self.edge.offers.insert((offer.session, offer.buffer), offer.result);
                self.look_at_offer(offer.session, offer.buffer)
            }
            Action::Stream(session, buffer, content) => self.streamed(session, buffer, content),
            Action::Kill(slot) => {
                self.kill(slot);
                Ok(())
            }
            Action::Close(session) => {
                self.close(session);
                Ok(())
            }
        }
    }

    // ---- clients and edge ----

    fn step(&mut self, session: SessionId) {
        let client = self.clients.get_mut(&session).expect("clients stay");
        if self.edge.is_closed(session) {
            return;
        }
        if client.devices.is_empty() && !self.rejoins && self.workers.iter().any(Option::is_none) {
            // It waits for a worker that will not come.
            client.left = 0;
        }
        if let Some(out) = client.step(&mut self.rng) {
            self.summary.requests += 1;
            for &(buffer, bytes) in &out.streams {
                self.edge.expect_stream(session, buffer, bytes);
                let broken = self.rng.per_mille(25);
                let content = match broken {
                    false => Ok(crate::program::host_token(session, buffer)),
                    true => Err(Status::new(Code::DataLoss, format!("host buffer {buffer} of session {session} broke off"))),
                };
                let delay = if self.rng.per_mille(200) { self.rng.between(0, 5_000_000) } else { self.rng.between(0, 100_000) };
                self.agenda.after(delay, Action::Stream(session, buffer, content));
            }
            self.edge.hold(session, out.op, out.request);
            self.pump(session);
            let made = self.summary.requests;
            if self.kill_at.is_some_and(|at| made >= at) {
                // Where workers come back, another one may go.
                let again = self.rejoins && self.rng.per_mille(400);
                self.kill_at = again.then(|| made + self.rng.between(10, 200));
                let slot = HostSlot(self.rng.index(self.workers.len()) as u32);
                self.agenda.after(self.rng.between(0, 2_000_000), Action::Kill(slot));
            }
            if self.vanish_at.is_some_and(|at| made >= at) {
                self.vanish_at = None;
                self.agenda.after(self.rng.between(0, 2_000_000), Action::Close(session));
                self.summary.vanished += 1;
            }
        }
        if self.clients[&session].left > 0 {
            let delay = match self.rng.below(20) {
                0 => self.rng.between(0, 6_000_000),
                1..=4 => self.rng.between(0, 300_000),
                _ => self.rng.between(0, 15_000),
            };
            self.agenda.after(delay, Action::Step(session));
        }
    }

    /// Sends the requests of a session that is not paused.
    fn pump(&mut self, session: SessionId) {
        while let Some((op, request)) = self.edge.next_request(session) {
            let at = self.to_core.arrival(self.agenda.now, &mut self.rng);
            let bytes = self.rng.between(50, 500) as u32;
            self.agenda.at(at, Action::Inbox(Event::Request { session, op, bytes, request }));
        }
    }

    fn streamed(&mut self, session: SessionId, buffer: Handle, content: Result<u64, Status>) -> Check {
        if self.edge.is_closed(session) {
            return Ok(());
        }
        if let Err(status) = &content {
            let status = status.clone();
            self.model.broken.insert((session, buffer), status.clone());
            let at = self.to_core.arrival(self.agenda.now, &mut self.rng);
            self.agenda.at(at, Action::Inbox(Event::HostBufferFailed { session, buffer, status }));
        }
        for (slot, incarnation) in self.edge.arrived(session, buffer, content.clone()) {
            self.put(slot, incarnation, session, buffer, content.clone());
        }
        Ok(())
    }

    fn put(&mut self, slot: HostSlot, incarnation: Incarnation, session: SessionId, buffer: Handle, content: Result<u64, Status>) {
        if content.is_ok() && self.planter.loses_upload() {
            return;
        }
        self.data(slot, incarnation, Data::Put { session, buffer, content });
    }

    fn data(&mut self, slot: HostSlot, incarnation: Incarnation, data: Data) {
        let connection = &mut self.connections[slot.0 as usize];
        if connection.incarnation == incarnation {
            let at = connection.data.arrival(self.agenda.now, &mut self.rng);
            self.agenda.at(at, Action::Data(slot, incarnation, data));
        }
    }

    fn close(&mut self, session: SessionId) {
        if !self.edge.close(session) {
            return;
        }
        self.say(|| format!("session {session} closes"));
        self.model.closing.insert(session);
        let at = self.to_core.arrival(self.agenda.now, &mut self.rng);
        self.agenda.at(at, Action::Inbox(Event::SessionClosed { session, reason: "the client has gone".to_owned() }));
        for slot in 0..self.connections.len() {
            let incarnation = self.connections[slot].incarnation;
            self.data(HostSlot(slot as u32), incarnation, Data::Detach(session));
        }
    }

    fn look_at_offer(&mut self, session: SessionId, buffer: Handle) -> Check {
        if self.model.fetches.contains_key(&(session, buffer))
            && let Some(result) = self.edge.offers.remove(&(session, buffer))
        {
            return self.model.fetched(session, buffer, &result);
        }
        Ok(())
    }

    // ---- the core ----

    fn post(&mut self, event: Event) {
        self.inbox.push(event);
        if !self.turn_due {
            self.turn_due = true;
            let delay = self.rng.between(0, 20_000);
            self.agenda.after(delay, Action::CoreTurn);
        }
    }

    fn core_turn(&mut self) -> Check {
        self.turn_due = false;
        self.summary.turns += 1;
        let mut fx = Effects::default();
        for event in std::mem::take(&mut self.inbox) {
            self.feed(event, &mut fx)?;
        }
        self.feed(Event::EndOfTurn, &mut fx)?;
        self.core.audit().or_else(|text| violation(Invariant::Audit, format!("core: {text}")))?;
        let mut frames: BTreeMap<(HostSlot, Incarnation), Vec<Command>> = BTreeMap::new();
        for effect in fx.list {
            match effect {
                Effect::Send { slot, incarnation, command } => frames.entry((slot, incarnation)).or_default().push(command),
                Effect::Edge(message) => self.at_edge(message)?,
                Effect::Refuse { status, .. } => return violation(Invariant::A9Answers, format!("a worker is refused: {status}")),
                Effect::Welcome { .. } | Effect::Status { .. } => {}
            }
        }
        for ((slot, incarnation), commands) in frames {
            self.send(slot, incarnation, commands);
        }
        Ok(())
    }

    fn send(&mut self, slot: HostSlot, incarnation: Incarnation, mut commands: Vec<Command>) {
        self.planter.commands(slot, &mut commands, &self.model);
        self.say(|| format!("core to worker {slot}: {commands:?}"));
        let connection = &mut self.connections[slot.0 as usize];
        connection.sent += 1;
        self.summary.frames += 1;
        let frame = ControllerFrame { seq: connection.sent, ack: connection.received, incarnation, commands };
        let at = connection.commands.arrival(self.agenda.now, &mut self.rng);
        self.agenda.at(at, Action::ToWorker(slot, incarnation, frame.to_bytes()));
    }

    /// Hands one event to the core, through its encoding, and checks what the core makes of it.
    fn feed(&mut self, event: Event, fx: &mut Effects) -> Check {
        let time = Time(self.agenda.now);
        let end = matches!(event, Event::EndOfTurn);
        if !end {
            self.say(|| format!("core gets {event:?}"));
        }
        let mut record = LogRecord { time, event, effects_digest: None };
        let decoded = LogRecord::from_bytes(record.to_bytes()).or_else(|e| violation(Invariant::Wire, e.to_string()))?;
        if decoded != record {
            return violation(Invariant::Wire, format!("{record:?} comes back as {decoded:?}"));
        }
        self.before(&decoded.event)?;
        let from = fx.list.len();
        self.core.handle(time, decoded.event, fx);
        record.effects_digest = end.then(|| fx.digest());
        let bytes = record.to_bytes();
        self.digest.add(&bytes);
        self.log.push(bytes);
        self.planter.effects(&mut fx.list, from, &self.model);
        self.after(&record.event, &fx.list[from..])
    }

    /// The model learns of an event before the core acts on it.
    fn before(&mut self, event: &Event) -> Check {
        self.model.order.begin_event();
        match event {
            Event::Request { session, op, request, .. } => {
                self.model.request(*session, *op, request);
                Ok(())
            }
            Event::Report { slot, incarnation, report } => self.model.reported(*slot, *incarnation, report),
            Event::SessionClosed { session, .. } => {
                self.model.close(*session);
                Ok(())
            }
            Event::WorkerLost { slot, incarnation, .. } => {
                self.model.worker_lost(*slot, *incarnation);
                if self.rejoins {
                    self.join(slot.0 as usize);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn after(&mut self, event: &Event, effects: &[Effect]) -> Check {
        if let Event::Request { session, op, .. } = event {
            self.expect_read(*session, *op);
        }
        if self.core.nodes_made() != self.model.nodes.len() as u64 {
            let text = format!("the core made {} nodes, the model {} after {event:?}", self.core.nodes_made(), self.model.nodes.len());
            return violation(Invariant::A9Answers, text);
        }
        let sent: BTreeSet<RunId> = effects
            .iter()
            .filter_map(|e| match e {
                Effect::Send { command, .. } => command.order().map(|o| o.run),
                _ => None,
            })
            .collect();
        let dropped = self.model.take_dropped(&self.core, &sent);
        for effect in effects {
            match effect {
                Effect::Send { slot, incarnation, command } => self.model.sent(*slot, *incarnation, command)?,
                Effect::Welcome { slot, incarnation, .. } => {
                    self.model.joined(*slot, *incarnation);
                    self.connections[slot.0 as usize] = Connection { incarnation: *incarnation, ..Connection::default() };
                }
                _ => {}
            }
        }
        self.model.order.end_event()?;
        dropped.into_iter().try_for_each(|index| self.model.judge_dropped(index))?;
        for effect in effects {
            if let Effect::Edge(ToEdge::Reply { session, op, result }) = effect {
                self.model.answered(*session, *op, result)?;
            }
        }
        match event {
            Event::Request { session, op, .. } => match self.model.asks.get(&(*session, *op)) {
                Some(ask) if ask.at_once => violation(Invariant::A9Answers, format!("{} is not answered in its turn", ask.name)),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// A fetch makes a node unless the core knows at once that it cannot be.
    fn expect_read(&mut self, session: SessionId, op: OpId) {
        if self.core.nodes_made() == self.model.nodes.len() as u64 {
            return;
        }
        let Some(ask) = self.model.asks.get_mut(&(session, op)) else { return };
        let Then::Fetch { plan, .. } = &mut ask.then else { return };
        let mut plan = std::mem::take(plan);
        self.model.gather(session, &mut plan);
        let index = self.model.nodes.len();
        plan.node = Some(index);
        let (inputs, devices, bad) = (plan.shards.clone(), plan.devices.clone(), plan.bad);
        self.model.add_node(session, Work::Read { bad }, inputs, devices, Vec::new());
        let ask = self.model.asks.get_mut(&(session, op)).expect("just seen");
        ask.blames.push(crate::model::Blame::Node(index));
        if let Then::Fetch { plan: place, .. } = &mut ask.then {
            *place = plan;
        }
    }

    fn at_edge(&mut self, message: ToEdge) -> Check {
        let message = ToEdge::from_bytes(message.to_bytes()).or_else(|e| violation(Invariant::Wire, e.to_string()))?;
        self.say(|| format!("edge gets {message:?}"));
        match message {
            ToEdge::SessionReady(view) => {
                let devices = view.devices.iter().map(|d| self.model.order.device(d.physical.slot, d.physical.index)).collect();
                if let Some(session) = self.model.sessions.get_mut(&view.session) {
                    session.devices = devices;
                }
                self.clients.get_mut(&view.session).expect("clients stay").ready(&view);
            }
            ToEdge::SessionRefused { session, status } => {
                return violation(Invariant::A9Answers, format!("session {session} is refused: {status}"));
            }
            ToEdge::Reply { session, op, result } => {
                self.summary.errors += u64::from(result.is_err());
                self.clients.get_mut(&session).expect("clients stay").answer(op, &result);
                if let Some(buffer) = self.model.fetches.keys().find(|(s, b)| *s == session && self.edge.offers.contains_key(&(*s, *b))) {
                    return self.look_at_offer(session, buffer.1);
                }
            }
            ToEdge::Consumed { session, count } => {
                if let Some(state) = self.model.sessions.get_mut(&session) {
                    state.consumed += u64::from(count);
                }
            }
            ToEdge::Pause { session, paused } => {
                self.summary.pauses += u64::from(paused);
                self.edge.pause(session, paused);
                self.pump(session);
            }
            ToEdge::Route { session, buffer, bytes, hosts } => {
                let hosts = hosts.into_iter().map(|slot| (slot, self.connections[slot.0 as usize].incarnation)).collect::<Vec<_>>();
                if self.edge.is_closed(session) {
                    // The worker may have come after the session went, and must not wait for its bytes.
                    hosts.into_iter().for_each(|(slot, incarnation)| self.data(slot, incarnation, Data::Detach(session)));
                    return Ok(());
                }
                if let Some(content) = self.edge.route(session, buffer, bytes, &hosts)? {
                    for (slot, incarnation) in hosts {
                        self.put(slot, incarnation, session, buffer, content.clone());
                    }
                }
            }
            ToEdge::Discard { session, buffer } => self.edge.discard(session, buffer)?,
            ToEdge::CloseSession { session, .. } => {
                return violation(Invariant::A9Answers, format!("session {session} is closed by the core"));
            }
            ToEdge::WorkerUp { .. } | ToEdge::WorkerDown { .. } => {}
        }
        Ok(())
    }
}

/// The window that the checker keeps, and the configuration of the core; the same, unless that bug is planted.
fn rules(workers: usize, wide: bool, rng: &mut Rng) -> (WindowRule, CoreConfig) {
    let rule = WindowRule {
        ns: rng.pick(&[1_000_000, 4_000_000, 20_000_000]),
        gangs_min: rng.between(1, 3) as u32,
        gangs_max: rng.pick(&[4, 16, 512]),
    };
    let config = CoreConfig {
        expect_workers: workers as u32,
        window_ns: if wide { rule.ns * 10 } else { rule.ns },
        window_gangs_min: rule.gangs_min + u32::from(wide),
        window_gangs_max: rule.gangs_max,
        queued_max: rng.pick(&[4, 32, 16 * 1024]),
        queued_bytes_max: rng.pick(&[2_000, 64 << 20]),
        ..CoreConfig::default()
    };
    (rule, config)
}
