//! Round trips of every variant; decoding of damaged and random bytes.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::mem::discriminant;

use super::convert::Convert;
use super::samples::*;
use super::*;
use pw_types::{Cause, Code, CopySemantics, DType, MemoryTarget, Partition};

fn round_trip<T: Wire + PartialEq + Debug>(values: impl IntoIterator<Item = T>) {
    for value in values {
        assert_eq!(T::from_bytes(value.to_bytes()).as_ref(), Ok(&value));
    }
}

/// Round trips, and no variant is missing from the samples.
fn all_variants<T: Wire + PartialEq + Debug + Variants>(values: Vec<T>) {
    let seen: Vec<_> = values.iter().map(discriminant).collect();
    let distinct = seen.iter().enumerate().filter(|(i, d)| !seen[..*i].contains(d)).count();
    assert_eq!(distinct, T::COUNT, "variants of {} in the samples", T::NAME);
    round_trip(values);
}

#[test]
fn every_variant_round_trips() {
    all_variants(commands());
    all_variants(reports());
    all_variants(requests());
    all_variants(replies());
    all_variants(to_edge());
    all_variants(events());
    all_variants(hellos());
    all_variants(answers());
}

#[test]
fn every_message_round_trips() {
    round_trip(statuses());
    round_trip([report(), CompileReport { layouts_error: None, ..report() }]);
    round_trip([view()]);
    round_trip([status_report(), StatusReport::default()]);
    round_trip([SessionOptions::default()]);
    round_trip(log_records());
    round_trip([controller_frame(), ControllerFrame { commands: vec![], ..controller_frame() }]);
    round_trip([worker_frame()]);
    let (request, responses) = compile_child();
    round_trip([request]);
    round_trip(responses);
}

/// Enums that only occur inside others.
#[test]
fn every_inner_variant_occurs() {
    let text = format!("{:?}", events());
    for name in ["Replicated", "Tiled(", "Even {", "Opaque", "Keep", "Default", "Kind("] {
        assert!(text.contains(name), "{name}");
    }
    assert_eq!((Partition::COUNT, MemoryTarget::COUNT), (4, 3));
    for cause in ["Unspecified", "HostLost", "OutOfMemory", "Cancelled", "Limit"] {
        assert!(format!("{:?}", statuses()).contains(cause), "{cause}");
    }
}

fn numbers<T: All + Convert<i32> + PartialEq + Debug>() {
    let mut seen = BTreeSet::new();
    for value in T::ALL {
        let number = value.encode();
        assert!(seen.insert(number), "{value:?}");
        assert_eq!(T::decode(number).as_ref(), Ok(value));
    }
    assert_eq!(T::decode(0), Err(DecodeError::new(Reason::Missing)));
    assert_eq!(T::decode(-1), Err(DecodeError::new(Reason::Unknown(-1))));
}

#[test]
fn enumerations_have_distinct_numbers() {
    numbers::<DType>();
    numbers::<CopySemantics>();
    assert_eq!(Code::decode(17), Err(DecodeError::new(Reason::Unknown(17))));
}

#[test]
fn errors_name_the_place() {
    let text = |result: Result<Event, DecodeError>| result.unwrap_err().to_string();
    assert_eq!(text(Event::from_bytes(Bytes::new())), "Event: missing");
    let request = pb::Request {
        kind: Some(pb::request::Kind::MakeArray(pb::request::MakeArray {
            array: 1,
            spec: Some(pb::ArraySpec { dtype: 99, dims: vec![], sharding: None }),
            source: None,
        })),
    };
    let event = pb::event::FromClient { session: 1, op: 2, bytes: 3, request: Some(request) };
    let event = pb::Event { kind: Some(pb::event::Kind::Request(event)) };
    assert_eq!(text(Event::from_bytes(event.encode_to_vec().into())), "Event.Request.request.MakeArray.spec.dtype: unknown value 99");
    let malformed = Event::from_bytes(Bytes::from_static(&[0xff; 12])).unwrap_err();
    assert!(matches!(malformed.reason, Reason::Malformed(_)));
    assert_eq!(malformed.path, "Event");
}

#[test]
fn a_status_without_cause_costs_nothing() {
    let status = Status::new(Code::Aborted, "x");
    assert_eq!(status.cause, Cause::Unspecified);
    assert_eq!(status.to_bytes().len(), 5);
}

/// A fixed sequence of numbers; the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Decodes as everything; whatever decodes must encode and decode to itself.
fn decode_all(bytes: &[u8]) -> usize {
    fn decode<T: Wire + PartialEq + Debug>(bytes: &[u8]) -> usize {
        let Ok(value) = T::from_bytes(Bytes::copy_from_slice(bytes)) else { return 0 };
        assert_eq!(T::from_bytes(value.to_bytes()).as_ref(), Ok(&value));
        1
    }
    decode::<Event>(bytes)
        + decode::<ToEdge>(bytes)
        + decode::<LogRecord>(bytes)
        + decode::<Hello>(bytes)
        + decode::<Answer>(bytes)
        + decode::<ControllerFrame>(bytes)
        + decode::<WorkerFrame>(bytes)
        + decode::<CompileChildRequest>(bytes)
        + decode::<CompileChildResponse>(bytes)
        + decode::<StatusReport>(bytes)
}

#[test]
fn random_bytes_never_panic() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for _ in 0..20_000 {
        let length = numbers.next() % 64;
        // Small values make tags that exist.
        let mask = if numbers.next() & 1 == 0 { 0x3f } else { 0xff };
        let bytes: Vec<u8> = (0..length).map(|_| numbers.next() as u8 & mask).collect();
        decode_all(&bytes);
    }
}

#[test]
fn damaged_messages_never_panic() {
    let mut good: Vec<Bytes> = events().iter().map(Wire::to_bytes).collect();
    good.extend(to_edge().iter().map(Wire::to_bytes));
    good.extend(hellos().iter().map(Wire::to_bytes));
    good.extend(answers().iter().map(Wire::to_bytes));
    good.extend([controller_frame().to_bytes(), worker_frame().to_bytes()]);
    let mut numbers = Numbers(1);
    let mut survivors = 0;
    for bytes in good {
        for _ in 0..60 {
            let mut bytes = bytes.to_vec();
            for _ in 0..=numbers.next() % 3 {
                let at = (numbers.next() % bytes.len() as u64) as usize;
                match numbers.next() % 3 {
                    0 => bytes[at] = numbers.next() as u8,
                    1 => bytes[at] ^= 1 << (numbers.next() % 8),
                    _ => bytes.truncate(at.max(1)),
                }
            }
            survivors += decode_all(&bytes);
        }
    }
    assert!(survivors > 0, "no damaged message was decoded: the test reaches nothing");
}
