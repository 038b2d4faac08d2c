//! Mixtures of experts: each the linear layers that it is, on rows gathered from the tokens that chose it.
//!
//! At Qwen3-30B-A3B's shape (hidden 2048, 128 experts of 768, 8 of them for each token) 1,024 tokens are 64 rows an expert, whose two layers read 9.4 MB of bf16 for
//! 0.6 GFLOP: bound by arithmetic. A decode step is a row or two for each expert that is chosen, and reads each once: bound by memory.
//!
//! What an expert makes of its rows is small enough to stay in cache, and it is gone before the next begins: on the way back it is made again, unless the layer keeps what its first product makes.
//! Where there are many, each thread has whole ones: of 64 rows two products and what lies around them are a dozen ops of some tens of microseconds, for each of which threads would wait for each other. A token's sums over experts
//! are in the order of experts, whoever is ready first.

use super::linear::PairGradient;
use super::{CpuBackend, rows_mut, with_element};
use crate::backend::LoraGradient;
use crate::cpu::in_order::in_order;
use crate::cpu::rows::{convert, experts, route};
use crate::cpu::threads::{Pool, SharedMut};
use crate::memory::Memory;
use crate::moe::{Dispatch, ExpertActivation, ExpertRows, Experts, KeptExperts, RouterScores, Routing, Sequences};
use crate::tape::Linear;
use crate::{DType, Result, Tensor};

/// What looking at a logit costs, in elements that are streamed: a choice looks at one after the other, once for each expert that is chosen.
const LOOK_ELEMENTS: usize = 4;

fn scores<'a>(routing: &Routing<'a>) -> Result<route::Scores<'a>> {
    Ok(match routing.scores {
        RouterScores::Softmax => route::Scores::Softmax,
        RouterScores::SoftmaxOfChosen => route::Scores::SoftmaxOfChosen,
        RouterScores::Sigmoid(s) => route::Scores::Sigmoid {
            correction: s.correction_bias.map(|bias| bias.slice()).transpose()?,
            num_groups: s.num_groups,
            top_groups: s.top_groups,
            normalize: s.normalize,
            scale: s.scaling_factor,
        },
    })
}

/// Experts for each thread, at least, for which each has whole ones: the last are not ready at the same time.
const SIDE_BY_SIDE_MIN: usize = 4;

/// The accumulators of a pair of all experts, `[experts, rank, width]`.
struct AllGradients {
    a: SharedMut<f32>,
    b: SharedMut<f32>,
    /// Of one expert.
    lens: [usize; 2],
}

impl AllGradients {
    fn new(g: &mut LoraGradient<'_>) -> Result<Self> {
        let lens = [g.a.shape().row_len(), g.b.shape().row_len()];
        let (a, b) = (g.a.reborrow().into_slice::<f32>()?, g.b.reborrow().into_slice::<f32>()?);
        Ok(AllGradients { a: SharedMut::new(a), b: SharedMut::new(b), lens })
    }

    /// Those of an expert.
    ///
    /// # Safety
    /// Nobody else may have them, and they must be gone before the accumulators are.
    unsafe fn of<'g>(&'g self, expert: usize) -> PairGradient<'g> {
        let [a, b] = self.lens;
        // SAFETY: the caller's promise.
        unsafe { PairGradient { a: self.a.part(expert * a..(expert + 1) * a), b: self.b.part(expert * b..(expert + 1) * b) } }
    }
}

/// What the way back of experts reads, and where it adds.
struct ExpertsBackward<'p, 'w> {
    dy: &'p Tensor,
    x: &'p Tensor,
    weights: &'p [f32],
    layer: &'p Experts<'w>,
    /// Of the pairs of all groups, those of the first layer first.
    gradients: Vec<Option<AllGradients>>,
    wants_dx: bool,
}

/// The accumulators of an expert's own layer: of the groups that reach it, its entries of what is for all experts.
///
/// # Safety
/// As [`AllGradients::of`].
unsafe fn own_gradients<'g>(
    rows: &ExpertRows<'_>,
    layer: &Linear<'_>,
    all: &'g [Option<AllGradients>],
) -> Vec<Option<PairGradient<'g>>> {
    let reached = layer.lora.iter().flat_map(|g| std::iter::repeat_n(rows.reach(g), g.projections.len()));
    // SAFETY: the caller's promise.
    let of_expert = |g: &'g AllGradients| unsafe { g.of(rows.expert) };
    all.iter().zip(reached).filter(|(_, reached)| *reached).map(|(g, _)| g.as_ref().map(of_expert)).collect()
}

impl CpuBackend {
    pub(super) fn choose_experts(&self, logits: &Tensor, routing: &Routing<'_>, weights: &mut Tensor) -> Result<Vec<u32>> {
        let (n, k, scores) = (logits.shape().row_len(), routing.top_k, scores(routing)?);
        let (num_rows, logits) = (logits.rows(), logits.slice::<f32>()?);
        let mut chosen = vec![0; num_rows * k];
        let (shared, weights) = (SharedMut::new(&mut chosen), SharedMut::new(weights.slice_mut::<f32>()?));
        self.over_rows(num_rows, LOOK_ELEMENTS * n * k, |rows| {
            // SAFETY: tasks have rows of their own.
            let (chosen, weights) = unsafe { (rows_mut(&shared, &rows, k), rows_mut(&weights, &rows, k)) };
            route::route(self.isa, scores, &logits[rows.start * n..rows.end * n], n, k, chosen, weights);
        });
        Ok(chosen)
    }

    pub(super) fn gradient_of_choice(
        &self,
        dweights: &Tensor,
        logits: &Tensor,
        routing: &Routing<'_>,
        chosen: &[u32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let (n, k, scores) = (logits.shape().row_len(), routing.top_k, scores(routing)?);
        let (num_rows, dweights, logits) = (logits.rows(), dweights.slice::<f32>()?, logits.slice::<f32>()?);
        let dlogits = SharedMut::new(dlogits.slice_mut::<f32>()?);
        self.over_rows(num_rows, n, |rows| {
            // SAFETY: tasks have rows of their own.
            let dlogits = unsafe { rows_mut(&dlogits, &rows, n) };
            let (of_k, of_n) = (rows.start * k..rows.end * k, rows.start * n..rows.end * n);
            route::route_backward(self.isa, scores, &dweights[of_k.clone()], &logits[of_n], n, k, &chosen[of_k], dlogits);
        });
        Ok(())
    }

    pub(super) fn forward_experts(
        &self,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        y: &mut Tensor,
    ) -> Result<Option<KeptExperts>> {
        self.fill_zero(y.as_mut())?;
        let weights = weights.slice::<f32>()?;
        let experts: Vec<ExpertRows<'_>> = dispatch.experts().collect();
        let mut kept = layer.keeps.then(|| Vec::with_capacity(experts.len()));
        let expert = |threads: &CpuBackend, i: usize| threads.forward_expert(x, weights, &experts[i], layer);
        self.over_experts(&experts, x.rows(), expert, |i, (out, gate_up): (Tensor, Option<Tensor>)| {
            let (rows, own_weights) = (&experts[i], weights_of(&experts[i], weights));
            let bias = layer.down.bias.map(|biases| biases.row(rows.expert));
            let bias = bias.as_ref().map(|bias| bias.slice::<f32>()).transpose()?;
            kept.as_mut().zip(gate_up).into_iter().for_each(|(kept, gate_up)| kept.push(gate_up));
            self.scatter_add(&out, rows, bias.map(|bias| (bias, &own_weights[..])), y)
        })?;
        Ok(kept.map(KeptExperts))
    }

    /// What an expert makes of its rows, f32 `[rows, hidden]`, but for the bias of its last layer; and what it keeps.
    fn forward_expert(
        &self,
        x: &Tensor,
        weights: &[f32],
        rows: &ExpertRows<'_>,
        layer: &Experts<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let own_x = self.gather_tokens(x, rows)?;
        let mut gate_up = self.scratch(&[rows.len(), layer.gate_up.weight.out_features()], DType::F32)?;
        self.forward_linear(&own_x, &rows.layer(&layer.gate_up, Sequences::Untold), Some(&mut gate_up))?;
        drop(own_x);
        let activated = self.activate(layer.activation, &gate_up, &weights_of(rows, weights), x.dtype())?;
        let kept = layer.keeps.then_some(gate_up);
        let down = Linear { bias: None, ..rows.layer(&layer.down, Sequences::Untold) };
        let mut out = self.scratch(&[rows.len(), down.weight.out_features()], DType::F32)?;
        self.forward_linear(&activated, &down, Some(&mut out))?;
        Ok((out, kept))
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn backward_experts(
        &self,
        dy: &Tensor,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        kept: Option<&KeptExperts>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dweights: &mut Tensor,
        mut dx: Option<&mut Tensor>,
    ) -> Result<()> {
        if let Some(dx) = &mut dx {
            self.fill_zero(dx.as_mut())?;
        }
        let (weights, dweights) = (weights.slice::<f32>()?, dweights.slice_mut::<f32>()?);
        dweights.fill(0.0);
        // Tokens to which no gradient comes have no part in any.
        let width = dy.shape().row_len();
        let live = with_element!(dy.dtype(), T => {
            let dy = dy.slice::<T>()?;
            dispatch.of_tokens(|token| !convert::is_zero(self.isa, &dy[token * width..][..width]))
        });
        let experts: Vec<ExpertRows<'_>> = live.experts().collect();
        // Both are in the order of experts, and those that have live rows have rows.
        let mut all_kept = kept.map(|KeptExperts(kept)| dispatch.experts().zip(kept));
        let kept: Vec<Option<(ExpertRows<'_>, &Tensor)>> = experts
            .iter()
            .map(|rows| all_kept.as_mut().and_then(|kept| kept.find(|(all, _)| all.expert == rows.expert)))
            .collect();
        let gradients =
            gradients.iter_mut().map(|g| g.as_mut().map(AllGradients::new).transpose()).collect::<Result<Vec<_>>>()?;
        let pass = ExpertsBackward { dy, x, weights, layer, gradients, wants_dx: dx.is_some() };
        // SAFETY: each expert comes once.
        let expert = |threads: &CpuBackend, i: usize| unsafe { threads.backward_expert(&pass, &experts[i], kept[i].as_ref()) };
        self.over_experts(&experts, x.rows(), expert, |i, (own_dweights, own_dx): (Vec<f32>, Option<Tensor>)| {
            experts[i].places.iter().zip(&own_dweights).for_each(|(&place, &d)| dweights[place] = d);
            match (&own_dx, &mut dx) {
                (Some(own_dx), Some(dx)) => self.scatter_add(own_dx, &experts[i], None, dx),
                _ => Ok(()),
            }
        })
    }

    /// The gradients of what an expert's rows weigh and, if it is wanted, of its input; adds to those of its pairs.
    ///
    /// # Safety
    /// No two threads may have the same expert.
    unsafe fn backward_expert(
        &self,
        pass: &ExpertsBackward<'_, '_>,
        rows: &ExpertRows<'_>,
        kept: Option<&(ExpertRows<'_>, &Tensor)>,
    ) -> Result<(Vec<f32>, Option<Tensor>)> {
        let ExpertsBackward { x, layer, .. } = *pass;
        let own_weights = weights_of(rows, pass.weights);
        let own_x = self.gather_tokens(x, rows)?;
        let intermediate = layer.down.weight.in_features();
        let gate_up_layer = rows.layer(&layer.gate_up, Sequences::Told);
        let mut made = None;
        let (gate_up, low_of_gate_up): (&Tensor, _) = match kept {
            Some((all, values)) => {
                let low = self.forward_linear(&own_x, &gate_up_layer, None)?;
                if all.len() == rows.len() {
                    (*values, low)
                } else {
                    let row_of = |row: usize| all.places.partition_point(|&place| place < rows.places[row]);
                    (made.insert(self.gather_rows(values, rows.len(), row_of)?), low)
                }
            }
            None => {
                let made = made.insert(self.scratch(&[rows.len(), 2 * intermediate], DType::F32)?);
                let low = self.forward_linear(&own_x, &gate_up_layer, Some(&mut *made))?;
                (made, low)
            }
        };

        let pairs_of_gate_up = layer.gate_up.lora.iter().map(|g| g.projections.len()).sum();
        let (of_gate_up, of_down) = pass.gradients.split_at(pairs_of_gate_up);
        let down_layer = rows.layer(&layer.down, Sequences::Told);
        let own_dy = self.gather_tokens(pass.dy, rows)?;
        let mut dactivated = self.scratch(&[rows.len(), intermediate], DType::F32)?;
        {
            let activated = self.activate(layer.activation, gate_up, &own_weights, x.dtype())?;
            let low = self.forward_linear(&activated, &down_layer, None)?;
            // SAFETY: the caller's promise.
            let own = unsafe { own_gradients(rows, &layer.down, of_down) };
            self.backward_linear(&own_dy, &activated, &low, &down_layer, own, Some(&mut dactivated))?;
        }
        let mut own_dweights = vec![0.0; rows.len()];
        let dgate_up =
            self.activate_backward(layer.activation, &dactivated, gate_up, &own_weights, x.dtype(), &mut own_dweights)?;
        drop((made, dactivated));
        if let Some(bias) = down_layer.bias {
            self.add_dots(&own_dy, bias.slice()?, &mut own_dweights)?;
        }
        drop(own_dy);

        // SAFETY: as above.
        let own = unsafe { own_gradients(rows, &layer.gate_up, of_gate_up) };
        let mut own_dx = match pass.wants_dx {
            true => Some(self.scratch(&[rows.len(), x.shape().row_len()], DType::F32)?),
            false => None,
        };
        self.backward_linear(&dgate_up, &own_x, &low_of_gate_up, &gate_up_layer, own, own_dx.as_mut())?;
        Ok((own_dweights, own_dx))
    }

    /// Runs `expert` for each, and `take` with what it makes, one after another in their order. Experts of few of the tokens lie side by side, each on one thread, which works without waiting for another; those of many are computed by
    /// all threads together. No more rows are on their way than there are tokens.
    fn over_experts<R: Send>(
        &self,
        experts: &[ExpertRows<'_>],
        tokens: usize,
        expert: impl Fn(&CpuBackend, usize) -> Result<R> + Sync,
        mut take: impl FnMut(usize, R) -> Result<()> + Send,
    ) -> Result<()> {
        let threads = self.pool.num_threads();
        let is_small = |rows: &ExpertRows<'_>| rows.len() * threads <= tokens;
        let alone = CpuBackend { isa: self.isa, arithmetic: self.arithmetic, pool: Pool::new(1) };
        let mut first = 0;
        for run in experts.chunk_by(|a, b| is_small(a) == is_small(b)) {
            if is_small(&run[0]) && run.len() >= SIDE_BY_SIDE_MIN * threads {
                let rows: Vec<usize> = run.iter().map(ExpertRows::len).collect();
                let (expert, take) = (|i: usize| expert(&alone, first + i), |i: usize, made| take(first + i, made));
                in_order(&self.pool, &rows, tokens, expert, take)?;
            } else {
                (first..first + run.len()).try_for_each(|i| take(i, expert(self, i)?))?;
            }
            first += run.len();
        }
        Ok(())
    }

    /// The rows of tokens that chose an expert.
    fn gather_tokens(&self, x: &Tensor, rows: &ExpertRows<'_>) -> Result<Tensor> {
        self.gather_rows(x, rows.len(), |row| rows.token(row))
    }

    /// So many rows, each from where it lies.
    fn gather_rows(&self, x: &Tensor, count: usize, from: impl Fn(usize) -> usize + Sync) -> Result<Tensor> {
        let n = x.shape().row_len();
        let mut own = self.scratch(&[count, n], x.dtype())?;
        with_element!(x.dtype(), T => {
            let (x, own) = (x.slice::<T>()?, SharedMut::new(own.slice_mut::<T>()?));
            self.over_rows(count, n, |range| {
                // SAFETY: tasks have rows of their own.
                let own = unsafe { rows_mut(&own, &range, n) };
                for (row, own) in range.zip(own.chunks_exact_mut(n)) {
                    own.copy_from_slice(&x[from(row) * n..][..n]);
                }
            });
        });
        Ok(own)
    }

    /// Adds rows to those of their tokens, each with the bias of its expert as often as it weighs.
    fn scatter_add(&self, own: &Tensor, rows: &ExpertRows<'_>, bias: Option<(&[f32], &[f32])>, y: &mut Tensor) -> Result<()> {
        let n = own.shape().row_len();
        let (own, y) = (own.slice::<f32>()?, SharedMut::new(y.slice_mut::<f32>()?));
        self.over_rows(rows.len(), n, |range| {
            for row in range {
                let token = rows.token(row);
                // SAFETY: a token chooses an expert once, so that tasks have tokens of their own.
                let y = unsafe { rows_mut(&y, &(token..token + 1), n) };
                convert::add(self.isa, &own[row * n..][..n], y);
                if let Some((bias, weights)) = bias {
                    experts::add_scaled(self.isa, bias, weights[row], y);
                }
            }
        });
        Ok(())
    }

    fn activate(&self, activation: ExpertActivation, gate_up: &Tensor, weights: &[f32], dtype: DType) -> Result<Tensor> {
        let n = gate_up.shape().row_len() / 2;
        let mut activated = self.scratch(&[gate_up.rows(), n], dtype)?;
        let (num_rows, gate_up) = (gate_up.rows(), gate_up.slice::<f32>()?);
        with_element!(dtype, T => {
            let out = SharedMut::new(activated.slice_mut::<T>()?);
            self.over_rows(num_rows, 2 * n, |rows| {
                // SAFETY: tasks have rows of their own.
                let out = unsafe { rows_mut(&out, &rows, n) };
                let gate_up = &gate_up[rows.start * 2 * n..rows.end * 2 * n];
                experts::activate(self.isa, activation, gate_up, &weights[rows], n, out);
            });
        });
        Ok(activated)
    }

    /// Answers the gradient of `gate_up` in `dtype`, and writes that of the weights.
    fn activate_backward(
        &self,
        activation: ExpertActivation,
        dy: &Tensor,
        gate_up: &Tensor,
        weights: &[f32],
        dtype: DType,
        dweights: &mut [f32],
    ) -> Result<Tensor> {
        let n = dy.shape().row_len();
        let mut dgate_up = self.scratch(&[gate_up.rows(), 2 * n], dtype)?;
        let (num_rows, gate_up, dy) = (gate_up.rows(), gate_up.slice::<f32>()?, dy.slice::<f32>()?);
        let dweights = SharedMut::new(dweights);
        with_element!(dtype, T => {
            let out = SharedMut::new(dgate_up.slice_mut::<T>()?);
            self.over_rows(num_rows, 2 * n, |rows| {
                // SAFETY: tasks have rows of their own.
                let (out, dweights) = unsafe { (rows_mut(&out, &rows, 2 * n), rows_mut(&dweights, &rows, 1)) };
                let gate_up = &gate_up[rows.start * 2 * n..rows.end * 2 * n];
                let dy = &dy[rows.start * n..rows.end * n];
                experts::activate_backward(self.isa, activation, dy, gate_up, &weights[rows], n, out, dweights);
            });
        });
        Ok(dgate_up)
    }

    /// Adds to each the product of its row with a vector.
    fn add_dots(&self, rows: &Tensor, vector: &[f32], sums: &mut [f32]) -> Result<()> {
        with_element!(rows.dtype(), T => {
            let rows = rows.slice::<T>()?.chunks_exact(vector.len());
            rows.zip(sums).for_each(|(row, sum)| *sum += experts::dot(self.isa, row, vector));
        });
        Ok(())
    }

    pub(super) fn gate(&self, x: &Tensor, gates: &Tensor, y: &mut Tensor) -> Result<()> {
        let n = x.shape().row_len();
        let (num_rows, x, gates) = (x.rows(), x.slice::<f32>()?, gates.slice::<f32>()?);
        with_element!(y.dtype(), T => {
            let y = SharedMut::new(y.slice_mut::<T>()?);
            self.over_rows(num_rows, n, |rows| {
                // SAFETY: tasks have rows of their own.
                let y = unsafe { rows_mut(&y, &rows, n) };
                experts::sigmoid_gate(self.isa, &x[rows.start * n..rows.end * n], &gates[rows], n, y);
            });
        });
        Ok(())
    }

    pub(super) fn gradient_of_gate(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gates: &Tensor,
        dx: &mut Tensor,
        dgates: &mut Tensor,
    ) -> Result<()> {
        let n = x.shape().row_len();
        let (num_rows, dy, x, gates) = (x.rows(), dy.slice::<f32>()?, x.slice::<f32>()?, gates.slice::<f32>()?);
        let (dx, dgates) = (SharedMut::new(dx.slice_mut::<f32>()?), SharedMut::new(dgates.slice_mut::<f32>()?));
        self.over_rows(num_rows, n, |rows| {
            // SAFETY: tasks have rows of their own.
            let (dx, dgates) = unsafe { (rows_mut(&dx, &rows, n), rows_mut(&dgates, &rows, 1)) };
            let range = rows.start * n..rows.end * n;
            experts::sigmoid_gate_backward(self.isa, &dy[range.clone()], &x[range], &gates[rows], n, dx, dgates);
        });
        Ok(())
    }
}

/// What the choices that rows are of weigh.
fn weights_of(rows: &ExpertRows<'_>, weights: &[f32]) -> Vec<f32> {
    rows.places.iter().map(|&place| weights[place]).collect()
}
