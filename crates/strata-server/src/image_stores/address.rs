//! Addresses of objects, in one form each.
//!
//! What is compared with the prefixes that are enabled is what is fetched: an address is taken apart here, refused if two programs could read it
//! differently, and written again. Nothing of how a client wrote it is left but its query.

use crate::names::shown;

/// How objects are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `http://`
    Http,
    /// `https://`
    Https,
    /// `s3://BUCKET/`, of Amazon or one that speaks like it.
    S3,
    /// `gs://BUCKET/`, of Google.
    Gs,
}

impl Scheme {
    const ALL: [Scheme; 4] = [Scheme::Http, Scheme::Https, Scheme::S3, Scheme::Gs];

    /// How it is written.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
            Scheme::S3 => "s3",
            Scheme::Gs => "gs",
        }
    }

    /// Whether what follows is a bucket and a key, rather than a host and a path.
    fn has_buckets(self) -> bool {
        matches!(self, Scheme::S3 | Scheme::Gs)
    }
}

/// Where an object is, or what those begin with that are enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address<'a> {
    /// How it is named.
    pub scheme: Scheme,
    /// Host and port in lower case, the latter unless it is the scheme's own; or a bucket.
    pub authority: String,
    /// From the first `/` on; all but letters, digits, `-._~` and `/` percent-encoded.
    pub path: String,
    /// What follows a `?`, as it was written; never in buckets.
    pub query: Option<&'a str>,
}

impl<'a> Address<'a> {
    /// Takes an address apart.
    ///
    /// # Errors
    /// With what about it is not clear.
    pub fn parse(text: &'a str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("has no scheme, such as that of https://HOST/NAME.png")?;
        let known = Scheme::ALL.into_iter().find(|known| known.name() == scheme);
        let Some(scheme) = known else {
            return Err(format!("has the scheme {:?}, which is none of http, https, s3 and gs", shown(scheme)));
        };
        let (authority, rest) = rest.find(['/', '?', '#']).map_or((rest, ""), |at| rest.split_at(at));
        if !rest.starts_with('/') {
            return Err("has no path".into());
        }
        let (path, query) = if scheme.has_buckets() {
            check_bucket(authority)?;
            (plain_path(rest)?, None)
        } else {
            let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
            query.map_or(Ok(()), check_query)?;
            (encoded_path(path)?, query)
        };
        let authority = if scheme.has_buckets() { authority.into() } else { host_and_port(scheme, authority)? };
        Ok(Address { scheme, authority, path, query })
    }
}

/// Host and port in their one form.
fn host_and_port(scheme: Scheme, authority: &str) -> Result<String, String> {
    if authority.contains('@') {
        return Err("has a user's name or key before its host, which is never sent".into());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let is_name = !host.is_empty() && host.chars().all(is_plain);
    let is_ipv6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).is_some_and(|inner| {
        // Written in another way it would be another text.
        inner.parse::<std::net::Ipv6Addr>().is_ok_and(|address| address.to_string() == inner)
    });
    if !is_name && !is_ipv6 {
        return Err(format!("has the host {:?}, which is neither a name nor an address", shown(host)));
    }
    let host = host.to_ascii_lowercase();
    let port = port.map(|port| match port.parse::<u16>() {
        Ok(number) if number > 0 && !port.starts_with('+') => Ok(number),
        _ => Err(format!("has the port {:?}, which is none", shown(port))),
    });
    let usual = if scheme == Scheme::Https { 443 } else { 80 };
    Ok(match port.transpose()? {
        Some(port) if port != usual => format!("{host}:{port}"),
        _ => host,
    })
}

/// Refuses names that no bucket has, which would otherwise become a part of a host's name.
fn check_bucket(bucket: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.' | '_');
    let ends_well = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let (first, last) = (bucket.chars().next(), bucket.chars().next_back());
    if (3..=222).contains(&bucket.len())
        && bucket.chars().all(is_plain)
        && ends_well(first)
        && ends_well(last)
        && !bucket.contains("..")
    {
        return Ok(());
    }
    Err(format!("has the bucket {:?}; buckets have from 3 to 222 of the characters a-z, 0-9, -, . and _", shown(bucket)))
}

/// A path of an `http` address in its one form.
fn encoded_path(path: &str) -> Result<String, String> {
    let mut plain = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        let byte = match byte {
            b'%' => {
                let digits = [bytes.next(), bytes.next()].map(|digit| digit.and_then(|digit| char::from(digit).to_digit(16)));
                let [Some(high), Some(low)] = digits else {
                    return Err("has a % that no two hexadecimal digits follow".into());
                };
                match ((high << 4) | low) as u8 {
                    b'/' => return Err("has an encoded /, which some read as one and some do not".into()),
                    b'%' => return Err("has an encoded %, which some decode twice".into()),
                    byte => byte,
                }
            }
            b'#' => return Err("has a '#', and what follows one is never sent; write it as %23".into()),
            byte if byte.is_ascii_graphic() => byte,
            _ => return Err("has a character that is not sent as it is; percent-encode it".into()),
        };
        plain.push(byte);
    }
    written(&plain)
}

/// A key of a bucket, as the path that it is fetched under.
fn plain_path(key: &str) -> Result<String, String> {
    match key.chars().find(|c| matches!(c, '%' | '?' | '#')) {
        Some(c) => Err(format!("has a {c:?}; keys are taken as they are written, without encoding, and without this")),
        None => written(key.as_bytes()),
    }
}

/// A path that is not encoded, in its one form.
fn written(plain: &[u8]) -> Result<String, String> {
    if plain.iter().any(u8::is_ascii_control) {
        return Err("has a control character".into());
    }
    if plain.contains(&b'\\') {
        return Err("has a '\\', which some read as a /".into());
    }
    if plain.split(|&byte| byte == b'/').any(|segment| segment == b"." || segment == b"..") {
        return Err("has a . or .. between slashes, which is not followed".into());
    }
    let mut path = String::with_capacity(plain.len());
    for &byte in plain {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => path.push(char::from(byte)),
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(path)
}

/// Refuses queries with what a query cannot have.
fn check_query(query: &str) -> Result<(), String> {
    let is_legal = |c: &char| c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:@/?%".contains(*c);
    match query.chars().find(|c| !is_legal(c)) {
        Some(c) => Err(format!("has a {c:?} in its query; percent-encode it")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(text: &str) -> Result<String, String> {
        Address::parse(text).map(|Address { scheme, authority, path, .. }| format!("{}://{authority}{path}", scheme.name()))
    }

    #[test]
    fn two_ways_to_write_an_address_are_one() {
        for (text, expected) in [
            ("https://Images.Example:443/a/B.png", "https://images.example/a/B.png"),
            ("http://images:80/a.png?x=1", "http://images/a.png"),
            ("http://images:443/a.png", "http://images:443/a.png"),
            ("http://10.0.0.1:08080/a.png", "http://10.0.0.1:8080/a.png"),
            ("http://[::1]:9000/a.png", "http://[::1]:9000/a.png"),
            ("http://[::1]/a.png", "http://[::1]/a.png"),
            ("https://h/%61%2d%7e%c3%a9", "https://h/a-~%C3%A9"),
            ("https://h/a+b=c(d)", "https://h/a%2Bb%3Dc%28d%29"),
            ("https://h/a%20b//c", "https://h/a%20b//c"),
            ("https://h/...", "https://h/..."),
            ("s3://buck.et/a b/é+", "s3://buck.et/a%20b/%C3%A9%2B"),
            ("gs://buck_et/a", "gs://buck_et/a"),
        ] {
            assert_eq!(normal(text).as_deref(), Ok(expected), "{text}");
        }
        assert_eq!(Address::parse("https://h/a?X-Amz-Signature=1%2F&b").unwrap().query, Some("X-Amz-Signature=1%2F&b"));
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        for (text, words) in [
            ("images/a.png", "no scheme"),
            ("https:/h/a", "no scheme"),
            ("ftp://h/a", "\"ftp\""),
            ("HTTPS://h/a", "\"HTTPS\""),
            ("https://h", "no path"),
            ("https://h?a/b", "no path"),
            ("https://h#/a", "no path"),
            ("https:///a", "the host \"\""),
            ("https://user@h/a", "user's name"),
            ("https://h\\@other/a", "user's name"),
            ("https://h%2eother/a", "the host \"h%2eother\""),
            ("https://hé/a", "the host"),
            ("https://h\\other/a", "the host"),
            ("https://[::0:1]/a", "the host"),
            ("https://[::1/a", "the host"),
            ("https://::1/a", "the host"),
            ("https://h:/a", "the port \"\""),
            ("https://h:0/a", "the port \"0\""),
            ("https://h:+1/a", "the port \"+1\""),
            ("https://h:65536/a", "the port \"65536\""),
            ("https://h/a/../b", ".."),
            ("https://h/a/%2e%2E/b", ".."),
            ("https://h/a/.%2e", ".."),
            ("https://h/a/./b", ".."),
            ("https://h/..", ".."),
            ("https://h/a%2fb", "an encoded /"),
            ("https://h/a%252e", "an encoded %"),
            ("https://h/a%2", "a % that"),
            ("https://h/a%+1", "a % that"),
            ("https://h/a%é1", "a % that"),
            ("https://h/a%00", "a control character"),
            ("https://h/a\r\nHost: other", "not sent as it is"),
            ("https://h/a b", "not sent as it is"),
            ("https://h/é", "not sent as it is"),
            ("https://h/a\\..\\b", "a '\\'"),
            ("https://h/a%5cb", "a '\\'"),
            ("https://h/a#b", "a '#'"),
            ("https://h/a?b#c", "a '#' in its query"),
            ("https://h/a?b c", "a ' ' in its query"),
            ("s3://b/a", "the bucket \"b\""),
            ("s3://Bucket/a", "the bucket \"Bucket\""),
            ("s3://bucket:80/a", "the bucket"),
            ("s3://user@bucket/a", "the bucket"),
            ("s3://bu..cket/a", "the bucket"),
            ("s3://.bucket/a", "the bucket"),
            ("s3://bucket/a%2e", "a '%'"),
            ("s3://bucket/a?b", "a '?'"),
            ("s3://bucket/../a", ".."),
            ("s3://bucket/a\n", "a control character"),
        ] {
            let error = normal(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
