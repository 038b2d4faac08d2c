//! A two-layer decoder made of all ops, with adapters on every module, small enough for finite differences.

use std::ops::{ControlFlow, Range};
use std::rc::Rc;
use std::sync::Arc;

use super::frequencies;
use crate::backend::{AttentionGeometry, AttentionSpan, Backend, LogprobTargets, LoraGradient, QkvLayout, RowRequest, Sight};
use crate::ops::loss::{Part, in_chunks};
use crate::ops::*;
use crate::tape::{EmbeddingLora, Linear, LoraGradients, LoraGroup, LoraProjection, LoraSite, Tape, Var};
use crate::testing::{normal, packed};
use crate::{CpuBackend, DType, HostRef, KvPages, KvValues, Memory, PackedStack};

pub(super) const VOCAB: usize = 37;
const LAYERS: usize = 2;
const HIDDEN: usize = 10;
const MLP: usize = 7;
const GEOMETRY: AttentionGeometry = AttentionGeometry {
    heads: 2,
    kv_heads: 1,
    head_dim: 6,
    values: KvValues::Own(6),
    scale: 0.4,
    eps: 1e-6,
    window: None,
    sees: Sight::Before,
};

/// `(layer of the model, in, out, first column)` of each module: q, k, v; o; gate, up; down; unembedding; embedding.
const MODULES: [(usize, usize, usize, usize); 9] = [
    (0, HIDDEN, 12, 0),
    (0, HIDDEN, 6, 12),
    (0, HIDDEN, 6, 18),
    (1, 12, HIDDEN, 0),
    (2, HIDDEN, MLP, 0),
    (2, HIDDEN, MLP, MLP),
    (3, MLP, HIDDEN, 0),
    (4, HIDDEN, VOCAB, 0),
    (5, VOCAB, HIDDEN, 0),
];
/// `(in, out)` of each fused linear layer.
const LINEARS: [(usize, usize); 5] = [(HIDDEN, 24), (12, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN), (HIDDEN, VOCAB)];
const UNEMBED: usize = 4;
/// The module of the embedding, whose A is a table.
const EMBED: usize = 8;

/// Accumulators by site: of the layer that it names, and of those that follow.
#[derive(Default)]
pub(super) struct Gradients(Vec<(LoraSite, Tensor, Tensor)>);

impl Gradients {
    /// Begins to accumulate for a site.
    pub(super) fn open(&mut self, site: LoraSite, rank: usize, inputs: usize, outputs: usize) {
        self.open_layers(site, 1, rank, inputs, outputs);
    }

    /// Begins to accumulate for so many layers from that of a site on.
    pub(super) fn open_layers(&mut self, site: LoraSite, num_layers: usize, rank: usize, inputs: usize, outputs: usize) {
        let zeros = |width| Tensor::zeros(&[num_layers, rank, width], DType::F32);
        self.0.push((site, zeros(inputs), zeros(outputs)));
    }

    /// As [`Gradients::open`], of an embedding.
    pub(super) fn open_embedding(&mut self, site: LoraSite, rank: usize, vocab: usize, hidden: usize) {
        let zeros = |rows, width| Tensor::zeros(&[1, rows, width], DType::F32);
        self.0.push((site, zeros(vocab, rank), zeros(rank, hidden)));
    }

    /// Gradients of A and of B transposed.
    pub(super) fn of(&self, site: LoraSite) -> (Vec<f32>, Vec<f32>) {
        let (_, a, b) = self.0.iter().find(|(s, ..)| *s == site).unwrap();
        (a.to_f32_vec(), b.to_f32_vec())
    }

    /// All gradients of a group, in order.
    pub(super) fn of_group(&self, group: usize) -> Vec<f32> {
        let own = self.0.iter().filter(|(s, ..)| s.group == group);
        own.flat_map(|(_, a, b)| [a.to_f32_vec(), b.to_f32_vec()].concat()).collect()
    }
}

impl LoraGradients for Gradients {
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<LoraGradient<'_>>> {
        let mut all: Vec<_> = sites.iter().map(|_| None).collect();
        for (site, a, b) in &mut self.0 {
            if let Some(i) = sites.iter().position(|s| s == site) {
                all[i] = Some(LoraGradient { a: a.rows_mut(0..num_layers), b: b.rows_mut(0..num_layers) });
            }
        }
        all
    }
}

/// The loss `Σ factor · (logprob + logprob² / 8)`.
pub(super) struct Quadratic {
    pub(super) factors: Vec<f32>,
}

impl Quadratic {
    pub(super) fn value(&self, logprobs: &[f32]) -> f64 {
        let term = |(&f, &l): (&f32, &f32)| f as f64 * (l as f64 + (l as f64).powi(2) / 8.0);
        self.factors.iter().zip(logprobs).map(term).sum()
    }
}

impl TargetLoss for Quadratic {
    fn gradient(&self, first: usize, logprobs: &[f32], gradient: &mut [f32]) {
        for ((g, l), f) in gradient.iter_mut().zip(logprobs).zip(&self.factors[first..]) {
            *g = f * (1.0 + l / 4.0);
        }
    }
}

/// The low-rank pairs of all modules of all layers, f32, in the order of [`sites`].
#[derive(Clone)]
pub(super) struct Adapter {
    pub(super) rank: usize,
    pub(super) pairs: Vec<[Vec<f32>; 2]>,
}

/// Every `(layer, module)` that carries an adapter.
pub(super) fn sites() -> impl Iterator<Item = (usize, usize)> {
    (0..LAYERS).flat_map(|layer| (0..7).map(move |module| (layer, module))).chain([(0, 7), (0, EMBED)])
}

impl Adapter {
    pub(super) fn random(rank: usize, key: u64) -> Self {
        let scaled = |n, key| normal(n, key).iter().map(|v| v * 0.4).collect();
        let pair = |(layer, module): (usize, usize)| {
            let key = key * 1000 + (layer * 10 + module) as u64 * 2;
            let (_, inputs, outputs, _) = MODULES[module];
            [scaled(rank * inputs, key), scaled(rank * outputs, key + 1)]
        };
        Adapter { rank, pairs: sites().map(pair).collect() }
    }
}

/// A sequence: which adapter, and its tokens.
#[derive(Clone)]
pub(super) struct Sequence {
    pub(super) adapter: Option<usize>,
    pub(super) ids: Vec<u32>,
}

/// The frozen model and its adapters, packed.
pub(super) struct Toy {
    dtype: DType,
    linears: Vec<PackedStack>,
    biases: Vec<Tensor>,
    norms: Vec<Tensor>,
    embedding: Tensor,
    adapters: Vec<Vec<[PackedStack; 2]>>,
    /// A of the embedding of each adapter, `[VOCAB, rank]`.
    tables: Vec<Tensor>,
    ranks: Vec<usize>,
}

/// What a recording keeps of a layer.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Keep {
    Everything,
    Checkpoints,
}

impl Toy {
    pub(super) fn new(dtype: DType, adapters: &[Adapter]) -> Self {
        // Rounded to bf16 in either dtype, so that both are one model.
        let round = |values: Vec<f32>, factor: f32| -> Vec<f32> {
            values.iter().map(|v| half::bf16::from_f32(v * factor).to_f32()).collect()
        };
        let linear = |(i, (inputs, outputs)): (usize, (usize, usize))| {
            let mut stack = PackedStack::zeros(LAYERS, inputs, outputs, dtype);
            let b = CpuBackend::with_isa(crate::Isa::Portable, 1);
            for layer in 0..LAYERS {
                let rows = round(normal(inputs * outputs, (100 + i * LAYERS + layer) as u64), 0.5);
                b.upload_rows(&mut stack, layer, 0, HostRef::from_f32(&rows, &[outputs, inputs]).unwrap()).unwrap();
            }
            stack
        };
        let vector = |n: usize, key: u64| {
            Tensor::from_f32(&normal(n, key).iter().map(|v| 1.0 + 0.3 * v).collect::<Vec<_>>(), &[n], DType::F32).unwrap()
        };
        let pack = |adapter: &Adapter| {
            let pair = |((_, module), [a, b]): ((usize, usize), &[Vec<f32>; 2])| {
                let (_, inputs, outputs, _) = MODULES[module];
                let rank = adapter.rank;
                let b_rows: Vec<f32> = (0..outputs * rank).map(|i| b[i % rank * outputs + i / rank]).collect();
                [packed(a, inputs, rank, dtype), packed(&b_rows, rank, outputs, dtype)]
            };
            sites().zip(&adapter.pairs).map(pair).collect()
        };
        Toy {
            dtype,
            linears: LINEARS.into_iter().enumerate().map(linear).collect(),
            biases: (0..LAYERS as u64).map(|l| vector(24, 200 + l)).collect(),
            norms: [HIDDEN, 6, 6, HIDDEN, HIDDEN].into_iter().zip(210..).map(|(n, key)| vector(n, key)).collect(),
            embedding: Tensor::from_f32(&round(normal(VOCAB * HIDDEN, 220), 1.0), &[VOCAB, HIDDEN], dtype).unwrap(),
            adapters: adapters.iter().map(pack).collect(),
            tables: adapters
                .iter()
                .map(|a| Tensor::from_f32(&a.pairs[a.pairs.len() - 1][0], &[VOCAB, a.rank], dtype).unwrap())
                .collect(),
            ranks: adapters.iter().map(|a| a.rank).collect(),
        }
    }

    /// Accumulators for all adapters.
    pub(super) fn gradients(&self) -> Gradients {
        let mut gradients = Gradients::default();
        for (group, &rank) in self.ranks.iter().enumerate() {
            for (layer, module) in sites() {
                let (site, (_, inputs, outputs, _)) = (LoraSite { group, module, layer }, MODULES[module]);
                match module {
                    EMBED => gradients.open_embedding(site, rank, inputs, outputs),
                    _ => gradients.open(site, rank, inputs, outputs),
                }
            }
        }
        gradients
    }

    /// The pairs of one linear layer, for runs of sequences with one adapter.
    fn groups(&self, batch: &[(Sequence, Range<usize>)], linear: usize, layer: usize) -> Arc<[LoraGroup<'_>]> {
        let group = |run: &[(Sequence, Range<usize>)]| {
            let projections = run[0].0.adapter.into_iter().flat_map(|group| {
                let own = sites().enumerate().filter(move |(_, (l, module))| *l == layer && MODULES[*module].0 == linear);
                own.map(move |(i, (layer, module))| LoraProjection {
                    a: self.adapters[group][i][0].layer(0),
                    b: self.adapters[group][i][1].layer(0),
                    scale: 2.0 / self.ranks[group] as f32,
                    first_column: MODULES[module].3,
                    site: LoraSite { group, module, layer },
                })
            });
            LoraGroup {
                tokens: run[0].1.start..run[run.len() - 1].1.end,
                sequences: run.iter().map(|(_, tokens)| tokens.clone()).collect(),
                projections: projections.collect(),
            }
        };
        batch.chunk_by(|a, b| a.0.adapter == b.0.adapter).map(group).collect()
    }

    /// The pairs of the embedding, for runs of sequences with one adapter.
    fn embedding_pairs(&self, batch: &[(Sequence, Range<usize>)]) -> Arc<[EmbeddingLora<'_>]> {
        let pair = |run: &[(Sequence, Range<usize>)]| {
            let group = run[0].0.adapter?;
            Some(EmbeddingLora {
                tokens: run[0].1.start..run[run.len() - 1].1.end,
                sequences: run.iter().map(|(_, tokens)| tokens.clone()).collect(),
                a: self.tables[group].as_ref(),
                b: self.adapters[group][sites().count() - 1][1].layer(0),
                scale: 0.5 / self.ranks[group] as f32,
                site: LoraSite { group, module: EMBED, layer: 0 },
            })
        };
        batch.chunk_by(|a, b| a.0.adapter == b.0.adapter).filter_map(pair).collect()
    }

    fn layer<'a>(
        &'a self,
        tape: &mut Tape<'a>,
        x: &Var,
        layer: usize,
        batch: &[(Sequence, Range<usize>)],
        attention: &AttentionInput<'a>,
        kv: KvAccess<'_>,
    ) -> Result<Var> {
        let (dtype, eps) = (self.dtype, GEOMETRY.eps);
        let linear = |i: usize| Linear {
            weight: self.linears[i].layer(layer),
            bias: (i == 0).then(|| self.biases[layer].as_ref()),
            lora: self.groups(batch, i, layer),
        };
        let h = tape.rms_norm(x, self.norms[0].as_ref(), eps, dtype)?;
        let qkv = tape.linear(&h, linear(0))?;
        let a = tape.attention(&qkv, attention, kv, dtype)?;
        let x = tape.add_linear(x, &a, linear(1))?;
        let h = tape.rms_norm(&x, self.norms[3].as_ref(), eps, dtype)?;
        let gate_up = tape.linear(&h, linear(2))?;
        let m = tape.swiglu(&gate_up, dtype)?;
        tape.add_linear(&x, &m, linear(3))
    }

    fn training_layer<'a>(
        &'a self,
        layer: usize,
        batch: Rc<Vec<(Sequence, Range<usize>)>>,
        attention: AttentionInput<'a>,
    ) -> impl Fn(&mut Tape<'a>, &Var) -> Result<Var> + 'a {
        move |tape, x| self.layer(tape, x, layer, &batch, &attention, KvAccess::None)
    }

    fn attention_input<'a>(&'a self, b: &CpuBackend, spans: Vec<AttentionSpan<'a>>) -> AttentionInput<'a> {
        let positions: Vec<u32> = spans.iter().flat_map(|s| (s.past..s.past + s.tokens.len()).map(|p| p as u32)).collect();
        AttentionInput {
            geometry: GEOMETRY,
            norms: Some([self.norms[1].as_ref(), self.norms[2].as_ref()]),
            layout: QkvLayout::fused(&GEOMETRY),
            sinks: None,
            rotary: Rc::new(b.rotary(&positions, &frequencies(GEOMETRY.head_dim), 1.0).unwrap()),
            spans: spans.into(),
            queries: None,
        }
    }

    /// Log-probabilities of `targets` after each token of the batch; adds the gradient of the loss to `gradients`.
    pub(super) fn train(
        &self,
        b: &CpuBackend,
        batch: &[Sequence],
        (targets, loss): (LogprobTargets<'_>, &dyn TargetLoss),
        keep: Keep,
        chunk_rows: usize,
        gradients: &mut Gradients,
    ) -> Vec<f32> {
        let (batch, ids) = place(batch);
        let tokens: Vec<Range<usize>> = batch.iter().map(|s| s.1.clone()).collect();
        let spans = tokens.iter().map(|t| AttentionSpan { tokens: t.clone(), past: 0, pages: &[] }).collect();
        let attention = self.attention_input(b, spans);
        let batch = Rc::new(batch);
        let mut tape = Tape::recording(b);
        let mut x = tape.embedding(EmbeddingTable::Rows(self.embedding.as_ref()), self.embedding_pairs(&batch), &ids).unwrap();
        for layer in 0..LAYERS {
            let run = self.training_layer(layer, batch.clone(), attention.clone());
            x = match keep {
                Keep::Everything => run(&mut tape, &x),
                Keep::Checkpoints => tape.checkpoint(&x, run),
            }
            .unwrap();
        }
        let h = tape.rms_norm(&x, self.norms[4].as_ref(), GEOMETRY.eps, self.dtype).unwrap();
        let groups = self.groups(&batch, UNEMBED, 0);
        let parts = vec![Part::Computed(0..ids.len())];
        let w = self.linears[UNEMBED].layer(0);
        let between = &mut || ControlFlow::Continue(());
        let pass = LogprobPass {
            sequences: &tokens,
            targets,
            loss: Some((loss, gradients)),
            chunk_bytes: LOGITS_CHUNK_BYTES,
            repeats: None,
            between,
        };
        let (logprobs, dh) = in_chunks(b, h.value(), w, &groups, (parts, chunk_rows), pass).unwrap();
        tape.backward(h, dh.unwrap(), gradients).unwrap();
        logprobs
    }

    /// Log-probabilities of the whole vocabulary after each token of a sequence that is computed over a cache, cut at these places.
    pub(super) fn sample(&self, b: &CpuBackend, sequence: &Sequence, cuts: &[usize]) -> Vec<f32> {
        let mut kv: Vec<KvPages> =
            (0..LAYERS).map(|_| KvPages::new(3, GEOMETRY.kv_heads, GEOMETRY.head_dim, self.dtype)).collect();
        let mut logprobs = Vec::new();
        for chunk in cuts.windows(2).map(|w| w[0]..w[1]) {
            let (batch, ids) = place(&[Sequence { adapter: sequence.adapter, ids: sequence.ids[chunk.clone()].to_vec() }]);
            let attention =
                self.attention_input(b, vec![AttentionSpan { tokens: 0..chunk.len(), past: chunk.start, pages: &[2, 0] }]);
            let mut tape = Tape::inference(b);
            let mut x =
                tape.embedding(EmbeddingTable::Rows(self.embedding.as_ref()), self.embedding_pairs(&batch), &ids).unwrap();
            for (layer, kv) in kv.iter_mut().enumerate() {
                x = self.layer(&mut tape, &x, layer, &batch, &attention, KvAccess::Cache(kv)).unwrap();
            }
            let h = tape.rms_norm(&x, self.norms[4].as_ref(), GEOMETRY.eps, self.dtype).unwrap();
            let rows: Vec<usize> = (0..chunk.len()).collect();
            let all = RowRequest { ids: (0..VOCAB as u32).collect(), ..RowRequest::default() };
            let (w, groups) = (self.linears[UNEMBED].layer(0), self.groups(&batch, UNEMBED, 0));
            let requests = vec![all; rows.len()];
            let replies = read_logits(b, h.value(), w, &groups, &rows, &requests, LOGITS_CHUNK_BYTES).unwrap();
            logprobs.extend(replies.into_iter().flat_map(|reply| reply.unwrap().logprobs));
        }
        logprobs
    }
}

/// Sequences with their places in the batch, and all token ids.
fn place(batch: &[Sequence]) -> (Vec<(Sequence, Range<usize>)>, Vec<u32>) {
    let mut ids = Vec::new();
    let placed = batch.iter().map(|s| {
        let start = ids.len();
        ids.extend_from_slice(&s.ids);
        (s.clone(), start..ids.len())
    });
    (placed.collect(), ids)
}
