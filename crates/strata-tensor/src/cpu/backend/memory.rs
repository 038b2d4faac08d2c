//! Memory of the processor: tensors are buffers, weights and pages the layouts that kernels stream.

use half::bf16;

use super::delta::states_mut;
use super::rows_mut;
use super::{CpuBackend, with_element};
use crate::cpu::memory::{Buffer, set_memory_limit, trim_pool};
use crate::cpu::threads::SharedMut;
use crate::cpu::{kv, matmul, packed, recurrent};
use crate::memory::{Layers, Memory, PACKED_PIECE_BYTES, check_layers, sized};
use crate::storage::Storage;
use crate::{
    DType, DeltaGeometry, Element, Error, HostRef, Int4Rows, KvLayout, KvPages, PackedRef, PackedStack, RecurrentStates,
    Result, SharedBytes, Tensor, TensorMut, TensorRef, WeightFormat, WeightStorage,
};

/// The packed weights of a layer, as they lie.
pub(super) fn weights(w: PackedRef<'_>) -> Result<packed::PackedRef<'_>> {
    let stack: &packed::PackedStack = w.stack.storage.get().ok_or(Error::ForeignMemory)?;
    Ok(stack.layer(w.layer))
}

/// Pages, as they lie.
pub(super) fn pages(pages: &KvPages) -> Result<&kv::KvPages> {
    pages.storage.get().ok_or(Error::ForeignMemory)
}

/// Pages to be written.
pub(super) fn pages_mut(pages: &mut KvPages) -> Result<&mut kv::KvPages> {
    pages.storage.get_mut().ok_or(Error::ForeignMemory)
}

/// Refuses elements that do not fit a layer of packed weights; answers the layer.
fn layer_mut<'s>(
    op: &'static str,
    stack: &'s mut PackedStack,
    layer: usize,
    (actual, shape): (DType, &[usize]),
    expected: [usize; 2],
) -> Result<packed::PackedMut<'s>> {
    if layer >= stack.num_layers {
        return Err(Error::Index { op, what: "layers", index: layer, size: stack.num_layers });
    }
    if actual != stack.dtype && actual != DType::F32 {
        return Err(Error::DType { op, expected: stack.dtype, actual });
    }
    if shape != expected {
        return Err(Error::Shape { op, expected: format!("{expected:?}"), actual: format!("{shape:?}") });
    }
    let stack: &mut packed::PackedStack = stack.storage.get_mut().ok_or(Error::ForeignMemory)?;
    stack.layer_mut(layer)
}

/// Refuses a source of other size than its target.
fn check_len(op: &'static str, source: usize, target: TensorRef<'_>) -> Result<()> {
    if source != target.shape().len() {
        return Err(Error::Shape { op, expected: target.shape().to_string(), actual: format!("{source} elements") });
    }
    Ok(())
}

/// The values in another dtype, in a buffer that begins with them.
fn rounded<T: Element>(values: &[f32]) -> Result<Buffer> {
    let mut buffer = Buffer::recycled(size_of::<T>() * values.len())?;
    buffer.numbers_mut::<T>(values.len()).iter_mut().zip(values).for_each(|(to, &v)| *to = T::from_f32(v));
    Ok(buffer)
}

/// Bytes that a thread copies, or fills, before it takes the next: a part of its cache.
const PIECE_BYTES: usize = 256 << 10;
/// The layout of packed weights, by a name that is another wherever a change of `packed` or of a `matmul::pack` moves a byte.
const PACKED_LAYOUT: &str = "cpu-panels-4";

impl CpuBackend {
    /// Copies bytes on all threads, a piece each: tables of embeddings are as large as memory lets them be.
    fn copy_bytes(&self, from: &[u8], to: &mut [u8]) {
        let shared = SharedMut::new(to);
        self.pool.run(from.len().div_ceil(PIECE_BYTES), &|task| {
            let piece = task * PIECE_BYTES..from.len().min((task + 1) * PIECE_BYTES);
            // SAFETY: each task has a piece to itself.
            unsafe { shared.part(piece.clone()) }.copy_from_slice(&from[piece]);
        });
    }

    fn new_stack(&self, shape: [usize; 3], format: WeightFormat, stack: packed::PackedStack) -> PackedStack {
        let [num_layers, in_features, out_features] = shape;
        let size_bytes = self.packed_bytes(num_layers, in_features, out_features, format);
        PackedStack { num_layers, in_features, out_features, dtype: format.compute, size_bytes, storage: Storage::new(stack) }
    }

    fn new_pages(num_pages: usize, layout: KvLayout, dtype: DType, memory: kv::KvPages) -> KvPages {
        KvPages { num_pages, layout, dtype, storage: Storage::new(memory) }
    }
}

impl Memory for CpuBackend {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (shape, bytes) = sized(shape, dtype)?;
        Ok(Tensor::new(shape, dtype, Storage::new(Buffer::zeroed(bytes)?)))
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (shape, bytes) = sized(shape, dtype)?;
        Ok(Tensor::new(shape, dtype, Storage::new(Buffer::recycled(bytes)?)))
    }

    fn upload(&self, source: HostRef<'_>, to: TensorMut<'_>) -> Result<()> {
        check_len("upload", source.shape().len(), to.as_ref())?;
        match (source.dtype(), to.dtype()) {
            (from, dtype) if from == dtype => self.copy_bytes(source.as_bytes(), to.into_bytes()?),
            (DType::F32, _) => {
                let out = to.into_slice::<bf16>()?;
                out.iter_mut().zip(source.slice::<f32>()).for_each(|(out, &v)| *out = Element::from_f32(v));
            }
            (actual, expected) => return Err(Error::DType { op: "upload", expected, actual }),
        }
        Ok(())
    }

    fn download(&self, source: TensorRef<'_>, out: &mut [u8]) -> Result<()> {
        if out.len() != source.size_bytes() {
            let expected = format!("{} bytes", source.size_bytes());
            return Err(Error::Shape { op: "download", expected, actual: format!("{} bytes", out.len()) });
        }
        out.copy_from_slice(source.bytes()?);
        Ok(())
    }

    fn copy(&self, source: TensorRef<'_>, to: TensorMut<'_>) -> Result<()> {
        check_len("copy", source.shape().len(), to.as_ref())?;
        if source.dtype() != to.dtype() {
            return Err(Error::DType { op: "copy", expected: to.dtype(), actual: source.dtype() });
        }
        to.into_bytes()?.copy_from_slice(source.bytes()?);
        Ok(())
    }

    fn gather(&self, source: TensorRef<'_>, rows: &[usize], out: &mut Tensor) -> Result<()> {
        check_len("gather", rows.len() * source.shape().row_len(), out.as_ref())?;
        if let Some(&row) = rows.iter().find(|&&row| row >= source.shape().leading()) {
            return Err(Error::Index { op: "gather", what: "rows", index: row, size: source.shape().leading() });
        }
        if source.dtype() != out.dtype() {
            return Err(Error::DType { op: "gather", expected: out.dtype(), actual: source.dtype() });
        }
        let row_bytes = source.shape().row_len() * source.dtype().size_bytes();
        let (source, out) = (source.bytes()?, SharedMut::new(out.as_mut().into_bytes()?));
        self.over_rows(rows.len(), row_bytes, |range| {
            // SAFETY: tasks have rows of their own.
            let out = unsafe { rows_mut(&out, &range, row_bytes) };
            for (&row, out) in rows[range].iter().zip(out.chunks_exact_mut(row_bytes.max(1))) {
                out.copy_from_slice(&source[row * row_bytes..][..row_bytes]);
            }
        });
        Ok(())
    }

    fn limit_memory(&self, bytes: usize) {
        set_memory_limit(bytes);
    }

    fn trim(&self) {
        trim_pool();
    }

    fn fill_zero(&self, tensor: TensorMut<'_>) -> Result<()> {
        tensor.into_bytes()?.fill(0);
        Ok(())
    }

    fn packed(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> Result<PackedStack> {
        let stack = packed::PackedStack::zeros(num_layers, in_features, out_features, format)?;
        Ok(self.new_stack([num_layers, in_features, out_features], format, stack))
    }

    fn packed_together(&self, shapes: &[[usize; 3]], format: WeightFormat) -> Result<Vec<PackedStack>> {
        let stacks = packed::PackedStack::zeros_together(shapes, format)?;
        Ok(shapes.iter().zip(stacks).map(|(&shape, stack)| self.new_stack(shape, format, stack)).collect())
    }

    fn packed_bytes(&self, num_layers: usize, in_features: usize, out_features: usize, format: WeightFormat) -> usize {
        packed::PackedStack::bytes(num_layers, in_features, out_features, format)
    }

    fn upload_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: HostRef<'_>) -> Result<()> {
        const OP: &str = "upload_rows";
        let (dtype, shape, out_features) = (rows.dtype(), rows.shape(), stack.out_features);
        let (end, expected) = (first_output.saturating_add(shape.leading()), [shape.leading(), stack.in_features]);
        let mut w = layer_mut(OP, stack, layer, (dtype, shape.dims()), expected)?;
        if end > out_features {
            return Err(Error::Index { op: OP, what: "outputs", index: end, size: out_features });
        }
        with_element!(w.dtype, T => match dtype == w.dtype {
            true => matmul::pack_rows(&self.pool, self.isa, rows.slice::<T>(), first_output, &mut w)?,
            false => matmul::pack_rows(&self.pool, self.isa, rounded::<T>(rows.slice())?.numbers_mut::<T>(rows.shape().len()), first_output, &mut w)?,
        });
        Ok(())
    }

    fn upload_int4_rows(&self, stack: &mut PackedStack, layer: usize, first_output: usize, rows: Int4Rows<'_>) -> Result<()> {
        const OP: &str = "upload_int4_rows";
        let (shape, out_features) = ([rows.rows(), rows.in_features()], stack.out_features);
        let end = first_output.saturating_add(rows.rows());
        let mut w = layer_mut(OP, stack, layer, (stack.dtype, &shape), [shape[0], stack.in_features])?;
        if end > out_features {
            return Err(Error::Index { op: OP, what: "outputs", index: end, size: out_features });
        }
        match w.storage {
            WeightStorage::Int4(group) if rows.consist_of(group.inputs()) => {
                matmul::pack_int4(&self.pool, group, &rows, first_output, &mut w);
                Ok(())
            }
            WeightStorage::Dense => {
                self.upload_rows(stack, layer, first_output, HostRef::from_f32(&rows.to_f32_vec(), &shape)?)
            }
            // Rounded again they would be others.
            other => Err(Error::Unsupported(format!("{OP}: weights are stored as {other:?}"))),
        }
    }

    fn pack_rows(&self, stack: &mut PackedStack, layer: usize, rows: TensorRef<'_>) -> Result<()> {
        let expected = [stack.out_features, stack.in_features];
        let mut w = layer_mut("pack_rows", stack, layer, (rows.dtype(), rows.shape().dims()), expected)?;
        with_element!(w.dtype, T => match rows.dtype() == w.dtype {
            true => matmul::pack_rows(&self.pool, self.isa, rows.slice::<T>()?, 0, &mut w)?,
            false => matmul::pack_rows(&self.pool, self.isa, rounded::<T>(rows.slice()?)?.numbers_mut::<T>(rows.shape().len()), 0, &mut w)?,
        });
        Ok(())
    }

    fn pack_columns(&self, stack: &mut PackedStack, layer: usize, columns: TensorRef<'_>) -> Result<()> {
        let expected = [stack.in_features, stack.out_features];
        let mut w = layer_mut("pack_columns", stack, layer, (columns.dtype(), columns.shape().dims()), expected)?;
        if w.storage != WeightStorage::Dense {
            return Err(Error::Unsupported(format!("pack_columns: weights are stored as {:?}", w.storage)));
        }
        with_element!(w.dtype, T => match columns.dtype() == w.dtype {
            true => matmul::pack_columns(&self.pool, self.isa, columns.slice::<T>()?, &mut w),
            false => matmul::pack_columns(&self.pool, self.isa, rounded::<T>(columns.slice()?)?.numbers_mut::<T>(columns.shape().len()), &mut w),
        });
        Ok(())
    }

    fn pack_stacks(&self, stacks: &mut [PackedStack], from: &[Layers<'_>]) -> Result<()> {
        const OP: &str = "pack_stacks";
        check_layers(stacks, from)?;
        let Some(dtype) = stacks.first().map(|stack| stack.dtype) else { return Ok(()) };
        let mut layers = Vec::with_capacity(stacks.iter().map(|stack| stack.num_layers).sum());
        for (stack, from) in stacks.iter_mut().zip(from) {
            if stack.dtype != dtype {
                return Err(Error::DType { op: OP, expected: dtype, actual: stack.dtype });
            }
            let own: &mut packed::PackedStack = stack.storage.get_mut().ok_or(Error::ForeignMemory)?;
            for (layer, w) in own.layers_mut()?.take(stack.num_layers).enumerate() {
                if w.storage != WeightStorage::Dense {
                    return Err(Error::Unsupported(format!("{OP}: weights are stored as {:?}", w.storage)));
                }
                let given = match from {
                    Layers::Rows(rows) => matmul::Given::Rows(rows.row(layer).slice()?),
                    Layers::Columns(columns) => matmul::Given::Columns(columns.row(layer).slice()?),
                };
                layers.push((w, given));
            }
        }
        with_element!(dtype, T => matmul::pack_layers::<T>(&self.pool, self.isa, layers));
        Ok(())
    }

    fn packed_layout(&self) -> &'static str {
        PACKED_LAYOUT
    }

    fn packed_over(
        &self,
        num_layers: usize,
        in_features: usize,
        out_features: usize,
        format: WeightFormat,
        bytes: SharedBytes,
    ) -> Result<PackedStack> {
        let stack = packed::PackedStack::over(num_layers, in_features, out_features, format, bytes)?;
        Ok(self.new_stack([num_layers, in_features, out_features], format, stack))
    }

    fn fill_packed(&self, stack: &mut PackedStack, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) -> Result<()> {
        let size_bytes = stack.size_bytes;
        let stack: &mut packed::PackedStack = stack.storage.get_mut().ok_or(Error::ForeignMemory)?;
        let bytes = SharedMut::new(&mut stack.as_bytes_mut()?[..size_bytes]);
        self.pool.run(size_bytes.div_ceil(PACKED_PIECE_BYTES), &|task| {
            let first = task * PACKED_PIECE_BYTES;
            // SAFETY: each task has a piece to itself.
            fill(first, unsafe { bytes.part(first..size_bytes.min(first + PACKED_PIECE_BYTES)) });
        });
        Ok(())
    }

    fn read_packed(&self, stack: &PackedStack, read: &mut dyn FnMut(&[u8])) -> Result<()> {
        let own: &packed::PackedStack = stack.storage.get().ok_or(Error::ForeignMemory)?;
        own.as_bytes()[..stack.size_bytes].chunks(PACKED_PIECE_BYTES).for_each(read);
        Ok(())
    }

    fn on_threads(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(num_tasks, task);
    }

    fn kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages> {
        let memory = kv::KvPages::zeroed(num_pages, self.kv_page_bytes(layout, dtype))?;
        Ok(Self::new_pages(num_pages, layout, dtype, memory))
    }

    fn scratch_kv_pages(&self, num_pages: usize, layout: KvLayout, dtype: DType) -> Result<KvPages> {
        let memory = kv::KvPages::recycled(num_pages, self.kv_page_bytes(layout, dtype))?;
        Ok(Self::new_pages(num_pages, layout, dtype, memory))
    }

    fn kv_page_bytes(&self, layout: KvLayout, dtype: DType) -> usize {
        kv::KvPages::page_bytes(layout, dtype)
    }

    fn copy_page(&self, pages: &mut KvPages, from: u32, to: u32) -> Result<()> {
        pages_mut(pages)?.copy_page(from, to)
    }

    fn release_pages(&self, pages: &mut KvPages, free: &[u32]) -> Result<()> {
        pages_mut(pages)?.release_pages(free)
    }

    fn recurrent_states(&self, num_slots: usize, g: &DeltaGeometry) -> Result<RecurrentStates> {
        let storage = Storage::new(recurrent::RecurrentStates::zeroed(num_slots, g)?);
        Ok(RecurrentStates { num_slots, geometry: *g, storage })
    }

    fn recurrent_slot_bytes(&self, g: &DeltaGeometry) -> usize {
        recurrent::SlotLayout::new(g).len() * size_of::<f32>()
    }

    fn copy_slot(&self, states: &mut RecurrentStates, from: u32, to: u32) -> Result<()> {
        states_mut(states)?.copy_slot(from, to)
    }

    fn release_slots(&self, states: &mut RecurrentStates, free: &[u32]) -> Result<()> {
        states_mut(states)?.release_slots(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::memory::ALIGN_BYTES;
    use crate::{Int4Group, Isa, KvValues};

    #[test]
    fn a_row_view_writes_through() {
        let b = CpuBackend::with_isa(Isa::Portable, 1);
        let mut t = b.zeros(&[3, 2], DType::BF16).unwrap();
        b.upload(HostRef::from_f32(&[1.5, -2.0], &[2]).unwrap(), t.row_mut(1)).unwrap();
        assert_eq!(b.to_f32_vec(t.as_ref()).unwrap(), [0.0, 0.0, 1.5, -2.0, 0.0, 0.0]);
        assert_eq!(b.to_f32_vec(t.row(1)).unwrap(), [1.5, -2.0]);
        b.fill_zero(t.row_mut(1).into_rows(1..2)).unwrap();
        let mut picked = b.scratch(&[2, 2], DType::BF16).unwrap();
        b.gather(t.as_ref(), &[1, 0], &mut picked).unwrap();
        assert_eq!(b.to_f32_vec(picked.as_ref()).unwrap(), [1.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_or_is_not_to_be_had_is_refused() {
        let b = CpuBackend::with_isa(Isa::Portable, 1);
        let (mut f32s, mut bf16s) = (b.zeros(&[2], DType::F32).unwrap(), b.zeros(&[2], DType::BF16).unwrap());
        let narrow = b.to_host(bf16s.as_ref()).unwrap();
        assert!(b.tensor(&[1.0], &[2], DType::F32).is_err());
        assert!(b.upload(narrow.as_ref(), f32s.as_mut()).is_err() && b.upload(narrow.as_ref(), bf16s.as_mut()).is_ok());
        assert!(b.copy(f32s.as_ref(), bf16s.as_mut()).is_err() && b.download(f32s.as_ref(), &mut [0; 7]).is_err());
        assert!(b.gather(f32s.as_ref(), &[2], &mut b.scratch(&[1], DType::F32).unwrap()).is_err());
        for shape in [[1 << 40, 1 << 21], [usize::MAX, 2]] {
            assert!(matches!(b.scratch(&shape, DType::F32), Err(Error::OutOfMemory { .. })));
        }
        assert!(matches!(b.packed(1, 1 << 40, 1 << 21, DType::F32.into()), Err(Error::OutOfMemory { .. })));
        let layout = KvLayout { kv_heads: 1, key_dim: 4, values: KvValues::Own(4) };
        assert!(matches!(b.kv_pages(1 << 60, layout, DType::F32), Err(Error::OutOfMemory { .. })));
        let mut pages = b.kv_pages(2, layout, DType::F32).unwrap();
        assert!(b.copy_page(&mut pages, 0, 2).is_err() && b.release_pages(&mut pages, &[2]).is_err());
    }

    #[test]
    fn what_a_stack_gives_fills_another_and_serves_where_it_lies_but_does_not_change_there() {
        /// Bytes from the start of a page on, behind one more.
        struct Pages(Buffer);
        impl AsRef<[u8]> for Pages {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        for (storage, outputs, inputs) in [
            (WeightStorage::Dense, 263, 2050),
            (WeightStorage::Dense, 1, 1),
            (WeightStorage::Int8, 70, 1041),
            (WeightStorage::Int4(Int4Group::Of32), 70, 1041),
        ] {
            let b = CpuBackend::with_isa(Isa::detect(), 3);
            let format = WeightFormat { compute: DType::BF16, storage };
            let values: Vec<f32> = (0..3 * outputs * inputs).map(|i| crate::random::normal([1, 2], i as u64)).collect();
            let mut stack = b.packed(3, inputs, outputs, format).unwrap();
            for (layer, values) in values.chunks(outputs * inputs).enumerate() {
                b.upload_rows(&mut stack, layer, 0, HostRef::from_f32(values, &[outputs, inputs]).unwrap()).unwrap();
            }
            let mut all = Vec::new();
            b.read_packed(&stack, &mut |piece| all.extend_from_slice(piece)).unwrap();
            assert_eq!(all.len(), stack.size_bytes());
            let again = |stack: &PackedStack| {
                let mut bytes = Vec::new();
                b.read_packed(stack, &mut |piece| bytes.extend_from_slice(piece)).unwrap();
                bytes
            };
            let mut filled = b.packed(3, inputs, outputs, format).unwrap();
            b.fill_packed(&mut filled, &|first, piece| piece.copy_from_slice(&all[first..first + piece.len()])).unwrap();
            assert!(again(&filled) == all);
            let mut pages = Buffer::zeroed(2 * ALIGN_BYTES + all.len()).unwrap();
            let first = 1 + pages[1..].as_ptr().align_offset(ALIGN_BYTES);
            pages[first..first + all.len()].copy_from_slice(&all);
            let pages: std::sync::Arc<dyn AsRef<[u8]> + Send + Sync> = std::sync::Arc::new(Pages(pages));
            let over = |range| b.packed_over(3, inputs, outputs, format, SharedBytes::new(pages.clone(), range));
            let mut lying = over(first..first + all.len()).unwrap();
            assert!(again(&lying) == all);
            assert!(over(first - 1..first - 1 + all.len()).is_err() && over(first..first - 1 + all.len()).is_err());
            let row = vec![1.0; inputs];
            let refused = b.upload_rows(&mut lying, 0, 0, HostRef::from_f32(&row, &[1, inputs]).unwrap());
            assert!(matches!(refused, Err(Error::Unsupported(_))));
            assert!(b.fill_packed(&mut lying, &|_, _| {}).is_err() && again(&lying) == all);
        }
    }

    #[test]
    fn stacks_are_packed_at_once_as_their_layers_one_by_one() {
        // Layers, inputs and outputs of pairs: ranks below and above a vector, odd ones, outputs of several tasks, a stack of no layers.
        let shapes = [[3, 130, 1], [3, 1, 130], [2, 67, 40], [2, 40, 67], [1, 65, 70], [1, 5, 9000], [0, 4, 4], [4, 64, 64]];
        for (isa, dtype, threads) in
            [(Isa::detect(), DType::BF16, 3), (Isa::detect(), DType::F32, 1), (Isa::Portable, DType::BF16, 2)]
        {
            let b = CpuBackend::with_isa(isa, threads);
            let tensors: Vec<Tensor> = shapes
                .iter()
                .enumerate()
                .map(|(i, &[layers, inputs, outputs])| {
                    let values: Vec<f32> =
                        (0..layers * inputs * outputs).map(|at| crate::random::normal([7, i as u64], at as u64)).collect();
                    let dims = if i % 2 == 0 { [layers, outputs, inputs] } else { [layers, inputs, outputs] };
                    b.tensor(&values, &dims, DType::F32).unwrap()
                })
                .collect();
            let mut together = b.packed_together(&shapes, dtype.into()).unwrap();
            let from: Vec<Layers<'_>> = tensors
                .iter()
                .enumerate()
                .map(|(i, tensor)| if i % 2 == 0 { Layers::Rows(tensor.as_ref()) } else { Layers::Columns(tensor.as_ref()) })
                .collect();
            b.pack_stacks(&mut together, &from).unwrap();
            for (i, (tensor, stack)) in tensors.iter().zip(&together).enumerate() {
                let mut alone = b.packed(shapes[i][0], shapes[i][1], shapes[i][2], dtype.into()).unwrap();
                for layer in 0..shapes[i][0] {
                    match i % 2 == 0 {
                        true => b.pack_rows(&mut alone, layer, tensor.row(layer)).unwrap(),
                        false => b.pack_columns(&mut alone, layer, tensor.row(layer)).unwrap(),
                    }
                }
                let bytes = |stack: &PackedStack| {
                    let mut all = Vec::new();
                    b.read_packed(stack, &mut |piece| all.extend_from_slice(piece)).unwrap();
                    all
                };
                assert!(bytes(stack) == bytes(&alone), "{isa} {dtype} {:?}", shapes[i]);
            }
            assert!(matches!(b.pack_stacks(&mut together, &from[1..]), Err(Error::Shape { .. })));
            let turned: Vec<Layers<'_>> = tensors.iter().map(|tensor| Layers::Rows(tensor.as_ref())).collect();
            assert!(matches!(b.pack_stacks(&mut together, &turned), Err(Error::Shape { .. })));
            let narrow = b.zeros(&[4, 64, 64], DType::BF16).unwrap();
            assert!(matches!(b.pack_stacks(&mut together[7..], &[Layers::Rows(narrow.as_ref())]), Err(Error::DType { .. })));
            let mut bytes = [b.packed(4, 64, 64, WeightFormat { compute: dtype, storage: WeightStorage::Int8 }).unwrap()];
            assert!(matches!(b.pack_stacks(&mut bytes, &from[7..]), Err(Error::Unsupported(_))));
        }
    }

    #[test]
    fn a_tensor_of_many_pieces_is_uploaded_whole() {
        let b = CpuBackend::with_isa(Isa::Portable, 3);
        let values: Vec<f32> = (0..200_001).map(|i| i as f32).collect();
        assert!(b.to_f32_vec(b.tensor(&values, &[200_001], DType::F32).unwrap().as_ref()).unwrap() == values);
    }

    #[test]
    fn memory_of_another_device_is_refused() {
        let b = CpuBackend::with_isa(Isa::Portable, 1);
        let mut foreign = Tensor::new(crate::Shape::new(&[2]), DType::F32, Storage::new([0.0f32; 2]));
        assert!(matches!(b.to_f32_vec(foreign.as_ref()), Err(Error::ForeignMemory)));
        assert!(matches!(b.fill_zero(foreign.as_mut()), Err(Error::ForeignMemory)));
    }
}
