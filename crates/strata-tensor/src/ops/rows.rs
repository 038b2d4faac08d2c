//! Rows that come from elsewhere, as what an encoder made of an image does among the embeddings of tokens; and rows seen as others.

use std::ops::Range;
use std::rc::Rc;

use super::check_f32;
use crate::tape::{Tape, Var, in_f32, unshare};
use crate::{DType, Error, Result, Shape, TensorRef};

impl<'a> Tape<'a> {
    /// Some rows of `x: [tokens, width]`, which rise: `[rows.len(), width]` in the dtype of `x`. No gradient goes to the others.
    ///
    /// # Errors
    /// If a row is not there, or does not come after the one before.
    pub fn take_rows(&mut self, x: &Var, rows: &[usize]) -> Result<Var> {
        const OP: &str = "take_rows";
        let (tokens, width) = (x.value().rows(), x.value().shape().row_len());
        if let Some(&row) = rows.iter().find(|&&row| row >= tokens) {
            return Err(Error::Index { op: OP, what: "tokens", index: row, size: tokens });
        }
        if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            let expected = format!("a row behind {}", pair[0]);
            return Err(Error::Shape { op: OP, expected, actual: pair[1].to_string() });
        }
        let records = self.records(&[x], false);
        let mut y = self.backend().scratch(&[rows.len(), width], x.value().dtype())?;
        self.backend().gather(x.value().as_ref(), rows, &mut y)?;
        if !records {
            return Ok(self.constant(y));
        }
        // Of rows that follow each other, where they go and where they come from.
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for (place, &row) in rows.iter().enumerate() {
            match runs.last_mut().filter(|(run, _)| run.end == row) {
                Some((run, _)) => run.end += 1,
                None => runs.push((row..row + 1, place)),
            }
        }
        let node = x.node();
        Ok(self.push(Rc::new(y), move |pass, dy| {
            let dy = in_f32(pass.backend, dy)?;
            let mut dx = pass.backend.zeros(&[tokens, width], DType::F32)?;
            for (run, first) in runs {
                pass.backend.copy(dy.as_ref().as_ref().rows(first..first + run.len()), dx.rows_mut(run))?;
            }
            pass.accumulate(node, Rc::new(dx))
        }))
    }

    /// f32 `x: [tokens, width]` with f32 rows `[range.len(), width]` in the place of those of each range, which are in order and do not overlap. No gradient
    /// goes to `x` from there, or to what is put there. Without ranges it is `x` itself.
    ///
    /// # Errors
    /// If `x` or the rows are not f32, ranges are not in order and within `x`, or rows do not fit theirs.
    pub fn replace_rows(&mut self, x: Var, rows: &[(Range<usize>, TensorRef<'_>)]) -> Result<Var> {
        if rows.is_empty() {
            return Ok(x);
        }
        check_rows("replace_rows", &x, rows)?;
        let (records, node, backend) = (self.records(&[&x], false), x.node(), self.backend());
        let mut y = x.into_tensor(backend)?;
        for (range, from) in rows {
            backend.copy(*from, y.rows_mut(range.clone()))?;
        }
        if !records {
            return Ok(self.constant(y));
        }
        let ranges: Vec<Range<usize>> = rows.iter().map(|(range, _)| range.clone()).collect();
        Ok(self.push(Rc::new(y), move |pass, dy| {
            let mut dx = unshare(pass.backend, dy)?;
            ranges.into_iter().try_for_each(|range| pass.backend.fill_zero(dx.rows_mut(range)))?;
            pass.accumulate(node, Rc::new(dx))
        }))
    }

    /// f32 `x: [tokens, width]` with f32 rows `[range.len(), width]` added to those of each range, which are in order and do not overlap. They need no
    /// gradient, and that of `x` is the gradient of the result. Without ranges it is `x` itself.
    ///
    /// # Errors
    /// As [`Tape::replace_rows`].
    pub fn add_rows(&mut self, x: Var, rows: &[(Range<usize>, TensorRef<'_>)]) -> Result<Var> {
        if rows.is_empty() {
            return Ok(x);
        }
        check_rows("add_rows", &x, rows)?;
        // Not counted as an op: as the last of a layer that is run again it needs no value, and the op before it need not compute one for it.
        let (node, backend) = (x.node(), self.backend());
        let mut y = x.into_tensor(backend)?;
        for (range, from) in rows {
            backend.add(*from, y.rows_mut(range.clone()))?;
        }
        Ok(self.with_gradient_of(node, y))
    }

    /// The same elements as `dims`, such as `[n, width]` as `[n / 4, 4 * width]`. They are copied only if someone else holds `x` too.
    ///
    /// # Errors
    /// If there would be more or fewer elements, or more than [`Shape::MAX_RANK`] axes.
    pub fn reshape(&mut self, x: Var, dims: &[usize]) -> Result<Var> {
        let before = x.value().shape();
        let len = dims.iter().try_fold(1usize, |len, &n| len.checked_mul(n));
        if dims.is_empty() || dims.len() > Shape::MAX_RANK || len != Some(before.len()) {
            let expected = format!("up to {} axes of {} elements", Shape::MAX_RANK, before.len());
            return Err(Error::Shape { op: "reshape", expected, actual: format!("{dims:?}") });
        }
        let (records, node) = (self.records(&[&x], false), x.node());
        let y = x.into_tensor(self.backend())?.reshaped(Shape::new(dims));
        if !records {
            return Ok(self.constant(y));
        }
        Ok(self.push(Rc::new(y), move |pass, dy| {
            let dx = unshare(pass.backend, dy)?.reshaped(before);
            pass.accumulate(node, Rc::new(dx))
        }))
    }
}

/// Refuses rows that do not fit their ranges, and ranges that are not in order and within `x`.
fn check_rows(op: &'static str, x: &Var, rows: &[(Range<usize>, TensorRef<'_>)]) -> Result<()> {
    let (tokens, width) = (x.value().rows(), x.value().shape().row_len());
    check_f32(op, x.value(), width)?;
    let mut end = 0;
    for (range, from) in rows {
        if range.end > tokens {
            return Err(Error::Index { op, what: "tokens", index: range.end, size: tokens });
        }
        if range.start < end || range.start > range.end {
            return Err(Error::Shape { op, expected: format!("rows from {end} on"), actual: format!("{range:?}") });
        }
        if from.dtype() != DType::F32 {
            return Err(Error::DType { op, expected: DType::F32, actual: from.dtype() });
        }
        let shape = from.shape();
        if shape.leading() != range.len() || shape.row_len() != width {
            let expected = format!("[{}, {width}] for rows {range:?}", range.len());
            return Err(Error::Shape { op, expected, actual: shape.to_string() });
        }
        end = range.end;
    }
    Ok(())
}
