//! The one trait of all conversions, its instances for plain values, and the macros that write the others.

use std::sync::Arc;

use bytes::Bytes;
use pw_types::*;

use super::{DecodeError, Reason};

/// Our type on the left, the generated one in the parameter.
pub(super) trait Convert<P>: Sized {
    fn encode(&self) -> P;
    fn decode(proto: P) -> Result<Self, DecodeError>;
}

/// Decodes one field, and names it in the error.
pub(super) fn field<T: Convert<P>, P>(proto: P, name: &str) -> Result<T, DecodeError> {
    T::decode(proto).map_err(|e| e.inside(name))
}

/// The value of a field that must be there.
pub(super) fn required<T: Convert<P>, P>(proto: Option<P>) -> Result<T, DecodeError> {
    T::decode(proto.ok_or(DecodeError::new(Reason::Missing))?)
}

macro_rules! plain {
    ($($type:ty)*) => {$(
        impl Convert<$type> for $type {
            fn encode(&self) -> $type {
                self.clone()
            }

            fn decode(proto: $type) -> Result<$type, DecodeError> {
                Ok(proto)
            }
        }
    )*};
}

plain! { bool i32 u32 i64 u64 f64 String Bytes }

macro_rules! ids {
    ($($name:ident($inner:ty))*) => {$(
        impl Convert<$inner> for $name {
            fn encode(&self) -> $inner {
                self.0
            }

            fn decode(proto: $inner) -> Result<$name, DecodeError> {
                Ok($name(proto))
            }
        }
    )*};
}

ids! {
    SessionId(u64) Handle(u64) OpId(u64) VirtualDeviceId(u32) HostSlot(u32) Incarnation(u64) RunId(u64) ExecutableId(u64) GrantSeq(u64)
    Time(u64)
}

impl<T: Convert<P>, P> Convert<Option<P>> for Option<T> {
    fn encode(&self) -> Option<P> {
        self.as_ref().map(T::encode)
    }

    fn decode(proto: Option<P>) -> Result<Option<T>, DecodeError> {
        proto.map(T::decode).transpose()
    }
}

impl<T: Convert<P>, P> Convert<Vec<P>> for Vec<T> {
    fn encode(&self) -> Vec<P> {
        self.iter().map(T::encode).collect()
    }

    fn decode(proto: Vec<P>) -> Result<Vec<T>, DecodeError> {
        proto.into_iter().map(T::decode).collect()
    }
}

impl<T: Convert<P>, P> Convert<P> for Arc<T> {
    fn encode(&self) -> P {
        T::encode(self)
    }

    fn decode(proto: P) -> Result<Arc<T>, DecodeError> {
        T::decode(proto).map(Arc::new)
    }
}

impl<T: Convert<P>, P> Convert<Vec<P>> for Arc<[T]> {
    fn encode(&self) -> Vec<P> {
        self.iter().map(T::encode).collect()
    }

    fn decode(proto: Vec<P>) -> Result<Arc<[T]>, DecodeError> {
        proto.into_iter().map(T::decode).collect()
    }
}

/// A message field holding one of these must be there.
macro_rules! must_be_there {
    ($ours:ty, $proto:ty) => {
        impl Convert<Option<$proto>> for $ours {
            fn encode(&self) -> Option<$proto> {
                Some(Convert::encode(self))
            }

            fn decode(proto: Option<$proto>) -> Result<$ours, DecodeError> {
                required(proto)
            }
        }
    };
}

/// Structs whose fields have the same names on both sides.
macro_rules! messages {
    ($($ours:ident = $proto:ty { $($field:ident),* $(,)? })*) => {$(
        impl Convert<$proto> for $ours {
            fn encode(&self) -> $proto {
                type Proto = $proto;
                Proto { $($field: Convert::encode(&self.$field)),* }
            }

            fn decode(proto: $proto) -> Result<$ours, DecodeError> {
                Ok($ours { $($field: field(proto.$field, stringify!($field))?),* })
            }
        }
        must_be_there!($ours, $proto);
    )*};
}

/// Enums that are a `oneof`, with the same names of variants on both sides: those that hold one value, those with
/// fields (each a message of its own), those that hold nothing.
macro_rules! union {
    ($ours:ident = $proto:ty, $oneof:ident: $kind:ty {
        one [$($one:ident),* $(,)?]
        fields [$($fields:ident = $message:ty { $($field:ident),* }),* $(,)?]
        none [$($none:ident),* $(,)?]
    }) => {
        impl Convert<$proto> for $ours {
            fn encode(&self) -> $proto {
                type Proto = $proto;
                type Kind = $kind;
                let kind = match self {
                    $($ours::$one(value) => Kind::$one(Convert::encode(value)),)*
                    $($ours::$fields { $($field),* } => {
                        type Message = $message;
                        Kind::$fields(Message { $($field: Convert::encode($field)),* })
                    })*
                    $($ours::$none => Kind::$none(pb::Empty {}),)*
                };
                Proto { $oneof: Some(kind) }
            }

            fn decode(proto: $proto) -> Result<$ours, DecodeError> {
                type Kind = $kind;
                Ok(match proto.$oneof.ok_or(DecodeError::new(Reason::Missing))? {
                    $(Kind::$one(value) => $ours::$one(field(value, stringify!($one))?),)*
                    $(Kind::$fields(value) => $ours::$fields {
                        $($field: field(value.$field, concat!(stringify!($fields), ".", stringify!($field)))?),*
                    },)*
                    $(Kind::$none(_) => $ours::$none,)*
                })
            }
        }

        #[cfg(test)]
        impl crate::control::samples::Variants for $ours {
            const COUNT: usize = [$(stringify!($one),)* $(stringify!($fields),)* $(stringify!($none),)*].len();
        }
    };
}

/// Results whose error is a status; `result` is a message with a `oneof kind { ok, error }`.
macro_rules! result {
    ($ok:ty, $proto:ty, $kind:ty) => {
        impl Convert<Option<$proto>> for Result<$ok, Status> {
            fn encode(&self) -> Option<$proto> {
                type Proto = $proto;
                type Kind = $kind;
                let kind = match self {
                    Ok(value) => Kind::Ok(Convert::encode(value)),
                    Err(status) => Kind::Error(Convert::encode(status)),
                };
                Some(Proto { kind: Some(kind) })
            }

            fn decode(proto: Option<$proto>) -> Result<Result<$ok, Status>, DecodeError> {
                type Kind = $kind;
                Ok(match proto.and_then(|p| p.kind).ok_or(DecodeError::new(Reason::Missing))? {
                    Kind::Ok(value) => Ok(field(value, "ok")?),
                    Kind::Error(status) => Err(field(status, "error")?),
                })
            }
        }
    };
}

/// Enums without fields; names differ, since the generator writes its own.
macro_rules! enumeration {
    ($ours:ident = $proto:ty { $($name:ident $other:ident),* $(,)? }) => {
        impl Convert<i32> for $ours {
            fn encode(&self) -> i32 {
                type Proto = $proto;
                (match self { $($ours::$name => Proto::$other),* }) as i32
            }

            fn decode(proto: i32) -> Result<$ours, DecodeError> {
                type Proto = $proto;
                match Proto::try_from(proto) {
                    $(Ok(Proto::$other) => Ok($ours::$name),)*
                    Ok(Proto::Unspecified) => Err(DecodeError::new(Reason::Missing)),
                    Err(_) => Err(DecodeError::new(Reason::Unknown(proto.into()))),
                }
            }
        }

        #[cfg(test)]
        impl crate::control::samples::All for $ours {
            const ALL: &[$ours] = &[$($ours::$name),*];
        }
    };
}

pub(super) use {enumeration, messages, must_be_there, result, union};
