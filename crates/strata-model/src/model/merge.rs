//! A checkpoint with an adapter added to its weights: `W + scale · B·A`, computed in f32 and rounded once.
//!
//! What is written has the names, the layouts and the shards of the base, and everything else that the base has: the part that sees, layers for further tokens, the tokenizer. Two things
//! are otherwise. Weights in bytes or in four bits are written as the numbers that they stand for, for a sum of them and a product has no such form. And where a model ties its unembedding to
//! its embedding and the adapter has a pair of either, they are two tensors from then on.
//!
//! Of the base, one run of rows is in memory at a time.

mod delta;
mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use strata_tensor::{Backend, DType};
use strata_values::{Lies, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, add_pairs, alone, dequantize_mxfp4, rounded, turned};

use super::stored_matrix::{StoredMatrix, scales_name};
use super::weights::{Mxfp4, SLICE_ELEMENTS, account_for, check_tied, fused_in, is_flipped, tensors_of};
use crate::architectures::{Form, for_each_parameter, lora_modules};
use crate::checkpoint::{
    Checkpoint, CheckpointReader, Int4Tensors, SINGLE_FILE, Sink, SourceDType, StoredTensor, WrittenTensor, source_dtype,
    write_safetensors,
};
use crate::lora::{LoraConfig, LoraModule, LoraParams, Part};
use crate::{ModelConfig, ModelSource, Result};
use delta::Addend;

const EMBEDDING: &str = "model.embed_tokens.weight";
const UNEMBEDDING: &str = "lm_head.weight";

/// Writes the checkpoint of `base` with an adapter added to it into a directory that exists, for transformers and for everything else that reads such a directory. `dtype`: of all its
/// weights; `None`: each has the base's, and what was quantized that of the norms.
///
/// # Errors
/// If the base is not one that could be loaded, a sum is infinite in its dtype, or a file cannot be read or written.
pub fn write_merged(
    backend: &dyn Backend,
    base: &ModelSource,
    (config, params): (&LoraConfig, &LoraParams),
    dtype: Option<DType>,
    dir: &Path,
) -> Result<()> {
    let model = base.config()?;
    let named = tensors_of(base, &model)?;
    account_for(&named, &model)?;
    check_tied(&named, &model)?;
    let modules = lora_modules(&model);
    let stored = base.checkpoint()?;
    let merge = Merge { backend, model: &model, modules: &modules, config, params, named: &named, stored: &stored, dtype };
    let addends = merge.addends();
    let unties = model.tie_word_embeddings && [EMBEDDING, UNEMBEDDING].iter().any(|name| addends.contains_key(*name));
    let quantized = merge.quantized()?;
    let shards = stored.stored();
    let mut index: BTreeMap<String, String> = BTreeMap::new();
    let (mut total_bytes, is_one) = (0, shards.len() == 1);
    for (path, tensors) in shards {
        let file = match path.file_name() {
            Some(file) if !is_one => file.to_string_lossy().into_owned(),
            _ => SINGLE_FILE.into(),
        };
        let mut written = Vec::new();
        for tensor in tensors {
            merge.push(tensor, &addends, &quantized, unties, &mut written)?;
        }
        for tensor in &written {
            total_bytes += tensor.bytes();
            index.insert(tensor.name.clone(), file.clone());
        }
        write_safetensors(&dir.join(&file), &[("format", "pt"), ("form", "merged")], written)?;
    }
    if !is_one {
        files::write_index(dir, &index, total_bytes)?;
    }
    files::write_others(base, dir, &files::Changes { unties, dtype })
}

struct Merge<'a> {
    backend: &'a dyn Backend,
    model: &'a ModelConfig,
    modules: &'a [LoraModule],
    config: &'a LoraConfig,
    params: &'a LoraParams,
    /// The tensors under the names that the model has by itself.
    named: &'a Checkpoint,
    /// The same under those of the files.
    stored: &'a Checkpoint,
    dtype: Option<DType>,
}

/// What of a checkpoint lies in fewer bits than it is computed with.
struct Quantized {
    /// Experts in blocks, by the name of the blocks: what they are together, and the blocks and scales.
    experts: BTreeMap<String, (String, Mxfp4)>,
    /// Matrices of four bits, by the name of their codes in the model: what they are, by its own.
    int4: BTreeMap<String, (String, Int4Tensors)>,
    /// Tensors that are gone with what they are the scales of.
    scales: BTreeSet<String>,
}

/// How the values of a tensor are had.
enum Values<'a> {
    /// Row by row, as they are written.
    Rows(StoredMatrix<'a>),
    /// Blocks and scales of `[experts, rows, columns]`, to be written as `[experts, columns, rows]`.
    Blocks { blocks: &'a [u8], scales: &'a [u8] },
}

impl<'a> Merge<'a> {
    /// What the adapter adds, by the names of tensors.
    fn addends(&self) -> BTreeMap<String, Vec<Addend<'a>>> {
        let mut flipped: BTreeSet<String> = BTreeSet::new();
        for_each_parameter(self.model, |parameter| match &parameter.form {
            Form::Flipped => drop(flipped.insert(parameter.name.clone())),
            _ => {
                if let Some(fused) = fused_in(self.named, parameter)
                    && fused.expert == 0
                    && is_flipped(self.named, fused)
                {
                    flipped.insert(fused.name.clone());
                }
            }
        });
        let mut addends: BTreeMap<String, Vec<Addend<'a>>> = BTreeMap::new();
        for (index, (module, stack)) in self.modules.iter().zip(&self.params.stacks).enumerate() {
            let Some(stack) = stack else { continue };
            let shape = self.config.shape_of(index, module);
            let mut push = |name: String, entry: usize, lies: Lies| {
                let addend =
                    Addend { stack, shape, entry, lies, in_features: module.in_features, out_features: module.out_features };
                addends.entry(name).or_default().push(addend);
            };
            for (layer, number) in module.layers.iter().enumerate() {
                let path = format!("model.layers.{number}.{}", module.path);
                match (module.part, module.experts) {
                    (Part::Unembed, _) => push(UNEMBEDDING.into(), 0, Lies::AS_IT_IS),
                    (Part::Embedding, _) => push(EMBEDDING.into(), 0, Lies::Table),
                    (_, None) => push(format!("{path}.weight"), layer, Lies::AS_IT_IS),
                    (_, Some(experts)) => {
                        let (first, fused) = (layer * experts.count, format!("{path}.{}", experts.fused.parameter));
                        let of_expert = |e: usize| format!("{path}.{e}.{}.weight", experts.projection);
                        if flipped.contains(&fused) {
                            push(fused, first, Lies::Columns { first: experts.fused.first, step: experts.fused.step });
                        } else if self.named.contains(&fused) {
                            push(fused, first, Lies::Rows { first: experts.fused.first, step: experts.fused.step });
                        } else {
                            (0..experts.count).for_each(|e| push(of_expert(e), first + e, Lies::AS_IT_IS));
                        }
                    }
                }
            }
        }
        addends
    }

    /// What a tensor of the files is called in the model by itself.
    fn own_name(&self, stored: &str) -> String {
        let prefix = self.model.family.config().part_of_composite();
        match prefix.and_then(|prefix| stored.strip_prefix(prefix)) {
            Some(rest) => format!("model.{rest}"),
            None => stored.into(),
        }
    }

    fn quantized(&self) -> Result<Quantized> {
        let mut found = Quantized { experts: BTreeMap::new(), int4: BTreeMap::new(), scales: BTreeSet::new() };
        let mut parameters = BTreeSet::new();
        for_each_parameter(self.model, |parameter| {
            parameters.insert(parameter.name.clone());
            if let Some(tensors) = Int4Tensors::of(self.named, self.model.int4, &parameter.name, &parameter.shape) {
                found.int4.insert(tensors.codes().0, (parameter.name.clone(), tensors));
            }
            if let Some(of) = Mxfp4::of(self.named, parameter) {
                found.scales.insert(of.scales.0.clone());
                found.experts.insert(of.blocks.0.clone(), (parameter.name.clone(), of));
            }
        });
        let mut of_int4: BTreeSet<String> = found.int4.values().flat_map(|(_, tensors)| tensors.others()).collect();
        // Parts that the model leaves aside lie as the rest does. Of their biases nobody knows here whether they are theirs.
        let mut reader = CheckpointReader::new(self.named);
        reader.ignore_under("");
        for name in self.named.names().filter(|name| !found.int4.contains_key(*name)).collect::<Vec<_>>() {
            if let Some(tensors) = Int4Tensors::of_codes(self.named, &mut reader, self.model.int4, name) {
                of_int4.extend(tensors.others().into_iter().filter(|name| !name.ends_with(".bias")));
                found.int4.insert(name.into(), (format!("{}.weight", tensors.module()), tensors));
            }
        }
        reader.finish()?;
        for (_, tensors) in self.stored.stored() {
            let names = tensors.iter().map(|tensor| (tensor.name, self.own_name(tensor.name)));
            let gone = names.filter(|(_, own)| of_int4.contains(own) && !parameters.contains(own));
            found.scales.extend(gone.map(|(name, _)| name.to_string()));
            let in_bytes =
                tensors.iter().filter(|tensor| tensor.dtype == Dtype::F8_E4M3).map(|tensor| scales_name(tensor.name));
            found.scales.extend(in_bytes.filter(|scales| self.stored.contains(scales)));
        }
        Ok(found)
    }

    /// What is written for a tensor of the base.
    fn push(
        &'a self,
        tensor: StoredTensor<'a>,
        addends: &'a BTreeMap<String, Vec<Addend<'a>>>,
        quantized: &'a Quantized,
        unties: bool,
        written: &mut Vec<WrittenTensor<'a>>,
    ) -> Result<()> {
        let (name, own_name) = (tensor.name, self.own_name(tensor.name));
        if quantized.scales.contains(name) {
            return Ok(());
        }
        let of = |name: &str| addends.get(name).map_or(&[][..], Vec::as_slice);
        if let Some((whole, Mxfp4 { blocks, scales })) = quantized.experts.get(name) {
            let [experts, rows, of_row] = scales.1;
            let bytes = |name: &str, shape: &[usize]| match self.stored.plain(name, &[Dtype::U8], shape) {
                Some(bytes) => bytes.map_err(|message| self.stored.error(message)),
                None => Err(self.stored.error(format!("missing tensors: {name}"))),
            };
            let values = Values::Blocks { blocks: bytes(&blocks.0, &blocks.1)?, scales: bytes(&scales.0, &scales.1)? };
            let shape = vec![experts, of_row * MXFP4_BLOCK, rows];
            written.push(self.computed(whole, whole.clone(), shape, self.dense_dtype(), values, of(whole)));
            return Ok(());
        }
        if let Some((whole, tensors)) = quantized.int4.get(&own_name) {
            let stem = name.strip_suffix("qweight").or_else(|| name.strip_suffix("weight_packed")).unwrap_or(name);
            let shape = tensors.shape().to_vec();
            if unties && whole == EMBEDDING && !self.named.contains(UNEMBEDDING) {
                let values = Values::Rows(StoredMatrix::Int4(tensors.open(self.named)?));
                written.push(self.computed(
                    name,
                    UNEMBEDDING.into(),
                    shape.clone(),
                    self.dense_dtype(),
                    values,
                    of(UNEMBEDDING),
                ));
            }
            let values = Values::Rows(StoredMatrix::Int4(tensors.open(self.named)?));
            written.push(self.computed(name, format!("{stem}weight"), shape, self.dense_dtype(), values, of(whole)));
            return Ok(());
        }
        // An unembedding that was the embedding's table goes where that is.
        if unties && own_name == EMBEDDING && !self.named.contains(UNEMBEDDING) {
            let (dtype, values) = self.values(&tensor)?;
            written.push(self.computed(name, UNEMBEDDING.into(), tensor.shape.to_vec(), dtype, values, of(UNEMBEDDING)));
        }
        let is_float = source_dtype(tensor.dtype).is_some();
        let is_scaled = quantized.scales.contains(&scales_name(name));
        if is_scaled || is_float && (self.dtype.is_some() || !of(&own_name).is_empty()) {
            let (dtype, values) = self.values(&tensor)?;
            written.push(self.computed(name, name.into(), tensor.shape.to_vec(), dtype, values, of(&own_name)));
            return Ok(());
        }
        let StoredTensor { dtype, shape, bytes, .. } = tensor;
        let copy = move |sink: &mut Sink<'_>| {
            for (piece, bytes) in bytes.chunks(SLICE_ELEMENTS).enumerate() {
                sink.put(bytes)?;
                self.stored.forget(name, piece * SLICE_ELEMENTS..piece * SLICE_ELEMENTS + bytes.len());
            }
            Ok(())
        };
        written.push(WrittenTensor { name: name.into(), dtype, shape: shape.to_vec(), write: Box::new(copy) });
        Ok(())
    }

    /// The dtype that a tensor is written in, and its values.
    fn values(&self, tensor: &StoredTensor<'a>) -> Result<(Dtype, Values<'a>)> {
        let Some(plain) = self.stored.tensor(tensor.name)? else {
            return Err(self.stored.error(format!("missing tensors: {}", tensor.name)));
        };
        let matrix = StoredMatrix::of_tensor(self.stored, plain)?;
        let dtype = match matrix {
            StoredMatrix::Plain(_) => self.dtype.map_or(tensor.dtype, dtype_of),
            StoredMatrix::Scaled(..) | StoredMatrix::Int4(_) => self.dense_dtype(),
        };
        Ok((dtype, Values::Rows(matrix)))
    }

    /// The dtype of what was quantized: that of the last norm, which never is.
    fn dense_dtype(&self) -> Dtype {
        let norm = self.named.tensor("model.norm.weight").ok().flatten().map(|tensor| tensor.dtype);
        self.dtype.map_or_else(
            || match norm {
                Some(SourceDType::F32) => Dtype::F32,
                Some(SourceDType::F16) => Dtype::F16,
                Some(SourceDType::BF16 | SourceDType::F8E4M3) | None => Dtype::BF16,
            },
            dtype_of,
        )
    }

    /// A tensor whose values are read, added to and rounded, run after run of rows.
    fn computed(
        &'a self,
        stored: &'a str,
        name: String,
        shape: Vec<usize>,
        dtype: Dtype,
        values: Values<'a>,
        addends: &'a [Addend<'a>],
    ) -> WrittenTensor<'a> {
        let (own_shape, shown) = (shape.clone(), name.clone());
        let rounds_to = source_dtype(dtype).expect("what is added to is written as numbers");
        let write = move |sink: &mut Sink<'_>| {
            // Experts are matrices of their own; of anything else the leading axis has the rows.
            let of_experts = own_shape.len() == 3 && (!addends.is_empty() || matches!(values, Values::Blocks { .. }));
            let (count, rows) =
                if of_experts { (own_shape[0], own_shape[1]) } else { (1, own_shape.first().copied().unwrap_or(1)) };
            let columns = own_shape.iter().product::<usize>() / (count * rows).max(1);
            let run = match values {
                Values::Blocks { .. } => rows.max(1),
                Values::Rows(_) => (SLICE_ELEMENTS / columns.max(1)).max(1),
            };
            for matrix in 0..count {
                let of_matrix = addends.iter().map(|addend| addend.pair(self.backend, matrix)).collect::<Result<Vec<_>>>()?;
                for first in (0..rows).step_by(run) {
                    let range = first..rows.min(first + run);
                    let mut sums = values.read(matrix * rows, range.clone(), [rows, columns])?;
                    add_pairs(&of_matrix, &mut sums, range.clone(), columns);
                    let bytes = rounded(&sums, rounds_to).map_err(|(place, value)| {
                        let at = (matrix * rows + range.start) * columns + place;
                        self.stored
                            .error(format!("element {at} of tensor {shown} would be {value} in {dtype}, not a finite number"))
                    })?;
                    sink.put(&bytes)?;
                    values.forget(self.stored, stored, matrix * rows + range.start..matrix * rows + range.end, columns);
                }
            }
            Ok(())
        };
        WrittenTensor { name, dtype, shape, write: Box::new(write) }
    }
}

impl Values<'_> {
    /// Rows `range` of the matrix whose first row is row `first` of all, `[rows, columns]`.
    fn read(&self, first: usize, range: Range<usize>, [rows, columns]: [usize; 2]) -> Result<Vec<f32>> {
        let all = first + range.start..first + range.end;
        match self {
            Values::Rows(matrix) => matrix.read(all, columns),
            Values::Blocks { blocks, scales } => {
                let (elements, matrix) = (rows * columns, first / rows.max(1));
                let own = matrix * elements / MXFP4_BLOCK..(matrix + 1) * elements / MXFP4_BLOCK;
                let mut values = vec![0.0; elements];
                dequantize_mxfp4(
                    &blocks[own.start * MXFP4_BLOCK_BYTES..own.end * MXFP4_BLOCK_BYTES],
                    &scales[own],
                    &mut values,
                );
                let lying = strata_tensor::HostTensor::from_f32(&values, &[1, columns, rows], DType::F32)?;
                Ok(turned(&alone, lying.as_ref()).as_ref().to_f32_vec())
            }
        }
    }

    fn forget(&self, checkpoint: &Checkpoint, name: &str, rows: Range<usize>, columns: usize) {
        let row_bytes = match self {
            Values::Rows(StoredMatrix::Plain(tensor) | StoredMatrix::Scaled(tensor, _)) => columns * tensor.dtype.size_bytes(),
            Values::Rows(StoredMatrix::Int4(_)) | Values::Blocks { .. } => return,
        };
        checkpoint.forget(name, rows.start * row_bytes..rows.end * row_bytes);
    }
}

fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
    }
}
