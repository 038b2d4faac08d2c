//! Writing the tensors of an adapter, each as its turn comes.

use std::cell::RefCell;
use std::path::Path;

use safetensors::Dtype;
use strata_tensor::{Backend, HostTensor, TensorRef};

use super::AdapterFormat;
use super::fused::{FusedPart, join_a, join_b};
use super::names::{UNEMBED_PATHS, a_name, b_name, fused_paths, in_composite, module_path};
use super::read::transposed;
use crate::Result;
use crate::checkpoint::{Sink, WrittenTensor, write_safetensors};
use crate::lora::{LoraModule, LoraParams, LoraStack, Part};

/// What went wrong as tensors were read from a backend, for whoever could not be told at once.
pub(super) type Lost = RefCell<Option<strata_tensor::Error>>;

/// A tensor to be written. It is read from its backend, and laid out as files have it, only when its turn comes.
pub(super) struct OutTensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Box<dyn Fn() -> Vec<u8> + 'a>,
}

impl<'a> OutTensor<'a> {
    /// A number of its own.
    pub(super) fn count(count: u64) -> Self {
        OutTensor { dtype: Dtype::U64, shape: Vec::new(), bytes: Box::new(move || count.to_le_bytes().to_vec()) }
    }

    fn f32(shape: Vec<usize>, values: impl Fn() -> HostTensor + 'a) -> Self {
        OutTensor { dtype: Dtype::F32, shape, bytes: Box::new(move || values().as_ref().as_bytes().to_vec()) }
    }
}

/// Where what is written is read from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) lost: &'a Lost,
}

impl Source<'_> {
    /// The elements of a view. Where the backend refuses, zeros, and the reason in `lost`: what is written is then of no use.
    pub(super) fn download(&self, view: TensorRef<'_>) -> HostTensor {
        self.backend.to_host(view).unwrap_or_else(|error| {
            self.lost.borrow_mut().get_or_insert(error);
            HostTensor::zeros(view.shape().dims(), view.dtype())
        })
    }
}

/// All tensors of one quantity of an adapter, by their names in files.
pub(super) fn tensors<'a>(
    from: Source<'a>,
    prefix: &str,
    modules: &'a [LoraModule],
    params: &'a LoraParams,
    format: AdapterFormat,
) -> Vec<(String, OutTensor<'a>)> {
    let named = |path: String| if format == AdapterFormat::PeftOfComposite { in_composite(&path) } else { path };
    let carried: Vec<(&LoraModule, &LoraStack)> =
        modules.iter().zip(&params.stacks).filter_map(|(module, stack)| Some((module, stack.as_ref()?))).collect();
    let mut all = Vec::new();
    for &(module, stack) in &carried {
        if format.is_peft() && module.experts.is_some() {
            continue;
        }
        for (layer, &number) in module.layers.iter().enumerate() {
            let path = match module.part {
                Part::Unembed if format.is_peft() => UNEMBED_PATHS[1].into(),
                _ => named(module_path(module, number)),
            };
            let rank = stack.b.shape().dims()[1];
            let leading = module.experts.map_or(vec![], |experts| vec![experts.count]);
            let shape = |matrix: [usize; 2]| [&leading[..], &matrix].concat();
            let (of_a, of_b) = (shape([rank, module.in_features]), shape([module.out_features, rank]));
            let (a, b) = (of_layer(module, &stack.a, layer), of_layer(module, &stack.b, layer));
            let is_turned = module.part == Part::Embedding;
            let a = move || if is_turned { transposed(from.download(a).as_ref()) } else { from.download(a) };
            all.push((a_name(prefix, &path), OutTensor::f32(of_a, a)));
            all.push((b_name(prefix, &path), OutTensor::f32(of_b, move || transposed(from.download(b).as_ref()))));
        }
    }
    if format.is_peft() {
        fused_tensors(from, prefix, &carried, &named, &mut all);
    }
    all
}

/// The rows of a stack that are of one layer: `[experts, rank, width]`, or one `[1, rank, width]`.
pub(super) fn of_layer<'a>(module: &LoraModule, stack: &'a strata_tensor::Tensor, layer: usize) -> TensorRef<'a> {
    let entries = module.entries_of_layer();
    stack.as_ref().rows(layer * entries..(layer + 1) * entries)
}

/// The pairs of the parameters that have all experts of a layer.
fn fused_tensors<'a>(
    from: Source<'a>,
    prefix: &str,
    carried: &[(&'a LoraModule, &'a LoraStack)],
    named: &dyn Fn(String) -> String,
    all: &mut Vec<(String, OutTensor<'a>)>,
) {
    let groups = fused_groups(carried.iter().map(|(module, _)| *module));
    let num_groups = groups.len();
    for (place, (parameter, first)) in groups.into_iter().enumerate() {
        let experts = first.experts.expect("what is fused are experts");
        let of_group = |m: &LoraModule| m.experts.is_some_and(|experts| experts.fused.parameter == parameter);
        let parts: Vec<(&LoraModule, &LoraStack)> = carried.iter().copied().filter(|(module, _)| of_group(module)).collect();
        let rank: usize = parts.iter().map(|(_, stack)| stack.a.shape().dims()[1]).sum();
        for (layer, &number) in first.layers.iter().enumerate() {
            // The last parameter of the experts is wrapped last.
            let path = &named(fused_paths(first, number)[num_groups - 1 - place].clone());
            let (of_a, of_b) = (vec![experts.count * rank, first.in_features], vec![experts.fused.rows, rank * experts.count]);
            let (of_parts, too) = (parts.clone(), parts.clone());
            let a = move || joined(from, &of_parts, layer, |stack| &stack.a, join_a);
            let b = move || joined(from, &too, layer, |stack| &stack.b, join_b);
            all.push((a_name(prefix, path), OutTensor::f32(of_a, a)));
            all.push((b_name(prefix, path), OutTensor::f32(of_b, b)));
        }
    }
}

/// The fused parameters of these modules in the order in which transformers has them, each with its first module.
pub(super) fn fused_groups<'a>(modules: impl Iterator<Item = &'a LoraModule>) -> Vec<(&'static str, &'a LoraModule)> {
    let mut groups: Vec<(&'static str, &LoraModule)> = Vec::new();
    for module in modules {
        let Some(experts) = module.experts else { continue };
        if !groups.iter().any(|(parameter, _)| *parameter == experts.fused.parameter) {
            groups.push((experts.fused.parameter, module));
        }
    }
    groups
}

fn joined(
    from: Source<'_>,
    parts: &[(&LoraModule, &LoraStack)],
    layer: usize,
    side: impl Fn(&LoraStack) -> &strata_tensor::Tensor,
    join: impl Fn(&[FusedPart<'_>]) -> HostTensor,
) -> HostTensor {
    let values: Vec<HostTensor> =
        parts.iter().map(|(module, stack)| from.download(of_layer(module, side(stack), layer))).collect();
    let fused = parts
        .iter()
        .zip(&values)
        .filter_map(|((module, _), values)| Some(FusedPart { rows: module.experts?.fused, values: values.as_ref() }));
    join(&fused.collect::<Vec<_>>())
}

/// Writes tensors whose reading from a backend leaves its complaints in `lost`.
pub(super) fn write_tensors<'a>(
    path: &Path,
    metadata: &[(&str, &str)],
    tensors: impl IntoIterator<Item = (String, OutTensor<'a>)>,
    lost: &Lost,
) -> Result<()> {
    let written = |(name, OutTensor { dtype, shape, bytes })| {
        let write = Box::new(move |sink: &mut Sink<'_>| sink.put(&bytes()));
        WrittenTensor { name, dtype, shape, write }
    };
    write_safetensors(path, metadata, tensors.into_iter().map(written).collect())?;
    lost.take().map_or(Ok(()), |error| Err(error.into()))
}
