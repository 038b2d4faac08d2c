//! What the tests of ops and kernels share. Their tensors are the processor's.

use std::sync::LazyLock;

use crate::{
    CpuBackend, DType, HostRef, Isa, KvLayout, KvPages, KvValues, Memory, PackedStack, Tensor, TensorMut, TensorRef, random,
};

static CPU: LazyLock<CpuBackend> = LazyLock::new(|| CpuBackend::with_isa(Isa::detect(), 1));

impl Tensor {
    pub(crate) fn zeros(shape: &[usize], dtype: DType) -> Self {
        CPU.zeros(shape, dtype).unwrap()
    }

    pub(crate) fn from_f32(values: &[f32], shape: &[usize], dtype: DType) -> crate::Result<Self> {
        CPU.tensor(values, shape, dtype)
    }

    pub(crate) fn to_f32_vec(&self) -> Vec<f32> {
        self.as_ref().to_f32_vec()
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Self {
        CPU.duplicate(self.as_ref()).unwrap()
    }
}

impl TensorRef<'_> {
    pub(crate) fn to_f32_vec(self) -> Vec<f32> {
        CPU.to_f32_vec(self).unwrap()
    }
}

impl TensorMut<'_> {
    pub(crate) fn copy_from_f32(&mut self, values: &[f32]) -> crate::Result<()> {
        CPU.upload(HostRef::from_f32(values, &[values.len()])?, self.reborrow())
    }
}

impl PackedStack {
    pub(crate) fn zeros(num_layers: usize, in_features: usize, out_features: usize, dtype: DType) -> Self {
        CPU.packed(num_layers, in_features, out_features, dtype.into()).unwrap()
    }
}

impl KvPages {
    pub(crate) fn new(num_pages: usize, kv_heads: usize, head_dim: usize, dtype: DType) -> Self {
        CPU.kv_pages(num_pages, KvLayout { kv_heads, key_dim: head_dim, values: KvValues::Own(head_dim) }, dtype).unwrap()
    }
}

/// Standard normal values.
pub(crate) fn normal(n: usize, key: u64) -> Vec<f32> {
    (0..n as u64).map(|i| random::normal([key, 0], i)).collect()
}

/// A tensor of standard normal values, rounded to `dtype`.
pub(crate) fn tensor(shape: &[usize], dtype: DType, key: u64) -> Tensor {
    Tensor::from_f32(&normal(shape.iter().product(), key), shape, dtype).unwrap()
}

/// A tensor whose every element is a NaN.
pub(crate) fn poison(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_f32(&vec![f32::NAN; shape.iter().product()], shape, dtype).unwrap()
}

/// Rows of a tensor, as a tensor.
pub(crate) fn rows(tensor: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    CPU.duplicate(tensor.as_ref().rows(rows)).unwrap()
}

/// The bits of every element, widened.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_f32_vec().into_iter().map(f32::to_bits).collect()
}

/// One layer of packed weights `[out_features, in_features]`.
pub(crate) fn packed(weights: &[f32], in_features: usize, out_features: usize, dtype: DType) -> PackedStack {
    let mut stack = PackedStack::zeros(1, in_features, out_features, dtype);
    CPU.upload_rows(&mut stack, 0, 0, HostRef::from_f32(weights, &[out_features, in_features]).unwrap()).unwrap();
    stack
}

/// Checks every element against a reference, relative to values of the size of one.
#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, context: &str) {
    assert_eq!(actual.len(), expected.len(), "{context}");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!((a as f64 - e).abs() <= tolerance * (1.0 + e.abs()), "{context}: element {i} is {a}, not {e}");
    }
}

/// Fills the pool of recycled memory with NaN, in buffers of the size of this tensor.
pub(crate) fn poison_recycled(shape: &[usize], dtype: DType) {
    let _buffers: Vec<Tensor> = (0..8).map(|_| poison(shape, dtype)).collect();
}

/// The gradient of `loss` at `point` by central differences in f32 with this step.
pub(crate) fn slopes(point: &[f32], step: f32, mut loss: impl FnMut(&[f32]) -> f64) -> Vec<f64> {
    let mut point = point.to_vec();
    (0..point.len())
        .map(|i| {
            let value = point[i];
            let (above, below) = (value + step, value - step);
            let [high, low] = [above, below].map(|v| {
                point[i] = v;
                loss(&point)
            });
            point[i] = value;
            (high - low) / (above as f64 - below as f64)
        })
        .collect()
}
