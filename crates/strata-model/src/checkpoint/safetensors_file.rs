//! Writing safetensors files: the header first, and then a tensor after another, each when its turn comes.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use safetensors::Dtype;
use serde_json::json;

use crate::{Error, Result};

/// What tensors' data begin at multiples of.
const ALIGNMENT: usize = 8;

/// Puts a tensor into a file.
pub type WriteTensor<'a> = dyn FnOnce(&mut Sink<'_>) -> Result<()> + 'a;

/// A tensor to be written.
pub struct WrittenTensor<'a> {
    /// Its name in the file.
    pub name: String,
    /// Of its elements.
    pub dtype: Dtype,
    /// Outermost axis first.
    pub shape: Vec<usize>,
    /// Puts its elements into the file, little-endian and row-major, in as many pieces as it likes.
    pub write: Box<WriteTensor<'a>>,
}

impl WrittenTensor<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Where the elements of a tensor go.
pub struct Sink<'f> {
    file: BufWriter<File>,
    path: &'f Path,
    put: usize,
}

impl Sink<'_> {
    /// Some bytes more.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.put += bytes.len();
        self.file.write_all(bytes).map_err(|source| Error::Io { path: self.path.into(), source })
    }
}

/// Writes a file with this metadata, in the place of what the file that is there has. The same tensors make the same bytes, in whatever order they are given.
///
/// # Errors
/// If the file system refuses, or a tensor cannot be had.
///
/// # Panics
/// If a tensor puts other than the bytes that its shape has.
pub fn write_safetensors(path: &Path, metadata: &[(&str, &str)], mut tensors: Vec<WrittenTensor<'_>>) -> Result<()> {
    // Wide elements first, so that all are aligned.
    tensors.sort_by(|a, b| b.dtype.bitsize().cmp(&a.dtype.bitsize()).then_with(|| a.name.cmp(&b.name)));
    let of_metadata: Vec<String> = metadata.iter().map(|(key, value)| format!("{}:{}", json!(key), json!(value))).collect();
    let mut header = format!("{{\"__metadata__\":{{{}}}", of_metadata.join(","));
    let mut end = 0;
    for tensor in &tensors {
        let start = end;
        end += tensor.bytes();
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.push_str(&format!(",{}:{entry}", json!(tensor.name)));
    }
    header.push('}');
    header.push_str(&" ".repeat(header.len().next_multiple_of(ALIGNMENT) - header.len()));

    let io_error = |source| Error::Io { path: path.into(), source };
    let file = File::create(path).map_err(io_error)?;
    let mut sink = Sink { file: BufWriter::with_capacity(1 << 20, file), path, put: 0 };
    sink.put(&(header.len() as u64).to_le_bytes())?;
    sink.put(header.as_bytes())?;
    for tensor in tensors {
        let (bytes, before) = (tensor.bytes(), sink.put);
        (tensor.write)(&mut sink)?;
        assert_eq!(sink.put - before, bytes, "bytes of tensor {}", tensor.name);
    }
    sink.file.flush().map_err(io_error)
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn tensor<'a>(name: &str, dtype: Dtype, shape: &[usize], bytes: &'a [u8]) -> WrittenTensor<'a> {
        let write = Box::new(move |sink: &mut Sink<'_>| bytes.chunks(3).try_for_each(|piece| sink.put(piece)));
        WrittenTensor { name: name.into(), dtype, shape: shape.into(), write }
    }

    #[test]
    fn a_file_is_what_others_read_and_the_same_whatever_the_order() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let bytes: Vec<u8> = (0..24).collect();
        let all = || {
            [
                tensor("z \"quoted\"", Dtype::F32, &[2, 3], &bytes),
                tensor("odd", Dtype::U8, &[3], &bytes[..3]),
                tensor("count", Dtype::U64, &[], &bytes[..8]),
                tensor("b", Dtype::BF16, &[0, 7], &[]),
            ]
        };
        let metadata = [("format", "pt"), ("form", "peft")];
        write_safetensors(&a, &metadata, all().into()).unwrap();
        write_safetensors(&b, &metadata, all().into_iter().rev().collect()).unwrap();
        let written = std::fs::read(&a).unwrap();
        assert_eq!(written, std::fs::read(&b).unwrap());
        let file = SafeTensors::deserialize(&written).unwrap();
        assert_eq!(file.tensor("z \"quoted\"").unwrap().data(), &bytes[..]);
        assert_eq!((file.tensor("odd").unwrap().dtype(), file.tensor("odd").unwrap().data()), (Dtype::U8, &bytes[..3]));
        assert_eq!(file.tensor("b").unwrap().shape(), [0, 7]);
        let start = file.tensor("z \"quoted\"").unwrap().data().as_ptr() as usize - written.as_ptr() as usize;
        assert_eq!(start % 4, 0);
        let (_, header) = SafeTensors::read_metadata(&written).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["form"], "peft");
    }
}
