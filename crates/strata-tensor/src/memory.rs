//! The memory of a device, and the only ways in and out of it.

use crate::host::{HostRef, f32_bytes_mut};
use crate::{
    DType, DeltaGeometry, Error, HostTensor, Int4Rows, KvLayout, KvPages, PackedStack, RecurrentStates, Result, Shape,
    SharedBytes, Tensor, TensorMut, TensorRef, WeightFormat,
};

/// Bytes of packed weights that are passed between host and device at a time: what a core has of cache of its own, so that whoever looks at them finds them there.
pub const PACKED_PIECE_BYTES: usize = 512 << 10;

/// The numbers of all layers of a stack, in f32.
#[derive(Clone, Copy)]
pub enum Layers<'a> {
    /// `[num_layers, out_features, in_features]`.
    Rows(TensorRef<'a>),
    /// `[num_layers, in_features, out_features]`: the transposed weights.
    Columns(TensorRef<'a>),
}

/// Refuses numbers that are not those of the stacks.
pub(crate) fn check_layers(stacks: &[PackedStack], from: &[Layers<'_>]) -> Result<()> {
    const OP: &str = "pack_stacks";
    if stacks.len() != from.len() {
        let (expected, actual) = (format!("{} stacks", stacks.len()), format!("{} tensors", from.len()));
        return Err(Error::Shape { op: OP, expected, actual });
    }
    for (stack, from) in stacks.iter().zip(from) {
        let (layers, inputs, outputs) = (stack.num_layers, stack.in_features, stack.out_features);
        let (tensor, expected) = match from {
            Layers::Rows(rows) => (rows, [layers, outputs, inputs]),
            Layers::Columns(columns) => (columns, [layers, inputs, outputs]),
        };
        if tensor.shape().dims() != expected {
            return Err(Error::Shape { op: OP, expected: format!("{expected:?}"), actual: tensor.shape().to_string() });
        }
    }
    Ok(())
}

/// What every device does with memory. Tensors, packed weights and pages are allocated here and belong to the backend that allocated them; only
/// [`Memory::upload`] and [`Memory::download`] pass elements between it and the host.
///
/// Allocation fails with [`Error::OutOfMemory`]; memory of another backend is refused with [`Error::ForeignMemory`].
pub trait Memory {
    /// A tensor of zeros.
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// A tensor that holds anything: whoever asks for it overwrites all of it.
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// Writes elements of the host: bit for bit, or from f32 rounded to the dtype of `to`.
    ///
    /// # Errors
    /// If the numbers of elements differ, or the dtypes do and it is not from f32.
    fn upload(&self, source: HostRef<'_>, to: TensorMut<'_>) -> Result<()>;

    /// Reads the elements, bit for bit, in the byte order of this machine.
    ///
    /// # Errors
    /// If `out` is not of [`TensorRef::size_bytes`].
    fn download(&self, source: TensorRef<'_>, out: &mut [u8]) -> Result<()>;

    /// Copies a tensor over one of the same dtype and number of elements.
    ///
    /// # Errors
    /// If they do not fit.
    fn copy(&self, source: TensorRef<'_>, to: TensorMut<'_>) -> Result<()>;

    /// Rows `rows` of `source: [n, ...]`, in that order, to `out: [rows.len(), ...]` of the same dtype.
    ///
    /// # Errors
    /// If a row is not there, or `out` does not fit.
    fn gather(&self, source: TensorRef<'_>, rows: &[usize], out: &mut Tensor) -> Result<()>;

    /// Keeps of what is freed, for what is allocated next, at most what is in use leaves of so many bytes.
    fn limit_memory(&self, bytes: usize);

    /// Gives back all freed memory that is kept.
    fn trim(&self);

    /// Sets every element to zero.
    fn fill_zero(&self, tensor: TensorMut<'_>) -> Result<()>;

    /// A stack of zero weights. The memory is not touched until it is written.
    fn packed(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> Result<PackedStack>;

    /// As [`Memory::packed`], a stack for each `[num_layers, in_features, out_features]`: of those that are read one after another, as an adapter's are, though each is small. A device
    /// may have them in one allocation, which is free when all of them are.
    fn packed_together(&self, shapes: &[[usize; 3]], format: WeightFormat) -> Result<Vec<PackedStack>> {
        shapes
            .iter()
            .map(|&[num_layers, in_features, out_features]| self.packed(num_layers, in_features, out_features, format))
            .collect()
    }

    /// Bytes that such a stack takes, padding included.
    fn packed_bytes(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> usize;

    /// Writes `rows: [n, in_features]` of the host as outputs `first_output..first_output + n` of a layer of packed weights; rounds f32 where weights are
    /// narrower.
    ///
    /// # Errors
    /// If layer, rows or dtype do not fit.
    fn upload_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: HostRef<'_>) -> Result<()>;

    /// As [`Memory::upload_rows`] for weights that have four bits already. Where the stack is stored so, in groups that these consist of, they are stored as they are; where it is
    /// dense, what they stand for is.
    ///
    /// # Errors
    /// If layer or rows do not fit, or the stack is stored in another way.
    fn upload_int4_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: Int4Rows<'_>) -> Result<()>;

    /// As [`Memory::upload_rows`] for all rows of a layer, `[out_features, in_features]`, from a tensor.
    ///
    /// # Errors
    /// If layer, shape or dtype do not fit.
    fn pack_rows(&self, stack: &mut PackedStack, layer: usize, rows: TensorRef<'_>) -> Result<()>;

    /// Writes `columns: [in_features, out_features]` (the transposed weight) as a layer of packed weights.
    ///
    /// # Errors
    /// As [`Memory::pack_rows`], and if the weights are not stored in their own dtype: columns are for small matrices that change.
    fn pack_columns(&self, stack: &mut PackedStack, layer: usize, columns: TensorRef<'_>) -> Result<()>;

    /// As [`Memory::pack_rows`] and [`Memory::pack_columns`] of all layers of each stack. A device may write all of them in one piece of work, small as they are.
    ///
    /// # Errors
    /// As those, and if there is not something for each stack.
    fn pack_stacks(&self, stacks: &mut [PackedStack], from: &[Layers<'_>]) -> Result<()> {
        check_layers(stacks, from)?;
        for (stack, from) in stacks.iter_mut().zip(from) {
            for layer in 0..stack.num_layers {
                match from {
                    Layers::Rows(rows) => self.pack_rows(stack, layer, rows.row(layer))?,
                    Layers::Columns(columns) => self.pack_columns(stack, layer, columns.row(layer))?,
                }
            }
        }
        Ok(())
    }

    /// The name of the layout of packed weights on this device. What [`Memory::read_packed`] has given is understood by whoever has the same.
    fn packed_layout(&self) -> &'static str;

    /// A stack of what [`Memory::read_packed`] has given of one of its shape and format, on a device of the same [`Memory::packed_layout`], in memory of the host: a device
    /// that computes there reads it where it lies, and another takes it to itself. It does not change.
    ///
    /// # Errors
    /// If the bytes are not as many as the stack has, or do not begin at a page; or the device has no memory.
    fn packed_over(
        &self,
        num_layers: usize,
        in_features: usize,
        out_features: usize,
        format: WeightFormat,
        bytes: SharedBytes,
    ) -> Result<PackedStack>;

    /// Fills a stack with what [`Memory::read_packed`] has given of one of its shape and format, on a device of the same [`Memory::packed_layout`]: `fill` is called once for
    /// each [`PACKED_PIECE_BYTES`] of it, and for the rest, with the place of the first byte, in any order and on all threads.
    ///
    /// # Errors
    /// If the device refuses.
    fn fill_packed(&self, stack: &mut PackedStack, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) -> Result<()>;

    /// Gives the bytes of a stack as they lie on the device, [`PACKED_PIECE_BYTES`] after another and then the rest, in order.
    ///
    /// # Errors
    /// If the device refuses.
    fn read_packed(&self, stack: &PackedStack, read: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// Runs `task(i)` for every `i` below `num_tasks`, in any order, on the threads of the host that work for this device: for what is to be done with numbers before it has them.
    fn on_threads(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync));

    /// Room for `num_pages` pages of keys and values of one layer. Memory is touched only as pages are used.
    fn kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages>;

    /// As [`Memory::kv_pages`], for as long as an op: pages that hold what others left, which nobody sees, see
    /// [`Backend::attention`](crate::Backend::attention).
    fn scratch_kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages>;

    /// Bytes of one page.
    fn kv_page_bytes(&self, layout: KvLayout, dtype: DType) -> usize;

    /// Copies page `from` over page `to`, for a sequence that goes on from a place within it. What follows that place is never seen.
    ///
    /// # Errors
    /// If a page is not there.
    fn copy_page(&self, pages: &mut KvPages, from: u32, to: u32) -> Result<()>;

    /// Gives the memory of pages that are free back to the system, as far as it can take it; they take memory again once they are written.
    ///
    /// # Errors
    /// If a page is not there.
    fn release_pages(&self, pages: &mut KvPages, free: &[u32]) -> Result<()>;

    /// Room for the states of `num_slots` sequences in one layer of gated delta rule. Memory is touched only as slots are used.
    fn recurrent_states(&self, num_slots: usize, g: &DeltaGeometry) -> Result<RecurrentStates>;

    /// Bytes of one slot.
    fn recurrent_slot_bytes(&self, g: &DeltaGeometry) -> usize;

    /// Copies slot `from` over slot `to`, for a sequence that goes on from where another is.
    ///
    /// # Errors
    /// If a slot is not there.
    fn copy_slot(&self, states: &mut RecurrentStates, from: u32, to: u32) -> Result<()>;

    /// Gives the memory of slots that are free back to the system, as far as it can take it. A sequence that begins in a slot needs no more than a slot: what
    /// others left there is not seen.
    ///
    /// # Errors
    /// If a slot is not there.
    fn release_slots(&self, states: &mut RecurrentStates, free: &[u32]) -> Result<()>;

    /// A tensor with these values, rounded where `dtype` is narrower than `f32`.
    ///
    /// # Errors
    /// If the number of values is not that of the shape.
    fn tensor(&self, values: &[f32], shape: &[usize], dtype: DType) -> Result<Tensor> {
        let source = HostRef::from_f32(values, shape)?;
        let mut tensor = self.scratch(shape, dtype)?;
        self.upload(source, tensor.as_mut())?;
        Ok(tensor)
    }

    /// A tensor of its own with the elements of `source`.
    fn duplicate(&self, source: TensorRef<'_>) -> Result<Tensor> {
        let mut copy = self.scratch(source.shape().dims(), source.dtype())?;
        self.copy(source, copy.as_mut())?;
        Ok(copy)
    }

    /// All elements on the host.
    fn to_host(&self, source: TensorRef<'_>) -> Result<HostTensor> {
        let mut host = HostTensor::zeros(source.shape().dims(), source.dtype());
        self.download(source, host.bytes_mut())?;
        Ok(host)
    }

    /// All elements on the host, widened to `f32`.
    fn to_f32_vec(&self, source: TensorRef<'_>) -> Result<Vec<f32>> {
        if source.dtype() != DType::F32 {
            return Ok(self.to_host(source)?.as_ref().to_f32_vec());
        }
        let mut values = vec![0.0; source.shape().len()];
        self.download(source, f32_bytes_mut(&mut values))?;
        Ok(values)
    }
}

/// The shape and the bytes of a tensor to be allocated.
///
/// # Errors
/// [`Error::OutOfMemory`] if the bytes cannot be counted.
pub(crate) fn sized(shape: &[usize], dtype: DType) -> Result<(Shape, usize)> {
    let bytes = shape.iter().try_fold(dtype.size_bytes(), |size, &n| size.checked_mul(n));
    Ok((Shape::new(shape), bytes.ok_or(Error::OutOfMemory { bytes: usize::MAX })?))
}
