//! What is on the wire: protobuf and JSON bodies, and their translation from and to the engine's values.

pub mod bounded;
pub mod budget;
pub mod guard;
pub mod head;
#[cfg(test)]
pub mod held;
pub mod input;
pub mod json;
pub mod picture;
pub mod proto;
pub mod render;
pub mod sample;
pub mod setting;
pub mod tensor;
