//! The test-only target `pw.sleep_us`: device time without CPU time.

use std::time::Duration;

use crate::error::PjrtError;
use crate::ffi::{CallFrame, FfiError, Handler};

/// Name of the target.
pub const TARGET: &str = "pw.sleep_us";

/// The longest sleep that is accepted.
pub const US_MAX: i64 = 60_000_000;

/// Sleeps for the attribute `us` (microseconds, integer), then passes operand 0 on as result 0.
#[derive(Debug, Default)]
pub struct SleepUs;

impl Handler for SleepUs {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let us = frame.attribute_i64("us")?;
        if !(0..=US_MAX).contains(&us) {
            return Err(PjrtError::invalid(format!("{TARGET}: us = {us} is not between 0 and {US_MAX}")));
        }
        std::thread::sleep(Duration::from_micros(us as u64));
        frame.copy_arg_to_result(0, 0)
    }
}
