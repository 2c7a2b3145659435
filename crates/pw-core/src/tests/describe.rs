//! Questions about compiled programs.

use super::*;

fn ask(w: &mut World, executable: Handle, question: Question) -> OpId {
    let (op, event) = w.event(A, Request::Describe { executable, question });
    w.turn([event]);
    op
}

fn described(question: Question, result: Result<Description, Status>) -> Option<Result<Reply, Status>> {
    Some(Ok(Reply::Described { question, result }))
}

#[test]
fn a_worker_that_has_the_program_answers() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let program = w.compile(A, 1, report("f", 8, 1, &[], 0));
    let text = ask(&mut w, program, Question::Text);
    let fingerprint = Bytes::from_static(b"f");
    assert_eq!(w.commands(), [Command::Describe { query: 1, fingerprint: fingerprint.clone(), question: Question::Text }]);
    assert_eq!(w.reply(text), None);
    let cost = ask(&mut w, program, Question::Cost);
    assert_eq!(w.commands(), [Command::Describe { query: 2, fingerprint, question: Question::Cost }]);
    let figures = Description::Cost(vec![Cost { name: "flops".into(), value: 8.0 }]);
    w.say(Report::Described { query: 2, result: Ok(figures.clone()) });
    assert_eq!(w.reply(cost), described(Question::Cost, Ok(figures)));
    w.say(Report::Described { query: 1, result: Ok(Description::Text("HloModule f".into())) });
    assert_eq!(w.reply(text), described(Question::Text, Ok(Description::Text("HloModule f".into()))));
    w.say(Report::Described { query: 1, result: Ok(Description::Text("again".into())) });
    assert!(w.fx.is_empty());
}

#[test]
fn questions_that_wait_have_a_bound() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let program = w.compile(A, 1, report("f", 8, 1, &[], 0));
    for _ in 0..64 {
        let asked = ask(&mut w, program, Question::Text);
        assert_eq!(w.reply(asked), None);
    }
    let more = ask(&mut w, program, Question::Text);
    let Some(Ok(Reply::Described { result: Err(status), .. })) = w.reply(more) else { panic!("{:?}", w.fx) };
    assert_eq!(status.code, Code::ResourceExhausted);
    w.say(Report::Described { query: 1, result: Ok(Description::Text(String::new())) });
    let again = ask(&mut w, program, Question::Text);
    assert_eq!(w.reply(again), None);
}

#[test]
fn what_goes_wrong_stands_in_the_answer() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let program = w.compile(A, 1, report("f", 8, 1, &[], 0));
    let unknown = ask(&mut w, Handle(3), Question::Cost);
    let Some(Ok(Reply::Described { result: Err(status), .. })) = w.reply(unknown) else { panic!("{:?}", w.fx) };
    assert_eq!(status.code, Code::NotFound);

    let asked = ask(&mut w, program, Question::Text);
    w.turn([Event::WorkerLost { slot: HostSlot(0), incarnation: Incarnation(1), reason: "killed".into() }]);
    let Some(Ok(Reply::Described { question: Question::Text, result: Err(status) })) = w.reply(asked) else { panic!("{:?}", w.fx) };
    assert_eq!(status.code, Code::Unavailable);
    let later = ask(&mut w, program, Question::Text);
    let Some(Ok(Reply::Described { result: Err(later), .. })) = w.reply(later) else { panic!("{:?}", w.fx) };
    assert_eq!(later, status);
}
