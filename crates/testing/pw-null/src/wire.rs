//! gRPC framing by hand: messages in, messages out, small answers.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::{Body as _, Frame};
use prost::Message;
pub(crate) use tonic::body::Body;

const HEADER: usize = 5;

const BASE64: GeneralPurpose =
    GeneralPurpose::new(&base64::alphabet::STANDARD, GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent));

/// Appends a message with its header.
pub(crate) fn write(message: &impl Message, to: &mut BytesMut) {
    let length = message.encoded_len();
    to.reserve(HEADER + length);
    write_header(length, to);
    message.encode_raw(to);
}

pub(crate) fn write_header(length: usize, to: &mut BytesMut) {
    to.put_u8(0);
    to.put_u32(length as u32);
}

/// What ends every body: all went well.
pub(crate) fn trailers() -> HeaderMap {
    HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))])
}

pub(crate) fn respond<B>(body: B) -> http::Response<Body>
where
    B: http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let mut response = http::Response::new(Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// The message in a `-bin` header.
pub(crate) fn binary_header<M: Message + Default>(headers: &HeaderMap, name: &str) -> Option<M> {
    let bytes = BASE64.decode(headers.get(name)?.as_bytes()).ok()?;
    M::decode(&bytes[..]).ok()
}

/// A body of one message and trailers.
pub(crate) struct Once {
    message: Option<Bytes>,
    done: bool,
}

impl Once {
    pub(crate) fn of(message: &impl Message) -> Once {
        let mut data = BytesMut::new();
        write(message, &mut data);
        Once { message: Some(data.freeze()), done: false }
    }
}

impl http_body::Body for Once {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(data) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let done = std::mem::replace(&mut self.done, true);
        Poll::Ready((!done).then(|| Ok(Frame::trailers(trailers()))))
    }
}

/// The next data of a body; `None` when it is over, whatever the reason.
pub(crate) fn poll_data(body: &mut Body, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
    loop {
        match ready!(Pin::new(&mut *body).poll_frame(cx)) {
            None | Some(Err(_)) => return Poll::Ready(None),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Poll::Ready(Some(data));
                }
            }
        }
    }
}

/// The messages of a body.
pub(crate) struct Messages {
    body: Body,
    buffer: BytesMut,
}

impl Messages {
    pub(crate) fn new(body: Body) -> Messages {
        Messages { body, buffer: BytesMut::new() }
    }

    /// The next message, without its header.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(message) = self.take() {
                return Poll::Ready(Some(message));
            }
            match ready!(poll_data(&mut self.body, cx)) {
                Some(data) => self.buffer.extend_from_slice(&data),
                None => return Poll::Ready(None),
            }
        }
    }

    fn take(&mut self) -> Option<Bytes> {
        let header = self.buffer.first_chunk::<HEADER>()?;
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        if self.buffer.len() < HEADER + length {
            return None;
        }
        self.buffer.advance(HEADER);
        Some(self.buffer.split_to(length).freeze())
    }
}

/// The only message of a unary call.
pub(crate) async fn unary<M: Message + Default>(body: Body) -> Option<M> {
    let mut messages = Messages::new(body);
    M::decode(std::future::poll_fn(|cx| messages.poll_next(cx)).await?).ok()
}
