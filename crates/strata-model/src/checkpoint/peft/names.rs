//! What the tensors of an adapter are called, and which of several forms a file has them in.

use crate::checkpoint::Checkpoint;
use crate::lora::{ExpertModule, LoraModule, Part};

/// What paths begin with in adapters of a model that is a part of a composite (one that sees, too), and of the model by itself, which is how all are named here.
pub(super) const MODEL_PREFIXES: [&str; 2] = ["base_model.model.model.language_model.", "base_model.model.model."];
/// Paths of the unembedding: that of the Tinker tools, and PEFT's.
pub(super) const UNEMBED_PATHS: [&str; 2] = ["base_model.model.model.unembed_tokens", "base_model.model.lm_head"];

/// Path of the unembedding within a model as the Tinker tools have it.
const TINKER_UNEMBEDDING_PATH: &str = "model.unembed_tokens";

/// Path of the embedding, whose tensors have names of their own.
pub(super) const EMBEDDING_PATH: &str = "base_model.model.model.embed_tokens";

/// How a file has the pairs of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One pair for each layer; of experts with an axis for them, as the Tinker tools have it.
    OfLayer,
    /// A pair for each of [`LoraModule::parts`].
    OfParts,
    /// Of experts, a pair for each: those of PEFT where each expert is a module.
    OfExpert,
    /// Of experts, a pair for the parameter that has all of a layer, and more than one projection: PEFT's `target_parameters`.
    Fused {
        /// In how many others it lies, in the first layer that has one.
        depth: usize,
    },
}

/// Which of several names the modules of a file have.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Naming {
    /// Whether they are those of a model that is a part of a composite.
    pub(super) of_composite: bool,
    /// Whether attention is `attn` as well as `self_attn`, as the Tinker tools have it.
    attn: bool,
    /// Whether the unembedding is `model.unembed_tokens` as well as `lm_head`, as there.
    unembed_tokens: bool,
}

impl Naming {
    /// Those of the tensors of a file, and of the modules that its configuration targets by name.
    pub(super) fn of(checkpoint: &Checkpoint, targets: &[String], of_composite: bool) -> Self {
        let [unembed_tokens, _] = UNEMBED_PATHS;
        let is_attn = |name: &str| name.starts_with("attn.") || name.contains(".attn.");
        Naming {
            of_composite,
            attn: checkpoint.names().any(is_attn) || targets.iter().any(|name| is_attn(name)),
            unembed_tokens: checkpoint.names().any(|name| name.starts_with(unembed_tokens))
                || targets.iter().any(|name| name.ends_with("unembed_tokens")),
        }
    }

    /// What a module of attention is called beside its own path within a layer.
    pub(super) fn attention_of_tools(&self, path: &str) -> Option<String> {
        path.strip_prefix("self_attn.").filter(|_| self.attn).map(|rest| format!("attn.{rest}"))
    }

    /// Whether the unembedding is called what the Tinker tools call it.
    pub(super) fn has_unembed_tokens(&self) -> bool {
        self.unembed_tokens
    }

    /// Paths of the unembedding, whose own is this.
    pub(super) fn unembeddings(&self, own: &str) -> Vec<String> {
        [own].into_iter().chain(self.unembed_tokens.then_some(TINKER_UNEMBEDDING_PATH)).map(String::from).collect()
    }
}

/// The tensors of one quantity of an adapter in a file: their names begin with `prefix`.
#[derive(Clone, Copy)]
pub(super) struct AdapterTensors<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) prefix: &'a str,
    pub(super) naming: Naming,
}

impl AdapterTensors<'_> {
    /// How the file has a module; `None` if it has nothing for it. The first layer that it has anything for decides for all.
    pub(super) fn layout(&self, module: &LoraModule) -> Option<Layout> {
        module.layers.iter().find_map(|&number| {
            if module_paths(module, number).any(|path| self.holds(&path)) {
                return Some(Layout::OfLayer);
            }
            if part_paths(module, number).any(|path| self.holds(&path)) {
                return Some(Layout::OfParts);
            }
            let experts = module.experts?;
            if self.holds(&expert_path(module, &experts, number, 0)) {
                return Some(Layout::OfExpert);
            }
            self.fused_depth(module, &experts, number).map(|depth| Layout::Fused { depth })
        })
    }

    /// Path of a module that has the layout [`Layout::OfLayer`].
    pub(super) fn layer_path(&self, module: &LoraModule, number: usize) -> String {
        let path = module_paths(module, number).find(|path| self.checkpoint.contains(&a_name(self.prefix, path)));
        path.unwrap_or_else(|| module_path(module, number))
    }

    /// In how many others the pair of the fused parameter lies that has a module. PEFT names such a pair by its place among those of a layer's experts, not by its parameter: the
    /// outermost lies under the experts' own path, the next under its `base_layer`. Widths say which is which: no two of them have the same on both sides.
    fn fused_depth(&self, module: &LoraModule, experts: &ExpertModule, number: usize) -> Option<usize> {
        fused_paths(module, number).iter().position(|path| {
            let [a, b] = [a_name(self.prefix, path), b_name(self.prefix, path)].map(|name| self.checkpoint.shape(&name));
            a.and_then(<[usize]>::last) == Some(&module.in_features)
                && b.and_then(<[usize]>::first) == Some(&experts.fused.rows)
        })
    }

    /// The rank of the pairs of experts in this layout, by the A of the first of the layers that have some.
    pub(super) fn expert_rank(&self, module: &LoraModule, layout: Layout, layers: &[usize]) -> Option<usize> {
        let (experts, number) = (module.experts?, *layers.first()?);
        let (path, axis) = match layout {
            Layout::OfLayer => (module_path(module, number), 1),
            Layout::OfExpert => (expert_path(module, &experts, number, 0), 0),
            Layout::OfParts | Layout::Fused { .. } => return None,
        };
        self.checkpoint.shape(&a_name(self.prefix, &path))?.get(axis).copied()
    }

    /// Whether the file has anything for a module in a layer, in this layout.
    pub(super) fn holds_layer(&self, module: &LoraModule, layout: Layout, number: usize) -> bool {
        match (layout, module.experts) {
            (Layout::Fused { .. }, Some(experts)) => self.fused_depth(module, &experts, number).is_some(),
            _ => self.paths(module, layout, number).iter().any(|path| self.holds(path)),
        }
    }

    /// The paths of a module's pairs in a decoder layer.
    pub(super) fn paths(&self, module: &LoraModule, layout: Layout, number: usize) -> Vec<String> {
        match (layout, module.experts) {
            (Layout::OfExpert, Some(experts)) => (0..experts.count).map(|e| expert_path(module, &experts, number, e)).collect(),
            (Layout::OfParts, _) => part_paths(module, number).collect(),
            (Layout::Fused { depth }, Some(experts)) => {
                // In each layer by what other parameters carry there.
                let depth = self.fused_depth(module, &experts, number).unwrap_or(depth);
                fused_paths(module, number).into_iter().nth(depth).into_iter().collect()
            }
            _ => vec![self.layer_path(module, number)],
        }
    }

    fn holds(&self, path: &str) -> bool {
        self.checkpoint.contains(&a_name(self.prefix, path)) || self.checkpoint.contains(&b_name(self.prefix, path))
    }
}

/// Path of a module in the decoder layer of this number in a checkpoint, under which its `lora_A.weight` and `lora_B.weight` are. Those of experts are one tensor for all.
pub(super) fn module_path(module: &LoraModule, number: usize) -> String {
    let layer = layer_path(module, number);
    match (module.part, module.experts) {
        (Part::Unembed, _) => UNEMBED_PATHS[0].into(),
        (Part::Embedding, _) => EMBEDDING_PATH.into(),
        (_, Some(experts)) => format!("{layer}.{}", experts.tinker_name),
        (_, None) => layer,
    }
}

/// As [`module_path`], and what else the tensors may be called: PEFT has another name of the unembedding, and the Tinker tools have `attn` in adapters of gpt-oss.
fn module_paths(module: &LoraModule, number: usize) -> impl Iterator<Item = String> {
    let other = match module.part {
        Part::Unembed => Some(UNEMBED_PATHS[1].into()),
        Part::Attention => {
            let rest = module.path.strip_prefix("self_attn.");
            rest.map(|rest| format!("base_model.model.model.layers.{number}.attn.{rest}"))
        }
        Part::Mlp | Part::Embedding => None,
    };
    [module_path(module, number)].into_iter().chain(other)
}

/// Paths of the parts of a module, where each has a pair.
pub(super) fn part_paths(module: &LoraModule, number: usize) -> impl Iterator<Item = String> {
    module.parts.iter().map(move |part| format!("base_model.model.model.layers.{number}.{}", part.path))
}

/// Path of one expert, where each has tensors of its own.
pub(super) fn expert_path(module: &LoraModule, experts: &ExpertModule, number: usize, expert: usize) -> String {
    format!("{}.{expert}.{}", layer_path(module, number), experts.projection)
}

/// Paths of the pairs of fused parameters of a layer's experts, the outermost first.
pub(super) fn fused_paths(module: &LoraModule, number: usize) -> [String; 2] {
    let experts = layer_path(module, number);
    [experts.clone(), format!("{experts}.base_layer")]
}

fn layer_path(module: &LoraModule, number: usize) -> String {
    format!("base_model.model.model.layers.{number}.{}", module.path)
}

/// What a path within a model by itself is where the model is a part of a composite.
pub(super) fn in_composite(path: &str) -> String {
    let [composite, alone] = MODEL_PREFIXES;
    path.strip_prefix(alone).map_or_else(|| path.into(), |rest| format!("{composite}{rest}"))
}

pub(super) fn a_name(prefix: &str, path: &str) -> String {
    let name = if is_embedding(path) { "lora_embedding_A" } else { "lora_A.weight" };
    format!("{prefix}{path}.{name}")
}

pub(super) fn b_name(prefix: &str, path: &str) -> String {
    let name = if is_embedding(path) { "lora_embedding_B" } else { "lora_B.weight" };
    format!("{prefix}{path}.{name}")
}

fn is_embedding(path: &str) -> bool {
    path == EMBEDDING_PATH || path == in_composite(EMBEDDING_PATH)
}
