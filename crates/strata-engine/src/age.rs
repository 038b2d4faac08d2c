//! Encrypts files to the keys of whoever asked for them, in the age format, version 1 (<https://age-encryption.org/v1>).
//!
//! Only what a server does is here: sealing files to X25519 keys (`age1…`) and to SSH keys (`ssh-ed25519`, `ssh-rsa`), as a stream of 64 KiB. The
//! tests open what is sealed by the text of the specification; the black-box tests open it with another implementation.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use chacha20poly1305::aead::{Aead, KeyInit};
use chacha20poly1305::{ChaCha20Poly1305, Nonce};
use curve25519_dalek::edwards::CompressedEdwardsY;
use curve25519_dalek::montgomery::MontgomeryPoint;
use hkdf::Hkdf;
use hmac::Mac;
use sha2::{Digest, Sha256};

mod rsa;

/// Most keys that one save is encrypted to.
pub const RECIPIENTS_MAX: usize = 10;
/// What the names of encrypted files end in.
pub const SUFFIX: &str = ".age";

/// Bytes of a text that may be a key; an `ssh-rsa` key of 16384 bits has less than 3000.
const RECIPIENT_BYTES_MAX: usize = 4096;
const CHUNK_BYTES: usize = 64 << 10;

type Key = [u8; 32];

/// A key that files can be encrypted to.
#[derive(Clone, Debug)]
pub struct Recipient(Kind);

#[derive(Clone, Debug)]
enum Kind {
    X25519(MontgomeryPoint),
    /// The key as SSH writes it, and as a point.
    SshEd25519(Vec<u8>, MontgomeryPoint),
    SshRsa(Vec<u8>, rsa::PublicKey),
}

impl Recipient {
    /// Reads a key: `age1…`, or a line of an SSH public key file.
    ///
    /// # Errors
    /// A sentence, if it is of another kind or malformed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.len() > RECIPIENT_BYTES_MAX {
            return Err(format!("a recipient of {} bytes is above the limit of {RECIPIENT_BYTES_MAX}", text.len()));
        }
        let shown: String = text.chars().take(80).collect();
        let malformed = |reason: &str| format!("recipient {shown:?}: {reason}");
        let mut words = text.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some(kind @ ("ssh-ed25519" | "ssh-rsa")), Some(key)) => {
                let blob = STANDARD.decode(key).map_err(|_| malformed("the key is not base64"))?;
                ssh(kind, blob).map(Recipient).map_err(|reason| malformed(&reason))
            }
            (Some(age), None) if age.starts_with("age1") => {
                x25519(age).map(|point| Recipient(Kind::X25519(point))).map_err(|reason| malformed(&reason))
            }
            _ => Err(malformed("it is of none of the kinds age1…, ssh-ed25519 and ssh-rsa")),
        }
    }

    /// The part of a header that holds `file_key` for this key alone.
    fn wrap(&self, file_key: &[u8; 16]) -> Result<String, String> {
        match &self.0 {
            Kind::X25519(point) => {
                let (secret, share) = ephemeral()?;
                let shared = agreed(&secret, point)?;
                let body = sealed_key(&shared, &share, point, b"age-encryption.org/v1/X25519", file_key)?;
                Ok(stanza(&["X25519", &b64(&share)], &body))
            }
            Kind::SshEd25519(blob, point) => {
                const LABEL: &[u8] = b"age-encryption.org/v1/ssh-ed25519";
                let (secret, share) = ephemeral()?;
                let tweak = derived(b"", blob, LABEL)?;
                let shared = agreed(&tweak, &MontgomeryPoint(agreed(&secret, point)?))?;
                let body = sealed_key(&shared, &share, point, LABEL, file_key)?;
                Ok(stanza(&["ssh-ed25519", &tag(blob), &b64(&share)], &body))
            }
            Kind::SshRsa(blob, key) => {
                let body = key.encrypt(file_key, b"age-encryption.org/v1/ssh-rsa", &random()?)?;
                Ok(stanza(&["ssh-rsa", &tag(blob)], &body))
            }
        }
    }
}

fn x25519(text: &str) -> Result<MontgomeryPoint, String> {
    let (kind, bytes) = bech32::decode(text).map_err(|error| error.to_string())?;
    if kind.as_str() != "age" {
        return Err(format!("it is of kind {:?}; native recipients begin with age1", kind.as_str()));
    }
    let bytes: Key = bytes.try_into().map_err(|bytes: Vec<u8>| format!("the key has {} bytes in place of 32", bytes.len()))?;
    Ok(MontgomeryPoint(bytes))
}

fn ssh(kind: &str, blob: Vec<u8>) -> Result<Kind, String> {
    let fields = ssh_fields(&blob).ok_or("the key is cut short")?;
    match (kind, &fields[..]) {
        (_, [named, ..]) if *named != kind.as_bytes() => Err("the key is of another kind than it says".into()),
        ("ssh-ed25519", [_, point]) => {
            let point = CompressedEdwardsY::from_slice(point).map_err(|_| "the key does not have 32 bytes")?;
            let point = point.decompress().ok_or("the key is no point of the curve")?.to_montgomery();
            Ok(Kind::SshEd25519(blob, point))
        }
        ("ssh-rsa", [_, exponent, modulus]) => {
            let key = rsa::PublicKey::new(modulus, exponent)?;
            Ok(Kind::SshRsa(blob, key))
        }
        _ => Err("the key has not the fields of its kind".into()),
    }
}

/// The fields of a key as SSH writes it: each with its length in front.
fn ssh_fields(mut blob: &[u8]) -> Option<Vec<&[u8]>> {
    let mut fields = Vec::new();
    while !blob.is_empty() {
        let (len, rest) = blob.split_first_chunk::<4>()?;
        let (field, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        fields.push(field);
        blob = rest;
    }
    Some(fields)
}

/// Encrypts a file to `path` with [`SUFFIX`] added, and removes what it was. Reads and writes as a stream.
///
/// # Errors
/// If the file system refuses, or a key is of no use; the file is then there still.
pub(crate) fn encrypt_file(path: &Path, recipients: &[Recipient]) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    let mut sealed = BufWriter::new(File::create_new(PathBuf::from(name))?);
    encrypt(File::open(path)?, &mut sealed, recipients)?;
    sealed.into_inner()?;
    std::fs::remove_file(path)
}

/// Encrypts all of `plain`.
fn encrypt(mut plain: impl Read, sealed: &mut impl Write, recipients: &[Recipient]) -> std::io::Result<()> {
    let file_key: [u8; 16] = random().map_err(std::io::Error::other)?;
    let mut header = String::from("age-encryption.org/v1\n");
    for recipient in recipients {
        header.push_str(&recipient.wrap(&file_key).map_err(std::io::Error::other)?);
    }
    header.push_str("---");
    let mac_key = derived(&file_key, b"", b"header").map_err(std::io::Error::other)?;
    let mut mac = <hmac::Hmac<Sha256> as Mac>::new_from_slice(&mac_key).map_err(std::io::Error::other)?;
    mac.update(header.as_bytes());
    writeln!(sealed, "{header} {}", b64(&mac.finalize().into_bytes()))?;

    let salt: [u8; 16] = random().map_err(std::io::Error::other)?;
    sealed.write_all(&salt)?;
    let key = derived(&file_key, &salt, b"payload").map_err(std::io::Error::other)?;
    let cipher = ChaCha20Poly1305::new(&key.into());
    let (mut chunk, mut next) = (Vec::with_capacity(CHUNK_BYTES), Vec::with_capacity(CHUNK_BYTES));
    plain.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk)?;
    for counter in 0_u64.. {
        next.clear();
        plain.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut next)?;
        let is_last = next.is_empty();
        // Eleven bytes that count, and one that says whether it is the last.
        let mut nonce = [0; 12];
        nonce[3..11].copy_from_slice(&counter.to_be_bytes());
        nonce[11] = is_last.into();
        let encrypted = cipher.encrypt(Nonce::from_slice(&nonce), &chunk[..]);
        sealed.write_all(&encrypted.map_err(|_| std::io::Error::other("a chunk cannot be encrypted"))?)?;
        if is_last {
            break;
        }
        std::mem::swap(&mut chunk, &mut next);
    }
    Ok(())
}

/// A secret for one use, and what is told of it.
fn ephemeral() -> Result<(Key, Key), String> {
    let secret: Key = random()?;
    Ok((secret, MontgomeryPoint::mul_base_clamped(secret).to_bytes()))
}

fn agreed(secret: &Key, point: &MontgomeryPoint) -> Result<Key, String> {
    let shared = point.mul_clamped(*secret).to_bytes();
    if shared == [0; 32] { Err("a recipient's key is a point that keeps no secret".into()) } else { Ok(shared) }
}

fn sealed_key(shared: &Key, share: &Key, point: &MontgomeryPoint, label: &[u8], file_key: &[u8]) -> Result<Vec<u8>, String> {
    let salt = [*share, point.to_bytes()].concat();
    let cipher = ChaCha20Poly1305::new(&derived(shared, &salt, label)?.into());
    cipher.encrypt(&Nonce::default(), file_key).map_err(|_| "a file key cannot be encrypted".to_owned())
}

fn derived(secret: &[u8], salt: &[u8], label: &[u8]) -> Result<Key, String> {
    let mut key = [0; 32];
    Hkdf::<Sha256>::new(Some(salt), secret).expand(label, &mut key).map_err(|error| error.to_string())?;
    Ok(key)
}

fn tag(blob: &[u8]) -> String {
    b64(&Sha256::digest(blob)[..4])
}

fn b64(bytes: &[u8]) -> String {
    STANDARD_NO_PAD.encode(bytes)
}

/// A stanza of a header: its body in lines of 64 characters, of which the last is shorter, and may be empty.
fn stanza(arguments: &[&str], body: &[u8]) -> String {
    const LINE_CHARS: usize = 64;
    let mut text = format!("-> {}\n", arguments.join(" "));
    let body = b64(body);
    let mut rest = body.as_str();
    while let Some((line, after)) = rest.split_at_checked(LINE_CHARS) {
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    text.push_str(rest);
    text.push('\n');
    text
}

fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system has no random numbers: {error}"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pair that another implementation made.
    const SECRET: &str = "AGE-SECRET-KEY-19Q8Y3JPEEP9TDS4PGKGWPCJG2YNC4XUFEKKXZ20FY0DKAPX5ZQMQ8CP7D5";
    const PUBLIC: &str = "age1gzy9ztrgncgs7xv6rr0p9r7lt2mdk3pqhuuv4xlw2da82g08cfjqstkft9";
    const SSH_ED25519: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl someone@somewhere";

    fn sealed(plain: &[u8], recipients: &[&str]) -> Vec<u8> {
        let recipients: Vec<Recipient> = recipients.iter().map(|text| Recipient::parse(text).unwrap()).collect();
        let mut sealed = Vec::new();
        encrypt(plain, &mut sealed, &recipients).unwrap();
        sealed
    }

    /// Opens a file by the text of the specification.
    fn opened(sealed: &[u8], secret: &str) -> Option<Vec<u8>> {
        let secret: Key = bech32::decode(secret).unwrap().1.try_into().unwrap();
        let public = MontgomeryPoint::mul_base_clamped(secret);
        let marker = sealed.windows(5).position(|w| w == b"\n--- ")?;
        let (header, rest) = (std::str::from_utf8(&sealed[..marker + 4]).ok()?, &sealed[marker + 5..]);
        let mut lines = header.lines();
        assert_eq!(lines.next(), Some("age-encryption.org/v1"));
        let share = lines.by_ref().find_map(|line| line.strip_prefix("-> X25519 "))?;
        let share: Key = STANDARD_NO_PAD.decode(share).ok()?.try_into().ok()?;
        let wrapped = STANDARD_NO_PAD.decode(lines.next()?).ok()?;
        let shared = MontgomeryPoint(share).mul_clamped(secret).to_bytes();
        let salt = [share, public.to_bytes()].concat();
        let wrap = ChaCha20Poly1305::new(&derived(&shared, &salt, b"age-encryption.org/v1/X25519").ok()?.into());
        let file_key = wrap.decrypt(&Nonce::default(), &wrapped[..]).ok()?;
        let mut mac = <hmac::Hmac<Sha256> as Mac>::new_from_slice(&derived(&file_key, b"", b"header").ok()?).ok()?;
        mac.update(header.as_bytes());
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        mac.verify_slice(&STANDARD_NO_PAD.decode(&rest[..end]).ok()?).ok()?;
        let (salt, payload) = rest[end + 1..].split_at(16);
        let cipher = ChaCha20Poly1305::new(&derived(&file_key, salt, b"payload").ok()?.into());
        let chunks: Vec<&[u8]> = payload.chunks(CHUNK_BYTES + 16).collect();
        let mut plain = Vec::new();
        for (i, chunk) in chunks.iter().enumerate() {
            let mut nonce = [0; 12];
            nonce[10] = i as u8;
            nonce[11] = u8::from(i + 1 == chunks.len());
            plain.extend(cipher.decrypt(Nonce::from_slice(&nonce), *chunk).ok()?);
        }
        Some(plain)
    }

    #[test]
    fn what_is_sealed_opens_with_the_key_and_no_other() {
        for len in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
            let plain: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let sealed = sealed(&plain, &[SSH_ED25519, PUBLIC]);
            assert_eq!(opened(&sealed, SECRET).as_ref(), Some(&plain), "{len}");
            assert!(plain.len() < 8 || !sealed.windows(8).any(|part| part == &plain[..8]));
            let mut touched = sealed.clone();
            *touched.last_mut().unwrap() ^= 1;
            assert_eq!(opened(&touched, SECRET), None, "{len}");
        }
        let again = || sealed(b"the same", &[PUBLIC]);
        assert_ne!(again(), again());
    }

    #[test]
    fn a_body_whose_length_is_a_multiple_of_a_line_ends_in_an_empty_one() {
        assert_eq!(stanza(&["a", "b"], &[0; 48]), format!("-> a b\n{}\n\n", "A".repeat(64)));
        assert_eq!(stanza(&["a"], &[0; 49]), format!("-> a\n{}\nAA\n", "A".repeat(64)));
    }

    #[test]
    fn what_is_no_key_is_refused_with_a_reason() {
        assert!(Recipient::parse(PUBLIC).is_ok() && Recipient::parse(SSH_ED25519).is_ok());
        let (short, of_another) = (
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMq",
            "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
        );
        for (text, words) in [
            ("", "none of the kinds"),
            ("age1", "age1"),
            (SECRET, "none of the kinds"),
            (&PUBLIC.replace('q', "p"), "recipient"),
            ("age1pq1xxxx", "recipient"),
            ("ssh-dss AAAA", "none of the kinds"),
            ("ssh-ed25519 ???", "not base64"),
            (short, "cut short"),
            (of_another, "of another kind"),
            (&"a".repeat(5000), "above the limit"),
        ] {
            let error = Recipient::parse(text).map(drop).unwrap_err();
            assert!(error.contains(words) && error.len() < 300, "{text}: {error}");
        }
    }

    #[test]
    fn a_file_is_there_encrypted_or_plain_and_never_both() {
        let dir = std::env::temp_dir().join(format!("strata-age-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("a.bin");
        std::fs::write(&path, b"plain").unwrap();
        encrypt_file(&path, &[Recipient::parse(PUBLIC).unwrap()]).unwrap();
        assert!(!path.exists());
        assert_eq!(opened(&std::fs::read(dir.join("a.bin.age")).unwrap(), SECRET).unwrap(), b"plain");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
