//! JAX's own test files on stock JAX and on a cluster, compared test by test.
//!
//! A client process that dies or hangs costs one test: the rest goes on in a new process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::expected::{self, Entry};
use crate::{demo, run, setup};

pub(super) const HELP: &str = "\
cargo xtask accept jax-tests --tests DIR [--shape WxD]... [--file NAME]... [--every N] [--timeout SECONDS] [--python PROGRAM]

Runs JAX's own test files twice, on stock JAX with W·D CPU devices and on `pathways local --workers W --devices D`, and
compares the outcome of every test id that stock JAX collects. A difference must be explained in
tests/jax/expected/NAME.toml, entry by entry with its cause; one that is not fails the run.

  --tests    a checkout of JAX at the tag of the installed version (its files are not part of this repo)
  --shape    workers x devices per worker; default 1x8
  --file     a test file; default transfer_guard_test, multi_device_test, garbage_collection_guard_test, array_test, pmap_test,
             pjit_test, linalg_test and lax_test (of these three only ids whose CRC-32 is divisible by 6, 4 and 6; --every 1
             runs all)
  --every    run only ids whose CRC-32 is divisible by this
  --timeout  seconds for one test; default 120
  --python   an interpreter with JAX; default .venv's

The table of all ids goes to target/accept/jax-tests/SHAPE/NAME.tsv.";

const FILES: [&str; 8] = [
    "transfer_guard_test",
    "multi_device_test",
    "garbage_collection_guard_test",
    "array_test",
    "pmap_test",
    "pjit_test",
    "linalg_test",
    "lax_test",
];
/// Files that would take too long as a whole, and which part of them is run: ids whose CRC-32 is divisible by the number.
const SAMPLED: [(&str, u32); 3] = [("linalg_test", 4), ("lax_test", 6), ("pjit_test", 6)];
/// Beyond a test's own time limit: for start, collection, and the pytest plugin to act.
const STUCK_GRACE: Duration = Duration::from_secs(90);
const PROCESSES_MAX: usize = 60;

struct Options {
    tests: PathBuf,
    shapes: Vec<(usize, usize)>,
    files: Vec<String>,
    every: Option<u32>,
    timeout: Duration,
    python: Option<PathBuf>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut tests = None;
        let timeout = Duration::from_secs(120);
        let mut options = Self { tests: PathBuf::new(), shapes: vec![], files: vec![], every: None, timeout, python: None };
        for pair in args.chunks(2) {
            let [flag, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
            match flag.as_str() {
                "--tests" => tests = Some(PathBuf::from(value)),
                "--shape" => options.shapes.push(shape(value)?),
                "--file" => options.files.push(value.trim_end_matches(".py").to_owned()),
                "--every" => {
                    let every = value.parse().ok().filter(|&n| n > 0);
                    options.every = Some(every.ok_or(format!("--every {value}: not a number above 0"))?);
                }
                "--timeout" => {
                    options.timeout = Duration::from_secs(value.parse().map_err(|_| format!("--timeout {value}: not a number"))?)
                }
                "--python" => options.python = Some(PathBuf::from(value)),
                other => return Err(format!("unknown option {other}\n\n{HELP}")),
            }
        }
        options.tests = tests.ok_or("--tests DIR is needed: a checkout of JAX at the tag of the installed version")?;
        if options.shapes.is_empty() {
            options.shapes.push((1, 8));
        }
        if options.files.is_empty() {
            options.files = FILES.map(str::to_owned).to_vec();
        }
        Ok(options)
    }
}

fn shape(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once('x').and_then(|(w, d)| Some((w.parse().ok()?, d.parse().ok()?)));
    parsed.filter(|&(w, d)| w > 0 && d > 0).ok_or(format!("--shape {text}: write WORKERSxDEVICES, e.g. 2x4"))
}

pub(super) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let options = Options::parse(args)?;
    let ready = setup::ensure(root)?;
    let python = options.python.as_ref().unwrap_or(&ready.python).clone();
    check_version(&options.tests, &python)?;
    let mut unexplained = Vec::new();
    for &(workers, devices) in &options.shapes {
        let shape = format!("{workers}x{devices}");
        let folder = root.join("target/accept/jax-tests").join(&shape);
        for file in &options.files {
            let sampled = SAMPLED.iter().find(|(name, _)| name == file).map_or(1, |&(_, every)| every);
            let runner = Runner { root, folder: &folder, timeout: options.timeout, every: options.every.unwrap_or(sampled) };
            let list = root.join(format!("tests/jax/expected/{file}.toml"));
            let text = fs::read_to_string(&list).unwrap_or_default();
            let entries = expected::parse(&text, &shape).map_err(|e| format!("{}: {e}", list.display()))?;
            runner.copy(&options.tests, file)?;
            let excluded: BTreeSet<String> = entries.iter().filter(|(_, e)| e.ours.is_none()).map(|(id, _)| id.clone()).collect();

            let stock = runner.run(file, "stock", &BTreeSet::new(), || {
                let mut command = Command::new(&python);
                demo::stock_jax(&mut command, workers * devices);
                command
            })?;
            let ours = runner.run(file, "pathways", &excluded, || {
                let mut command = Command::new(&ready.pathways);
                let (w, d) = (workers.to_string(), devices.to_string());
                command.args(["local", "--workers", &w, "--devices", &d, "--port", "0", "--cache-dir"]);
                command.arg(root.join("target/cache")).arg("--").arg(&python);
                command
            })?;
            let table = folder.join(format!("{file}.tsv"));
            let open = report(&format!("{file} {shape}"), &stock, &ours, &entries, &table)?;
            unexplained.extend(open.into_iter().map(|id| format!("{file} {shape}: {id}")));
        }
    }
    if unexplained.is_empty() {
        return Ok(());
    }
    Err(format!("{} unexplained differences:\n  {}", unexplained.len(), unexplained.join("\n  ")))
}

/// Tests of another release ask for other things: the tag must match the wheel.
fn check_version(tests: &Path, python: &Path) -> Result<(), String> {
    let path = tests.join("jax/version.py");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e} (--tests takes the root of a checkout of JAX)", path.display()))?;
    let tagged = text.lines().find_map(|l| l.strip_prefix("_version = ")).unwrap_or("unknown").trim_matches('"');
    let installed = run::output(Command::new(python).args(["-c", "import importlib.metadata as m; print(m.version('jax'))"]))
        .ok_or(format!("{} has no jax", python.display()))?;
    if tagged == installed {
        return Ok(());
    }
    Err(format!("{} is JAX {tagged}, but {installed} is installed: check out the tag jax-v{installed}", tests.display()))
}

/// Outcome and message of every collected test id.
type Outcomes = BTreeMap<String, (String, String)>;

struct Runner<'a> {
    root: &'a Path,
    folder: &'a Path,
    timeout: Duration,
    every: u32,
}

impl Runner<'_> {
    /// Copies the test file into a folder of its own: in the checkout, its `jax` folder would be found instead of the wheel.
    fn copy(&self, tests: &Path, file: &str) -> Result<(), String> {
        let to = self.folder.join(file);
        fs::create_dir_all(&to).map_err(|e| format!("{}: {e}", to.display()))?;
        let from = tests.join("tests").join(format!("{file}.py"));
        fs::copy(&from, to.join(format!("{file}.py"))).map_err(|e| format!("{}: {e}", from.display()))?;
        fs::write(to.join("pytest.ini"), "[pytest]\n").map_err(|e| format!("{}: {e}", to.display()))
    }

    /// Runs all tests of a file, in as many processes as it takes.
    fn run(&self, file: &str, side: &str, excluded: &BTreeSet<String>, start: impl Fn() -> Command) -> Result<Outcomes, String> {
        let cwd = self.folder.join(file);
        let record = cwd.join(format!("{side}.record"));
        let done = cwd.join(format!("{side}.done"));
        let log = cwd.join(format!("{side}.log"));
        for old in [&record, &log] {
            let _ = fs::remove_file(old);
        }
        let mut outcomes = Outcomes::new();
        for _ in 0..PROCESSES_MAX {
            let not_to_run: Vec<&str> = excluded.iter().chain(outcomes.keys()).map(String::as_str).collect();
            fs::write(&done, not_to_run.join("\n")).map_err(|e| format!("{}: {e}", done.display()))?;
            let mut command = start();
            command.current_dir(&cwd).args(["-m", "pytest", "-q", "-p", "pw_recorder", "-p", "no:cacheprovider", "--noconftest"]);
            command.arg(format!("--timeout={}", self.timeout.as_secs())).args(["--timeout-method=thread", "--rootdir=."]);
            command.arg(format!("{file}.py"));
            command
                .env("PW_RECORD", &record)
                .env("PW_DONE", &done)
                .env("PW_EVERY", self.every.to_string())
                .env("PYTHONPATH", self.root.join("tests/jax"));
            // What a test computes with scipy itself has the rounding of a worker's LAPACK, which has one thread, only then; vectors
            // that are unique up to a phase have another one else.
            command.env("OPENBLAS_NUM_THREADS", "1");
            let ended = self.one_process(&format!("{file} on {side}"), &mut command, &record, &log)?;
            let seen = Record::read(&record);
            if seen.collected.is_empty() {
                return Err(format!("{file} on {side}: nothing was collected; see {}", log.display()));
            }
            let before = outcomes.len();
            outcomes.extend(seen.ended);
            if let Some(id) = seen.interrupted {
                outcomes.entry(id).or_insert_with(|| ended.outcome());
            }
            let left = seen.collected.iter().filter(|id| !outcomes.contains_key(*id) && !excluded.contains(*id)).count();
            if left == 0 {
                if self.every > 1 {
                    let (all, part, every) = (seen.all, seen.collected.len(), self.every);
                    run::say(&format!("{file} on {side}: {part} of {all} ids, those whose CRC-32 is divisible by {every}"));
                }
                return Ok(outcomes);
            }
            if outcomes.len() == before {
                return Err(format!("{file} on {side}: {left} tests cannot be started; see {}", log.display()));
            }
        }
        Err(format!("{file} on {side}: more than {PROCESSES_MAX} processes died; see {}", log.display()))
    }

    /// One pytest process until it ends, or until no test has ended for too long.
    fn one_process(&self, what: &str, command: &mut Command, record: &Path, log: &Path) -> Result<Ended, String> {
        let out = File::options().create(true).append(true).open(log).map_err(|e| format!("{}: {e}", log.display()))?;
        let err = out.try_clone().map_err(|e| format!("{}: {e}", log.display()))?;
        let mut running = run::Running::start(command.stdin(Stdio::null()).stdout(out).stderr(err))?;
        let start = Instant::now();
        let (mut said, mut moved, mut length) = (start, start, 0);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = fs::metadata(record).map_or(0, |m| m.len());
            if now != length {
                (length, moved) = (now, Instant::now());
            }
            let ended = running.poll()?;
            if ended.is_some() || said.elapsed() > Duration::from_secs(10) {
                said = Instant::now();
                let seen = Record::read(record);
                let failed = seen.ended.values().filter(|(o, _)| o == "failed").count();
                let seconds = start.elapsed().as_secs();
                run::say(&format!("{what}: {} of {} ended, {failed} failed, {seconds} s", seen.ended.len(), seen.collected.len()));
            }
            if let Some(status) = ended {
                let in_time = moved.elapsed() < self.timeout;
                return Ok(Ended { how: status.to_string(), timed_out: !in_time });
            }
            if moved.elapsed() > self.timeout + STUCK_GRACE {
                return Ok(Ended { how: "no sign of life".to_owned(), timed_out: true });
            }
        }
    }
}

struct Ended {
    how: String,
    timed_out: bool,
}

impl Ended {
    /// What that means for the test that was running.
    fn outcome(&self) -> (String, String) {
        let outcome = if self.timed_out { "timeout" } else { "crashed" };
        (outcome.to_owned(), format!("the client process ended in this test: {}", self.how))
    }
}

#[derive(Default)]
struct Record {
    /// Before the sample was taken.
    all: usize,
    collected: BTreeSet<String>,
    ended: Outcomes,
    /// Started and not ended.
    interrupted: Option<String>,
}

impl Record {
    fn read(path: &Path) -> Self {
        Self::parse(&fs::read_to_string(path).unwrap_or_default())
    }

    fn parse(text: &str) -> Self {
        let mut record = Self::default();
        for line in text.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["all", count] => record.all = count.parse().unwrap_or(0),
                ["collected", id] => _ = record.collected.insert(id.to_owned()),
                ["start", id] => record.interrupted = Some(id.to_owned()),
                ["end", id, outcome, ref message @ ..] => {
                    record.interrupted = None;
                    record.ended.insert(id.to_owned(), (outcome.to_owned(), message.join(" ")));
                }
                _ => {}
            }
        }
        record
    }
}

/// Prints the counts of one file, writes its table, and returns the ids whose difference nobody explains.
fn report(what: &str, stock: &Outcomes, ours: &Outcomes, entries: &BTreeMap<String, Entry>, table: &Path) -> Result<Vec<String>, String> {
    let compared = compare(stock, ours, entries);
    let mut rows = String::from("id\tstock\tpathways\tverdict\tmessage\n");
    for (id, row) in &compared {
        rows += &format!("{id}\t{}\t{}\t{}\t{}\n", row.stock, row.ours, row.verdict.text(), row.message);
    }
    fs::write(table, rows).map_err(|e| format!("{}: {e}", table.display()))?;
    let count = |v: &Verdict| compared.values().filter(|r| std::mem::discriminant(&r.verdict) == std::mem::discriminant(v)).count();
    let none = || Verdict::Explained(String::new());
    println!("\n{what}: {} collected by stock JAX", stock.len());
    println!("  stock JAX  {}", tally(stock));
    println!("  pathways   {}", tally(ours));
    println!(
        "  differences: {} explained, {} unexplained; {} excluded; {} entries not needed",
        count(&none()),
        count(&Verdict::Unexplained),
        count(&Verdict::Excluded(String::new())),
        count(&Verdict::NotNeeded)
    );
    let mut causes: BTreeMap<&str, usize> = BTreeMap::new();
    for row in compared.values() {
        if let Verdict::Explained(cause) | Verdict::Excluded(cause) = &row.verdict {
            *causes.entry(cause).or_default() += 1;
        }
    }
    for (cause, n) in causes {
        println!("    {n:4} × {cause}");
    }
    let open: Vec<String> = compared.iter().filter(|(_, r)| r.verdict == Verdict::Unexplained).map(|(id, _)| id.clone()).collect();
    for id in &open {
        let row = &compared[id];
        println!("  UNEXPLAINED {id}: {} on stock JAX, {} on pathways: {}", row.stock, row.ours, row.message);
    }
    Ok(open)
}

fn tally(outcomes: &Outcomes) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (outcome, _) in outcomes.values() {
        *counts.entry(outcome).or_default() += 1;
    }
    let parts: Vec<String> = counts.iter().map(|(outcome, n)| format!("{n} {outcome}")).collect();
    parts.join(", ")
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Same,
    Explained(String),
    Unexplained,
    Excluded(String),
    /// The list explains a difference that is not there (any more).
    NotNeeded,
}

impl Verdict {
    fn text(&self) -> &str {
        match self {
            Self::Same => "same",
            Self::Explained(_) => "explained",
            Self::Unexplained => "UNEXPLAINED",
            Self::Excluded(_) => "excluded",
            Self::NotNeeded => "entry not needed",
        }
    }
}

struct Row {
    stock: String,
    ours: String,
    message: String,
    verdict: Verdict,
}

fn compare(stock: &Outcomes, ours: &Outcomes, entries: &BTreeMap<String, Entry>) -> BTreeMap<String, Row> {
    let missing = ("missing".to_owned(), String::new());
    let ids: BTreeSet<&String> = stock.keys().chain(ours.keys()).collect();
    let row = |id: &String| {
        let (stock_outcome, _) = stock.get(id).unwrap_or(&missing);
        let (our_outcome, message) = ours.get(id).unwrap_or(&missing);
        let verdict = match entries.get(id) {
            Some(Entry { ours: None, cause, .. }) => Verdict::Excluded(cause.clone()),
            Some(_) if stock_outcome == our_outcome => Verdict::NotNeeded,
            Some(e) if e.ours.as_ref() == Some(our_outcome) && message.contains(&e.contains) => Verdict::Explained(e.cause.clone()),
            _ if stock_outcome == our_outcome => Verdict::Same,
            _ => Verdict::Unexplained,
        };
        Row { stock: stock_outcome.clone(), ours: our_outcome.clone(), message: message.clone(), verdict }
    };
    ids.into_iter().map(|id| (id.clone(), row(id))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(rows: &[(&str, &str, &str)]) -> Outcomes {
        rows.iter().map(|(id, outcome, message)| ((*id).to_owned(), ((*outcome).to_owned(), (*message).to_owned()))).collect()
    }

    #[test]
    fn a_record_survives_a_crash() {
        let text = "collected\tA::a\ncollected\tA::b\ncollected\tA::c\nstart\tA::a\nend\tA::a\tpassed\t\nstart\tA::b\n\
                    collected\tA::a\ncollected\tA::b\ncollected\tA::c\n";
        let record = Record::parse(text);
        assert_eq!(record.collected.iter().collect::<Vec<_>>(), ["A::a", "A::b", "A::c"]);
        assert_eq!(record.ended, outcomes(&[("A::a", "passed", "")]));
        assert_eq!(record.interrupted.as_deref(), Some("A::b"));
    }

    #[test]
    fn only_the_right_failure_is_explained() {
        let list = "[[difference]]\ncause = \"no dlpack\"\nours = \"failed\"\ncontains = \"PjRt\"\nids = [\"a\", \"b\", \"c\", \"d\"]\n\
                    [[excluded]]\ncause = \"hangs\"\nids = [\"e\"]\n";
        let entries = expected::parse(list, "1x8").unwrap();
        let stock = outcomes(&[
            ("a", "passed", ""),
            ("b", "passed", ""),
            ("c", "passed", ""),
            ("d", "passed", ""),
            ("e", "passed", ""),
            ("f", "skipped", "why"),
            ("g", "passed", ""),
        ]);
        let ours = outcomes(&[
            ("a", "failed", "needs PjRt"),
            ("b", "failed", "another reason"),
            ("c", "crashed", "PjRt"),
            ("d", "passed", ""),
            ("f", "skipped", "another"),
        ]);
        let rows = compare(&stock, &ours, &entries);
        let verdicts: Vec<&str> = rows.values().map(|r| r.verdict.text()).collect();
        let all = ["explained", "UNEXPLAINED", "UNEXPLAINED", "entry not needed", "excluded", "same", "UNEXPLAINED"];
        assert_eq!(verdicts, all);
        assert_eq!(rows["g"].ours, "missing");
    }

    #[test]
    fn options_are_checked() {
        let parse = |args: &[&str]| Options::parse(&args.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>());
        let options = parse(&["--tests", "x", "--shape", "2x4", "--file", "a_test.py"]).unwrap();
        assert_eq!((options.shapes, options.files), (vec![(2, 4)], vec!["a_test".to_owned()]));
        assert!(parse(&[]).is_err() && parse(&["--tests"]).is_err() && parse(&["--tests", "x", "--shape", "8"]).is_err());
        assert!(parse(&["--other", "x"]).is_err());
    }
}
