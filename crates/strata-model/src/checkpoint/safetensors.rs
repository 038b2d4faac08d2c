//! Weights in safetensors files: `model.safetensors`, or shards listed by `model.safetensors.index.json`.
//!
//! Files are mapped, not read: a tensor costs memory only while it is converted. Nothing in them is believed: the
//! `safetensors` crate checks headers against the length of the file, and the index is checked here against the shards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::Mmap;
use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use sha2::Digest;

use super::limits::open_regular;
use super::{JsonInto, SourceDType, SourceTensor, json_memory_bytes, read_text};
use crate::error::cut;
use crate::{Error, Result};

/// What a header may be, before it is parsed.
#[derive(Clone, Copy)]
struct HeaderMax {
    /// Tensors of the file. One costs about a kilobyte while a header is read.
    tensors: usize,
    bytes: usize,
}

/// Of a file of a model: a mixture of experts in four bits has three or four tensors for each matrix of an expert, Qwen3-30B-A3B 75 thousand, and they may lie in one file. A hostile header
/// takes some 130 MB, of whoever has chosen to serve it.
const OF_MODEL: HeaderMax = HeaderMax { tensors: 131_072, bytes: 16 << 20 };
/// Of a file by itself, of an adapter, which may come from a client: some 40 MB.
const OF_FILE: HeaderMax = HeaderMax { tensors: 32_768, bytes: 8 << 20 };
/// The most tensors of a checkpoint in several files: Qwen3-235B-A22B as GPTQ writes it has four for each matrix of an expert, 146 thousand.
const ALL_TENSORS_MAX: usize = 262_144;
/// The largest `model.safetensors.index.json`: 128 bytes for each of [`ALL_TENSORS_MAX`].
const INDEX_BYTES_MAX: usize = 32 << 20;
/// The longest name of a tensor, and its most dimensions.
const NAME_BYTES_MAX: usize = 512;
const DIMENSIONS_MAX: usize = 8;
/// The most shards of a checkpoint.
const SHARDS_MAX: usize = 4096;
/// What is asked of the disk beyond the tensor that is read.
const AHEAD_BYTES: usize = 64 << 20;
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

// Safetensors files are little-endian, and tensors are viewed in place.
const _: () = assert!(cfg!(target_endian = "little"));

/// The tensors of a checkpoint, by name.
pub struct Checkpoint {
    path: PathBuf,
    shards: Vec<ShardBytes>,
    /// Where each shard was opened from.
    files: Vec<PathBuf>,
    /// What each was when it was opened; none of a part of the program.
    identities: Vec<FileIdentity>,
    tensors: BTreeMap<String, Entry>,
}

/// A tensor of any dtype as it lies in a file.
pub(crate) struct StoredTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
}

/// What tells a file from another, and from itself after it was written to: its device and number there, its size, and when its contents and its entry were changed, in
/// nanoseconds. The last cannot be set by whoever puts another's times on a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity([u64; 7]);

impl FileIdentity {
    fn of(m: &Metadata) -> Self {
        let [modified, changed] = [(m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())];
        let times = [modified.0, modified.1, changed.0, changed.1].map(|time| time as u64);
        FileIdentity([m.dev(), m.ino(), m.size(), times[0], times[1], times[2], times[3]])
    }

    /// Whether the file that has this name now is this one, unchanged.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|m| FileIdentity::of(&m) == *self)
    }

    fn bytes(&self) -> impl Iterator<Item = [u8; 8]> {
        self.0.into_iter().map(u64::to_le_bytes)
    }
}

enum ShardBytes {
    /// And up to where it was asked to be read ahead.
    Mapped(Mmap, AtomicUsize),
    Static(&'static [u8]),
}

struct Entry {
    shard: usize,
    bytes: Range<usize>,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Checkpoint {
    /// Opens the weights of a model directory. The files must not change while they are open.
    ///
    /// # Errors
    /// If there are no weights, a file is missing, truncated or malformed, or index and shards disagree.
    pub fn open(dir: &Path) -> Result<Self> {
        // What is there under these names and is no file is refused by its name when it is opened.
        let single = dir.join(SINGLE_FILE);
        if single.symlink_metadata().is_ok() {
            return Self::open_one(&single, OF_MODEL);
        }
        if dir.join(INDEX_FILE).symlink_metadata().is_ok() {
            return Self::open_sharded(dir);
        }
        let message = format!("the directory holds neither {SINGLE_FILE} nor {INDEX_FILE}");
        Err(Error::Checkpoint { path: dir.into(), message })
    }

    /// Opens one safetensors file by itself, with a header of 8 MiB and 32,768 tensors at most. It must not change while it is open.
    ///
    /// # Errors
    /// If the file cannot be read, or is truncated or malformed.
    pub fn open_file(path: &Path) -> Result<Self> {
        Self::open_one(path, OF_FILE)
    }

    fn open_one(path: &Path, max: HeaderMax) -> Result<Self> {
        let mut checkpoint = Self::empty(path);
        checkpoint.add_shard(map(path)?, path, max)?;
        Ok(checkpoint)
    }

    /// Reads a safetensors file that is part of the program; `name` is for error messages.
    ///
    /// # Errors
    /// If the bytes are not a whole safetensors file.
    pub fn from_static(bytes: &'static [u8], name: &str) -> Result<Self> {
        let mut checkpoint = Self::empty(Path::new(name));
        checkpoint.add_shard((ShardBytes::Static(bytes), None), Path::new(name), OF_MODEL)?;
        Ok(checkpoint)
    }

    /// The file or directory it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the first file's metadata has under this key.
    pub fn metadata(&self, key: &str) -> Option<String> {
        let (_, header) = SafeTensors::read_metadata(self.shards.first()?.bytes()).ok()?;
        header.metadata().as_ref()?.get(key).cloned()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The files, each with its tensors, sorted by name.
    pub(crate) fn stored(&self) -> Vec<(&Path, Vec<StoredTensor<'_>>)> {
        let mut files: Vec<_> = self.files.iter().map(|file| (&**file, Vec::new())).collect();
        for (name, entry) in &self.tensors {
            let bytes = &self.shards[entry.shard].bytes()[entry.bytes.clone()];
            files[entry.shard].1.push(StoredTensor { name, dtype: entry.dtype, shape: &entry.shape, bytes });
        }
        files
    }

    /// The files, each as it was when it was opened.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, &FileIdentity)> {
        self.files.iter().map(|path| &**path).zip(&self.identities)
    }

    /// Tells `hash` of everything by which these files can be told from others without reading them: names, what the system says of them, their headers, and some of what they
    /// hold, for systems that say little.
    pub(crate) fn identify(&self, hash: &mut impl Digest) {
        /// Places in a file that are looked at, and bytes there.
        const SAMPLES: usize = 16;
        const SAMPLE_BYTES: usize = 4096;
        hash.update((self.identities.len() as u64).to_le_bytes());
        for ((path, identity), shard) in self.files().zip(&self.shards) {
            let (name, bytes) = (path.file_name().unwrap_or_default().as_encoded_bytes(), shard.bytes());
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            identity.bytes().for_each(|word| hash.update(word));
            // What says how long the header is was checked when the file was opened.
            let header = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len) as usize);
            hash.update(&bytes[..bytes.len().min(8 + header)]);
            for sample in 0..SAMPLES {
                let start = bytes.len().saturating_sub(SAMPLE_BYTES) / (SAMPLES - 1) * sample;
                hash.update(&bytes[start..bytes.len().min(start + SAMPLE_BYTES)]);
            }
        }
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor; `None` if there is none.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| &entry.shape[..])
    }

    /// A tensor by name; `None` if there is none.
    ///
    /// # Errors
    /// If its dtype is not one of [`SourceDType`].
    pub fn tensor(&self, name: &str) -> Result<Option<SourceTensor<'_>>> {
        let Some((name, entry)) = self.tensors.get_key_value(name) else { return Ok(None) };
        let dtype = source_dtype(entry.dtype).ok_or_else(|| {
            self.error(format!("tensor {name} has dtype {}; supported: F32, BF16, F16, F8_E4M3", entry.dtype))
        })?;
        let bytes = &self.shards[entry.shard].bytes()[entry.bytes.clone()];
        Ok(Some(SourceTensor { name, shape: &entry.shape, dtype, bytes }))
    }

    /// Lets names that begin with `from` begin with `to` in its place. Whether there are any.
    ///
    /// # Errors
    /// If there is a tensor of such a name already.
    pub(crate) fn rename(&mut self, from: &str, to: &str) -> Result<bool> {
        let old: Vec<String> = self.tensors.keys().filter(|name| name.starts_with(from)).cloned().collect();
        let any = !old.is_empty();
        for name in old {
            let new = format!("{to}{}", &name[from.len()..]);
            if self.tensors.contains_key(&new) {
                return Err(self.error(format!("tensors {name} and {new} are one parameter")));
            }
            let entry = self.tensors.remove(&name).expect("the names are those of tensors");
            self.tensors.insert(new, entry);
        }
        Ok(any)
    }

    /// Has the system read a tensor, which is read next, and what follows it in its file, which is likely to come after it: the disk works while what it has given is
    /// converted.
    pub(crate) fn expect(&self, name: &str) {
        #[cfg(unix)]
        if let Some(entry) = self.tensors.get(name)
            && let ShardBytes::Mapped(map, asked) = &self.shards[entry.shard]
        {
            let (from, end) = (
                asked.load(Ordering::Relaxed).max(entry.bytes.start),
                entry.bytes.end.saturating_add(AHEAD_BYTES).min(map.len()),
            );
            // In large steps: to ask is to look up every page.
            if end > from && (end - from >= AHEAD_BYTES / 2 || from < entry.bytes.end) {
                // A refusal costs time and nothing else.
                let _ = map.advise_range(memmap2::Advice::WillNeed, from, end - from);
                asked.store(end, Ordering::Relaxed);
            }
        }
    }

    /// Lets the system have the memory of bytes `part` of a tensor, which have been read and will not be read soon. They are read from the file
    /// again if they are.
    pub(crate) fn forget(&self, name: &str, part: Range<usize>) {
        #[cfg(unix)]
        if let Some(entry) = self.tensors.get(name)
            && let ShardBytes::Mapped(map, _) = &self.shards[entry.shard]
        {
            let part = entry.bytes.start + part.start..entry.bytes.end.min(entry.bytes.start + part.end);
            // SAFETY: nobody writes to the mapping, so that what is dropped of it comes back the same. A refusal costs memory and nothing else.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, part.start, part.len()) };
        }
    }

    /// As [`Checkpoint::forget`], all of a tensor.
    pub(crate) fn forget_all(&self, name: &str) {
        let len = self.tensors.get(name).map_or(0, |entry| entry.bytes.len());
        self.forget(name, 0..len);
    }

    /// The number that a tensor of one u64 holds; `None` if there is no such tensor, the error if it is something else.
    pub(crate) fn count(&self, name: &str) -> Option<Result<u64, String>> {
        let entry = self.tensors.get(name)?;
        let bytes = &self.shards[entry.shard].bytes()[entry.bytes.clone()];
        match (entry.dtype, bytes.try_into()) {
            (Dtype::U64, Ok(bytes)) => Some(Ok(u64::from_le_bytes(bytes))),
            _ => Some(Err(format!("tensor {name} has dtype {} and shape {:?}, expected one U64", entry.dtype, entry.shape))),
        }
    }

    /// The bytes of a tensor of one of these dtypes and this shape; `None` if there is no such tensor, the error if it is something else.
    pub(crate) fn plain(&self, name: &str, dtypes: &[Dtype], shape: &[usize]) -> Option<Result<&[u8], String>> {
        let entry = self.tensors.get(name)?;
        if !dtypes.contains(&entry.dtype) || entry.shape != shape {
            let (dtype, actual) = (entry.dtype, &entry.shape);
            let expected = dtypes.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ");
            return Some(Err(format!(
                "tensor {name} has dtype {dtype} and shape {actual:?}, expected {expected} and {shape:?}"
            )));
        }
        Some(Ok(&self.shards[entry.shard].bytes()[entry.bytes.clone()]))
    }

    /// An error about this checkpoint.
    pub(crate) fn error(&self, message: String) -> Error {
        Error::Checkpoint { path: self.path.clone(), message }
    }

    fn empty(path: &Path) -> Self {
        Checkpoint {
            path: path.into(),
            shards: Vec::new(),
            files: Vec::new(),
            identities: Vec::new(),
            tensors: BTreeMap::new(),
        }
    }

    fn open_sharded(dir: &Path) -> Result<Self> {
        let mut checkpoint = Self::empty(dir);
        let shards = read_index(&dir.join(INDEX_FILE))?;
        for (file, names) in &shards {
            let path = dir.join(file);
            let held = checkpoint.add_shard(map(&path)?, &path, OF_MODEL)?;
            let missing: Vec<_> = names.difference(&held).map(String::as_str).collect();
            let unlisted: Vec<_> = held.difference(names).map(String::as_str).collect();
            let complain = |what: &str, names: &[&str]| {
                let message = format!("{what} according to {INDEX_FILE}: {}", list_names(names));
                Err(Error::Checkpoint { path: path.clone(), message })
            };
            if !missing.is_empty() {
                return complain("the shard lacks tensors that it holds", &missing);
            }
            if !unlisted.is_empty() {
                return complain("the shard holds tensors that it does not", &unlisted);
            }
        }
        Ok(checkpoint)
    }

    /// Adds the tensors of a file and returns their names.
    fn add_shard(
        &mut self,
        (bytes, identity): (ShardBytes, Option<FileIdentity>),
        path: &Path,
        max: HeaderMax,
    ) -> Result<BTreeSet<String>> {
        let error = |message: String| Error::Checkpoint { path: path.into(), message };
        let data = bytes.bytes();
        check_header(data, max).map_err(error)?;
        let file = SafeTensors::deserialize(data).map_err(|e| error(what_is_wrong(data, &e)))?;
        let mut names = BTreeSet::new();
        for (name, view) in file.iter() {
            check_tensor(name, view.shape()).map_err(error)?;
            let start = view.data().as_ptr() as usize - data.as_ptr() as usize;
            let entry = Entry {
                shard: self.shards.len(),
                bytes: start..start + view.data().len(),
                shape: view.shape().to_vec(),
                dtype: view.dtype(),
            };
            if self.tensors.insert(name.to_string(), entry).is_some() {
                return Err(error(format!("tensor {name} is also in another shard")));
            }
            names.insert(name.to_string());
        }
        if names.len() > max.tensors {
            return Err(error(format!("it holds {} tensors, more than {}", names.len(), max.tensors)));
        }
        if self.tensors.len() > ALL_TENSORS_MAX {
            let all = self.tensors.len();
            return Err(error(format!("with this file there are {all} tensors, more than {ALL_TENSORS_MAX}")));
        }
        self.shards.push(bytes);
        self.files.push(path.into());
        self.identities.extend(identity);
        Ok(names)
    }
}

impl ShardBytes {
    fn bytes(&self) -> &[u8] {
        match self {
            ShardBytes::Mapped(map, _) => map,
            ShardBytes::Static(bytes) => bytes,
        }
    }
}

fn map(path: &Path) -> Result<(ShardBytes, Option<FileIdentity>)> {
    let io_error = |source| Error::Io { path: path.into(), source };
    let file = open_regular(path)?;
    // SAFETY: the mapping is read-only and private to this object. Should another process truncate or rewrite the file meanwhile,
    // reads could fault or give other numbers; that files of a model in use are left alone is a condition of `open`.
    let map = unsafe { Mmap::map(&file) }.map_err(io_error)?;
    let identity = FileIdentity::of(&file.metadata().map_err(io_error)?);
    Ok((ShardBytes::Mapped(map, AtomicUsize::new(0)), Some(identity)))
}

/// Checks that a file of a model is a whole safetensors file: that it is as long as its header says.
pub(super) fn check_whole(path: &Path) -> Result<()> {
    Checkpoint::open_one(path, OF_MODEL).map(drop)
}

/// What is wrong with a file that is not a whole safetensors file: of a tensor its name, of a file that has been cut off how long it should be.
fn what_is_wrong(data: &[u8], error: &SafeTensorError) -> String {
    let more = match (error, entries_of(data)) {
        (SafeTensorError::TensorInvalidInfo, Some((entries, _))) => entries.iter().find_map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let elements = info.shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n))?;
            let bytes = elements.checked_mul(info.dtype.bitsize())? / 8;
            let is_wrong = end.checked_sub(start) != Some(bytes);
            is_wrong.then(|| {
                format!("tensor {name} of {:?} {:?} is {bytes} bytes, and lies in {start}..{end}", info.dtype, info.shape)
            })
        }),
        (SafeTensorError::MetadataIncompleteBuffer, Some((entries, first))) => {
            let end = entries.iter().map(|(_, info)| info.data_offsets.1).max().unwrap_or(0);
            Some(format!("it has {} bytes where its header says {}", data.len(), first.saturating_add(end)))
        }
        _ => None,
    };
    /// Of what is quoted of a header.
    const CHARS_MAX: usize = 1000;
    cut(format!("not a whole safetensors file: {}", more.unwrap_or_else(|| error.to_string())), CHARS_MAX)
}

/// Refuses what no tensor of a model is called, and shapes that none has: both are repeated in errors.
fn check_tensor(name: &str, shape: &[usize]) -> Result<(), String> {
    const CHARS_MAX: usize = 100;
    let shown = || cut(format!("{name:?}"), CHARS_MAX);
    if name.len() > NAME_BYTES_MAX {
        return Err(format!("tensor {} has a name of {} bytes; at most {NAME_BYTES_MAX} are read", shown(), name.len()));
    }
    if name.contains(char::is_control) {
        return Err(format!("tensor {} has a control character in its name", shown()));
    }
    if shape.len() > DIMENSIONS_MAX {
        return Err(format!("tensor {} has {} dimensions; at most {DIMENSIONS_MAX} are read", shown(), shape.len()));
    }
    Ok(())
}

/// The most bytes of memory that opening a file takes, by its header, of which there is no more than is read. What is no whole file is for whoever opens it to refuse.
pub(crate) fn header_memory_bytes(path: &Path) -> Result<u64> {
    let (bytes, _) = map(path)?;
    let Some((length, rest)) = bytes.bytes().split_first_chunk() else { return Ok(0) };
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    Ok(json_memory_bytes(&rest[..rest.len().min(length).min(OF_FILE.bytes)], JsonInto::Known))
}

/// The tensors of a header by name, whatever it says of them, and where the first would begin.
fn entries_of(data: &[u8]) -> Option<(Vec<(String, TensorInfo)>, usize)> {
    let (length, rest) = data.split_first_chunk()?;
    let header = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let all: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let tensors = all.into_iter().filter(|(name, _)| name != "__metadata__");
    let entries = tensors.map(|(name, info)| Some((name, serde_json::from_value(info).ok()?))).collect::<Option<_>>()?;
    Some((entries, data.len() - rest.len() + header.len()))
}

/// Refuses a header that would take much memory to parse, before it is.
fn check_header(data: &[u8], max: HeaderMax) -> Result<(), String> {
    let Some((length, rest)) = data.split_first_chunk() else {
        return Err(format!("not a whole safetensors file: {} bytes", data.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > max.bytes as u64 {
        return Err(format!("not a safetensors file of a model: its header of {length} bytes is longer than {}", max.bytes));
    }
    // A tensor's entry has four keys: its name, dtype, shape and offsets.
    check_entries(&rest[..rest.len().min(length as usize)], 4, max.tensors)
}

/// Refuses JSON with more than `max` entries of `keys_each` keys. Every key is followed by a colon, so no more can be parsed.
fn check_entries(json: &[u8], keys_each: usize, max: usize) -> Result<(), String> {
    /// Keys beside those of the entries: the metadata, and colons in names.
    const OTHER_KEYS_MAX: usize = 4096;
    let keys = json.iter().filter(|&&byte| byte == b':').count();
    if keys > max * keys_each + OTHER_KEYS_MAX {
        return Err(format!("lists about {} tensors, more than {max}", keys / keys_each));
    }
    Ok(())
}

/// The `weight_map` of an index, turned around: for each shard file the names of its tensors.
pub(super) fn read_index(path: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let error = |message: String| Error::Checkpoint { path: path.into(), message };
    let text = read_text(path, INDEX_BYTES_MAX as u64)?;
    check_entries(text.as_bytes(), 1, ALL_TENSORS_MAX).map_err(error)?;
    let index: Index = serde_json::from_str(&text).map_err(|e| error(e.to_string()))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, file) in index.weight_map {
        if !is_plain_file_name(&file) {
            return Err(error(format!("the shard of {name} is {file:?}, not a plain *.safetensors file name")));
        }
        shards.entry(file).or_default().insert(name);
    }
    if shards.is_empty() || shards.len() > SHARDS_MAX {
        return Err(error(format!("lists {} shards, not between 1 and {SHARDS_MAX}", shards.len())));
    }
    Ok(shards)
}

/// Whether a name from an index stays within the directory of the index.
fn is_plain_file_name(file: &str) -> bool {
    file.ends_with(".safetensors") && !file.starts_with('.') && !file.contains(['/', '\\', ':', '\0'])
}

/// Names for an error message: the first, and how many more there are. Those of a layer or two fit.
pub(crate) fn list_names(names: &[&str]) -> String {
    const NAMES_MAX: usize = 32;
    const CHARS_MAX: usize = 4000;
    let listed = cut(names[..names.len().min(NAMES_MAX)].join(", "), CHARS_MAX);
    match names.len().checked_sub(NAMES_MAX) {
        None | Some(0) => listed,
        Some(more) => format!("{listed} and {more} more"),
    }
}

/// The type of elements that weights may have.
pub(crate) fn source_dtype(dtype: Dtype) -> Option<SourceDType> {
    match dtype {
        Dtype::F32 => Some(SourceDType::F32),
        Dtype::BF16 => Some(SourceDType::BF16),
        Dtype::F16 => Some(SourceDType::F16),
        Dtype::F8_E4M3 => Some(SourceDType::F8E4M3),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
