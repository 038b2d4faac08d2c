use strata_engine::api::LoraSpec;

use super::*;

fn record(name: &str) -> CheckpointRecord {
    let id = CheckpointId::new("s:train:0", "weights", name).unwrap();
    let lora =
        LoraSpec { rank: 4, seed: 1, train_attn: true, train_mlp: true, train_unembed: false, ranks: Default::default() };
    CheckpointRecord::new(id, "base".into(), lora)
}

fn open(data_dir: &Path) -> Store {
    Store::open(DataDir::claim(data_dir).unwrap(), limits::CATALOGUE_BYTES_MAX).unwrap()
}

/// What the engine leaves behind for a save that is not answered yet.
fn write_files(store: &Store, record: &CheckpointRecord) {
    write_atomically(&store.dir(&record.id()), Existing::Replace, |dir| {
        fs::write(dir.join("adapter_model.safetensors"), [0u8; 10]).unwrap();
        write_record(dir, record)
    })
    .unwrap();
}

fn write(store: &Store, record: &CheckpointRecord) {
    write_files(store, record);
    store.insert(record.clone());
}

fn read(store: &Store, id: &CheckpointId) -> CheckpointRecord {
    read_record(&store.dir(id), id.kind).unwrap().unwrap()
}

#[test]
fn a_catalogue_is_rebuilt_from_its_files() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    write(&store, &record("a"));
    store.set_public(&record("a").id(), true).unwrap();
    fs::create_dir_all(store.dir(&record("half").id())).unwrap();
    let broken = store.dir(&record("broken").id());
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join(METADATA_FILE), "{").unwrap();

    drop(store);
    let found = open(data_dir.path()).list(None);
    assert_eq!(found.len(), 1);
    assert!(found[0].public && found[0].size_bytes > 10);
    assert_eq!(found[0].lora, record("a").lora);
}

#[test]
fn what_is_imported_while_a_server_runs_is_found_listed_and_deleted() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let write = |dir: &Path| {
        fs::write(dir.join("adapter_model.safetensors"), [0u8; 10]).unwrap();
        Ok(())
    };
    let import = |name: &str| crate::import(data_dir.path(), name, "base", record("a").lora, write);
    let (one, other) = (import("one").unwrap(), import("other").unwrap());
    let id = |path: &str| CheckpointId::parse(path).unwrap();
    let found = store.get(&id(&one.path)).unwrap();
    assert_eq!((found.lora.clone(), found.size_bytes), (record("a").lora, one.size_bytes));
    assert_eq!(store.list(None).len(), 2, "one that nobody has asked for is listed too");
    assert_eq!(store.list(Some(&id(&other.path).run)).len(), 1);
    let third = import("third").unwrap();
    for path in [&one.path, &third.path] {
        store.delete(&id(path)).unwrap();
        assert!(store.get(&id(path)).is_err() && !store.dir(&id(path)).exists());
    }
    assert_eq!(store.list(None).len(), 1);
    drop(store);
    assert_eq!(open(data_dir.path()).get(&id(&other.path)).unwrap().base_model, "base");
    assert!(import("..").is_err() && import("a/b").is_err());
    // Only what has the name of an import is looked for.
    let store = open(data_dir.path());
    let mut stray = record("stray");
    stray.run = "s:train:9".into();
    write_files(&store, &stray);
    assert!(store.get(&stray.id()).is_err());
}

#[test]
fn a_deleted_checkpoint_is_gone_from_disk_and_a_second_delete_is_not_found() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    store.delete(&id).unwrap();
    assert!(!store.dir(&id).exists());
    assert!(matches!(store.delete(&id), Err(ApiError::NotFound(_))));
    assert!(matches!(store.set_public(&id, true), Err(ApiError::NotFound(_))));
}

#[test]
fn a_checkpoint_whose_time_is_over_is_not_listed_and_is_deleted() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    let now = OffsetDateTime::now_utc();
    store.set_expiry(&id, Some(now - time::Duration::SECOND)).unwrap();
    assert!(store.list(None).is_empty());
    store.reap(now);
    assert!(!store.dir(&id).exists());
}

#[test]
fn a_checkpoint_that_was_removed_by_hand_is_not_found_and_not_listed() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    let uses: [&dyn Fn() -> ApiResult<()>; 3] =
        [&|| store.set_public(&id, true), &|| store.set_expiry(&id, None), &|| store.files(&id).map(drop)];
    let removals: [fn(&Path); 2] =
        [|dir| fs::remove_dir_all(dir).unwrap(), |dir| fs::remove_file(dir.join(METADATA_FILE)).unwrap()];
    for remove in removals {
        for used in uses {
            write(&store, &record("a"));
            remove(&store.dir(&id));
            assert_eq!(used().unwrap_err(), not_found(&id));
            assert!(store.list(None).is_empty());
        }
    }
    // Its save is answered when it was edited and removed already.
    let (old, new) = (record("a"), record("a"));
    write(&store, &old);
    write_files(&store, &new);
    store.set_public(&id, true).unwrap();
    fs::remove_dir_all(store.dir(&id)).unwrap();
    assert_eq!(store.set_public(&id, true).unwrap_err(), not_found(&id));
    store.insert(new);
    assert!(store.list(None).is_empty());
}

#[test]
fn what_is_found_gone_takes_no_later_save_out_of_the_catalogue() {
    let mut catalogue = Catalogue::default();
    let (old, new) = (record("a"), record("a"));
    catalogue.put(new.clone());
    catalogue.forget(&old);
    assert_eq!(catalogue.records.get(&new.id()), Some(&Arc::new(new.clone())));
    catalogue.forget(&new);
    assert!(catalogue.records.is_empty() && catalogue.bytes == 0);
}

#[test]
fn a_record_that_cannot_be_understood_is_refused_and_left_in_place() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    let path = store.dir(&id).join(METADATA_FILE);
    fs::write(&path, "{").unwrap();
    for error in [store.set_public(&id, true).unwrap_err(), store.files(&id).unwrap_err()] {
        assert!(matches!(&error, ApiError::BadRequest(reason) if reason.contains(METADATA_FILE)), "{error}");
    }
    assert_eq!((fs::read_to_string(&path).unwrap().as_str(), store.list(None).len()), ("{", 1));
}

#[test]
fn until_it_is_swept_a_checkpoint_whose_time_is_over_is_not_there_for_anyone() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    let past = Some(OffsetDateTime::now_utc() - time::Duration::SECOND);
    write(&store, &record("a"));
    store.free_name(&id);
    assert!(store.dir(&id).exists() && !store.is_expired(&id), "its time is not over");
    let source = store.get(&id).unwrap();
    let copy = store.copy(&source, ("copy:1", None), past).unwrap();
    store.set_expiry(&id, past).unwrap();
    for used in [store.delete(&id), store.set_public(&id, true)] {
        assert_eq!(used.unwrap_err(), not_found(&id));
    }
    assert!(store.is_expired(&id) && store.dir(&id).exists());
    assert_ne!(store.copy(&source, ("copy:1", None), None).unwrap().save_id, copy.save_id);
    // Another save that is on the disk already is none of it.
    let later = record("a");
    write_files(&store, &later);
    store.free_name(&id);
    store.insert(later.clone());
    assert_eq!(store.get(&id).unwrap().save_id, later.save_id);
    store.set_expiry(&id, past).unwrap();
    store.free_name(&id);
    assert!(!store.dir(&id).exists());
}

#[test]
fn an_edit_goes_to_the_save_that_is_on_the_disk() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let (old, mut new) = (record("a"), record("a"));
    let id = old.id();
    write(&store, &old);
    // The save is on the disk and its answer on the way when the edit comes.
    new.user_metadata = Some(BTreeMap::from([("of".into(), "the new one".into())]));
    write_files(&store, &new);
    store.set_public(&id, true).unwrap();
    store.insert(new.clone());
    for found in [read(&store, &id), CheckpointRecord::clone(&store.get(&id).unwrap())] {
        assert!(found.public, "the edit was answered");
        assert_eq!((found.save_id, found.user_metadata), (new.save_id.clone(), new.user_metadata.clone()));
    }
}

#[test]
fn edits_and_saves_of_one_name_never_mix() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| {
            for round in 0..200 {
                let mut saved = record("a");
                saved.base_model = format!("{round} {}", saved.save_id);
                write(&store, &saved);
            }
        });
        let mut public = false;
        while !saving.is_finished() {
            public = !public;
            store.set_public(&id, public).unwrap();
        }
    });
    let (on_disk, listed) = (read(&store, &id), store.get(&id).unwrap());
    assert_eq!((&on_disk.save_id, on_disk.public), (&listed.save_id, listed.public));
    assert_eq!(listed.base_model, format!("199 {}", listed.save_id));
}

#[test]
fn what_is_deleted_before_its_save_is_answered_stays_deleted() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let (old, new, newest) = (record("a"), record("a"), record("a"));
    write(&store, &old);
    write_files(&store, &new);
    store.delete(&old.id()).unwrap();
    store.insert(new);
    assert!(store.list(None).is_empty() && !store.dir(&old.id()).exists());
    write(&store, &newest);
    assert_eq!(store.list(None).len(), 1);
    // Though it was edited before.
    let last = record("a");
    write_files(&store, &last);
    store.set_public(&last.id(), true).unwrap();
    store.delete(&last.id()).unwrap();
    store.insert(last.clone());
    assert!(store.list(None).is_empty() && !store.dir(&last.id()).exists());
}

#[test]
fn the_end_of_one_save_does_not_delete_the_next() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let (mut old, new) = (record("a"), record("a"));
    let now = OffsetDateTime::now_utc();
    old.expires_at = Some(now - time::Duration::SECOND);
    write(&store, &old);
    write_files(&store, &new);
    store.reap(now);
    store.insert(new.clone());
    assert_eq!(read(&store, &new.id()).save_id, new.save_id);
    assert_eq!(store.list(None).len(), 1);
}

#[test]
fn a_delete_that_fails_leaves_the_listing_true() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    // Permissions would not stop an administrator; a file in the place of a directory stops everyone.
    let (kind_dir, elsewhere) = (store.dir(&id).parent().unwrap().to_owned(), data_dir.path().join("elsewhere"));
    fs::rename(&kind_dir, &elsewhere).unwrap();
    fs::write(&kind_dir, "").unwrap();
    let Err(ApiError::Internal(message)) = store.delete(&id) else { panic!("it cannot be moved") };
    assert!(message.contains("still there") && !message.contains(&*data_dir.path().to_string_lossy()), "{message}");
    assert_eq!(store.list(None).len(), 1);
    fs::remove_file(&kind_dir).unwrap();
    fs::rename(&elsewhere, &kind_dir).unwrap();
    store.delete(&id).unwrap();
    assert!(store.list(None).is_empty());
}

/// Counts the warnings of a thread.
struct Warnings(std::sync::Arc<std::sync::atomic::AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn what_cannot_be_deleted_when_its_time_is_over_is_said_once_and_tried_again() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    let now = OffsetDateTime::now_utc();
    store.set_expiry(&id, Some(now - time::Duration::SECOND)).unwrap();
    let warnings = std::sync::Arc::default();
    let _counting = tracing::subscriber::set_default(Warnings(std::sync::Arc::clone(&warnings)));
    let kind_dir = store.dir(&id).parent().unwrap().to_owned();
    let elsewhere = data_dir.path().join("elsewhere");
    fs::rename(&kind_dir, &elsewhere).unwrap();
    fs::write(&kind_dir, "").unwrap();
    (0..3).for_each(|_| store.reap(now));
    assert_eq!(warnings.load(std::sync::atomic::Ordering::Relaxed), 1);
    fs::remove_file(&kind_dir).unwrap();
    fs::rename(&elsewhere, &kind_dir).unwrap();
    store.reap(now);
    assert!(!store.dir(&id).exists());
}

#[test]
fn a_run_goes_with_the_last_of_its_checkpoints() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let runs = || fs::read_dir(data_dir.path().join("checkpoints")).unwrap().count();
    for name in ["a", "b"] {
        write(&store, &record(name));
    }
    store.delete(&record("a").id()).unwrap();
    assert!(store.dir(&record("b").id()).exists());
    store.delete(&record("b").id()).unwrap();
    assert_eq!(runs(), 0);
    write(&store, &record("a"));
    assert_eq!(store.list(None).len(), 1, "and comes again with the next");
    store.delete(&record("a").id()).unwrap();
    // What servers of before have left.
    fs::create_dir_all(store.dir(&record("a").id()).parent().unwrap()).unwrap();
    drop(store);
    open(data_dir.path());
    assert_eq!(runs(), 0);
}

#[test]
fn what_a_file_system_does_not_rename_is_removed_where_it_is() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    remove_in_place(&store.dir(&id), &hold_names()).unwrap();
    assert!(!store.dir(&id).exists());
    // Of what is no checkpoint it touches nothing.
    fs::create_dir_all(store.dir(&id)).unwrap();
    fs::write(store.dir(&id).join("notes.txt"), "").unwrap();
    remove_in_place(&store.dir(&id), &hold_names()).unwrap_err();
    assert!(store.dir(&id).join("notes.txt").exists());
}

#[test]
fn what_cannot_be_removed_is_tried_again() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let kind_dir = data_dir.path().join("weights");
    let aside = kind_dir.join(".a.deleted-1-1");
    fs::write(&kind_dir, "no directory, and so nothing can be removed in it").unwrap();
    store.remove_trash(aside.clone(), true);
    fs::remove_file(&kind_dir).unwrap();
    fs::create_dir_all(&aside).unwrap();
    store.reap(OffsetDateTime::now_utc());
    assert!(!aside.exists());
}

#[test]
fn whatever_is_in_the_place_of_a_checkpoint_is_deleted_whole() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let dir = store.dir(&record("a").id());
    let puts: [fn(&Path); 2] =
        [|dir| fs::write(dir, "a file").unwrap(), |dir| std::os::unix::fs::symlink("/nowhere", dir).unwrap()];
    for put in puts {
        write(&store, &record("a"));
        fs::remove_dir_all(&dir).unwrap();
        put(&dir);
        store.delete(&record("a").id()).unwrap();
        assert_eq!(fs::read_dir(data_dir.path().join("checkpoints")).unwrap().count(), 0);
    }
}

#[test]
fn nothing_is_copied_changed_or_deleted_through_a_link() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    let source = store.get(&id).unwrap();
    let elsewhere = data_dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, data_dir.path().join("checkpoints/copy:1")).unwrap();
    let kind_dir = store.dir(&id).parent().unwrap().to_owned();
    let refused = |error: ApiError, link: &str| {
        let is_named = |reason: &str| reason.ends_with(&format!(": {link} is a symbolic link, and is not followed"));
        assert!(matches!(&error, ApiError::BadRequest(reason) if is_named(reason)), "{error:?}");
    };
    refused(store.copy(&source, ("copy:1", None), None).unwrap_err(), "copy:1");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    fs::rename(&kind_dir, elsewhere.join("weights")).unwrap();
    std::os::unix::fs::symlink(elsewhere.join("weights"), &kind_dir).unwrap();
    refused(store.delete(&id).unwrap_err(), "s:train:0/weights");
    refused(store.set_public(&id, true).unwrap_err(), "s:train:0/weights");
    refused(store.files(&id).unwrap_err(), "s:train:0/weights");
    assert!(elsewhere.join("weights/a").join(METADATA_FILE).exists());
}

#[test]
fn links_special_files_and_long_records_are_passed_over() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    write(&store, &record("a"));
    let (run_dir, a) = (data_dir.path().join("checkpoints/s:train:0"), store.dir(&record("a").id()));
    let beside = |name: &str| a.with_file_name(name);
    std::os::unix::fs::symlink(&a, beside("link")).unwrap();
    std::os::unix::fs::symlink(&run_dir, data_dir.path().join("checkpoints/linked-run")).unwrap();
    std::os::unix::fs::symlink(run_dir.join("weights"), run_dir.join("sampler_weights")).unwrap();
    for name in ["pipe", "linked-record", "long", "directory"] {
        fs::create_dir(beside(name)).unwrap();
    }
    let pipe = beside("pipe").join(METADATA_FILE);
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    std::os::unix::fs::symlink(a.join(METADATA_FILE), beside("linked-record").join(METADATA_FILE)).unwrap();
    let padded = format!("{}{}", fs::read_to_string(a.join(METADATA_FILE)).unwrap(), " ".repeat(1 << 20));
    fs::write(beside("long").join(METADATA_FILE), padded).unwrap();
    fs::create_dir(beside("directory").join(METADATA_FILE)).unwrap();
    drop(store);
    let listed = open(data_dir.path()).list(None);
    assert_eq!(listed.iter().map(|record| record.name.as_str()).collect::<Vec<_>>(), ["a"]);
}

#[test]
fn a_record_of_an_earlier_build_has_no_identity_and_is_still_edited_and_loaded() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path());
    let id = record("a").id();
    write(&store, &record("a"));
    let path = store.dir(&id).join(METADATA_FILE);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("save_id");
    fs::write(&path, json.to_string()).unwrap();
    drop(store);
    let store = open(data_dir.path());
    store.set_public(&id, true).unwrap();
    let record = store.get(&id).unwrap();
    assert!(record.public);
    assert_eq!(store.source(&record).save_id, None);
}

#[test]
fn the_catalogue_is_bounded_in_memory() {
    const BYTES_MAX: usize = 1 << 20;
    let mut catalogue = Catalogue::new(BYTES_MAX);
    let mut fat = record("a");
    fat.user_metadata = Some(BTreeMap::from([("k".into(), "v".repeat(BYTES_MAX))]));
    catalogue.put(fat);
    assert!(catalogue.is_full());
    catalogue.put(record("a"));
    assert!(!catalogue.is_full(), "what is replaced takes no room");
    catalogue.remove(&record("a").id());
    assert_eq!(catalogue.bytes, 0);
}
