//! What an Execute means in the reference model.

use pw_types::*;

use crate::arrays::backings;
use crate::model::{Array, Ask, Blame, Model, Output, Shard, Then, Work};
use crate::program::ITEM_BYTES;

/// Carries out an Execute; says how it must be answered.
pub(crate) fn ask(model: &mut Model, id: SessionId, request: &ExecuteRequest) -> Ask {
    let donated = donated_handles(model, id, request);
    match try_execute(model, id, request) {
        Ok(ask) => ask,
        Err(blame) => {
            if !request.results.is_empty() {
                donated.iter().for_each(|&h| model.delete(id, h));
            }
            Ask { poisons: request.results.clone(), ..Ask::of("Execute", Err(blame)) }
        }
    }
}

fn donated_handles(model: &Model, id: SessionId, request: &ExecuteRequest) -> Vec<Handle> {
    let Some(named) = model.sessions[&id].executables.get(&request.executable) else { return Vec::new() };
    // A program whose worker is lost may have left the table; then nothing is known to be given away.
    let Some(compiled) = model.compiled.get(&named.id) else { return Vec::new() };
    let program = &model.programs[compiled.program];
    let given = program.donated.iter().filter(|i| !request.non_donatable.contains(i));
    given.filter_map(|&i| request.arguments.get(i as usize).copied()).collect()
}

fn try_execute(model: &mut Model, id: SessionId, request: &ExecuteRequest) -> Result<Ask, Blame> {
    let named = model.sessions[&id].executables.get(&request.executable).cloned().ok_or(Blame::Code(Code::NotFound))?;
    let compiled = &model.compiled[&named.id];
    let index = compiled.program;
    let keys = compiled.devices.clone();
    let program = model.programs[index].clone();
    if let Some(code) = compiled.failed {
        return Err(Blame::Code(code));
    }
    if request.arguments.len() != program.parameters.len() {
        return Err(Blame::Code(Code::InvalidArgument));
    }
    let first = request.results.is_empty();
    if !first && request.results.len() != program.outputs.len() {
        return Err(Blame::Code(Code::InvalidArgument));
    }
    let (mut inputs, mut tokens, mut bad) = (Vec::new(), Vec::new(), false);
    for (&handle, parameter) in request.arguments.iter().zip(&program.parameters) {
        let array = model.resolve(id, handle)?.clone();
        if array.n != parameter.n {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        let array = if array.devices == named.devices { array } else { moved(model, id, &array, &named.devices)? };
        let len = parameter.shard_len(program.devices);
        bad |= array.shards.iter().any(|s| s.len != len || !(s.kind.is_empty() || s.kind == parameter.kind));
        inputs.extend(backings(&array));
        tokens.extend(array.shards.iter().map(|s| s.token));
    }
    for (position, &handle) in request.arguments.iter().enumerate() {
        let position = position as u32;
        if program.donated.contains(&position) && !request.non_donatable.contains(&position) {
            model.delete(id, handle);
        }
    }
    let outputs = program.outputs.iter().map(|value| {
        let bytes = if value.kind == "pinned_host" { 0 } else { value.shard_len(program.devices) as u64 * ITEM_BYTES };
        Output { bytes, devices: keys.clone(), handles: 0, queued: 0 }
    });
    let outputs: Vec<Output> = outputs.collect();
    let work = Work::Launch { executable: named.id, program: index, bad_arguments: bad };
    let node = model.add_node(id, work, inputs, keys.clone(), outputs);
    let made: Vec<Array> = (0..program.outputs.len())
        .map(|output| {
            let value = &program.outputs[output];
            let len = value.shard_len(program.devices);
            let shards = keys.iter().enumerate().map(|(position, &device)| {
                let token = program.output_token(request.launch_id, output, position, &tokens);
                Shard { node, output: output as u32, token, len, kind: value.kind.to_owned(), device }
            });
            let partition = if len == value.n { Partition::Replicated } else { Partition::Even { shard_dims: vec![len] } };
            let kind = (!value.kind.is_empty()).then(|| value.kind.to_owned());
            Array { n: value.n, partition, kind, devices: named.devices.clone(), shards: shards.collect() }
        })
        .collect();
    for (&handle, array) in request.results.iter().zip(&made) {
        model.put(id, handle, array.clone());
    }
    let status_of = request.fill_status.then_some((node, request.status));
    Ok(Ask { then: Then::Execute { outputs: made, status_of, named: !first }, ..Ask::ok("Execute") })
}

/// An argument that lies elsewhere is copied first.
fn moved(model: &mut Model, id: SessionId, array: &Array, target: &[VirtualDeviceId]) -> Result<Array, Blame> {
    if array.shards.len() != target.len() {
        return Err(Blame::Code(Code::InvalidArgument));
    }
    model.copy_to(id, array, target, array.kind.clone(), false)
}
