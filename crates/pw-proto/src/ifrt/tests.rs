//! Decoders and encoders of the client protocol.
