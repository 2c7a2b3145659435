//! How the members of one launch run: the seam behind which other forms than the plugin's own come.

use std::sync::Mutex;
use std::time::Instant;

use pw_pjrt::{Buffer, ExecuteOptions, LoadedExecutable, PjrtError};

/// A launch that takes longer will not gain from running its members one after the other; trying it would cost.
const TRY_NS_MAX: u64 = 2_000_000;

/// How often the slower way is tried again, in launches.
const RETRY: u64 = 512;

/// One launch of all local members.
pub(crate) struct Call<'a> {
    /// By member, in execution order.
    pub(crate) arguments: &'a [Vec<&'a Buffer>],
    pub(crate) non_donatable: &'a [i64],
    pub(crate) launch_id: i32,
}

/// Runs a launch to its end on the calling thread: outputs by member, all ready.
pub(crate) trait GangForm: Send + Sync {
    fn launch(&self, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError>;
}

/// One Execute with all members; the plugin's own collectives. Members that do not depend on one another and are tiny
/// are cheaper one after the other: the plugin spreads an Execute over its threads.
pub(crate) struct NativeGang {
    executable: LoadedExecutable,
    /// The same for one device at a time, where members do not depend on one another.
    single: Option<LoadedExecutable>,
    times: Mutex<Times>,
}

/// How long something takes when nothing disturbs it: the least seen, which slowly forgets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Least(Option<u64>);

impl Least {
    pub(crate) fn note(&mut self, ns: u64) {
        self.0 = Some(self.0.map_or(ns, |least| ns.min(least + least / 64 + 1)));
    }

    pub(crate) fn ns(self) -> Option<u64> {
        self.0
    }
}

#[derive(Debug, Default)]
struct Times {
    together: Least,
    apart: Least,
    launches: u64,
}

impl Times {
    fn apart_next(&mut self) -> bool {
        self.launches += 1;
        // The first launch warms up.
        let (3.., Some(together)) = (self.launches, self.together.ns()) else { return false };
        let Some(apart) = self.apart.ns() else { return together < TRY_NS_MAX };
        let apart_wins = apart < together;
        let (fast, slow) = if apart_wins { (apart, together) } else { (together, apart) };
        let retry = self.launches.is_multiple_of(RETRY) && slow < 4 * fast;
        apart_wins != retry
    }

    fn note(&mut self, apart: bool, ns: u64) {
        match (self.launches, apart) {
            (..=1, _) => {}
            (_, true) => self.apart.note(ns),
            (_, false) => self.together.note(ns),
        }
    }
}

impl NativeGang {
    pub(crate) fn new(executable: LoadedExecutable, single: Option<LoadedExecutable>) -> NativeGang {
        NativeGang { executable, single, times: Mutex::default() }
    }

    fn times(&self) -> std::sync::MutexGuard<'_, Times> {
        self.times.lock().expect("nothing panics while it holds the times")
    }

    fn together(&self, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let execution = self.executable.execute(call.arguments, call.options(None))?;
        // All of them, so that nothing runs on when an error is reported.
        let mut result = Ok(());
        for done in &execution.done {
            result = result.and(done.wait());
        }
        result.map(|()| execution.outputs)
    }

    fn one_by_one(&self, single: &LoadedExecutable, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let mut outputs = Vec::with_capacity(call.arguments.len());
        for (arguments, &device) in call.arguments.iter().zip(self.executable.devices()) {
            let mut execution = single.execute(std::slice::from_ref(arguments), call.options(Some(device)))?;
            execution.done.iter().try_for_each(|done| done.wait())?;
            outputs.extend(execution.outputs.pop());
        }
        Ok(outputs)
    }
}

impl Call<'_> {
    fn options(&self, only_device: Option<usize>) -> ExecuteOptions<'_> {
        ExecuteOptions { non_donatable: self.non_donatable, only_device, context: None, launch_id: self.launch_id }
    }
}

impl GangForm for NativeGang {
    fn launch(&self, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let Some(single) = &self.single else { return self.together(call) };
        let apart = self.times().apart_next();
        let start = Instant::now();
        let outputs = if apart { self.one_by_one(single, call)? } else { self.together(call)? };
        self.times().note(apart, u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn play(together_ns: u64, apart_ns: u64, launches: usize) -> Vec<bool> {
        let mut times = Times::default();
        (0..launches)
            .map(|_| {
                let apart = times.apart_next();
                times.note(apart, if apart { apart_ns } else { together_ns });
                apart
            })
            .collect()
    }

    #[test]
    fn members_run_apart_where_that_is_faster() {
        assert_eq!(play(250_000, 50_000, 5), [false, false, true, true, true]);
        assert_eq!(play(80_000, 90_000, 5), [false, false, true, false, false]);
    }

    #[test]
    fn long_ones_never_do() {
        assert!(play(3_000_000, 50_000, 2000).iter().all(|apart| !apart));
    }

    #[test]
    fn the_loser_is_tried_again_now_and_then() {
        assert_eq!(play(80_000, 90_000, 1100).iter().filter(|&&apart| apart).count(), 3);
        assert_eq!(play(180_000, 50_000, 1100).iter().filter(|&&apart| !apart).count(), 4);
        assert_eq!(play(80_000, 900_000, 1100).iter().filter(|&&apart| apart).count(), 1);
    }

    #[test]
    fn the_least_forgets_slowly() {
        let mut least = Least::default();
        for ns in [900, 100, 800] {
            least.note(ns);
        }
        assert_eq!(least.ns(), Some(102));
        (0..1000).for_each(|_| least.note(800));
        assert_eq!(least.ns(), Some(800));
    }
}
