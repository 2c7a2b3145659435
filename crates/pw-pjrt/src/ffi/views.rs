//! All buffers of a call at once, for handlers that read some and write several.

use crate::error::{PjrtError, Result};
use crate::ffi::{ArgView, CallFrame};

/// Every argument that can be read while every result is written.
pub struct Views<'a> {
    /// The arguments; `None` where one shares memory with a result (see `CallFrame::copy_arg_to_result`).
    pub args: Vec<Option<ArgView<'a>>>,
    /// The results' bytes.
    pub results: Vec<&'a mut [u8]>,
}

impl CallFrame<'_> {
    /// All arguments and results, borrowed together. Fails where two results share memory.
    pub fn views(&mut self) -> Result<Views<'_>> {
        let mut ranges = Vec::with_capacity(self.num_results());
        for index in 0..self.num_results() {
            let (_, _, data, len) = self.buffer(&self.raw.rets, index, "result")?;
            if ranges.iter().any(|&r| overlap(r, (data as usize, len))) {
                return Err(PjrtError::internal(format!("result {index} shares memory with another result")));
            }
            ranges.push((data as usize, len));
        }
        let mut args = Vec::with_capacity(self.num_args());
        for index in 0..self.num_args() {
            let (_, _, data, len) = self.buffer(&self.raw.args, index, "argument")?;
            let shared = ranges.iter().any(|&r| overlap(r, (data as usize, len)));
            args.push(if shared { None } else { Some(self.arg(index)?) });
        }
        let mut results = Vec::with_capacity(ranges.len());
        for index in 0..ranges.len() {
            let (_, _, data, len) = self.buffer(&self.raw.rets, index, "result")?;
            // SAFETY: memory of the host, ours to write during the call. The results are disjoint from one another and from
            // the arguments that are visible here, and the frame is borrowed exclusively as long as any of them lives.
            results.push(if len == 0 { &mut [][..] } else { unsafe { std::slice::from_raw_parts_mut(data, len) } });
        }
        Ok(Views { args, results })
    }
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.1 > 0 && b.1 > 0 && a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn ranges_that_share_a_byte_overlap() {
        assert!(overlap((0, 8), (7, 1)) && overlap((7, 1), (0, 8)) && overlap((4, 4), (0, 16)));
        assert!(!overlap((0, 8), (8, 8)) && !overlap((8, 8), (0, 8)) && !overlap((4, 0), (0, 8)) && !overlap((0, 8), (4, 0)));
    }
}
