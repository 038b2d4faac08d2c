//! Something of the shape of an adapter, a gradient, under the names and in the shapes that a file has the adapter in.
//!
//! Where the file has one tensor for several of ours, theirs is the sum of them: what several read is moved by each.

use std::collections::BTreeMap;
use std::path::Path;

use strata_tensor::{Backend, DType, HostTensor};

use super::OpenAdapter;
use super::names::{Layout, a_name, b_name, in_composite};
use crate::Result;
use crate::lora::{LoraModule, LoraParams, LoraStack, Part};

/// The gradient of an adapter that was read from `dir`, as the tensors that are in its file.
///
/// # Errors
/// If the files are not those of an adapter for these modules, or the backend does not have the gradient.
pub fn gradient_as_given(
    backend: &dyn Backend,
    dir: &Path,
    modules: &[LoraModule],
    gradient: &LoraParams,
) -> Result<Vec<(String, HostTensor)>> {
    let file = OpenAdapter::open(dir, modules)?;
    let tensors = file.tensors();
    let mut sums = Sums::default();
    for (index, (module, stack)) in modules.iter().zip(&gradient.stacks).enumerate() {
        let (Some(stack), Some(layout)) = (stack, file.layouts[index]) else { continue };
        for (layer, number) in module.layers.iter().enumerate().filter(|(_, number)| file.layers[index].contains(number)) {
            let ours = Ours::of_layer(backend, module, stack, layer)?;
            for (place, path) in tensors.paths(module, layout, *number).into_iter().enumerate() {
                let [a, b] = [a_name("", &path), b_name("", &path)];
                let shape = |name: &str| file.checkpoint.shape(name).map(<[usize]>::to_vec).unwrap_or_default();
                let (of_a, of_b) = (shape(&a), shape(&b));
                let [a, b] = [a, b].map(|name| if file.naming.of_composite { in_composite(&name) } else { name });
                let (to_a, to_b) = ours.places(module, layout, place, [&of_a, &of_b]);
                sums.add(a, of_a, &ours.a, to_a);
                sums.add(b, of_b, &ours.b, to_b);
            }
        }
    }
    let host = |(name, (shape, values)): (String, (Vec<usize>, Vec<f32>))| {
        Ok((name, HostTensor::from_f32(&values, &shape, DType::F32)?))
    };
    sums.by_name.into_iter().map(host).collect()
}

#[derive(Default)]
struct Sums {
    by_name: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Sums {
    /// Adds each of `values` at the place that it has in a tensor, if it has one.
    fn add(&mut self, name: String, shape: Vec<usize>, values: &[f32], place: impl Fn(usize) -> Option<usize>) {
        let elements = shape.iter().product();
        let (_, sums) = self.by_name.entry(name).or_insert_with(|| (shape, vec![0.0; elements]));
        for (i, value) in values.iter().enumerate() {
            if let Some(sum) = place(i).and_then(|place| sums.get_mut(place)) {
                *sum += value;
            }
        }
    }
}

/// What we have of a layer.
struct Ours {
    rank: usize,
    /// `[entries, rank, in]`, of the embedding `[vocab, rank]`.
    a: Vec<f32>,
    /// `[entries, rank, out]`.
    b: Vec<f32>,
}

/// Where an element of ours is in a tensor of a file, if it is in that one.
type Places<'m> = Box<dyn Fn(usize) -> Option<usize> + 'm>;

impl Ours {
    fn of_layer(backend: &dyn Backend, module: &LoraModule, stack: &LoraStack, layer: usize) -> Result<Self> {
        let entries = module.entries_of_layer();
        let rows =
            |tensor: &strata_tensor::Tensor| backend.to_f32_vec(tensor.as_ref().rows(layer * entries..(layer + 1) * entries));
        Ok(Ours { rank: stack.b.shape().dims()[1], a: rows(&stack.a)?, b: rows(&stack.b)? })
    }

    /// Where elements of A and of B are in the tensors of pair `place` of a layer, of these shapes.
    fn places<'m>(
        &self,
        module: &'m LoraModule,
        layout: Layout,
        place: usize,
        [of_a, of_b]: [&[usize]; 2],
    ) -> (Places<'m>, Places<'m>) {
        let (rank, width, out) = (self.rank, module.in_features, module.out_features);
        // Entry, rank and column of an element of ours.
        let at = move |i: usize, width: usize| (i / width / rank, i / width % rank, i % width);
        match (layout, module.experts) {
            (Layout::OfParts, _) => {
                let of_part = rank / module.parts.len();
                let first: usize = module.parts[..place].iter().map(|part| part.rows).sum();
                let rows = module.parts[place].rows;
                let own = move |k: usize| k.checked_sub(place * of_part).filter(|k| *k < of_part);
                let to_b = move |i: usize| {
                    let (_, k, row) = at(i, out);
                    Some(row.checked_sub(first).filter(|row| *row < rows)? * of_part + own(k)?)
                };
                (Box::new(move |i| own(at(i, width).1).map(|k| k * width + i % width)), Box::new(to_b))
            }
            (Layout::OfExpert, Some(_)) => {
                let own = move |i: usize, width: usize| Some(at(i, width)).filter(|(expert, ..)| *expert == place);
                let to_a = move |i| own(i, width).map(|(_, k, column)| k * width + column);
                (Box::new(to_a), Box::new(move |i| own(i, out).map(|(_, k, row)| row * rank + k)))
            }
            (Layout::Fused { .. }, Some(experts)) => {
                let to_b = move |i: usize| {
                    let (expert, k, row) = at(i, out);
                    let row = experts.fused.first + row * experts.fused.step;
                    Some((row * rank + k) * experts.count + expert)
                };
                // One expert after another, as ours.
                (Box::new(Some), Box::new(to_b))
            }
            _ => {
                // A side that all experts share has one entry.
                let [entries_a, entries_b] = [of_a, of_b].map(|shape| if shape.len() == 3 { shape[0] } else { 1 });
                let is_table = module.part == Part::Embedding;
                let to_a = move |i: usize| match is_table {
                    true => Some(i % rank * width + i / rank),
                    false => Some(i % (entries_a * rank * width)),
                };
                let to_b = move |i: usize| {
                    let (entry, k, row) = at(i, out);
                    Some((entry % entries_b * out + row) * rank + k)
                };
                (Box::new(to_a), Box::new(to_b))
            }
        }
    }
}
