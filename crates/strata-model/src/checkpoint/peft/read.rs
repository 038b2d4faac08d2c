//! Reading the tensors of an adapter into stacks.

use strata_tensor::{Backend, DType, HostRef, HostTensor};
use strata_values::{Converted, Run, SourceTensor, alone, first_negative, first_not_finite, turned};

use super::fused::b_of_rows;
use super::names::{AdapterTensors, EMBEDDING_PATH, Layout, UNEMBED_PATHS, a_name, b_name};
use crate::Result;
use crate::checkpoint::{Checkpoint, CheckpointReader};
use crate::lora::{LoraConfig, LoraModule, LoraParams, LoraStack, Part};

/// What the name of a copy of the base's weight ends in.
const BASE_WEIGHT: &str = ".base_layer.weight";

/// Reads one quantity of an adapter. Whatever does not fit is in the reader's account, to be settled before the result is used. Layers that a module is in, and that `layers` does not have at
/// its place, are zeros on both sides: no gradient ever moves them, for that of either side is a product with the other.
pub(super) fn read_params(
    backend: &dyn Backend,
    tensors: AdapterTensors<'_>,
    reader: &mut CheckpointReader<'_>,
    modules: &[LoraModule],
    config: &LoraConfig,
    layers: Option<&[Vec<usize>]>,
) -> Result<LoraParams> {
    let mut stacks = Vec::with_capacity(modules.len());
    for (index, module) in modules.iter().enumerate() {
        if !config.carries(index, module) {
            stacks.push(None);
            continue;
        }
        let rank = config.rank_of(index, module);
        let layout = tensors.layout(module).unwrap_or(Layout::OfLayer);
        let (mut pairs, mut names) = (Vec::with_capacity(module.layers.len()), Vec::new());
        for &number in &module.layers {
            let is_there = layers.is_none_or(|layers| layers[index].contains(&number));
            for (place, path) in tensors.paths(module, layout, number).into_iter().enumerate() {
                if !is_there {
                    pairs.push(None);
                    continue;
                }
                let (a, b) = (a_name(tensors.prefix, &path), b_name(tensors.prefix, &path));
                let [of_a, of_b] = shapes(reader, module, layout, (rank, place), [&a, &b]);
                let (a, b) = (reader.require(&a, &of_a), reader.require(&b, &of_b));
                pairs.extend(a.zip(b).map(Some));
                names.extend([a_name, b_name].map(|name| name(tensors.prefix, &path)));
            }
        }
        // Memory is for what is there: with anything missing the reader fails, and what is read here is not used.
        let wanted = match layout {
            Layout::OfExpert => module.entries(),
            Layout::OfParts => module.layers.len() * module.parts.len(),
            Layout::OfLayer | Layout::Fused { .. } => module.layers.len(),
        };
        if pairs.len() == wanted {
            stacks.push(Some(match layout {
                Layout::OfParts => read_parts(backend, module, rank, &pairs)?,
                _ => read_stack(backend, module, layout, rank, &pairs)?,
            }));
            // Read, it is in memory twice.
            names.iter().for_each(|name| reader.forget(name));
        }
    }
    Ok(LoraParams { stacks })
}

/// The shapes of the A and B of these names, in place `place` of those of a layer. Where they have an axis of experts, one side may be the same for all, with an axis of 1.
fn shapes(
    reader: &CheckpointReader<'_>,
    module: &LoraModule,
    layout: Layout,
    (rank, place): (usize, usize),
    names: [&str; 2],
) -> [Vec<usize>; 2] {
    let (a, b) = ([rank, module.in_features], [module.out_features, rank]);
    match (layout, module.experts) {
        (Layout::OfLayer, Some(experts)) => {
            let is_shared = |name| reader.shape(name).is_some_and(|shape| shape.len() == 3 && shape[0] == 1);
            let [of_a, of_b] = match names.map(is_shared) {
                [true, false] => [1, experts.count],
                [false, true] => [experts.count, 1],
                _ => [experts.count, experts.count],
            };
            [[&[of_a], &a[..]].concat(), [&[of_b], &b[..]].concat()]
        }
        (Layout::Fused { .. }, Some(experts)) => {
            let all = experts.count * rank;
            [vec![all, module.in_features], vec![experts.fused.rows, all]]
        }
        (Layout::OfParts, _) => {
            let of_part = rank / module.parts.len();
            [vec![of_part, module.in_features], vec![module.parts[place].rows, of_part]]
        }
        _ => [a.to_vec(), b.to_vec()],
    }
}

fn read_stack(
    backend: &dyn Backend,
    module: &LoraModule,
    layout: Layout,
    rank: usize,
    pairs: &[Option<(SourceTensor<'_>, SourceTensor<'_>)>],
) -> Result<LoraStack> {
    let mut stack = LoraStack::zeros(backend, module, rank)?;
    // Of what a pair stands for, a tensor has all or one that serves for all.
    let entries = module.entries() / pairs.len().max(1);
    for (first, (a, b)) in pairs.iter().enumerate().filter_map(|(i, pair)| Some((i * entries, pair.as_ref()?))) {
        let (a, b) = (a.read(DType::F32)?, b.read(DType::F32)?);
        let a = if module.part == Part::Embedding { Converted::Owned(transposed(a.as_ref())) } else { a };
        let b = match (layout, module.experts) {
            (Layout::Fused { .. }, Some(experts)) => {
                b_of_rows(b.as_ref(), &experts.fused, [experts.count, rank, module.out_features])
            }
            _ => transposed(b.as_ref()),
        };
        for (side, to) in [(a.as_ref(), &mut stack.a), (b.as_ref(), &mut stack.b)] {
            let len = to.shape().row_len();
            let given = side.shape().len() / len;
            for entry in (first..first + entries).step_by(given) {
                backend.upload(side, to.rows_mut(entry..entry + given))?;
            }
        }
    }
    Ok(stack)
}

/// Pairs of parts as one: an A after another, and a B that is zero where the rows of one part meet the A of another.
fn read_parts(
    backend: &dyn Backend,
    module: &LoraModule,
    rank: usize,
    pairs: &[Option<(SourceTensor<'_>, SourceTensor<'_>)>],
) -> Result<LoraStack> {
    let mut stack = LoraStack::zeros(backend, module, rank)?;
    let of_part = rank / module.parts.len();
    for (layer, pairs) in pairs.chunks_exact(module.parts.len()).enumerate() {
        let mut joined = HostTensor::zeros(&[rank, module.out_features], DType::F32);
        let mut first = 0;
        for (place, (part, pair)) in module.parts.iter().zip(pairs).enumerate() {
            // All of a layer are there, or none is.
            let Some((a, b)) = pair else { continue };
            let ranks = place * of_part..(place + 1) * of_part;
            backend.upload(a.read(DType::F32)?.as_ref(), stack.a.row_mut(layer).into_rows(ranks.clone()))?;
            let b = transposed(b.read(DType::F32)?.as_ref());
            let size = DType::F32.size_bytes();
            let rows = joined.bytes_mut().chunks_exact_mut(module.out_features * size).skip(ranks.start);
            for (to, from) in rows.zip(b.as_ref().as_bytes().chunks_exact(part.rows * size)) {
                to[first * size..][..part.rows * size].copy_from_slice(from);
            }
            first += part.rows;
        }
        backend.upload(joined.as_ref(), stack.b.row_mut(layer))?;
    }
    Ok(stack)
}

/// f32 matrices, the last two axes, transposed. Moves bits, computes nothing.
pub(super) fn transposed(matrices: HostRef<'_>) -> HostTensor {
    turned(&alone, matrices)
}

/// Leaves aside the base's own weight, which is frozen: where embeddings carry LoRA, PEFT writes it too unless it is told not to (`save_embedding_layers`).
pub(super) fn leave_base(reader: &mut CheckpointReader<'_>, module: &LoraModule) {
    let (path, shape) = match module.part {
        Part::Unembed => (UNEMBED_PATHS[1], [module.out_features, module.in_features]),
        Part::Embedding => (EMBEDDING_PATH, [module.in_features, module.out_features]),
        Part::Attention | Part::Mlp => return,
    };
    let name = format!("{path}{BASE_WEIGHT}");
    if reader.contains(&name) {
        reader.require(&name, &shape);
    }
}

/// Refuses an adapter that would make every number it touches infinite or not a number.
pub(super) fn refuse_not_finite(checkpoint: &Checkpoint) -> Result<()> {
    for name in checkpoint.names().filter(|name| !name.ends_with(BASE_WEIGHT)) {
        refuse_elements(checkpoint, name, first_not_finite, "not a finite number")?;
        checkpoint.forget_all(name);
    }
    Ok(())
}

/// Refuses moments with which the next step would leave no number of the adapter: squares that were averaged are not negative.
pub(super) fn refuse_wrong_moments(checkpoint: &Checkpoint, [m, v]: [&str; 2]) -> Result<()> {
    for name in checkpoint.names().filter(|name| name.starts_with(m) || name.starts_with(v)) {
        refuse_elements(checkpoint, name, first_not_finite, "not a finite number")?;
        if name.starts_with(v) {
            refuse_elements(checkpoint, name, first_negative, "which an average of squares cannot be")?;
        }
        checkpoint.forget_all(name);
    }
    Ok(())
}

/// What finds the first of some elements, with its place.
type First = fn(Run<'_>, HostRef<'_>) -> Option<(usize, f32)>;

fn refuse_elements(checkpoint: &Checkpoint, name: &str, first: First, what: &str) -> Result<()> {
    let Some(tensor) = checkpoint.tensor(name)? else { return Ok(()) };
    match first(&alone, tensor.read(DType::F32)?.as_ref()) {
        Some((place, value)) => Err(checkpoint.error(format!("element {place} of tensor {name} is {value}, {what}"))),
        None => Ok(()),
    }
}
