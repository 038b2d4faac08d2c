//! `adapter_config.json`: PEFT's `LoraConfig`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::modules::{Targets, in_model, parameter_paths};
use super::names::{AdapterTensors, Layout, Naming};
use super::pattern::Pattern;
use crate::error::cut;
use crate::lora::{LoraConfig, LoraModule, PairShape, Part, RANK_MAX};

/// Settings that do not change what a finished adapter computes: provenance, how it was initialised or trained, and sizes of features that
/// other keys turn on.
const IGNORED: [&str; 17] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];
/// Settings that are read below.
const READ: [&str; 12] = [
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "use_rslora",
];
/// Features that change what an adapter computes, whatever kind of value turns them on.
const SWITCHES: [&str; 8] = [
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];
/// Characters of a key that is not known, where it is named.
const KEY_CHARS_MAX: usize = 200;
/// Initialisations that change the base model's weights too, so that the adapter alone is not enough. PEFT tells capitals apart in some of them only.
const INITS_OF_THE_BASE: [&str; 5] = ["pissa", "olora", "corda", "lora_ga", "loftq"];

/// What an adapter says of itself.
#[derive(Debug)]
pub(super) struct AdapterSettings {
    pub(super) rank: usize,
    /// Numerator of the scale `alpha / rank`.
    pub(super) alpha: f32,
    pub(super) base_model: Option<String>,
    /// What is divided by the rank of a module, or by its root if `is_stabilised`.
    lora_alpha: f64,
    is_stabilised: bool,
    rank_pattern: Pattern,
    alpha_pattern: Pattern,
    targets: Targets,
}

impl AdapterSettings {
    /// Reads PEFT's configuration; anything in it that is not plain LoRA is refused by key and value.
    pub(super) fn from_json(json: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(json).map_err(|e| format!("is not JSON: {e}"))?;
        let map = value.as_object().ok_or("is not a JSON object")?;
        match map.get("peft_type") {
            Some(Value::String(t)) if t == "LORA" => {}
            other => return Err(format!("peft_type is {}; supported: \"LORA\"", show(other))),
        }
        refuse_other_features(map)?;
        let rank = match map.get("r").and_then(Value::as_u64) {
            Some(rank) if (1..=RANK_MAX as u64).contains(&rank) => rank as usize,
            _ => return Err(format!("r is {}, not a rank between 1 and {RANK_MAX}", show(map.get("r")))),
        };
        let lora_alpha = match map.get("lora_alpha").and_then(Value::as_f64) {
            Some(alpha) if (alpha as f32).is_finite() => alpha,
            _ => return Err(format!("lora_alpha is {}, not a number of 32 bits", show(map.get("lora_alpha")))),
        };
        // Rank-stabilised LoRA (arXiv:2312.03732) scales by alpha / √rank.
        let stabilised = match map.get("use_rslora") {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            other => return Err(format!("use_rslora is {}, not true or false", show(other))),
        };
        let alpha = if stabilised { lora_alpha * (rank as f64).sqrt() } else { lora_alpha };
        let rank_pattern =
            Pattern::from_json("rank_pattern", map.get("rank_pattern"), &format!("a rank between 1 and {RANK_MAX}"), |value| {
                value.as_u64().filter(|rank| (1..=RANK_MAX as u64).contains(rank)).map(|rank| rank as f64)
            });
        let alpha_pattern = Pattern::from_json("alpha_pattern", map.get("alpha_pattern"), "a number", |value| {
            value.as_f64().filter(|alpha| (*alpha as f32).is_finite())
        });
        let base_model = map.get("base_model_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
        Ok(AdapterSettings {
            rank,
            alpha: alpha as f32,
            base_model: base_model.map(String::from),
            lora_alpha: if stabilised { lora_alpha } else { f64::from(lora_alpha as f32) },
            is_stabilised: stabilised,
            rank_pattern: rank_pattern?,
            alpha_pattern: alpha_pattern?,
            targets: Targets::from_json(|key| map.get(key))?,
        })
    }

    /// The names of modules that carry LoRA, if it has a list of them.
    pub(super) fn target_names(&self) -> &[String] {
        self.targets.names()
    }

    /// As [`Targets::name_parameter_of`].
    pub(super) fn names_parameter_of(&self, module: &LoraModule, naming: Naming) -> bool {
        self.targets.name_parameter_of(module, naming)
    }

    /// As [`Targets::check`].
    pub(super) fn check_modules(&self, modules: &[LoraModule], carried: &[bool], naming: Naming) -> Result<(), String> {
        self.targets.check(modules, carried, naming)
    }

    /// Those layers of a module, which `tensors` has in this layout, that carry LoRA.
    pub(super) fn layers_of(
        &self,
        module: &LoraModule,
        layout: Layout,
        tensors: &AdapterTensors<'_>,
    ) -> Result<Vec<usize>, String> {
        // Lists of layers, and of modules, are not for parameters.
        let of_parameter = self.targets.layers_of_parameter(module, tensors.naming);
        if let Layout::Fused { .. } = layout {
            return Ok(if of_parameter.is_empty() { module.layers.clone() } else { of_parameter });
        }
        let listed = self.targets.layers_of(module, tensors.naming)?;
        let is_there = |number: &usize| listed.contains(number) || of_parameter.contains(number);
        match of_parameter.iter().any(|number| tensors.holds_layer(module, layout, *number)) {
            true => Ok(module.layers.iter().copied().filter(is_there).collect()),
            false => Ok(listed),
        }
    }

    /// As [`Targets::leave_out`].
    pub(super) fn leave_out(&self, module: &LoraModule, number: usize) -> String {
        self.targets.leave_out(module, number)
    }

    /// A module at place `index` that `tensors` has in this layout, with the paths by which PEFT knows it.
    pub(super) fn named_pairs<'m>(
        &self,
        (index, layers): (usize, &[usize]),
        module: &'m LoraModule,
        layout: Layout,
        tensors: &AdapterTensors<'_>,
    ) -> NamedPairs<'m> {
        let all = module;
        let module = &LoraModule { layers: layers.to_vec(), ..module.clone() };
        let of_layers = |end: &str| module.layers.iter().map(|n| format!("model.layers.{n}.{}{end}", module.path)).collect();
        let of_parameter = self.targets.layers_of_parameter(module, tensors.naming);
        let is_of_parameter = !of_parameter.is_empty();
        let names = match (layout, module.experts) {
            (Layout::Fused { .. }, _) => parameter_paths(module, false),
            (Layout::OfParts, _) => {
                let of_layer = |n: &usize| {
                    let n = *n;
                    module.parts.iter().map(move |part| format!("model.layers.{n}.{}", part.path))
                };
                module.layers.iter().flat_map(of_layer).collect()
            }
            (_, None) if is_of_parameter && !matches!(module.part, Part::Attention | Part::Mlp) => {
                parameter_paths(module, false)
            }
            (Layout::OfExpert, Some(experts)) => {
                let of_layer = |n: &usize| {
                    let n = *n;
                    (0..experts.count).map(move |e| format!("model.layers.{n}.{}.{e}.{}", module.path, experts.projection))
                };
                module.layers.iter().flat_map(of_layer).collect()
            }
            (_, Some(experts)) => of_layers(&format!(".{}", experts.tinker_name)),
            (_, None) if module.part == Part::Unembed => tensors.naming.unembeddings(module.path),
            (_, None) if module.part == Part::Embedding => vec![module.path.into()],
            (_, None) => {
                let of_layer = |number: &usize| {
                    let parameter = if of_parameter.contains(number) { ".weight" } else { "" };
                    format!("model.layers.{number}.{}{parameter}", module.path)
                };
                module.layers.iter().map(of_layer).collect()
            }
        };
        let names = in_model(names, tensors.naming.of_composite);
        let pairs = if layout == Layout::OfParts { module.parts.len() } else { 1 };
        NamedPairs { index, module: all, names, rank_of_tensors: tensors.expert_rank(module, layout, layers), pairs }
    }

    /// Rank and scale of modules that have others than those of an adapter of the shape `common`, by place.
    pub(super) fn own_shapes(&self, common: &LoraConfig, of: &[NamedPairs<'_>]) -> Result<BTreeMap<usize, PairShape>, String> {
        let names: Vec<&str> = of.iter().flat_map(|pairs| pairs.names.iter().map(String::as_str)).collect();
        let (ranks, alphas) = (self.rank_pattern.values(&names)?, self.alpha_pattern.values(&names)?);
        let mut own = BTreeMap::new();
        let mut first = 0;
        for NamedPairs { index, module, names, rank_of_tensors, pairs } in of {
            let (path, range) = (module.path, first..first + names.len());
            first = range.end;
            // The unembedding has one module, by whichever name.
            let given = |values: &[Option<f64>]| match module.part {
                Part::Unembed => vec![values.iter().copied().flatten().next()],
                Part::Attention | Part::Mlp | Part::Embedding => values.to_vec(),
            };
            let rank = self.rank_pattern.of_module(names, &given(&ranks[range.clone()]), self.rank as f64)?;
            let rank = rank.map(|rank| rank as usize);
            let alpha = self.alpha_pattern.of_module(names, &given(&alphas[range]), self.lora_alpha)?;
            let shape = PairShape {
                rank: rank.or(*rank_of_tensors).unwrap_or(self.rank) * pairs,
                scale: match (rank, alpha) {
                    (None, None) => common.scale(),
                    // Experts whose tensors have the rank of their own choice are scaled by the rank that is announced.
                    (rank, alpha) => self.scale(alpha.unwrap_or(self.lora_alpha), rank.unwrap_or(self.rank)),
                },
            };
            if !(1..=RANK_MAX).contains(&shape.rank) {
                return Err(format!("tensors of {path} have rank {}, which is not between 1 and {RANK_MAX}", shape.rank));
            }
            if shape != common.common_shape(module) {
                own.insert(*index, shape);
            }
        }
        Ok(own)
    }

    fn scale(&self, alpha: f64, rank: usize) -> f32 {
        let rank = rank as f64;
        (alpha / if self.is_stabilised { rank.sqrt() } else { rank }) as f32
    }
}

/// A module that an adapter has pairs of, with all paths that `rank_pattern` and `alpha_pattern` may match.
pub(super) struct NamedPairs<'a> {
    index: usize,
    module: &'a LoraModule,
    names: Vec<String>,
    /// Where it is a matter of the tensors what rank they have.
    rank_of_tensors: Option<usize>,
    /// Pairs of the file that are one of ours.
    pairs: usize,
}

/// Refuses every feature that is on and unknown here: it would change the numbers.
fn refuse_other_features(map: &Map<String, Value>) -> Result<(), String> {
    match map.get("bias") {
        None | Some(Value::Null) => {}
        Some(Value::String(bias)) if bias == "none" => {}
        other => return Err(format!("bias is {}; supported: \"none\"", show(other))),
    }
    if let Some(Value::String(init)) = map.get("init_lora_weights")
        && INITS_OF_THE_BASE.iter().any(|name| init.to_lowercase().starts_with(name))
    {
        return Err(format!(
            "init_lora_weights is {init:?}, which changes the base model; save the adapter converted to plain LoRA"
        ));
    }
    for (key, value) in map {
        let is_on = match value {
            Value::Number(_) | Value::String(_) if SWITCHES.contains(&key.as_str()) => true,
            Value::Bool(on) => *on,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            // PEFT's features are switched by flags, lists and objects; numbers and strings are their settings.
            Value::Null | Value::Number(_) | Value::String(_) => false,
        };
        if is_on && !IGNORED.contains(&key.as_str()) && !READ.contains(&key.as_str()) {
            let key = cut(key.clone(), KEY_CHARS_MAX);
            return Err(format!("{key} is {}, which is not supported; supported: plain LoRA", show(Some(value))));
        }
    }
    Ok(())
}

pub(super) fn show(value: Option<&Value>) -> String {
    const CHARS_MAX: usize = 200;
    value.map_or_else(|| "missing".into(), |value| cut(value.to_string(), CHARS_MAX))
}
