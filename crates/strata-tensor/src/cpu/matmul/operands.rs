//! What a product reads and writes: rows of a left side, blocks of a right side, and places in a result.

use std::ops::Range;

use super::fetch::Pieces;
use super::pack::unpack;
use super::{int4, int8, transpose};
use crate::cpu::isa::Isa;
use crate::cpu::memory::Buffer;
use crate::cpu::packed::{LANES, PANEL, PackedRef, dense_width};
use crate::cpu::threads::SharedMut;
use crate::{DType, Element, Result, WeightStorage};

/// A block of a row-major matrix of `dtype`, to be read.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) rows: usize,
    pub(super) width: usize,
    /// Bytes from one row to the next.
    pub(super) stride: usize,
    pub(super) dtype: DType,
}

impl<'a> Rows<'a> {
    /// Rows `rows` and columns `columns` of a matrix with `matrix_columns` columns.
    pub(crate) fn new<T: Element>(matrix: &'a [T], matrix_columns: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        let size = size_of::<T>();
        // SAFETY: plain numbers are readable as bytes.
        let bytes = unsafe { std::slice::from_raw_parts(matrix.as_ptr().cast::<u8>(), std::mem::size_of_val(matrix)) };
        assert!(columns.end <= matrix_columns && rows.end * matrix_columns <= matrix.len());
        let start = (rows.start * matrix_columns + columns.start) * size;
        let bytes = if rows.is_empty() { &[] } else { &bytes[start..((rows.end - 1) * matrix_columns + columns.end) * size] };
        Rows { bytes, rows: rows.len(), width: columns.len(), stride: matrix_columns * size, dtype: T::DTYPE }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn row<T: Element>(&self, row: usize) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        let bytes = &self.bytes[row * self.stride..][..self.width * size_of::<T>()];
        // SAFETY: made of whole, aligned elements of `T` in `new`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.width) }
    }

    /// The rows, each followed by a zero where the width is not a whole number of steps.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn whole_steps(self, padded: &'a mut Option<Buffer>) -> Result<Rows<'a>> {
        let size = self.width * self.dtype.size_bytes();
        if size.is_multiple_of(4) {
            return Ok(self);
        }
        let stride = size.next_multiple_of(4);
        let padded = padded.insert(Buffer::recycled(self.rows * stride)?);
        for (row, padded) in padded.chunks_exact_mut(stride).enumerate().take(self.rows) {
            padded[..size].copy_from_slice(&self.bytes[row * self.stride..][..size]);
            padded[size..].fill(0);
        }
        Ok(Rows { bytes: padded, width: self.width + 1, stride, ..self })
    }
}

/// Which rows of a product are computed: runs in order, none of which is empty.
#[derive(Clone, Copy)]
pub(crate) struct RowRuns<'r>(&'r [Range<usize>]);

impl<'r> RowRuns<'r> {
    pub(crate) fn new(runs: &'r [Range<usize>]) -> Self {
        assert!(runs.iter().all(|run| !run.is_empty()) && runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
        RowRuns(runs)
    }

    /// One run.
    pub(crate) fn of(run: &'r Range<usize>) -> Self {
        RowRuns(if run.is_empty() { &[] } else { std::slice::from_ref(run) })
    }

    /// Whether they are one run of so many rows from the first on.
    pub(crate) fn is_every(self, rows: usize) -> bool {
        matches!(self.0, [run] if *run == (0..rows))
    }

    /// Rows of all of them.
    pub(super) fn len(self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    /// One past the last row.
    pub(super) fn end(self) -> usize {
        self.0.last().map_or(0, |run| run.end)
    }

    /// The rows that have these places among them, as runs.
    pub(super) fn parts(self, places: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut before = 0;
        let part = move |run: &Range<usize>| {
            let first = before;
            before += run.len();
            let of_run = places.start.max(first)..places.end.min(before);
            (!of_run.is_empty()).then(|| run.start + of_run.start - first..run.start + of_run.end - first)
        };
        self.0.iter().filter_map(part)
    }
}

/// Where in an output matrix a product goes, and whether it adds to what is there.
#[derive(Clone)]
pub(crate) struct Target {
    /// First row.
    pub(crate) first_row: usize,
    /// First column.
    pub(crate) first_column: usize,
    /// Whether to add instead of overwrite.
    pub(crate) accumulate: bool,
}

impl Target {
    /// The whole output, overwritten.
    pub(crate) fn overwrite() -> Self {
        Target { first_row: 0, first_column: 0, accumulate: false }
    }
}

/// A block of a row-major f32 matrix, to be written.
pub(crate) struct Out {
    values: SharedMut<f32>,
    start: usize,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) accumulate: bool,
    /// Whether it lies in a cache, where it is read again, with room for whole tiles.
    pub(super) stays_near: bool,
}

impl Out {
    /// `rows` by `columns` from `(first_row, first_column)` on of a matrix with `matrix_columns` columns.
    pub(crate) fn new(matrix: &mut [f32], matrix_columns: usize, target: &Target, rows: usize, columns: usize) -> Self {
        assert!(target.first_column + columns <= matrix_columns && (target.first_row + rows) * matrix_columns <= matrix.len());
        let start = target.first_row * matrix_columns + target.first_column;
        Out {
            values: SharedMut::new(matrix),
            start,
            stride: matrix_columns,
            rows,
            columns,
            accumulate: target.accumulate,
            stays_near: false,
        }
    }

    /// Some of its columns.
    pub(super) fn columns(&self, columns: Range<usize>) -> Out {
        assert!(columns.end <= self.columns);
        Out { start: self.start + columns.start, columns: columns.len(), ..*self }
    }

    /// What begins at row and column `(row, column)` of a result of `rows` by `columns`, in `side`, `stride` elements from one row to the next. For what `side` has room for.
    pub(super) fn aside(rows: usize, columns: usize, side: &mut [f32], stride: usize, first: (usize, usize)) -> Out {
        let whole =
            Out { values: SharedMut::new(&mut []), start: 0, stride, rows, columns, accumulate: false, stays_near: true };
        whole.on_the_side(side, stride, first)
    }

    /// The same, if what begins at row and column `(row, column)` lay in `side`, `stride` elements from one row to the next. For what `side` has room for.
    pub(super) fn on_the_side(&self, side: &mut [f32], stride: usize, (row, column): (usize, usize)) -> Out {
        Out { values: SharedMut::new(side).begun_before(row * stride + column), start: 0, stride, ..*self }
    }

    /// Element `(row, column)`.
    pub(super) fn at(&self, row: usize, column: usize) -> *mut f32 {
        debug_assert!(row < self.rows && column < self.columns);
        self.values.as_ptr().wrapping_add(self.start + row * self.stride + column)
    }
}

/// Steps of a reduction over `len` elements.
pub(super) fn steps(len: usize, dtype: DType) -> usize {
    (len * dtype.size_bytes()).div_ceil(4)
}

/// Columns `64 * panel ..` of a matrix of `columns`.
pub(super) fn panel_columns(panel: usize, columns: usize) -> usize {
    (columns - panel * PANEL).min(PANEL)
}

/// Bytes from one whole panel of packed weights to the next.
pub(crate) fn panel_bytes(w: &PackedRef<'_>) -> usize {
    part_panel_bytes(w.storage, w.dtype, w.in_features, PANEL)
}

/// Bytes of a panel of `width` outputs, padding included.
pub(super) fn part_panel_bytes(storage: WeightStorage, dtype: DType, in_features: usize, width: usize) -> usize {
    match storage {
        WeightStorage::Dense => steps(in_features, dtype) * width * 4,
        WeightStorage::Int8 => int8::panel_bytes(in_features, width),
        WeightStorage::Int4(group) => int4::panel_bytes(group, in_features, width),
    }
}

/// A block of the right side of a product: where its steps lie, a panel of columns each, and bytes from one to the next.
#[derive(Clone, Copy)]
pub(super) struct RightBlock {
    pub(super) first: *const u8,
    pub(super) stride: usize,
    /// Whether it lies in memory and not in a cache, and those of the following steps behind it.
    pub(super) is_streamed: bool,
}

impl RightBlock {
    /// A block that was written to scratch, `width` words a step.
    pub(super) fn written(scratch: &[u32], width: usize) -> Self {
        RightBlock { first: scratch.as_ptr().cast(), stride: width * 4, is_streamed: false }
    }
}

/// The right side of a product.
pub(super) trait Right: Sync {
    /// The block of a panel for some steps of the reduction. What does not lie in memory as it should is written to the scratch, which holds a block.
    fn block(&self, panel: usize, steps: Range<usize>, scratch: &mut [u32]) -> RightBlock;

    /// Where in memory that is read from, if it is not in a cache.
    fn pieces(&self, panel: usize, steps: Range<usize>) -> Pieces;

    /// Where that is which is read behind the block `steps` of a panel of a result of `columns`: the next block of `all` steps, or the first of `next_panel`, to which a thread comes then, if it is whole.
    fn coming(
        &self,
        (panel, next_panel): (usize, usize),
        steps: &Range<usize>,
        all: Range<usize>,
        block_steps: usize,
        columns: usize,
    ) -> Pieces {
        if steps.end < all.end {
            self.pieces(panel, steps.end..(steps.end + block_steps).min(all.end))
        } else if (next_panel + 1) * PANEL <= columns {
            self.pieces(next_panel, all.start..(all.start + block_steps).min(all.end))
        } else {
            Pieces::default()
        }
    }
}

/// A right side, for the instructions of the machine.
pub(super) struct RightOn<'a>(pub(super) Isa, pub(super) RightSide<'a>);

impl Right for RightOn<'_> {
    fn block(&self, panel: usize, steps: Range<usize>, scratch: &mut [u32]) -> RightBlock {
        self.1.block(self.0, panel, steps, scratch)
    }

    fn pieces(&self, panel: usize, steps: Range<usize>) -> Pieces {
        self.1.pieces(panel, steps)
    }
}

/// Packed weights as the right side of a product.
#[derive(Clone, Copy)]
pub(crate) enum RightSide<'a> {
    /// Columns are outputs, the reduction is over inputs.
    Weights(PackedRef<'a>),
    /// Columns are inputs, the reduction is over outputs.
    Transposed(PackedRef<'a>),
}

impl<'a> RightSide<'a> {
    /// A panel, if it is read as it lies.
    pub(super) fn panel_bytes(&self, panel: usize) -> Option<&'a [u8]> {
        match self {
            RightSide::Weights(w) if w.storage == WeightStorage::Dense => {
                let width = dense_width(panel_columns(panel, w.out_features));
                Some(&w.bytes[panel * panel_bytes(w)..][..part_panel_bytes(w.storage, w.dtype, w.in_features, width)])
            }
            _ => None,
        }
    }

    /// All panels, if they are whole and are read as they lie.
    pub(super) fn whole_panels(&self) -> Option<&'a [u8]> {
        match self {
            RightSide::Weights(w) if w.storage == WeightStorage::Dense && w.out_features.is_multiple_of(PANEL) => {
                Some(&w.bytes[..w.out_features / PANEL * panel_bytes(w)])
            }
            _ => None,
        }
    }

    pub(crate) fn columns(&self) -> usize {
        match self {
            RightSide::Weights(w) => w.out_features,
            RightSide::Transposed(w) => w.in_features,
        }
    }

    /// Steps of the reduction.
    pub(super) fn steps(&self) -> usize {
        match self {
            RightSide::Weights(w) => steps(w.in_features, w.dtype),
            RightSide::Transposed(w) => steps(w.out_features, w.dtype),
        }
    }

    /// Words of scratch for a block of `columns` columns, at most a panel.
    pub(super) fn written_words(&self, steps: usize, columns: usize) -> usize {
        match self {
            RightSide::Weights(PackedRef { storage: WeightStorage::Dense, .. }) => 0,
            _ => steps * columns.next_multiple_of(LANES),
        }
    }

    /// See [`Right::pieces`].
    pub(super) fn pieces(&self, panel: usize, range: Range<usize>) -> Pieces {
        // Of a panel of outputs the bytes of some steps over inputs, which go from its front to its back.
        let of_panel = |w: &PackedRef<'_>, width: usize, range: Range<usize>| {
            let (bytes, num_steps) =
                (part_panel_bytes(w.storage, w.dtype, w.in_features, width), steps(w.in_features, w.dtype));
            let at = |step: usize| bytes * step / num_steps;
            at(range.start)..at(range.end)
        };
        match self {
            RightSide::Weights(w) => {
                let columns = panel_columns(panel, w.out_features);
                let width =
                    if w.storage == WeightStorage::Dense { dense_width(columns) } else { columns.next_multiple_of(LANES) };
                Pieces::one(w.bytes.as_ptr().addr() + panel * panel_bytes(w), of_panel(w, width, range))
            }
            RightSide::Transposed(w) => {
                let per_step = 4 / w.dtype.size_bytes();
                let inputs = panel * PANEL..panel * PANEL + panel_columns(panel, w.in_features);
                let outputs = range.start * per_step..(range.end * per_step).min(w.out_features);
                let panels = outputs.start / PANEL..outputs.end.div_ceil(PANEL);
                // Of the last panel, which may have fewer, what lies there.
                let bytes = of_panel(w, PANEL, inputs.start / per_step..inputs.end.div_ceil(per_step));
                let apart = panel_bytes(w);
                Pieces::one(w.bytes.as_ptr().addr() + panels.start * apart, bytes).repeated(panels.len(), apart)
            }
        }
    }

    /// See [`Right::block`].
    pub(super) fn block(&self, isa: Isa, panel: usize, range: Range<usize>, scratch: &mut [u32]) -> RightBlock {
        let columns = panel_columns(panel, self.columns());
        let width = columns.next_multiple_of(LANES);
        match self {
            RightSide::Weights(w) => match w.storage {
                WeightStorage::Dense => {
                    let stride = dense_width(columns) * 4;
                    // Whole vectors are read, beyond the last step too.
                    let panel = &w.bytes[panel * panel_bytes(w)..];
                    assert!(range.end <= self.steps());
                    assert!(range.is_empty() || (range.end - 1) * stride + width * 4 <= panel.len());
                    RightBlock { first: panel[range.start * stride..].as_ptr(), stride, is_streamed: true }
                }
                WeightStorage::Int8 | WeightStorage::Int4(_) => {
                    unpack(isa, w, panel, width, range, scratch);
                    RightBlock::written(scratch, width)
                }
            },
            RightSide::Transposed(w) => {
                transpose::block(isa, *w, panel * PANEL..panel * PANEL + columns, range, scratch);
                RightBlock::written(scratch, width)
            }
        }
    }
}
