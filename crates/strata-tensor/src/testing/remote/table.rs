//! The memory of the device: what its tensors, stacks and caches are names of.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::moe::Experts;
use crate::tape::{EmbeddingLora, Linear, LoraGroup, LoraProjection};
use crate::{Error, KvPages, PackedRef, PackedStack, RecurrentStates, Result, Tensor};

/// The memory of a remote backend.
#[derive(Default)]
pub(super) struct Far {
    held: Mutex<Table>,
    pub(super) next_id: AtomicU64,
    pub(super) allocations: AtomicUsize,
    /// Allocations until one is refused; 0: none is.
    pub(super) refuse_in: AtomicUsize,
}

#[derive(Default)]
pub(super) struct Table(pub(super) HashMap<u64, Held>);

pub(super) enum Held {
    /// `[elements]`.
    Tensor(Tensor),
    Packed(PackedStack),
    Pages(KvPages),
    States(RecurrentStates),
}

/// What a tensor, stack or cache of this backend has for memory.
pub(super) struct Handle {
    pub(super) id: u64,
    pub(super) far: Arc<Far>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.far.table().0.remove(&self.id);
    }
}

impl Far {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Table {
    pub(super) fn tensor(&mut self, handle: &Handle) -> Result<&mut Tensor> {
        match self.0.get_mut(&handle.id) {
            Some(Held::Tensor(tensor)) => Ok(tensor),
            _ => Err(Error::ForeignMemory),
        }
    }

    pub(super) fn packed(&self, w: PackedRef<'_>) -> Result<PackedRef<'_>> {
        let handle: &Handle = w.stack.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get(&handle.id) {
            Some(Held::Packed(stack)) => Ok(stack.layer(w.layer)),
            _ => Err(Error::ForeignMemory),
        }
    }

    pub(super) fn packed_mut(&mut self, stack: &PackedStack) -> Result<&mut PackedStack> {
        let handle: &Handle = stack.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::Packed(stack)) => Ok(stack),
            _ => Err(Error::ForeignMemory),
        }
    }

    pub(super) fn pages(&mut self, pages: &KvPages) -> Result<&mut KvPages> {
        let handle: &Handle = pages.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::Pages(pages)) => Ok(pages),
            _ => Err(Error::ForeignMemory),
        }
    }

    pub(super) fn states(&mut self, states: &RecurrentStates) -> Result<&mut RecurrentStates> {
        let handle: &Handle = states.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::States(states)) => Ok(states),
            _ => Err(Error::ForeignMemory),
        }
    }

    /// A layer whose weights are here, with a bias that was fetched.
    pub(super) fn linear<'t>(&'t self, layer: &Linear<'_>, bias: &'t Option<Tensor>) -> Result<Linear<'t>> {
        let projection = |p: &LoraProjection<'_>| {
            let (a, b) = (self.packed(p.a)?, self.packed(p.b)?);
            Ok(LoraProjection { a, b, scale: p.scale, first_column: p.first_column, site: p.site })
        };
        let group = |g: &LoraGroup<'_>| {
            let projections = g.projections.iter().map(projection).collect::<Result<_>>()?;
            Ok(LoraGroup { tokens: g.tokens.clone(), sequences: g.sequences.clone(), projections })
        };
        let lora = layer.lora.iter().map(group).collect::<Result<_>>()?;
        Ok(Linear { weight: self.packed(layer.weight)?, bias: bias.as_ref().map(Tensor::as_ref), lora })
    }

    /// Pairs of an embedding whose weights are here, with rows that were fetched.
    pub(super) fn pairs<'t>(&'t self, lora: &[EmbeddingLora<'_>], rows: &'t [Tensor]) -> Result<Vec<EmbeddingLora<'t>>> {
        let pair = |(pair, rows): (&EmbeddingLora<'_>, &'t Tensor)| {
            let (tokens, sequences, b) = (pair.tokens.clone(), pair.sequences.clone(), self.packed(pair.b)?);
            Ok(EmbeddingLora { tokens, sequences, a: rows.as_ref(), b, scale: pair.scale, site: pair.site })
        };
        lora.iter().zip(rows).map(pair).collect()
    }

    /// Experts whose weights are here, with biases that were fetched.
    pub(super) fn experts<'t>(&'t self, layer: &Experts<'_>, [gate_up, down]: &'t ExpertBiases) -> Result<Experts<'t>> {
        let (gate_up, down) = (self.linear(&layer.gate_up, gate_up)?, self.linear(&layer.down, down)?);
        Ok(Experts { gate_up, down, ..*layer })
    }
}

/// Biases of the two layers of experts, on the processor.
pub(super) type ExpertBiases = [Option<Tensor>; 2];
