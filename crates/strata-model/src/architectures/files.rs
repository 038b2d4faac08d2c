//! The tensors of a checkpoint as transformers writes it, made of the parameters of a model.

use std::collections::BTreeMap;

use super::composite::{TEXT_PREFIX, VISION_PREFIX};
use super::decoder::Plan;
use super::{Form, Parameter, ParameterShape};
use crate::ModelConfig;

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The parameters whose elements it has, one after the other: their places among [`super::parameter_shapes`], and what those say of them.
    pub parts: Vec<(usize, ParameterShape)>,
}

/// The tensors of a checkpoint of this configuration, in the order of their first parameters: a parameter each, but for models that see, which are written as composites, with all
/// experts of a layer in one tensor.
pub fn file_tensors(config: &ModelConfig) -> Vec<FileTensor> {
    let plan = Plan::of(config);
    let is_composite = config.family.config().vision().is_some();
    let mut tensors: Vec<FileTensor> = Vec::new();
    // By the name of a tensor that has experts, its place and where each of its parts belongs.
    let mut fused: BTreeMap<String, (usize, Vec<[usize; 2]>)> = BTreeMap::new();
    for (index, parameter) in plan.declaration.parameters().into_iter().enumerate() {
        let part = (index, parameter.shape_in_files());
        match parameter {
            Parameter { form: Form::Expert(of), .. } if is_composite => {
                let (place, order) = fused.entry(of.name.clone()).or_insert_with(|| {
                    let shape = vec![of.num_experts, of.rows, of.columns];
                    tensors.push(FileTensor { name: in_composite(&of.name), shape, parts: Vec::new() });
                    (tensors.len() - 1, Vec::new())
                });
                let at = order.partition_point(|before| *before < [of.expert, of.first]);
                order.insert(at, [of.expert, of.first]);
                tensors[*place].parts.insert(at, part);
            }
            Parameter { name, shape, .. } => {
                let name = if is_composite { in_composite(name) } else { name.clone() };
                tensors.push(FileTensor { name, shape: shape.clone(), parts: vec![part] });
            }
        }
    }
    tensors
}

/// What a parameter of a model is called where the model is a part of a composite.
fn in_composite(name: &str) -> String {
    match name.strip_prefix("model.").filter(|_| !name.starts_with(VISION_PREFIX)) {
        Some(rest) => format!("{TEXT_PREFIX}{rest}"),
        None => name.into(),
    }
}
