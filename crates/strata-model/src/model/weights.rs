//! Where the weights of a model come from: a checkpoint, which is accounted for before anything is read, or chance.

use std::ops::Range;

use safetensors::Dtype;
use strata_tensor::{DType, HostRef, HostTensor, Shape, random};
use strata_values::{
    Converted, FP8_BLOCK, MXFP4_BLOCK, MXFP4_BLOCK_BYTES, Run, SourceDType, SourceTensor, alone, dequantize_mxfp4, fill_pieces,
    first_not_finite, scaled_rows, turn, turned, write_values,
};

use super::stored_matrix::{StoredMatrix, scales_name};
use crate::architectures::{self, Form, FusedExpert, Initial, Parameter, Rows, StoreRows, WeightSource};
use crate::checkpoint::{Checkpoint, CheckpointReader, Int4Tensors};
use crate::config::Int4Form;
use crate::{Error, ModelConfig, ModelSource, Result};

/// Rows of a matrix that are read, or made, at a time.
pub(super) const SLICE_ELEMENTS: usize = 8 << 20;

/// The tensors of a model, those that lie as a part of a composite under the names that they have by themselves.
pub(super) fn tensors_of(source: &ModelSource, config: &ModelConfig) -> Result<Checkpoint> {
    let mut checkpoint = source.checkpoint()?;
    if let Some(prefix) = config.family.config().part_of_composite() {
        checkpoint.rename(prefix, "model.")?;
    }
    Ok(checkpoint)
}

/// Refuses a checkpoint that has an unembedding of other numbers than the embedding that its configuration ties it to. Transformers computes with the one that is there.
pub(super) fn check_tied(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let [unembedding, embedding] = ["lm_head.weight", "model.embed_tokens.weight"];
    let Some(own) = checkpoint.tensor(unembedding)?.filter(|_| config.tie_word_embeddings) else { return Ok(()) };
    let shape = [config.vocab_size, config.hidden_size];
    let [own_rows, tied_rows] = [unembedding, embedding].map(|name| StoredMatrix::of(checkpoint, config.int4, name, &shape));
    let (Some(own_rows), Some(tied_rows)) = (own_rows?, tied_rows?) else { return Ok(()) };
    let is_same = |tied: SourceTensor<'_>| own.dtype == tied.dtype && own.shape == tied.shape && own.bytes == tied.bytes;
    // In bytes, the same ones may have other scales.
    if own.dtype != SourceDType::F8E4M3 && checkpoint.tensor(embedding)?.is_some_and(is_same) {
        return Ok(());
    }
    let refused = |what: String| {
        let known = "tie_word_embeddings is true, and the checkpoint has another";
        Err(checkpoint.error(format!("{known} {unembedding} than {embedding}: {what}; if it counts, say false")))
    };
    if own.shape != shape {
        return refused(format!("its shape is {:?}, not {shape:?}", own.shape));
    }
    // Equal in other bits: of another dtype, or zeros of another sign.
    for first in (0..config.vocab_size).step_by(SLICE_ELEMENTS.div_ceil(config.hidden_size)) {
        let rows = first..config.vocab_size.min(first + SLICE_ELEMENTS.div_ceil(config.hidden_size));
        let (own, tied) = (own_rows.read(rows.clone(), config.hidden_size)?, tied_rows.read(rows, config.hidden_size)?);
        if let Some((place, (own, tied))) = own.iter().zip(&tied).enumerate().find(|(_, (own, tied))| own != tied) {
            return refused(format!("element {} is {own}, not {tied}", first * config.hidden_size + place));
        }
    }
    Ok(())
}

/// How the names of tensors of codes end, in the forms that are known.
const CODES_NAMES: [&str; 2] = [".qweight", ".weight_packed"];

/// Refuses a checkpoint in which a parameter is missing or misshapen, or that holds anything else.
pub(super) fn account_for(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let is_in_bytes = |tensor: &SourceTensor<'_>| tensor.dtype == SourceDType::F8E4M3;
    let no_scales = |SourceTensor { name, shape, .. }: SourceTensor<'_>| {
        format!("tensor {name} of shape {shape:?} is in F8_E4M3: scales are known of matrices alone, each a tensor of its own")
    };
    let mut reader = CheckpointReader::new(checkpoint);
    if config.tie_word_embeddings {
        reader.ignore("lm_head.weight");
    }
    config.family.config().left_aside(config).iter().for_each(|prefix| reader.ignore_under(prefix));
    architectures::for_each_parameter(config, |p| {
        if let Some(fused) = fused_in(checkpoint, p) {
            // The experts of a layer have it together; it is asked for once.
            if fused.expert == 0 && fused.first == 0 {
                let [first, second] =
                    if is_flipped(checkpoint, fused) { [fused.columns, fused.rows] } else { [fused.rows, fused.columns] };
                let tensor = reader.require(&fused.name, &[fused.num_experts, first, second]);
                if let Some(tensor) = tensor.filter(is_in_bytes) {
                    reader.refuse(no_scales(tensor));
                }
            }
        } else if let Some(Mxfp4 { blocks, scales }) = Mxfp4::of(checkpoint, p) {
            reader.require_plain(&blocks.0, &[Dtype::U8], &blocks.1);
            reader.require_plain(&scales.0, &[Dtype::U8], &scales.1);
        } else if let Some(tensors) = Int4Tensors::of(checkpoint, config.int4, &p.name, &p.shape) {
            tensors.require(&mut reader);
        } else {
            match reader.require(&p.name, &p.shape).filter(is_in_bytes) {
                Some(tensor) if tensor.shape.len() > 2 => reader.refuse(no_scales(tensor)),
                Some(_) => drop(reader.require(&scales_name(&p.name), &scales_shape(&p.shape))),
                None => {}
            }
        }
    });
    if config.int4.is_none()
        && let Some(name) = CODES_NAMES.iter().find_map(|last| reader.unused_ending(last))
    {
        let problem = format!("{name} holds weights in few bits, and no quantization_config in config.json says how they lie");
        reader.refuse(problem);
    }
    reader.finish()
}

/// The shape of the scales of a parameter in bytes: one for each block.
fn scales_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|extent| extent.div_ceil(FP8_BLOCK)).collect()
}

/// Weights from a checkpoint that was accounted for.
pub(super) struct CheckpointWeights<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    /// How matrices lie that lie in four bits.
    pub(super) int4: Option<Int4Form>,
    /// What numbers are looked at and converted on.
    pub(super) run: Run<'c>,
}

/// Where a parameter of an expert lies, if the checkpoint has all experts of its layer in one tensor.
pub(super) fn fused_in<'p>(checkpoint: &Checkpoint, parameter: &'p Parameter) -> Option<&'p FusedExpert> {
    match &parameter.form {
        Form::Expert(fused) if !checkpoint.contains(&parameter.name) && checkpoint.contains(&fused.name) => Some(fused),
        Form::Expert(_) | Form::Own | Form::ZeroCentred | Form::Flipped => None,
    }
}

/// Whether a tensor has its experts as `[columns, rows]`. One that is as wide as high does not tell, and lies as the other of its layer does, which is never so, too: the one is twice
/// as high as the other is wide.
pub(super) fn is_flipped(checkpoint: &Checkpoint, fused: &FusedExpert) -> bool {
    let FusedExpert { name, rows, columns, .. } = fused;
    let has = |name: &str, matrix: [usize; 2]| checkpoint.shape(name).and_then(|shape| shape.get(1..)) == Some(&matrix[..]);
    if rows != columns {
        return has(name, [*columns, *rows]);
    }
    match (name.strip_suffix("gate_up_proj"), name.strip_suffix("down_proj")) {
        (Some(layer), _) => has(&format!("{layer}down_proj"), [rows / 2, *columns]),
        (_, Some(layer)) => has(&format!("{layer}gate_up_proj"), [*rows, 2 * columns]),
        _ => false,
    }
}

/// Where the experts of a layer lie as blocks and scales: names and shapes.
pub(super) struct Mxfp4 {
    pub(super) blocks: (String, [usize; 4]),
    pub(super) scales: (String, [usize; 3]),
}

impl Mxfp4 {
    /// If the checkpoint has a parameter so.
    pub(super) fn of(checkpoint: &Checkpoint, parameter: &Parameter) -> Option<Self> {
        let Parameter { name, form: Form::Flipped, shape, .. } = parameter else { return None };
        let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{name}_{part}"));
        let [experts, columns, rows] = shape[..] else { return None };
        // Blocks are of one row each.
        let is_quantized = !checkpoint.contains(name) && checkpoint.contains(&blocks) && columns.is_multiple_of(MXFP4_BLOCK);
        is_quantized.then_some(Mxfp4 {
            blocks: (blocks, [experts, rows, columns / MXFP4_BLOCK, MXFP4_BLOCK_BYTES]),
            scales: (scales, [experts, rows, columns / MXFP4_BLOCK]),
        })
    }
}

impl CheckpointWeights<'_> {
    /// Passes rows that were read to `store`, if they are finite numbers.
    fn pass_on(
        &self,
        name: &str,
        first_element: usize,
        first: usize,
        rows: HostRef<'_>,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some((place, value)) = first_not_finite(self.run, rows) {
            let (at, dtype) = (first_element + place, rows.dtype());
            return Err(self
                .checkpoint
                .error(format!("element {at} of tensor {name} is {value} in {dtype}, not a finite number")));
        }
        store(first, rows).map_err(|error| match error {
            Error::Tensor(strata_tensor::Error::Unsupported(why)) => self.checkpoint.error(format!("tensor {name}: {why}")),
            other => other,
        })
    }

    /// The scales of a parameter in bytes, block after block.
    fn scales(&self, name: &str) -> Result<Vec<f32>> {
        let name = scales_name(name);
        let Some(tensor) = self.checkpoint.tensor(&name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {name}")));
        };
        Ok(tensor.read(DType::F32)?.as_ref().to_f32_vec())
    }

    /// The rows of one expert of a tensor that has all of a layer.
    fn read_fused(
        &self,
        fused: &FusedExpert,
        rows: usize,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(tensor) = self.checkpoint.tensor(&fused.name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {}", fused.name)));
        };
        let (elements, size) = (fused.rows * fused.columns, dtype.size_bytes());
        self.checkpoint.expect(&fused.name);
        let expert = tensor.read_rows_on(self.run, fused.expert..fused.expert + 1, dtype)?;
        let bytes = expert.as_ref().as_bytes();
        let turned;
        let own = if is_flipped(self.checkpoint, fused) {
            // `[columns, rows]`.
            let mut out = HostTensor::zeros(&[rows, fused.columns], dtype);
            turn(self.run, bytes, [fused.columns, fused.rows], fused.first, dtype, out.bytes_mut());
            turned = out;
            turned.as_ref()
        } else {
            let row_bytes = fused.columns * size;
            HostRef::from_bytes(&bytes[fused.first * row_bytes..][..rows * row_bytes], &[rows, fused.columns], dtype)?
        };
        self.pass_on(&fused.name, fused.expert * elements, 0, own, store)?;
        let of_expert = tensor.bytes.len() / fused.num_experts;
        self.checkpoint.forget(&fused.name, fused.expert * of_expert..(fused.expert + 1) * of_expert);
        Ok(())
    }
}

impl CheckpointWeights<'_> {
    /// Matrices of experts that lie as blocks and scales.
    fn read_mxfp4(
        &self,
        Mxfp4 { blocks, scales }: &Mxfp4,
        dtype: DType,
        store: &mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
    ) -> Result<()> {
        /// Blocks to a piece.
        const BLOCKS: usize = 256;
        let bytes = |name: &str, shape: &[usize]| match self.checkpoint.plain(name, &[Dtype::U8], shape) {
            Some(bytes) => bytes.map_err(|message| self.checkpoint.error(message)),
            None => Err(self.checkpoint.error(format!("missing tensors: {name}"))),
        };
        let [experts, rows, of_row] = scales.1;
        [&blocks.0, &scales.0].into_iter().for_each(|name| self.checkpoint.expect(name));
        let (block_bytes, scale_bytes) = (bytes(&blocks.0, &blocks.1)?, bytes(&scales.0, &scales.1)?);
        let of_expert = rows * of_row;
        for expert in 0..experts {
            let own = expert * of_expert..(expert + 1) * of_expert;
            let own_blocks = own.start * MXFP4_BLOCK_BYTES..own.end * MXFP4_BLOCK_BYTES;
            let (blocks_here, scales_here) = (&block_bytes[own_blocks.clone()], &scale_bytes[own.clone()]);
            let mut matrix = HostTensor::zeros(&[1, rows, of_row * MXFP4_BLOCK], dtype);
            fill_pieces(self.run, matrix.bytes_mut(), BLOCKS * MXFP4_BLOCK * dtype.size_bytes(), &|piece, out| {
                let mut values = [0.0; BLOCKS * MXFP4_BLOCK];
                let count = out.len() / (MXFP4_BLOCK * dtype.size_bytes());
                let (blocks, scales) = (&blocks_here[piece * BLOCKS * MXFP4_BLOCK_BYTES..], &scales_here[piece * BLOCKS..]);
                dequantize_mxfp4(&blocks[..count * MXFP4_BLOCK_BYTES], &scales[..count], &mut values[..count * MXFP4_BLOCK]);
                write_values(&values[..count * MXFP4_BLOCK], dtype, out);
            });
            self.pass_on(&blocks.0, own.start * MXFP4_BLOCK, expert, matrix.as_ref(), store)?;
            self.checkpoint.forget(&blocks.0, own_blocks);
            self.checkpoint.forget(&scales.0, own);
        }
        Ok(())
    }
}

impl CheckpointWeights<'_> {
    /// A matrix of four bits.
    fn read_int4(&self, tensors: &Int4Tensors, store: StoreRows<'_>) -> Result<()> {
        let (codes, _) = tensors.codes();
        self.checkpoint.expect(&codes);
        let matrix = tensors.open(self.checkpoint)?;
        for rows in slices(&tensors.shape()) {
            let first = rows.start;
            let values = matrix.rows(self.run, rows);
            let rows = values.as_ref().map_err(|e| self.checkpoint.error(format!("{}: {e}", tensors.module())))?;
            store(first, Rows::Int4(rows))?;
        }
        self.checkpoint.forget(&codes, 0..matrix.code_bytes());
        Ok(())
    }
}

impl WeightSource for CheckpointWeights<'_> {
    fn read(&mut self, parameter: &Parameter, dtype: DType, store: StoreRows<'_>) -> Result<()> {
        let Parameter { name, shape, .. } = parameter;
        if let Some(tensors) = Int4Tensors::of(self.checkpoint, self.int4, name, shape) {
            return self.read_int4(&tensors, store);
        }
        let mut store = |first: usize, rows: HostRef<'_>| store(first, Rows::Values(rows));
        if let Some(fused) = fused_in(self.checkpoint, parameter) {
            return self.read_fused(fused, shape[0], dtype, &mut store);
        }
        if let Some(quantized) = Mxfp4::of(self.checkpoint, parameter) {
            return self.read_mxfp4(&quantized, dtype, &mut store);
        }
        let mut store = in_form(self.run, &parameter.form, &mut store);
        self.checkpoint.expect(name);
        let Some(tensor) = self.checkpoint.tensor(name)? else {
            return Err(self.checkpoint.error(format!("missing tensors: {name}")));
        };
        let scales = match tensor.dtype {
            SourceDType::F8E4M3 => Some(self.scales(name)?),
            SourceDType::F32 | SourceDType::BF16 | SourceDType::F16 => None,
        };
        let row_bytes = tensor.bytes.len() / shape[0].max(1);
        for rows in slices(shape) {
            let first = rows.start;
            let bytes = rows.start * row_bytes..rows.end * row_bytes;
            let values = match &scales {
                Some(scales) => Converted::Owned(scaled_rows(self.run, &tensor, rows, scales, dtype)),
                None => tensor.read_rows_on(self.run, rows, dtype)?,
            };
            self.pass_on(name, first * shape[1..].iter().product::<usize>(), first, values.as_ref(), &mut store)?;
            // Else the files of a model would take as much memory as the model while it loads.
            self.checkpoint.forget(name, bytes);
        }
        Ok(())
    }
}

/// Turns the matrices of a parameter that a checkpoint has the other way round before they are stored, and adds the one that it has less.
fn in_form<'s>(
    run: Run<'s>,
    form: &'s Form,
    store: &'s mut dyn FnMut(usize, HostRef<'_>) -> Result<()>,
) -> impl FnMut(usize, HostRef<'_>) -> Result<()> + 's {
    move |first, rows| match form {
        Form::Flipped => store(first, turned(run, rows).as_ref()),
        Form::ZeroCentred => {
            let values: Vec<f32> = rows.to_f32_vec().into_iter().map(|value| 1.0 + value).collect();
            store(first, HostTensor::from_f32(&values, rows.shape().dims(), rows.dtype())?.as_ref())
        }
        Form::Own | Form::Expert(_) => store(first, rows),
    }
}

/// Runs of whole rows of about [`SLICE_ELEMENTS`].
fn slices(shape: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let rows = shape[0];
    let run = (SLICE_ELEMENTS / shape[1..].iter().product::<usize>().max(1)).max(1);
    (0..rows).step_by(run).map(move |first| first..(first + run).min(rows))
}

/// Random weights.
pub(super) struct RandomWeights {
    pub(super) range: f32,
    pub(super) seed: u64,
    /// Which parameter is next.
    pub(super) index: u64,
}

impl WeightSource for RandomWeights {
    fn read(&mut self, parameter: &Parameter, dtype: DType, store: StoreRows<'_>) -> Result<()> {
        let Parameter { shape, form, .. } = parameter;
        let mut store = |first: usize, rows: HostRef<'_>| store(first, Rows::Values(rows));
        let (initial, mut store) = (parameter.initial(), in_form(&alone, form, &mut store));
        let row_len = shape[1..].iter().product::<usize>();
        for rows in slices(shape) {
            let mut values = vec![0.0; rows.len() * row_len];
            random_parameter(initial, self.range, [self.seed, self.index], rows.start * row_len, &mut values);
            let mut slice_shape = vec![rows.len(), row_len];
            if shape.len() <= Shape::MAX_RANK {
                slice_shape = shape.to_vec();
            }
            slice_shape[0] = rows.len();
            store(rows.start, HostTensor::from_f32(&values, &slice_shape, dtype)?.as_ref())?;
        }
        self.index += 1;
        Ok(())
    }
}

/// Values of elements `first..` of a parameter before anything was learned, keyed by seed and place of the parameter: the rule of [`Model::random`].
pub fn random_parameter(initial: Initial, range: f32, key: [u64; 2], first: usize, values: &mut [f32]) {
    match initial {
        Initial::Zeros => values.fill(0.0),
        Initial::Ones => values.fill(1.0),
        // A uniform draw of this width has the standard deviation `range`.
        Initial::Random => random::fill_uniform(key, first as u64, range * 3f32.sqrt(), values),
        Initial::Decays => {
            // The logarithms of 0.01 and 16.
            let (slowest, fastest) = (-4.6, 2.8);
            random::fill_uniform(key, first as u64, (fastest - slowest) / 2.0, values);
            values.iter_mut().for_each(|value| *value += (fastest + slowest) / 2.0);
        }
    }
}
