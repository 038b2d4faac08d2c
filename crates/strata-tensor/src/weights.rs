//! Weights of linear layers, in whatever layout the backend's matrix products stream.
//!
//! What a product reads has a compute dtype and a shape; how it is stored, in which order and how many bytes, is the backend's business.

use std::fmt;

use crate::DType;
use crate::storage::Storage;

/// How weights are kept in memory. What is computed with has another dtype: stored weights are unpacked block by block in cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// In the dtype that is computed in.
    #[default]
    Dense,
    /// In signed bytes, with a bf16 scale for every 64 inputs of an output. Products are those of the dense weights `q·scale`, rounded to the
    /// compute dtype, to the bit.
    Int8,
    /// In four bits, with a scale and a zero for each group of inputs of an output. Products are those of the dense weights `(q − zero)·scale`, rounded to the compute
    /// dtype, to the bit.
    Int4(Int4Group),
}

impl WeightStorage {
    /// Bytes that a weight takes with its share of a scale, without padding.
    pub fn element_bytes(self, compute: DType) -> f64 {
        match self {
            WeightStorage::Dense => compute.size_bytes() as f64,
            WeightStorage::Int8 => 1.0 + 2.0 / 64.0,
            WeightStorage::Int4(group) => 0.5 + 4.0 / group.inputs() as f64,
        }
    }
}

/// Consecutive inputs of an output that share a scale and a zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Int4Group {
    /// 32.
    Of32,
    /// 64.
    #[default]
    Of64,
    /// 128.
    Of128,
}

impl Int4Group {
    /// How many they are.
    pub const fn inputs(self) -> usize {
        match self {
            Int4Group::Of32 => 32,
            Int4Group::Of64 => 64,
            Int4Group::Of128 => 128,
        }
    }

    /// The largest that groups of so many inputs consist of, if there is one.
    pub fn dividing(inputs: usize) -> Option<Self> {
        [Int4Group::Of128, Int4Group::Of64, Int4Group::Of32].into_iter().find(|group| inputs.is_multiple_of(group.inputs()))
    }
}

/// The dtype that a product computes in, and how its weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightFormat {
    /// Dtype of the weights as they are multiplied, and of what they are multiplied with.
    pub compute: DType,
    /// How they are kept.
    pub storage: WeightStorage,
}

impl From<DType> for WeightFormat {
    fn from(compute: DType) -> Self {
        WeightFormat { compute, storage: WeightStorage::Dense }
    }
}

/// A stack of packed weights `[num_layers]` of shape `[out_features, in_features]` each. [`Memory::packed`](crate::Memory::packed) allocates it.
pub struct PackedStack {
    pub(crate) num_layers: usize,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) dtype: DType,
    pub(crate) size_bytes: usize,
    pub(crate) storage: Storage,
}

impl PackedStack {
    /// Bytes of memory held: [`Memory::packed_bytes`](crate::Memory::packed_bytes).
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// The weights of one layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> PackedRef<'_> {
        assert!(layer < self.num_layers, "layer {layer} of {self:?}");
        PackedRef { stack: self, layer }
    }
}

impl fmt::Debug for PackedStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedStack({} layers of {} → {} {})", self.num_layers, self.in_features, self.out_features, self.dtype)
    }
}

/// A packed weight `[out_features, in_features]`, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct PackedRef<'a> {
    pub(crate) stack: &'a PackedStack,
    pub(crate) layer: usize,
}

impl PackedRef<'_> {
    /// Input features.
    pub fn in_features(&self) -> usize {
        self.stack.in_features
    }

    /// Output features.
    pub fn out_features(&self) -> usize {
        self.stack.out_features
    }

    /// Dtype in which products are computed.
    pub fn dtype(&self) -> DType {
        self.stack.dtype
    }

    /// Layers of the stack from this one on, itself among them.
    pub(crate) fn layers_left(&self) -> usize {
        self.stack.num_layers - self.layer
    }
}

impl<'a> PackedRef<'a> {
    /// The weight `layers` further on in the stack.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn further(&self, layers: usize) -> PackedRef<'a> {
        self.stack.layer(self.layer + layers)
    }
}
