//! Writing `adapter_config.json`.

use serde::Serialize;
use serde_json::{Map, Value};

use super::AdapterFormat;
use super::modules::parameter_name;
use super::write::fused_groups;
use crate::lora::{LoraConfig, LoraModule, PairShape, Part};

/// Last part of the unembedding's path as the Tinker tools have it.
const TINKER_UNEMBEDDING: &str = "unembed_tokens";
/// In the place of a task where stock PEFT would pass over a part of the adapter in silence: it refuses to load what has a task that it does not know, and says this of it. The Tinker tools read none.
const NO_TASK_OF_PEFT: &str =
    "none that PEFT knows: this adapter is named as the Tinker tools name it; `strata export --format peft` writes it for PEFT";

/// The configuration as PEFT writes it.
///
/// # Errors
/// If there is no saying it in this form.
pub(super) fn to_json(
    modules: &[LoraModule],
    config: &LoraConfig,
    base_model: &str,
    format: AdapterFormat,
) -> Result<String, String> {
    let mut named = Named { config, modules: Vec::new(), parameters: Vec::new(), ranks: Map::new(), alphas: Map::new() };
    let carried: Vec<(usize, &LoraModule)> = modules.iter().enumerate().filter(|(i, m)| config.carries(*i, m)).collect();
    // PEFT takes `gate_proj`, `up_proj` and `down_proj` among the modules of a model with experts for theirs, whatever comes before.
    let has_experts = modules.iter().any(|module| module.experts.is_some());
    let is_peft = format.is_peft();
    for &(index, module) in &carried {
        let shape = config.shape_of(index, module);
        match (is_peft, module.experts) {
            (false, Some(experts)) => {
                named.modules.push(experts.tinker_name.into());
                // Their rank is that of the tensors.
                if shape.scale != config.scale() {
                    named.push_own(&format!("{}.{}", module.path, experts.tinker_name), shape);
                }
            }
            // Below, with what else the parameter has.
            (true, Some(_)) => {}
            (true, None) if has_experts && module.part == Part::Mlp => {
                named.parameters.push(parameter_name(module));
                named.push_shape(&parameter_name(module), shape);
            }
            (false, None) if module.part == Part::Unembed => {
                named.modules.push(TINKER_UNEMBEDDING.into());
                named.push_shape(TINKER_UNEMBEDDING, shape);
            }
            (_, None) => {
                named.modules.push(target_name(module, index, modules, config));
                named.push_shape(module.path, shape);
            }
        }
    }
    if is_peft {
        for (parameter, first) in fused_groups(carried.iter().map(|(_, module)| *module)) {
            let of_group = |m: &LoraModule| m.experts.is_some_and(|experts| experts.fused.parameter == parameter);
            let shapes = carried.iter().filter(|(_, m)| of_group(m)).map(|(index, module)| config.shape_of(*index, module));
            let shapes: Vec<PairShape> = shapes.collect();
            let shape = PairShape { rank: shapes.iter().map(|shape| shape.rank).sum(), scale: shapes[0].scale };
            if let Some(other) = shapes.iter().find(|other| other.scale != shape.scale) {
                let path = parameter_name(first);
                let (one, other) = (shape.scale, other.scale);
                return Err(format!("PEFT has one scale for all of {path}, and this adapter has {one} and {other}"));
            }
            named.parameters.push(parameter_name(first));
            named.push_shape(&parameter_name(first), shape);
        }
    }
    named.modules.sort_unstable();
    named.parameters.sort_unstable();
    if is_peft {
        named.modules.dedup();
    }
    let is_loaded_by_peft = is_peft
        || format == AdapterFormat::Tinker
            && !carried.iter().any(|(_, module)| module.experts.is_some() || module.part == Part::Unembed);
    let file = AdapterFile {
        alpha_pattern: named.alphas,
        auto_mapping: None,
        base_model_name_or_path: base_model,
        bias: "none",
        fan_in_fan_out: false,
        inference_mode: true,
        init_lora_weights: true,
        layers_pattern: None,
        layers_to_transform: None,
        lora_alpha: number(config.alpha.into()),
        lora_dropout: 0.0,
        modules_to_save: None,
        peft_type: "LORA",
        r: config.rank,
        rank_pattern: named.ranks,
        revision: None,
        target_modules: named.modules,
        target_parameters: (!named.parameters.is_empty()).then_some(named.parameters),
        task_type: if is_loaded_by_peft { "CAUSAL_LM" } else { NO_TASK_OF_PEFT },
        use_dora: false,
        use_rslora: false,
    };
    Ok(serde_json::to_string_pretty(&file).expect("plain numbers, strings and flags are JSON") + "\n")
}

/// The last part of a module's path; all of it where a module that carries nothing has the same last part.
fn target_name(module: &LoraModule, index: usize, modules: &[LoraModule], config: &LoraConfig) -> String {
    let last = |m: &LoraModule| m.path.rsplit('.').next().unwrap_or(m.path);
    let is_another =
        |(i, m): (usize, &LoraModule)| i != index && m.experts.is_none() && last(m) == last(module) && !config.carries(i, m);
    if modules.iter().enumerate().any(is_another) { module.path.into() } else { last(module).into() }
}

/// What a configuration names.
struct Named<'a> {
    config: &'a LoraConfig,
    modules: Vec<String>,
    parameters: Vec<String>,
    ranks: Map<String, Value>,
    alphas: Map<String, Value>,
}

impl Named<'_> {
    /// Says what rank and scale the pairs of a path have, as far as that is not what `r` and `lora_alpha` make of them.
    fn push_shape(&mut self, path: &str, shape: PairShape) {
        let key = path.replace('.', r"\.");
        if shape.rank != self.config.rank {
            self.ranks.insert(key.clone(), shape.rank.into());
        }
        if (f64::from(self.config.alpha) / shape.rank as f64) as f32 != shape.scale {
            self.alphas.insert(key, alpha_of(shape));
        }
    }

    /// As [`Named::push_shape`], whatever `r` and `lora_alpha` make of them.
    fn push_own(&mut self, path: &str, shape: PairShape) {
        let key = path.replace('.', r"\.");
        self.ranks.insert(key.clone(), shape.rank.into());
        self.alphas.insert(key, alpha_of(shape));
    }
}

/// What has to be divided by the rank to have the scale, exactly: 24 bits times 11 are fewer than 53.
fn alpha_of(shape: PairShape) -> Value {
    number(f64::from(shape.scale) * shape.rank as f64)
}

#[derive(Serialize)]
struct AdapterFile<'a> {
    alpha_pattern: Map<String, Value>,
    auto_mapping: Option<()>,
    base_model_name_or_path: &'a str,
    bias: &'a str,
    fan_in_fan_out: bool,
    inference_mode: bool,
    init_lora_weights: bool,
    layers_pattern: Option<()>,
    layers_to_transform: Option<()>,
    lora_alpha: Value,
    lora_dropout: f32,
    modules_to_save: Option<()>,
    peft_type: &'a str,
    r: usize,
    rank_pattern: Map<String, Value>,
    revision: Option<()>,
    target_modules: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_parameters: Option<Vec<String>>,
    task_type: &'a str,
    use_dora: bool,
    use_rslora: bool,
}

/// A whole number without a decimal point, as PEFT declares `lora_alpha`; otherwise the value itself, which reads back exactly.
fn number(value: f64) -> Value {
    let whole = value as i64;
    if whole as f64 == value { whole.into() } else { value.into() }
}
