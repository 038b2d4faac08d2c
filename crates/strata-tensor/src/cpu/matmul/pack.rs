//! Weights into the layout that products stream, and out of it again.

use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use super::operands::{panel_bytes, panel_columns, part_panel_bytes, steps};
use super::{int4, int8, panels};
use crate::cpu::isa::{Fma, Isa, multiversion};
use crate::cpu::packed::{LANES, PANEL, PackedMut, PackedRef, dense_width};
use crate::cpu::rows::convert::scale;
use crate::cpu::scratch::{Plain, taken_bytes, with_scratch};
use crate::cpu::threads::{Pool, SharedMut};
use crate::{DType, Element, Error, Int4Group, Int4Rows, Result, WeightStorage};

/// One step of the reduction: an f32, or a pair of bf16 whose second may be missing.
#[inline(always)]
fn step_word<T: Element>(first: T, second: Option<T>) -> u32 {
    match T::DTYPE {
        DType::F32 => first.to_f32().to_bits(),
        // Widening and cutting again is exact.
        DType::BF16 => first.to_f32().to_bits() >> 16 | second.map_or(0, |s| s.to_f32().to_bits()),
    }
}

multiversion! {
    /// Interleaves one or two rows into a row of steps; with f32 the second is ignored.
    pub(crate) fn pack_step<T: Element>(first: &[T], second: Option<&[T]>, out: &mut [u32]) = pack_step_body;
}

#[inline(always)]
fn pack_step_body<T: Element>(_fma: impl Fma, first: &[T], second: Option<&[T]>, out: &mut [u32]) {
    let Some(second) = second else {
        return out.iter_mut().zip(first).for_each(|(o, &a)| *o = step_word(a, None));
    };
    // Whole vectors, so that all loads of a row are under way at once: rows lie far apart, and waiting for them is what takes the time.
    let (vectors, rest) = out.as_chunks_mut::<LANES>();
    let (first_vectors, first_rest) = first.as_chunks::<LANES>();
    let (second_vectors, second_rest) = second.as_chunks::<LANES>();
    for (out, (first, second)) in vectors.iter_mut().zip(first_vectors.iter().zip(second_vectors)) {
        for l in 0..LANES {
            out[l] = step_word(first[l], Some(second[l]));
        }
    }
    rest.iter_mut().zip(first_rest.iter().zip(second_rest)).for_each(|(o, (&a, &b))| *o = step_word(a, Some(b)));
}

/// Unpacks steps of a panel of weights that are stored in fewer bits than they are computed with.
///
/// # Panics
/// If they are not.
pub(super) fn unpack(isa: Isa, w: &PackedRef<'_>, panel: usize, width: usize, steps: Range<usize>, words: &mut [u32]) {
    let panel = &w.bytes[panel * panel_bytes(w)..];
    match (w.storage, w.dtype) {
        (WeightStorage::Int8, DType::F32) => int8::unpack::<f32>(isa, panel, width, steps, words),
        (WeightStorage::Int8, DType::BF16) => int8::unpack::<bf16>(isa, panel, width, steps, words),
        (WeightStorage::Int4(group), DType::F32) => int4::unpack::<f32>(isa, group, panel, width, steps, words),
        (WeightStorage::Int4(group), DType::BF16) => int4::unpack::<bf16>(isa, group, panel, width, steps, words),
        (WeightStorage::Dense, _) => unreachable!("dense weights are read where they lie"),
    }
}

/// Writes `rows: [n, in_features]` as outputs `first_output..` of packed weights.
///
/// # Errors
/// If a weight cannot be stored as these are.
pub(crate) fn pack_rows<T: Element>(
    pool: &Pool,
    isa: Isa,
    rows: &[T],
    first_output: usize,
    w: &mut PackedMut<'_>,
) -> Result<()> {
    let k = w.in_features;
    let row = |row: usize| &rows[row * k..][..k];
    let outputs = first_output..first_output + rows.len() / k;
    match w.storage {
        WeightStorage::Dense => pack_dense_rows(pool, isa, rows, first_output, w),
        WeightStorage::Int8 => {
            let refused = over_outputs(pool, outputs, w, |i, panel, width, output| {
                int8::quantize(isa, row(i), panel, width, output).err()
            });
            return not_held(refused, "bytes with a scale", int8::LARGEST);
        }
        WeightStorage::Int4(group) => {
            let refused = over_outputs(pool, outputs, w, |i, panel, width, output| {
                int4::quantize(isa, group, row(i), panel, width, output).err()
            });
            return not_held(refused, "four bits with a scale", int4::LARGEST);
        }
    }
    Ok(())
}

/// Refuses a weight, if there is one.
fn not_held(refused: Option<f32>, what: &str, largest: f32) -> Result<()> {
    match refused {
        None => Ok(()),
        Some(weight) => {
            Err(Error::Unsupported(format!("a weight is {weight:e}, and {what} hold finite numbers up to {largest:e}")))
        }
    }
}

/// Writes rows of weights that have four bits, as they are, as outputs `first_output..` of packed weights in groups that theirs consist of.
pub(crate) fn pack_int4(pool: &Pool, group: Int4Group, rows: &Int4Rows<'_>, first_output: usize, w: &mut PackedMut<'_>) {
    over_outputs(pool, first_output..first_output + rows.rows(), w, |i, panel, width, output| {
        int4::write_row(group, rows, i, panel, width, output);
        None::<()>
    });
}

/// Calls `write` for each of `outputs` with its number among them, its panel, the width of that and its place there. Answers what was found, of one of them.
fn over_outputs<F: Send + Sync>(
    pool: &Pool,
    outputs: Range<usize>,
    w: &mut PackedMut<'_>,
    write: impl Fn(usize, &mut [u8], usize, usize) -> Option<F> + Sync,
) -> Option<F> {
    let (out_features, panel_bytes) =
        (w.out_features, |width: usize| part_panel_bytes(w.storage, w.dtype, w.in_features, width));
    let whole = panel_bytes(PANEL);
    let bytes = SharedMut::new(w.bytes);
    let panels = outputs.start / PANEL..outputs.end.div_ceil(PANEL);
    let found = OnceLock::new();
    pool.run(panels.len(), &|task| {
        let panel = panels.start + task;
        let width = panel_columns(panel, out_features).next_multiple_of(LANES);
        // SAFETY: each task has a panel to itself.
        let panel_bytes = unsafe { bytes.part(panel * whole..panel * whole + panel_bytes(width)) };
        for output in (panel * PANEL).max(outputs.start)..(panel * PANEL + PANEL).min(outputs.end) {
            if let Some(what) = write(output - outputs.start, panel_bytes, width, output % PANEL) {
                found.get_or_init(|| what);
            }
        }
    });
    found.into_inner()
}

/// As [`pack_rows`], for weights that are stored as they are computed with.
fn pack_dense_rows<T: Element>(pool: &Pool, isa: Isa, rows: &[T], first_output: usize, w: &mut PackedMut<'_>) {
    let k = w.in_features;
    let n = rows.len() / k;
    let row_bytes = k * size_of::<T>();
    let rows = bytes_of(rows);
    let target = DensePanels::of(w);
    let panels = first_output / PANEL..(first_output + n).div_ceil(PANEL);
    pool.run(panels.len(), &|task| {
        let panel = panels.start + task;
        // SAFETY: each task has a panel to itself.
        let (panel_words, width) = unsafe { target.panel(panel) };
        let outputs = (panel * PANEL).max(first_output)..(panel * PANEL + PANEL).min(first_output + n);
        let own = &rows[(outputs.start - first_output) * row_bytes..(outputs.end - first_output) * row_bytes];
        panels::write_rows(isa, own, (row_bytes, row_bytes), outputs.start - panel * PANEL, width, panel_words);
    });
}

/// Writes `columns: [in_features, out_features]` as packed weights.
pub(crate) fn pack_columns<T: Element>(pool: &Pool, isa: Isa, columns: &[T], w: &mut PackedMut<'_>) {
    let n = w.out_features;
    let target = DensePanels::of(w);
    pool.run(n.div_ceil(PANEL), &|panel| {
        // SAFETY: each task has a panel to itself.
        unsafe { target.write_columns(isa, panel, &columns[panel * PANEL..], n) };
    });
}

/// The panels of a dense layer, for tasks that have some to themselves.
struct DensePanels {
    words: SharedMut<u32>,
    dtype: DType,
    in_features: usize,
    out_features: usize,
}

impl DensePanels {
    fn of(w: &mut PackedMut<'_>) -> Self {
        // SAFETY: buffers are aligned to pages and panels to whole steps; every 4 bytes are a word.
        let words = unsafe { std::slice::from_raw_parts_mut(w.bytes.as_mut_ptr().cast::<u32>(), w.bytes.len() / 4) };
        DensePanels { words: SharedMut::new(words), dtype: w.dtype, in_features: w.in_features, out_features: w.out_features }
    }

    /// The words of a panel, and how many a step has of them.
    ///
    /// # Safety
    /// As [`SharedMut::part`]: nobody else may have this panel.
    #[allow(clippy::mut_from_ref)]
    unsafe fn panel(&self, panel: usize) -> (&mut [u32], usize) {
        let num_steps = steps(self.in_features, self.dtype);
        let width = dense_width(panel_columns(panel, self.out_features));
        let start = panel * PANEL * num_steps;
        // SAFETY: by the caller's promise.
        (unsafe { self.words.part(start..start + num_steps * width) }, width)
    }

    /// Writes a panel whose outputs are the first columns of `columns`, of whose rows each begins `stride` numbers after the last.
    ///
    /// # Safety
    /// As [`DensePanels::panel`].
    unsafe fn write_columns<T: Element>(&self, isa: Isa, panel: usize, columns: &[T], stride: usize) {
        // SAFETY: by the caller's promise.
        let (words, width) = unsafe { self.panel(panel) };
        let (count, per_step) = (panel_columns(panel, self.out_features), 4 / self.dtype.size_bytes());
        for (s, line) in words.chunks_exact_mut(width).enumerate() {
            let row = |i: usize| &columns[i * stride..][..count];
            let (first, second) = (s * per_step, s * per_step + 1);
            pack_step(isa, row(first), (per_step == 2 && second < self.in_features).then(|| row(second)), &mut line[..count]);
        }
    }
}

/// What goes into a dense layer.
#[derive(Clone, Copy)]
pub(crate) enum Given<'a> {
    /// `[out_features, in_features]`.
    Rows(&'a [f32]),
    /// `[in_features, out_features]`.
    Columns(&'a [f32]),
}

/// Numbers that a task rounds and writes, about: enough to be worth a task, few enough to stay in its cache.
const TASK_NUMBERS: usize = 32 << 10;

/// As [`pack_rows`] and [`pack_columns`] of many dense layers, in whatever pieces keep all threads busy; of dtype `T`, to which the numbers are rounded.
pub(crate) fn pack_layers<T: Element + Plain>(pool: &Pool, isa: Isa, layers: Vec<(PackedMut<'_>, Given<'_>)>) {
    let layers: Vec<_> = layers.into_iter().map(|(mut w, given)| (DensePanels::of(&mut w), given)).collect();
    let mut tasks = Vec::new();
    for (layer, (target, given)) in layers.iter().enumerate() {
        debug_assert_eq!(target.dtype, T::DTYPE);
        let panels = target.out_features.div_ceil(PANEL);
        let together = match given {
            Given::Rows(_) => 1,
            Given::Columns(_) => (TASK_NUMBERS / (PANEL * target.in_features).max(1)).max(1),
        };
        tasks.extend((0..panels).step_by(together).map(|first| (layer, first..panels.min(first + together))));
    }
    pool.run(tasks.len(), &|task| {
        let (layer, panels) = &tasks[task];
        let (target, given) = &layers[*layer];
        let (k, n) = (target.in_features, target.out_features);
        let outputs = panels.start * PANEL..n.min(panels.end * PANEL);
        match *given {
            Given::Rows(rows) => with_scratch(taken_bytes::<T>(LANES * k), |mut arena| {
                let rounded = arena.take::<T>(LANES * k);
                // SAFETY: each task has its panels to itself.
                let (words, width) = unsafe { target.panel(panels.start) };
                for (i, some) in rows[outputs.start * k..outputs.end * k].chunks((LANES * k).max(1)).enumerate() {
                    let rounded = &mut rounded[..some.len()];
                    scale(isa, some, 1.0, rounded);
                    panels::write_rows(
                        isa,
                        bytes_of(rounded),
                        (k * size_of::<T>(), k * size_of::<T>()),
                        i * LANES,
                        width,
                        words,
                    );
                }
            }),
            Given::Columns(columns) => with_scratch(taken_bytes::<T>(outputs.len() * k), |mut arena| {
                let rounded = arena.take::<T>(outputs.len() * k);
                for (i, rounded) in rounded.chunks_exact_mut(outputs.len()).enumerate() {
                    scale(isa, &columns[i * n..][outputs.clone()], 1.0, rounded);
                }
                for panel in panels.clone() {
                    // SAFETY: each task has its panels to itself.
                    unsafe { target.write_columns(isa, panel, &rounded[panel * PANEL - outputs.start..], outputs.len()) };
                }
            }),
        }
    });
}

/// Plain numbers as they lie.
pub(crate) fn bytes_of<T: Element>(numbers: &[T]) -> &[u8] {
    // SAFETY: plain numbers are readable as bytes.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) }
}

/// Reads row `output` (one token's embedding, where embedding and unembedding are one matrix) back out of packed weights.
pub(crate) fn unpack_row<T: Element>(w: PackedRef<'_>, output: usize, out: &mut [f32]) {
    let num_steps = steps(w.in_features, w.dtype);
    let panel = output / PANEL;
    let columns = panel_columns(panel, w.out_features);
    let width = columns.next_multiple_of(LANES);
    let stored = &w.bytes[panel * panel_bytes(&w)..];
    let output_here = output % PANEL;
    match w.storage {
        WeightStorage::Dense => {}
        WeightStorage::Int8 => {
            let weight = |i| int8::weight::<T>(stored, width, output_here, i);
            return out.iter_mut().enumerate().for_each(|(i, out)| *out = weight(i));
        }
        WeightStorage::Int4(group) => {
            let weight = |i| int4::weight::<T>(group, stored, width, output_here, i);
            return out.iter_mut().enumerate().for_each(|(i, out)| *out = weight(i));
        }
    }
    let start = (panel * PANEL * num_steps + output % PANEL) * 4;
    for (s, values) in out.chunks_mut(4 / T::DTYPE.size_bytes()).enumerate() {
        let at = start + s * dense_width(columns) * 4;
        let word = u32::from_le_bytes(w.bytes[at..at + 4].try_into().expect("a word is four bytes"));
        match T::DTYPE {
            DType::F32 => values[0] = f32::from_bits(word),
            DType::BF16 => {
                values[0] = f32::from_bits(word << 16);
                if let Some(second) = values.get_mut(1) {
                    *second = f32::from_bits(word & 0xffff_0000);
                }
            }
        }
    }
}
