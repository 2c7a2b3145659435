//! gRPC framing by hand: messages out of body frames without copying, headers, trailers, small answers.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::{Body as _, Frame};
use prost::Message;
use pw_types::{Code, Status};

pub(crate) use tonic::body::Body;

/// Largest message that is read.
const MESSAGE_MAX: usize = 1 << 30;

pub(crate) const HEADER: usize = 5;

const BASE64: GeneralPurpose =
    GeneralPurpose::new(&base64::alphabet::STANDARD, GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent));

pub(crate) fn to_tonic(status: &Status) -> tonic::Status {
    tonic::Status::new(tonic::Code::from_i32(status.code as i32), status.message.clone())
}

pub(crate) fn from_tonic(status: &tonic::Status) -> Status {
    Status::new(Code::from_number(status.code() as i32), status.message())
}

/// An answer without a message.
pub(crate) fn refuse(status: &Status) -> http::Response<Body> {
    to_tonic(status).into_http()
}

/// What ends a body.
pub(crate) fn trailers(status: Option<&Status>) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(2);
    if status.is_none_or(|status| to_tonic(status).add_header(&mut map).is_err()) {
        map.insert("grpc-status", HeaderValue::from_static("0"));
    }
    map
}

pub(crate) fn respond<B>(body: B) -> http::Response<Body>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut response = http::Response::new(Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// A body of one message and trailers.
pub(crate) struct Once(Option<Bytes>, bool);

impl Once {
    pub(crate) fn of(message: &impl Message) -> Once {
        let mut data = BytesMut::new();
        write(message, &mut data);
        Once(Some(data.freeze()), false)
    }
}

impl http_body::Body for Once {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(data) = self.0.take() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let done = std::mem::replace(&mut self.1, true);
        Poll::Ready((!done).then(|| Ok(Frame::trailers(trailers(None)))))
    }
}

/// Appends a message with its header.
pub(crate) fn write(message: &impl Message, to: &mut BytesMut) {
    let length = message.encoded_len();
    to.reserve(HEADER + length);
    to.put_u8(0);
    to.put_u32(length as u32);
    message.encode_raw(to);
}

/// The message in a `-bin` header.
pub(crate) fn binary_header<M: Message + Default>(headers: &HeaderMap, name: &str) -> Result<M, Status> {
    let value = headers.get(name).ok_or_else(|| Status::invalid(format!("the header {name} is missing")))?;
    let decoded = BASE64.decode(value.as_bytes()).ok().and_then(|bytes| M::decode(&bytes[..]).ok());
    decoded.ok_or_else(|| Status::invalid(format!("the header {name} cannot be decoded")))
}

/// The only message of a unary call.
pub(crate) async fn unary<M: Message + Default>(body: Body) -> Result<M, Status> {
    let mut messages = Messages::new(body);
    let message = std::future::poll_fn(|cx| messages.poll_next(cx)).await;
    let message = message.unwrap_or_else(|| Err(Status::invalid("the request has no message")))?;
    M::decode(message).map_err(|error| Status::invalid(format!("the request cannot be decoded: {error}")))
}

/// Body frames as they come; trailers are skipped.
pub(crate) fn poll_data(body: &mut Body, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
    loop {
        return Poll::Ready(match ready!(Pin::new(&mut *body).poll_frame(cx)) {
            None => None,
            Some(Err(error)) => Some(Err(from_tonic(&error))),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if !data.is_empty() => Some(Ok(data)),
                _ => continue,
            },
        });
    }
}

/// Length of the message behind a header.
pub(crate) fn message_length(header: &[u8; HEADER]) -> Result<usize, Status> {
    if header[0] != 0 {
        return Err(Status::unimplemented("compressed messages are not served"));
    }
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if length > MESSAGE_MAX {
        return Err(Status::new(Code::ResourceExhausted, format!("a message of {length} bytes is larger than {MESSAGE_MAX}")));
    }
    Ok(length)
}

/// Whole messages out of a body. One that lies in one frame is a slice of it.
pub(crate) struct Messages {
    body: Body,
    frame: Bytes,
    /// The beginning of a message that continues in the next frame, header included.
    partial: BytesMut,
}

impl Messages {
    pub(crate) fn new(body: Body) -> Messages {
        Messages { body, frame: Bytes::new(), partial: BytesMut::new() }
    }

    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        loop {
            match self.take() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(status) => return Poll::Ready(Some(Err(status))),
            }
            match ready!(poll_data(&mut self.body, cx)) {
                Some(Ok(frame)) => self.frame = frame,
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                None if self.partial.is_empty() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Err(Status::new(Code::DataLoss, "the stream ends inside a message")))),
            }
        }
    }

    fn take(&mut self) -> Result<Option<Bytes>, Status> {
        if self.partial.is_empty()
            && let Some(header) = self.frame.first_chunk::<HEADER>()
        {
            let length = message_length(header)?;
            if self.frame.len() >= HEADER + length {
                self.frame.advance(HEADER);
                return Ok(Some(self.frame.split_to(length)));
            }
        }
        while !self.frame.is_empty() {
            let goal = match self.partial.first_chunk::<HEADER>() {
                Some(header) => HEADER + message_length(header)?,
                None => HEADER,
            };
            let missing = self.frame.split_to(self.frame.len().min(goal - self.partial.len()));
            self.partial.extend_from_slice(&missing);
            if goal > HEADER && self.partial.len() == goal {
                return Ok(Some(self.partial.split().freeze().slice(HEADER..)));
            }
            if goal == HEADER && self.partial.len() == HEADER && self.partial[1..HEADER] == [0; 4] {
                self.partial.clear();
                return Ok(Some(Bytes::new()));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use super::*;

    struct Pieces(VecDeque<Bytes>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
        }
    }

    fn messages(data: &[u8], piece: usize) -> Result<Vec<Bytes>, Status> {
        let mut messages = Messages::new(Body::new(Pieces(data.chunks(piece).map(Bytes::copy_from_slice).collect())));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let mut out = Vec::new();
        while let Poll::Ready(Some(message)) = messages.poll_next(&mut cx) {
            out.push(message?);
        }
        Ok(out)
    }

    #[test]
    fn messages_come_out_however_they_are_cut() {
        let expected: Vec<Bytes> = [0usize, 1, 300, 0, 5].iter().map(|&length| vec![7; length].into()).collect();
        let mut data = Vec::new();
        for message in &expected {
            data.push(0);
            data.extend((message.len() as u32).to_be_bytes());
            data.extend_from_slice(message);
        }
        for piece in 1..data.len() + 1 {
            assert_eq!(messages(&data, piece).as_ref(), Ok(&expected), "pieces of {piece}");
        }
        assert_eq!(messages(&data[..data.len() - 1], 9).map_err(|status| status.code), Err(Code::DataLoss));
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        assert_eq!(messages(b"\x01\0\0\0\x01a", 3).map_err(|status| status.code), Err(Code::Unimplemented));
        assert_eq!(messages(b"\0\x7f\xff\xff\xff\x01", 2).map_err(|status| status.code), Err(Code::ResourceExhausted));
    }

    #[test]
    fn trailers_carry_the_status() {
        assert_eq!(trailers(None)["grpc-status"], "0");
        let map = trailers(Some(&Status::new(Code::DataLoss, "ä % gone")));
        let back = tonic::Status::from_header_map(&map).expect("it is one");
        assert_eq!((back.code(), back.message()), (tonic::Code::DataLoss, "ä % gone"));
    }
}
