//! Passes and steps some of whose rows repeat others, where nothing goes back: what is computed is the first row of each kind.

use std::rc::Rc;

use strata_tensor::{Between, LogprobPass, LogprobTargets, LoraGroup, Repeats, Tape, Var, target_logprobs};

use super::{Keeping, Model, Targets};
use crate::architectures::{BatchInputs, Leaves};
use crate::{KvCache, Result};

/// The targets of a batch, by the rows that are computed.
struct TargetsOfFirsts {
    /// Of each of those rows the first of its targets; one more entry than there are rows.
    offsets: Vec<usize>,
    /// Which target of the batch each is.
    order: Vec<usize>,
}

impl TargetsOfFirsts {
    fn of(repeats: &Repeats, targets: &Targets) -> Self {
        let places = repeats.places(0..targets.offsets.len() - 1);
        let mut offsets = vec![0; repeats.num_computed() + 1];
        for (place, of_row) in places.iter().zip(targets.offsets.windows(2)) {
            offsets[place + 1] += of_row[1] - of_row[0];
        }
        for place in 1..offsets.len() {
            offsets[place] += offsets[place - 1];
        }
        let (mut next, mut order) = (offsets.clone(), vec![0; targets.ids.len()]);
        for (place, of_row) in places.iter().zip(targets.offsets.windows(2)) {
            for target in of_row[0]..of_row[1] {
                order[next[*place]] = target;
                next[*place] += 1;
            }
        }
        TargetsOfFirsts { offsets, order }
    }
}

impl Model {
    /// [`Model::forward_with`] of whole sequences. A row answers for its own targets and for those of all rows that repeat it.
    ///
    /// # Errors
    /// As there.
    pub(super) fn forward_of_firsts(
        &self,
        inputs: &BatchInputs<'_>,
        repeats: &Rc<Repeats>,
        targets: &Targets,
        between: &mut Between<'_>,
    ) -> Result<Vec<f32>> {
        let backend = self.backend();
        let firsts = inputs.batch.without(repeats);
        let own = inputs.without_repeats(backend, &self.config, &firsts)?;
        let TargetsOfFirsts { mut offsets, order } = TargetsOfFirsts::of(repeats, targets);
        let rows: Rc<[usize]> = (0..firsts.len()).filter(|&row| offsets[row] < offsets[row + 1]).collect();
        // What comes behind the last layer comes to all rows.
        let few = rows.len() < firsts.len() && own.deepstack(self.config.num_layers - 1).is_empty();
        let leaves = Leaves::Activations { keeping: Keeping::ALL_CHECKPOINTS, answered: few.then(|| rows.clone()) };
        let mut tape = Tape::inference_without(backend, repeats.clone());
        let hidden = self.decoder.hidden(&mut tape, &own, leaves, None, between)?;
        let (w, module) = self.decoder.unembedding();
        let mut lora = own.lora(0, &[(module, 0)]);
        if few {
            lora = LoraGroup::of_rows(&lora, &rows);
            offsets = rows.iter().map(|&row| offsets[row]).chain([order.len()]).collect();
        }
        let ids: Vec<u32> = order.iter().map(|&target| targets.ids[target]).collect();
        let pass = LogprobPass {
            // Chunks may end anywhere, for nothing is summed over rows.
            sequences: &[],
            targets: LogprobTargets { ids: &ids, offsets: &offsets },
            loss: None,
            chunk_bytes: self.logits_chunk_bytes,
            repeats: None,
            between,
        };
        let (by_place, _) = target_logprobs(backend, hidden.value(), w, &lora, pass)?;
        let mut logprobs = vec![0.0; by_place.len()];
        order.into_iter().zip(by_place).for_each(|(target, logprob)| logprobs[target] = logprob);
        Ok(logprobs)
    }

    /// Hidden states, `[rows, hidden_size]`, of the rows that are computed, or of those among them that are `answered`, of sequences that live in a cache.
    ///
    /// # Errors
    /// As [`Model::step`].
    pub(super) fn step_of_firsts(
        &self,
        inputs: &BatchInputs<'_>,
        repeats: &Rc<Repeats>,
        answered: Option<Rc<[usize]>>,
        cache: &mut KvCache,
        between: &mut Between<'_>,
    ) -> Result<Var> {
        let firsts = inputs.batch.without(repeats);
        let own = inputs.without_repeats(self.backend(), &self.config, &firsts)?;
        let answered = answered.map(|rows| repeats.places(rows.iter().copied()).into());
        let mut tape = Tape::inference_without(self.backend(), repeats.clone());
        self.decoder.hidden(&mut tape, &own, Leaves::Cache { cache, answered }, None, between)
    }
}
