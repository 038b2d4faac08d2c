//! A gated delta net (Yang et al., 2024, arXiv:2412.06464) between its projections, as Qwen3.5 and Qwen3-Next have it (`Qwen3_5GatedDeltaNet` of
//! transformers): causal convolution, gates, gated delta rule, gated norm.

use std::rc::Rc;

use super::{check_f32, check_vector};
use crate::backend::{Backend, DeltaGeometry, DeltaInputs, DeltaParams, DeltaSpan};
use crate::tape::{Tape, Var, in_f32};
use crate::{DType, Error, RecurrentStates, Result, TensorRef};

const OP: &str = "gated_delta_net";

/// What a gated delta net reads beside its projection.
#[derive(Clone)]
pub struct DeltaNetInput<'a> {
    /// Shapes.
    pub geometry: DeltaGeometry,
    /// Of convolution and decay.
    pub params: DeltaParams<'a>,
    /// Weight of the norm of each head of the output, f32 `[v_dim]`; it is not centred at zero, as the other norms of these models are.
    pub norm: TensorRef<'a>,
    /// Epsilon of that norm.
    pub eps: f32,
    /// The sequences of the batch, in order; they cover all tokens.
    pub spans: Rc<[DeltaSpan]>,
}

impl<'a> Tape<'a> {
    /// f32 `projection: [tokens, projection_width]` to `[tokens, v_heads * v_dim]` in `dtype`. The columns of the projection are, one after another, those of
    /// `in_proj_qkv` (queries, keys, values), `in_proj_z`, `in_proj_b` and `in_proj_a`; see [`DeltaGeometry`].
    ///
    /// Sequences with a slot go on from what they left in `states` and leave there what their next token needs; the others are whole, begin from nothing and leave nothing.
    /// Cut anywhere, a sequence has the same bits.
    ///
    /// # Errors
    /// If shapes, the sequences or their slots do not fit, or the tape would have to go back through a slot.
    pub fn gated_delta_net(
        &mut self,
        projection: &Var,
        input: &DeltaNetInput<'a>,
        mut states: Option<&mut RecurrentStates>,
        dtype: DType,
    ) -> Result<Var> {
        let (g, params, backend) = (input.geometry, input.params, self.backend());
        backend.check_delta(&g)?;
        check_f32(OP, projection.value(), g.projection_width())?;
        check_vector(OP, params.conv, g.conv_width() * g.kernel)?;
        check_vector(OP, params.a_log, g.v_heads)?;
        check_vector(OP, params.dt_bias, g.v_heads)?;
        check_vector(OP, input.norm, g.v_dim)?;
        let tokens = self.tokens_of(projection.value().rows());
        check_spans(&input.spans, tokens)?;
        check_slots(&input.spans, &g, states.as_deref())?;
        let records = self.records(&[projection], false);
        if records && input.spans.iter().any(|s| s.slot.is_some()) {
            return Err(Error::Unsupported("gradients through the states of sequences".into()));
        }
        // A state goes through all tokens of its sequence.
        let left_out = self.left_out().cloned();
        let projection = &match &left_out {
            Some(repeats) => self.constant(repeats.spread(backend, projection.value())?),
            None => projection.clone(),
        };
        let new_inputs = move |backend: &dyn Backend| {
            let new = |width| backend.scratch(&[tokens, width], DType::F32);
            let (q, k, v) = (new(g.key_width())?, new(g.key_width())?, new(g.value_width())?);
            Ok::<_, Error>(DeltaInputs { q, k, v, g: new(g.v_heads)?, beta: new(g.v_heads)? })
        };
        let mut inputs = new_inputs(backend)?;
        backend.delta_inputs(projection.value(), &params, &g, &input.spans, states.as_deref_mut(), &mut inputs)?;
        let mut recalled = backend.scratch(&[tokens, g.value_width()], DType::F32)?;
        backend.delta_rule(&inputs, &g, &input.spans, states, &mut recalled)?;
        let mut y = backend.scratch(&[tokens, g.value_width()], dtype)?;
        backend.gated_norm(&recalled, projection.value(), input.norm, input.eps, &g, &mut y)?;
        if let Some(repeats) = left_out {
            return Ok(self.constant(repeats.pick(backend, &y)?));
        }
        let y = Rc::new(y);
        if !records {
            return Ok(self.shared_constant(y));
        }
        let (projection, node, input) = (projection.shared(), projection.node(), input.clone());
        Ok(self.push(y, move |pass, dy| {
            let backend = pass.backend;
            let mut dprojection = backend.scratch(projection.shape().dims(), dtype)?;
            let mut drecalled = backend.scratch(recalled.shape().dims(), DType::F32)?;
            let dy = in_f32(backend, dy)?;
            let (norm, eps) = (input.norm, input.eps);
            backend.gated_norm_backward(&dy, &recalled, &projection, norm, eps, &g, &mut drecalled, &mut dprojection)?;
            drop((dy, recalled));
            let mut gradient = new_inputs(backend)?;
            backend.delta_rule_backward(&drecalled, &inputs, &g, &input.spans, &mut gradient)?;
            drop((drecalled, inputs));
            backend.delta_inputs_backward(&mut gradient, &projection, &input.params, &g, &input.spans, &mut dprojection)?;
            pass.accumulate(node, Rc::new(dprojection))
        }))
    }
}

/// Refuses sequences that are not all of a batch of `tokens`, one after another.
fn check_spans(spans: &[DeltaSpan], tokens: usize) -> Result<()> {
    let follow = |end, s: &DeltaSpan| (s.tokens.start == end && s.tokens.end >= end).then_some(s.tokens.end);
    if spans.iter().try_fold(0, follow) != Some(tokens) {
        let actual = spans.iter().map(|s| s.tokens.clone()).collect::<Vec<_>>();
        return Err(Error::Shape {
            op: OP,
            expected: format!("sequences that cover 0..{tokens}"),
            actual: format!("{actual:?}"),
        });
    }
    Ok(())
}

/// Refuses states of another shape, slots that are not there, one that two sequences would write, and a sequence whose past is nowhere.
fn check_slots(spans: &[DeltaSpan], g: &DeltaGeometry, states: Option<&RecurrentStates>) -> Result<()> {
    if let Some(states) = states
        && states.geometry != *g
    {
        return Err(Error::Shape { op: OP, expected: format!("{g:?}"), actual: format!("{states:?}") });
    }
    let num_slots = states.map_or(0, |s| s.num_slots);
    let mut written = Vec::new();
    for span in spans {
        match span.slot {
            None if span.past > 0 => {
                return Err(Error::Unsupported(format!("a sequence with {} tokens behind it needs its state", span.past)));
            }
            None => {}
            Some(slot) if slot as usize >= num_slots => {
                return Err(Error::Index { op: OP, what: "slots", index: slot as usize, size: num_slots });
            }
            Some(slot) => written.push(slot),
        }
        if span.past.checked_add(span.tokens.len()).is_none() {
            return Err(Error::Unsupported(format!("{OP}: a sequence of {} and {} tokens", span.past, span.tokens.len())));
        }
    }
    written.sort_unstable();
    if let Some(twice) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::Unsupported(format!("two sequences of a batch would write slot {}", twice[0])));
    }
    Ok(())
}
