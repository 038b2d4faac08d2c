//! `adapter_config.json`: PEFT's `LoraConfig`.

use fancy_regex::{Regex, RegexBuilder};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::lora::{LoraConfig, LoraModule, Part, RANK_MAX};

/// Settings that do not change what a finished adapter computes: provenance, how it was initialised or trained, and sizes of features that
/// other keys turn on.
const IGNORED: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
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
const READ: [&str; 7] = ["bias", "exclude_modules", "lora_alpha", "peft_type", "r", "target_modules", "use_rslora"];
/// Features that change what an adapter computes, whatever kind of value turns them on.
const SWITCHES: [&str; 12] = [
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];
/// Initialisations that change the base model's weights too, so that the adapter alone is not enough.
const INITS_OF_THE_BASE: [&str; 4] = ["pissa", "olora", "corda", "lora_ga"];

/// What an adapter says of itself.
#[derive(Debug)]
pub(super) struct AdapterSettings {
    pub(super) rank: usize,
    /// Numerator of the scale `alpha / rank`.
    pub(super) alpha: f32,
    pub(super) base_model: Option<String>,
    /// Modules that carry LoRA; `None` if it does not say.
    target_modules: Option<Modules>,
    /// Those of them that do not.
    exclude_modules: Option<Modules>,
}

/// Modules of a model as PEFT's `target_modules` and `exclude_modules` name them.
#[derive(Debug)]
enum Modules {
    /// `"all-linear"`: those that there are tensors for.
    AllLinear,
    /// Paths, or ends of paths from a dot on.
    Names(Vec<String>),
    /// A regular expression that matches whole paths.
    Pattern { text: String, regex: Box<Regex> },
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
        let alpha = match map.get("lora_alpha").and_then(Value::as_f64) {
            Some(alpha) if (alpha as f32).is_finite() => alpha,
            _ => return Err(format!("lora_alpha is {}, not a number", show(map.get("lora_alpha")))),
        };
        // Rank-stabilised LoRA (arXiv:2312.03732) scales by alpha / √rank.
        let stabilised = match map.get("use_rslora") {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            other => return Err(format!("use_rslora is {}, not true or false", show(other))),
        };
        let alpha = if stabilised { alpha * (rank as f64).sqrt() } else { alpha };
        let [target_modules, exclude_modules] =
            ["target_modules", "exclude_modules"].map(|key| Modules::from_json(key, map.get(key)));
        let base_model = map.get("base_model_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
        Ok(AdapterSettings {
            rank,
            alpha: alpha as f32,
            base_model: base_model.map(String::from),
            target_modules: target_modules?,
            exclude_modules: exclude_modules?,
        })
    }

    /// Refuses settings that say something else than the tensors: modules that the model does not have, or that are named and have no
    /// tensors, or have tensors and are not named. `carried[i]`: whether there are tensors for `modules[i]`.
    pub(super) fn check_modules(&self, modules: &[LoraModule], carried: &[bool]) -> Result<(), String> {
        let Some(targets) = &self.target_modules else { return Ok(()) };
        targets.check_known("target_modules", modules)?;
        if matches!(targets, Modules::AllLinear) && self.exclude_modules.is_none() {
            return Ok(());
        }
        for (module, &carried) in modules.iter().zip(carried) {
            let (mut targeted, mut excluded) = (0, 0);
            for path in paths(module) {
                let is_excluded = self.exclude_modules.as_ref().map_or(Ok(false), |m| m.names("exclude_modules", &path))?;
                excluded += usize::from(is_excluded);
                targeted += usize::from(!is_excluded && targets.names("target_modules", &path)?);
            }
            // The paths of the unembedding are all its own.
            let targeted = targeted > 0 && !(module.part == Part::Unembed && excluded > 0);
            let path = module.path;
            match (targets, targeted, carried) {
                (Modules::Names(_) | Modules::Pattern { .. }, true, false) => {
                    return Err(format!("target_modules names {path}, but the adapter holds nothing for it"));
                }
                (_, false, true) => {
                    return Err(format!("the adapter holds tensors for {path}, which target_modules does not name"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The paths by which a module goes in the original model, one for each layer, and as the Tinker tools name it.
fn paths(module: &LoraModule) -> Vec<String> {
    match module.part {
        Part::Unembed => vec![module.path.into(), "model.unembed_tokens".into()],
        Part::Embedding => vec![module.path.into()],
        Part::Attention | Part::Mlp => {
            let of_layer = |number: &usize| match module.experts {
                None => {
                    let of_tools =
                        module.path.strip_prefix("self_attn.").map(|rest| format!("model.layers.{number}.attn.{rest}"));
                    [format!("model.layers.{number}.{}", module.path)].into_iter().chain(of_tools).collect::<Vec<_>>()
                }
                Some(experts) => {
                    let one = |expert| format!("model.layers.{number}.{}.{expert}.{}", module.path, experts.projection);
                    let all = format!("model.layers.{number}.{}.{}", module.path, experts.tinker_name);
                    (0..experts.count).map(one).chain([all]).collect()
                }
            };
            module.layers.iter().flat_map(of_layer).collect()
        }
    }
}

impl Modules {
    /// The most names of a list, and bytes of a pattern.
    const ENTRIES_MAX: usize = 4096;

    fn from_json(key: &str, value: Option<&Value>) -> Result<Option<Self>, String> {
        let refused = || format!("{key} is {}, not a list of names, a pattern or \"all-linear\"", show(value));
        match value {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text == "all-linear" && key == "target_modules" => Ok(Some(Modules::AllLinear)),
            Some(Value::String(text)) if text.len() <= Self::ENTRIES_MAX => {
                let regex = RegexBuilder::new(&format!("^(?:{text})$")).backtrack_limit(10_000).build();
                let regex = regex.map_err(|e| format!("{key} is {}, which is no regular expression: {e}", show(value)))?;
                Ok(Some(Modules::Pattern { text: text.clone(), regex: Box::new(regex) }))
            }
            Some(Value::Array(names)) if names.len() <= Self::ENTRIES_MAX => {
                let names: Option<Vec<String>> = names.iter().map(|name| name.as_str().map(String::from)).collect();
                Ok(Some(Modules::Names(names.ok_or_else(refused)?)))
            }
            Some(_) => Err(refused()),
        }
    }

    /// Refuses names that no module of the model answers to.
    fn check_known(&self, key: &str, modules: &[LoraModule]) -> Result<(), String> {
        let all: Vec<String> = modules.iter().flat_map(paths).collect();
        let unknown = match self {
            Modules::AllLinear => None,
            Modules::Names(names) => names.iter().find(|name| !all.iter().any(|path| ends_with(path, name))),
            Modules::Pattern { text, .. } => {
                let mut any = false;
                for path in &all {
                    any |= self.names(key, path)?;
                }
                (!any).then_some(text)
            }
        };
        let Some(name) = unknown else { return Ok(()) };
        let known: Vec<&str> = modules.iter().map(|m| m.path).collect();
        Err(format!(
            "{key} names {}, which the model does not have; it has {}",
            show(Some(&name.as_str().into())),
            known.join(", ")
        ))
    }

    /// Whether the module at this path is among them.
    fn names(&self, key: &str, path: &str) -> Result<bool, String> {
        match self {
            Modules::AllLinear => Ok(true),
            Modules::Names(names) => Ok(names.iter().any(|name| ends_with(path, name))),
            Modules::Pattern { text, regex } => {
                regex.is_match(path).map_err(|e| format!("{key} is {}: {e}", show(Some(&text.as_str().into()))))
            }
        }
    }
}

/// Whether a name is the end of a path, from a dot on.
fn ends_with(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Refuses every feature that is on and unknown here: it would change the numbers.
fn refuse_other_features(map: &Map<String, Value>) -> Result<(), String> {
    match map.get("bias") {
        None | Some(Value::Null) => {}
        Some(Value::String(bias)) if bias == "none" => {}
        other => return Err(format!("bias is {}; supported: \"none\"", show(other))),
    }
    if let Some(Value::String(init)) = map.get("init_lora_weights")
        && INITS_OF_THE_BASE.iter().any(|name| init.starts_with(name))
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
            return Err(format!("{key} is {}, which is not supported; supported: plain LoRA", show(Some(value))));
        }
    }
    match map.get("layers_to_transform") {
        None | Some(Value::Null) => Ok(()),
        other => Err(format!("layers_to_transform is {}; supported: all layers", show(other))),
    }
}

fn show(value: Option<&Value>) -> String {
    const CHARS_MAX: usize = 200;
    let Some(value) = value else { return "missing".into() };
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The configuration as PEFT writes it.
pub(super) fn to_json(modules: &[LoraModule], config: &LoraConfig, base_model: &str) -> String {
    let carried = modules.iter().enumerate().filter(|(index, module)| config.carries(*index, module));
    let mut target_modules: Vec<_> = carried
        .map(|(_, module)| match module.part {
            Part::Unembed => "lm_head",
            Part::Attention | Part::Mlp | Part::Embedding => match module.experts {
                Some(experts) => experts.tinker_name,
                None => module.path.rsplit('.').next().unwrap_or(module.path),
            },
        })
        .collect();
    target_modules.sort_unstable();
    let file = AdapterFile {
        alpha_pattern: Map::new(),
        auto_mapping: None,
        base_model_name_or_path: base_model,
        bias: "none",
        fan_in_fan_out: false,
        inference_mode: true,
        init_lora_weights: true,
        layers_pattern: None,
        layers_to_transform: None,
        lora_alpha: number(config.alpha),
        lora_dropout: 0.0,
        modules_to_save: None,
        peft_type: "LORA",
        r: config.rank,
        rank_pattern: Map::new(),
        revision: None,
        target_modules,
        task_type: "CAUSAL_LM",
        use_dora: false,
        use_rslora: false,
    };
    serde_json::to_string_pretty(&file).expect("plain numbers, strings and flags are JSON") + "\n"
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
    target_modules: Vec<&'a str>,
    task_type: &'a str,
    use_dora: bool,
    use_rslora: bool,
}

/// A whole number without a decimal point, as PEFT declares `lora_alpha`; otherwise the value itself, which reads back exactly.
fn number(value: f32) -> Value {
    let whole = value as i64;
    if whole as f32 == value { whole.into() } else { f64::from(value).into() }
}
