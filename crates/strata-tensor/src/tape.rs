//! A small tape: values, and how to go back from the gradient of each to those it came from.
//!
//! An op computes its output at once. While recording, and only if some input needs a gradient or the op has low-rank weights of its
//! own, it also leaves a closure with what its backward needs. Inference runs the same ops on a tape that records nothing,
//! and intermediate values are freed as soon as the last [`Var`] on them is dropped.

use std::ops::{ControlFlow, Range};
use std::rc::Rc;
use std::sync::Arc;

use crate::{Backend, DType, Error, LoraGradient, PackedRef, Repeats, Result, Tensor, TensorRef};

/// A value on a tape.
#[derive(Clone)]
pub struct Var {
    value: Rc<Tensor>,
    node: Option<usize>,
}

impl Var {
    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The value itself, copied if someone else holds it too.
    pub(crate) fn into_tensor(self, backend: &dyn Backend) -> Result<Tensor> {
        unshare(backend, self.value)
    }

    pub(crate) fn shared(&self) -> Rc<Tensor> {
        self.value.clone()
    }

    pub(crate) fn node(&self) -> Option<usize> {
        self.node
    }
}

/// Names one low-rank pair of one layer of one group of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraSite {
    /// The group of the batch.
    pub group: usize,
    /// The module of the model.
    pub module: usize,
    /// The layer.
    pub layer: usize,
}

/// Where gradients of low-rank weights are added.
pub trait LoraGradients {
    /// The accumulators of `num_layers` layers from that of each site on, `[num_layers, rank, width]` (of A of an embedding `[1, vocab_size, rank]`), in the order of
    /// the sites; `None` where a group only scores. No two sites are of one group and module.
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<LoraGradient<'_>>>;

    /// The accumulators of these sites alone, `[rank, width]`; else as [`LoraGradients::layers_at`].
    fn at(&mut self, sites: &[LoraSite]) -> Vec<Option<LoraGradient<'_>>> {
        fn only_layer(g: LoraGradient<'_>) -> LoraGradient<'_> {
            LoraGradient { a: g.a.into_row(0), b: g.b.into_row(0) }
        }
        self.layers_at(sites, 1).into_iter().map(|g| g.map(only_layer)).collect()
    }
}

/// A low-rank pair applied to one projection of a linear layer.
#[derive(Clone)]
pub struct LoraProjection<'a> {
    /// `in → rank`.
    pub a: PackedRef<'a>,
    /// `rank → out`.
    pub b: PackedRef<'a>,
    /// Factor of the product.
    pub scale: f32,
    /// First column of the projection in the fused layer's output.
    pub first_column: usize,
    /// Where its gradient goes.
    pub site: LoraSite,
}

/// The low-rank pairs that apply to a run of tokens.
#[derive(Clone)]
pub struct LoraGroup<'a> {
    /// The tokens.
    pub tokens: Range<usize>,
    /// The sequences they belong to, as tokens of the batch.
    pub sequences: Arc<[Range<usize>]>,
    /// The pairs.
    pub projections: Vec<LoraProjection<'a>>,
}

impl<'a> LoraGroup<'a> {
    /// Groups as they are over some of the rows alone, which rise. Where something goes back these are whole granules of sequences, so that gradients have the bits that
    /// they have over all rows with zeros for the others.
    pub fn of_rows(groups: &[Self], rows: &[usize]) -> Arc<[Self]> {
        let among = |tokens: &Range<usize>| {
            let [start, end] = [tokens.start, tokens.end].map(|token| rows.partition_point(|&row| row < token));
            Some(start..end).filter(|rows| !rows.is_empty())
        };
        let of = |group: &Self| {
            let sequences = || group.sequences.iter().filter_map(among).collect();
            let projections = || group.projections.clone();
            among(&group.tokens).map(|tokens| LoraGroup { tokens, sequences: sequences(), projections: projections() })
        };
        groups.iter().filter_map(of).collect()
    }
}

/// The low-rank pair of an embedding, for a run of tokens: `y[tokens] += (scale · A[ids])·Bᵀ`. A has a row for each token of the vocabulary, not for each of its
/// ranks as that of a linear layer: rows are what is read and what gradients are added to. Rounding is that of [`Linear`].
#[derive(Clone)]
pub struct EmbeddingLora<'a> {
    /// The tokens.
    pub tokens: Range<usize>,
    /// The sequences they belong to, as tokens of the batch.
    pub sequences: Arc<[Range<usize>]>,
    /// `[vocab_size, rank]` in the table's dtype.
    pub a: TensorRef<'a>,
    /// `rank → hidden_size`.
    pub b: PackedRef<'a>,
    /// Factor of the product.
    pub scale: f32,
    /// Where its gradient goes.
    pub site: LoraSite,
}

/// A frozen linear layer with low-rank additions for runs of tokens.
///
/// `y = x·Wᵀ + bias`, and for each run of tokens and each projection within the layer `y[:, columns] += (scale · x·Aᵀ)·Bᵀ` (Hu et al., 2021,
/// arXiv:2106.09685). A and B are rounded to the base's dtype for the product, as is the product between them; sums are f32.
#[derive(Clone)]
pub struct Linear<'a> {
    /// `in → out`.
    pub weight: PackedRef<'a>,
    /// f32 `[out]`.
    pub bias: Option<TensorRef<'a>>,
    /// The low-rank additions.
    pub lora: Arc<[LoraGroup<'a>]>,
}

/// Called between two parts of a pass, with nothing locked and no more held than the pass needs to go on: it may run other passes on the same
/// backend. [`ControlFlow::Break`] ends the pass with [`Error::Interrupted`].
pub type Between<'b> = dyn FnMut() -> ControlFlow<()> + 'b;

/// Asks whether to go on.
pub fn go_on(between: &mut Between<'_>) -> Result<()> {
    match between() {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Interrupted),
    }
}

/// The gradients on their way back. They are f32, except where an op has rounded its input's for the matmul that reads it next.
pub(crate) struct Backward<'b> {
    pub backend: &'b dyn Backend,
    pub lora: &'b mut dyn LoraGradients,
    gradients: Vec<Option<Rc<Tensor>>>,
    /// Called after each checkpoint and each part that was kept; `None` inside of a checkpoint.
    between: Option<&'b mut Between<'b>>,
}

impl<'b> Backward<'b> {
    /// A pass over no recording, for an op that goes back at once.
    pub(crate) fn new(backend: &'b dyn Backend, lora: &'b mut dyn LoraGradients) -> Self {
        Backward { backend, lora, gradients: Vec::new(), between: None }
    }

    /// Asks whether to go on, where that is asked at all.
    fn go_on(&mut self) -> Result<()> {
        self.between.as_mut().map_or(Ok(()), |between| go_on(between))
    }

    /// Adds a gradient to a value's.
    ///
    /// # Errors
    /// Those of the backend.
    pub(crate) fn accumulate(&mut self, node: Option<usize>, gradient: Rc<Tensor>) -> Result<()> {
        let Some(node) = node else { return Ok(()) };
        match self.gradients[node].take() {
            None => self.gradients[node] = Some(gradient),
            Some(present) => {
                let mut sum = unshare(self.backend, in_f32(self.backend, present)?)?;
                self.backend.add(in_f32(self.backend, gradient)?.as_ref().as_ref(), sum.as_mut())?;
                self.gradients[node] = Some(Rc::new(sum));
            }
        }
        Ok(())
    }

    /// Lets `add` add to a value's gradient in place; it begins as zeros of `shape`, f32.
    ///
    /// # Errors
    /// Those of `add` and of the backend.
    pub(crate) fn accumulate_with(
        &mut self,
        node: Option<usize>,
        shape: &[usize],
        add: impl FnOnce(&dyn Backend, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let Some(node) = node else { return Ok(()) };
        let mut sum = match self.gradients[node].take() {
            Some(present) => unshare(self.backend, in_f32(self.backend, present)?)?,
            None => self.backend.zeros(shape, DType::F32)?,
        };
        add(self.backend, &mut sum)?;
        self.gradients[node] = Some(Rc::new(sum));
        Ok(())
    }
}

/// Widens a gradient that was rounded for a matmul, where another op reads it.
pub(crate) fn in_f32(backend: &dyn Backend, gradient: Rc<Tensor>) -> Result<Rc<Tensor>> {
    in_dtype(backend, gradient, DType::F32)
}

/// The tensor in this dtype, itself if it is in it already.
pub(crate) fn in_dtype(backend: &dyn Backend, tensor: Rc<Tensor>, dtype: DType) -> Result<Rc<Tensor>> {
    if tensor.dtype() == dtype {
        return Ok(tensor);
    }
    let mut converted = backend.scratch(tensor.shape().dims(), dtype)?;
    backend.convert(&tensor, &mut converted)?;
    Ok(Rc::new(converted))
}

/// The tensor itself, copied if someone else holds it too.
pub(crate) fn unshare(backend: &dyn Backend, tensor: Rc<Tensor>) -> Result<Tensor> {
    Rc::try_unwrap(tensor).or_else(|shared| backend.duplicate(shared.as_ref().as_ref()))
}

type BackwardFn<'a> = Box<dyn FnOnce(&mut Backward<'_>, Rc<Tensor>) -> Result<()> + 'a>;

/// A recording of ops, or a context for running them without recording. `'a` is the lifetime of weights and batch.
pub struct Tape<'a> {
    backend: &'a dyn Backend,
    recording: bool,
    nodes: Vec<BackwardFn<'a>>,
    /// Ops that were run on it.
    num_ops: usize,
    /// The op whose value nobody reads.
    valueless_op: Option<usize>,
    /// Rows that are the same as others.
    repeats: Option<Rc<Repeats>>,
    /// Rows that are the same as others, and in no value.
    left_out: Option<Rc<Repeats>>,
}

impl<'a> Tape<'a> {
    /// A tape that records nothing.
    pub fn inference(backend: &'a dyn Backend) -> Self {
        Tape { backend, recording: false, nodes: Vec::new(), num_ops: 0, valueless_op: None, repeats: None, left_out: None }
    }

    /// A tape that can go back.
    pub fn recording(backend: &'a dyn Backend) -> Self {
        Tape { recording: true, ..Tape::inference(backend) }
    }

    /// The same tape, on which rows of equal values are computed once by ops that cost much. No bit of a result depends on it.
    pub fn with_repeats(self, repeats: Option<Rc<Repeats>>) -> Self {
        Tape { repeats, ..self }
    }

    /// A tape that records nothing, whose values have no rows that are the same as others. Rows, angles and low-rank groups that ops are given are those of the others, and sequences those of the whole batch.
    pub fn inference_without(backend: &'a dyn Backend, repeats: Rc<Repeats>) -> Self {
        Tape { left_out: Some(repeats), ..Tape::inference(backend) }
    }

    /// Rows that are in no value.
    pub(crate) fn left_out(&self) -> Option<&Rc<Repeats>> {
        self.left_out.as_ref()
    }

    /// Tokens of the sequences of a batch whose values have so many rows. Where rows are left out it is never that of values that have them all.
    pub(crate) fn tokens_of(&self, rows: usize) -> usize {
        match &self.left_out {
            Some(left_out) if left_out.num_computed() == rows => left_out.rows(),
            Some(left_out) => left_out.num_computed(),
            None => rows,
        }
    }

    /// Rows of a value of so many that are the same as others.
    pub(crate) fn repeats(&self, rows: usize) -> Option<Rc<Repeats>> {
        self.repeats.clone().filter(|repeats| repeats.rows() == rows)
    }

    /// Whether ops must be able to go back.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(crate) fn backend(&self) -> &'a dyn Backend {
        self.backend
    }

    /// A value that needs no gradient.
    pub fn constant(&self, value: Tensor) -> Var {
        Var { value: Rc::new(value), node: None }
    }

    /// As [`Tape::constant`], of a value that others hold too.
    pub(crate) fn shared_constant(&self, value: Rc<Tensor>) -> Var {
        Var { value, node: None }
    }

    /// Whether anyone will read the value of the next op. An op that is not asked for its value may leave anything in its place.
    pub(crate) fn wants_next_value(&self) -> bool {
        self.valueless_op != Some(self.num_ops)
    }

    /// Whether an op with these inputs must be able to go back; each op asks once.
    pub(crate) fn records(&mut self, inputs: &[&Var], has_weights: bool) -> bool {
        self.num_ops += 1;
        self.recording && (has_weights || inputs.iter().any(|v| v.node.is_some()))
    }

    /// Another value in the place of one, whose gradient is the gradient of that one too.
    pub(crate) fn with_gradient_of(&self, node: Option<usize>, value: Tensor) -> Var {
        Var { value: Rc::new(value), node }
    }

    /// A value with its way back.
    pub(crate) fn push(
        &mut self,
        value: Rc<Tensor>,
        backward: impl FnOnce(&mut Backward<'_>, Rc<Tensor>) -> Result<()> + 'a,
    ) -> Var {
        self.nodes.push(Box::new(backward));
        Var { value, node: Some(self.nodes.len() - 1) }
    }

    /// Runs `layer` on `x` and keeps only `x`: the backward pass runs it again to find what it needs (Chen et al., 2016,
    /// arXiv:1604.06174). `layer` must compute the same both times.
    ///
    /// # Errors
    /// Those of `layer`.
    pub fn checkpoint(&mut self, x: &Var, layer: impl Fn(&mut Tape<'a>, &Var) -> Result<Var> + 'a) -> Result<Var> {
        self.checkpoint_run(x, 1, move |_, tape, x| layer(tape, x), &mut |_, _| Ok(()))
    }

    /// As [`Tape::checkpoint`] of each of `count` layers, one after another, but keeps only what goes into the first: the backward pass runs all but the last once more
    /// for what goes into the others. Shows `after` what comes out of each. The bits are the same.
    ///
    /// # Errors
    /// Those of `layer` and of `after`.
    pub fn checkpoint_run<E: From<Error>>(
        &mut self,
        x: &Var,
        count: usize,
        layer: impl Fn(usize, &mut Tape<'a>, &Var) -> Result<Var> + 'a,
        after: &mut dyn FnMut(usize, &Tensor) -> Result<(), E>,
    ) -> Result<Var, E> {
        let (backend, repeats, left_out) = (self.backend, self.repeats.clone(), self.left_out.clone());
        let unrecorded = move || Tape { repeats: repeats.clone(), left_out: left_out.clone(), ..Tape::inference(backend) };
        let mut y = self.shared_constant(x.shared());
        let mut num_ops = Vec::with_capacity(count);
        for i in 0..count {
            let mut tape = unrecorded();
            y = layer(i, &mut tape, &y)?;
            after(i, y.value())?;
            num_ops.push(tape.num_ops);
        }
        if !self.recording {
            return Ok(y);
        }
        let (x_node, x) = (x.node, x.shared());
        Ok(self.push(y.value, move |pass, mut dy| {
            let mut inputs = vec![Var { value: x, node: None }];
            for i in 1..count {
                let x = layer(i - 1, &mut unrecorded(), &inputs[i - 1])?;
                inputs.push(x);
                pass.go_on()?;
            }
            for (i, num_ops) in num_ops.into_iter().enumerate().rev() {
                let Some(x) = inputs.pop() else { break };
                // The value of the layer is known; now only the way to it is wanted.
                let mut inner = Tape { recording: true, valueless_op: num_ops.checked_sub(1), ..unrecorded() };
                let x = match i > 0 || x_node.is_some() {
                    // A leaf: its backward has nothing more to do, its gradient is what we are after.
                    true => inner.push(x.value, |_, _| Ok(())),
                    false => x,
                };
                let y = layer(i, &mut inner, &x)?;
                drop(x);
                let Some(dx) = inner.backward_to_first(y, dy, pass.lora, None)? else { return pass.go_on() };
                dy = dx;
                if i > 0 {
                    pass.go_on()?;
                }
            }
            pass.accumulate(x_node, dy)?;
            pass.go_on()
        }))
    }

    /// As [`Tape::checkpoint`], but keeps all that the way back through `layer` needs: nothing is computed twice, for the memory of the layer's activations. The bits
    /// are the same.
    ///
    /// # Errors
    /// Those of `layer`.
    pub fn keep(&mut self, x: &Var, layer: impl FnOnce(&mut Tape<'a>, &Var) -> Result<Var>) -> Result<Var> {
        let Some(node) = x.node else { return layer(self, x) };
        let begin = self.push(x.shared(), move |pass, dx| {
            pass.accumulate(Some(node), dx)?;
            pass.go_on()
        });
        layer(self, &begin)
    }

    /// Goes back from `y` with its gradient; gradients of low-rank weights are added to `lora`.
    ///
    /// # Errors
    /// If the gradient does not have the shape of the value, or an op refuses.
    pub fn backward(self, y: Var, dy: Tensor, lora: &mut dyn LoraGradients) -> Result<()> {
        self.backward_with(y, dy, lora, &mut || ControlFlow::Continue(()))
    }

    /// As [`Tape::backward`]; calls `between` after each checkpoint, and each part that was kept, that it has gone back through.
    ///
    /// # Errors
    /// As [`Tape::backward`], and [`Error::Interrupted`].
    pub fn backward_with(self, y: Var, dy: Tensor, lora: &mut dyn LoraGradients, between: &mut Between<'_>) -> Result<()> {
        if dy.shape() != y.value().shape() {
            let (expected, actual) = (y.value().shape().to_string(), dy.shape().to_string());
            return Err(Error::Shape { op: "backward", expected, actual });
        }
        self.backward_to_first(y, Rc::new(dy), lora, Some(between)).map(|_| ())
    }

    /// As [`Tape::backward`]; answers the gradient of the first value on the tape.
    fn backward_to_first<'b>(
        self,
        y: Var,
        dy: Rc<Tensor>,
        lora: &'b mut dyn LoraGradients,
        between: Option<&'b mut Between<'b>>,
    ) -> Result<Option<Rc<Tensor>>>
    where
        'a: 'b,
    {
        let Some(last) = y.node else { return Ok(None) };
        drop(y);
        let mut gradients = vec![None; self.nodes.len()];
        gradients[last] = Some(dy);
        let mut pass = Backward { backend: self.backend, lora, gradients, between };
        let mut first = None;
        for (node, backward) in self.nodes.into_iter().enumerate().rev() {
            if let Some(gradient) = pass.gradients[node].take() {
                if node == 0 {
                    first = Some(gradient.clone());
                }
                backward(&mut pass, gradient)?;
            }
        }
        Ok(first)
    }
}
