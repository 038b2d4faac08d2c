//! The weights of a declaration in memory: what its stacks take, how they are filled, and what is read from them.

use strata_tensor::{
    Backend, DType, HostRef, HostTensor, Int4Rows, PackedRef, PackedStack, Tensor, TensorRef, WeightFormat, WeightStorage,
};

use super::{Declaration, Form, MatrixId, MatrixSpec, Parameter, Place, Stored, VectorId, VectorSpec};
use crate::Result;
use crate::architectures::{Rows, WeightSource};

/// What a stack of weights has of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum StackShape {
    /// Matrices as products read them.
    Matrices { layers: usize, in_features: usize, out_features: usize, format: WeightFormat },
    /// Vectors, or a table: `[rows, width]`.
    Tensor { rows: usize, width: usize, dtype: DType },
}

impl StackShape {
    /// Bytes that it takes.
    pub(crate) fn bytes(&self, backend: &dyn Backend) -> usize {
        match *self {
            StackShape::Matrices { layers, in_features, out_features, format } => {
                backend.packed_bytes(layers, in_features, out_features, format)
            }
            StackShape::Tensor { rows, width, dtype } => rows.saturating_mul(width).saturating_mul(dtype.size_bytes()),
        }
    }

    /// Bytes of its elements, with their share of scales.
    pub(crate) fn element_bytes(&self) -> u64 {
        match *self {
            StackShape::Matrices { layers, in_features, out_features, format } => {
                let elements = [layers, in_features, out_features].map(|n| n as f64).iter().product::<f64>();
                (elements * format.storage.element_bytes(format.compute)) as u64
            }
            StackShape::Tensor { rows, width, dtype } => rows as u64 * width as u64 * dtype.size_bytes() as u64,
        }
    }

    /// Memory for it.
    ///
    /// # Panics
    /// If it is a tensor.
    pub(crate) fn allocate_matrices(&self, backend: &dyn Backend) -> Result<PackedStack> {
        let &StackShape::Matrices { layers, in_features, out_features, format } = self else { panic!("{self:?} is no stack") };
        Ok(backend.packed(layers, in_features, out_features, format)?)
    }

    /// Memory for it.
    ///
    /// # Panics
    /// If it is a stack of matrices.
    pub(crate) fn allocate_tensor(&self, backend: &dyn Backend) -> Result<Tensor> {
        let &StackShape::Tensor { rows, width, dtype } = self else { panic!("{self:?} is no tensor") };
        Ok(backend.zeros(&[rows, width], dtype)?)
    }
}

/// A stack of weights in memory.
pub(crate) enum Stack<'w> {
    Matrices(&'w PackedStack),
    Tensor(&'w Tensor),
}

impl Declaration {
    /// Allocates the stacks and fills them.
    pub(crate) fn load(&self, backend: &dyn Backend, format: WeightFormat, source: &mut dyn WeightSource) -> Result<Weights> {
        let matrix = |stack: StackShape| stack.allocate_matrices(backend);
        let tensor = |stack: &StackShape| stack.allocate_tensor(backend);
        let (matrices, tensors): (Vec<StackShape>, Vec<StackShape>) =
            self.stacks(format).into_iter().partition(|stack| matches!(stack, StackShape::Matrices { .. }));
        let matrices = matrices.into_iter().map(matrix).collect::<Result<_>>()?;
        let tensors = tensors.iter().map(tensor).collect::<Result<_>>()?;
        let mut weights = self.of_stacks(matrices, tensors);
        for p in self.parameters() {
            let dtype =
                if matches!(p.place, Place::Vector { .. } | Place::Vectors { .. }) { DType::F32 } else { format.compute };
            source.read(p, dtype, &mut |first, rows| match rows {
                Rows::Values(rows) => weights.store(backend, p.place, first, rows),
                Rows::Int4(rows) => weights.store_int4(backend, (p.place, dtype), first, rows),
            })?;
        }
        Ok(weights)
    }

    /// All stacks: matrices, vectors, and the table if there is one.
    pub(crate) fn stacks(&self, format: WeightFormat) -> Vec<StackShape> {
        let matrix = |&MatrixSpec { layers, in_features, out_features, stored, .. }: &MatrixSpec| {
            let format = match stored {
                Stored::AsAsked => format,
                Stored::Exactly => format.compute.into(),
                Stored::AsTheyLie(group) => WeightFormat { storage: WeightStorage::Int4(group), ..format },
            };
            StackShape::Matrices { layers, in_features, out_features, format }
        };
        let vector = |v: &VectorSpec| StackShape::Tensor { rows: v.layers, width: v.width, dtype: DType::F32 };
        let table = self.table.map(|[rows, width]| StackShape::Tensor { rows, width, dtype: format.compute });
        self.matrices.iter().map(matrix).chain(self.vectors.iter().map(vector)).chain(table).collect()
    }

    /// Weights that lie in these stacks, which are those of [`Declaration::stacks`] in their order.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub(crate) fn of_stacks(&self, matrices: Vec<PackedStack>, mut tensors: Vec<Tensor>) -> Weights {
        let of_table = usize::from(self.table.is_some());
        assert_eq!((matrices.len(), tensors.len()), (self.matrices.len(), self.vectors.len() + of_table));
        let table = self.table.and_then(|_| tensors.pop());
        Weights { matrices, vectors: tensors, table }
    }

    /// In words, all that decides where a number of a checkpoint lies in the stacks.
    pub(crate) fn describe(&self, format: WeightFormat) -> String {
        let mut words = format!("{:?}", self.stacks(format));
        for Parameter { name, shape, form, place, .. } in &self.parameters {
            let form = match form {
                Form::Own => "own",
                Form::Expert(_) => "expert",
                Form::ZeroCentred => "zero-centred",
                Form::Flipped => "flipped",
            };
            words.push_str(&format!("; {name} {shape:?} {form} {place:?}"));
        }
        words
    }
}

/// The weights of a model in memory.
pub(crate) struct Weights {
    matrices: Vec<PackedStack>,
    vectors: Vec<Tensor>,
    table: Option<Tensor>,
}

impl Weights {
    /// One matrix of a stack.
    pub(crate) fn matrix(&self, id: MatrixId, layer: usize) -> PackedRef<'_> {
        self.matrices[id.0].layer(layer)
    }

    /// One vector of a stack.
    pub(crate) fn vector(&self, id: VectorId, layer: usize) -> TensorRef<'_> {
        self.vectors[id.0].row(layer)
    }

    /// Some vectors of a stack, `[count, width]`.
    pub(crate) fn vectors(&self, id: VectorId, range: std::ops::Range<usize>) -> TensorRef<'_> {
        self.vectors[id.0].as_ref().rows(range)
    }

    /// The table of embeddings, if it is one of its own.
    pub(crate) fn table(&self) -> Option<TensorRef<'_>> {
        self.table.as_ref().map(Tensor::as_ref)
    }

    /// All stacks, in the order of [`Declaration::stacks`].
    pub(crate) fn stacks(&self) -> impl Iterator<Item = Stack<'_>> {
        self.matrices.iter().map(Stack::Matrices).chain(self.vectors.iter().chain(&self.table).map(Stack::Tensor))
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let matrices = self.matrices.iter().map(PackedStack::size_bytes).sum::<usize>();
        matrices + self.vectors.iter().chain(&self.table).map(Tensor::size_bytes).sum::<usize>()
    }

    /// As [`Weights::store`], of rows in four bits: in four bits too if their place has them, or as what they stand for.
    fn store_int4(
        &mut self,
        backend: &dyn Backend,
        (place, dtype): (Place, DType),
        first: usize,
        rows: Int4Rows<'_>,
    ) -> Result<()> {
        match place {
            Place::Matrix { id, layer, first: at } => {
                Ok(backend.upload_int4_rows(&mut self.matrices[id.0], layer, at + first, rows)?)
            }
            _ => {
                let values = HostTensor::from_f32(&rows.to_f32_vec(), &[rows.rows(), rows.in_features()], dtype)?;
                self.store(backend, place, first, values.as_ref())
            }
        }
    }

    /// Writes rows of a parameter, the first of which is row `first`, to their place.
    fn store(&mut self, backend: &dyn Backend, place: Place, first: usize, rows: HostRef<'_>) -> Result<()> {
        match place {
            Place::Matrix { id, layer, first: at } => {
                // A kernel of a convolution is a row.
                let shape = [rows.shape().leading(), rows.shape().row_len()];
                let rows = HostRef::from_bytes(rows.as_bytes(), &shape, rows.dtype())?;
                backend.upload_rows(&mut self.matrices[id.0], layer, at + first, rows)?;
            }
            Place::Vector { id, layer, first: at } => {
                let start = at + first * rows.shape().row_len();
                let elements = start..start + rows.shape().len();
                backend.upload(rows, self.vectors[id.0].row_mut(layer).into_rows(elements))?;
            }
            Place::Matrices { id, first: at, order } => {
                for (entry, matrix) in (at + first..).zip(entries(rows)?) {
                    backend.upload_rows(&mut self.matrices[id.0], entry, 0, order.for_stack(matrix).as_ref())?;
                }
            }
            Place::Vectors { id, first: at, order } => {
                for (entry, vector) in (at + first..).zip(entries(rows)?) {
                    backend.upload(order.for_stack(vector).as_ref(), self.vectors[id.0].row_mut(entry))?;
                }
            }
            Place::Table => {
                let table = self.table.as_mut().expect("a table that is read is allocated");
                backend.upload(rows, table.rows_mut(first..first + rows.shape().leading()))?;
            }
        }
        Ok(())
    }
}

/// The entries of the leading axis.
fn entries(all: HostRef<'_>) -> Result<Vec<HostRef<'_>>> {
    let (shape, bytes) = (all.shape(), all.shape().row_len() * all.dtype().size_bytes());
    let entry = |bytes| Ok(HostRef::from_bytes(bytes, &shape.dims()[1..], all.dtype())?);
    all.as_bytes().chunks_exact(bytes).map(entry).collect()
}
