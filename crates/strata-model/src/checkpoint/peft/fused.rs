//! Pairs of parameters that have all experts of a layer, as PEFT has them (`ParamWrapper`): A is `[experts * rank, in]`, one expert after another, and B is
//! `[rows, rank * experts]`, with the expert as its last axis. Whichever way round transformers has the parameter itself, they lie so.
//!
//! Projections that are fused share one A. What has an A each is the same as a pair whose A has all of them, one after another for each expert, and whose B is zero where the rows of one meet
//! the A of another.

use strata_tensor::{DType, HostRef, HostTensor};
use strata_values::FusedLie;

use crate::lora::FusedRows;

/// One projection of those that are fused, in our layout.
pub(super) struct FusedPart<'a> {
    pub(super) rows: FusedRows,
    /// `[experts, rank, in]` or, of B, `[experts, rank, out]`.
    pub(super) values: HostRef<'a>,
}

/// B of some rows in our layout, `[experts, rank, out]`, of the B of a fused parameter, f32. Moves bits, computes nothing.
pub(super) fn b_of_rows(fused: HostRef<'_>, rows: &FusedRows, [experts, rank, out]: [usize; 3]) -> HostTensor {
    let mut b = HostTensor::zeros(&[experts, rank, out], DType::F32);
    lie(rows, 0, rank).take(fused.as_bytes(), [experts, rank, out], b.bytes_mut());
    b
}

/// The A of a fused parameter, `[experts * rank, in]`, f32, whose rank is that of all parts together.
pub(super) fn join_a(parts: &[FusedPart<'_>]) -> HostTensor {
    let [experts, _, width] = parts[0].axes();
    let rank: usize = parts.iter().map(|part| part.axes()[1]).sum();
    let mut a = HostTensor::zeros(&[experts * rank, width], DType::F32);
    let mut rest = a.bytes_mut();
    for expert in 0..experts {
        for part in parts {
            let size = part.values.as_bytes().len() / experts;
            let (to, after) = rest.split_at_mut(size);
            to.copy_from_slice(&part.values.as_bytes()[expert * size..][..size]);
            rest = after;
        }
    }
    a
}

/// The B of a fused parameter, `[rows, rank * experts]`, f32, whose rank is that of all parts together: zero where a part's rows meet another's rank.
pub(super) fn join_b(parts: &[FusedPart<'_>]) -> HostTensor {
    let (experts, rows) = (parts[0].axes()[0], parts[0].rows.rows);
    let rank: usize = parts.iter().map(|part| part.axes()[1]).sum();
    let mut b = HostTensor::zeros(&[rows, rank * experts], DType::F32);
    let mut first = 0;
    for part in parts {
        lie(&part.rows, first, rank).put(part.values.as_bytes(), part.axes(), b.bytes_mut());
        first += part.axes()[1];
    }
    b
}

fn lie(rows: &FusedRows, first_rank: usize, ranks: usize) -> FusedLie {
    FusedLie { first_row: rows.first, row_step: rows.step, first_rank, ranks }
}

impl FusedPart<'_> {
    fn axes(&self) -> [usize; 3] {
        self.values.shape().dims().try_into().expect("pairs of experts have three axes")
    }
}
