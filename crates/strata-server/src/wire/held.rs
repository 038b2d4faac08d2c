//! What decoded requests hold in memory, which is what they cost while they wait.

use strata_engine::api::{Datum, Image, LossInput, LossSpec, LossValues, SampleRequest, SaveTarget, Stop, TrainOp};

use crate::wire::budget::map_bytes;
use crate::wire::picture;

/// Something whose size in memory can be told.
pub trait HeldBytes {
    /// Bytes that it holds, itself included.
    fn held_bytes(&self) -> usize;
}

fn vec_bytes<T>(values: &Vec<T>) -> usize {
    values.capacity() * size_of::<T>()
}

impl HeldBytes for TrainOp {
    fn held_bytes(&self) -> usize {
        let beyond = match self {
            TrainOp::ForwardBackward { data, loss, .. } => {
                let spare = (data.capacity() - data.len()) * size_of::<Datum>();
                spare + data.iter().map(HeldBytes::held_bytes).sum::<usize>() + loss.held_bytes() - size_of::<LossSpec>()
            }
            TrainOp::OptimStep(_) => 0,
            TrainOp::SaveState(target) | TrainOp::SaveSampler(target) => target.held_bytes() - size_of::<SaveTarget>(),
            TrainOp::Snapshot { sampler_id, .. } => sampler_id.capacity(),
            TrainOp::LoadState { source, .. } => source.dir.capacity() + source.name.capacity(),
            TrainOp::Refused(reason) => reason.capacity(),
        };
        size_of::<TrainOp>() + beyond
    }
}

impl HeldBytes for Datum {
    fn held_bytes(&self) -> usize {
        let inputs = self.loss_inputs.iter().map(|(name, input)| name.capacity() + input.held_bytes() - size_of::<LossInput>());
        size_of::<Datum>()
            + vec_bytes(&self.tokens)
            + images_bytes(&self.images)
            + map_bytes::<String, LossInput>(self.loss_inputs.len())
            + inputs.sum::<usize>()
    }
}

fn images_bytes(images: &Vec<Image>) -> usize {
    vec_bytes(images) + images.iter().map(|image| picture::held_bytes(image.file.len())).sum::<usize>()
}

impl HeldBytes for LossInput {
    fn held_bytes(&self) -> usize {
        let values = match &self.values {
            LossValues::F32(values) => vec_bytes(values),
            LossValues::I64(values) => vec_bytes(values),
        };
        size_of::<LossInput>() + vec_bytes(&self.shape) + values
    }
}

impl HeldBytes for LossSpec {
    fn held_bytes(&self) -> usize {
        let names = self.config.keys().map(String::capacity).sum::<usize>();
        size_of::<LossSpec>() + self.name.capacity() + map_bytes::<String, f64>(self.config.len()) + names
    }
}

impl HeldBytes for SaveTarget {
    fn held_bytes(&self) -> usize {
        size_of::<SaveTarget>()
            + self.root.capacity()
            + self.dir.capacity()
            + value_bytes(&self.metadata)
            + vec_bytes(&self.recipients)
            + self.recipients.iter().map(String::capacity).sum::<usize>()
    }
}

/// What a JSON value points to, with the index and the buckets of its maps.
fn value_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    const ENTRY_BYTES: usize = size_of::<Value>() + size_of::<String>() + 32;
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.capacity(),
        Value::Array(values) => vec_bytes(values) + values.iter().map(value_bytes).sum::<usize>(),
        Value::Object(entries) => entries.iter().map(|(name, value)| ENTRY_BYTES + name.capacity() + value_bytes(value)).sum(),
    }
}

impl HeldBytes for SampleRequest {
    fn held_bytes(&self) -> usize {
        let stop = match &self.stop {
            Stop::EndOfSequence => 0,
            Stop::Tokens(tokens) => vec_bytes(tokens),
            Stop::Strings(texts) => vec_bytes(texts) + texts.iter().map(String::capacity).sum::<usize>(),
        };
        size_of::<SampleRequest>() + vec_bytes(&self.prompt) + images_bytes(&self.images) + stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operation_holds_is_what_was_allocated_for_it() {
        let datum = |n: usize| {
            let input = |values| LossInput { shape: vec![n], values };
            let loss_inputs = [
                ("target_tokens".to_owned(), input(LossValues::I64(vec![0; n]))),
                ("weights".to_owned(), input(LossValues::F32(vec![0.0; n]))),
            ];
            let image = Image { at: 0, file: vec![0; 5 * n].into(), expected_tokens: None };
            Datum { tokens: vec![0; n], images: vec![image], loss_inputs: loss_inputs.into() }
        };
        for (datums, tokens) in [(1, 1), (100, 3), (3, 100_000)] {
            let make = || {
                let loss = LossSpec { name: "ppo".into(), config: [("clip".to_owned(), 0.1)].into() };
                let data = (0..datums).map(|_| datum(tokens)).collect();
                Box::new(TrainOp::ForwardBackward { data, loss, forward_only: false })
            };
            let (op, allocated) = crate::tests::allocated_bytes(make);
            let held = op.held_bytes();
            assert!(held >= allocated && held <= allocated + allocated / 2 + 512, "{held} of {allocated}");
        }
    }
}
