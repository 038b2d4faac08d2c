//! What a decode step fetches ahead.

use super::*;
use crate::cpu::attention;
use crate::cpu::attention::ahead::Reads;

#[test]
fn what_is_fetched_is_what_is_read_in_the_order_in_which_it_is() {
    for (dtype, window) in DTYPES.into_iter().flat_map(|dtype| [None, Some(100)].map(|window| (dtype, window))) {
        match dtype {
            DType::F32 => check_areas::<f32>(window),
            DType::BF16 => check_areas::<bf16>(window),
        }
    }
}

fn check_areas<T: Element + attention::Plain>(window: Option<usize>) {
    let g = Layer::new((2, 2, 80), window, false).g;
    let isa = Isa::detect();
    let backend = CpuBackend::with_isa(isa, 1);
    let mut pages = backend.kv_pages(20, g.kv_layout(), T::DTYPE).unwrap();
    let pages = pages.storage.get_mut::<attention::KvPages>().unwrap();
    // SAFETY: as in `write_pages`.
    let words = unsafe { std::slice::from_raw_parts(pages.buffer.as_ptr().cast::<u32>(), pages.buffer.len() / 4) };
    let per_step = 4 / size_of::<T>();
    let own: Vec<u32> = (0..20).rev().collect();
    for past in [0, 15, 63, 64, 140, 511, 512, 1000] {
        let span = AttentionSpan { tokens: 0..1, past, pages: &own };
        let forward = attention::Forward::<T> {
            isa,
            kernel: attention::TileKernel::new(Arithmetic { isa, numerics: crate::Numerics::Fast }, T::DTYPE),
            g: &g,
            q: &[],
            sinks: None,
            sink_value: &[],
            words,
            out: attention::SharedMut::new(&mut []),
            log_normalizers: attention::SharedMut::new(&mut []),
        };
        // What several tiles read is gone through to its end, and no further.
        let tiles = [0, 1].map(|kv_head| attention::QueryTile { span: &span, kv_head, positions: 0..1 });
        let mut all = Vec::new();
        for tile in &tiles {
            tile.splits(&g).for_each(|split| forward.areas(tile, split, &mut all));
        }
        let lines: usize = all.iter().map(attention::Pieces::lines).sum();
        for (left, is_done) in [(1, false), (0, true)] {
            let mut ahead = attention::Ahead::of_tiles(&forward, &tiles);
            if let Some(behind_lead) = lines.checked_sub(attention::ahead::LEAD_LINES + left) {
                ahead.fetch(behind_lead);
                assert_eq!(ahead.is_done(), is_done, "{past} tokens, window {window:?}, {left} of {lines} lines left");
            }
        }
        for kv_head in 0..2 {
            let tile = attention::QueryTile { span: &span, kv_head, positions: 0..1 };
            let visible = tile.visible(&g, 0);
            let mut expected = Vec::new();
            for split in tile.splits(&g) {
                let positions: Vec<usize> = (split * attention::SPLIT_KEYS..(split + 1) * attention::SPLIT_KEYS)
                    .filter(|position| (visible.start / KV_PAGE_TOKENS * KV_PAGE_TOKENS..visible.end).contains(position))
                    .collect();
                let head =
                    |position: usize| attention::head_words(&g, per_step, own[position / KV_PAGE_TOKENS] as usize, kv_head);
                let keys = |&position: &usize| {
                    let word = move |step: usize| head(position).0 + step * KV_PAGE_TOKENS + position % KV_PAGE_TOKENS;
                    (0..80 / per_step).map(word)
                };
                // Two panels, of 64 columns and of 16.
                let values = |&position: &usize| {
                    let (step, steps) = (position % KV_PAGE_TOKENS / per_step, KV_PAGE_TOKENS / per_step);
                    let first = head(position).1;
                    (0..64).map(move |i| first + step * 64 + i).chain((0..16).map(move |i| first + 64 * steps + step * 16 + i))
                };
                let mut lines: Vec<usize> = positions.iter().flat_map(keys).map(|word| word * 4 / 64).collect();
                expected.push(lines.clone());
                lines = positions.iter().flat_map(values).map(|word| word * 4 / 64).collect();
                expected.push(lines);
            }
            expected.iter_mut().for_each(|lines| {
                lines.sort_unstable();
                lines.dedup();
            });
            let start = words.as_ptr().addr();
            let mut areas = Vec::new();
            tile.splits(&g).for_each(|split| forward.areas(&tile, split, &mut areas));
            let fetched = areas
                .into_iter()
                .flat_map(|pieces| pieces.each())
                .flat_map(|bytes| bytes.step_by(64))
                .map(|at| (at - start) / 64);
            let mut fetched: Vec<usize> = fetched.collect();
            // Splits one after another, in each the keys first.
            let mut rest = &mut fetched[..];
            for lines in expected {
                let (these, others) = rest.split_at_mut(lines.len());
                these.sort_unstable();
                assert_eq!(these, lines, "{past} tokens, window {window:?}");
                rest = others;
            }
            assert!(rest.is_empty());
        }
    }
}
