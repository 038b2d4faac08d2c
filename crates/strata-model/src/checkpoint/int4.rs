//! Matrices of four bits as GPTQ, AWQ and compressed-tensors write them: words of eight codes, and a scale and a zero for each group of inputs of an output.
//!
//! What they stand for is `(code − zero)·scale` in all of them; they differ in what is beside what, and in where a word has its eight codes. See
//! [`Int4Layout`] for names and shapes.

use std::ops::Range;

use safetensors::Dtype;
use strata_tensor::{DType, Int4Rows};
use strata_values::{INT4_CODES, Int4Groups, Run, unpack_codes};

use super::{Checkpoint, CheckpointReader};
use crate::Result;
use crate::config::{Int4Form, Int4Layout};

/// The tensors of a matrix `[outputs, inputs]`.
#[derive(Clone)]
pub(crate) struct Int4Tensors {
    form: Int4Form,
    outputs: usize,
    inputs: usize,
    /// What the names of all begin with.
    stem: String,
}

/// A matrix in a file.
pub(crate) struct Int4Matrix<'a> {
    tensors: Int4Tensors,
    codes: &'a [[u8; 4]],
    zeros: Option<&'a [[u8; 4]]>,
    scales: Vec<f32>,
}

/// Rows of a matrix, in memory.
pub(crate) struct Int4Values {
    shape: (usize, usize),
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

impl Int4Tensors {
    /// Those of the parameter `name`, `{stem}.weight`, if the checkpoint has it in this form and in no other.
    pub(crate) fn of(checkpoint: &Checkpoint, form: Option<Int4Form>, name: &str, shape: &[usize]) -> Option<Self> {
        let (form, stem) = (form?, name.strip_suffix("weight")?);
        let &[outputs, inputs] = shape else { return None };
        let tensors = Int4Tensors { form, outputs, inputs, stem: stem.into() };
        (!checkpoint.contains(name) && checkpoint.contains(&tensors.codes().0)).then_some(tensors)
    }

    /// Those whose words of codes have this name, of a part of a model that nobody declares; `None` if words of codes have no such name. What shape the matrix has they say together, and the
    /// reader what of them is missing or does not fit the others.
    pub(crate) fn of_codes(
        checkpoint: &Checkpoint,
        reader: &mut CheckpointReader<'_>,
        form: Option<Int4Form>,
        name: &str,
    ) -> Option<Self> {
        let form = form?;
        let last = match form.layout {
            Int4Layout::Gptq { .. } | Int4Layout::Awq => "qweight",
            Int4Layout::CompressedTensors { .. } => "weight_packed",
        };
        let stem = name.strip_suffix(last).filter(|stem| stem.ends_with('.'))?;
        let axis = |last: &str, axis: usize| checkpoint.shape(&format!("{stem}{last}"))?.get(axis).copied();
        let words = [0, 1].map(|place| axis(last, place).unwrap_or(0));
        let [outputs, inputs] = match form.layout {
            Int4Layout::Gptq { .. } => [words[1], axis("g_idx", 0).unwrap_or_else(|| words[0].saturating_mul(INT4_CODES))],
            // Words may have room for more.
            Int4Layout::Awq => [axis("scales", 1).unwrap_or(0), words[0]],
            Int4Layout::CompressedTensors { .. } => {
                let extents = checkpoint.plain(&format!("{stem}weight_shape"), &[Dtype::I64, Dtype::I32], &[2]);
                let extents = extents.and_then(|bytes| bytes.ok()).map_or([0; 2], extents_of);
                extents.map(|extent| usize::try_from(extent).unwrap_or(0))
            }
        };
        let tensors = Int4Tensors { form, outputs, inputs, stem: stem.into() };
        tensors.require(reader);
        if outputs == 0 || inputs == 0 {
            reader.refuse(format!("tensor {name} is of no matrix: it has {inputs} inputs and {outputs} outputs"));
        }
        Some(tensors)
    }

    /// Inputs that share a scale.
    pub(crate) fn group_inputs(&self) -> usize {
        self.form.group_inputs.unwrap_or(self.inputs).min(self.inputs).max(1)
    }

    /// Its shape as it is multiplied: `[outputs, inputs]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    fn groups(&self) -> usize {
        self.inputs.div_ceil(self.group_inputs())
    }

    fn named(&self, last: &str) -> String {
        format!("{}{last}", self.stem)
    }

    /// The linear layer that it is of.
    pub(crate) fn module(&self) -> &str {
        self.stem.trim_end_matches('.')
    }

    /// Name and shape of the words of codes.
    pub(crate) fn codes(&self) -> (String, [usize; 2]) {
        match self.form.layout {
            Int4Layout::Gptq { .. } => (self.named("qweight"), [self.inputs.div_ceil(INT4_CODES), self.outputs]),
            Int4Layout::Awq => (self.named("qweight"), [self.inputs, self.outputs.div_ceil(INT4_CODES)]),
            Int4Layout::CompressedTensors { .. } => {
                (self.named("weight_packed"), [self.outputs, self.inputs.div_ceil(INT4_CODES)])
            }
        }
    }

    fn scales(&self) -> (String, [usize; 2]) {
        match self.form.layout {
            Int4Layout::Gptq { .. } | Int4Layout::Awq => (self.named("scales"), [self.groups(), self.outputs]),
            Int4Layout::CompressedTensors { .. } => (self.named("weight_scale"), [self.outputs, self.groups()]),
        }
    }

    /// Of the words of zeros, if they are not all the same.
    fn zeros(&self) -> Option<(String, [usize; 2])> {
        match self.form.layout {
            Int4Layout::Gptq { .. } | Int4Layout::Awq => {
                Some((self.named("qzeros"), [self.groups(), self.outputs.div_ceil(INT4_CODES)]))
            }
            Int4Layout::CompressedTensors { symmetric: false } => {
                Some((self.named("weight_zero_point"), [self.outputs.div_ceil(INT4_CODES), self.groups()]))
            }
            Int4Layout::CompressedTensors { symmetric: true } => None,
        }
    }

    /// The names of all tensors but its codes that can be of it. A bias may be the model's.
    pub(crate) fn others(&self) -> [String; 7] {
        ["qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "bias"].map(|name| self.named(name))
    }

    /// Asks for all of them.
    pub(crate) fn require(&self, reader: &mut CheckpointReader<'_>) {
        let words = |(name, shape): (String, [usize; 2]), reader: &mut CheckpointReader<'_>| {
            reader.require_plain(&name, &[Dtype::I32], &shape);
        };
        words(self.codes(), reader);
        self.zeros().into_iter().for_each(|zeros| words(zeros, reader));
        let (scales, shape) = self.scales();
        reader.require_plain(&scales, &[Dtype::F16, Dtype::BF16, Dtype::F32], &shape);
        match self.form.layout {
            Int4Layout::Gptq { reordered, .. } => self.require_order(reader, reordered),
            Int4Layout::CompressedTensors { .. } => self.require_extents(reader),
            Int4Layout::Awq => {}
        }
        // AutoGPTQ writes biases of layers that have none.
        let bias = self.named("bias");
        if reader.shape(&bias) == Some(&[self.outputs]) && reader.is_zero(&bias) {
            reader.ignore(&bias);
        }
    }

    /// The group of each input, which has to be that of its place: kernels read the inputs of a group together. If there is no other order, files need not say so.
    fn require_order(&self, reader: &mut CheckpointReader<'_>, reordered: bool) {
        let name = self.named("g_idx");
        if !reader.contains(&name) && !reordered {
            return;
        }
        let Some(groups) = reader.require_plain(&name, &[Dtype::I32], &[self.inputs]) else { return };
        let groups = groups.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes));
        let inputs = self.group_inputs();
        if let Some((input, group)) = groups.enumerate().find(|(input, group)| usize::try_from(*group) != Ok(input / inputs)) {
            reader.refuse(format!(
                "tensor {name} has input {input} in group {group}, where groups of {inputs} have it in {}: inputs in another order (desc_act) are not supported",
                input / inputs
            ));
        }
    }

    fn require_extents(&self, reader: &mut CheckpointReader<'_>) {
        let name = self.named("weight_shape");
        let Some(extents) = reader.require_plain(&name, &[Dtype::I64, Dtype::I32], &[2]) else { return };
        let expected = [self.outputs, self.inputs].map(|extent| extent as i64);
        let extents = extents_of(extents);
        if extents != expected {
            reader.refuse(format!("tensor {name} is {extents:?}, not {expected:?}"));
        }
    }

    /// Where they lie in a checkpoint that was accounted for.
    pub(crate) fn open<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Int4Matrix<'a>> {
        let missing = |name: &str| checkpoint.error(format!("missing tensors: {name}"));
        let words = |(name, shape): (String, [usize; 2])| match checkpoint.plain(&name, &[Dtype::I32], &shape) {
            Some(Ok(bytes)) => Ok(bytes.as_chunks().0),
            Some(Err(message)) => Err(checkpoint.error(message)),
            None => Err(missing(&name)),
        };
        let (scales, _) = self.scales();
        let scales = checkpoint.tensor(&scales)?.ok_or_else(|| missing(&scales))?;
        Ok(Int4Matrix {
            tensors: self.clone(),
            codes: words(self.codes())?,
            zeros: self.zeros().map(words).transpose()?,
            scales: scales.read(DType::F32)?.as_ref().to_f32_vec(),
        })
    }
}

/// The two numbers of a `weight_shape`, of either width.
fn extents_of(bytes: &[u8]) -> [i64; 2] {
    match bytes.as_chunks::<8>() {
        (&[outputs, inputs], []) => [outputs, inputs].map(i64::from_le_bytes),
        _ => bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b).into()).collect::<Vec<_>>().try_into().unwrap_or([0; 2]),
    }
}

impl Int4Matrix<'_> {
    /// Rows of it.
    pub(crate) fn rows(&self, run: Run<'_>, rows: Range<usize>) -> Int4Values {
        let Int4Tensors { inputs, outputs, .. } = self.tensors;
        let mut codes = vec![0; rows.len() * inputs];
        unpack_codes(run, self.tensors.form.words(), self.codes, [outputs, inputs], rows.start, &mut codes);
        let groups = Int4Groups {
            lie: self.tensors.form.words(),
            outputs,
            groups: self.tensors.groups(),
            scales: &self.scales,
            zeros: self.zeros,
            zeros_less: match self.tensors.form.layout {
                Int4Layout::Gptq { zeros_less, .. } => zeros_less,
                Int4Layout::Awq | Int4Layout::CompressedTensors { .. } => 0,
            },
        };
        let (scales, zeros) = groups.of_rows(rows);
        Int4Values { shape: (inputs, self.tensors.group_inputs()), codes, scales, zeros }
    }

    /// Bytes of its codes in the file.
    pub(crate) fn code_bytes(&self) -> usize {
        self.codes.as_flattened().len()
    }
}

impl Int4Values {
    /// The rows.
    ///
    /// # Errors
    /// If a scale is one that no matrix of four bits can have.
    pub(crate) fn as_ref(&self) -> strata_tensor::Result<Int4Rows<'_>> {
        Int4Rows::new(self.shape, &self.codes, &self.scales, &self.zeros)
    }
}
