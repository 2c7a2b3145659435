//! The control stream over real sockets: messages, and peers that break the rules.

use std::time::Duration;

use bytes::Bytes;
use pw_net::NetError;
use pw_net::control::{self, Answer, ControlReader, ControlWriter, ControllerFrame, Hello, WorkerFrame};
use pw_types::{Command, CompileCommand, ExecutableId, HostSlot, Incarnation, Report, RunId, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

type Stream = (ControlReader, ControlWriter);

async fn deadline<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("the test is stuck")
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

async fn pair() -> (Stream, Stream) {
    let (listener, address) = listen().await;
    let accepted = async { control::accept(listener.accept().await.unwrap().0).await.unwrap() };
    let (dialed, accepted) = deadline(async { tokio::join!(control::dial(&address), accepted) }).await;
    (dialed.unwrap(), accepted)
}

/// Sends raw bytes to a fresh acceptor, which then tries to read a hello.
async fn raw(bytes: &[u8]) -> (NetError, Vec<u8>) {
    let (listener, address) = listen().await;
    let mut tcp = TcpStream::connect(&address).await.unwrap();
    tcp.write_all(bytes).await.unwrap();
    tcp.shutdown().await.unwrap();
    let error = deadline(async {
        match control::accept(listener.accept().await.unwrap().0).await {
            Ok((mut reader, _)) => reader.next::<Hello>().await.unwrap_err(),
            Err(error) => error,
        }
    })
    .await;
    let mut answer = Vec::new();
    let _ = deadline(tcp.read_to_end(&mut answer)).await;
    (error, answer)
}

#[tokio::test]
async fn a_greeting_and_frames() {
    let ((mut worker_in, mut worker_out), (mut in_, mut out)) = pair().await;
    let hello = Hello::Status { build: "b".into(), token: "t".into() };
    worker_out.send(&hello).await.unwrap();
    assert_eq!(deadline(in_.next()).await.unwrap(), Some(hello));
    let answer = Answer::Welcome { slot: HostSlot(1), incarnation: Incarnation(2), received: 3 };
    out.send(&answer).await.unwrap();
    assert_eq!(deadline(worker_in.next()).await.unwrap(), Some(answer));
    for seq in 1..=200 {
        let commands = vec![Command::Unload { executable: ExecutableId(seq) }; seq as usize % 7];
        let frame = ControllerFrame { seq, ack: seq - 1, incarnation: Incarnation(2), commands };
        out.send(&frame).await.unwrap();
        assert_eq!(deadline(worker_in.next()).await.unwrap(), Some(frame));
        let reports = vec![Report::Finished { run: RunId(seq), device_ns: 1, result: Err(Status::internal("x")) }];
        let frame = WorkerFrame { seq, ack: seq, incarnation: Incarnation(2), reports };
        worker_out.send(&frame).await.unwrap();
        assert_eq!(deadline(in_.next()).await.unwrap(), Some(frame));
    }
    drop((worker_in, worker_out));
    assert_eq!(deadline(in_.next::<WorkerFrame>()).await.unwrap(), None);
}

/// A big message among small ones, and a reader that is dropped in the middle of it again and again.
#[tokio::test]
async fn a_big_message_survives_an_impatient_reader() {
    let ((_a, mut out), (mut in_, _b)) = pair().await;
    let program = Bytes::from((0..40_000_000u32).map(|i| (i >> 8) as u8).collect::<Vec<_>>());
    let compile =
        CompileCommand { executable: ExecutableId(1), program, options: Bytes::new(), devices: vec![0], replicas: 1, partitions: 1 };
    let frame = |seq, commands| ControllerFrame { seq, ack: 0, incarnation: Incarnation(1), commands };
    let sent = [frame(1, vec![]), frame(2, vec![Command::Compile(compile)]), frame(3, vec![])];
    let expected = sent.clone();
    let sender = tokio::spawn(async move {
        for frame in &sent {
            out.send(frame).await.unwrap();
        }
        out
    });
    let mut received = Vec::new();
    while received.len() < 3 {
        tokio::select! {
            biased;
            frame = deadline(in_.next::<ControllerFrame>()) => received.push(frame.unwrap().unwrap()),
            () = tokio::task::yield_now() => {}
        }
    }
    assert!(received == expected, "the frames differ");
    deadline(sender).await.unwrap();
}

#[tokio::test]
async fn strangers_are_told_apart() {
    let (error, answer) = raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(error.to_string().ends_with("does not speak this protocol: it began with \"GET / HT\""), "{error}");
    assert_eq!(answer, b"");
    let (error, answer) = raw(b"PWCTRL\x07\x00").await;
    assert!(error.to_string().contains("speaks version 7 of the control stream, this build version 1"), "{error}");
    assert_eq!(answer, b"PWCTRL\x01\x00");
    let (error, _) = raw(b"PWDATA\x01\x00").await;
    assert!(matches!(error, NetError::NotOurs { .. }), "{error}");
    let (error, _) = raw(b"PWC").await;
    assert!(error.to_string().contains("it ended before the 8 bytes of a greeting"), "{error}");
}

#[tokio::test]
async fn messages_that_are_none() {
    let with = |rest: &[u8]| [b"PWCTRL\x01\x00", rest].concat();
    let (error, _) = raw(&with(&[0xff; 8])).await;
    assert!(matches!(error, NetError::TooLarge { bytes: 0xffff_ffff, limit: 16_777_216, .. }), "{error}");
    let (error, _) = raw(&with(&[3, 0, 0, 0, 0xff, 0xff, 0xff])).await;
    assert!(error.to_string().contains("sent 3 bytes that are no Hello"), "{error}");
    assert!(error.chain().contains("not protobuf of this schema"), "{}", error.chain());
    let (error, _) = raw(&with(&[0, 0, 0, 0])).await;
    assert!(matches!(error, NetError::Protocol { .. }), "{error}");
    let (error, _) = raw(&with(&[200, 0, 0, 0, 1])).await;
    assert!(error.to_string().contains("it ended 5 bytes into a message"), "{error}");
}

#[tokio::test]
async fn a_limit_of_ones_own() {
    let ((_a, mut out), (mut in_, _b)) = pair().await;
    in_.set_limit(50);
    let hello = Hello::Status { build: "b".repeat(100), token: String::new() };
    out.send(&hello).await.unwrap();
    let error = deadline(in_.next::<Hello>()).await.unwrap_err();
    assert!(matches!(error, NetError::TooLarge { limit: 50, .. }), "{error}");
}

#[tokio::test]
async fn nobody_there() {
    let (listener, address) = listen().await;
    drop(listener);
    let error = deadline(control::dial(&address)).await.err().unwrap();
    assert!(error.to_string().starts_with(&format!("cannot connect to {address}")), "{error}");
}
