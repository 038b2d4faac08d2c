use std::fs;
use std::os::unix::fs::FileExt;

use strata_tensor::testing::RemoteBackend;
use strata_tensor::{CpuBackend, Int4Group, WeightStorage};
use tempfile::TempDir;

use super::super::{Model, Targets};
use crate::{ModelSource, PackedBatch};

use super::*;

const DENSE: WeightStorage = WeightStorage::Dense;

fn cpu() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(Some(2)).unwrap())
}

/// The embedded model in a directory of its own, and one for copies.
fn dirs() -> (TempDir, ModelSource, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let source = ModelSource::Embedded;
    fs::write(dir.path().join("config.json"), &*source.config_json().unwrap()).unwrap();
    fs::write(dir.path().join("model.safetensors"), crate::embedded::weights()).unwrap();
    let own = ModelSource::Directory(dir.path().into());
    (dir, own, tempfile::tempdir().unwrap())
}

fn load(source: &ModelSource, copies: &Path) -> (Model, Option<UnwrittenCopy>) {
    Model::load_copied(cpu(), source, None, DENSE, copies).unwrap()
}

/// The bits of what a model makes of some tokens.
fn bits(model: &Model) -> Vec<u32> {
    let tokens: Vec<u32> = (0..50).map(|i| i * 7 % 270).collect();
    let mut batch = PackedBatch::new();
    batch.push_sequence(&tokens);
    let targets = Targets { ids: tokens.iter().map(|t| (t + 1) % 270).collect(), offsets: (0..=tokens.len()).collect() };
    model.forward(&batch, &targets).unwrap().into_iter().map(f32::to_bits).collect()
}

/// The one copy there is.
fn copy_in(copies: &Path) -> PathBuf {
    let all: Vec<PathBuf> = fs::read_dir(copies).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

#[test]
fn a_second_start_has_the_bits_of_the_first_and_reads_no_weights_of_the_checkpoint() {
    for storage in [WeightStorage::Dense, WeightStorage::Int8, WeightStorage::Int4(Int4Group::Of64)] {
        for dtype in [DType::BF16, DType::F32] {
            let (dir, source, copies) = dirs();
            let load = || Model::load_copied(cpu(), &source, Some(dtype), storage, copies.path()).unwrap();
            let (first, unwritten) = load();
            assert!(unwritten.unwrap().write().unwrap());
            let (second, unwritten) = load();
            assert!(unwritten.is_none(), "the copy is found");
            assert_eq!(bits(&first), bits(&second));
            assert_eq!(first.weight_bytes(), second.weight_bytes());
            let plain = Model::load_stored(cpu(), &source, Some(dtype), storage).unwrap();
            assert_eq!(bits(&plain), bits(&second));
            drop(dir);
        }
    }
}

#[test]
fn a_copy_serves_where_it_lies_and_copied_alike() {
    let (_dir, source, copies) = dirs();
    load(&source, copies.path()).1.unwrap().write().unwrap();
    let file = open_own(&copy_in(copies.path())).unwrap();
    // SAFETY: nobody writes to it in this test.
    let map = Arc::new(unsafe { Mmap::map(&file) }.unwrap());
    let config = source.config().unwrap();
    let plan = crate::architectures::Plan::of(&config);
    let checkpoint = source.checkpoint().unwrap();
    let json = source.config_json().unwrap();
    let backends: [Arc<dyn Backend>; 2] = [cpu(), Arc::new(RemoteBackend::new(CpuBackend::new(Some(2)).unwrap()))];
    let format = DType::BF16.into();
    let mut all = Vec::new();
    for backend in &backends {
        let files = (source.directory().unwrap(), &checkpoint, &*json);
        let copy = PackedCopy::of(copies.path(), files, &plan.declaration, format, &**backend);
        for map in [None, Some(map.clone())] {
            let weights = copy.read_from(&file, map, &**backend, &plan.declaration).unwrap();
            let mut bytes = Vec::new();
            for stack in weights.stacks() {
                match stack {
                    Stack::Matrices(stack) => {
                        backend.read_packed(stack, &mut |piece| bytes.extend_from_slice(piece)).unwrap();
                    }
                    Stack::Tensor(tensor) => {
                        bytes.extend_from_slice(backend.to_host(tensor.as_ref()).unwrap().as_ref().as_bytes());
                    }
                }
            }
            all.push(bytes);
        }
    }
    assert!(all.iter().all(|bytes| *bytes == all[0]));
}

#[test]
fn a_checkpoint_that_was_changed_in_place_is_packed_again() {
    let (dir, source, copies) = dirs();
    let (before, unwritten) = load(&source, copies.path());
    unwritten.unwrap().write().unwrap();
    // One number: of the same size, under the same name and number, and with the times of before.
    let path = dir.path().join("model.safetensors");
    let times = fs::metadata(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    // The number one, of some weight in bf16.
    let at = bytes.len() / 4 * 2;
    bytes[at..at + 2].copy_from_slice(&[0x80, 0x3f]);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(times.modified().unwrap())).unwrap();
    drop(file);
    let (after, unwritten) = load(&source, copies.path());
    assert!(bits(&before) != bits(&after), "the number counts");
    assert_eq!(bits(&after), bits(&Model::load(cpu(), &source, None).unwrap()));
    assert!(unwritten.unwrap().write().unwrap());
    // The new one is in the place of the old.
    copy_in(copies.path());
    let (again, unwritten) = load(&source, copies.path());
    assert!(unwritten.is_none() && bits(&again) == bits(&after));
}

#[test]
fn a_checkpoint_that_changes_while_it_is_loaded_has_no_copy() {
    let (dir, source, copies) = dirs();
    let (_, unwritten) = load(&source, copies.path());
    let path = dir.path().join("model.safetensors");
    fs::write(&path, fs::read(&path).unwrap()).unwrap();
    let refused = unwritten.unwrap().write().unwrap_err().to_string();
    assert!(refused.contains("changed while"), "{refused}");
    assert_eq!(fs::read_dir(copies.path()).unwrap().count(), 0);
}

#[test]
fn another_configuration_or_format_has_another_copy() {
    let (dir, source, copies) = dirs();
    load(&source, copies.path()).1.unwrap().write().unwrap();
    let int8 = Model::load_copied(cpu(), &source, None, WeightStorage::Int8, copies.path()).unwrap();
    assert!(int8.1.unwrap().write().unwrap());
    assert_eq!(fs::read_dir(copies.path()).unwrap().count(), 2);
    assert!(load(&source, copies.path()).1.is_none());
    let config = source.config_json().unwrap().replace("\"rms_norm_eps\"", " \"rms_norm_eps\"");
    fs::write(dir.path().join("config.json"), config).unwrap();
    assert!(load(&source, copies.path()).1.is_some());
}

#[test]
fn the_copy_of_every_version_has_the_same_name() {
    let name = |compute, storage| file_name(Path::new("/models/.My Model"), WeightFormat { compute, storage });
    assert_eq!(name(DType::BF16, DENSE), "My-Model-4c8db70d9bff269f.packed");
    assert_eq!(name(DType::F32, WeightStorage::Int4(Int4Group::Of64)), "My-Model-21250ee7fa0d7677.packed");
}

#[test]
fn whatever_is_not_what_was_written_is_found_and_made_again() {
    let (_dir, source, copies) = dirs();
    let (model, unwritten) = load(&source, copies.path());
    unwritten.unwrap().write().unwrap();
    let (path, expected) = (copy_in(copies.path()), bits(&model));
    let good = fs::read(&path).unwrap();
    // In every part of the header, in large stacks, and where the last begins.
    let flips = [0, 8, 39, 40, 47, 48, 60, good.len() / 3, good.len() / 2, good.len() - 4096];
    let mut bad: Vec<Vec<u8>> = flips
        .map(|at| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            bytes
        })
        .into();
    bad.extend([0, 1, 47, 4096, good.len() - 1].map(|len| good[..len].to_vec()));
    bad.push([&good[..], b"more"].concat());
    for (i, bytes) in bad.into_iter().enumerate() {
        fs::write(&path, bytes).unwrap();
        let (model, unwritten) = load(&source, copies.path());
        assert_eq!(bits(&model), expected, "case {i}");
        assert!(unwritten.unwrap_or_else(|| panic!("case {i} was taken for whole")).write().unwrap());
        assert!(fs::read(&path).unwrap() == good, "case {i}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_or_read_fails_no_start() {
    let (_dir, source, copies) = dirs();
    let file = copies.path().join("file");
    fs::write(&file, "").unwrap();
    let (_, unwritten) = load(&source, &file);
    assert!(unwritten.unwrap().write().is_err());
    // A directory where the copy is to be.
    let (_, unwritten) = load(&source, copies.path());
    let unwritten = unwritten.unwrap();
    fs::create_dir(unwritten.path()).unwrap();
    let (_, again) = load(&source, copies.path());
    assert!(again.unwrap().write().is_err() && unwritten.write().is_err());
}

#[test]
fn two_starts_at_once_make_one_copy() {
    let (_dir, source, copies) = dirs();
    let made: Vec<bool> = std::thread::scope(|scope| {
        let start = || load(&source, copies.path()).1.map(|unwritten| unwritten.write().unwrap());
        let all: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
        all.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(made.contains(&true));
    copy_in(copies.path());
    assert!(load(&source, copies.path()).1.is_none());
}

#[test]
fn what_is_useless_makes_room_for_what_takes_its_place_and_only_then() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    let attempts = std::cell::Cell::new(0);
    let refusing = |kind: std::io::ErrorKind, enough_without: bool| {
        attempts.set(0);
        std::fs::write(&old, "useless").unwrap();
        in_place_of(&old, || {
            attempts.set(attempts.get() + 1);
            match enough_without && !old.exists() {
                true => Ok(()),
                false => Err(Error::Io { path: old.clone(), source: kind.into() }),
            }
        })
    };
    refusing(std::io::ErrorKind::StorageFull, true).unwrap();
    assert!(attempts.get() == 2 && !old.exists());
    refusing(std::io::ErrorKind::StorageFull, false).unwrap_err();
    assert_eq!(attempts.get(), 2, "not again and again");
    refusing(std::io::ErrorKind::PermissionDenied, true).unwrap_err();
    assert!(attempts.get() == 1 && old.exists());
}
