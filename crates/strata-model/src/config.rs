//! `config.json`: what kind of model a checkpoint holds.

/// Everything about a Qwen3-style decoder that its forward pass needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Hugging Face `model_type`, which selects the architecture.
    pub model_type: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether q, k, v and o projections have biases.
    pub attention_bias: bool,
    /// Whether the unembedding is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Standard deviation of random initial weights.
    pub initializer_range: f32,
    /// Tokens that end a sequence, from `generation_config.json` or `config.json`.
    pub eos_token_ids: Vec<u32>,
}
