//! Every bound on what one request may ask for, in one place: whoever takes requests from outside checks against the same numbers as they
//! are read.

/// Examples of one `forward_backward`.
pub const DATUMS_MAX: usize = 65_536;
/// Input tokens of one `forward_backward`, all examples together.
pub const REQUEST_TOKENS_MAX: usize = 16 << 20;
/// Targets of one token.
pub const TARGETS_PER_TOKEN_MAX: usize = 1024;
/// Targets of one `forward_backward`, all examples together.
pub const REQUEST_TARGETS_MAX: usize = 64 << 20;

/// Pictures of one input.
pub const IMAGES_MAX: usize = 256;

/// Sequences of one sampling request.
pub const NUM_SAMPLES_MAX: usize = 4096;
/// Most probable tokens reported for a position.
pub const TOPK_MAX: usize = 128;
/// Tokens drawn in the place of one of a prompt.
pub const PROMPT_ALT_TOKENS_MAX: usize = 128;
/// Columns of the tokens whose log-probabilities are wanted at prompt positions.
pub const PROMPT_TARGETS_MAX: usize = TARGETS_PER_TOKEN_MAX;
/// Stop tokens or strings of a sampling request.
pub const STOPS_MAX: usize = 256;
/// Bytes of a stop string.
pub const STOP_BYTES_MAX: usize = 4096;

/// How far an operation of a model may run ahead of the first that has not begun.
pub const SEQUENCE_AHEAD_MAX: u64 = 16_384;

/// Learning rate of a step. Adam moves every weight by about as much, and those of an adapter are around 1 and below: no training comes near,
/// and one that is far above leaves an adapter whose products are no numbers.
pub const LEARNING_RATE_MAX: f64 = 100.0;
