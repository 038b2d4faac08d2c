//! Steps that answer some of their rows.

use super::*;

#[test]
fn what_is_asked_of_some_rows_is_what_is_asked_of_all_and_leaves_the_same_in_the_cache() {
    const LENGTHS: [usize; 3] = [40, 7, 21];
    for (config, dtype) in
        families().into_iter().chain([config()]).flat_map(|c| [DType::F32, DType::BF16].map(|d| (c.clone(), d)))
    {
        let context = format!("{dtype} {:?}", config.family);
        let model = Model::random(backend(), config, 7, dtype).unwrap();
        let ((_, first), (_, last)) = (adapter(&model, 4), adapter(&model, 2));
        let adapters = [Some(&*first), None, Some(&*last)];
        let steps = |rows: &[usize]| {
            let mut cache = model.new_kv_cache(3, 3).unwrap();
            let mut step = |past: &dyn Fn(usize) -> usize, tokens_of: &dyn Fn(usize) -> Vec<u32>, rows: &[usize]| {
                let mut batch = PackedBatch::new();
                for (s, adapter) in adapters.into_iter().enumerate() {
                    batch.begin_group(adapter);
                    batch.push_cached(&tokens_of(s), past(s), 50, Held { pages: vec![s as u32], state: Some(s as u32) });
                }
                let replies = model.step(&batch, &mut cache, rows, &vec![whole_row(); rows.len()]).unwrap();
                replies.into_iter().map(|reply| bits(&reply.unwrap().logprobs)).collect::<Vec<_>>()
            };
            let prefilled = step(&|_| 0, &|s| tokens(LENGTHS[s], s), rows);
            (prefilled, step(&|s| LENGTHS[s], &|s| vec![s as u32 + 5], &[0, 1, 2]))
        };
        let (all, decoded) = steps(&(0..LENGTHS.iter().sum()).collect::<Vec<_>>());
        for rows in [&[][..], &[67], &[39, 46, 67], &[0, 39, 39, 40], &[41, 50, 50, 50]] {
            let (some, then) = steps(rows);
            assert!(rows.iter().zip(&some).all(|(&row, reply)| *reply == all[row]), "rows {rows:?}, {context}");
            assert!(some.len() == rows.len() && then == decoded, "the cache after rows {rows:?}, {context}");
        }
    }
}
