//! Operands between workers over real sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use pw_net::NetError;
use pw_net::gang::{FrameName, GangNet};
use pw_types::{HostSlot, Incarnation, Status};

const A: HostSlot = HostSlot(0);
const B: HostSlot = HostSlot(1);

fn name(run: u64, count: u32) -> FrameName {
    FrameName { run, key: 3, count, group: 0, from: 1 }
}

fn listen(life: u64, token: &str) -> (GangNet, SocketAddr) {
    GangNet::listen("127.0.0.1:0".parse().unwrap(), Incarnation(life), token.to_owned()).unwrap()
}

/// Two workers that know each other, in lives 1 and 2.
fn pair() -> (GangNet, GangNet) {
    let ((a, at_a), (b, at_b)) = (listen(1, "secret"), listen(2, "secret"));
    a.neighbour(B, Incarnation(2), &at_b.to_string());
    b.neighbour(A, Incarnation(1), &at_a.to_string());
    (a, b)
}

fn send(at: &GangNet, to: HostSlot, name: FrameName, parts: &[&[u8]]) -> Result<(), NetError> {
    at.send(&at.line(to)?, name, parts, || ())
}

fn receive(at: &GangNet, from: HostSlot, name: FrameName) -> Result<Vec<u8>, NetError> {
    at.receive(&at.line(from)?, name, || ())
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
                    send(from, to, name(1, count), &[&[slot.0 as u8], &count.to_le_bytes(), large]).unwrap();
                }
            });
        }
    });
    for (at, from) in [(&a, B), (&b, A)] {
        for count in [5, 0, 7, 1, 2, 6, 3, 4] {
            let frame = receive(at, from, name(1, count)).unwrap();
            assert_eq!(frame[..5], [&[from.0 as u8][..], &count.to_le_bytes()].concat());
            assert!(frame[5..] == large);
        }
    }
    send(&a, B, name(2, 0), &[]).unwrap();
    assert_eq!(receive(&b, A, name(2, 0)).unwrap(), b"");
}

#[test]
fn a_run_that_is_given_up_lets_nobody_wait_and_keeps_nothing() {
    let (a, b) = pair();
    thread::scope(|scope| {
        let waits = scope.spawn(|| receive(&b, A, name(1, 0)));
        let other = scope.spawn(|| receive(&b, A, name(2, 0)));
        b.abandon(1, Arc::new(Status::internal("given up")));
        assert!(waits.join().unwrap().unwrap_err().to_string().contains("given up"));
        // What comes late is dropped, and the connection goes on.
        send(&a, B, name(1, 0), &[b"late"]).unwrap();
        send(&a, B, name(2, 0), &[b"x"]).unwrap();
        assert_eq!(other.join().unwrap().unwrap(), b"x");
    });
    assert!(receive(&b, A, name(1, 0)).unwrap_err().to_string().contains("given up"));
}

#[test]
fn a_worker_that_goes_ends_the_waits_for_it() {
    let (a, b) = pair();
    send(&a, B, name(1, 0), &[b"x"]).unwrap();
    assert_eq!(receive(&b, A, name(1, 0)).unwrap(), b"x");
    // What breaks after this was asked for ends the wait, whenever it begins.
    let from = b.line(A).unwrap();
    // What has come is handed out in any case.
    send(&a, B, name(1, 2), &[b"y"]).unwrap();
    drop(a);
    let waits = b.receive(&from, name(1, 1), || ());
    assert!(waits.unwrap_err().to_string().contains("broke"));
    assert_eq!(b.receive(&from, name(1, 2), || ()).unwrap(), b"y");
}

#[test]
fn another_life_gets_nothing_of_the_old_one() {
    let (a, b) = pair();
    let old = a.line(B).unwrap();
    drop(b);
    let (b, at) = listen(3, "secret");
    a.neighbour(B, Incarnation(3), &at.to_string());
    assert!(a.send(&old, name(1, 1), &[b"x"], || ()).is_err());
    // The new one may have the address of the old one.
    a.neighbour(HostSlot(7), Incarnation(2), &at.to_string());
    assert!(send(&a, HostSlot(7), name(1, 1), &[b"x"]).unwrap_err().to_string().contains("another life"));
    send(&a, B, name(2, 0), &[b"y"]).unwrap();
    b.neighbour(A, Incarnation(1), "nowhere:1");
    assert_eq!(receive(&b, A, name(2, 0)).unwrap(), b"y");
}

/// A peer that is stopped does not read: whoever sends to it goes when its run does.
#[test]
fn who_cannot_send_is_let_go_with_the_run() {
    let (a, _) = pair();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    thread::spawn(move || {
        let (mut tcp, _) = silent.accept().unwrap();
        // The greeting of eight bytes, back as it came, then life, life, length and token; and no byte more.
        let mut magic = [0; 8];
        tcp.read_exact(&mut magic).unwrap();
        tcp.write_all(&magic).unwrap();
        tcp.read_exact(&mut [0; 20 + 6]).unwrap();
        tcp.write_all(&[1]).unwrap();
        thread::park();
    });
    a.neighbour(HostSlot(5), Incarnation(9), &at.to_string());
    let line = a.line(HostSlot(5)).unwrap();
    let told = AtomicU32::new(0);
    let sent = a.send(&line, name(1, 0), &[&vec![0; 64 << 20]], || {
        told.fetch_add(1, Ordering::Relaxed);
        // Neighbours can be told of meanwhile.
        a.neighbour(HostSlot(5), Incarnation(10), "elsewhere:1");
        a.abandon(1, Arc::new(Status::internal("given up")));
    });
    assert!(sent.unwrap_err().to_string().contains("given up"));
    assert_eq!(told.into_inner(), 1);
}

#[test]
fn strangers_are_refused_and_harm_nobody() {
    let (a, b) = pair();
    let ((stranger, _), (other, at)) = (listen(1, "guess"), listen(3, "secret"));
    other.neighbour(A, Incarnation(1), "nowhere:1");
    stranger.neighbour(B, Incarnation(3), &at.to_string());
    assert!(send(&stranger, B, name(1, 0), &[b"x"]).unwrap_err().to_string().contains("the token is wrong"));
    let mut garbage = TcpStream::connect(at).unwrap();
    let _ = garbage.write_all(b"GET / HTTP/1.1\r\n\r\n");
    assert!(send(&a, HostSlot(9), name(1, 0), &[]).unwrap_err().to_string().contains("not known"));
    // Neither has harmed the one that they came to, nor anybody else.
    a.neighbour(HostSlot(2), Incarnation(3), &at.to_string());
    for (to, at) in [(HostSlot(2), &other), (B, &b)] {
        send(&a, to, name(1, 0), &[b"x"]).unwrap();
        assert_eq!(receive(at, A, name(1, 0)).unwrap(), b"x");
    }
}
