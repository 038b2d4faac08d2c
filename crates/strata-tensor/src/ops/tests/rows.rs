//! Rows that come from elsewhere, and rows seen as others.

use super::encoder::{leaf, on_forever, same_everywhere};
use super::*;
use crate::{Shape, TensorRef};

const TOKENS: usize = 7;
const WIDTH: usize = 5;
/// Neighbours, one that is empty, and the last rows.
const RANGES: [Range<usize>; 4] = [1..3, 3..4, 4..4, 6..7];

/// What comes to each of the ranges.
fn sources(b: &dyn Backend) -> [&'static Tensor; 4] {
    let source = |key: usize| on_forever(b, &normal(RANGES[key].len() * WIDTH, 10 + key as u64), &[RANGES[key].len(), WIDTH]);
    [0, 1, 2, 3].map(source)
}

fn rows_of<'t>(sources: &[&'t Tensor; 4]) -> Vec<(Range<usize>, TensorRef<'t>)> {
    RANGES.into_iter().zip(sources).map(|(range, source)| (range, source.as_ref())).collect()
}

/// The element of the sources that comes to this one of `x`.
fn source_of(i: usize) -> Option<f32> {
    let (token, column) = (i / WIDTH, i % WIDTH);
    let key = RANGES.iter().position(|range| range.contains(&token))?;
    Some(normal(RANGES[key].len() * WIDTH, 10 + key as u64)[(token - RANGES[key].start) * WIDTH + column])
}

fn of_bits(bits: Vec<u32>) -> Vec<f32> {
    bits.into_iter().map(f32::from_bits).collect()
}

#[test]
fn rows_of_ranges_come_from_elsewhere_or_have_it_added_everywhere() {
    let x = tensor(&[TOKENS, WIDTH], DType::F32, 1);
    let values = x.to_f32_vec();
    let replaced = same_everywhere(&x, |b, tape, x| tape.replace_rows(x.clone(), &rows_of(&sources(b))));
    let added = same_everywhere(&x, |b, tape, x| tape.add_rows(x.clone(), &rows_of(&sources(b))));
    let expected = (0..values.len()).map(|i| source_of(i).map_or((values[i], values[i]), |v| (v, values[i] + v)));
    assert_eq!((of_bits(replaced), of_bits(added)), expected.unzip());
    // Nothing of what others hold has changed.
    assert_eq!(x.to_f32_vec(), values);
}

#[test]
fn gradients_pass_through_added_rows_and_not_through_replaced_ones() {
    let b = backend();
    let (x, from, weight) = (tensor(&[TOKENS, WIDTH], DType::F32, 1), sources(&b), on_forever(&b, &normal(WIDTH, 2), &[WIDTH]));
    check_gradient(&b, &x, |tape, x| tape.replace_rows(x.clone(), &rows_of(&from)));
    check_gradient(&b, &x, |tape, x| tape.add_rows(x.clone(), &rows_of(&from)));
    check_gradient(&b, &x, |tape, x| tape.take_rows(x, &[0, 1, 3, 6]));
    check_gradient(&b, &x, |tape, x| {
        let h = tape.take_rows(x, &[2, 3, 4, 5])?;
        let rest = tape.take_rows(x, &[0, 2, 3, 6])?;
        tape.add(&h, rest)
    });
    // In the middle of others, beside who reads the same value, and as the last of a layer that is run again.
    let layer = move |tape: &mut Tape<'_>, x: &Var| {
        let h = tape.replace_rows(x.clone(), &rows_of(&from)[..2])?;
        let h = tape.rms_norm(&h, weight.as_ref(), 1e-6, DType::F32)?;
        let h = tape.add_rows(h, &rows_of(&from))?;
        let sum = tape.add(&h, x.clone())?;
        let h = tape.rms_norm(&sum, weight.as_ref(), 1e-6, DType::F32)?;
        tape.add_rows(h, &rows_of(&from)[1..])
    };
    check_gradient(&b, &x, layer);
    let (y, dx) = go_back(&b, &x, &mut Nowhere, layer);
    let (y_again, dx_again) = go_back(&b, &x, &mut Nowhere, |tape, x| tape.checkpoint(x, layer));
    assert_eq!((bits(&y), dx), (bits(&y_again), dx_again));
}

#[test]
fn rows_added_last_do_not_need_the_value_that_a_layer_run_again_leaves_out() {
    let b = backend();
    let (layer, x) = (&*Box::leak(Box::new(Layer::random())), tensor(&[9, 7], DType::F32, 3));
    let rows = on_forever(&b, &normal(22, 4), &[2, 11]);
    let residual = tensor(&[9, 11], DType::F32, 5);
    let run = |checkpointed: bool| {
        let mut gradients = layer_gradients(None);
        let residual = &residual;
        let (y, dx) = go_back(&b, &x, &mut gradients, |tape, x| {
            let residual = residual.clone();
            let of_layer = move |tape: &mut Tape<'_>, x: &Var| {
                let residual = tape.constant(residual.clone());
                let y = tape.add_linear(&residual, x, layer.linear())?;
                tape.add_rows(y, &[(3..5, rows.as_ref())])
            };
            if checkpointed { tape.checkpoint(x, of_layer) } else { of_layer(tape, x) }
        });
        (bits(&y), dx, [0, 1, 2].map(|module| gradients.of(LoraSite { group: 0, module, layer: 0 })))
    };
    assert!(run(true) == run(false));
}

#[test]
fn without_rows_a_value_is_the_one_it_was() {
    let b = backend();
    let mut tape = Tape::recording(&b);
    let x = leaf(&mut tape, &[TOKENS, WIDTH]);
    let (before, node): (*const Tensor, _) = (x.value(), x.node());
    let y = tape.replace_rows(x, &[]).unwrap();
    let y = tape.add_rows(y, &[]).unwrap();
    assert!(std::ptr::eq(before, y.value()) && y.node() == node && node.is_some());
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let b = backend();
    let [of_two, of_one, narrow, bf16] = [
        tensor(&[2, WIDTH], DType::F32, 1),
        tensor(&[1, WIDTH], DType::F32, 1),
        tensor(&[2, WIDTH - 1], DType::F32, 1),
        tensor(&[2, WIDTH], DType::BF16, 1),
    ];
    let refused = |x: &Tensor, rows: &[(Range<usize>, &Tensor)]| {
        let rows: Vec<_> = rows.iter().map(|(range, from)| (range.clone(), from.as_ref())).collect();
        let mut tape = Tape::inference(&b);
        let replaced = tape.replace_rows(tape.constant(x.clone()), &rows).is_err();
        assert_eq!(tape.add_rows(tape.constant(x.clone()), &rows).is_err(), replaced);
        replaced
    };
    let x = tensor(&[TOKENS, WIDTH], DType::F32, 1);
    assert!(!refused(&x, &[(0..2, &of_two), (2..3, &of_one), (5..7, &of_two)]));
    assert!(refused(&x, &[(2..3, &of_one), (0..2, &of_two)]) && refused(&x, &[(0..2, &of_two), (1..3, &of_two)]));
    assert!(
        refused(&x, &[(6..8, &of_two)])
            && refused(&x, &[(7..8, &of_one)])
            && refused(&x, &[(usize::MAX - 1..usize::MAX, &of_one)])
    );
    assert!(refused(&x, &[(0..1, &of_two)]) && refused(&x, &[(0..2, &of_one)]) && refused(&x, &[(0..2, &narrow)]));
    let backwards = Range { start: 3, end: 1 };
    assert!(refused(&x, &[(backwards, &tensor(&[0, WIDTH], DType::F32, 1))]));
    assert!(refused(&x, &[(0..2, &bf16)]) && refused(&tensor(&[TOKENS, WIDTH], DType::BF16, 1), &[(0..2, &of_two)]));
}

#[test]
fn elements_are_seen_in_another_shape_where_they_lie_and_gradients_go_back() {
    let b = backend();
    let x = tensor(&[8, 3], DType::F32, 1);
    let weight = tensor(&[12], DType::F32, 2);
    check_gradient(&b, &x, |tape, x| {
        let wide = tape.reshape(x.clone(), &[2, 12])?;
        let h = tape.rms_norm(&wide, weight.as_ref(), 1e-6, DType::F32)?;
        let narrow = tape.reshape(h, &[8, 3])?;
        tape.add(&narrow, x.clone())
    });
    let bits_of = same_everywhere(&x, |_, tape, x| tape.reshape(x.clone(), &[2, 12]));
    assert_eq!(bits_of, bits(&x));

    let far = RemoteBackend::new(backend());
    let mut tape = Tape::inference(&far);
    let alone = tape.constant(far.tensor(&x.to_f32_vec(), &[8, 3], DType::F32).unwrap());
    let before = far.allocations();
    let wide = tape.reshape(alone, &[2, 3, 4]).unwrap();
    assert_eq!((wide.value().shape(), far.allocations()), (Shape::new(&[2, 3, 4]), before));
    let held = tape.reshape(wide.clone(), &[24]).unwrap();
    assert_eq!((held.value().shape(), wide.value().shape()), (Shape::new(&[24]), Shape::new(&[2, 3, 4])));
    for dims in [&[][..], &[8, 4], &[2, 3, 2, 2, 1], &[usize::MAX, 2], &[0, 24]] {
        assert!(tape.reshape(wide.clone(), dims).is_err(), "{dims:?}");
    }
}
