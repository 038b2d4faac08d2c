//! The base models of a server: each with an engine of its own.

use std::sync::Arc;

use crate::app::ModelInfo;
use crate::names::shown;
use crate::submit::Submit;

/// A base model and the engine over it.
#[derive(Clone)]
pub struct Base {
    /// As clients see it.
    pub info: ModelInfo,
    /// What computes.
    pub engine: Arc<dyn Submit>,
}

/// Which of the base models something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BaseId(usize);

/// The base models of a server, at least one. The first is the one that stands for all where it does not matter.
pub struct Bases(Vec<Base>);

impl Bases {
    /// # Panics
    /// If there is none.
    pub fn new(bases: Vec<Base>) -> Self {
        assert!(!bases.is_empty(), "a server has a base model");
        Bases(bases)
    }

    /// The base model of this name. Anything from the first `:` of `asked` on names a variant, such as a context length, and does not count.
    ///
    /// # Errors
    /// If there is none; the text names those that are served.
    pub fn find(&self, asked: &str) -> Result<BaseId, String> {
        let named = |name: &str| self.0.iter().position(|base| base.info.name == name).map(BaseId);
        named(asked).or_else(|| named(asked.split(':').next()?)).ok_or_else(|| {
            let served: Vec<String> = self.0.iter().map(|base| format!("{:?}", base.info.name)).collect();
            format!("base model {:?} is not served here; this server has {}", shown(asked), served.join(", "))
        })
    }

    /// One of them.
    pub fn get(&self, id: BaseId) -> &Base {
        &self.0[id.0]
    }

    /// The first.
    pub fn first(&self) -> &Base {
        &self.0[0]
    }

    /// All, in the order they were named.
    pub fn iter(&self) -> impl Iterator<Item = &Base> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{ScriptedEngine, model_info};

    #[test]
    fn a_base_model_is_found_by_its_name_or_a_variant_of_it() {
        let base = |name: &str| Base {
            info: ModelInfo { name: name.into(), ..model_info() },
            engine: Arc::new(ScriptedEngine::default()),
        };
        let bases = Bases::new(vec![base("org/a"), base("org/b"), base("org/b:long")]);
        let found = |asked: &str| bases.find(asked).map(|id| bases.get(id).info.name.clone());
        assert_eq!(found("org/b").as_deref(), Ok("org/b"));
        assert_eq!(found("org/a:peft:262144").as_deref(), Ok("org/a"));
        assert_eq!(found("org/b:long").as_deref(), Ok("org/b:long"), "the whole name counts before its beginning");
        let refused = found("org").unwrap_err();
        assert!(refused.contains("\"org\"") && refused.contains("\"org/a\", \"org/b\""), "{refused}");
    }
}
