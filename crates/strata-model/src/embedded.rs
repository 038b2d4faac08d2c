//! The default model, part of the program: two million parameters, see `assets/tiny-base/README.md`.

/// Name of the embedded model, in place of a Hugging Face repository.
pub const EMBEDDED_NAME: &str = "strata/tiny-base";

/// `config.json`.
pub(crate) const CONFIG: &str = include_str!("../../../assets/tiny-base/config.json");
/// `generation_config.json`.
pub(crate) const GENERATION_CONFIG: &str = include_str!("../../../assets/tiny-base/generation_config.json");
/// `tokenizer.json`.
pub(crate) const TOKENIZER: &str = include_str!("../../../assets/tiny-base/tokenizer.json");
/// `tokenizer_config.json`.
pub(crate) const TOKENIZER_CONFIG: &str = include_str!("../../../assets/tiny-base/tokenizer_config.json");
/// `chat_template.jinja`.
pub(crate) const CHAT_TEMPLATE: &str = include_str!("../../../assets/tiny-base/chat_template.jinja");

/// `model.safetensors`.
pub(crate) fn weights() -> &'static [u8] {
    &WEIGHTS.bytes
}

/// Bytes that begin on a cache line, so that tensors in them can be read in place.
#[repr(C, align(64))]
struct Aligned<Bytes: ?Sized> {
    bytes: Bytes,
}

static WEIGHTS: &Aligned<[u8]> = &Aligned { bytes: *include_bytes!("../../../assets/tiny-base/model.safetensors") };
