//! A device that is elsewhere: what a tensor holds of it is a name, and the numbers are in a table that only this backend has.
//!
//! Each op fetches what it reads, has the processor compute it, and sends back what it wrote, so that results have the processor's bits. Whoever reads
//! memory past the backend finds no numbers there; whoever reads scratch memory before it was written finds NaN.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::backend::*;
use crate::moe::{Dispatch, Experts, RouterScores, Routing, SigmoidScores};
use crate::storage::Storage;
use crate::tape::{EmbeddingLora, Linear, LoraGroup, LoraProjection};
use crate::{
    CpuBackend, DType, Error, HostRef, HostTensor, Int4Rows, KvLayout, KvPages, Memory, PackedRef, PackedStack,
    RecurrentStates, Result, SharedBytes, Tensor, TensorMut, TensorRef, WeightFormat,
};

/// The backend.
pub struct RemoteBackend {
    cpu: CpuBackend,
    far: Arc<Far>,
    rows: AtomicUsize,
}

/// The memory of a remote backend.
#[derive(Default)]
struct Far {
    held: Mutex<Table>,
    next_id: AtomicU64,
    allocations: AtomicUsize,
    /// Allocations until one is refused; 0: none is.
    refuse_in: AtomicUsize,
}

#[derive(Default)]
struct Table(HashMap<u64, Held>);

enum Held {
    /// `[elements]`.
    Tensor(Tensor),
    Packed(PackedStack),
    Pages(KvPages),
    States(RecurrentStates),
}

/// What a tensor, stack or cache of this backend has for memory.
struct Handle {
    id: u64,
    far: Arc<Far>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.far.table().0.remove(&self.id);
    }
}

impl Far {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Table {
    fn tensor(&mut self, handle: &Handle) -> Result<&mut Tensor> {
        match self.0.get_mut(&handle.id) {
            Some(Held::Tensor(tensor)) => Ok(tensor),
            _ => Err(Error::ForeignMemory),
        }
    }

    fn packed(&self, w: PackedRef<'_>) -> Result<PackedRef<'_>> {
        let handle: &Handle = w.stack.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get(&handle.id) {
            Some(Held::Packed(stack)) => Ok(stack.layer(w.layer)),
            _ => Err(Error::ForeignMemory),
        }
    }

    fn packed_mut(&mut self, stack: &PackedStack) -> Result<&mut PackedStack> {
        let handle: &Handle = stack.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::Packed(stack)) => Ok(stack),
            _ => Err(Error::ForeignMemory),
        }
    }

    fn pages(&mut self, pages: &KvPages) -> Result<&mut KvPages> {
        let handle: &Handle = pages.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::Pages(pages)) => Ok(pages),
            _ => Err(Error::ForeignMemory),
        }
    }

    fn states(&mut self, states: &RecurrentStates) -> Result<&mut RecurrentStates> {
        let handle: &Handle = states.storage.get().ok_or(Error::ForeignMemory)?;
        match self.0.get_mut(&handle.id) {
            Some(Held::States(states)) => Ok(states),
            _ => Err(Error::ForeignMemory),
        }
    }

    /// A layer whose weights are here, with a bias that was fetched.
    fn linear<'t>(&'t self, layer: &Linear<'_>, bias: &'t Option<Tensor>) -> Result<Linear<'t>> {
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
}

impl Table {
    /// Pairs of an embedding whose weights are here, with rows that were fetched.
    fn pairs<'t>(&'t self, lora: &[EmbeddingLora<'_>], rows: &'t [Tensor]) -> Result<Vec<EmbeddingLora<'t>>> {
        let pair = |(pair, rows): (&EmbeddingLora<'_>, &'t Tensor)| {
            let (tokens, sequences, b) = (pair.tokens.clone(), pair.sequences.clone(), self.packed(pair.b)?);
            Ok(EmbeddingLora { tokens, sequences, a: rows.as_ref(), b, scale: pair.scale, site: pair.site })
        };
        lora.iter().zip(rows).map(pair).collect()
    }
}

/// Biases of the two layers of experts, on the processor.
type ExpertBiases = [Option<Tensor>; 2];

impl Table {
    /// Experts whose weights are here, with biases that were fetched.
    fn experts<'t>(&'t self, layer: &Experts<'_>, [gate_up, down]: &'t ExpertBiases) -> Result<Experts<'t>> {
        let (gate_up, down) = (self.linear(&layer.gate_up, gate_up)?, self.linear(&layer.down, down)?);
        Ok(Experts { gate_up, down, ..*layer })
    }
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

impl Memory for RemoteBackend {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.keep_tensor(&self.cpu.zeros(shape, dtype)?)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let mut poison = HostTensor::zeros(shape, dtype);
        poison.bytes_mut().fill(0xff);
        let mut here = self.cpu.scratch(shape, dtype)?;
        self.cpu.upload(poison.as_ref(), here.as_mut())?;
        self.keep_tensor(&here)
    }

    fn upload(&self, source: HostRef<'_>, to: TensorMut<'_>) -> Result<()> {
        let mut here = self.fetch(to.as_ref())?;
        self.cpu.upload(source, here.as_mut())?;
        self.send(&here, to)
    }

    fn download(&self, source: TensorRef<'_>, out: &mut [u8]) -> Result<()> {
        self.cpu.download(self.fetch(source)?.as_ref(), out)
    }

    fn copy(&self, source: TensorRef<'_>, to: TensorMut<'_>) -> Result<()> {
        let (source, mut here) = (self.fetch(source)?, self.fetch(to.as_ref())?);
        self.cpu.copy(source.as_ref(), here.as_mut())?;
        self.send(&here, to)
    }

    fn gather(&self, source: TensorRef<'_>, rows: &[usize], out: &mut Tensor) -> Result<()> {
        let source = self.fetch(source)?;
        self.change(out, |out| self.cpu.gather(source.as_ref(), rows, out))
    }

    fn limit_memory(&self, bytes: usize) {
        self.cpu.limit_memory(bytes);
    }

    fn trim(&self) {
        self.cpu.trim();
    }

    fn fill_zero(&self, tensor: TensorMut<'_>) -> Result<()> {
        let zeros = self.cpu.zeros(tensor.shape().dims(), tensor.dtype())?;
        self.send(&zeros, tensor)
    }

    fn packed(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> Result<PackedStack> {
        let size_bytes = self.packed_bytes(num_layers, in_features, out_features, format);
        let dtype = format.compute;
        let stack = || self.cpu.packed(num_layers, in_features, out_features, format).map(Held::Packed);
        Ok(PackedStack { num_layers, in_features, out_features, dtype, size_bytes, storage: self.keep(size_bytes, stack)? })
    }

    fn packed_bytes(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> usize {
        self.cpu.packed_bytes(num_layers, in_features, out_features, format)
    }

    fn upload_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: HostRef<'_>) -> Result<()> {
        self.cpu.upload_rows(self.far.table().packed_mut(stack)?, layer, first_output, rows)
    }

    fn upload_int4_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: Int4Rows<'_>) -> Result<()> {
        self.cpu.upload_int4_rows(self.far.table().packed_mut(stack)?, layer, first_output, rows)
    }

    fn pack_rows(&self, stack: &mut PackedStack, layer: usize, rows: TensorRef<'_>) -> Result<()> {
        let rows = self.fetch(rows)?;
        self.cpu.pack_rows(self.far.table().packed_mut(stack)?, layer, rows.as_ref())
    }

    fn pack_columns(&self, stack: &mut PackedStack, layer: usize, columns: TensorRef<'_>) -> Result<()> {
        let columns = self.fetch(columns)?;
        self.cpu.pack_columns(self.far.table().packed_mut(stack)?, layer, columns.as_ref())
    }

    fn packed_layout(&self) -> &'static str {
        self.cpu.packed_layout()
    }

    fn packed_over(
        &self,
        num_layers: usize,
        in_features: usize,
        out_features: usize,
        format: WeightFormat,
        bytes: SharedBytes,
    ) -> Result<PackedStack> {
        let stack = self.packed(num_layers, in_features, out_features, format)?;
        self.cpu.fill_packed(self.far.table().packed_mut(&stack)?, &|first, piece| {
            piece.copy_from_slice(&bytes[first..first + piece.len()]);
        })?;
        Ok(stack)
    }

    fn fill_packed(&self, stack: &mut PackedStack, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) -> Result<()> {
        self.cpu.fill_packed(self.far.table().packed_mut(stack)?, fill)
    }

    fn read_packed(&self, stack: &PackedStack, read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.cpu.read_packed(self.far.table().packed_mut(stack)?, read)
    }

    fn on_threads(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.cpu.on_threads(num_tasks, task);
    }

    fn kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages> {
        self.new_pages(num_pages, layout, dtype)
    }

    fn scratch_kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages> {
        self.new_pages(num_pages, layout, dtype)
    }

    fn kv_page_bytes(&self, layout: KvLayout, dtype: DType) -> usize {
        self.cpu.kv_page_bytes(layout, dtype)
    }

    fn copy_page(&self, pages: &mut KvPages, from: u32, to: u32) -> Result<()> {
        self.cpu.copy_page(self.far.table().pages(pages)?, from, to)
    }

    fn release_pages(&self, pages: &mut KvPages, free: &[u32]) -> Result<()> {
        self.cpu.release_pages(self.far.table().pages(pages)?, free)
    }

    fn recurrent_states(&self, num_slots: usize, g: &DeltaGeometry) -> Result<RecurrentStates> {
        let bytes = num_slots.saturating_mul(self.recurrent_slot_bytes(g));
        let states = || self.cpu.recurrent_states(num_slots, g).map(Held::States);
        Ok(RecurrentStates { num_slots, geometry: *g, storage: self.keep(bytes, states)? })
    }

    fn recurrent_slot_bytes(&self, g: &DeltaGeometry) -> usize {
        self.cpu.recurrent_slot_bytes(g)
    }

    fn copy_slot(&self, states: &mut RecurrentStates, from: u32, to: u32) -> Result<()> {
        self.cpu.copy_slot(self.far.table().states(states)?, from, to)
    }

    fn release_slots(&self, states: &mut RecurrentStates, free: &[u32]) -> Result<()> {
        self.cpu.release_slots(self.far.table().states(states)?, free)
    }
}

impl Backend for RemoteBackend {
    fn description(&self) -> String {
        format!("remote {}", self.cpu.description())
    }

    fn numerics(&self) -> String {
        self.cpu.numerics()
    }

    fn matmul_scratch_bytes(&self, rows: usize, width: usize, dtype: DType) -> usize {
        self.cpu.matmul_scratch_bytes(rows, width, dtype)
    }

    fn attention_gradient_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        self.cpu.attention_gradient_bytes(g, dtype)
    }

    fn attention_scratch_bytes(&self, g: &AttentionGeometry, dtype: DType) -> usize {
        self.cpu.attention_scratch_bytes(g, dtype)
    }

    fn check_attention(&self, g: &AttentionGeometry) -> Result<()> {
        self.cpu.check_attention(g)
    }

    fn linear(&self, x: &Tensor, layer: &Linear<'_>, y: Option<&mut Tensor>) -> Result<LowProducts> {
        let (x, bias) = (self.fetch(x.as_ref())?, self.fetch_bias(layer)?);
        let mut low = LowProducts::default();
        let mut run = |y: Option<&mut Tensor>| {
            let table = self.far.table();
            low = self.cpu.linear(&x, &table.linear(layer, &bias)?, y)?;
            Ok(())
        };
        match y {
            None => run(None)?,
            Some(y) => {
                self.rows.fetch_add(x.rows(), Ordering::Relaxed);
                self.change(y, |y| run(Some(y)))?
            }
        }
        self.keep_low(&low)
    }

    fn linear_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        low: &LowProducts,
        layer: &Linear<'_>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let (dy, x, bias) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch_bias(layer)?);
        let low = self.fetch_low(low)?;
        let mut dx_here = dx.as_ref().map(|dx| self.fetch((**dx).as_ref())).transpose()?;
        self.change_pairs(gradients, |table, views| {
            self.cpu.linear_backward(&dy, &x, &low, &table.linear(layer, &bias)?, views, dx_here.as_mut())
        })?;
        match (dx_here, dx) {
            (Some(here), Some(dx)) => self.send(&here, dx.as_mut()),
            _ => Ok(()),
        }
    }

    fn embedding(&self, table: TensorRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        let table = self.fetch(table)?;
        self.change(out, |out| self.cpu.embedding(table.as_ref(), ids, out))
    }

    fn embedding_packed(&self, table: PackedRef<'_>, ids: &[u32], out: &mut Tensor) -> Result<()> {
        self.change(out, |out| self.cpu.embedding_packed(self.far.table().packed(table)?, ids, out))
    }

    fn embedding_lora(&self, ids: &[u32], lora: &[EmbeddingLora<'_>], y: &mut Tensor) -> Result<LowProducts> {
        let (rows, mut low) = (self.fetch_rows(lora)?, LowProducts::default());
        self.change(y, |y| {
            low = self.cpu.embedding_lora(ids, &self.far.table().pairs(lora, &rows)?, y)?;
            Ok(())
        })?;
        self.keep_low(&low)
    }

    fn embedding_lora_backward(
        &self,
        dy: &Tensor,
        ids: &[u32],
        low: &LowProducts,
        lora: &[EmbeddingLora<'_>],
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        let (dy, low, rows) = (self.fetch(dy.as_ref())?, self.fetch_low(low)?, self.fetch_rows(lora)?);
        self.change_pairs(gradients, |table, views| {
            self.cpu.embedding_lora_backward(&dy, ids, &low, &table.pairs(lora, &rows)?, views)
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight) = (self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.rms_norm(&x, weight.as_ref(), eps, y))
    }

    fn rms_norm_backward(&self, dy: &Tensor, x: &Tensor, weight: TensorRef<'_>, eps: f32, dx: &mut Tensor) -> Result<()> {
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(dx, |dx| self.cpu.rms_norm_backward(&dy, &x, weight.as_ref(), eps, dx))
    }

    fn layer_norm(&self, x: &Tensor, weight: TensorRef<'_>, bias: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight, bias) = (self.fetch(x.as_ref())?, self.fetch(weight)?, self.fetch(bias)?);
        self.change(y, |y| self.cpu.layer_norm(&x, weight.as_ref(), bias.as_ref(), eps, y))
    }

    fn rotary_of_axes(&self, positions: &[&[u32]], turns: &[AxisFrequency], factor: f32) -> Result<Rotary> {
        let Rotary { cos, sin } = self.cpu.rotary_of_axes(positions, turns, factor)?;
        Ok(Rotary { cos: self.keep_tensor(&cos)?, sin: self.keep_tensor(&sin)? })
    }

    fn norm_rotate(
        &self,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        out: &mut Qkv,
    ) -> Result<()> {
        let (qkv, norms, rotary) = (self.fetch(qkv.as_ref())?, self.fetch_norms(norms)?, self.fetch_rotary(rotary)?);
        let mut here = self.fetch_qkv(out)?;
        self.cpu.norm_rotate(&qkv, views(&norms), &rotary, g, layout, &mut here)?;
        self.send_qkv(&here, out)
    }

    fn norm_rotate_backward(
        &self,
        gradient: &Qkv,
        qkv: &Tensor,
        norms: Option<[TensorRef<'_>; 2]>,
        rotary: &Rotary,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        let (qkv, norms, rotary) = (self.fetch(qkv.as_ref())?, self.fetch_norms(norms)?, self.fetch_rotary(rotary)?);
        let gradient = self.fetch_qkv(gradient)?;
        self.change(dqkv, |dqkv| self.cpu.norm_rotate_backward(&gradient, &qkv, views(&norms), &rotary, g, layout, dqkv))
    }

    fn write_kv(&self, qkv: &Qkv, g: &AttentionGeometry, spans: &[AttentionSpan<'_>], pages: &mut KvPages) -> Result<()> {
        let qkv = self.fetch_qkv(qkv)?;
        self.cpu.write_kv(&qkv, g, spans, self.far.table().pages(pages)?)
    }

    fn attention(
        &self,
        q: &Tensor,
        g: &AttentionGeometry,
        sinks: Option<TensorRef<'_>>,
        spans: &[AttentionSpan<'_>],
        pages: &KvPages,
        out: &mut Tensor,
        log_normalizers: &mut Tensor,
    ) -> Result<()> {
        self.rows.fetch_add(spans.iter().map(|span| span.tokens.len()).sum(), Ordering::Relaxed);
        let (q, sinks) = (self.fetch(q.as_ref())?, sinks.map(|sinks| self.fetch(sinks)).transpose()?);
        let sinks = sinks.as_ref().map(Tensor::as_ref);
        let mut out_here = self.fetch(out.as_ref())?;
        let mut log_normalizers_here = self.fetch(log_normalizers.as_ref())?;
        self.cpu.attention(&q, g, sinks, spans, self.far.table().pages(pages)?, &mut out_here, &mut log_normalizers_here)?;
        self.send(&out_here, out.as_mut())?;
        self.send(&log_normalizers_here, log_normalizers.as_mut())
    }

    fn attention_backward(
        &self,
        dout: &Tensor,
        qkv: &Qkv,
        out: &Tensor,
        log_normalizers: &Tensor,
        g: &AttentionGeometry,
        spans: &[AttentionSpan<'_>],
        gradient: &mut Qkv,
    ) -> Result<()> {
        let (dout, qkv, out) = (self.fetch(dout.as_ref())?, self.fetch_qkv(qkv)?, self.fetch(out.as_ref())?);
        let (log_normalizers, mut here) = (self.fetch(log_normalizers.as_ref())?, self.fetch_qkv(gradient)?);
        self.cpu.attention_backward(&dout, &qkv, &out, &log_normalizers, g, spans, &mut here)?;
        self.send_qkv(&here, gradient)
    }

    fn swiglu(&self, gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
        let gate_up = self.fetch(gate_up.as_ref())?;
        self.change(y, |y| self.cpu.swiglu(&gate_up, y))
    }

    fn swiglu_backward(&self, dy: &Tensor, gate_up: &Tensor, dgate_up: &mut Tensor) -> Result<()> {
        let (dy, gate_up) = (self.fetch(dy.as_ref())?, self.fetch(gate_up.as_ref())?);
        self.change(dgate_up, |dgate_up| self.cpu.swiglu_backward(&dy, &gate_up, dgate_up))
    }

    fn gelu(&self, x: &Tensor, kind: Gelu, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.gelu(&x, kind, y))
    }

    fn convert(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.convert(&x, y))
    }

    fn add(&self, x: TensorRef<'_>, y: TensorMut<'_>) -> Result<()> {
        let (x, mut here) = (self.fetch(x)?, self.fetch(y.as_ref())?);
        self.cpu.add(x.as_ref(), here.as_mut())?;
        self.send(&here, y)
    }

    fn target_logprobs(&self, logits: &Tensor, targets: LogprobTargets<'_>, log_normalizers: &mut Tensor) -> Result<Vec<f32>> {
        let logits = self.fetch(logits.as_ref())?;
        let mut logprobs = Vec::new();
        self.change(log_normalizers, |log_normalizers| {
            logprobs = self.cpu.target_logprobs(&logits, targets, log_normalizers)?;
            Ok(())
        })?;
        Ok(logprobs)
    }

    fn logits_gradient(
        &self,
        logits: TensorRef<'_>,
        log_normalizers: TensorRef<'_>,
        targets: LogprobTargets<'_>,
        gradient: &[f32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let (logits, log_normalizers) = (self.fetch(logits)?, self.fetch(log_normalizers)?);
        let (logits, log_normalizers) = (logits.as_ref(), log_normalizers.as_ref());
        self.change(dlogits, |dlogits| self.cpu.logits_gradient(logits, log_normalizers, targets, gradient, dlogits))
    }

    fn read_logits(&self, logits: &Tensor, requests: &[RowRequest]) -> Result<Vec<Option<RowReply>>> {
        self.cpu.read_logits(&self.fetch(logits.as_ref())?, requests)
    }

    fn adamw(
        &self,
        step: &AdamwStep,
        weights: &mut Tensor,
        gradient: &mut Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
    ) -> Result<()> {
        let mut here =
            [self.fetch(weights.as_ref())?, self.fetch(gradient.as_ref())?, self.fetch(m.as_ref())?, self.fetch(v.as_ref())?];
        let [weights_here, gradient_here, m_here, v_here] = &mut here;
        self.cpu.adamw(step, weights_here, gradient_here, m_here, v_here)?;
        for (here, there) in here.iter().zip([weights, gradient, m, v]) {
            self.send(here, there.as_mut())?;
        }
        Ok(())
    }

    fn sum_squares(&self, tensor: &Tensor) -> Result<f64> {
        self.cpu.sum_squares(&self.fetch(tensor.as_ref())?)
    }

    fn gate_heads(
        &self,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        y: &mut Tensor,
    ) -> Result<()> {
        let (attended, qkv) = (self.fetch(attended.as_ref())?, self.fetch(qkv.as_ref())?);
        self.change(y, |y| self.cpu.gate_heads(&attended, &qkv, g, layout, y))
    }

    fn gate_heads_backward(
        &self,
        dy: &Tensor,
        attended: &Tensor,
        qkv: &Tensor,
        g: &AttentionGeometry,
        layout: &QkvLayout,
        dattended: &mut Tensor,
        dqkv: &mut Tensor,
    ) -> Result<()> {
        let (dy, attended, qkv) = (self.fetch(dy.as_ref())?, self.fetch(attended.as_ref())?, self.fetch(qkv.as_ref())?);
        self.change(dattended, |dattended| {
            self.change(dqkv, |dqkv| self.cpu.gate_heads_backward(&dy, &attended, &qkv, g, layout, dattended, dqkv))
        })
    }

    fn route(&self, logits: &Tensor, routing: &Routing<'_>, weights: &mut Tensor) -> Result<Vec<u32>> {
        let logits = self.fetch(logits.as_ref())?;
        let mut experts = Vec::new();
        self.change(weights, |weights| {
            experts = self.with_routing(routing, |routing| self.cpu.route(&logits, routing, weights))?;
            Ok(())
        })?;
        Ok(experts)
    }

    fn route_backward(
        &self,
        dweights: &Tensor,
        logits: &Tensor,
        routing: &Routing<'_>,
        experts: &[u32],
        dlogits: &mut Tensor,
    ) -> Result<()> {
        let (dweights, logits) = (self.fetch(dweights.as_ref())?, self.fetch(logits.as_ref())?);
        self.change(dlogits, |dlogits| {
            self.with_routing(routing, |routing| self.cpu.route_backward(&dweights, &logits, routing, experts, dlogits))
        })
    }

    fn experts(&self, x: &Tensor, weights: &Tensor, dispatch: &Dispatch, layer: &Experts<'_>, y: &mut Tensor) -> Result<()> {
        self.rows.fetch_add(x.rows(), Ordering::Relaxed);
        let (x, weights, biases) = (self.fetch(x.as_ref())?, self.fetch(weights.as_ref())?, self.fetch_biases(layer)?);
        self.change(y, |y| self.cpu.experts(&x, &weights, dispatch, &self.far.table().experts(layer, &biases)?, y))
    }

    fn experts_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        layer: &Experts<'_>,
        gradients: &mut [Option<LoraGradient<'_>>],
        dweights: &mut Tensor,
        dx: Option<&mut Tensor>,
    ) -> Result<()> {
        let (dy, x, weights) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weights.as_ref())?);
        let biases = self.fetch_biases(layer)?;
        let mut dx_here = dx.as_ref().map(|dx| self.fetch((**dx).as_ref())).transpose()?;
        self.change(dweights, |dweights| {
            self.change_pairs(gradients, |table, gradients| {
                let layer = table.experts(layer, &biases)?;
                self.cpu.experts_backward(&dy, &x, &weights, dispatch, &layer, gradients, dweights, dx_here.as_mut())
            })
        })?;
        match (dx_here, dx) {
            (Some(here), Some(dx)) => self.send(&here, dx.as_mut()),
            _ => Ok(()),
        }
    }

    fn sigmoid_gate(&self, x: &Tensor, gates: &Tensor, y: &mut Tensor) -> Result<()> {
        let (x, gates) = (self.fetch(x.as_ref())?, self.fetch(gates.as_ref())?);
        self.change(y, |y| self.cpu.sigmoid_gate(&x, &gates, y))
    }

    fn sigmoid_gate_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gates: &Tensor,
        dx: &mut Tensor,
        dgates: &mut Tensor,
    ) -> Result<()> {
        let (dy, x, gates) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(gates.as_ref())?);
        self.change(dx, |dx| self.change(dgates, |dgates| self.cpu.sigmoid_gate_backward(&dy, &x, &gates, dx, dgates)))
    }

    fn rotate_heads(
        &self,
        x: &Tensor,
        heads: &HeadMove,
        rotary: &Rotary,
        style: RotaryStyle,
        turn: Turn,
        y: &mut Tensor,
    ) -> Result<()> {
        let (x, rotary) = (self.fetch(x.as_ref())?, self.fetch_rotary(rotary)?);
        self.change(y, |y| self.cpu.rotate_heads(&x, heads, &rotary, style, turn, y))
    }

    fn norm_heads(&self, x: &Tensor, heads: &HeadMove, weight: TensorRef<'_>, eps: f32, y: &mut Tensor) -> Result<()> {
        let (x, weight) = (self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.norm_heads(&x, heads, weight.as_ref(), eps, y))
    }

    fn norm_heads_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        heads: &HeadMove,
        weight: TensorRef<'_>,
        eps: f32,
        dx: &mut Tensor,
    ) -> Result<()> {
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        self.change(dx, |dx| self.cpu.norm_heads_backward(&dy, &x, heads, weight.as_ref(), eps, dx))
    }

    fn head_linear(&self, x: &Tensor, layer: &Linear<'_>, part: &HeadPart, side: HeadSide, y: &mut Tensor) -> Result<()> {
        let x = self.fetch(x.as_ref())?;
        self.change(y, |y| self.cpu.head_linear(&x, &self.far.table().linear(layer, &None)?, part, side, y))
    }

    fn head_linear_gradients(
        &self,
        heads: &Tensor,
        latents: &Tensor,
        layer: &Linear<'_>,
        part: &HeadPart,
        gradients: &mut [Option<LoraGradient<'_>>],
    ) -> Result<()> {
        let (heads, latents) = (self.fetch(heads.as_ref())?, self.fetch(latents.as_ref())?);
        self.change_pairs(gradients, |table, views| {
            self.cpu.head_linear_gradients(&heads, &latents, &table.linear(layer, &None)?, part, views)
        })
    }

    fn check_delta(&self, g: &DeltaGeometry) -> Result<()> {
        self.cpu.check_delta(g)
    }

    fn delta_scratch_bytes(&self, g: &DeltaGeometry, tokens: usize) -> usize {
        self.cpu.delta_scratch_bytes(g, tokens)
    }

    fn delta_inputs(
        &self,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut DeltaInputs,
    ) -> Result<()> {
        let (projection, params) = (self.fetch(projection.as_ref())?, self.fetch_delta_params(params)?);
        let mut here = self.fetch_delta(out)?;
        {
            let mut table = self.far.table();
            let states = states.map(|s| table.states(s)).transpose()?;
            self.cpu.delta_inputs(&projection, &delta_params(&params), g, spans, states, &mut here)?;
        }
        self.send_delta(&here, out)
    }

    fn delta_inputs_backward(
        &self,
        gradient: &mut DeltaInputs,
        projection: &Tensor,
        params: &DeltaParams<'_>,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        dprojection: &mut Tensor,
    ) -> Result<()> {
        let (projection, params) = (self.fetch(projection.as_ref())?, self.fetch_delta_params(params)?);
        let mut gradient = self.fetch_delta(gradient)?;
        self.change(dprojection, |d| {
            self.cpu.delta_inputs_backward(&mut gradient, &projection, &delta_params(&params), g, spans, d)
        })
    }

    fn delta_rule(
        &self,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        states: Option<&mut RecurrentStates>,
        out: &mut Tensor,
    ) -> Result<()> {
        let inputs = self.fetch_delta(inputs)?;
        let mut here = self.fetch(out.as_ref())?;
        {
            let mut table = self.far.table();
            let states = states.map(|s| table.states(s)).transpose()?;
            self.cpu.delta_rule(&inputs, g, spans, states, &mut here)?;
        }
        self.send(&here, out.as_mut())
    }

    fn delta_rule_backward(
        &self,
        dout: &Tensor,
        inputs: &DeltaInputs,
        g: &DeltaGeometry,
        spans: &[DeltaSpan],
        gradient: &mut DeltaInputs,
    ) -> Result<()> {
        let (dout, inputs, mut here) = (self.fetch(dout.as_ref())?, self.fetch_delta(inputs)?, self.fetch_delta(gradient)?);
        self.cpu.delta_rule_backward(&dout, &inputs, g, spans, &mut here)?;
        self.send_delta(&here, gradient)
    }

    fn gated_norm(
        &self,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        y: &mut Tensor,
    ) -> Result<()> {
        let (x, projection, weight) = (self.fetch(x.as_ref())?, self.fetch(projection.as_ref())?, self.fetch(weight)?);
        self.change(y, |y| self.cpu.gated_norm(&x, &projection, weight.as_ref(), eps, g, y))
    }

    fn gated_norm_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        projection: &Tensor,
        weight: TensorRef<'_>,
        eps: f32,
        g: &DeltaGeometry,
        dx: &mut Tensor,
        dprojection: &mut Tensor,
    ) -> Result<()> {
        let (dy, x, weight) = (self.fetch(dy.as_ref())?, self.fetch(x.as_ref())?, self.fetch(weight)?);
        let (projection, mut dx_here) = (self.fetch(projection.as_ref())?, self.fetch(dx.as_ref())?);
        self.change(dprojection, |d| {
            self.cpu.gated_norm_backward(&dy, &x, &projection, weight.as_ref(), eps, g, &mut dx_here, d)
        })?;
        self.send(&dx_here, dx.as_mut())
    }
}
