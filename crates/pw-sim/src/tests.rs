//! The fixed seeds, every planted bug, determinism and replay.

use crate::{CI_SEEDS, Options, Plant, Summary, record, replay, run, run_seeds};

#[test]
fn fixed_seeds_keep_every_invariant() {
    let total = match run_seeds(1..CI_SEEDS + 1, &Options::default(), |_| {}) {
        Ok(total) => total,
        Err(failure) => panic!("{failure}"),
    };
    eprintln!("{CI_SEEDS} seeds: {total}");
    // The workload must go where it hurts.
    let Summary { launches, fetches, moves, exchanges, faults, exhausted, pauses, killed, vanished, .. } = total;
    for (what, count) in [
        ("launches", launches / 100),
        ("fetches", fetches / 10),
        ("moves", moves / 100),
        ("exchanges", exchanges / 100),
        ("faults", faults / 10),
        ("out of memory", exhausted / 10),
        ("pauses", pauses),
        ("killed", killed / 10),
        ("vanished", vanished / 10),
    ] {
        assert!(count > 0, "hardly any: {what} ({total})");
    }
}

#[test]
fn every_planted_bug_is_found_by_its_checker() {
    let mut missed = Vec::new();
    for plant in Plant::ALL {
        let finders = plant.finders();
        let mut found = 0;
        for seed in 1..=120 {
            let Err(failure) = run(&Options { seed, plant: Some(plant), ..Options::default() }) else { continue };
            assert!(finders.contains(&failure.invariant), "{plant:?} was found by the wrong checker: {failure}");
            found += u32::from(failure.invariant == finders[0]);
            if found == 2 {
                break;
            }
        }
        if found == 0 {
            missed.push(plant);
        }
    }
    assert!(missed.is_empty(), "never found: {missed:?}");
}

#[test]
fn a_seed_is_the_same_run_every_time_and_its_log_replays() {
    for seed in [3, 17, 101] {
        let options = Options { seed, ..Options::default() };
        let (first, recording) = record(&options).unwrap_or_else(|f| panic!("{f}"));
        let (second, again) = record(&options).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(first, second);
        assert_eq!(recording.records, again.records);
        replay(&recording).expect("the same events give the same effects");
    }
}

#[test]
fn a_failure_says_how_to_play_it_again() {
    let options = Options { seed: 5, steps: 30, plant: Some(Plant::LoseReply), ..Options::default() };
    let text = run(&options).expect_err("a lost reply is noticed").to_string();
    assert!(text.contains("pathways sim --seed 5 --steps 30"), "{text}");
    assert!(text.contains("A9Answers"), "{text}");
}
