//! What ops take, measured. The counters are those of the whole process: this test is alone in it.

use std::sync::Arc;

use strata_tensor::{
    Backend, CpuBackend, DType, ExpertActivation, Experts, Linear, LoraGradient, LoraGradients, LoraGroup, LoraProjection,
    LoraSite, Memory, RouterScores, Routing, Tape, experts_bytes_per_token, live_bytes, peak_live_bytes, reset_peak_live_bytes,
};

struct Nowhere;

impl LoraGradients for Nowhere {
    fn layers_at(&mut self, sites: &[LoraSite], _: usize) -> Vec<Option<LoraGradient<'_>>> {
        sites.iter().map(|_| None).collect()
    }
}

#[test]
fn experts_take_what_they_say() {
    const TOKENS: usize = 2048;
    let (b, dtype) = (CpuBackend::new(Some(2)).unwrap(), DType::BF16);
    for (hidden, intermediate) in [(256, 512), (1024, 128)] {
        let stack = |layers, inputs, outputs| b.packed(layers, inputs, outputs, dtype.into()).unwrap();
        let zeros = |width, dtype| b.zeros(&[TOKENS, width], dtype).unwrap();
        let norm = b.zeros(&[hidden], DType::F32).unwrap();
        let (first, a, pair_b) = (stack(1, hidden, hidden), stack(1, hidden, 1), stack(1, 1, hidden));
        let (gate_up, down) = (stack(2, hidden, 2 * intermediate), stack(2, intermediate, hidden));

        // A pair makes of the input something that wants a gradient.
        let site = LoraSite { group: 0, module: 0, layer: 0 };
        let projection = LoraProjection { a: a.layer(0), b: pair_b.layer(0), scale: 1.0, first_column: 0, site };
        let group = LoraGroup { tokens: 0..TOKENS, sequences: Arc::from([]), projections: vec![projection] };
        let mut tape = Tape::recording(&b);
        let x = tape.constant(zeros(hidden, dtype));
        let x = tape.linear(&x, Linear { weight: first.layer(0), bias: None, lora: Arc::from([group]) }).unwrap();
        let h = tape.rms_norm(&x, norm.as_ref(), 1e-6, dtype).unwrap();
        // Every token chooses every expert.
        let logits = tape.constant(zeros(2, DType::F32));
        let routed = tape.route(&logits, Routing { top_k: 2, scores: RouterScores::Softmax }).unwrap();
        let linear = |w| Linear { weight: w, bias: None, lora: Arc::from([]) };
        let experts = Experts {
            num_experts: 2,
            gate_up: linear(gate_up.layer(0)),
            activation: ExpertActivation::SwiGlu,
            down: linear(down.layer(0)),
            keeps: false,
        };
        let y = tape.experts(&h, &routed, experts).unwrap();
        // Of a token to which no gradient comes nothing is taken.
        let dy = b.tensor(&vec![1.0; TOKENS * hidden], &[TOKENS, hidden], DType::F32).unwrap();

        b.trim();
        reset_peak_live_bytes();
        // The output is gone before the way back begins, and its gradient once it is rounded.
        let before = live_bytes() - y.value().size_bytes() - dy.size_bytes();
        tape.backward(y, dy, &mut Nowhere).unwrap();
        let taken = peak_live_bytes() - before;
        let said = TOKENS * experts_bytes_per_token(hidden, intermediate, 2, dtype);
        let scratch = b.matmul_scratch_bytes(TOKENS, hidden.max(2 * intermediate), dtype);
        assert!(taken <= said + said / 8 + scratch, "{taken} bytes of {said} and {scratch}");
        assert!(taken >= said * 95 / 100, "only {taken} bytes of {said}");
    }
}
