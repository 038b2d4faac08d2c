use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use super::*;
use crate::tests::fake_store::{FakeStore, answer};
use crate::tests::{peak_bytes, with_budget};

fn open(urls: &[String]) -> ImageStores {
    ImageStores::open(urls, &S3Settings::default()).unwrap()
}

fn read_within(stores: &ImageStores, location: &str, time: Duration) -> Result<Arc<[u8]>, Unfetched> {
    with_budget(1 << 20, |budget| stores.read(location, Instant::now() + time, budget))
}

fn read(stores: &ImageStores, location: &str) -> Result<Arc<[u8]>, Unfetched> {
    read_within(stores, location, Duration::from_secs(30))
}

fn refusal(read: Result<Arc<[u8]>, Unfetched>) -> String {
    match read {
        Err(Unfetched::Refused(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

fn failure(read: Result<Arc<[u8]>, Unfetched>) -> String {
    match read {
        Err(Unfetched::Failed(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_object_below_a_prefix_is_fetched_however_it_is_written() {
    let store = FakeStore::of(b"picture");
    let url = store.url();
    for prefix in [format!("{url}/pictures/"), format!("{url}/pictures")] {
        let stores = open(&["https://elsewhere.example/".into(), prefix]);
        for path in ["/pictures/a%20b.png", "/p%69ctures/a%20b.png", "/pictures/a%20b.png?X-Amz-Signature=1%2f2"] {
            let location = format!("{url}{path}");
            assert!(stores.has(&location));
            assert_eq!(read(&stores, &location).as_deref(), Ok(&b"picture"[..]), "{location}");
        }
    }
    let heads = store.heads();
    assert_eq!(heads.len(), 6);
    assert!(heads[1].starts_with("GET /pictures/a%20b.png HTTP/1.1\n"), "{}", heads[1]);
    assert!(heads[2].starts_with("GET /pictures/a%20b.png?X-Amz-Signature=1%2f2 HTTP/1.1\n"), "{}", heads[2]);
    assert!(heads.iter().all(|head| !head.to_lowercase().contains("accept-encoding")), "{heads:?}");
}

#[test]
fn nothing_else_is_asked_for() {
    let store = FakeStore::of(b"secret");
    let (url, port) = (store.url(), store.url().rsplit_once(':').unwrap().1.to_owned());
    let stores = open(&[format!("{url}/pictures/"), "s3://bucket/pictures/".into()]);
    for (location, words) in [
        (format!("{url}/secret.png"), "in no store"),
        (format!("{url}/pictures-private/a.png"), "in no store"),
        (format!("{url}/pictures"), "in no store"),
        (format!("{url}/Pictures/a.png"), "in no store"),
        (format!("{url}/pictures/"), "names no object"),
        (format!("{url}/pictures/?list"), "names no object"),
        (format!("{url}/pictures/deep/"), "names no object"),
        (format!("{url}/pictures/../secret.png"), ".."),
        (format!("{url}/pictures/%2e%2e/secret.png"), ".."),
        (format!("{url}/pictures/..%2fsecret.png"), "an encoded /"),
        (format!("{url}/pictures/%252e%252e/secret.png"), "an encoded %"),
        (format!("{url}/pictures\\..\\secret.png"), "a '\\'"),
        (format!("http://user@127.0.0.1:{port}/pictures/a.png"), "user's name"),
        (format!("http://127.0.0.1:{port}@127.0.0.1/pictures/a.png"), "user's name"),
        (format!("http://localhost:{port}/pictures/a.png"), "in no store"),
        (format!("http://2130706433:{port}/pictures/a.png"), "in no store"),
        (format!("http://127.0.0.1.:{port}/pictures/a.png"), "in no store"),
        (format!("https://127.0.0.1:{port}/pictures/a.png"), "in no store"),
        ("http://127.0.0.1/pictures/a.png".into(), "in no store"),
        ("http://169.254.169.254/pictures/a.png".into(), "in no store"),
        ("https://bucket.s3.us-east-1.amazonaws.com/pictures/a.png".into(), "in no store"),
        ("s3://bucket/a.png".into(), "in no store"),
        ("gs://bucket/pictures/a.png".into(), "in no store"),
        ("ftp://127.0.0.1/pictures/a.png".into(), "\"ftp\""),
    ] {
        let error = refusal(read(&stores, &location));
        assert!(error.contains(words) && error.starts_with("location \""), "{location}: {error}");
    }
    assert_eq!(store.heads(), [""; 0]);
    let file = "file:///a.png";
    assert!(!stores.has(file) && !ImageStores::default().has(&format!("{url}/pictures/a.png")));
}

#[test]
fn what_a_store_answers_is_said_with_the_location_and_without_its_query() {
    let store = FakeStore::start(|first| {
        let status = first.split(['/', ' ', '?']).nth(2).unwrap().replace('-', " ");
        answer(&format!("{status}\r\nLocation: /other\r\nx-amz-bucket-region: eu-west-1"), b"<xml>")
    });
    let stores = open(&[format!("{}/", store.url())]);
    let get = |status: &str| read(&stores, &format!("{}/{status}?X-Amz-Signature=secret", store.url()));
    for (status, shown) in [
        ("404-Not-Found", "404 Not Found"),
        ("403-Forbidden", "403 Forbidden"),
        ("204-No-Content", "204 No Content"),
        ("206-Partial-Content", "206 Partial Content"),
        ("302-Found", "302 Found, and no redirect is followed; the bucket is in the region \"eu-west-1\""),
        ("307-Temporary-Redirect", "307 Temporary Redirect, and no redirect"),
    ] {
        let error = refusal(get(status));
        assert!(error.contains(shown) && error.contains(&format!("/{status}\"")), "{error}");
        assert!(!error.contains("secret") && !error.contains("xml"), "{error}");
    }
    for status in ["500-Internal-Server-Error", "503-Slow-Down", "429-Too-Many-Requests"] {
        let error = failure(get(status));
        assert!(error.contains(&status[..3]) && error.contains("again later") && !error.contains("secret"), "{error}");
    }
    assert_eq!(store.heads().len(), 9, "none is asked twice");
}

#[test]
fn an_object_is_counted_before_it_is_taken() {
    let store = FakeStore::start(|first| {
        let len = first.split(['/', ' ']).nth(2).unwrap();
        format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n").into_bytes()
    });
    let stores = open(&[format!("{}/", store.url())]);
    let get = |len: &str| read(&stores, &format!("{}/{len}", store.url()));
    // What the client itself takes for a connection.
    const BUFFERS: usize = 1 << 19;
    for (len, words) in [
        ((2 << 20).to_string(), "1 MiB"),
        ((limits::IMAGE_BYTES_MAX + 1).to_string(), "33554433 bytes"),
        (u64::MAX.to_string(), "bytes, above the limit"),
        ("0".into(), "no data"),
    ] {
        let (read, peak) = peak_bytes(|| get(&len));
        let error = refusal(read);
        assert!(error.contains(words), "{error}");
        assert!(peak < BUFFERS, "{peak}");
    }
}

#[test]
fn an_answer_that_is_not_whole_is_no_picture() {
    let store = FakeStore::start(|first| {
        let rest = match first.split(['/', ' ']).nth(2).unwrap() {
            "chunked" => "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "until-close" => "Connection: close\r\n\r\nabc",
            "gzip" => "Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc",
            "short" => "Content-Length: 30\r\n\r\nabc",
            other => panic!("{other}"),
        };
        format!("HTTP/1.1 200 OK\r\n{rest}").into_bytes()
    });
    let stores = open(&[format!("{}/", store.url())]);
    for path in ["chunked", "until-close", "gzip"] {
        let error = refusal(read(&stores, &format!("{}/{path}", store.url())));
        assert!(error.contains("does not say how many bytes"), "{path}: {error}");
    }
    let error = failure(read(&stores, &format!("{}/short", store.url())));
    assert!(error.contains("again later"), "{error}");
}

#[test]
fn a_store_that_does_not_answer_in_time_is_left() {
    let pause = || thread::sleep(Duration::from_secs(20));
    let silent = FakeStore::start(move |_| {
        pause();
        Vec::new()
    });
    let stores = open(&[format!("{}/", silent.url()), "http://127.0.0.1:1/".into()]);
    let started = Instant::now();
    let error = failure(read_within(&stores, &format!("{}/a.png", silent.url()), Duration::from_millis(300)));
    assert!(error.contains("30 s") && error.contains("again later") && error.contains("/a.png"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10));
    let error = failure(read_within(&stores, &format!("{}/a.png", silent.url()), Duration::ZERO));
    assert!(error.contains("30 s"), "{error}");
    assert_eq!(silent.heads().len(), 1, "when there is no time left, nothing is asked");
    let error = failure(read(&stores, "http://127.0.0.1:1/a.png"));
    assert!(error.contains("refused") && error.contains("again later"), "{error}");
}

fn credentials(session_token: Option<&str>) -> Credentials {
    Credentials {
        access_key_id: "AKID".into(),
        secret_access_key: "secret".into(),
        session_token: session_token.map(str::to_owned),
    }
}

#[test]
fn a_key_of_s3_is_asked_for_under_its_bucket_and_signed_where_there_is_a_key() {
    let store = FakeStore::of(b"picture");
    for (key, token) in [(None, None), (Some(credentials(None)), None), (Some(credentials(Some("lent"))), Some("lent"))] {
        let settings = S3Settings { region: None, endpoint: Some(store.url()), credentials: key.clone() };
        let stores = ImageStores::open(&["s3://bucket/pictures/".into()], &settings).unwrap();
        assert_eq!(read(&stores, "s3://bucket/pictures/a b+c.png").as_deref(), Ok(&b"picture"[..]));
        let head = store.heads().pop().unwrap();
        assert!(head.starts_with("GET /bucket/pictures/a%20b%2Bc.png HTTP/1.1\n"), "{head}");
        let header = |name: &str| {
            let lines = head.lines().filter_map(|line| line.split_once(": "));
            lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect::<Vec<_>>()
        };
        let host = store.url().strip_prefix("http://").unwrap().to_owned();
        assert_eq!(header("host"), [host.as_str()]);
        assert_eq!(header("x-amz-security-token"), token.into_iter().collect::<Vec<_>>());
        let Some(key) = key else {
            assert_eq!(header("authorization"), [""; 0]);
            continue;
        };
        let date = header("x-amz-date")[0];
        let mut signed = vec![("host", host.as_str()), ("x-amz-content-sha256", sigv4::EMPTY_SHA256), ("x-amz-date", date)];
        signed.extend(token.map(|token| ("x-amz-security-token", token)));
        let scope = sigv4::Scope { region: "us-east-1", service: "s3" };
        let expected = sigv4::authorization(&key, scope, "/bucket/pictures/a%20b%2Bc.png", &signed, date);
        assert_eq!(header("authorization"), [expected]);
    }
}

#[test]
fn buckets_are_where_their_clouds_have_them() {
    let settings = |region: Option<&str>| S3Settings { region: region.map(str::to_owned), ..S3Settings::default() };
    for (url, region, origin) in [
        ("s3://bucket/a/", None, "https://bucket.s3.us-east-1.amazonaws.com"),
        ("s3://bucket", Some("eu-west-1"), "https://bucket.s3.eu-west-1.amazonaws.com"),
        ("s3://buck.et/", Some("eu-west-1"), "https://s3.eu-west-1.amazonaws.com/buck.et"),
        ("s3://bucket", Some("cn-north-1"), "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("gs://bucket/a", None, "https://storage.googleapis.com/bucket"),
        ("https://Images.Example:443/a", None, "https://images.example"),
    ] {
        assert_eq!(ImageStore::new(url, &settings(region)).unwrap().origin, origin, "{url}");
    }
}

#[test]
fn a_store_whose_place_is_not_clear_is_not_opened() {
    let at = |endpoint: &str| S3Settings { endpoint: Some(endpoint.into()), ..S3Settings::default() };
    let in_region = |region: &str| S3Settings { region: Some(region.into()), ..S3Settings::default() };
    for (url, settings, words) in [
        ("images", S3Settings::default(), "\"images\" has no scheme"),
        ("file:///images", S3Settings::default(), "the scheme \"file\""),
        ("https://user@h/", S3Settings::default(), "user's name"),
        ("https://h/a?b", S3Settings::default(), "has a query"),
        ("https://h/a#b", S3Settings::default(), "a '#'"),
        ("https://h/../", S3Settings::default(), ".."),
        ("s3://B/", S3Settings::default(), "the bucket \"B\""),
        ("s3://bucket/", at("minio:9000"), "AWS_ENDPOINT_URL \"minio:9000\" has no scheme"),
        ("s3://bucket/", at("http://minio/path"), "more than http"),
        ("s3://bucket/", at("s3://bucket"), "more than http"),
        ("s3://bucket/", in_region("evil.example/"), "AWS_REGION \"evil.example/\""),
        ("s3://bucket/", in_region(""), "AWS_REGION \"\""),
    ] {
        let error = ImageStores::open(&[url.into()], &settings).unwrap_err().to_string();
        assert!(error.contains(words), "{url}: {error}");
    }
}

#[test]
fn the_environment_says_where_s3_is_as_it_does_to_others() {
    let from = |variables: &[(&'static str, &str)]| {
        let variables: HashMap<&str, String> = variables.iter().map(|(name, value)| (*name, value.to_string())).collect();
        S3Settings::from_variables(|name| variables.get(name).cloned())
    };
    assert_eq!(from(&[]).unwrap(), S3Settings::default());
    let key = [("AWS_ACCESS_KEY_ID", "AKID"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let all = [key[0], key[1], ("AWS_SESSION_TOKEN", "lent"), ("AWS_DEFAULT_REGION", "r"), ("AWS_ENDPOINT_URL", "http://e")];
    let expected = S3Settings {
        region: Some("r".into()),
        endpoint: Some("http://e".into()),
        credentials: Some(credentials(Some("lent"))),
    };
    assert_eq!(from(&all).unwrap(), expected);
    let narrower = from(&[all[3], all[4], ("AWS_REGION", "s"), ("AWS_ENDPOINT_URL_S3", "http://f")]).unwrap();
    assert_eq!((narrower.region.as_deref(), narrower.endpoint.as_deref()), (Some("s"), Some("http://f")));
    for half in key {
        assert!(matches!(from(&[half]), Err(ImageStoreError::HalfAKey)));
    }
}
