//! A packed copy of a model's weights in one file, so that a second start neither reads the checkpoint nor packs it.
//!
//! The file is mapped, and stacks lie where the system has its pages, where those are huge: a product that streams weights from pages of 4 KiB loses a fifth to a third of the
//! bandwidth of one thread. Where they are not, stacks are copied into memory of their own by all threads. The bytes are checked as they pass in either case: both threads of a
//! small machine take 0.05 s for a GiB, and what is found after the start would be found too late.
//!
//! Layout, little-endian: [`MAGIC`], the key, how many bytes the file has, a CRC-32 of each piece of each stack, and the SHA-256 of all that; then the stacks, each from a multiple
//! of [`ALIGNMENT`] on. Where things are follows from the model, and nothing that the file says is a length of anything: it is what it must be, or the file is packed again. The
//! key is the SHA-256 of all that decides the bytes: what the system says of the checkpoint's files and some of what they hold, the configuration, the formats, the declaration of the
//! model's weights, the device's layout, and this program's version. Whoever can write to the directory can change the model, as whoever can write to the checkpoint's.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memmap2::{Advice, Mmap};
use sha2::{Digest, Sha256};
use strata_tensor::{Backend, DType, HostTensor, PACKED_PIECE_BYTES, SharedBytes, WeightFormat};
use strata_values::fill_pieces;

use crate::architectures::{Declaration, Stack, StackShape, Weights};
use crate::checkpoint::{Checkpoint, FileIdentity, open_own, write_by_one};
use crate::{Error, Result};

/// What the file begins with: another in every version of this layout.
const MAGIC: [u8; 8] = *b"STRATAW1";
/// Another whenever the weights that are made of the same files change: a number read otherwise, a tensor placed elsewhere. Copies of before are then of no use.
const READING: &str = "reading 2";
/// What stacks begin at multiples of: pages.
const ALIGNMENT: u64 = 4096;
/// What is written at a time, from a multiple of it on: so the system keeps the file in huge pages, where it can.
const WRITE_BYTES: usize = 8 << 20;
/// The longest part of a file's name that is taken from the model's.
const NAME_CHARS_MAX: usize = 80;

/// The copy of one model on one device.
pub(super) struct PackedCopy {
    path: PathBuf,
    key: [u8; 32],
    stacks: Vec<Placed>,
    /// Bytes before the first stack's alignment.
    header_bytes: u64,
    file_bytes: u64,
}

/// A stack in the file.
#[derive(Clone, Copy)]
struct Placed {
    shape: StackShape,
    offset: u64,
    bytes: usize,
    /// Bytes to a sum.
    piece_bytes: usize,
    /// The place of its first sum among all.
    first_sum: usize,
}

/// Why there are no weights in a file.
#[derive(Debug)]
pub(super) enum Unusable {
    /// There is no file.
    Missing,
    /// It is of other weights: the checkpoint has changed, or the program.
    Stale,
    /// It is not what was written.
    Damaged(String),
    /// The device refuses.
    Device(Error),
}

impl From<strata_tensor::Error> for Unusable {
    fn from(error: strata_tensor::Error) -> Self {
        Unusable::Device(error.into())
    }
}

impl PackedCopy {
    /// That of this model below `dir`. There is one file for each place of a checkpoint and format: a new one takes the place of the old.
    pub(super) fn of(
        dir: &Path,
        (source, checkpoint, config_json): (&Path, &Checkpoint, &str),
        declaration: &Declaration,
        format: WeightFormat,
        backend: &dyn Backend,
    ) -> Self {
        let mut key = Sha256::new();
        let texts = [env!("CARGO_PKG_VERSION"), READING, backend.packed_layout(), config_json, &declaration.describe(format)];
        for text in texts {
            key.update((text.len() as u64).to_le_bytes());
            key.update(text);
        }
        checkpoint.identify(&mut key);

        let (mut sums, mut stacks) = (0, Vec::new());
        for shape in declaration.stacks(format) {
            let bytes = shape.bytes(backend);
            let piece_bytes = match shape {
                StackShape::Matrices { .. } => PACKED_PIECE_BYTES,
                // Whole rows, which is what a tensor is read and written in.
                StackShape::Tensor { width, dtype, .. } => {
                    let row_bytes = (width * dtype.size_bytes()).max(1);
                    (PACKED_PIECE_BYTES / row_bytes).max(1) * row_bytes
                }
            };
            stacks.push(Placed { shape, offset: 0, bytes, piece_bytes, first_sum: sums });
            sums += bytes.div_ceil(piece_bytes);
        }
        let header_bytes = (MAGIC.len() + 32 + 8 + 4 * sums + 32) as u64;
        let mut end = header_bytes;
        for stack in &mut stacks {
            stack.offset = end.next_multiple_of(ALIGNMENT);
            end = stack.offset + stack.bytes as u64;
        }
        let path = dir.join(file_name(&source.canonicalize().unwrap_or_else(|_| source.into()), format));
        PackedCopy { path, key: key.finalize().into(), stacks, header_bytes, file_bytes: end.next_multiple_of(ALIGNMENT) }
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The weights in the file, if it is whole and of this key.
    pub(super) fn read(&self, backend: &dyn Backend, declaration: &Declaration) -> Result<Weights, Unusable> {
        let unreadable = |error: std::io::Error| Unusable::Damaged(error.to_string());
        let file = open_own(&self.path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Unusable::Missing,
            _ => unreadable(error),
        })?;
        self.read_from(&file, self.map(&file), backend, declaration)
    }

    /// As [`PackedCopy::read`], of a file that is mapped if that is of use.
    fn read_from(
        &self,
        file: &File,
        mapped: Option<Arc<Mmap>>,
        backend: &dyn Backend,
        declaration: &Declaration,
    ) -> Result<Weights, Unusable> {
        let len = file.metadata().map_err(|error| Unusable::Damaged(error.to_string()))?.len();
        let sums = self.read_header(file, len)?;
        let (mut matrices, mut tensors) = (Vec::new(), Vec::new());
        let wrong = OnceLock::new();
        for stack in &self.stacks {
            // Of the piece that begins at `first`.
            let check = |first: usize, piece: &[u8]| {
                let number = stack.first_sum + first / stack.piece_bytes;
                if crc32fast::hash(piece) != sums[number] {
                    let at = stack.offset + first as u64;
                    wrong.get_or_init(|| format!("its bytes from {at} on are not what was written"));
                }
            };
            let read = |first: usize, piece: &mut [u8]| match file.read_exact_at(piece, stack.offset + first as u64) {
                Ok(()) => check(first, piece),
                Err(error) => drop(wrong.get_or_init(|| error.to_string())),
            };
            match (stack.shape, &mapped) {
                (StackShape::Matrices { layers, in_features, out_features, format }, Some(map)) => {
                    let start = stack.offset as usize;
                    let bytes = SharedBytes::new(map.clone(), start..start + stack.bytes);
                    backend.on_threads(stack.bytes.div_ceil(stack.piece_bytes), &|i| {
                        let first = i * stack.piece_bytes;
                        check(first, &bytes[first..stack.bytes.min(first + stack.piece_bytes)]);
                    });
                    matrices.push(backend.packed_over(layers, in_features, out_features, format, bytes)?);
                }
                (StackShape::Matrices { .. }, None) => {
                    let mut own = stack.shape.allocate_matrices(backend).map_err(Unusable::Device)?;
                    backend.fill_packed(&mut own, &read)?;
                    matrices.push(own);
                }
                (StackShape::Tensor { rows, width, dtype }, _) => {
                    let mut own = stack.shape.allocate_tensor(backend).map_err(Unusable::Device)?;
                    for (first, rows) in runs(rows, width, dtype, stack.piece_bytes) {
                        let mut values = HostTensor::zeros(&[rows.len(), width], dtype);
                        let run = |count: usize, task: &(dyn Fn(usize) + Sync)| backend.on_threads(count, task);
                        fill_pieces(&run, values.bytes_mut(), stack.piece_bytes, &|i, piece| {
                            read(first + i * stack.piece_bytes, piece);
                        });
                        backend.upload(values.as_ref(), own.rows_mut(rows))?;
                    }
                    tensors.push(own);
                }
            }
            if let Some(wrong) = wrong.get() {
                return Err(Unusable::Damaged(wrong.clone()));
            }
        }
        Ok(declaration.of_stacks(matrices, tensors))
    }

    /// The sums of all pieces.
    fn read_header(&self, file: &File, len: u64) -> Result<Vec<u32>, Unusable> {
        let damaged = |what: String| Err(Unusable::Damaged(what));
        // Before memory is taken for it; how long it is follows from the model.
        if len < self.header_bytes {
            return damaged(format!("it has {len} bytes, and its header alone {}", self.header_bytes));
        }
        let mut header = vec![0; self.header_bytes as usize];
        if let Err(error) = file.read_exact_at(&mut header, 0) {
            return damaged(error.to_string());
        }
        let (head, rest) = header.split_at(MAGIC.len() + 32);
        if head[..MAGIC.len()] != MAGIC || head[MAGIC.len()..] != self.key {
            return Err(Unusable::Stale);
        }
        let (body, sum) = header.split_at(header.len() - 32);
        if Sha256::digest(body)[..] != *sum {
            return damaged("its header is not what was written".into());
        }
        if rest[..8] != self.file_bytes.to_le_bytes() || len != self.file_bytes {
            return damaged(format!("it has {len} bytes, not {}", self.file_bytes));
        }
        let sums = &body[MAGIC.len() + 32 + 8..];
        Ok(sums.as_chunks().0.iter().map(|&sum| u32::from_le_bytes(sum)).collect())
    }

    /// The file in memory, if it lies there in huge pages.
    fn map(&self, file: &File) -> Option<Arc<Mmap>> {
        // SAFETY: the mapping is read-only. Should another process truncate or rewrite the file, reads could fault or give other numbers: such files are only ever replaced by
        // others, as `docs/serving.md` asks of everyone.
        let map = unsafe { Mmap::map(file) }.ok().filter(|map| map.len() as u64 == self.file_bytes)?;
        #[cfg(target_os = "linux")]
        {
            // A system that does not know these words has no huge pages for files either.
            let _ = map.advise(Advice::HugePage);
            map.advise(Advice::PopulateRead).ok()?;
        }
        let huge = huge_bytes(&map)?;
        (huge >= map.len() / 16 * 15).then(|| Arc::new(map))
    }

    /// Writes the file. Whether it did: not if another process is at it. What was there before is of no use to anyone, and makes room if there is too little for both.
    ///
    /// # Errors
    /// If the device or the file system refuses.
    pub(super) fn write(&self, backend: &dyn Backend, weights: &Weights) -> Result<bool> {
        write_by_one(&self.path, |file| in_place_of(&self.path, || self.write_to(file, backend, weights)))
    }

    /// Writes it from the beginning of an open file on.
    fn write_to(&self, mut file: &File, backend: &dyn Backend, weights: &Weights) -> Result<()> {
        let io_error = |source| Error::Io { path: self.path.clone(), source };
        file.set_len(0).and_then(|()| file.rewind()).map_err(io_error)?;
        let mut out = Blocks { file, block: Vec::with_capacity(WRITE_BYTES), sums: Vec::new(), put: 0, failed: None };
        // The header takes its place when the sums are known.
        out.pad_to(self.header_bytes);
        for (stack, placed) in weights.stacks().zip(&self.stacks) {
            out.pad_to(placed.offset);
            match stack {
                Stack::Matrices(matrices) => backend.read_packed(matrices, &mut |piece| out.put_piece(piece))?,
                Stack::Tensor(tensor) => {
                    let StackShape::Tensor { rows, width, dtype } = placed.shape else { unreachable!("stacks are in order") };
                    for (_, rows) in runs(rows, width, dtype, placed.piece_bytes) {
                        let values = backend.to_host(tensor.as_ref().rows(rows))?;
                        values.as_ref().as_bytes().chunks(placed.piece_bytes).for_each(|piece| out.put_piece(piece));
                    }
                }
            }
        }
        out.pad_to(self.file_bytes);
        out.flush();
        let Blocks { sums, failed, .. } = out;
        if let Some(error) = failed {
            return Err(io_error(error));
        }
        let mut header = [&MAGIC[..], &self.key, &self.file_bytes.to_le_bytes()].concat();
        sums.iter().for_each(|sum| header.extend(sum.to_le_bytes()));
        let sum = Sha256::digest(&header);
        header.extend(sum);
        assert_eq!(header.len() as u64, self.header_bytes, "a sum for every piece");
        file.write_all_at(&header, 0).map_err(io_error)
    }
}

/// The name of the copy of a checkpoint in this place. In every version it is the same, so that the copy of a new one takes the place of the old.
fn file_name(place: &Path, format: WeightFormat) -> String {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = name.trim_start_matches('.').chars().take(NAME_CHARS_MAX).map(plain).collect();
    let mut whose = Sha256::new();
    whose.update(format!("{format:?} "));
    whose.update(place.as_os_str().as_encoded_bytes());
    let whose: String = whose.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{name}-{whose}.packed")
}

/// Writes what comes in the place of a useless file, and if there is no room for both, removes that and tries again.
fn in_place_of(useless: &Path, write: impl Fn() -> Result<()>) -> Result<()> {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    match write() {
        Err(Error::Io { source, .. })
            if matches!(source.kind(), StorageFull | QuotaExceeded) && std::fs::remove_file(useless).is_ok() =>
        {
            write()
        }
        other => other,
    }
}

/// Rows of a tensor that are read or written at a time, and the first byte of them: whole pieces.
fn runs(rows: usize, width: usize, dtype: DType, piece_bytes: usize) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    /// Pieces to a run.
    const PIECES: usize = 32;
    let row_bytes = (width * dtype.size_bytes()).max(1);
    let run = piece_bytes / row_bytes * PIECES;
    (0..rows).step_by(run.max(1)).map(move |first| (first * row_bytes, first..rows.min(first + run)))
}

/// A file that is written from front to back in large blocks.
struct Blocks<'f> {
    file: &'f File,
    block: Vec<u8>,
    sums: Vec<u32>,
    put: u64,
    /// Why nothing is written any more.
    failed: Option<std::io::Error>,
}

impl Blocks<'_> {
    /// One piece of a stack.
    fn put_piece(&mut self, piece: &[u8]) {
        self.sums.push(crc32fast::hash(piece));
        self.put(piece);
    }

    fn put(&mut self, mut bytes: &[u8]) {
        self.put += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(WRITE_BYTES - self.block.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == WRITE_BYTES {
                self.flush();
            }
        }
    }

    /// Zeros up to this place.
    fn pad_to(&mut self, place: u64) {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.put < place {
            self.put(&ZEROS[..(place - self.put).min(4096) as usize]);
        }
    }

    fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = (&*self.file).write_all(&self.block).err();
        }
        self.block.clear();
    }
}

/// How many bytes of a mapping the system has in huge pages; `None` if it does not say.
fn huge_bytes(map: &Mmap) -> Option<usize> {
    let start = format!("{:x}-", map.as_ptr() as usize);
    let all = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let own = all.lines().skip_while(|line| !line.starts_with(&start));
    let huge = own.take_while(|line| !line.starts_with("VmFlags")).find_map(|line| line.strip_prefix("FilePmdMapped:"))?;
    huge.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// A packed copy that is not written yet.
pub struct UnwrittenCopy {
    copy: PackedCopy,
    weights: Arc<Weights>,
    backend: Arc<dyn Backend>,
    /// What the weights were read from.
    files: Vec<(PathBuf, FileIdentity)>,
}

impl UnwrittenCopy {
    pub(super) fn new(copy: PackedCopy, weights: Arc<Weights>, backend: Arc<dyn Backend>, checkpoint: &Checkpoint) -> Self {
        let files = checkpoint.files().map(|(path, identity)| (path.into(), identity.clone())).collect();
        UnwrittenCopy { copy, weights, backend, files }
    }

    /// Where it is to be.
    pub fn path(&self) -> &Path {
        self.copy.path()
    }

    /// Writes it, which takes as long as the disk needs for the weights; the model can be used meanwhile. Whether it did: another process may be at it.
    ///
    /// # Errors
    /// If the checkpoint has been changed since it was opened, or the device or the file system refuses. A start without a copy, or with an old one, is then as before.
    pub fn write(self) -> Result<bool> {
        if let Some((path, _)) = self.files.iter().find(|(path, identity)| !identity.is_at(path)) {
            return Err(Error::Checkpoint {
                path: path.clone(),
                message: "the file was changed while the model was loaded".into(),
            });
        }
        self.copy.write(&*self.backend, &self.weights)
    }
}

#[cfg(test)]
mod tests;
