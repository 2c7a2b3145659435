//! The closed set of what the core asks its shell to do (invariant A2).

use pw_types::{Command, HostSlot, Incarnation, Status, StatusReport, ToEdge};

#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// The worker behind `connection` is in.
    Welcome {
        connection: u64,
        slot: HostSlot,
        incarnation: Incarnation,
    },
    /// The worker behind `connection` is not let in.
    Refuse {
        connection: u64,
        status: Status,
    },
    /// Append to this host's frame.
    Send {
        slot: HostSlot,
        incarnation: Incarnation,
        command: Command,
    },
    Edge(ToEdge),
    Status {
        query: u64,
        report: StatusReport,
    },
}

/// Effects of one turn, in order.
#[derive(Default, Debug)]
pub struct Effects {
    pub list: Vec<Effect>,
}

impl Effects {
    pub(crate) fn edge(&mut self, message: ToEdge) {
        self.list.push(Effect::Edge(message));
    }

    /// A number that two runs share only if their effects are equal: FNV-1a over the printed form.
    pub fn digest(&self) -> u64 {
        use std::fmt::Write;
        struct Fnv(u64);
        impl Write for Fnv {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                for byte in text.bytes() {
                    self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
                }
                Ok(())
            }
        }
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        for effect in &self.list {
            let _ = write!(hash, "{effect:?};");
        }
        hash.0
    }
}
