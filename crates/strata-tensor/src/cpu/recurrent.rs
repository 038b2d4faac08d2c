//! States of sequences in layers of gated delta rule, in host memory.
//!
//! A slot is, all f32: the last `kernel - 1` inputs of the convolution, `[kernel - 1, conv_width]`, oldest first; for each key head the keys of the current
//! chunk as columns, `[k_dim, DELTA_CHUNK]`, so that a new key or query is multiplied with them as with a weight; and for each value head the state at the start of the
//! chunk, `[k_dim, v_dim]`, the corrected values of the chunk, `[DELTA_CHUNK, v_dim]`, and the sums of the logarithms of decay from its start. Rows of values are filled up to whole
//! vectors.

use std::ops::Range;

use super::memory::Buffer;
use super::packed::LANES;
use crate::{DELTA_CHUNK as CHUNK, DeltaGeometry, Error, Result};

/// Where the parts of a slot begin, in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    tail_len: usize,
    keys_len: usize,
    state_len: usize,
    values_len: usize,
    k_heads: usize,
    v_heads: usize,
}

impl SlotLayout {
    pub(crate) fn new(g: &DeltaGeometry) -> Self {
        let width = g.v_dim.next_multiple_of(LANES);
        SlotLayout {
            tail_len: (g.kernel - 1) * g.conv_width(),
            keys_len: g.k_dim * CHUNK,
            state_len: g.k_dim * width,
            values_len: CHUNK * width,
            k_heads: g.k_heads,
            v_heads: g.v_heads,
        }
    }

    /// Numbers of a slot.
    pub(crate) fn len(&self) -> usize {
        self.heads(0..self.v_heads).end.next_multiple_of(LANES)
    }

    /// The last inputs of the convolution.
    pub(crate) fn tail(&self) -> Range<usize> {
        0..self.tail_len
    }

    /// The keys of a key head.
    pub(crate) fn keys(&self, k_head: usize) -> Range<usize> {
        let first = self.tail_len.next_multiple_of(LANES) + k_head * self.keys_len;
        first..first + self.keys_len
    }

    /// What belongs to some value heads: of one after another its state, values and sums.
    pub(crate) fn heads(&self, v_heads: Range<usize>) -> Range<usize> {
        let first = self.keys(self.k_heads).start;
        first + v_heads.start * self.head_len()..first + v_heads.end * self.head_len()
    }

    /// Numbers of a value head.
    pub(crate) fn head_len(&self) -> usize {
        self.state_len + self.values_len + CHUNK
    }

    /// State, values and sums of a value head.
    pub(crate) fn parts<'a>(&self, head: &'a mut [f32]) -> [&'a mut [f32]; 3] {
        let (state, rest) = head.split_at_mut(self.state_len);
        let (values, sums) = rest.split_at_mut(self.values_len);
        [state, values, sums]
    }
}

/// Slots of one layer.
pub(crate) struct RecurrentStates {
    num_slots: usize,
    pub(crate) layout: SlotLayout,
    buffer: Buffer,
}

impl RecurrentStates {
    /// Room for `num_slots` slots. Memory is touched only as slots are used.
    pub(crate) fn zeroed(num_slots: usize, g: &DeltaGeometry) -> Result<Self> {
        let layout = SlotLayout::new(g);
        let buffer = Buffer::zeroed(num_slots.saturating_mul(layout.len() * size_of::<f32>()))?;
        Ok(RecurrentStates { num_slots, layout, buffer })
    }

    /// All slots.
    pub(crate) fn numbers_mut(&mut self) -> &mut [f32] {
        self.buffer.numbers_mut(self.num_slots * self.layout.len())
    }

    /// Copies slot `from` over slot `to`.
    pub(crate) fn copy_slot(&mut self, from: u32, to: u32) -> Result<()> {
        let (from, to) = (self.slot_bytes(from)?, self.slot_bytes(to)?);
        self.buffer.copy_within(from, to.start);
        Ok(())
    }

    /// Gives the memory of free slots back to the system.
    pub(crate) fn release_slots(&mut self, free: &[u32]) -> Result<()> {
        for &slot in free {
            let range = self.slot_bytes(slot)?;
            self.buffer.release_range(range);
        }
        Ok(())
    }

    fn slot_bytes(&self, slot: u32) -> Result<Range<usize>> {
        let (index, size) = (slot as usize, self.num_slots);
        if index >= size {
            return Err(Error::Index { op: "recurrent states", what: "slots", index, size });
        }
        let bytes = self.layout.len() * size_of::<f32>();
        Ok(index * bytes..(index + 1) * bytes)
    }
}
