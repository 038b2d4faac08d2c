//! Mixtures of experts in the place of an MLP: a frozen router, and experts that carry adapters each.

use strata_tensor::{DType, ExpertActivation, Experts, RouterScores, Routing, Tape, Var, experts_bytes_per_token};

use super::blocks::{Pass, TokenBytes};
use super::declaration::{Declaration, ExpertRows, MatrixId};
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
        Ok(())
    }
}

/// The weights of experts in some layers: of each kind one stack, with an entry for each expert of each layer.
pub(super) struct Moe {
    config: MoeConfig,
    router: MatrixId,
    gate_up_proj: MatrixId,
    down_proj: MatrixId,
    gate_up_modules: [(usize, usize); 2],
    down_module: usize,
}

impl Moe {
    /// Of the decoder layers `layers`.
    pub(super) fn declare(d: &mut Declaration, c: &MoeConfig, hidden: usize, layers: &[usize]) -> Self {
        let (n, width) = (c.num_experts, c.intermediate_size);
        let router = d.router("mlp.gate", layers, hidden, n);
        let gate_up_proj = d.matrix("gate+up of an expert", layers.len() * n, hidden, 2 * width);
        let down_proj = d.matrix("down of an expert", layers.len() * n, width, hidden);
        let gate_up = |projection, tinker_name, first| ExpertRows {
            stack: gate_up_proj,
            first,
            projection,
            tinker_name,
            fused: ("gate_up_proj", 2 * width),
        };
        let gate_up_modules = [gate_up("gate_proj", "w1", 0), gate_up("up_proj", "w3", width)]
            .map(|rows| (d.experts(&rows, layers, n, width), rows.first));
        let down =
            ExpertRows { stack: down_proj, first: 0, projection: "down_proj", tinker_name: "w2", fused: ("down_proj", hidden) };
        let down_module = d.experts(&down, layers, n, hidden);
        Moe { config: c.clone(), router, gate_up_proj, down_proj, gate_up_modules, down_module }
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
        let logits = tape.linear(h, pass.linear((self.router, l), None, &[]))?;
        let scores = if c.normalize { RouterScores::SoftmaxOfChosen } else { RouterScores::Softmax };
        let routed = tape.route(&logits, Routing { top_k: c.experts_per_token, scores })?;
        // The entry of the layer's first expert; the others follow it.
        let first = l * c.num_experts;
        let experts = Experts {
            num_experts: c.num_experts,
            gate_up: pass.linear((self.gate_up_proj, first), None, &self.gate_up_modules),
            activation: ExpertActivation::SwiGlu,
            down: pass.linear((self.down_proj, first), None, &[(self.down_module, 0)]),
        };
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
