//! Mixtures of experts in the place of an MLP: a frozen router, experts that carry adapters each, and an expert that every token passes where a family has one.

use strata_tensor::{
    DType, ExpertActivation, Experts, RouterScores, Routing, SigmoidScores, Tape, Var, experts_bytes_per_token,
};

use super::blocks::{GatedMlp, MlpConfig, MlpPaths, Pass, TokenBytes};
use super::declaration::{Declaration, ExpertRows, MatrixId, RowOrder, VectorId};
use crate::config::fields::check_size;
use crate::config::{ALL_EXPERTS_MAX, EXPERTS_MAX, INTERMEDIATE_SIZE_MAX};
use crate::lora::FusedRows;
use crate::{Error, ModelConfig, Result};

/// The experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// How many there are.
    pub num_experts: usize,
    /// How many a token passes.
    pub experts_per_token: usize,
    /// Width between the projections of one.
    pub intermediate_size: usize,
    /// How a token chooses.
    pub router: Router,
    /// Width of an MLP that every token passes beside them (`mlp.shared_experts`).
    pub shared_size: Option<usize>,
    /// Whether that MLP is one expert with a gate of its own (`mlp.shared_expert`, `mlp.shared_expert_gate`; Qwen3.5-MoE).
    pub shared_gate: bool,
    /// What lies between the projections of one.
    pub activation: ExpertActivation,
    /// How a checkpoint has them.
    pub layout: MoeLayout,
}

/// How a token chooses experts.
#[derive(Clone, Debug, PartialEq)]
pub enum Router {
    /// By the largest probabilities of a softmax.
    Softmax {
        /// `norm_topk_prob`: whether they are divided by the sum of those that were chosen.
        normalize: bool,
    },
    /// By the largest sigmoids, corrected and from some groups only (DeepSeek-V3).
    Sigmoid(SigmoidRouter),
}

/// Settings of [`Router::Sigmoid`].
#[derive(Clone, Debug, PartialEq)]
pub struct SigmoidRouter {
    /// `n_group`: groups of neighbouring experts.
    pub num_groups: usize,
    /// `topk_group`: groups that a token chooses from.
    pub top_groups: usize,
    /// `norm_topk_prob`: whether what was chosen is divided by its sum.
    pub normalize: bool,
    /// `routed_scaling_factor`: what weights are multiplied by.
    pub scaling_factor: f32,
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
    pub(super) fn validate(&self, num_layers: usize) -> Result<()> {
        check_size("num_experts", self.num_experts as u64, EXPERTS_MAX)?;
        if num_layers * self.num_experts > ALL_EXPERTS_MAX {
            let (layers, each) = (num_layers, self.num_experts);
            return Err(Error::Config(format!("{layers} layers of {each} experts are more than {ALL_EXPERTS_MAX} experts")));
        }
        check_size("moe_intermediate_size", self.intermediate_size as u64, INTERMEDIATE_SIZE_MAX)?;
        if let Some(size) = self.shared_size {
            check_size("width of the shared experts", size as u64, INTERMEDIATE_SIZE_MAX)?;
        }
        let (top_k, all) = (self.experts_per_token, self.num_experts);
        let mut choices = all;
        if let Router::Sigmoid(SigmoidRouter { num_groups, top_groups, scaling_factor, .. }) = self.router {
            if num_groups == 0 || !all.is_multiple_of(num_groups) || all / num_groups < 2 {
                return Err(Error::Config(format!("{all} experts are not n_group {num_groups} groups of at least two")));
            }
            if !(1..=num_groups).contains(&top_groups) {
                return Err(Error::Config(format!("topk_group {top_groups} is not between 1 and n_group {num_groups}")));
            }
            if !scaling_factor.is_finite() {
                return Err(Error::Config(format!("routed_scaling_factor {scaling_factor} is not finite")));
            }
            choices = all / num_groups * top_groups;
        }
        if !(1..=choices).contains(&top_k) {
            let of = if choices == all { "num_experts" } else { "the experts of topk_group groups," };
            return Err(Error::Config(format!("num_experts_per_tok {top_k} is not between 1 and {of} {choices}")));
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
    correction_bias: Option<VectorId>,
    gate_up_proj: MatrixId,
    down_proj: MatrixId,
    biases: Option<MoeBiases>,
    gate_up_modules: [(usize, usize); 2],
    down_module: usize,
    shared: Option<GatedMlp>,
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
        // Rows of a stack have all of gate before all of up.
        let gate_and_up = |stack, order| {
            let fused = |place| match order {
                RowOrder::AsTheyAre => FusedRows { parameter: "gate_up_proj", rows: 2 * width, first: place * width, step: 1 },
                RowOrder::ByTurns => FusedRows { parameter: "gate_up_proj", rows: 2 * width, first: place, step: 2 },
            };
            [
                ExpertRows { stack, first: 0, projection: "gate_proj", tinker_name: "w1", fused: fused(0) },
                ExpertRows { stack, first: width, projection: "up_proj", tinker_name: "w3", fused: fused(1) },
            ]
        };
        let down_rows = |stack| {
            let fused = FusedRows { parameter: "down_proj", rows: hidden, first: 0, step: 1 };
            ExpertRows { stack, first: 0, projection: "down_proj", tinker_name: "w2", fused }
        };
        match c.layout {
            MoeLayout::PerExpert => {
                let router = d.router("router", "mlp.gate", layers, hidden, n);
                let correction_bias = match c.router {
                    Router::Sigmoid(_) => Some(d.own_vector("mlp.gate.e_score_correction_bias", layers, n)),
                    Router::Softmax { .. } => None,
                };
                let (gate_up_proj, down_proj) = matrices(d);
                let gate_up_modules = gate_and_up(gate_up_proj, RowOrder::AsTheyAre).map(|rows| {
                    d.experts(&rows, layers, n, width);
                    (d.expert_module(&rows, layers, n, width), rows.first)
                });
                let down = down_rows(down_proj);
                d.experts(&down, layers, n, hidden);
                let down_module = d.expert_module(&down, layers, n, hidden);
                let shared = c.shared_size.map(|intermediate_size| {
                    let mlp = MlpConfig { intermediate_size, bias: false };
                    let paths = if c.shared_gate { &MlpPaths::SHARED_EXPERT } else { &MlpPaths::SHARED_EXPERTS };
                    GatedMlp::declare(d, paths, &mlp, hidden, layers)
                });
                let (config, biases) = (c.clone(), None);
                Moe { config, router, correction_bias, gate_up_proj, down_proj, biases, gate_up_modules, down_module, shared }
            }
            MoeLayout::ByTurns => {
                let router = d.router("router", "mlp.router", layers, hidden, n);
                let router_bias = d.own_vector("mlp.router.bias", layers, n);
                let (gate_up_proj, down_proj) = matrices(d);
                let (gate_up_bias, down_bias) = (d.vector(layers.len() * n, 2 * width), d.vector(layers.len() * n, hidden));
                d.flipped_experts(gate_up_proj, "mlp.experts.gate_up_proj", layers, n, RowOrder::ByTurns);
                d.expert_vectors(gate_up_bias, "mlp.experts.gate_up_proj_bias", layers, n, RowOrder::ByTurns);
                d.flipped_experts(down_proj, "mlp.experts.down_proj", layers, n, RowOrder::AsTheyAre);
                d.expert_vectors(down_bias, "mlp.experts.down_proj_bias", layers, n, RowOrder::AsTheyAre);
                // Beside each other in memory, whatever the checkpoint has: a low-rank pair writes neighbouring columns.
                let gate_up_modules = gate_and_up(gate_up_proj, RowOrder::ByTurns)
                    .map(|rows| (d.expert_module(&rows, layers, n, width), rows.first));
                let down_module = d.expert_module(&down_rows(down_proj), layers, n, hidden);
                let biases = Some(MoeBiases { router: router_bias, gate_up: gate_up_bias, down: down_bias });
                let (config, correction_bias, shared) = (c.clone(), None, None);
                Moe { config, router, correction_bias, gate_up_proj, down_proj, biases, gate_up_modules, down_module, shared }
            }
        }
    }

    /// `residual + shared(h) + experts(h)`.
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
        let scores = match &c.router {
            Router::Softmax { normalize: true } => RouterScores::SoftmaxOfChosen,
            Router::Softmax { normalize: false } => RouterScores::Softmax,
            Router::Sigmoid(s) => RouterScores::Sigmoid(SigmoidScores {
                correction_bias: self.correction_bias.map(|bias| pass.weights.vector(bias, l)),
                num_groups: s.num_groups,
                top_groups: s.top_groups,
                normalize: s.normalize,
                scaling_factor: s.scaling_factor,
            }),
        };
        let routed = tape.route(&logits, Routing { top_k: c.experts_per_token, scores })?;
        // The last op of a layer is not computed again for its gradients: let that be the larger.
        let beside = self.shared.as_ref().map(|shared| shared.forward(pass, tape, l, residual, h)).transpose()?;
        // The entry of the layer's first expert; the others follow it.
        let first = l * c.num_experts;
        let mut experts = Experts {
            num_experts: c.num_experts,
            gate_up: pass.linear((self.gate_up_proj, first), None, &self.gate_up_modules),
            activation: c.activation,
            down: pass.linear((self.down_proj, first), None, &[(self.down_module, 0)]),
            keeps: pass.keeps_experts,
        };
        if let Some(biases) = &self.biases {
            let of_layer = |id| Some(pass.weights.vectors(id, first..first + c.num_experts));
            (experts.gate_up.bias, experts.down.bias) = (of_layer(biases.gate_up), of_layer(biases.down));
        }
        tape.add_experts(beside.as_ref().unwrap_or(residual), h, &routed, experts)
    }

    /// Bytes for each token of what a layer keeps where [`Pass::keeps_experts`].
    pub(super) fn kept_bytes_per_token(&self) -> usize {
        self.config.experts_per_token * 2 * self.config.intermediate_size * DType::F32.size_bytes()
    }

    /// Bytes for each token of a training pass, the norm before it included.
    pub(super) fn token_bytes(&self, hidden: usize, dtype: DType) -> TokenBytes {
        let c = &self.config;
        let (wide, narrow) = (DType::F32.size_bytes(), dtype.size_bytes());
        // Logits and choices, which are small beside the rest, and their gradients.
        let routing = wide * (2 * c.num_experts + 4 * c.experts_per_token);
        let experts = TokenBytes {
            saved: wide * hidden + 2 * narrow * hidden + routing,
            gradients: experts_bytes_per_token(hidden, c.intermediate_size, c.experts_per_token, dtype)
                + (2 * wide + narrow) * hidden
                + routing,
        };
        let Some(shared) = &self.shared else { return experts };
        let shared = shared.token_bytes(hidden, dtype);
        // What is between, and the gradient of the norm's output while the other of the two goes back.
        TokenBytes {
            saved: shared.saved + wide * hidden + routing,
            gradients: experts.gradients.max(shared.gradients + wide * hidden),
        }
    }
}

/// What follows attention in each layer: an MLP, or experts in its place. A stack of each kind, and a schedule that says which layer has which.
pub(super) struct MlpOrMoe {
    mlp: Option<GatedMlp>,
    moe: Option<Moe>,
    /// Of each layer its place in the stack of MLPs or of experts.
    places: Vec<usize>,
    sparse: Vec<bool>,
}

impl MlpOrMoe {
    /// Of all decoder layers; `sparse`: whether each has experts.
    pub(super) fn declare(d: &mut Declaration, mlp: &MlpConfig, moe: &MoeConfig, sparse: &[bool], hidden: usize) -> Self {
        let (with, without): (Vec<usize>, Vec<usize>) = (0..sparse.len()).partition(|&l| sparse[l]);
        let place = |l: usize| if sparse[l] { &with } else { &without }.partition_point(|&other| other < l);
        MlpOrMoe {
            mlp: (!without.is_empty()).then(|| GatedMlp::declare(d, &MlpPaths::MLP, mlp, hidden, &without)),
            moe: (!with.is_empty()).then(|| Moe::declare(d, moe, hidden, &with)),
            places: (0..sparse.len()).map(place).collect(),
            sparse: sparse.to_vec(),
        }
    }

    /// Refuses a schedule that is not one of all layers.
    pub(super) fn validate(sparse: &[bool], model: &ModelConfig) -> Result<()> {
        if sparse.len() == model.num_layers {
            return Ok(());
        }
        let (known, layers) = (sparse.len(), model.num_layers);
        Err(Error::Config(format!("of {known} layers is known whether they have experts, of {layers}")))
    }

    /// `residual + mlp(h)` of decoder layer `l`.
    pub(super) fn forward<'a>(
        &self,
        pass: &Pass<'a>,
        tape: &mut Tape<'a>,
        l: usize,
        residual: &Var,
        h: &Var,
    ) -> strata_tensor::Result<Var> {
        let place = self.places[l];
        match (&self.moe, &self.mlp) {
            (Some(moe), _) if self.sparse[l] => moe.forward(pass, tape, place, residual, h),
            (_, Some(mlp)) => mlp.forward(pass, tape, place, residual, h),
            (_, None) => unreachable!("a layer has a stack that it is in"),
        }
    }

    /// As [`Moe::kept_bytes_per_token`].
    pub(super) fn kept_bytes_per_token(&self) -> usize {
        self.moe.as_ref().map_or(0, Moe::kept_bytes_per_token)
    }

    /// Bytes for each token of a training pass in layers of either kind, the norm before it included.
    pub(super) fn token_bytes(&self, hidden: usize, dtype: DType) -> impl Iterator<Item = TokenBytes> {
        let mlp = self.mlp.as_ref().map(|mlp| mlp.token_bytes(hidden, dtype));
        let moe = self.moe.as_ref().map(|moe| moe.token_bytes(hidden, dtype));
        mlp.into_iter().chain(moe)
    }
}
