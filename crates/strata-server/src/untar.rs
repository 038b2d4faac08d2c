//! Tar archives as they arrive: the files that are wanted, and nothing else.
//!
//! What an archive says is believed as far as it was checked. Names are compared with those that are wanted and lead nowhere by themselves; sizes are added up before the first
//! byte of a file is handed on; links, devices and everything else that is no regular file are refused. Read are the formats of POSIX (`ustar`, `pax`) and of GNU.

use crate::limits;
use crate::names::shown;

const BLOCK_BYTES: usize = 512;

/// A file that is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Its name in the archive; `./` before it is the same.
    pub name: &'static str,
    /// The most bytes that it may have.
    pub bytes_max: u64,
}

/// What was found in some bytes.
#[derive(Debug, PartialEq)]
pub enum Found<'b> {
    /// The file of this name begins.
    File(&'static str),
    /// More of it.
    Bytes(&'b [u8]),
    /// Nothing that is wanted.
    Nothing,
}

/// An archive that is being read.
pub struct Untar<'w> {
    wanted: &'w [Wanted],
    /// Names of entries that may be there and are passed over.
    ignored: &'w [&'w str],
    begun: Vec<&'static str>,
    entries: usize,
    bytes_left: u64,
    state: State,
}

enum State {
    Header {
        block: Box<[u8; BLOCK_BYTES]>,
        filled: usize,
    },
    Contents {
        left: u64,
        padding: u64,
        of: Contents,
    },
    /// Nothing but zeros comes after the first block of them.
    End,
}

enum Contents {
    Wanted,
    PassedOver,
    /// Of an extended header, which is read when it is whole.
    Extended(Vec<u8>),
}

impl<'w> Untar<'w> {
    /// An archive of at most `bytes_max` bytes of which these files are wanted.
    pub fn new(wanted: &'w [Wanted], ignored: &'w [&'w str], bytes_max: u64) -> Self {
        Untar { wanted, ignored, begun: Vec::new(), entries: 0, bytes_left: bytes_max, state: header() }
    }

    /// Takes some of what has arrived off its front.
    ///
    /// # Errors
    /// Says what of the archive is refused.
    pub fn take<'b>(&mut self, arrived: &mut &'b [u8]) -> Result<Found<'b>, String> {
        match &mut self.state {
            State::Header { block, filled } => {
                let taken = split(arrived, BLOCK_BYTES - *filled);
                block[*filled..*filled + taken.len()].copy_from_slice(taken);
                *filled += taken.len();
                if *filled < BLOCK_BYTES {
                    return Ok(Found::Nothing);
                }
                let block = **block;
                self.entry(&block)
            }
            State::Contents { left, padding, of } if *left > 0 => {
                let taken = split(arrived, usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= taken.len() as u64;
                let found = match of {
                    Contents::Wanted => Found::Bytes(taken),
                    Contents::PassedOver => Found::Nothing,
                    Contents::Extended(text) => {
                        text.extend_from_slice(taken);
                        if *left == 0 {
                            check_extended(text)?;
                        }
                        Found::Nothing
                    }
                };
                if *left == 0 && *padding == 0 {
                    self.state = header();
                }
                Ok(found)
            }
            State::Contents { padding, .. } => {
                let taken = split(arrived, *padding as usize);
                *padding -= taken.len() as u64;
                if *padding == 0 {
                    self.state = header();
                }
                Ok(Found::Nothing)
            }
            State::End => {
                if std::mem::take(arrived).iter().any(|byte| *byte != 0) {
                    return Err("the archive goes on after its end".into());
                }
                Ok(Found::Nothing)
            }
        }
    }

    /// Says that nothing comes any more.
    ///
    /// # Errors
    /// If the archive is not whole, or a file that is wanted is not in it.
    pub fn finish(self) -> Result<(), String> {
        if !matches!(self.state, State::End) {
            return Err("the archive ends before its end: two blocks of zeros are missing".into());
        }
        match self.wanted.iter().find(|wanted| !self.begun.contains(&wanted.name)) {
            Some(missing) => Err(format!("the archive has no {}", missing.name)),
            None => Ok(()),
        }
    }

    fn entry<'b>(&mut self, block: &[u8; BLOCK_BYTES]) -> Result<Found<'b>, String> {
        if block.iter().all(|byte| *byte == 0) {
            self.state = State::End;
            return Ok(Found::Nothing);
        }
        check_sum(block)?;
        self.entries += 1;
        if self.entries > limits::ARCHIVE_ENTRIES_MAX {
            return Err(format!("the archive has more than {} entries", limits::ARCHIVE_ENTRIES_MAX));
        }
        let name = name_of(block)?;
        let size = number(&block[124..136]).ok_or_else(|| format!("the size of {:?} is no number", shown(&name)))?;
        let padding = size.next_multiple_of(BLOCK_BYTES as u64).checked_sub(size).unwrap_or(u64::MAX);
        let whole = size.checked_add(padding).ok_or_else(|| format!("{:?} has {size} bytes", shown(&name)))?;
        let left = self.bytes_left.checked_sub(whole);
        self.bytes_left = left.ok_or_else(|| {
            format!("{:?} has {size} bytes, and {} are left of what an archive may have", shown(&name), self.bytes_left)
        })?;
        let refuse_extra = |what: &str| match size > limits::ARCHIVE_EXTRA_BYTES_MAX {
            true => Err(format!("{what} has {size} bytes; at most {} are passed over", limits::ARCHIVE_EXTRA_BYTES_MAX)),
            false => Ok(()),
        };
        let plain = name.strip_prefix("./").unwrap_or(&name);
        let (of, found) = match block[156] {
            b'0' | 0 => match self.wanted.iter().find(|wanted| wanted.name == plain) {
                Some(wanted) if self.begun.contains(&wanted.name) => {
                    return Err(format!("the archive has {} twice", wanted.name));
                }
                Some(wanted) if size > wanted.bytes_max => {
                    return Err(format!("{} has {size} bytes, above the limit of {}", wanted.name, wanted.bytes_max));
                }
                Some(wanted) => {
                    self.begun.push(wanted.name);
                    (Contents::Wanted, Found::File(wanted.name))
                }
                None if self.ignored.contains(&plain) => {
                    refuse_extra(plain)?;
                    (Contents::PassedOver, Found::Nothing)
                }
                None => {
                    let names: Vec<&str> = self.wanted.iter().map(|wanted| wanted.name).collect();
                    return Err(format!(
                        "the archive has {:?}, and may only have {} at its top",
                        shown(&name),
                        names.join(" and ")
                    ));
                }
            },
            b'5' if matches!(&*name, "." | "./") && size == 0 => (Contents::PassedOver, Found::Nothing),
            b'x' | b'g' => {
                refuse_extra("an extended header")?;
                (Contents::Extended(Vec::new()), Found::Nothing)
            }
            kind => {
                return Err(format!(
                    "{:?} is {} in the archive, not a regular file",
                    shown(&name),
                    match kind {
                        b'1' | b'2' => "a link",
                        b'5' => "a directory",
                        _ => "of another kind",
                    }
                ));
            }
        };
        self.state = if whole == 0 { header() } else { State::Contents { left: size, padding, of } };
        Ok(found)
    }
}

fn header() -> State {
    State::Header { block: Box::new([0; BLOCK_BYTES]), filled: 0 }
}

/// At most `len` bytes off the front.
fn split<'b>(bytes: &mut &'b [u8], len: usize) -> &'b [u8] {
    let (taken, rest) = bytes.split_at(len.min(bytes.len()));
    *bytes = rest;
    taken
}

/// The sum over a header, in which its own place counts as spaces.
fn check_sum(block: &[u8; BLOCK_BYTES]) -> Result<(), String> {
    let sum: u64 =
        block.iter().enumerate().map(|(at, byte)| u64::from(if (148..156).contains(&at) { b' ' } else { *byte })).sum();
    match number(&block[148..156]) {
        Some(said) if said == sum => Ok(()),
        _ => Err("this is no tar archive, or one that is damaged or compressed: the sum over a header is wrong".into()),
    }
}

fn name_of(block: &[u8; BLOCK_BYTES]) -> Result<String, String> {
    let text = |bytes: &[u8]| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8(bytes[..end].to_vec()).map_err(|_| "a name in the archive is no UTF-8".to_string())
    };
    let (name, is_posix) = (text(&block[..100])?, &block[257..263] == b"ustar\0");
    match is_posix && block[345] != 0 {
        true => Ok(format!("{}/{name}", text(&block[345..500])?)),
        false => Ok(name),
    }
}

/// A number as tar has it: octal digits, or after a bit of its own the bytes themselves.
fn number(field: &[u8]) -> Option<u64> {
    if let [first, rest @ ..] = field
        && first & 0x80 != 0
    {
        // No more than 63 bits are anything that there could be.
        let (high, low) = rest.split_at(rest.len().saturating_sub(8));
        let is_small = *first == 0x80 && high.iter().all(|byte| *byte == 0);
        let number = low.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        return is_small.then_some(number);
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() || !text.bytes().all(|byte| (b'0'..=b'7').contains(&byte)) {
        return None;
    }
    u64::from_str_radix(text, 8).ok()
}

/// Refuses what would change the name, the size or the kind of what comes next. `LENGTH KEY=VALUE\n`, one after another.
fn check_extended(text: &[u8]) -> Result<(), String> {
    const HARMLESS: [&str; 9] = ["atime", "comment", "ctime", "gid", "gname", "hdrcharset", "mtime", "uid", "uname"];
    let malformed = || "an extended header of the archive is malformed".to_string();
    let mut rest = text;
    while !rest.is_empty() {
        let space = rest.iter().position(|byte| *byte == b' ').ok_or_else(malformed)?;
        let len = std::str::from_utf8(&rest[..space]).ok().and_then(|digits| digits.parse::<usize>().ok());
        let len = len.filter(|len| *len > space + 1 && *len <= rest.len()).ok_or_else(malformed)?;
        let (record, after) = rest.split_at(len);
        if record.last() != Some(&b'\n') {
            return Err(malformed());
        }
        let equals = record[space..].iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
        let key = String::from_utf8_lossy(&record[space + 1..space + equals]);
        // Of a vendor's own, such as extended attributes.
        let is_of_vendor =
            key.split('.').next().is_some_and(|vendor| vendor.len() > 1 && vendor.bytes().all(|b| b.is_ascii_uppercase()))
                && key.contains('.')
                && !key.starts_with("GNU.");
        if !HARMLESS.contains(&&*key) && !is_of_vendor {
            return Err(format!("an extended header of the archive has {:?}, which is not read here", shown(&key)));
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
