//! Signature Version 4 of AWS, as far as fetching an object takes it: no query, no body.
//!
//! <https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html>

use std::fmt::{self, Write};

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use time::OffsetDateTime;

/// Hash of no body.
pub const EMPTY_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// What requests are signed with.
#[derive(Clone, PartialEq)]
pub struct Credentials {
    /// Which key it is; it is sent.
    pub access_key_id: String,
    /// The key; it is not.
    pub secret_access_key: String,
    /// What goes along with a key that is lent for a while.
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    /// Without what is secret: settings are logged.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Credentials").field("access_key_id", &self.access_key_id).finish_non_exhaustive()
    }
}

/// Where a signature holds.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// Such as `us-east-1`.
    pub region: &'a str,
    /// Such as `s3`.
    pub service: &'a str,
}

/// The time of a request as its header `x-amz-date` has it.
pub fn timestamp(now: OffsetDateTime) -> String {
    let (year, month, day) = now.to_offset(time::UtcOffset::UTC).to_calendar_date();
    let (hour, minute, second) = now.to_offset(time::UtcOffset::UTC).to_hms();
    format!("{year:04}{:02}{day:02}T{hour:02}{minute:02}{second:02}Z", u8::from(month))
}

/// The header `Authorization` of a `GET` of `path`, which is encoded, with `headers` that are all signed: in the order of their names, which are in lower
/// case; `host` and `x-amz-date` are among them. `timestamp` is what the latter says.
pub fn authorization(
    credentials: &Credentials,
    scope: Scope<'_>,
    path: &str,
    headers: &[(&str, &str)],
    timestamp: &str,
) -> String {
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let signed = names.join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let request = format!("GET\n{path}\n\n{lines}\n{signed}\n{EMPTY_SHA256}");
    let date = timestamp.get(..8).unwrap_or(timestamp);
    let Scope { region, service } = scope;
    let scope = format!("{date}/{region}/{service}/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{}", hex(&Sha256::digest(request)));
    let mut key = format!("AWS4{}", credentials.secret_access_key).into_bytes();
    for part in [date, region, service, "aws4_request"] {
        key = hmac(&key, part);
    }
    let signature = hex(&hmac(&key, &text));
    format!("AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={signed},Signature={signature}", credentials.access_key_id)
}

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("keys of every length are taken");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all that is written");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signature alone.
    fn signature(secret: &str, scope: Scope<'_>, path: &str, headers: &[(&str, &str)], timestamp: &str) -> String {
        let credentials = Credentials { access_key_id: "AKID".into(), secret_access_key: secret.into(), session_token: None };
        let header = authorization(&credentials, scope, path, headers, timestamp);
        header.rsplit_once("Signature=").unwrap().1.into()
    }

    #[test]
    fn a_get_of_an_object_is_signed_as_in_the_documentation_of_s3() {
        let credentials = Credentials {
            access_key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_access_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            session_token: None,
        };
        let headers = [
            ("host", "examplebucket.s3.amazonaws.com"),
            ("range", "bytes=0-9"),
            ("x-amz-content-sha256", EMPTY_SHA256),
            ("x-amz-date", "20130524T000000Z"),
        ];
        let scope = Scope { region: "us-east-1", service: "s3" };
        assert_eq!(
            authorization(&credentials, scope, "/test.txt", &headers, "20130524T000000Z"),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,\
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
    }

    #[test]
    fn paths_are_signed_as_in_the_test_suite_of_aws() {
        // aws-sig-v4-test-suite: get-vanilla, get-unreserved, get-utf8.
        const UNRESERVED: &str = "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let scope = Scope { region: "us-east-1", service: "service" };
        for (path, expected) in [
            ("/", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
            (UNRESERVED, "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"),
            ("/%E1%88%B4", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
        ] {
            let headers = [("host", "example.amazonaws.com"), ("x-amz-date", "20150830T123600Z")];
            let secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
            assert_eq!(signature(secret, scope, path, &headers, "20150830T123600Z"), expected, "{path}");
        }
    }

    #[test]
    fn the_time_is_written_without_separators_and_in_utc() {
        let now = OffsetDateTime::parse("2013-05-24T01:02:03+02:00", &time::format_description::well_known::Rfc3339);
        assert_eq!(timestamp(now.unwrap()), "20130523T230203Z");
    }

    #[test]
    fn secrets_are_not_in_what_is_logged() {
        let credentials = Credentials {
            access_key_id: "AK".into(),
            secret_access_key: "hidden".into(),
            session_token: Some("hidden".into()),
        };
        let text = format!("{credentials:?}");
        assert!(text.contains("AK") && !text.contains("hidden"), "{text}");
    }
}
