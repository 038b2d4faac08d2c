//! Element types of tensors.

use std::fmt;

/// The type of one element. Weights and matmul inputs have the checkpoint's dtype; everything that is summed is `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// The upper half of an `F32`: 8 bits of exponent, 7 of mantissa.
    BF16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::BF16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
        })
    }
}
