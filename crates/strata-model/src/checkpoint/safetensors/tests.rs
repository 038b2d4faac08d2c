use std::collections::HashMap;
use std::fs;

use safetensors::tensor::TensorView;
use serde_json::json;
use strata_tensor::DType;

use super::*;
use crate::checkpoint::CheckpointReader;

/// A safetensors file of f32 tensors, each filled with the index of its place in the list.
fn file_of(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().enumerate().map(|(i, (_, shape))| (i as f32).to_le_bytes().repeat(shape.iter().product())).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape), bytes)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// Writes files into a directory of their own.
fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn index(entries: &[(&str, &str)]) -> Vec<u8> {
    let weight_map: HashMap<_, _> = entries.iter().copied().collect();
    json!({"metadata": {"total_size": 8}, "weight_map": weight_map}).to_string().into_bytes()
}

fn open_error(dir: &tempfile::TempDir) -> String {
    Checkpoint::open(dir.path()).err().expect("the checkpoint is broken").to_string()
}

#[test]
fn a_single_file_is_opened_by_name() {
    let dir = directory(&[(SINGLE_FILE, &file_of(&[("a", &[2]), ("b", &[3, 2])]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    let b = checkpoint.tensor("b").unwrap().unwrap();
    assert_eq!((b.shape, b.dtype), (&[3, 2][..], SourceDType::F32));
    assert_eq!(b.read(DType::F32).unwrap().as_ref().to_f32_vec(), [1.0; 6]);
    assert!(checkpoint.tensor("c").unwrap().is_none());
}

#[test]
fn parts_of_a_composite_are_renamed_unless_the_name_is_taken() {
    let dir = directory(&[(SINGLE_FILE, &file_of(&[("model.a", &[2]), ("model.part.b", &[3]), ("part.c", &[1])]))]);
    let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.rename("model.part.", "model.").unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["model.a", "model.b", "part.c"]);
    assert_eq!(checkpoint.tensor("model.b").unwrap().unwrap().read(DType::F32).unwrap().as_ref().to_f32_vec(), [1.0; 3]);
    let error = checkpoint.rename("part.c", "model.a").unwrap_err().to_string();
    assert!(error.contains("tensors part.c and model.a are one parameter"), "{error}");
}

#[test]
fn shards_are_one_checkpoint() {
    let dir = directory(&[
        ("m-1.safetensors", &file_of(&[("a", &[2])])),
        ("m-2.safetensors", &file_of(&[("b", &[3]), ("c", &[1])])),
        (INDEX_FILE, &index(&[("a", "m-1.safetensors"), ("b", "m-2.safetensors"), ("c", "m-2.safetensors")])),
    ]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(checkpoint.tensor("c").unwrap().unwrap().read(DType::F32).unwrap().as_ref().to_f32_vec(), [1.0]);
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let shard = file_of(&[("a", &[2]), ("b", &[1])]);
    let lacking = directory(&[
        ("m.safetensors", &shard),
        (INDEX_FILE, &index(&[("a", "m.safetensors"), ("b", "m.safetensors"), ("c", "m.safetensors")])),
    ]);
    assert!(open_error(&lacking).contains("lacks tensors that it holds according to model.safetensors.index.json: c"));
    let unlisted = directory(&[("m.safetensors", &shard), (INDEX_FILE, &index(&[("a", "m.safetensors")]))]);
    assert!(open_error(&unlisted).contains("holds tensors that it does not according to model.safetensors.index.json: b"));
    let twice = directory(&[
        ("m.safetensors", &shard),
        ("n.safetensors", &file_of(&[("a", &[2])])),
        (INDEX_FILE, &index(&[("a", "m.safetensors"), ("b", "m.safetensors"), ("d", "n.safetensors")])),
    ]);
    assert!(open_error(&twice).contains("tensor a is also in another shard"));
    let gone = directory(&[(INDEX_FILE, &index(&[("a", "m.safetensors")]))]);
    assert!(open_error(&gone).contains("m.safetensors"));
}

#[test]
fn an_index_cannot_name_files_elsewhere() {
    for file in ["../m.safetensors", "/etc/m.safetensors", "x/m.safetensors", "..\\m.safetensors", ".safetensors", "m.bin", ""]
    {
        let dir = directory(&[(INDEX_FILE, &index(&[("a", file)]))]);
        assert!(open_error(&dir).contains("not a plain *.safetensors file name"), "{file}");
    }
    assert!(open_error(&directory(&[(INDEX_FILE, b"{\"weight_map\": {}}")])).contains("0 shards"));
    assert!(open_error(&directory(&[(INDEX_FILE, b"{}")])).contains("weight_map"));
}

#[test]
fn truncated_and_foreign_files_are_refused() {
    let whole = file_of(&[("a", &[2])]);
    for bytes in [&whole[..whole.len() - 1], &whole[..20], &whole[..3], b"", b"PK\x03\x04 a zip archive, perhaps of pickles"] {
        let dir = directory(&[(SINGLE_FILE, bytes)]);
        assert!(open_error(&dir).contains(SINGLE_FILE), "{} bytes", bytes.len());
    }
    assert!(open_error(&directory(&[])).contains("holds neither"));
    // How long it should be, and which tensor it is.
    let (len, error_of) = (whole.len(), |bytes: &[u8]| open_error(&directory(&[(SINGLE_FILE, bytes)])));
    assert!(error_of(&whole[..len - 1]).contains(&format!("it has {} bytes where its header says {len}", len - 1)));
    assert!(
        error_of(&[&whole[..], b"more"].concat()).contains(&format!("it has {} bytes where its header says {len}", len + 4))
    );
    let of_tensors = |entries: &str| [&(entries.len() as u64).to_le_bytes(), entries.as_bytes(), &[0; 16]].concat();
    let misfit = of_tensors(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[3],"data_offsets":[8,16]}}"#,
    );
    assert!(error_of(&misfit).contains("tensor b of F32 [3] is 12 bytes, and lies in 8..16"), "{}", error_of(&misfit));
}

/// A file whose header lists this many tensors without bytes.
fn file_of_empty_tensors(count: usize) -> Vec<u8> {
    let entries: Vec<String> =
        (0..count).map(|i| format!(r#""t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#)).collect();
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

#[test]
fn headers_that_would_take_much_memory_are_refused_unread() {
    let open_error = |bytes: &[u8]| open_error(&directory(&[(SINGLE_FILE, bytes)]));
    let whole = directory(&[(SINGLE_FILE, &file_of_empty_tensors(OF_MODEL.tensors))]);
    assert_eq!(Checkpoint::open(whole.path()).unwrap().names().count(), OF_MODEL.tensors);
    assert!(open_error(&file_of_empty_tensors(OF_MODEL.tensors + 2000)).contains("tensors, more than 131072"));
    assert!(open_error(&file_of_empty_tensors(OF_MODEL.tensors + 1)).contains("131073 tensors, more than 131072"));
    assert!(open_error(&file_of_empty_tensors(1_000_000)).contains("is longer than 16777216"));
    // What a client may have sent is held to less.
    let by_itself = |count: usize| {
        let dir = directory(&[("adapter.safetensors", &file_of_empty_tensors(count))]);
        Checkpoint::open_file(&dir.path().join("adapter.safetensors"))
            .map(|file| file.names().count())
            .map_err(|e| e.to_string())
    };
    assert_eq!(by_itself(32_768), Ok(32_768));
    assert!(by_itself(32_769).unwrap_err().contains("32769 tensors, more than 32768"));
    assert!(by_itself(131_072).unwrap_err().contains("more than 32768"));
    let announced = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    assert!(open_error(&announced).contains("header of 18446744073709551615 bytes"));
    // Metadata are entries too.
    let metadata: HashMap<String, &str> = (0..600_000).map(|i| (i.to_string(), "")).collect();
    let header = json!({"__metadata__": metadata}).to_string();
    assert!(open_error(&[&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).contains("more than 131072"));
    let entries: HashMap<String, &str> = (0..ALL_TENSORS_MAX + 5000).map(|i| (i.to_string(), "m.safetensors")).collect();
    let index = json!({"weight_map": entries}).to_string();
    assert!(super::read_index(directory(&[(INDEX_FILE, index.as_bytes())]).path().join(INDEX_FILE).as_path()).is_err());
}

#[test]
fn what_a_header_says_is_quoted_in_a_few_words() {
    let refused = |entry: &str| {
        let header = format!("{{{entry}}}");
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
        open_error(&directory(&[(SINGLE_FILE, &bytes)]))
    };
    let (long, ones) = ("x".repeat(1 << 20), "1,".repeat(1 << 20));
    for (name, dtype, shape, expected) in [
        (&long[..], "F32", "2", "has a name of 1048576 bytes; at most 512 are read"),
        ("a\\u001b[31m", "F32", "2", "tensor \"a\\u{1b}[31m\" has a control character in its name"),
        ("a", "F32", &format!("{ones}2"), "tensor \"a\" has 1048577 dimensions; at most 8 are read"),
        ("a", "F32", &format!("{ones}3"), "tensor a of F32 [1, 1,"),
        ("a", &long, "2", "unknown variant `xxx"),
    ] {
        let error = refused(&format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,8]}}"#));
        assert!(error.contains(expected) && error.len() < 2000, "{} bytes: {}", error.len(), cut(error.clone(), 300));
    }
}

#[test]
fn several_files_hold_more_than_one_but_not_all_that_there_could_be() {
    let shard = |first: usize| {
        let entry = |i: usize| format!(r#""t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
        let header = format!("{{{}}}", (first..first + OF_MODEL.tensors).map(entry).collect::<Vec<_>>().join(","));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
    };
    let open = |shards: usize| {
        let files: Vec<(String, Vec<u8>)> =
            (0..shards).map(|s| (format!("m{s}.safetensors"), shard(s * OF_MODEL.tensors))).collect();
        let of = |i: usize| (format!("t{i}"), format!("m{}.safetensors", i / OF_MODEL.tensors));
        let index = json!({"weight_map": (0..shards * OF_MODEL.tensors).map(of).collect::<HashMap<_, _>>()}).to_string();
        let mut all: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (&name[..], &bytes[..])).collect();
        all.push((INDEX_FILE, index.as_bytes()));
        Checkpoint::open(directory(&all).path()).map(|checkpoint| checkpoint.names().count()).map_err(|e| e.to_string())
    };
    assert_eq!(open(2), Ok(2 * OF_MODEL.tensors));
    assert!(open(3).unwrap_err().contains("more than 262144"));
}

#[test]
#[cfg(unix)]
fn what_is_no_file_is_refused_by_name_wherever_a_file_of_a_model_is_expected() {
    for name in [
        SINGLE_FILE,
        INDEX_FILE,
        "m.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let make: [&dyn Fn(&Path); 2] =
            [&|path| rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RWXU).unwrap(), &|path| {
                fs::create_dir(path).unwrap()
            }];
        for make in make {
            let dir = directory(&[("config.json", &b"{}"[..])]);
            if name == "m.safetensors" {
                fs::write(dir.path().join(INDEX_FILE), index(&[("a", name)])).unwrap();
            }
            let _ = fs::remove_file(dir.path().join(name));
            make(&dir.path().join(name));
            let source = crate::ModelSource::Directory(dir.path().into());
            let error = match name {
                "config.json" => source.config_json().err(),
                "generation_config.json" => source.generation_config_json().err(),
                "tokenizer.json" => crate::Tokenizer::load_if_exists(&source).err(),
                "tokenizer_config.json" => crate::ChatTemplate::load(&source).err(),
                _ => source.checkpoint().err(),
            };
            let error = error.expect("it is no file").to_string();
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
        }
    }
}

#[test]
fn a_dtype_that_cannot_be_read_is_an_error_only_where_it_is_asked_for() {
    let view = TensorView::new(Dtype::I64, vec![1], &[0; 8]).unwrap();
    let dir = directory(&[(SINGLE_FILE, &safetensors::serialize([("position_ids", view)], None).unwrap())]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = checkpoint.tensor("position_ids").err().unwrap().to_string();
    assert!(error.contains("position_ids has dtype I64"), "{error}");
}

#[test]
fn the_reader_names_everything_that_is_wrong() {
    let dir =
        directory(&[(SINGLE_FILE, &file_of(&[("a", &[2]), ("b", &[1]), ("c", &[3]), ("d", &[1]), ("lm_head.weight", &[1])]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut reader = CheckpointReader::new(&checkpoint);
    assert!(reader.require("a", &[2]).is_some());
    assert!(reader.require("b", &[2, 3]).is_none());
    assert!(reader.require("x", &[1]).is_none());
    assert!(reader.require("y", &[1]).is_none());
    // What two parameters have in common is told once.
    assert!(reader.require("b", &[2, 3]).is_none() && reader.require("x", &[1]).is_none());
    assert!(reader.contains("lm_head.weight"));
    reader.ignore("lm_head.weight");
    let error = reader.finish().unwrap_err().to_string();
    assert!(error.contains(": tensor b has shape [1], expected [2, 3]; missing tensors: x, y; "), "{error}");
    assert!(error.ends_with("no use for: c, d"), "{error}");
}

#[test]
fn a_reader_that_used_everything_is_content() {
    let dir = directory(&[(SINGLE_FILE, &file_of(&[("a", &[2])]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut reader = CheckpointReader::new(&checkpoint);
    reader.require("a", &[2]).unwrap();
    reader.finish().unwrap();
}

#[test]
fn a_message_names_the_first_tensors_and_counts_the_others() {
    let names: Vec<String> = (0..40).map(|i| format!("t{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(list_names(&names[..2]), "t0, t1");
    assert!(list_names(&names[..32]).ends_with("t30, t31"));
    assert!(list_names(&names).ends_with("t30, t31 and 8 more"));
}
