//! Operands between workers over real sockets.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;

use pw_net::gang::{FrameName, GangNet};
use pw_types::{HostSlot, Status};

const A: HostSlot = HostSlot(0);
const B: HostSlot = HostSlot(1);

fn name(run: u64, count: u32) -> FrameName {
    FrameName { run, key: 3, count, group: 0, from: 1 }
}

/// Two workers that know each other.
fn pair() -> (GangNet, GangNet) {
    let listen = || GangNet::listen("127.0.0.1:0".parse().unwrap(), "secret".to_owned()).unwrap();
    let ((a, at_a), (b, at_b)) = (listen(), listen());
    a.is_slot(A);
    b.is_slot(B);
    a.neighbour(B, &at_b.to_string());
    b.neighbour(A, &at_a.to_string());
    (a, b)
}

#[test]
fn frames_are_taken_by_name_in_any_order() {
    let (a, b) = pair();
    let large = vec![7; 5 << 20];
    // Both at once, more than sockets hold: nobody waits for the other's reader.
    thread::scope(|scope| {
        for (from, to, slot) in [(&a, B, A), (&b, A, B)] {
            let large = &large;
            scope.spawn(move || {
                for count in 0..8 {
                    from.send(to, name(1, count), &[&[slot.0 as u8], &count.to_le_bytes(), large]).unwrap();
                }
            });
        }
    });
    for (at, from) in [(&a, B), (&b, A)] {
        for count in [5, 0, 7, 1, 2, 6, 3, 4] {
            let frame = at.receive(from, name(1, count), 0, || ()).unwrap();
            assert_eq!(frame[..5], [&[from.0 as u8][..], &count.to_le_bytes()].concat());
            assert!(frame[5..] == large);
        }
    }
    a.send(B, name(2, 0), &[]).unwrap();
    assert_eq!(b.receive(A, name(2, 0), 0, || ()).unwrap(), b"");
}

#[test]
fn a_run_that_is_given_up_lets_nobody_wait_and_keeps_nothing() {
    let (a, b) = pair();
    thread::scope(|scope| {
        let waits = scope.spawn(|| b.receive(A, name(1, 0), 0, || ()));
        let other = scope.spawn(|| b.receive(A, name(2, 0), 0, || ()));
        b.abandon(1, Arc::new(Status::internal("given up")));
        assert!(waits.join().unwrap().unwrap_err().to_string().contains("given up"));
        // What comes late is dropped, and the connection goes on.
        a.send(B, name(1, 0), &[b"late"]).unwrap();
        a.send(B, name(2, 0), &[b"x"]).unwrap();
        assert_eq!(other.join().unwrap().unwrap(), b"x");
    });
    assert!(b.receive(A, name(1, 0), 0, || ()).unwrap_err().to_string().contains("given up"));
}

#[test]
fn a_worker_that_goes_ends_the_waits_for_it() {
    let (a, b) = pair();
    a.send(B, name(1, 0), &[b"x"]).unwrap();
    assert_eq!(b.receive(A, name(1, 0), 0, || ()).unwrap(), b"x");
    thread::scope(|scope| {
        let waits = scope.spawn(|| b.receive(A, name(1, 1), 0, || ()));
        // What has come is handed out in any case.
        a.send(B, name(1, 2), &[b"y"]).unwrap();
        assert_eq!(b.receive(A, name(1, 2), 0, || ()).unwrap(), b"y");
        drop(a);
        assert!(waits.join().unwrap().unwrap_err().to_string().contains("broke"));
    });
}

#[test]
fn strangers_are_refused_and_harm_nobody() {
    let (a, b) = pair();
    let (stranger, _) = GangNet::listen("127.0.0.1:0".parse().unwrap(), "guess".to_owned()).unwrap();
    let (other, at) = GangNet::listen("127.0.0.1:0".parse().unwrap(), "secret".to_owned()).unwrap();
    stranger.is_slot(A);
    stranger.neighbour(B, &at.to_string());
    assert!(stranger.send(B, name(1, 0), &[b"x"]).unwrap_err().to_string().contains("the token is wrong"));
    let mut garbage = TcpStream::connect(at).unwrap();
    let _ = garbage.write_all(b"GET / HTTP/1.1\r\n\r\n");
    assert!(a.send(HostSlot(9), name(1, 0), &[]).unwrap_err().to_string().contains("not known"));
    // Neither has harmed the one that they came to, nor anybody else.
    a.neighbour(HostSlot(2), &at.to_string());
    for (to, at) in [(HostSlot(2), &other), (B, &b)] {
        a.send(to, name(1, 0), &[b"x"]).unwrap();
        assert_eq!(at.receive(A, name(1, 0), 0, || ()).unwrap(), b"x");
    }
}
