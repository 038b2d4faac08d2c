//! What weights a model has: each is named once, with its place in a checkpoint, in a stack, and in adapters.
//!
//! An architecture declares its stacks, and what of a checkpoint fills which rows of which layer of them. From the declaration come the list of a checkpoint's
//! parameters, the stacks in memory, the modules that can carry LoRA, and the count of work.

mod weights;

use strata_tensor::{HostRef, HostTensor, Int4Group, WeightFormat};

use super::MatrixShape;
use crate::checkpoint::Converted;
use crate::lora::{ExpertModule, FusedRows, LoraModule, ModulePart, Part};

pub(crate) use weights::{Stack, StackShape, Weights};

/// A stack of matrices, `[layers, out_features, in_features]`, in the layout of products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixId(usize);

/// A stack of f32 vectors, `[layers, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VectorId(usize);

/// How a checkpoint has the weights of an RMSNorm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormWeights {
    /// As they are multiplied with.
    Plain,
    /// Less one (Qwen3.5): a norm of zeros is one of ones.
    ZeroCentred,
}

impl NormWeights {
    fn form(self) -> Form {
        match self {
            NormWeights::Plain => Form::Own,
            NormWeights::ZeroCentred => Form::ZeroCentred,
        }
    }
}

/// What a parameter is before anything was learned; see [`crate::Model::random`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Zeros: biases, and norms that are stored less one.
    Zeros,
    /// Ones: other norms, and what belongs to no matrix.
    Ones,
    /// Random with the standard deviation of the config.
    Random,
    /// Logarithms of rates of decay, from one of a hundred tokens to one of a sixteenth.
    Decays,
}

/// A parameter of a checkpoint, as files have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What it is before anything was learned.
    pub initial: Initial,
}

impl ParameterShape {
    /// How many numbers it has.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&extent| extent as u64).product()
    }
}

/// A parameter of a checkpoint.
pub(crate) struct Parameter {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// How it lies there beside its name and shape.
    pub form: Form,
    /// The decoder layer it belongs to; `None` for the model's own.
    layer: Option<usize>,
    place: Place,
}

/// How a checkpoint can have the values of a parameter.
pub(crate) enum Form {
    /// As a tensor of its name.
    Own,
    /// That, or as a part of a tensor that has all experts of its layer.
    Expert(FusedExpert),
    /// So, less one: what goes to its place is one more.
    ZeroCentred,
    /// So, all experts of a layer, `[experts, in, out]`: what goes to its place are their matrices the other way round. Or, that way round, as blocks and scales (MXFP4).
    Flipped,
}

/// A part of a tensor that has all experts of a layer: `[experts, rows, columns]`, or `[experts, columns, rows]`.
pub(crate) struct FusedExpert {
    pub name: String,
    pub num_experts: usize,
    /// Rows of all that is fused for an expert.
    pub rows: usize,
    /// Columns: input features.
    pub columns: usize,
    /// Which expert.
    pub expert: usize,
    /// Its first row that is meant.
    pub first: usize,
}

/// Some rows of an expert's matrix in a stack of the matrices of all experts.
pub(crate) struct ExpertRows {
    pub stack: MatrixId,
    pub first: usize,
    /// `gate_proj`.
    pub projection: &'static str,
    /// `w1`.
    pub tinker_name: &'static str,
    /// Where transformers has them.
    pub fused: FusedRows,
}

/// In which order a checkpoint has the rows of an expert.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowOrder {
    /// In that of the stack.
    AsTheyAre,
    /// One of gate, one of up, and so on, where the stack has all of gate before all of up.
    ByTurns,
}

impl RowOrder {
    /// Rows of one expert, as the stack has them.
    fn for_stack(self, rows: HostRef<'_>) -> Converted<'_> {
        let (count, row_bytes) = (rows.shape().leading(), rows.shape().row_len() * rows.dtype().size_bytes());
        match self {
            RowOrder::AsTheyAre => Converted::Borrowed(rows),
            RowOrder::ByTurns => {
                let mut out = HostTensor::zeros(rows.shape().dims(), rows.dtype());
                for (i, row) in rows.as_bytes().chunks_exact(row_bytes).enumerate() {
                    let place = i % 2 * (count / 2) + i / 2;
                    out.bytes_mut()[place * row_bytes..][..row_bytes].copy_from_slice(row);
                }
                Converted::Owned(out)
            }
        }
    }
}

impl Parameter {
    /// As files have it.
    pub(crate) fn shape_in_files(&self) -> ParameterShape {
        ParameterShape { name: self.name.clone(), shape: self.shape.clone(), initial: self.initial() }
    }

    /// What it is before anything was learned.
    pub(crate) fn initial(&self) -> Initial {
        let name = &self.name;
        match (&self.form, self.shape.len()) {
            (Form::ZeroCentred, _) => Initial::Zeros,
            _ if name.ends_with("A_log") => Initial::Decays,
            _ if name.ends_with("dt_bias") => Initial::Ones,
            // Those of experts are one tensor.
            _ if name.ends_with("bias") => Initial::Zeros,
            (_, 1) => Initial::Ones,
            _ => Initial::Random,
        }
    }
}

#[cfg(test)]
impl Parameter {
    /// One that goes nowhere.
    pub(crate) fn named(name: &str, shape: &[usize]) -> Self {
        Parameter { name: name.into(), shape: shape.to_vec(), form: Form::Own, layer: None, place: Place::Table }
    }
}

/// Where a parameter goes: the first row that it fills.
#[derive(Clone, Copy, Debug)]
enum Place {
    Matrix {
        id: MatrixId,
        layer: usize,
        first: usize,
    },
    Vector {
        id: VectorId,
        layer: usize,
        first: usize,
    },
    /// Matrices of a stack, from entry `first` on.
    Matrices {
        id: MatrixId,
        first: usize,
        order: RowOrder,
    },
    /// Vectors of a stack, from entry `first` on.
    Vectors {
        id: VectorId,
        first: usize,
        order: RowOrder,
    },
    Table,
}

struct MatrixSpec {
    label: &'static str,
    layers: usize,
    in_features: usize,
    out_features: usize,
    stored: Stored,
}

/// How the matrices of a stack are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    /// As those of most stacks are.
    AsAsked,
    /// As they are computed with, however the others are.
    Exactly,
    /// In four bits, as the checkpoint has them.
    AsTheyLie(Int4Group),
}

struct VectorSpec {
    layers: usize,
    width: usize,
}

/// The weights of a model that is yet to be loaded.
#[derive(Default)]
pub(crate) struct Declaration {
    matrices: Vec<MatrixSpec>,
    vectors: Vec<VectorSpec>,
    /// `[rows, width]` of a table of embeddings of its own.
    table: Option<[usize; 2]>,
    parameters: Vec<Parameter>,
    modules: Vec<LoraModule>,
}

impl Declaration {
    /// A stack of matrices, `label` being a word for people.
    pub(crate) fn matrix(&mut self, label: &'static str, layers: usize, in_features: usize, out_features: usize) -> MatrixId {
        self.matrices.push(MatrixSpec { label, layers, in_features, out_features, stored: Stored::AsAsked });
        MatrixId(self.matrices.len() - 1)
    }

    /// A stack of vectors.
    pub(crate) fn vector(&mut self, layers: usize, width: usize) -> VectorId {
        self.vectors.push(VectorSpec { layers, width });
        VectorId(self.vectors.len() - 1)
    }

    /// A table of embeddings, read whole from `name`.
    pub(crate) fn table(&mut self, name: &str, rows: usize, width: usize) {
        self.table = Some([rows, width]);
        self.parameters.push(Parameter {
            name: name.into(),
            shape: vec![rows, width],
            form: Form::Own,
            layer: None,
            place: Place::Table,
        });
    }

    /// A matrix of one layer, read whole from `name`.
    pub(crate) fn single_matrix(
        &mut self,
        label: &'static str,
        name: &str,
        in_features: usize,
        out_features: usize,
    ) -> MatrixId {
        let id = self.matrix(label, 1, in_features, out_features);
        let place = Place::Matrix { id, layer: 0, first: 0 };
        self.parameters.push(Parameter {
            name: name.into(),
            shape: vec![out_features, in_features],
            form: Form::Own,
            layer: None,
            place,
        });
        id
    }

    /// The weights of a norm that is no part of a decoder layer, read whole from `name`.
    pub(crate) fn single_norm(&mut self, name: &str, width: usize, weights: NormWeights) -> VectorId {
        let id = self.vector(1, width);
        let (form, place) = (weights.form(), Place::Vector { id, layer: 0, first: 0 });
        self.parameters.push(Parameter { name: name.into(), shape: vec![width], form, layer: None, place });
        id
    }

    /// `{path}.weight` of the decoder layers `layers`, in order, as rows `first..first + rows` of a stack, and the module of adapters of this name. Its place among the modules.
    pub(crate) fn projection(
        &mut self,
        (id, first): (MatrixId, usize),
        path: &'static str,
        part: Part,
        layers: &[usize],
        rows: usize,
    ) -> usize {
        let in_features = self.matrices[id.0].in_features;
        for (layer, number) in layers.iter().enumerate() {
            let name = format!("model.layers.{number}.{path}.weight");
            let place = Place::Matrix { id, layer, first };
            self.parameters.push(Parameter {
                name,
                shape: vec![rows, in_features],
                form: Form::Own,
                layer: Some(*number),
                place,
            });
        }
        let (layers, parts) = (layers.to_vec(), Vec::new());
        self.modules.push(LoraModule { path, part, layers, experts: None, parts, in_features, out_features: rows });
        self.modules.len() - 1
    }

    /// `mlp.experts.{e}.{projection}.weight` of every expert of the decoder layers `layers`, in order, as rows of a stack that has an entry for each expert of each layer; or all
    /// experts in one tensor, as transformers has them.
    pub(crate) fn experts(&mut self, of: &ExpertRows, layers: &[usize], num_experts: usize, rows: usize) {
        let in_features = self.matrices[of.stack.0].in_features;
        for (layer, number) in layers.iter().enumerate() {
            let prefix = format!("model.layers.{number}.mlp.experts");
            for expert in 0..num_experts {
                let place = Place::Matrix { id: of.stack, layer: layer * num_experts + expert, first: of.first };
                self.parameters.push(Parameter {
                    name: format!("{prefix}.{expert}.{}.weight", of.projection),
                    shape: vec![rows, in_features],
                    form: Form::Expert(FusedExpert {
                        name: format!("{prefix}.{}", of.fused.parameter),
                        num_experts,
                        rows: of.fused.rows,
                        columns: in_features,
                        expert,
                        first: of.fused.first,
                    }),
                    layer: Some(*number),
                    place,
                });
            }
        }
    }

    /// The module of adapters of some rows of every expert. Its place among the modules.
    pub(crate) fn expert_module(&mut self, of: &ExpertRows, layers: &[usize], num_experts: usize, rows: usize) -> usize {
        let in_features = self.matrices[of.stack.0].in_features;
        let &ExpertRows { projection, tinker_name, fused, .. } = of;
        let experts = ExpertModule { count: num_experts, projection, tinker_name, fused };
        self.modules.push(LoraModule {
            path: "mlp.experts",
            part: Part::Mlp,
            layers: layers.to_vec(),
            experts: Some(experts),
            parts: Vec::new(),
            in_features,
            out_features: rows,
        });
        self.modules.len() - 1
    }

    /// `{path}` of the decoder layers `layers`, `[experts, in, out]` each, as a stack that has an entry for each expert of each layer.
    pub(crate) fn flipped_experts(&mut self, id: MatrixId, path: &str, layers: &[usize], num_experts: usize, order: RowOrder) {
        let MatrixSpec { in_features, out_features, .. } = self.matrices[id.0];
        for (layer, number) in layers.iter().enumerate() {
            self.parameters.push(Parameter {
                name: format!("model.layers.{number}.{path}"),
                shape: vec![num_experts, in_features, out_features],
                form: Form::Flipped,
                layer: Some(*number),
                place: Place::Matrices { id, first: layer * num_experts, order },
            });
        }
    }

    /// `{path}` of the decoder layers `layers`, `[experts, width]` each, as a stack that has a vector for each expert of each layer.
    pub(crate) fn expert_vectors(&mut self, id: VectorId, path: &str, layers: &[usize], num_experts: usize, order: RowOrder) {
        for (layer, number) in layers.iter().enumerate() {
            self.parameters.push(Parameter {
                name: format!("model.layers.{number}.{path}"),
                shape: vec![num_experts, self.vectors[id.0].width],
                form: Form::Own,
                layer: Some(*number),
                place: Place::Vectors { id, first: layer * num_experts, order },
            });
        }
    }

    /// `{path}.weight` of the decoder layers `layers` as a stack of matrices that choose or gate, and carry no LoRA.
    pub(crate) fn router(
        &mut self,
        label: &'static str,
        path: &str,
        layers: &[usize],
        in_features: usize,
        rows: usize,
    ) -> MatrixId {
        let id = self.matrix(label, layers.len(), in_features, rows);
        // A choice that is off by little is another choice.
        self.matrices[id.0].stored = Stored::Exactly;
        for (layer, number) in layers.iter().enumerate() {
            let place = Place::Matrix { id, layer, first: 0 };
            let name = format!("model.layers.{number}.{path}.weight");
            self.parameters.push(Parameter {
                name,
                shape: vec![rows, in_features],
                form: Form::Own,
                layer: Some(*number),
                place,
            });
        }
        id
    }

    /// `{path}` of the decoder layers `layers`, in order, as elements `first..first + len` of a stack of vectors.
    pub(crate) fn vectors(&mut self, (id, first): (VectorId, usize), path: &str, layers: &[usize], len: usize) {
        for (layer, number) in layers.iter().enumerate() {
            let place = Place::Vector { id, layer, first };
            let name = format!("model.layers.{number}.{path}");
            self.parameters.push(Parameter { name, shape: vec![len], form: Form::Own, layer: Some(*number), place });
        }
    }

    /// A stack of the vectors `{path}` of the decoder layers `layers`.
    pub(crate) fn own_vector(&mut self, path: &str, layers: &[usize], width: usize) -> VectorId {
        let id = self.vector(layers.len(), width);
        self.vectors((id, 0), path, layers, width);
        id
    }

    /// A stack of the weights `{path}.weight` of norms in the decoder layers `layers`.
    pub(crate) fn norm(&mut self, path: &str, layers: &[usize], width: usize, weights: NormWeights) -> VectorId {
        self.shaped_vectors(path, layers, &[width], || weights.form())
    }

    /// A stack of the weights `{path}.weight`, `[channels, 1, kernel]` each, of convolutions of each channel by itself in the decoder layers `layers`: vectors of `[channels, kernel]`.
    pub(crate) fn convolution(&mut self, path: &str, layers: &[usize], [channels, kernel]: [usize; 2]) -> VectorId {
        self.shaped_vectors(path, layers, &[channels, 1, kernel], || Form::Own)
    }

    fn shaped_vectors(&mut self, path: &str, layers: &[usize], shape: &[usize], form: impl Fn() -> Form) -> VectorId {
        let id = self.vector(layers.len(), shape.iter().product());
        for (layer, number) in layers.iter().enumerate() {
            let place = Place::Vector { id, layer, first: 0 };
            let name = format!("model.layers.{number}.{path}.weight");
            self.parameters.push(Parameter { name, shape: shape.to_vec(), form: form(), layer: Some(*number), place });
        }
        id
    }

    /// Matrices of these names, `[rows, ...]` each, that carry no LoRA and are kept as they are, as a stack.
    pub(crate) fn frozen_matrices(
        &mut self,
        label: &'static str,
        names: impl Iterator<Item = String>,
        shape: &[usize],
    ) -> MatrixId {
        let names: Vec<String> = names.collect();
        let id = self.matrix(label, names.len(), shape[1..].iter().product(), shape[0]);
        self.matrices[id.0].stored = Stored::Exactly;
        for (layer, name) in names.into_iter().enumerate() {
            let place = Place::Matrix { id, layer, first: 0 };
            self.parameters.push(Parameter { name, shape: shape.to_vec(), form: Form::Own, layer: None, place });
        }
        id
    }

    /// Tensors of these names, as a stack of vectors.
    pub(crate) fn frozen_vectors(&mut self, names: impl Iterator<Item = String>, shape: &[usize]) -> VectorId {
        let names: Vec<String> = names.collect();
        let id = self.vector(names.len(), shape.iter().product());
        for (layer, name) in names.into_iter().enumerate() {
            let place = Place::Vector { id, layer, first: 0 };
            self.parameters.push(Parameter { name, shape: shape.to_vec(), form: Form::Own, layer: None, place });
        }
        id
    }

    /// Names what adapters may have in the place of a module: paths within a decoder layer, and rows, in order.
    pub(crate) fn parts(&mut self, module: usize, parts: impl IntoIterator<Item = (&'static str, usize)>) {
        self.modules[module].parts = parts.into_iter().map(|(path, rows)| ModulePart { path, rows }).collect();
    }

    /// A module of adapters that is no part of a decoder layer. Its place among the modules.
    pub(crate) fn module(&mut self, path: &'static str, part: Part, in_features: usize, out_features: usize) -> usize {
        let (layers, parts) = (vec![0], Vec::new());
        self.modules.push(LoraModule { path, part, layers, experts: None, parts, in_features, out_features });
        self.modules.len() - 1
    }

    /// Stores matrices that lie in four bits as they lie. `group_inputs`: of a parameter that does, how many inputs share a scale. A stack is so if all of it is, in groups that kernels have; if
    /// only some is, it is stored as it is computed with, for rounded again it would be another.
    pub(crate) fn keep_int4(&mut self, group_inputs: impl Fn(&Parameter) -> Option<usize>) {
        // Of each stack, how many parameters there are, how many of them lie so, and what their groups consist of.
        let mut found: Vec<(usize, usize, Option<Int4Group>)> =
            self.matrices.iter().map(|_| (0, 0, Some(Int4Group::Of128))).collect();
        for parameter in &self.parameters {
            let (Place::Matrix { id, .. } | Place::Matrices { id, .. }) = parameter.place else { continue };
            let (parameters, lie_so, group) = &mut found[id.0];
            *parameters += 1;
            let Some(inputs) = group_inputs(parameter) else { continue };
            *lie_so += 1;
            // One group of all inputs consists of any.
            let own =
                if inputs == self.matrices[id.0].in_features { Some(Int4Group::Of128) } else { Int4Group::dividing(inputs) };
            *group = group.zip(own).map(|(group, own)| if own.inputs() < group.inputs() { own } else { group });
        }
        for (matrices, (parameters, lie_so, group)) in self.matrices.iter_mut().zip(found) {
            matrices.stored = match (matrices.stored, group) {
                (stored, _) if lie_so == 0 => stored,
                (Stored::AsAsked, Some(group)) if lie_so == parameters => Stored::AsTheyLie(group),
                _ => Stored::Exactly,
            };
        }
    }

    /// Bytes of all stacks, but for what layouts add.
    pub(crate) fn element_bytes(&self, format: WeightFormat) -> u64 {
        self.stacks(format).iter().map(StackShape::element_bytes).sum()
    }

    /// The parameters of a checkpoint, what is before the layers first, then layer after layer, and then the rest.
    pub(crate) fn parameters(&self) -> Vec<&Parameter> {
        let first_layer = self.parameters.iter().position(|p| p.layer.is_some()).unwrap_or(0);
        let mut all: Vec<(usize, &Parameter)> = self.parameters.iter().enumerate().collect();
        // Stable: within a layer as they were declared.
        all.sort_by_key(|(i, p)| match p.layer {
            Some(layer) => 1 + layer,
            None if *i < first_layer => 0,
            None => usize::MAX,
        });
        all.into_iter().map(|(_, p)| p).collect()
    }

    /// The modules that can carry LoRA.
    pub(crate) fn modules(&self) -> &[LoraModule] {
        &self.modules
    }

    /// The matrices as they are multiplied.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = MatrixShape> {
        self.matrices.iter().map(|&MatrixSpec { label, in_features, out_features, .. }| MatrixShape {
            label,
            in_features,
            out_features,
        })
    }

    /// Widths of the left sides of all products, forward and back.
    pub(crate) fn widths(&self) -> impl Iterator<Item = usize> {
        let of_modules = self.modules.iter().flat_map(|m| [m.in_features, m.out_features]);
        self.matrices.iter().flat_map(|m| [m.in_features, m.out_features]).chain(of_modules)
    }
}
