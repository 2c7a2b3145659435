//! What a client asks for when it connects: the `initialization_data` of its session.

use pw_proto::ifrt::Attribute;
use pw_types::{Code, SessionId, SessionOptions, Status};

const NAME_MAX: usize = 100;
const WEIGHT_MAX: i64 = 1000;

/// Reads the options; `token` is what clients must show. Keys of others are none of our business.
pub(crate) fn session_options(
    entries: Vec<(String, Attribute)>,
    token: Option<&str>,
    session: SessionId,
) -> Result<SessionOptions, Status> {
    let mut options = SessionOptions { name: format!("session-{:04x}", session.0 >> 48), weight: 1, devices: None };
    let mut shown = None;
    for (key, value) in entries {
        match key.as_str() {
            "pathways.name" => options.name = name(&value)?,
            "pathways.weight" => match integer(&value) {
                Some(weight @ 1..=WEIGHT_MAX) => options.weight = weight as u32,
                _ => return Err(bad("PATHWAYS_WEIGHT", &value, &format!("a whole number from 1 to {WEIGHT_MAX}"))),
            },
            "pathways.slice" => match integer(&value).map(u32::try_from) {
                Some(Ok(devices)) if devices > 0 => options.devices = Some(devices),
                _ => return Err(bad("PATHWAYS_SLICE", &value, "a number of devices, 1 or more")),
            },
            "pathways.token" => shown = text(&value),
            "pathways.priority" => no_effect_yet("PATHWAYS_PRIORITY", &value)?,
            "pathways.memory" => no_effect_yet("PATHWAYS_MEMORY", &value)?,
            other if other.starts_with("pathways.") => {
                return Err(Status::invalid(format!("the session option {other:?} is not known to this server")));
            }
            _ => {}
        }
    }
    match (token, shown) {
        (None, _) => Ok(options),
        (Some(token), Some(shown)) if equal(token.as_bytes(), shown.as_bytes()) => Ok(options),
        (Some(_), None) => Err(Status::new(Code::Unauthenticated, "this server asks for a token: set PATHWAYS_TOKEN")),
        (Some(_), Some(_)) => Err(Status::new(Code::Unauthenticated, "PATHWAYS_TOKEN is not the token of this server")),
    }
}

fn text(value: &Attribute) -> Option<String> {
    match value {
        Attribute::Bytes(bytes) => String::from_utf8(bytes.to_vec()).ok(),
        Attribute::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

fn integer(value: &Attribute) -> Option<i64> {
    text(value)?.trim().parse().ok()
}

fn name(value: &Attribute) -> Result<String, Status> {
    text(value)
        .filter(|name| !name.is_empty() && name.len() <= NAME_MAX && !name.chars().any(char::is_control))
        .ok_or_else(|| bad("PATHWAYS_NAME", value, &format!("a text of at most {NAME_MAX} bytes")))
}

/// Accepted where it changes nothing.
fn no_effect_yet(variable: &str, value: &Attribute) -> Result<(), Status> {
    match text(value).as_deref() {
        Some("" | "0") => Ok(()),
        _ => Err(Status::unimplemented(format!("{variable} is not served by this build of pathways-rs"))),
    }
}

fn bad(variable: &str, value: &Attribute, wanted: &str) -> Status {
    let shown: String = text(value).unwrap_or_else(|| format!("{value:?}")).chars().take(NAME_MAX).collect();
    Status::invalid(format!("{variable} is {shown:?}, not {wanted}"))
}

/// Takes the same time wherever the difference is.
pub(crate) fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(entries: &[(&str, Attribute)], token: Option<&str>) -> Result<SessionOptions, Status> {
        session_options(entries.iter().map(|(key, value)| (key.to_string(), value.clone())).collect(), token, SessionId(0xabcd << 48))
    }

    #[test]
    fn options_may_be_text_or_numbers() {
        let options =
            read(&[("pathways.weight", Attribute::Int(3)), ("pathways.slice", "4".into()), ("other", Attribute::Bool(true))], None);
        assert_eq!(options, Ok(SessionOptions { name: "session-abcd".into(), weight: 3, devices: Some(4) }));
        assert_eq!(read(&[("pathways.name", "a job".into()), ("pathways.memory", "".into())], None).map(|o| o.name), Ok("a job".into()));
    }

    #[test]
    fn bad_options_name_the_variable() {
        let message = |entries: &[(&str, Attribute)]| read(entries, None).unwrap_err().message;
        assert_eq!(message(&[("pathways.weight", "0".into())]), "PATHWAYS_WEIGHT is \"0\", not a whole number from 1 to 1000");
        assert_eq!(message(&[("pathways.slice", "4x2".into())]), "PATHWAYS_SLICE is \"4x2\", not a number of devices, 1 or more");
        assert_eq!(message(&[("pathways.colour", "red".into())]), "the session option \"pathways.colour\" is not known to this server");
        assert_eq!(read(&[("pathways.priority", "5".into())], None).unwrap_err().code, Code::Unimplemented);
        assert!(read(&[("pathways.name", Attribute::Bytes(vec![0xff].into()))], None).is_err());
    }

    #[test]
    fn tokens_must_be_equal() {
        assert!(read(&[("pathways.token", "secret".into())], Some("secret")).is_ok());
        assert!(read(&[("pathways.token", "anything".into())], None).is_ok());
        assert_eq!(read(&[], Some("secret")).unwrap_err().code, Code::Unauthenticated);
        assert_eq!(read(&[("pathways.token", "secres".into())], Some("secret")).unwrap_err().code, Code::Unauthenticated);
    }
}
