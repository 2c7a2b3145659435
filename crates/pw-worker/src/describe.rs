//! Questions about compiled programs, on a thread of their own: nothing that runs waits for them.
//!
//! A plugin that analyses cost itself is believed. Other answers come out of the optimized module, and that out of the program as the plugin compiled it, also where the devices run another
//! form of it. It lies in the cache, and is taken from there when somebody asks.

use std::sync::mpsc::Receiver;

use bytes::Bytes;
use pw_exec::ExecEvent;
use pw_pjrt::Client;
use pw_types::{Code, Cost, Description, Question, Status};

use crate::cache::Cache;
use crate::convert;
use crate::exec::{ExecSender, Message};

/// Longer texts are refused: they would fill the memory of everybody on the way.
const TEXT_BYTES_MAX: usize = 64 << 20;

pub(crate) struct DescribeJob {
    pub(crate) query: u64,
    pub(crate) fingerprint: Bytes,
    pub(crate) question: Question,
}

/// Answers until nobody can ask.
pub(crate) fn serve(jobs: &Receiver<DescribeJob>, cache: &Cache, client: &Client, exec: &ExecSender) {
    while let Ok(DescribeJob { query, fingerprint, question }) = jobs.recv() {
        let result = describe(&fingerprint, question, cache, client);
        exec.send(Message::Event(ExecEvent::Described { query, result }));
    }
}

fn describe(key: &[u8], question: Question, cache: &Cache, client: &Client) -> Result<Description, Status> {
    let hlo = match cache.module(key) {
        Some(module) => module,
        None => {
            let program = cache.program(key).ok_or_else(|| cache.missing(key))?;
            let executable = client.deserialize_and_load(&program).map_err(convert::status)?;
            drop(program);
            if question == Question::Cost
                && let Ok(figures) = executable.cost_analysis()
            {
                return Ok(Description::Cost(figures.into_iter().map(|(name, value)| Cost { name, value }).collect()));
            }
            executable.optimized_hlo().map_err(convert::status)?
        }
    };
    let unreadable = |error: pw_hlo::HloError| Status::internal(format!("cannot read the optimized program: {error}"));
    match question {
        Question::Cost => pw_hlo::cost(&hlo).map(|cost| Description::Cost(figures(cost))).map_err(unreadable),
        Question::Text => match pw_hlo::print(&hlo).map_err(unreadable)? {
            text if text.len() > TEXT_BYTES_MAX => Err(Status::new(
                Code::ResourceExhausted,
                format!(
                    "the text of this program has {} bytes, more than the {TEXT_BYTES_MAX} that are served; `lowered.as_text()` gives what it was compiled from",
                    text.len()
                ),
            )),
            text => Ok(Description::Text(text)),
        },
    }
}

/// The names are JAX's.
fn figures(cost: pw_hlo::Cost) -> Vec<Cost> {
    let figure = |name: &str, value| Cost { name: name.to_owned(), value };
    let all = [("flops", cost.flops), ("transcendentals", cost.transcendentals), ("bytes accessed", cost.bytes_accessed)];
    // Stock JAX leaves out what is 0, too.
    all.into_iter().filter(|&(_, value)| value > 0.0).map(|(name, value)| figure(name, value)).collect()
}
