//! Which points a run measures: curves around one base point, along each of the axes.

use serde::Serialize;

/// What is done at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// A forward_backward.
    Train,
    /// A forward pass over prompts that nobody has seen, and one token of each.
    Prefill,
    /// A step of all sequences.
    Decode,
}

/// What grows along a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Axis {
    /// Sequences at a time.
    Batch,
    /// Tokens of a sequence; of training the tokens of all sequences together stay the same.
    Length,
    /// Rank of each adapter.
    Rank,
    /// Adapters among which the sequences are dealt out.
    Adapters,
    /// Layers of the model.
    Layers,
}

/// Where a point lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub(super) struct Setting {
    pub layers: usize,
    pub adapters: usize,
    pub rank: usize,
    /// Sequences of all adapters together.
    pub batch: usize,
    /// Tokens of a sequence in training, of its prompt in sampling.
    pub tokens: usize,
}

impl Setting {
    /// What one engine with its adapters serves.
    pub(super) fn tenants(&self) -> (usize, usize, usize) {
        (self.layers, self.adapters, self.rank)
    }

    /// Tokens of a pass over whole sequences.
    pub(super) fn num_tokens(&self) -> usize {
        self.batch * self.tokens
    }
}

/// Points along one axis.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    pub work: Work,
    pub axis: Axis,
    pub points: Vec<(usize, Setting)>,
}

/// The values of the axes.
pub(super) struct Grid {
    /// Sequences of training, of `short_tokens` each: a pass of few tokens is on the curve too.
    train_batches: &'static [usize],
    short_tokens: usize,
    /// Lengths in training, of `length_tokens` tokens together.
    train_lengths: &'static [usize],
    length_tokens: usize,
    /// Sequences and tokens of each in training, along the other axes.
    train_base: [usize; 2],
    decode_batches: &'static [usize],
    /// The first is the length of prompts along the other axes.
    decode_lengths: &'static [usize],
    prefill_lengths: &'static [usize],
    ranks: &'static [usize],
    /// Rank along the other axes.
    rank: usize,
    adapters: &'static [usize],
    /// Rank of several adapters: all of them are in memory at once, with what their optimizers keep.
    adapters_rank: usize,
    layers: &'static [usize],
}

/// What a run measures.
pub(super) const FULL: Grid = Grid {
    train_batches: &[1, 2, 4, 8, 16, 32, 64],
    short_tokens: 32,
    train_lengths: &[64, 256, 1024, 4096],
    length_tokens: 4096,
    train_base: [4, 256],
    decode_batches: &[1, 2, 4, 8, 16, 32, 64],
    decode_lengths: &[128, 512, 1024, 2048, 4096, 8192],
    prefill_lengths: &[16, 32, 64, 128, 512, 1024, 2048, 4096, 8192],
    ranks: &[1, 4, 16, 32, 64, 128],
    rank: 32,
    adapters: &[1, 4, 16, 64],
    adapters_rank: 8,
    layers: &[2, 4, 8, 16],
};

/// As many axes with few and small points, to see that all of it runs.
pub(super) const QUICK: Grid = Grid {
    train_batches: &[1, 2],
    short_tokens: 8,
    train_lengths: &[8, 16],
    length_tokens: 16,
    train_base: [2, 16],
    decode_batches: &[1, 2],
    decode_lengths: &[16, 32],
    prefill_lengths: &[8, 16, 32],
    ranks: &[1, 4],
    rank: 4,
    adapters: &[1, 2],
    adapters_rank: 2,
    layers: &[1, 2],
};

impl Grid {
    /// All curves of a shape with `layers_max` layers, those along other axes than layers with `layers` of them.
    pub(super) fn curves(&self, layers: usize, layers_max: usize) -> Vec<Curve> {
        let one = |batch, tokens| Setting { layers, adapters: 1, rank: self.rank, batch, tokens };
        // As many sequences as the most adapters, so that each adapter has work.
        let most = *self.adapters.last().expect("a grid has adapters");
        let mut of_layers: Vec<usize> =
            self.layers.iter().copied().chain([layers, layers_max]).filter(|&l| l <= layers_max).collect();
        of_layers.sort_unstable();
        of_layers.dedup();
        let curve = |work, axis, values: &[usize], at: &dyn Fn(usize) -> Setting| Curve {
            work,
            axis,
            points: values.iter().map(|&x| (x, at(x))).collect(),
        };
        let [batch, tokens] = self.train_base;
        let (train, prompt) = (one(batch, tokens), self.decode_lengths[0]);
        let decode = one(1, prompt);
        let among = |adapters, tokens| Setting { adapters, rank: self.adapters_rank, ..one(most, tokens) };
        vec![
            curve(Work::Train, Axis::Batch, self.train_batches, &|x| one(x, self.short_tokens)),
            curve(Work::Train, Axis::Length, self.train_lengths, &|x| one(self.length_tokens / x, x)),
            curve(Work::Train, Axis::Rank, self.ranks, &|rank| Setting { rank, ..train }),
            curve(Work::Train, Axis::Adapters, self.adapters, &|adapters| among(adapters, self.short_tokens)),
            curve(Work::Train, Axis::Layers, &of_layers, &|layers| Setting { layers, ..train }),
            curve(Work::Prefill, Axis::Length, self.prefill_lengths, &|x| one(1, x)),
            curve(Work::Decode, Axis::Batch, self.decode_batches, &|x| one(x, prompt)),
            curve(Work::Decode, Axis::Length, self.decode_lengths, &|x| one(1, x)),
            curve(Work::Decode, Axis::Rank, self.ranks, &|rank| Setting { rank, ..decode }),
            curve(Work::Decode, Axis::Adapters, self.adapters, &|adapters| among(adapters, prompt)),
            curve(Work::Decode, Axis::Layers, &of_layers, &|layers| Setting { layers, ..decode }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn along_each_axis_nothing_else_grows() {
        for curve in FULL.curves(8, 28).into_iter().chain(QUICK.curves(2, 5)) {
            let what = format!("{:?} against {:?}", curve.work, curve.axis);
            let held = |&(x, at): &(usize, Setting)| match curve.axis {
                Axis::Batch => (x == at.batch, Setting { batch: 0, ..at }),
                // The same work in fewer and longer sequences.
                Axis::Length if curve.work == Work::Train => {
                    (x == at.tokens, Setting { batch: at.num_tokens(), tokens: 0, ..at })
                }
                Axis::Length => (x == at.tokens, Setting { tokens: 0, ..at }),
                Axis::Rank => (x == at.rank, Setting { rank: 0, ..at }),
                Axis::Adapters => (x == at.adapters && at.batch % x == 0, Setting { adapters: 0, ..at }),
                Axis::Layers => (x == at.layers, Setting { layers: 0, ..at }),
            };
            let points: Vec<_> = curve.points.iter().map(held).collect();
            assert!(points.iter().all(|&(is_x, rest)| is_x && rest == points[0].1), "{what}");
            assert!(curve.points.windows(2).all(|pair| pair[0].0 < pair[1].0) && points.len() > 1, "{what}");
        }
    }

    #[test]
    fn layers_go_up_to_those_of_the_shape() {
        let of = |layers, layers_max| {
            let curve = FULL.curves(layers, layers_max).pop().unwrap();
            curve.points.iter().map(|point| point.0).collect::<Vec<_>>()
        };
        assert_eq!((of(8, 28), of(5, 5)), (vec![2, 4, 8, 16, 28], vec![2, 4, 5]));
        assert_eq!(of(3, 6), [2, 3, 4, 6]);
    }
}
