//! Programs by hand: StableHLO text.

/// What jaxlib sends for four partitions; the worker puts in the right devices.
pub(crate) const OPTIONS: &[u8] = include_bytes!("../../src/testdata/compile_options_jaxlib_0_10_2.bin");

fn module(name: &str, devices: u32, parameters: &str, results: &str, body: &str) -> Vec<u8> {
    format!(
        "module @{name} attributes {{mhlo.num_partitions = {devices} : i32, mhlo.num_replicas = 1 : i32}} {{
           sdy.mesh @mesh = <[\"x\"={devices}]>
           func.func public @main({parameters}) -> ({results}) {{
             {body}
           }}
         }}"
    )
    .into_bytes()
}

const SPLIT: &str = r#"{sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}"#;

/// `x + 1` on f32[4], the same on every device.
pub(crate) fn add_one(devices: u32) -> Vec<u8> {
    let body = "%c = stablehlo.constant dense<1.0> : tensor<4xf32>
                %0 = stablehlo.add %a, %c : tensor<4xf32>
                return %0 : tensor<4xf32>";
    module("jit_add_one", devices, "%a: tensor<4xf32>", "tensor<4xf32>", body)
}

/// `x + 1` on f32[8] split over the devices; the argument may become the result.
pub(crate) fn donating(devices: u32) -> Vec<u8> {
    let parameter = format!(r#"%a: tensor<8xf32> {{tf.aliasing_output = 0 : i32, {}"#, &SPLIT[1..]);
    let body = "%c = stablehlo.constant dense<1.0> : tensor<8xf32>
                %0 = stablehlo.add %a, %c : tensor<8xf32>
                return %0 : tensor<8xf32>";
    module("jit_donating", devices, &parameter, &format!("tensor<8xf32> {SPLIT}"), body)
}

/// The sum of f32[8] that is split over the devices.
pub(crate) fn sum(devices: u32) -> Vec<u8> {
    let body = "%c = stablehlo.constant dense<0.0> : tensor<f32>
                %0 = stablehlo.reduce(%a init: %c) applies stablehlo.add across dimensions = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
                return %0 : tensor<f32>";
    module("jit_sum", devices, &format!("%a: tensor<8xf32> {SPLIT}"), "tensor<f32>", body)
}

/// Which device am I: f32[4] split over four devices, by a partition id that the partitioner makes.
pub(crate) fn count_up(devices: u32) -> Vec<u8> {
    let body = format!(
        "%0 = stablehlo.iota dim = 0 : tensor<{n}xf32>
         return %0 : tensor<{n}xf32>",
        n = devices * 2
    );
    module("jit_count_up", devices, "", &format!("tensor<{}xf32> {SPLIT}", devices * 2), &body)
}

/// Asks function `id` of the client for f32[4], the same on every device.
pub(crate) fn host_callback(devices: u32, id: i64) -> Vec<u8> {
    let body = format!(
        "%0 = stablehlo.custom_call @pw.host_callback(%a) {{api_version = 4 : i32, backend_config = {{id = {id} : i64}}}} : (tensor<4xf32>) -> tensor<4xf32>
         return %0 : tensor<4xf32>"
    );
    module("jit_host_callback", devices, "%a: tensor<4xf32>", "tensor<4xf32>", &body)
}

/// Sleeps; fails where `us` is negative.
pub(crate) fn sleep(us: i64) -> Vec<u8> {
    let body = format!(
        "%0 = stablehlo.custom_call @pw.sleep_us(%a) {{api_version = 4 : i32, backend_config = {{us = {us} : i64}}}} : (tensor<4xf32>) -> tensor<4xf32>
         return %0 : tensor<4xf32>"
    );
    module("jit_sleep", 4, "%a: tensor<4xf32>", "tensor<4xf32>", &body)
}
