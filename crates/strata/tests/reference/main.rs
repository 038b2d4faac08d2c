//! The binary and the engine against what transformers and PEFT compute: see `tests/reference/make_fixtures.py` at the root of the repository.

mod export;
mod optimizer;
mod trace;
mod values;
