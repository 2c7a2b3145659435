//! Named values: device and client attributes, the options of a connection.

use bytes::Bytes;

use super::pb;
use pb::attribute_map_proto::{Value, value::Value as Kind};

/// A value of an attribute map.
#[derive(Clone, PartialEq, Debug)]
pub enum Attribute {
    Bytes(Bytes),
    Bool(bool),
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
}

impl From<&str> for Attribute {
    fn from(text: &str) -> Attribute {
        Attribute::Bytes(Bytes::copy_from_slice(text.as_bytes()))
    }
}

/// A map of these attributes.
pub fn attribute_map<'a>(entries: impl IntoIterator<Item = (&'a str, Attribute)>) -> pb::AttributeMapProto {
    let attributes = entries.into_iter().map(|(name, attribute)| {
        let value = match attribute {
            Attribute::Bytes(bytes) => Kind::StringValue(bytes),
            Attribute::Bool(value) => Kind::BoolValue(value),
            Attribute::Int(value) => Kind::Int64Value(value),
            Attribute::Ints(elements) => Kind::Int64ListValue(pb::attribute_map_proto::value::Int64List { elements }),
            Attribute::Float(value) => Kind::FloatValue(value),
        };
        (name.to_owned(), Value { value: Some(value) })
    });
    pb::AttributeMapProto { version_number: 0, attributes: attributes.collect() }
}

/// The attributes of a map, by name.
pub fn attributes(map: pb::AttributeMapProto) -> Vec<(String, Attribute)> {
    let mut entries: Vec<(String, Attribute)> = map
        .attributes
        .into_iter()
        .filter_map(|(name, value)| {
            let attribute = match value.value? {
                Kind::StringValue(bytes) => Attribute::Bytes(bytes),
                Kind::BoolValue(value) => Attribute::Bool(value),
                Kind::Int64Value(value) => Attribute::Int(value),
                Kind::Int64ListValue(list) => Attribute::Ints(list.elements),
                Kind::FloatValue(value) => Attribute::Float(value),
            };
            Some((name, attribute))
        })
        .collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}
