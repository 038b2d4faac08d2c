//! A device that is elsewhere: what a tensor holds of it is a name, and the numbers are in a table that only this backend has.
//!
//! Each op fetches what it reads, has the processor compute it, and sends back what it wrote, so that results have the processor's bits. Whoever reads
//! memory past the backend finds no numbers there; whoever reads scratch memory before it was written finds NaN.

mod memory;
mod ops;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use table::{ExpertBiases, Far, Handle, Held, Table};

use crate::backend::*;
use crate::moe::{Experts, RouterScores, Routing, SigmoidScores};
use crate::storage::Storage;
use crate::tape::{EmbeddingLora, Linear};
use crate::{CpuBackend, DType, Error, KvLayout, KvPages, Memory, Result, Tensor, TensorMut, TensorRef};

/// The backend.
pub struct RemoteBackend {
    cpu: CpuBackend,
    far: Arc<Far>,
    rows: AtomicUsize,
}

impl RemoteBackend {
    /// A device as fast as `cpu`.
    pub fn new(cpu: CpuBackend) -> Self {
        RemoteBackend { cpu, far: Arc::default(), rows: AtomicUsize::new(0) }
    }

    /// Allocations so far.
    pub fn allocations(&self) -> usize {
        self.far.allocations.load(Ordering::Relaxed)
    }

    /// Rows of values of linear layers and of experts, and queries of attention, so far.
    pub fn rows_computed(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    /// Tensors, stacks and caches that there are.
    pub fn held(&self) -> usize {
        self.far.table().0.len()
    }

    /// Refuses the `nth` allocation from now, counted from 1, for lack of memory, and none after it.
    pub fn refuse_allocation(&self, nth: usize) {
        self.far.refuse_in.store(nth, Ordering::Relaxed);
    }

    fn keep(&self, bytes: usize, held: impl FnOnce() -> Result<Held>) -> Result<Storage> {
        self.far.allocations.fetch_add(1, Ordering::Relaxed);
        let left = self.far.refuse_in.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left == Ok(1) {
            return Err(Error::OutOfMemory { bytes });
        }
        let id = self.far.next_id.fetch_add(1, Ordering::Relaxed);
        self.far.table().0.insert(id, held()?);
        Ok(Storage::new(Handle { id, far: self.far.clone() }))
    }

    /// A tensor of this device with these elements.
    fn keep_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let flat = || {
            let mut flat = self.cpu.scratch(&[tensor.shape().len()], tensor.dtype())?;
            self.cpu.copy(tensor.as_ref(), flat.as_mut())?;
            Ok(Held::Tensor(flat))
        };
        Ok(Tensor::new(tensor.shape(), tensor.dtype(), self.keep(tensor.size_bytes(), flat)?))
    }

    /// The elements of a view, on the processor.
    fn fetch(&self, view: TensorRef<'_>) -> Result<Tensor> {
        let handle: &Handle = view.storage().get().ok_or(Error::ForeignMemory)?;
        let mut here = self.cpu.scratch(view.shape().dims(), view.dtype())?;
        let mut table = self.far.table();
        self.cpu.copy(table.tensor(handle)?.as_ref().rows(view.elements()), here.as_mut())?;
        Ok(here)
    }

    /// Overwrites a view with what the processor has made of it.
    fn send(&self, here: &Tensor, view: TensorMut<'_>) -> Result<()> {
        let elements = view.elements();
        let handle: &Handle = view.into_storage().get().ok_or(Error::ForeignMemory)?;
        let mut table = self.far.table();
        self.cpu.copy(here.as_ref(), table.tensor(handle)?.rows_mut(elements))
    }

    /// Lets the processor change a tensor.
    fn change(&self, view: &mut Tensor, op: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let mut here = self.fetch(view.as_ref())?;
        op(&mut here)?;
        self.send(&here, view.as_mut())
    }

    fn fetch_qkv(&self, qkv: &Qkv) -> Result<Qkv> {
        let v = qkv.v.as_ref().map(|v| self.fetch(v.as_ref())).transpose()?;
        Ok(Qkv { q: self.fetch(qkv.q.as_ref())?, k: self.fetch(qkv.k.as_ref())?, v })
    }

    fn send_qkv(&self, here: &Qkv, qkv: &mut Qkv) -> Result<()> {
        self.send(&here.q, qkv.q.as_mut())?;
        self.send(&here.k, qkv.k.as_mut())?;
        match (&here.v, &mut qkv.v) {
            (Some(here), Some(v)) => self.send(here, v.as_mut()),
            _ => Ok(()),
        }
    }

    /// Lets the processor change the gradients of some pairs.
    fn change_pairs(
        &self,
        gradients: &mut [Option<LoraGradient<'_>>],
        op: impl FnOnce(&Table, &mut [Option<LoraGradient<'_>>]) -> Result<()>,
    ) -> Result<()> {
        let fetch = |g: &Option<LoraGradient<'_>>| {
            let pair = g.as_ref().map(|g| Ok((self.fetch(g.a.as_ref())?, self.fetch(g.b.as_ref())?)));
            pair.transpose()
        };
        let mut here = gradients.iter().map(fetch).collect::<Result<Vec<_>>>()?;
        {
            fn view((a, b): &mut (Tensor, Tensor)) -> LoraGradient<'_> {
                LoraGradient { a: a.as_mut(), b: b.as_mut() }
            }
            let mut views: Vec<_> = here.iter_mut().map(|pair| pair.as_mut().map(view)).collect();
            op(&self.far.table(), &mut views)?;
        }
        for (here, gradient) in here.iter().zip(gradients) {
            if let (Some((a, b)), Some(gradient)) = (here, gradient) {
                self.send(a, gradient.a.reborrow())?;
                self.send(b, gradient.b.reborrow())?;
            }
        }
        Ok(())
    }

    fn fetch_delta(&self, x: &DeltaInputs) -> Result<DeltaInputs> {
        let fetch = |t: &Tensor| self.fetch(t.as_ref());
        Ok(DeltaInputs { q: fetch(&x.q)?, k: fetch(&x.k)?, v: fetch(&x.v)?, g: fetch(&x.g)?, beta: fetch(&x.beta)? })
    }

    fn send_delta(&self, here: &DeltaInputs, x: &mut DeltaInputs) -> Result<()> {
        let pairs =
            [(&here.q, &mut x.q), (&here.k, &mut x.k), (&here.v, &mut x.v), (&here.g, &mut x.g), (&here.beta, &mut x.beta)];
        pairs.into_iter().try_for_each(|(here, there)| self.send(here, there.as_mut()))
    }

    fn fetch_delta_params(&self, p: &DeltaParams<'_>) -> Result<[Tensor; 3]> {
        Ok([self.fetch(p.conv)?, self.fetch(p.a_log)?, self.fetch(p.dt_bias)?])
    }

    fn fetch_rotary(&self, rotary: &Rotary) -> Result<Rotary> {
        Ok(Rotary { cos: self.fetch(rotary.cos.as_ref())?, sin: self.fetch(rotary.sin.as_ref())? })
    }

    fn fetch_rows(&self, lora: &[EmbeddingLora<'_>]) -> Result<Vec<Tensor>> {
        lora.iter().map(|pair| self.fetch(pair.a)).collect()
    }

    fn fetch_low(&self, low: &LowProducts) -> Result<LowProducts> {
        let numbers = low.numbers.as_ref().map(|numbers| self.fetch(numbers.as_ref())).transpose()?;
        Ok(LowProducts { numbers, shapes: low.shapes.clone() })
    }

    fn keep_low(&self, low: &LowProducts) -> Result<LowProducts> {
        let numbers = low.numbers.as_ref().map(|numbers| self.keep_tensor(numbers)).transpose()?;
        Ok(LowProducts { numbers, shapes: low.shapes.clone() })
    }

    fn fetch_bias(&self, layer: &Linear<'_>) -> Result<Option<Tensor>> {
        layer.bias.map(|bias| self.fetch(bias)).transpose()
    }

    fn fetch_biases(&self, layer: &Experts<'_>) -> Result<ExpertBiases> {
        Ok([self.fetch_bias(&layer.gate_up)?, self.fetch_bias(&layer.down)?])
    }

    /// Calls `op` with a routing that the processor can read.
    fn with_routing<R>(&self, routing: &Routing<'_>, op: impl FnOnce(&Routing<'_>) -> Result<R>) -> Result<R> {
        let RouterScores::Sigmoid(sigmoid) = routing.scores else { return op(routing) };
        let bias = sigmoid.correction_bias.map(|bias| self.fetch(bias)).transpose()?;
        let correction_bias = bias.as_ref().map(Tensor::as_ref);
        op(&Routing { scores: RouterScores::Sigmoid(SigmoidScores { correction_bias, ..sigmoid }), ..*routing })
    }

    fn fetch_norms(&self, norms: Option<[TensorRef<'_>; 2]>) -> Result<Option<[Tensor; 2]>> {
        norms.map(|[q, k]| Ok([self.fetch(q)?, self.fetch(k)?])).transpose()
    }

    fn new_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages> {
        let bytes = num_pages.saturating_mul(self.kv_page_bytes(layout, dtype));
        let pages = || self.cpu.kv_pages(num_pages, layout, dtype).map(Held::Pages);
        Ok(KvPages { num_pages, layout, dtype, storage: self.keep(bytes, pages)? })
    }
}

/// The parameters of a layer of gated delta rule, borrowed.
fn delta_params([conv, a_log, dt_bias]: &[Tensor; 3]) -> DeltaParams<'_> {
    DeltaParams { conv: conv.as_ref(), a_log: a_log.as_ref(), dt_bias: dt_bias.as_ref() }
}

/// The norms of queries and keys, borrowed.
fn views(norms: &Option<[Tensor; 2]>) -> Option<[TensorRef<'_>; 2]> {
    norms.as_ref().map(|[q, k]| [q.as_ref(), k.as_ref()])
}
