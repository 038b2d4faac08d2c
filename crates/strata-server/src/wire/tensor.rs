//! Tensors from outside: bytes or numbers with a shape, dense or sparse, into what a loss reads.

use strata_engine::api::{LossInput, LossValues};

use crate::wire::budget::Budget;

/// Row pointers and column indices of a sparse matrix in CSR layout.
pub struct CsrIndices {
    /// `[rows + 1]`.
    pub row_offsets: Vec<i64>,
    /// `[values]`.
    pub columns: Vec<i64>,
}

/// Little-endian f32 values.
///
/// # Errors
/// If `bytes` is not a whole number of them.
pub fn f32_values(bytes: &[u8]) -> Result<Vec<f32>, String> {
    let (values, rest) = bytes.as_chunks::<4>();
    match rest {
        [] => Ok(values.iter().map(|v| f32::from_le_bytes(*v)).collect()),
        _ => Err(format!("{} bytes are not a whole number of float32 values", bytes.len())),
    }
}

/// Little-endian i64 values.
///
/// # Errors
/// If `bytes` is not a whole number of them.
pub fn i64_values(bytes: &[u8]) -> Result<Vec<i64>, String> {
    let (values, rest) = bytes.as_chunks::<8>();
    match rest {
        [] => Ok(values.iter().map(|v| i64::from_le_bytes(*v)).collect()),
        _ => Err(format!("{} bytes are not a whole number of int64 values", bytes.len())),
    }
}

/// Appends little-endian i32 token ids to `tokens`.
///
/// # Errors
/// If `bytes` is not a whole number of them.
pub fn append_i32_tokens(bytes: &[u8], tokens: &mut Vec<i64>) -> Result<(), String> {
    let (values, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!("{} bytes are not a whole number of int32 tokens", bytes.len()));
    }
    tokens.extend(values.iter().map(|v| i64::from(i32::from_le_bytes(*v))));
    Ok(())
}

/// Puts values and shape together; an empty shape means one dimension. Cells that a sparse tensor does not list are 0, and count.
///
/// # Errors
/// If the shape is impossible, does not fit the values, or goes beyond the budget.
pub fn loss_input(values: LossValues, shape: &[i64], sparse: Option<CsrIndices>, budget: &Budget) -> Result<LossInput, String> {
    let num_values = match &values {
        LossValues::F32(v) => v.len(),
        LossValues::I64(v) => v.len(),
    };
    if shape.len() > 2 {
        return Err(format!("a shape of {} dimensions is none that a loss reads, which are 1 and 2", shape.len()));
    }
    let extents = match (shape, &sparse) {
        ([], None) => vec![num_values],
        _ => shape
            .iter()
            .map(|&extent| usize::try_from(extent).map_err(|_| format!("shape {shape:?} has a negative extent")))
            .collect::<Result<Vec<usize>, String>>()?,
    };
    let num_elements = extents.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
    let num_elements = num_elements.ok_or_else(|| format!("shape {shape:?} overflows"))?;
    let values = match sparse {
        None if num_values == num_elements => values,
        None => return Err(format!("{num_values} values do not fill shape {shape:?}")),
        Some(indices) => {
            let [rows, columns] = extents[..] else {
                return Err(format!("a sparse tensor needs a shape of two dimensions, not {shape:?}"));
            };
            // What is listed is small beside what it becomes, and what it becomes is taken before it is there.
            budget.take_values::<usize>(num_values)?;
            let cells = csr_cells(&indices, rows, columns, num_values)?;
            let dense = match values {
                LossValues::F32(v) => {
                    budget.take_values::<f32>(num_elements)?;
                    LossValues::F32(scatter(&v, &cells, num_elements))
                }
                LossValues::I64(v) => {
                    budget.take_values::<i64>(num_elements)?;
                    LossValues::I64(scatter(&v, &cells, num_elements))
                }
            };
            budget.give_back(num_values * size_of::<usize>());
            dense
        }
    };
    Ok(LossInput { shape: extents, values })
}

fn scatter<T: Copy + Default>(values: &[T], cells: &[usize], num_elements: usize) -> Vec<T> {
    let mut dense = vec![T::default(); num_elements];
    for (&value, &cell) in values.iter().zip(cells) {
        dense[cell] = value;
    }
    dense
}

/// The flat index of each listed value.
fn csr_cells(indices: &CsrIndices, rows: usize, columns: usize, num_values: usize) -> Result<Vec<usize>, String> {
    if indices.columns.len() != num_values {
        return Err(format!("{num_values} sparse values have {} column indices", indices.columns.len()));
    }
    if indices.row_offsets.len().checked_sub(1) != Some(rows) {
        return Err(format!("{rows} rows need {} row pointers, not {}", rows as u128 + 1, indices.row_offsets.len()));
    }
    let is_tiling = indices.row_offsets.first() == Some(&0)
        && indices.row_offsets.is_sorted()
        && indices.row_offsets.last().is_some_and(|&last| usize::try_from(last) == Ok(num_values));
    if !is_tiling {
        return Err(format!("row pointers must rise from 0 to {num_values}, the number of values"));
    }
    let mut cells = Vec::with_capacity(num_values);
    for (row, bounds) in indices.row_offsets.windows(2).enumerate() {
        let listed = &indices.columns[bounds[0] as usize..bounds[1] as usize];
        for &column in listed {
            match usize::try_from(column) {
                Ok(column) if column < columns => cells.push(row * columns + column),
                _ => return Err(format!("column index {column} in row {row} is outside 0..{columns}")),
            }
        }
        if !listed.is_sorted_by(|a, b| a < b) {
            let mut listed = listed.to_vec();
            listed.sort_unstable();
            if let Some(twice) = listed.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(format!("row {row} has column index {} twice", twice[0]));
            }
        }
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::{CsrIndices, append_i32_tokens, f32_values, i64_values};
    use strata_engine::api::{LossInput, LossValues};

    /// With room for a hundred integers.
    fn loss_input(values: LossValues, shape: &[i64], sparse: Option<CsrIndices>) -> Result<LossInput, String> {
        crate::tests::with_budget(800, |budget| super::loss_input(values, shape, sparse, budget))
    }

    fn csr(row_offsets: &[i64], columns: &[i64]) -> Option<CsrIndices> {
        Some(CsrIndices { row_offsets: row_offsets.to_vec(), columns: columns.to_vec() })
    }

    #[test]
    fn an_empty_shape_is_one_dimension() {
        let input = loss_input(LossValues::F32(vec![1.0, 2.0]), &[], None).unwrap();
        assert_eq!(input.shape, [2]);
    }

    #[test]
    fn a_sparse_tensor_is_filled_with_zeros() {
        let values = LossValues::I64(vec![7, 8, 9]);
        let input = loss_input(values, &[3, 2], csr(&[0, 1, 1, 3], &[1, 0, 1])).unwrap();
        let LossValues::I64(dense) = input.values else { panic!("dtype is kept") };
        assert_eq!((input.shape, dense), (vec![3, 2], vec![0, 7, 0, 0, 8, 9]));
    }

    #[test]
    fn columns_of_a_row_come_in_any_order_and_once() {
        let of = |columns: &[i64]| loss_input(LossValues::F32(vec![1.0, 2.0, 3.0]), &[1, 4], csr(&[0, 3], columns));
        let LossValues::F32(dense) = of(&[3, 0, 2]).unwrap().values else { panic!("dtype is kept") };
        assert_eq!(dense, [2.0, 0.0, 3.0, 1.0]);
        for (columns, twice) in [([1, 1, 2], 1), ([2, 0, 2], 2)] {
            assert!(of(&columns).unwrap_err().contains(&format!("row 0 has column index {twice} twice")));
        }
    }

    #[test]
    fn shapes_and_indices_that_lie_are_refused() {
        let values = || LossValues::I64(vec![7, 8]);
        let refused = |shape: &[i64], sparse| loss_input(values(), shape, sparse).unwrap_err();
        assert!(refused(&[3], None).contains("do not fill"));
        assert!(refused(&[-2], None).contains("negative"));
        assert!(refused(&[1, 1, 2], None).contains("dimensions"));
        assert!(refused(&[i64::MAX, i64::MAX], None).contains("overflows"));
        assert!(refused(&[51, 2], csr(&[vec![0; 51], vec![2]].concat(), &[0, 1])).contains("800 bytes"));
        assert!(refused(&[2], csr(&[0, 2], &[0, 0])).contains("two dimensions"));
        assert!(refused(&[2, 2], csr(&[0, 2], &[0, 0])).contains("row pointers"));
        assert!(refused(&[2, 2], csr(&[0, 3, 2], &[0, 0])).contains("must rise"));
        assert!(refused(&[2, 2], csr(&[0, -1, 2], &[0, 0])).contains("must rise"));
        assert!(refused(&[2, 2], csr(&[0, 1, 2], &[0, 2])).contains("outside 0..2"));
        assert!(refused(&[2, 2], csr(&[0, 1, 2], &[0, -1])).contains("outside 0..2"));
        assert!(refused(&[2, 2], csr(&[0, 1, 2], &[0])).contains("column indices"));
        assert!(refused(&[0, 2], csr(&[], &[0, 1])).contains("row pointers"));
    }

    #[test]
    fn bytes_that_are_no_whole_values_are_refused() {
        assert!(f32_values(&[0; 5]).unwrap_err().contains("5 bytes"));
        assert!(i64_values(&[0; 12]).unwrap_err().contains("12 bytes"));
        assert!(append_i32_tokens(&[0; 3], &mut Vec::new()).is_err());
        assert_eq!(i64_values(&(-1i64).to_le_bytes()).unwrap(), [-1]);
    }
}
