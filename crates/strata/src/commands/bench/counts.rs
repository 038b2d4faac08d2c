//! How much work there is in training and sampling, by arithmetic on shapes alone: floating-point operations, a multiply-add being two, and bytes.
//!
//! Counted is what the mathematics asks for, however it is computed: matrices, low-rank pairs, and the causal half of attention. Norms,
//! activations, softmax, sampling and the optimizer are not; they are less than a hundredth. What is computed a second time to save memory is
//! kept apart, as recompute.

use strata_model::{LinearWork, MixerWork, ModelConfig, PAGE_TOKENS, Work};
use strata_tensor::{DType, DeltaGeometry, WeightStorage};

/// Operations of a training pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TrainFlops {
    /// Forward, gradients by the inputs of frozen matrices, and gradients of low-rank pairs.
    pub model: f64,
    /// The second forward pass of each layer, and the scores that the gradient of attention computes again.
    pub recompute: f64,
}

/// Matrices of a kind that a token passes, of all layers.
fn passed(linear: &LinearWork) -> usize {
    linear.layers * linear.experts.map_or(1, |experts| experts.active)
}

/// Rank of the low-rank pairs of a kind of matrix: that of an expert is the adapter's divided by their number.
fn rank_of(linear: &LinearWork, rank: usize) -> usize {
    linear.experts.map_or(rank, |experts| (rank / experts.count).max(1))
}

/// Elements of a matrix that a token passes, in all its layers.
fn elements(linear: &LinearWork) -> f64 {
    (passed(linear) * linear.in_features * linear.out_features) as f64
}

/// Elements of a low-rank pair that a token passes, in all its layers.
fn pair_elements(linear: &LinearWork, rank: usize) -> f64 {
    (passed(linear) * rank_of(linear, rank) * (linear.in_features + linear.out_features)) as f64
}

/// Elements of the decoder's matrices.
fn decoder_elements(work: &Work) -> f64 {
    work.linears.iter().map(elements).sum()
}

/// Elements of the decoder's low-rank pairs.
fn decoder_pair_elements(work: &Work, rank: usize) -> f64 {
    work.linears.iter().map(|linear| pair_elements(linear, rank)).sum()
}

/// The gated delta rule token by token, however it is computed: what a key recalls of the state, what it adds, and what a query finds.
pub(super) fn delta_rule(g: &DeltaGeometry, tokens: usize) -> f64 {
    6.0 * tokens as f64 * g.state_width() as f64
}

/// What mixes tokens, in one forward pass over whole sequences. Attention: scores and weighted values, every token seeing itself and those before it. Gated delta nets: the rule
/// and the convolution.
fn mixer_flops(work: &Work, sequences: usize, tokens: usize) -> f64 {
    let pairs = tokens as f64 * (tokens + 1) as f64 / 2.0;
    let of_layer = |mixer: &MixerWork| match mixer {
        MixerWork::Attention(of) => 4.0 * pairs * of.query_width as f64,
        MixerWork::DeltaNet(g) => delta_rule(g, tokens) + 2.0 * tokens as f64 * (g.kernel * g.conv_width()) as f64,
    };
    sequences as f64 * work.mixers.iter().map(of_layer).sum::<f64>()
}

/// Elements that a decode step reads of what a sequence of `context` tokens has left behind: in the compute dtype, and in f32.
fn cached_elements(work: &Work, context: f64) -> (f64, f64) {
    let of_layer = |mixer: &MixerWork| match mixer {
        MixerWork::Attention(of) => (of.cached_width as f64 * context, 0.0),
        MixerWork::DeltaNet(g) => (0.0, g.state_width() as f64),
    };
    work.mixers.iter().map(of_layer).fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
}

/// One adapter's forward and backward over whole sequences, every token with a target.
pub(super) fn train(c: &ModelConfig, rank: usize, sequences: usize, tokens: usize) -> TrainFlops {
    let work = Work::of(c);
    let per_element = 2.0 * (sequences * tokens) as f64;
    let matrices = decoder_elements(&work) + elements(&work.unembedding);
    let pairs = decoder_pair_elements(&work, rank) + pair_elements(&work.unembedding, rank);
    let mixers = mixer_flops(&work, sequences, tokens);
    // A layer that runs again stops before the product of its last matrix, whose value nobody needs; of its pair only A is multiplied.
    let last = || work.linears.iter().filter(|linear| linear.ends_layer);
    let again = decoder_elements(&work) - last().map(elements).sum::<f64>();
    let pairs_again = decoder_pair_elements(&work, rank)
        - last().map(|l| (passed(l) * rank_of(l, rank) * l.out_features) as f64).sum::<f64>();
    // The activations of the last layer are kept: they take no more memory than those of the one that runs again.
    let layers_again = (c.num_layers - 1) as f64 / c.num_layers as f64;
    TrainFlops {
        // Frozen matrices: forward and the gradient by the input. Pairs: their own gradient too. Attention: two products forward, four backward.
        model: per_element * (2.0 * matrices + 3.0 * pairs) + 3.0 * mixers,
        // Attention's layer runs again, and its backward computes the scores once more, which are half of a forward.
        recompute: (per_element * (again + pairs_again) + mixers) * layers_again + 0.5 * mixers,
    }
}

/// Prefill of one prompt, with the prediction after its last token, which alone passes attention in the last layer and what is behind it. `rank`: that of the adapter, if there is one.
pub(super) fn prefill(c: &ModelConfig, rank: Option<usize>, tokens: usize) -> f64 {
    let (work, rank) = (Work::of(c), rank.unwrap_or(0));
    let layers = decoder_elements(&work) + decoder_pair_elements(&work, rank);
    let of_one = |linear: &LinearWork| (elements(linear) + pair_elements(linear, rank)) / linear.layers as f64;
    let answers: f64 = work.linears.iter().filter(|linear| linear.answers).map(of_one).sum();
    let last = elements(&work.unembedding) + pair_elements(&work.unembedding, rank);
    let without_queries = match work.mixers.last() {
        Some(MixerWork::Attention(of)) => 4.0 * (tokens as f64 * (tokens as f64 - 1.0) / 2.0) * of.query_width as f64,
        _ => 0.0,
    };
    2.0 * (tokens as f64 * (layers - answers) + answers + last) + mixer_flops(&work, 1, tokens) - without_queries
}

/// A decode step of one sequence that sees `context` tokens. `rank`: that of the adapter, if there is one.
pub(super) fn decode(c: &ModelConfig, rank: Option<usize>, context: f64) -> f64 {
    let (work, rank) = (Work::of(c), rank.unwrap_or(0));
    let matrices = decoder_elements(&work) + elements(&work.unembedding);
    let pairs = decoder_pair_elements(&work, rank) + pair_elements(&work.unembedding, rank);
    let of_layer = |mixer: &MixerWork| match mixer {
        MixerWork::Attention(of) => 4.0 * context * of.query_width as f64,
        MixerWork::DeltaNet(g) => delta_rule(g, 1) + 2.0 * (g.kernel * g.conv_width()) as f64,
    };
    2.0 * (matrices + pairs) + work.mixers.iter().map(of_layer).sum::<f64>()
}

/// Bytes of an element of a frozen matrix, and of all else.
#[derive(Clone, Copy)]
pub(super) struct ElementBytes {
    matrix: f64,
    other: usize,
}

impl ElementBytes {
    /// Of a model that computes in elements of this type.
    pub(super) fn of(compute: DType, storage: WeightStorage) -> Self {
        ElementBytes { matrix: storage.element_bytes(compute), other: compute.size_bytes() }
    }
}

/// Elements of a kind of matrix that a step of `sequences` tokens reads: each once, of experts those that some token passes, if all are as likely.
fn read_elements(linear: &LinearWork, sequences: usize) -> f64 {
    let of_layer = linear.experts.map_or(1.0, |experts| {
        let left_out = 1.0 - experts.active as f64 / experts.count as f64;
        experts.count as f64 * (1.0 - left_out.powi(sequences as i32))
    });
    (linear.layers * linear.in_features * linear.out_features) as f64 * of_layer
}

/// Bytes of weights that a pass over so many tokens must read: each matrix once, and the pairs of each adapter once.
pub(super) fn weight_bytes(c: &ModelConfig, bytes: ElementBytes, ranks: &[usize], tokens: usize) -> f64 {
    let work = Work::of(c);
    let pairs_of = |&rank: &usize| decoder_pair_elements(&work, rank) + pair_elements(&work.unembedding, rank);
    let matrices = work.linears.iter().map(|linear| read_elements(linear, tokens)).sum::<f64>() + elements(&work.unembedding);
    bytes.matrix * matrices + bytes.other as f64 * ranks.iter().map(pairs_of).sum::<f64>()
}

/// Bytes that a decode step must read: each matrix once, the pairs of each adapter once, and the keys and values of every sequence.
/// `contexts`: tokens that each sequence sees, on average over the steps.
pub(super) fn decode_bytes(c: &ModelConfig, bytes: ElementBytes, ranks: &[usize], sequences: usize, context: f64) -> f64 {
    let (cached, states) = cached_elements(&Work::of(c), context);
    weight_bytes(c, bytes, ranks, sequences)
        + bytes.other as f64 * cached * sequences as f64
        + (DType::F32.size_bytes() * sequences) as f64 * states
}

/// Tokens of the cache that sequences take: whole pages, and one more for the page in which prompt and sample meet.
pub(super) fn cache_tokens(sequences: usize, tokens: usize) -> usize {
    sequences * (tokens.div_ceil(PAGE_TOKENS) + 1) * PAGE_TOKENS
}

#[cfg(test)]
mod tests {
    use strata_model::ExpertWork;
    use strata_tensor::Int4Group;

    use super::*;

    /// One layer of width 4 with two query heads and one key head of width 2, an MLP of 6, and 10 words.
    fn tiny() -> ModelConfig {
        tiny_of_layers(1)
    }

    fn tiny_of_layers(layers: usize) -> ModelConfig {
        let json = format!(
            r#"{{"model_type": "qwen3", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": {layers}, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10}}"#
        );
        ModelConfig::from_json(&json, None).unwrap()
    }

    #[test]
    fn training_is_counted_as_by_hand() {
        // q 16, k 8, v 8, o 16, gate 24, up 24, down 24: 120 elements; unembedding 40.
        // Pairs of rank 1: 8 + 6 + 6 + 8 + 10 + 10 + 10 = 58; unembedding 14.
        // Attention over 3 tokens: 6 pairs of query and key, 2 heads of width 2, two products: 6 * 4 * 2 * 2 = 96 operations.
        let flops = train(&tiny(), 1, 1, 3);
        assert_eq!(flops.model, 6.0 * (2.0 * 160.0 + 3.0 * 72.0) + 3.0 * 96.0);
        // Of the only layer, whose activations are kept, the scores alone are computed again; of others all but down, and its B.
        assert_eq!(flops.recompute, 0.5 * 96.0);
        assert_eq!(train(&tiny_of_layers(3), 1, 1, 3).recompute, 2.0 * (6.0 * (96.0 + 54.0) + 96.0) + 3.0 * 0.5 * 96.0);
        let twice = train(&tiny(), 1, 2, 3);
        assert_eq!(twice.model, 2.0 * flops.model);
    }

    #[test]
    fn prefill_is_counted_as_by_hand() {
        // Three tokens pass q, k and v, of 32 elements and with pairs of rank 2 of 40, and one the rest; it sees three.
        assert_eq!(prefill(&tiny(), None, 3), 2.0 * (3.0 * 32.0 + 88.0 + 40.0) + 48.0);
        assert_eq!(prefill(&tiny(), Some(2), 3), 2.0 * (3.0 * (32.0 + 40.0) + 88.0 + 76.0 + 40.0 + 28.0) + 48.0);
        // Of two layers all tokens pass the first.
        assert_eq!(prefill(&tiny_of_layers(2), None, 3), 2.0 * (3.0 * (120.0 + 32.0) + 88.0 + 40.0) + 96.0 + 48.0);
    }

    #[test]
    fn a_decode_step_is_the_last_token_of_a_prefill() {
        assert_eq!(decode(&tiny(), Some(2), 1.0), prefill(&tiny(), Some(2), 1));
        // Of the two before it queries, keys and values.
        assert_eq!(decode(&tiny(), Some(2), 3.0), prefill(&tiny(), Some(2), 3) - 2.0 * 2.0 * (32.0 + 40.0));
    }

    #[test]
    fn experts_are_counted_as_far_as_tokens_pass_them() {
        let linear = LinearWork {
            name: "",
            in_features: 3,
            out_features: 5,
            layers: 2,
            experts: Some(ExpertWork { count: 4, active: 2 }),
            ends_layer: false,
            answers: false,
        };
        assert_eq!((elements(&linear), pair_elements(&linear, 8)), (2.0 * 2.0 * 15.0, 2.0 * 2.0 * 2.0 * 8.0));
        // Half of the experts for one token; three quarters for two that choose apart from each other.
        assert_eq!((read_elements(&linear, 1), read_elements(&linear, 2)), (2.0 * 2.0 * 15.0, 2.0 * 3.0 * 15.0));
    }

    #[test]
    fn a_decode_step_reads_matrices_once_and_every_cache() {
        let of = |dtype| ElementBytes::of(dtype, WeightStorage::Dense);
        assert_eq!(decode_bytes(&tiny(), of(DType::BF16), &[], 1, 0.0), 2.0 * 160.0);
        // A token's key and value: 2 numbers each.
        assert_eq!(decode_bytes(&tiny(), of(DType::BF16), &[], 3, 5.0), 2.0 * (160.0 + 3.0 * 5.0 * 4.0));
        assert_eq!(decode_bytes(&tiny(), of(DType::F32), &[1, 2], 1, 0.0), 4.0 * (160.0 + 3.0 * 72.0));
        let int8 = ElementBytes::of(DType::BF16, WeightStorage::Int8);
        assert_eq!(decode_bytes(&tiny(), int8, &[1], 1, 0.0), 1.03125 * 160.0 + 2.0 * 72.0);
        let int4 = ElementBytes::of(DType::BF16, WeightStorage::Int4(Int4Group::Of64));
        assert_eq!(decode_bytes(&tiny(), int4, &[1], 1, 0.0), 0.5625 * 160.0 + 2.0 * 72.0);
    }
}
