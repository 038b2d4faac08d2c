//! The B of a parameter that fuses projections of experts, as PEFT has it: `[rows, rank * experts]`, with the expert as its last axis. All of it is f32, and its bits are moved.

/// Where the B of one of the projections, `[experts, rank, out]`, lies in there.
#[derive(Clone, Copy, Debug)]
pub struct FusedLie {
    /// Row of its first output.
    pub first_row: usize,
    /// Rows from an output to the next.
    pub row_step: usize,
    /// Place of its first rank.
    pub first_rank: usize,
    /// Ranks of all projections together.
    pub ranks: usize,
}

impl FusedLie {
    /// Copies it, `axes: [experts, rank, out]`, out of a fused `from`.
    ///
    /// # Panics
    /// If `from` or `to` is shorter than the axes say.
    pub fn take(self, from: &[u8], axes: [usize; 3], to: &mut [u8]) {
        let (from, to) = (from.as_chunks::<4>().0, to.as_chunks_mut::<4>().0);
        self.each(axes, |own, fused| to[own] = from[fused]);
    }

    /// Copies it, `axes: [experts, rank, out]`, into a fused `to`.
    ///
    /// # Panics
    /// If `from` or `to` is shorter than the axes say.
    pub fn put(self, from: &[u8], axes: [usize; 3], to: &mut [u8]) {
        let (from, to) = (from.as_chunks::<4>().0, to.as_chunks_mut::<4>().0);
        self.each(axes, |own, fused| to[fused] = from[own]);
    }

    /// Calls `copy` with the place of each of its elements and the place in what is fused.
    fn each(self, [experts, rank, out]: [usize; 3], mut copy: impl FnMut(usize, usize)) {
        for row in 0..out {
            for k in 0..rank {
                let fused = ((self.first_row + row * self.row_step) * self.ranks + self.first_rank + k) * experts;
                // What lies together is written or read together.
                (0..experts).for_each(|expert| copy((expert * rank + k) * out + row, fused + expert));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_that_take_turns_are_put_where_they_are_taken_from() {
        let axes @ [experts, rank, out] = [3, 2, 4];
        let ranks = 2 * rank;
        let number = |i: usize| (i as u32 + 1).to_le_bytes();
        let mut fused = vec![0; 2 * out * ranks * experts * 4];
        for part in 0..2 {
            let lie = FusedLie { first_row: part, row_step: 2, first_rank: part * rank, ranks };
            let own: Vec<u8> = (0..experts * rank * out).flat_map(|i| number(1000 * part + i)).collect();
            lie.put(&own, axes, &mut fused);
            let mut back = vec![0; own.len()];
            lie.take(&fused, axes, &mut back);
            assert_eq!(back, own);
        }
        // By the axes that PEFT gives them.
        let at = |row: usize, k: usize, expert: usize| fused.as_chunks::<4>().0[row * ranks * experts + k * experts + expert];
        for (row, k, expert) in (0..2 * out).flat_map(|row| (0..ranks * experts).map(move |i| (row, i / experts, i % experts)))
        {
            let (part, own_rank) = (row % 2, k.checked_sub(row % 2 * rank).filter(|k| *k < rank));
            let expected = own_rank.map_or([0; 4], |k| number(1000 * part + (expert * rank + k) * out + row / 2));
            assert_eq!(at(row, k, expert), expected, "row {row}, rank {k}, expert {expert}");
        }
    }
}
