//! Which modules and parameters of a model an adapter's configuration names.

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::config::show;
use super::names::Naming;
use super::pattern::PATTERN_MEMORY_MAX;
use crate::lora::{LoraModule, Part};

/// Modules of a model as PEFT's `target_modules` and `exclude_modules` name them.
#[derive(Debug)]
pub(super) enum Modules {
    /// `"all-linear"`: those that there are tensors for.
    AllLinear,
    /// Paths, or ends of paths from a dot on.
    Names(Vec<String>),
    /// A regular expression that matches whole paths.
    Pattern { text: String, regex: Box<Regex> },
}

/// What an adapter says of where it has pairs.
#[derive(Debug)]
pub(super) struct Targets {
    /// Modules that carry LoRA; `None` if it does not say.
    modules: Option<Modules>,
    /// Those of them that do not.
    excluded: Option<Modules>,
    /// Parameters, or ends of their paths from a dot on, that carry LoRA, beside the modules: those of experts, or the weight of a module.
    parameters: Vec<String>,
    /// Layers in which the modules carry LoRA; `None`: all.
    layers: Option<Vec<u64>>,
}

impl Targets {
    /// Of the keys of a configuration.
    pub(super) fn from_json<'v>(get: impl Fn(&str) -> Option<&'v Value>) -> Result<Self, String> {
        let [modules, excluded] = ["target_modules", "exclude_modules"].map(|key| Modules::from_json(key, get(key)));
        let parameters = match get("target_parameters") {
            None | Some(Value::Null) => Vec::new(),
            value => names(value).ok_or_else(|| format!("target_parameters is {}, not a list of names", show(value)))?,
        };
        let (modules, layers) = (modules?, layers(get("layers_to_transform"))?);
        if layers.is_some() {
            if let Some(Modules::Pattern { .. } | Modules::AllLinear) = &modules {
                return Err(format!(
                    "layers_to_transform is {}, which PEFT has only with a list of target_modules, not with {}",
                    show(get("layers_to_transform")),
                    show(get("target_modules"))
                ));
            }
            let of_decoder = |value: &Value| *value == "layers" || *value == serde_json::json!(["layers"]);
            let is_empty = |value: &Value| value.is_null() || *value == "" || *value == serde_json::json!([]);
            if let Some(other) = get("layers_pattern").filter(|value| !of_decoder(value) && !is_empty(value)) {
                return Err(format!("layers_pattern is {}; supported: \"layers\"", show(Some(other))));
            }
        }
        Ok(Targets { modules, excluded: excluded?, parameters, layers })
    }

    /// `target_modules`, if it is a list.
    pub(super) fn names(&self) -> &[String] {
        match &self.modules {
            Some(Modules::Names(names)) => names,
            _ => &[],
        }
    }

    /// Whether a layer of a module is one of those that `layers_to_transform` lists.
    fn lists(&self, module: &LoraModule, number: usize) -> bool {
        match module.part {
            Part::Unembed | Part::Embedding => true,
            Part::Attention | Part::Mlp => self.layers.as_ref().is_none_or(|listed| listed.contains(&(number as u64))),
        }
    }

    /// Those layers of a module that carry LoRA by the names of modules, or may where these leave it to the tensors.
    pub(super) fn layers_of(&self, module: &LoraModule, naming: Naming) -> Result<Vec<usize>, String> {
        let mut layers = Vec::new();
        for &number in &module.layers {
            if self.name_layer(module, number, naming)? {
                layers.push(number);
            }
        }
        Ok(layers)
    }

    fn name_layer(&self, module: &LoraModule, number: usize, naming: Naming) -> Result<bool, String> {
        let is_listed = self.lists(module, number);
        let targets = match &self.modules {
            None => return Ok(is_listed),
            // What of PEFT's names is at either end of a model is no linear layer in its sense.
            Some(Modules::AllLinear) if module.part == Part::Embedding => return Ok(false),
            Some(Modules::AllLinear) if module.part == Part::Unembed && !naming.has_unembed_tokens() => return Ok(false),
            Some(Modules::AllLinear) if self.excluded.is_none() => return Ok(is_listed),
            Some(targets) => targets,
        };
        let is_of_layers = matches!(module.part, Part::Attention | Part::Mlp);
        // One module of the original model by all of its names, or several, of which each has names of its own.
        let is_one = module.experts.is_none() && module.parts.is_empty();
        let mut targeted = false;
        for path in paths(&LoraModule { layers: vec![number], ..module.clone() }, naming) {
            if self.excluded.as_ref().map_or(Ok(false), |m| m.names("exclude_modules", &path))? {
                if is_one {
                    return Ok(false);
                }
                continue;
            }
            // With a list of layers PEFT takes what is in none of them by its whole path only, and by that what is in any.
            targeted |= match (&self.layers, targets) {
                (Some(_), Modules::Names(names)) if names.contains(&path) => true,
                (Some(_), Modules::Names(names)) if !is_of_layers => {
                    module.part == Part::Unembed && names.iter().any(|name| path.strip_prefix("model.") == Some(name))
                }
                _ => is_listed && targets.names("target_modules", &path)?,
            };
        }
        Ok(targeted)
    }

    /// By which setting a module carries nothing in a layer.
    pub(super) fn leave_out(&self, module: &LoraModule, number: usize) -> String {
        match &self.excluded {
            _ if !self.lists(module, number) => format!("layers_to_transform is without layer {number}"),
            None => format!("target_modules does not name {} of layer {number}", module.path),
            Some(_) => format!("target_modules and exclude_modules leave out {} of layer {number}", module.path),
        }
    }

    /// Refuses settings that say something else than the tensors: modules that the model does not have, or that are named and have no
    /// tensors, or have tensors and are not named. `carried[i]`: whether there are tensors for `modules[i]`; `naming`: which names modules have.
    pub(super) fn check(&self, modules: &[LoraModule], carried: &[bool], naming: Naming) -> Result<(), String> {
        self.check_parameters_known(modules, naming)?;
        // Of a composite, names may be those of parts that are excluded.
        if let Some(targets) = self.modules.as_ref().filter(|_| !naming.of_composite || self.excluded.is_none()) {
            targets.check_known("target_modules", modules, naming, &self.parameters)?;
        }
        let others: Vec<&LoraModule> =
            modules.iter().zip(carried).filter_map(|(m, carried)| (*carried && m.experts.is_none()).then_some(m)).collect();
        // As modules, or the Tinker tools' tensors: what is named by its parameter is no sign that its like are named as modules.
        let carries_experts = modules
            .iter()
            .zip(carried)
            .any(|(module, carried)| *carried && module.experts.is_some() && self.parameter_of(module, naming).is_none());
        for (module, &carried) in modules.iter().zip(carried) {
            let path = module.path;
            if let Some(name) = self.parameter_of(module, naming) {
                if !carried {
                    return Err(format!("target_parameters names {name}, but the adapter holds nothing for {path} there"));
                }
                continue;
            }
            let Some(targets) = &self.modules else {
                if carried && !self.parameters.is_empty() {
                    return Err(format!("the adapter holds tensors for {path}, which target_parameters does not name"));
                }
                continue;
            };
            let targeted = !self.layers_of(module, naming)?.is_empty();
            match (targets, targeted, carried) {
                (Modules::Names(_) | Modules::Pattern { .. }, true, false) => {
                    // Experts are no modules in transformers 5: a name such as `gate_proj` is there one of the other MLPs alone, or of nothing.
                    if module.experts.is_some()
                        && (targets.name_also(module, &others, naming)?
                            || !carries_experts && targets.name_in_passing(module, naming))
                    {
                        continue;
                    }
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

    /// Whether a module is named by its parameter.
    pub(super) fn name_parameter_of(&self, module: &LoraModule, naming: Naming) -> bool {
        self.parameter_of(module, naming).is_some()
    }

    /// Those layers of a module that are named by its parameter.
    pub(super) fn layers_of_parameter(&self, module: &LoraModule, naming: Naming) -> Vec<usize> {
        let of_layer = |number: usize| LoraModule { layers: vec![number], ..module.clone() };
        let is_named = |&number: &usize| self.name_parameter_of(&of_layer(number), naming);
        module.layers.iter().copied().filter(is_named).collect()
    }

    fn parameter_of(&self, module: &LoraModule, naming: Naming) -> Option<&String> {
        let paths = parameter_paths(module, naming.of_composite);
        self.parameters.iter().find(|name| paths.iter().any(|path| ends_with(path, name)))
    }

    fn check_parameters_known(&self, modules: &[LoraModule], naming: Naming) -> Result<(), String> {
        let all: Vec<String> = modules.iter().flat_map(|module| parameter_paths(module, naming.of_composite)).collect();
        let Some(name) = self.parameters.iter().find(|name| !all.iter().any(|path| ends_with(path, name))) else {
            return Ok(());
        };
        let mut known: Vec<String> = modules.iter().map(parameter_name).collect();
        known.dedup();
        let name = show(Some(&name.as_str().into()));
        Err(format!("target_parameters names {name}, which carries no LoRA here; those that may are {}", known.join(", ")))
    }
}

/// The layers that are listed: one, or several; no list or an empty one means all.
fn layers(value: Option<&Value>) -> Result<Option<Vec<u64>>, String> {
    let listed = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) if list.is_empty() => return Ok(None),
        Some(Value::Array(list)) => list.iter().map(Value::as_u64).collect(),
        Some(one) => one.as_u64().map(|layer| vec![layer]),
    };
    listed
        .map(Some)
        .ok_or_else(|| format!("layers_to_transform is {}, not the number of a layer or a list of them", show(value)))
}

/// A module's parameter in transformers, within a decoder layer, or within the model for the unembedding.
pub(super) fn parameter_name(module: &LoraModule) -> String {
    match module.experts {
        Some(experts) => format!("{}.{}", module.path, experts.fused.parameter),
        None => format!("{}.weight", module.path),
    }
}

/// As [`parameter_name`], within the model, one for each layer; where the model is a part of a composite, in that.
pub(super) fn parameter_paths(module: &LoraModule, of_composite: bool) -> Vec<String> {
    let name = parameter_name(module);
    let alone = match module.part {
        Part::Unembed | Part::Embedding => vec![name],
        Part::Attention | Part::Mlp => module.layers.iter().map(|number| format!("model.layers.{number}.{name}")).collect(),
    };
    in_model(alone, of_composite)
}

/// Paths within a model by itself as they are in it, or in the composite that it is a part of.
pub(super) fn in_model(mut paths: Vec<String>, of_composite: bool) -> Vec<String> {
    for path in paths.iter_mut().filter(|_| of_composite) {
        if let Some(rest) = path.strip_prefix("model.") {
            *path = format!("model.language_model.{rest}");
        }
    }
    paths
}

/// The names of a list.
fn names(value: Option<&Value>) -> Option<Vec<String>> {
    let list = value?.as_array().filter(|list| list.len() <= Modules::ENTRIES_MAX)?;
    list.iter().map(|name| name.as_str().map(String::from)).collect()
}

/// The paths by which a module goes in the original model, one for each layer, and as the Tinker tools name it; where the model is a part of a composite, in that.
fn paths(module: &LoraModule, naming: Naming) -> Vec<String> {
    in_model(paths_alone(module, naming), naming.of_composite)
}

fn paths_alone(module: &LoraModule, naming: Naming) -> Vec<String> {
    match module.part {
        Part::Unembed => naming.unembeddings(module.path),
        Part::Embedding => vec![module.path.into()],
        Part::Attention | Part::Mlp => {
            let of_layer = |number: &usize| match module.experts {
                None => {
                    let of_tools = naming.attention_of_tools(module.path).map(|path| format!("model.layers.{number}.{path}"));
                    let of_parts = module.parts.iter().map(|part| format!("model.layers.{number}.{}", part.path));
                    let own = [format!("model.layers.{number}.{}", module.path)];
                    own.into_iter().chain(of_tools).chain(of_parts).collect::<Vec<_>>()
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
                let regex = RegexBuilder::new(&format!("^(?:{text})$"))
                    .backtrack_limit(10_000)
                    .delegate_size_limit(PATTERN_MEMORY_MAX)
                    .build();
                let regex = regex.map_err(|e| format!("{key} is {}, which is no regular expression: {e}", show(value)))?;
                Ok(Some(Modules::Pattern { text: text.clone(), regex: Box::new(regex) }))
            }
            Some(_) => Ok(Some(Modules::Names(names(value).ok_or_else(refused)?))),
        }
    }

    /// Refuses names that no module of the model answers to, but for those of parameters: PEFT looks for experts by the names that their modules had once, and what it finds so it leaves among
    /// modules too, where it is the name of none.
    fn check_known(&self, key: &str, modules: &[LoraModule], naming: Naming, parameters: &[String]) -> Result<(), String> {
        let all: Vec<String> = modules.iter().flat_map(|module| paths(module, naming)).collect();
        let unknown = match self {
            Modules::AllLinear => None,
            Modules::Names(names) => {
                let is_known = |name: &String| parameters.contains(name) || all.iter().any(|path| ends_with(path, name));
                names.iter().find(|name| !is_known(name))
            }
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
            "{key} names {}, which carries no LoRA here; modules that may are {}",
            show(Some(&name.as_str().into())),
            known.join(", ")
        ))
    }

    /// Whether experts are named by what others may be called, too: the projection, or a pattern.
    fn name_in_passing(&self, experts: &LoraModule, naming: Naming) -> bool {
        let projection = experts.experts.map_or("", |experts| experts.projection);
        let own = paths(experts, naming);
        match self {
            Modules::Names(names) => {
                let mut of_experts = names.iter().filter(|name| own.iter().any(|path| ends_with(path, name)));
                of_experts.all(|name| name == projection)
            }
            Modules::AllLinear | Modules::Pattern { .. } => true,
        }
    }

    /// Whether whatever names these experts names one of `others` too, of the same projection.
    fn name_also(&self, experts: &LoraModule, others: &[&LoraModule], naming: Naming) -> Result<bool, String> {
        let projection = experts.experts.map(|experts| experts.projection);
        let same = others.iter().filter(|other| other.path.rsplit('.').next() == projection);
        let (own, others) = (paths(experts, naming), same.flat_map(|other| paths(other, naming)).collect::<Vec<_>>());
        let any = |paths: &[String], name: &str| paths.iter().any(|path| ends_with(path, name));
        match self {
            Modules::AllLinear => Ok(true),
            Modules::Names(names) => Ok(names.iter().filter(|name| any(&own, name)).all(|name| any(&others, name))),
            Modules::Pattern { .. } => {
                others.iter().try_fold(false, |named, path| Ok(named || self.names("target_modules", path)?))
            }
        }
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
