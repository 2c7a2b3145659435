//! FFI targets.

use std::sync::{Arc, Mutex, OnceLock};

use pw_pjrt::sleep::{self, SleepUs};
use pw_pjrt::{CallFrame, Client, ExecuteContext, ExecuteOptions, FfiError, FfiType, Handler, LoadedExecutable, Plugin};

use crate::run::upload;
use crate::{client, compile, f32s, options, plugin};

/// Registers the targets of this file once.
fn register(plugin: Plugin) {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        plugin.register_ffi::<SleepUs>(sleep::TARGET, "Host").unwrap();
        plugin.register_ffi::<Spy>("test.spy", "Host").unwrap();
        plugin.register_ffi::<Panics>("test.panics", "Host").unwrap();
    });
}

/// Compiles a program that calls a target with attributes.
fn caller(client: &Client, target: &str, attributes: &str) -> LoadedExecutable {
    let text = format!(
        "module @call {{ func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{ \
         %y = stablehlo.custom_call @{target}(%x) {{api_version = 4 : i32, \
         backend_config = {attributes}}} : (tensor<4xf32>) -> tensor<4xf32> \
         return %y : tensor<4xf32> }} }}"
    );
    client.compile(text.as_bytes(), "mlir", &options("add1")).unwrap()
}

#[test]
fn the_sleep_target_passes_its_operand_on() {
    let Some(plugin) = plugin() else { return };
    register(plugin);
    let client = client(plugin, 1);
    // As stock JAX lowers it.
    let exe = compile(&client, "sleep");
    assert_eq!(exe.meta().unwrap().custom_call_targets, [sleep::TARGET]);
    let x = upload(&client, &[1., 2., 3., 4.], &[4], 0);
    let run = exe.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [1., 2., 3., 4.]);

    for (attributes, text) in [
        ("{us = -1 : i64}", "us = -1 is not between 0 and 60000000"),
        ("{us = 60000001 : i64}", "is not between"),
        ("{}", "attribute \"us\" is missing"),
        ("{us = 1.0 : f32}", "must be a signed integer"),
    ] {
        let exe = caller(&client, sleep::TARGET, attributes);
        let e = match exe.execute(&[vec![&x]], ExecuteOptions::default()) {
            Err(e) => e,
            Ok(run) => run.done[0].wait().unwrap_err(),
        };
        assert!(e.message.contains(text), "{attributes}: {e}");
    }
    let exe = caller(&client, sleep::TARGET, "{us = 0 : i32}");
    let run = exe.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [1., 2., 3., 4.]);
}

static SPY_TYPE: OnceLock<FfiType> = OnceLock::new();

/// Notes what it sees in its user data.
#[derive(Default)]
struct Spy;

impl Handler for Spy {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let seen = frame.user_data(*SPY_TYPE.get().unwrap())?;
        let note = format!(
            "{:?} {:?} device {} {:?}",
            frame.arg(0)?.element_type,
            frame.result_shape(0)?,
            frame.device_ordinal()?,
            frame.attributes(),
        );
        let half: Vec<f32> = f32s(frame.arg(0)?.bytes).iter().map(|v| v / 2.).collect();
        frame.result_bytes(0)?.copy_from_slice(&crate::bytes_of(&half));
        if let Some(seen) = seen {
            seen.downcast_ref::<Mutex<Vec<String>>>().unwrap().lock().unwrap().push(note);
        }
        Ok(())
    }
}

#[test]
fn handlers_see_shapes_attributes_device_and_context() {
    let Some(plugin) = plugin() else { return };
    register(plugin);
    SPY_TYPE.get_or_init(|| plugin.register_ffi_type("test.notes").unwrap());
    let client = client(plugin, 3);
    let exe = caller(&client, "test.spy", "{a = 7 : i32, b = \"text\", c = 1.5 : f32, d = {e = true}, f = array<i64: 1, -2>}");
    let x = upload(&client, &[1., 2., 3., 4.], &[4], 0);
    // Without a context of ours: the default one is passed, and holds nothing.
    let run = exe.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [0.5, 1., 1.5, 2.]);

    let notes = Arc::new(Mutex::new(Vec::<String>::new()));
    let context = ExecuteContext::new(plugin, vec![(SPY_TYPE.get().copied().unwrap(), notes.clone())]);
    let context = context.unwrap();
    let with = ExecuteOptions { context: Some(&context), ..Default::default() };
    let run = exe.execute(&[vec![&x]], with).unwrap();
    run.done[0].wait().unwrap();
    assert_eq!(
        *notes.lock().unwrap(),
        ["F32 (F32, [4]) device 0 {\"a\": I64(7), \"b\": String([116, 101, 120, 116]), \
          \"c\": F32(1.5), \"d\": Dictionary({\"e\": Bool(true)}), \"f\": I64List([1, -2])}"]
    );
    drop(run);
    drop(context);
    assert_eq!(Arc::strong_count(&notes), 1, "the context keeps its values no longer than itself");
}

/// Panics.
#[derive(Default)]
struct Panics;

impl Handler for Panics {
    fn call(&self, _: &mut CallFrame<'_>) -> Result<(), FfiError> {
        panic!("out of cheese");
    }
}

#[test]
fn a_panic_in_a_handler_is_an_error_of_the_run() {
    let Some(plugin) = plugin() else { return };
    register(plugin);
    let client = client(plugin, 1);
    let exe = caller(&client, "test.panics", "{}");
    let x = upload(&client, &[1., 2., 3., 4.], &[4], 0);
    let e = match exe.execute(&[vec![&x]], ExecuteOptions::default()) {
        Err(e) => e,
        Ok(run) => run.done[0].wait().unwrap_err(),
    };
    assert_eq!(e.code, pw_pjrt::code::INTERNAL);
    assert!(e.message.contains("FFI handler panicked: out of cheese"), "{e}");
}
