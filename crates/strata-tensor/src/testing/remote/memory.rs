//! What the device keeps, and how numbers come to it and from it.

use super::RemoteBackend;
use super::table::Held;
use crate::backend::*;
use crate::{
    DType, HostRef, HostTensor, Int4Rows, KvLayout, KvPages, Memory, PackedStack, RecurrentStates, Result, SharedBytes, Tensor,
    TensorMut, TensorRef, WeightFormat,
};

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
