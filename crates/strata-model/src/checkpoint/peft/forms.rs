//! What there is no saying in one form or the other.

use super::AdapterFormat;
use crate::lora::{LoraConfig, LoraModule, Part};
use crate::{Error, Family, ModelConfig, Result};

/// Refuses an adapter that those who read this form would take for another.
///
/// # Errors
/// Says what of it they do not read.
pub fn check_form(base: &ModelConfig, modules: &[LoraModule], adapter: &LoraConfig, format: AdapterFormat) -> Result<()> {
    if format.is_peft() { check_for_peft(base, modules, adapter) } else { check_for_tinker(modules, adapter) }
        .map_err(Error::Lora)
}

fn check_for_peft(base: &ModelConfig, modules: &[LoraModule], adapter: &LoraConfig) -> Result<(), String> {
    let of_experts = matches!(base.family, Family::Qwen3Moe(_) | Family::DeepseekV3(_) | Family::Glm4MoeLite(_));
    if of_experts && adapter.mlp && modules.iter().all(|module| module.experts.is_none()) {
        return Err(format!("PEFT looks for MLPs of {} among its experts, and this base model has none", base.model_type()));
    }
    Ok(())
}

/// The Tinker tools scale every product by `lora_alpha / r`.
fn check_for_tinker(modules: &[LoraModule], adapter: &LoraConfig) -> Result<(), String> {
    if let Some(module) = modules.iter().find(|module| module.part == Part::Embedding)
        && adapter.embedding
    {
        return Err(format!(
            "the Tinker tools have no pair of the embedding, and pass over that of {}; merge it instead",
            module.path
        ));
    }
    let common = adapter.scale();
    match adapter.own.iter().find(|(_, shape)| shape.scale != common) {
        None => Ok(()),
        Some((&index, shape)) => Err(format!(
            "the Tinker tools scale all modules by lora_alpha / r, {common} here, and {} of this adapter has {}",
            modules[index].path, shape.scale
        )),
    }
}
