//! Mixtures of experts in the place of an MLP: a frozen router, and experts that carry adapters each.

use strata_tensor::{DType, ExpertActivation, Experts, RouterScores, Routing, Tape, Var, experts_bytes_per_token};

use super::blocks::{Pass, TokenBytes};
use super::declaration::{Declaration, ExpertRows, MatrixId, RowOrder, VectorId};
use crate::config::fields::check_size;
use crate::config::{EXPERTS_MAX, INTERMEDIATE_SIZE_MAX};
use crate::{Error, Result};

/// The experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// How many there are.
    pub num_experts: usize,
    /// How many a token passes.
    pub experts_per_token: usize,
    /// Width between the projections of one.
    pub intermediate_size: usize,
    /// Whether the router's probabilities are divided by the sum of those that were chosen.
    pub normalize: bool,
    /// What lies between the projections of one.
    pub activation: ExpertActivation,
    /// How a checkpoint has them.
    pub layout: MoeLayout,
}

/// How a checkpoint has the router and the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoeLayout {
    /// Qwen3-MoE: `mlp.gate`, and tensors for each expert, or all in one; no biases.
    PerExpert,
    /// gpt-oss: `mlp.router`, and always all experts in one tensor of each kind, the features of gate and up by turns; biases wherever there is a matrix.
    ByTurns,
}

impl MoeConfig {
    /// Refuses sizes and combinations that no model can have.
    pub(super) fn validate(&self) -> Result<()> {
        check_size("num_experts", self.num_experts as u64, EXPERTS_MAX)?;
        check_size("moe_intermediate_size", self.intermediate_size as u64, INTERMEDIATE_SIZE_MAX)?;
        let (top_k, all) = (self.experts_per_token, self.num_experts);
        if !(1..=all).contains(&top_k) {
            return Err(Error::Config(format!("num_experts_per_tok {top_k} is not between 1 and num_experts {all}")));
        }
        if let ExpertActivation::ClampedSwiGlu { alpha, limit } = self.activation
            && let Some((key, value)) =
                [("swiglu_alpha", alpha), ("swiglu_limit", limit)].iter().find(|(_, v)| !(v.is_finite() && *v > 0.0))
        {
            return Err(Error::Config(format!("{key} {value} is not a positive number")));
        }
        Ok(())
    }
}

/// The weights of experts in some layers: of each kind one stack, with an entry for each expert of each layer.
pub(super) struct Moe {
    config: MoeConfig,
    router: MatrixId,
    gate_up_proj: MatrixId,
    down_proj: MatrixId,
    biases: Option<MoeBiases>,
    gate_up_modules: [(usize, usize); 2],
    down_module: usize,
}

/// The biases of router and experts.
struct MoeBiases {
    router: VectorId,
    gate_up: VectorId,
    down: VectorId,
}

impl Moe {
    /// Of the decoder layers `layers`.
    pub(super) fn declare(d: &mut Declaration, c: &MoeConfig, hidden: usize, layers: &[usize]) -> Self {
        let (n, width) = (c.num_experts, c.intermediate_size);
        let matrices = |d: &mut Declaration| {
            let gate_up = d.matrix("gate+up of an expert", layers.len() * n, hidden, 2 * width);
            (gate_up, d.matrix("down of an expert", layers.len() * n, width, hidden))
        };
        let part = |stack, first, projection, tinker_name| ExpertRows { stack, first, projection, tinker_name };
        match c.layout {
            MoeLayout::PerExpert => {
                let router = d.router("mlp.gate", layers, hidden, n);
                let (gate_up_proj, down_proj) = matrices(d);
                let fused = ("gate_up_proj", 2 * width);
                let gate_up_modules = [part(gate_up_proj, 0, "gate_proj", "w1"), part(gate_up_proj, width, "up_proj", "w3")]
                    .map(|rows| {
                        d.experts(&rows, fused, layers, n, width);
                        (d.expert_module(&rows, layers, n, width), rows.first)
                    });
                let down = part(down_proj, 0, "down_proj", "w2");
                d.experts(&down, ("down_proj", hidden), layers, n, hidden);
                let down_module = d.expert_module(&down, layers, n, hidden);
                Moe { config: c.clone(), router, gate_up_proj, down_proj, biases: None, gate_up_modules, down_module }
            }
            MoeLayout::ByTurns => {
                let router = d.router("mlp.router", layers, hidden, n);
                let router_bias = d.norm("mlp.router.bias", layers, n);
                let (gate_up_proj, down_proj) = matrices(d);
                let (gate_up_bias, down_bias) = (d.vector(layers.len() * n, 2 * width), d.vector(layers.len() * n, hidden));
                d.flipped_experts(gate_up_proj, "mlp.experts.gate_up_proj", layers, n, RowOrder::ByTurns);
                d.expert_vectors(gate_up_bias, "mlp.experts.gate_up_proj_bias", layers, n, RowOrder::ByTurns);
                d.flipped_experts(down_proj, "mlp.experts.down_proj", layers, n, RowOrder::AsTheyAre);
                d.expert_vectors(down_bias, "mlp.experts.down_proj_bias", layers, n, RowOrder::AsTheyAre);
                // Beside each other in memory, whatever the checkpoint has: a low-rank pair writes neighbouring columns.
                let gate_up_modules = [part(gate_up_proj, 0, "gate_proj", "w1"), part(gate_up_proj, width, "up_proj", "w3")]
                    .map(|rows| (d.expert_module(&rows, layers, n, width), rows.first));
                let down_module = d.expert_module(&part(down_proj, 0, "down_proj", "w2"), layers, n, hidden);
                let biases = Some(MoeBiases { router: router_bias, gate_up: gate_up_bias, down: down_bias });
                Moe { config: c.clone(), router, gate_up_proj, down_proj, biases, gate_up_modules, down_module }
            }
        }
    }

    /// `residual + experts(h)`.
    pub(super) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
    ) -> strata_tensor::Result<Var> {
        let c = &self.config;
        let logits = tape.linear(h, pass.linear((self.router, l), self.biases.as_ref().map(|b| b.router), &[]))?;
        let scores = if c.normalize { RouterScores::SoftmaxOfChosen } else { RouterScores::Softmax };
        let routed = tape.route(&logits, Routing { top_k: c.experts_per_token, scores })?;
        // The entry of the layer's first expert; the others follow it.
        let first = l * c.num_experts;
        let mut experts = Experts {
            num_experts: c.num_experts,
            gate_up: pass.linear((self.gate_up_proj, first), None, &self.gate_up_modules),
            activation: c.activation,
            down: pass.linear((self.down_proj, first), None, &[(self.down_module, 0)]),
        };
        if let Some(biases) = &self.biases {
            let of_layer = |id| Some(pass.weights.vectors(id, first..first + c.num_experts));
            (experts.gate_up.bias, experts.down.bias) = (of_layer(biases.gate_up), of_layer(biases.down));
        }
        tape.add_experts(residual, h, &routed, experts)
    }

    /// Bytes for each token of a training pass, the norm before it included.
    pub(super) fn token_bytes(&self, hidden: usize, dtype: DType) -> TokenBytes {
        let c = &self.config;
        let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
        // Logits and choices, which are small beside the rest, and their gradients.
        let routing = wide * (2 * c.num_experts + 4 * c.experts_per_token);
        TokenBytes {
            saved: wide * hidden + 2 * narrow * hidden + routing,
            gradients: experts_bytes_per_token(hidden, c.intermediate_size, c.experts_per_token, dtype)
                + (2 * wide + narrow) * hidden
                + routing,
        }
    }
}
