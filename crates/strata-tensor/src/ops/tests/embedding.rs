//! The token embedding, and its low-rank pairs.

use super::*;
use crate::tape::EmbeddingLora;
use crate::testing::rows;

const VOCAB: usize = 37;
const HIDDEN: usize = 9;
/// Of each pair.
const RANKS: [usize; 3] = [3, 1, 5];
const SCALE: f32 = 0.3;
const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// A table, and pairs for two of three runs of tokens, and for one that is empty.
struct Embedding {
    dtype: DType,
    table: Tensor,
    tied: PackedStack,
    /// A, `[VOCAB, rank]`, and B transposed, `[rank, HIDDEN]`, before they are rounded.
    pairs: Vec<(Vec<f32>, Vec<f32>)>,
    a: Vec<Tensor>,
    b: Vec<PackedStack>,
}

impl Embedding {
    fn new(dtype: DType, pairs: Vec<(Vec<f32>, Vec<f32>)>) -> Self {
        let table = tensor(&[VOCAB, HIDDEN], dtype, 1);
        let tied = packed(&table.to_f32_vec(), HIDDEN, VOCAB, dtype);
        let a = |(pair, rank): (&(Vec<f32>, Vec<f32>), usize)| Tensor::from_f32(&pair.0, &[VOCAB, rank], dtype).unwrap();
        let b = |(pair, rank): (&(Vec<f32>, Vec<f32>), usize)| {
            let columns: Vec<f32> = (0..HIDDEN * rank).map(|i| pair.1[i % rank * HIDDEN + i / rank]).collect();
            packed(&columns, rank, HIDDEN, dtype)
        };
        let (a, b) = (pairs.iter().zip(RANKS).map(a).collect(), pairs.iter().zip(RANKS).map(b).collect());
        Embedding { dtype, table, tied, pairs, a, b }
    }

    fn random(dtype: DType) -> Self {
        let pair = |(i, rank): (u64, usize)| (normal(VOCAB * rank, 10 + i), normal(rank * HIDDEN, 20 + i));
        Embedding::new(dtype, (0..).zip(RANKS).map(pair).collect())
    }

    fn pair(&self, i: usize, sequences: &[Range<usize>]) -> EmbeddingLora<'_> {
        EmbeddingLora {
            tokens: sequences[0].start..sequences[sequences.len() - 1].end,
            sequences: sequences.into(),
            a: self.a[i].as_ref(),
            b: self.b[i].layer(0),
            scale: SCALE,
            site: site(i),
        }
    }

    /// For twelve tokens.
    fn lora(&self) -> Arc<[EmbeddingLora<'_>]> {
        Arc::from([self.pair(0, &[0..1, 1..5]), self.pair(1, &[5..5]), self.pair(2, &[7..10, 10..12])])
    }
}

/// With the first id, the last, and repeated ones within and across sequences and groups.
const IDS: [u32; 12] = [36, 5, 0, 5, 5, 17, 36, 5, 36, 2, 36, 5];

fn site(module: usize) -> LoraSite {
    LoraSite { group: 0, module, layer: 0 }
}

fn gradients(but: Option<usize>) -> Gradients {
    let mut gradients = Gradients::default();
    for (i, rank) in RANKS.into_iter().enumerate().filter(|(i, _)| Some(*i) != but) {
        gradients.open_embedding(site(i), rank, VOCAB, HIDDEN);
    }
    gradients
}

/// Embeds on a recording and goes back from this gradient.
fn back(
    b: &dyn Backend,
    e: &Embedding,
    lora: &[EmbeddingLora<'_>],
    ids: &[u32],
    dy: &Tensor,
    gradients: &mut dyn LoraGradients,
) {
    let mut tape = Tape::recording(b);
    let y = tape.embedding(EmbeddingTable::Rows(e.table.as_ref()), lora.into(), ids).unwrap();
    tape.backward(y, dy.clone(), gradients).unwrap();
}

#[test]
fn embeddings_are_rows_of_the_table_whether_it_is_tied_or_not() {
    let b = backend();
    for dtype in DTYPES {
        let e = Embedding::random(dtype);
        let ids = [36, 0, 5, 5, 17];
        let expected: Vec<f32> = ids.iter().flat_map(|&id| e.table.row(id as usize).to_f32_vec()).collect();
        for table in [EmbeddingTable::Rows(e.table.as_ref()), EmbeddingTable::Tied(e.tied.layer(0))] {
            let mut tape = Tape::recording(&b);
            let embedded = tape.embedding(table, Arc::from([]), &ids).unwrap();
            assert_eq!(embedded.value().to_f32_vec(), expected);
            assert!(embedded.node().is_none(), "nothing goes back to a table without pairs");
            assert!(Tape::inference(&b).embedding(table, Arc::from([]), &[3, 37]).is_err());
        }
    }
}

#[test]
fn an_embedding_adds_low_rank_products_to_the_tokens_of_their_group() {
    for (dtype, isa) in DTYPES.into_iter().flat_map(|dtype| Arithmetic::available().into_iter().map(move |isa| (dtype, isa))) {
        let (b, e) = (CpuBackend::with_isa(isa, 2), Embedding::random(dtype));
        let round = |v: f32| if dtype == DType::F32 { v } else { half::bf16::from_f32(v).to_f32() };
        let expected: Vec<f64> = (0..IDS.len() * HIDDEN)
            .map(|i| {
                let (t, h, id) = (i / HIDDEN, i % HIDDEN, IDS[i / HIDDEN] as usize);
                let pair = [(0..5, 0), (7..12, 2)].into_iter().find(|(tokens, _)| tokens.contains(&t));
                let low_rank = pair.map_or(0.0, |(_, p)| {
                    let ((a, b), rank) = (&e.pairs[p], RANKS[p]);
                    let low = |r: usize| round(SCALE * round(a[id * rank + r]));
                    (0..rank).map(|r| low(r) as f64 * round(b[r * HIDDEN + h]) as f64).sum::<f64>()
                });
                e.table.row(id).to_f32_vec()[h] as f64 + low_rank
            })
            .collect();
        for table in [EmbeddingTable::Rows(e.table.as_ref()), EmbeddingTable::Tied(e.tied.layer(0))] {
            poison_recycled(&[IDS.len(), HIDDEN], DType::F32);
            let mut tape = Tape::inference(&b);
            let y = tape.embedding(table, e.lora(), &IDS).unwrap();
            assert_close(&y.value().to_f32_vec(), &expected, 1e-6, &format!("{isa} {dtype}"));
            assert!(y.node().is_none());
        }
    }
}

#[test]
fn the_gradients_of_an_embeddings_pairs_are_those_of_finite_differences() {
    let (b, e) = (backend(), Embedding::random(DType::F32));
    let dy = tensor(&[IDS.len(), HIDDEN], DType::F32, 99);
    let mut all = gradients(None);
    back(&b, &e, &e.lora(), &IDS, &dy, &mut all);
    let loss = |e: &Embedding| {
        let mut tape = Tape::inference(&b);
        weigh(tape.embedding(EmbeddingTable::Rows(e.table.as_ref()), e.lora(), &IDS).unwrap().value())
    };
    for i in 0..RANKS.len() {
        let with = |pair| {
            let mut pairs = e.pairs.clone();
            pairs[i] = pair;
            loss(&Embedding::new(DType::F32, pairs))
        };
        let (a, b) = e.pairs[i].clone();
        let (da, db) = all.of(site(i));
        assert_close(&da, &slopes(&a, 0.1, |a| with((a.to_vec(), b.clone()))), 1e-3, &format!("A of pair {i}"));
        assert_close(&db, &slopes(&b, 0.1, |b| with((a.clone(), b.to_vec()))), 1e-3, &format!("B of pair {i}"));
        assert_eq!(da.iter().any(|&g| g != 0.0), i != 1, "a run of no tokens has no gradient");
    }
    // A group that only scores takes nothing from the others, and what is there is added to.
    let mut fewer = gradients(Some(0));
    back(&b, &e, &e.lora(), &IDS, &dy, &mut fewer);
    assert_eq!(all.of(site(2)), fewer.of(site(2)));
    back(&b, &e, &e.lora(), &IDS, &dy, &mut fewer);
    let twice: Vec<f64> = all.of(site(2)).0.iter().map(|&g| 2.0 * g as f64).collect();
    assert_close(&fewer.of(site(2)).0, &twice, 1e-6, "twice");
}

#[test]
fn gradients_of_an_embedding_have_the_same_bits_on_any_threads_cut_into_sequences_and_far_away() {
    // More tokens than a task has, of a few ids and of many.
    let lengths = [3000, 1, 33, 700];
    let n: usize = lengths.iter().sum();
    let mut start = 0;
    let sequences = lengths.map(|len| {
        start += len;
        start - len..start
    });
    let draw = |i: u64, below: u32| crate::random::philox(7, [i, 0])[0] % below;
    let ids: Vec<u32> = (0..n as u64).map(|i| draw(i, if i < 2000 { 3 } else { VOCAB as u32 })).collect();
    let dy = tensor(&[n, HIDDEN], DType::F32, 99);
    let bits_of = |gradients: &Gradients| {
        let (a, b) = gradients.of(site(2));
        [a, b].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    for (dtype, isa) in DTYPES.into_iter().flat_map(|dtype| Arithmetic::available().into_iter().map(move |isa| (dtype, isa))) {
        let e = Embedding::random(dtype);
        let [whole, threads] = [2, 5].map(|threads| {
            let mut gradients = gradients(None);
            back(&CpuBackend::with_isa(isa, threads), &e, &[e.pair(2, &sequences)], &ids, &dy, &mut gradients);
            bits_of(&gradients)
        });
        assert!(whole == threads, "{isa} {dtype} threads");
        let b = CpuBackend::with_isa(isa, 1);
        let in_pieces = |pieces: &[Range<usize>]| {
            let mut gradients = gradients(None);
            for piece in pieces {
                let pair = e.pair(2, &[0..piece.len()]);
                back(&b, &e, &[pair], &ids[piece.clone()], &rows(&dy, piece.clone()), &mut gradients);
            }
            bits_of(&gradients)
        };
        assert!(whole == in_pieces(&sequences), "{isa} {dtype} cut");
        // A row of A is a chain over its tokens, wherever it is cut.
        let tokens: Vec<Range<usize>> = (0..n).map(|t| t..t + 1).collect();
        assert!(whole[0] == in_pieces(&tokens)[0], "{isa} {dtype} token after token");
    }
}

#[test]
fn an_embedding_with_pairs_has_the_same_bits_far_away() {
    let run = |b: &dyn Backend, dtype| {
        let e = Embedding::random(dtype);
        let there = |t: &Tensor| b.tensor(&t.to_f32_vec(), t.shape().dims(), t.dtype()).unwrap();
        let (table, a) = (there(&e.table), there(&e.a[0]));
        let mut packed = b.packed(1, RANKS[0], HIDDEN, dtype.into()).unwrap();
        b.pack_columns(&mut packed, 0, b.tensor(&e.pairs[0].1, &[RANKS[0], HIDDEN], DType::F32).unwrap().as_ref()).unwrap();
        let pair = EmbeddingLora { a: a.as_ref(), b: packed.layer(0), ..e.pair(0, &[0..1, 1..5]) };
        let gradient =
            [(VOCAB, RANKS[0]), (RANKS[0], HIDDEN)].map(|(rows, width)| b.zeros(&[1, rows, width], DType::F32).unwrap());
        let mut gradients = One(gradient);
        let mut tape = Tape::recording(b);
        let y = tape.embedding(EmbeddingTable::Rows(table.as_ref()), Arc::from([pair]), &IDS).unwrap();
        let out = b.to_f32_vec(y.value().as_ref()).unwrap();
        tape.backward(y, there(&tensor(&[IDS.len(), HIDDEN], DType::F32, 99)), &mut gradients).unwrap();
        let [da, db] = gradients.0.map(|t| b.to_f32_vec(t.as_ref()).unwrap());
        [out, da, db].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    for dtype in DTYPES {
        let near = run(&backend(), dtype);
        assert!(near.iter().all(|part| part.iter().any(|&bits| bits != 0)));
        assert_eq!(run(&RemoteBackend::new(backend()), dtype), near);
    }
}

/// The gradient of the only pair there is.
struct One([Tensor; 2]);

impl LoraGradients for One {
    fn layers_at(&mut self, sites: &[LoraSite], num_layers: usize) -> Vec<Option<LoraGradient<'_>>> {
        assert_eq!(sites, [site(0)]);
        let [a, b] = &mut self.0;
        vec![Some(LoraGradient { a: a.rows_mut(0..num_layers), b: b.rows_mut(0..num_layers) })]
    }
}

#[test]
fn pairs_that_do_not_fit_a_table_are_errors() {
    let (b, e) = (backend(), Embedding::random(DType::F32));
    let other = Embedding::random(DType::BF16);
    let narrow = packed(&normal(3 * 7, 1), 3, 7, DType::F32);
    let (short, none) = (Tensor::zeros(&[VOCAB - 1, 3], DType::F32), Tensor::zeros(&[VOCAB, 0], DType::F32));
    let from_none = PackedStack::zeros(1, 0, HIDDEN, DType::F32);
    let refused = |change: &dyn Fn(&mut EmbeddingLora<'_>)| {
        let mut pair = EmbeddingLora { ..e.pair(0, &[0..1, 1..5]) };
        change(&mut pair);
        Tape::inference(&b).embedding(EmbeddingTable::Rows(e.table.as_ref()), Arc::from([pair]), &IDS).is_err()
    };
    assert!(!refused(&|_| ()));
    assert!(refused(&|pair| pair.tokens = 0..13) && refused(&|pair| pair.tokens = 0..4));
    let with = |a: &Tensor, pair_b: &PackedStack| {
        let pair = EmbeddingLora { a: a.as_ref(), b: pair_b.layer(0), ..e.pair(0, &[0..5]) };
        Tape::inference(&b).embedding(EmbeddingTable::Rows(e.table.as_ref()), Arc::from([pair]), &IDS).is_err()
    };
    assert!(!with(&e.a[0], &e.b[0]));
    assert!(with(&e.a[1], &e.b[0]) && with(&short, &e.b[0]) && with(&e.a[0], &narrow) && with(&none, &from_none));
    assert!(with(&other.a[0], &e.b[0]) && with(&e.a[0], &other.b[0]));
    assert!(e.dtype != other.dtype);
}
