use std::cell::RefCell;
use std::sync::atomic::AtomicBool;

use super::*;

thread_local! {
    /// What this thread made durable, each with the names that were beside it at that moment; and a path at which that shall fail.
    static SYNCED: RefCell<Vec<(PathBuf, Vec<String>)>> = const { RefCell::new(Vec::new()) };
    static SYNC_FAILS: RefCell<Option<(PathBuf, usize)>> = const { RefCell::new(None) };
    /// What others remove when this thread makes a path durable, once.
    static REMOVED_MEANWHILE: RefCell<Option<(PathBuf, Vec<PathBuf>)>> = const { RefCell::new(None) };
}

pub(super) fn note_sync(path: &Path) -> Result<()> {
    if path.is_dir() {
        SYNCED.with_borrow_mut(|synced| synced.push((path.into(), names(path))));
    }
    if let Some((_, removed)) = REMOVED_MEANWHILE.with_borrow_mut(|removed| removed.take_if(|(at, _)| at == path)) {
        removed.iter().for_each(|dir| fs::remove_dir(dir).unwrap());
    }
    SYNC_FAILS.with_borrow_mut(|fails| match fails {
        Some((failing, 0)) if failing == path => Err(io_error(path)(std::io::Error::other("expected in this test"))),
        Some((failing, left)) if failing == path => {
            *left -= 1;
            Ok(())
        }
        _ => Ok(()),
    })
}

/// The names in `dir` each time it was made durable while `action` ran.
fn synced_names(dir: &Path, action: impl FnOnce()) -> Vec<Vec<String>> {
    SYNCED.take();
    action();
    SYNCED.take().into_iter().filter(|(path, _)| path == dir).map(|(_, names)| names).collect()
}

fn no_exchange(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(Errno::INVAL.into())
}

fn write_file(text: &'static str) -> impl FnOnce(&Path) -> Result<()> {
    move |dir| fs::write(dir.join("a.txt"), text).map_err(io_error(dir))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_directory_appears_whole_with_its_parents_and_its_size() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("runs").join("1").join("ckpt");
    assert_eq!(write_atomically(&dir, Existing::Refuse, write_file("hello")).unwrap(), 5);
    assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "hello");
    assert_eq!(names(dir.parent().unwrap()), ["ckpt"]);
}

#[test]
fn an_existing_directory_is_kept_or_replaced_as_asked() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ckpt");
    write_atomically(&dir, Existing::Refuse, write_file("old")).unwrap();
    let error = write_atomically(&dir, Existing::Refuse, write_file("new")).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "old");
    write_atomically(&dir, Existing::Replace, write_file("new")).unwrap();
    assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "new");
    assert_eq!(names(root.path()), ["ckpt"]);
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ckpt");
    let failing = |partial: &Path| {
        fs::write(partial.join("a.txt"), "half").unwrap();
        Err(Error::Lora("no".into()))
    };
    assert!(write_atomically(&dir, Existing::Replace, failing).is_err());
    assert!(names(root.path()).is_empty());
}

#[test]
fn the_directory_that_holds_the_names_is_durable_after_every_rename() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ckpt");
    for text in ["old", "new"] {
        let write = || assert_eq!(write_atomically(&dir, Existing::Replace, write_file(text)).unwrap(), 3);
        let synced = synced_names(root.path(), write);
        assert!(synced.last().unwrap().contains(&"ckpt".into()), "{synced:?}");
    }
    // Where names cannot be exchanged: once for each of the two renames.
    fs::create_dir(root.path().join("next")).unwrap();
    let next = root.path().join("next");
    let synced = synced_names(root.path(), || replace(&next, &dir, no_exchange).unwrap());
    assert_eq!(synced.len(), 2, "{synced:?}");
    assert!(!synced[0].contains(&"ckpt".into()) && synced[0].contains(&"next".into()), "{synced:?}");
    assert!(synced[1].contains(&"ckpt".into()) && !synced[1].contains(&"next".into()), "{synced:?}");
    assert_eq!(names(root.path()), ["ckpt"]);
    let synced = synced_names(root.path(), || drop(set_aside(&dir, &hold_names()).unwrap()));
    assert!(synced.len() == 1 && !synced[0].contains(&"ckpt".into()), "{synced:?}");
    let file = root.path().join("a.json");
    let synced = synced_names(root.path(), || write_file_atomically(&file, b"{}").unwrap());
    assert!(synced.last().unwrap().contains(&"a.json".into()), "{synced:?}");
    assert_eq!(fs::read(&file).unwrap(), b"{}");
}

#[test]
fn what_was_there_comes_back_if_the_new_one_cannot_be_made_durable() {
    let root = tempfile::tempdir().unwrap();
    let (dir, new) = (root.path().join("ckpt"), root.path().join("new"));
    let text = || fs::read_to_string(dir.join("a.txt")).unwrap();
    let failing_after = |left: usize| SYNC_FAILS.set(Some((root.path().into(), left)));
    failing_after(0);
    assert!(write_atomically(&dir, Existing::Refuse, write_file("old")).is_err());
    assert!(names(root.path()).is_empty());
    SYNC_FAILS.set(None);
    write_atomically(&dir, Existing::Refuse, write_file("old")).unwrap();
    failing_after(0);
    assert!(write_atomically(&dir, Existing::Replace, write_file("new")).is_err());
    assert_eq!((text(), names(root.path())), ("old".into(), vec!["ckpt".into()]));
    assert!(set_aside(&dir, &hold_names()).is_err());
    assert_eq!((text(), names(root.path())), ("old".into(), vec!["ckpt".into()]));
    fs::create_dir(&new).unwrap();
    for left in [0, 1] {
        failing_after(left);
        assert!(replace(&new, &dir, no_exchange).is_err());
        assert_eq!((text(), names(root.path())), ("old".into(), vec!["ckpt".into(), "new".into()]));
    }
    SYNC_FAILS.set(None);
}

#[test]
fn there_is_no_moment_without_a_directory_while_one_replaces_another() {
    let root = tempfile::tempdir().unwrap();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    fs::create_dir(&a).unwrap();
    fs::create_dir(&b).unwrap();
    if exchange(&a, &b).is_err_and(|error| is_unsupported(&error)) {
        return;
    }
    let dir = root.path().join("ckpt");
    write_atomically(&dir, Existing::Refuse, write_file("x")).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let (mut looks, mut gone) = (0_u64, 0_u64);
            while !done.load(Ordering::Relaxed) {
                looks += 1;
                gone += u64::from(dir.symlink_metadata().is_err());
            }
            (looks, gone)
        });
        for _ in 0..300 {
            write_atomically(&dir, Existing::Replace, write_file("y")).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        let (looks, gone) = watching.join().unwrap();
        assert_eq!(gone, 0, "of {looks} looks");
    });
    assert_eq!(names(root.path()), ["a", "b", "ckpt"]);
}

#[test]
fn what_is_no_directory_is_not_replaced() {
    let root = tempfile::tempdir().unwrap();
    let (target, link) = (root.path().join("target"), root.path().join("link"));
    fs::create_dir(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let error = write_atomically(&link, Existing::Replace, write_file("new")).unwrap_err().to_string();
    assert!(error.contains("not a directory"), "{error}");
    assert_eq!(names(root.path()), ["link", "target"]);
}

#[test]
fn recovery_clears_leftovers_and_restores_what_was_being_replaced() {
    let root = tempfile::tempdir().unwrap();
    let leftovers =
        [".a.partial-7-0", ".a.replaced-7-0", ".b.replaced-7-1", ".c.deleted-7-2", ".d.replaced-7-3", ".d.replaced-7-4"];
    for name in leftovers.into_iter().chain(["b", "c", ".hidden"]) {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    // The newest of several that were replaced is the one that was acknowledged last.
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(root.path().join(".d.replaced-7-3/newest"), "").unwrap();
    recover_directories(root.path()).unwrap();
    assert_eq!(names(root.path()), [".hidden", "a", "b", "c", "d"]);
    assert_eq!(names(&root.path().join("d")), ["newest"]);
}

#[test]
fn what_another_process_is_writing_is_left_to_it_and_what_nobody_writes_goes() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ckpt");
    if !matches!(Hold::of(root.path()), Hold::Ours(_)) {
        return;
    }
    fs::create_dir(root.path().join(".ckpt.partial-7-0")).unwrap();
    fs::create_dir(root.path().join(".other.partial-7-0")).unwrap();
    let meanwhile = |partial: &Path| {
        let own = partial.file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(names(root.path()), [own.as_str(), ".other.partial-7-0"], "of the same directory it goes first");
        fs::write(partial.join("a.txt"), "whole").unwrap();
        // As a server does that starts now, and as another who writes the same directory.
        recover_directories(root.path()).unwrap();
        remove_abandoned(&dir);
        assert_eq!(names(root.path()), [own]);
        Ok(())
    };
    write_atomically(&dir, Existing::Refuse, meanwhile).unwrap();
    assert_eq!(fs::read_to_string(dir.join("a.txt")).unwrap(), "whole");
    // The same name again, over one that is there.
    write_atomically(&dir, Existing::Replace, write_file("new")).unwrap();
    assert_eq!(names(root.path()), ["ckpt"]);
}

#[test]
fn a_directory_that_was_taken_for_a_leftover_before_it_was_held_is_noticed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a");
    fs::create_dir(&dir).unwrap();
    let hold = Hold::of(&dir);
    assert!(hold.is_at(&dir));
    fs::remove_dir(&dir).unwrap();
    assert!(!hold.is_at(&dir), "gone");
    fs::create_dir(root.path().join("b")).unwrap();
    fs::create_dir(&dir).unwrap();
    assert!(!hold.is_at(&dir), "another");
    let other = Hold::of(&dir);
    if matches!(other, Hold::Ours(_)) {
        assert!(!Hold::of(&dir).is_at(&dir), "held by somebody else");
    }
}

#[test]
fn parents_that_were_made_for_nothing_go_again_unless_something_else_is_in_them() {
    let root = tempfile::tempdir().unwrap();
    let failing = |_: &Path| Err(Error::Lora("no".into()));
    assert!(write_atomically(&root.path().join("runs/1/ckpt"), Existing::Refuse, failing).is_err());
    assert!(names(root.path()).is_empty());
    // Two write in the same new parent, and one fails; another finds no parent any more.
    let dir = root.path().join("runs/1/ckpt");
    let other = root.path().join("runs/1/other");
    write_atomically(&dir, Existing::Refuse, |partial| {
        assert!(write_atomically(&other, Existing::Refuse, failing).is_err());
        write_file("x")(partial)
    })
    .unwrap();
    assert_eq!(names(&root.path().join("runs/1")), ["ckpt"]);
    remove_empty_directories(&root.path().join("runs/1"), root.path());
    assert!(dir.exists());
    fs::remove_dir_all(&dir).unwrap();
    remove_empty_directories(&root.path().join("runs/1"), root.path());
    assert!(names(root.path()).is_empty() && root.path().exists());
}

#[test]
fn parents_that_go_with_another_directory_meanwhile_are_made_again() {
    let root = tempfile::tempdir().unwrap();
    let removed = ["runs/1", "runs"].map(|dir| root.path().join(dir));
    REMOVED_MEANWHILE.set(Some((root.path().into(), removed.into())));
    write_atomically(&root.path().join("runs/1/ckpt"), Existing::Refuse, write_file("x")).unwrap();
    assert!(REMOVED_MEANWHILE.take().is_none());
    assert_eq!(names(&root.path().join("runs/1")), ["ckpt"]);
}

#[test]
fn recovery_leaves_alone_what_is_not_ours() {
    let root = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(elsewhere.path().join("precious"), "").unwrap();
    let kept = [".a.partial-mine", ".partial-7-0", ".notes.replaced-7-0x", ".x.deleted-", "a.partial-7-0"];
    for name in kept {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    for name in [".b.partial-7-0", ".b.replaced-7-0", ".b.deleted-7-0"] {
        std::os::unix::fs::symlink(elsewhere.path(), root.path().join(name)).unwrap();
    }
    fs::write(root.path().join(".c.partial-7-0"), "a file").unwrap();
    let before = names(root.path());
    recover_directories(root.path()).unwrap();
    assert_eq!(names(root.path()), before);
    assert_eq!(names(elsewhere.path()), ["precious"]);
}

#[test]
fn links_are_refused_below_a_directory_and_not_above_it() {
    let root = tempfile::tempdir().unwrap();
    let (target, top) = (root.path().join("target"), root.path().join("top"));
    fs::create_dir_all(target.join("run")).unwrap();
    std::os::unix::fs::symlink(&target, &top).unwrap();
    refuse_links_below(&top, &top.join("run/kind")).unwrap();
    for (link, path) in [("run/kind", "run/kind"), ("run/kind", "run/kind/a"), ("other", "other/kind")] {
        let leads_nowhere = top.join(link);
        let _ = std::os::unix::fs::symlink("nowhere", &leads_nowhere);
        let error = refuse_links_below(&top, &top.join(path)).unwrap_err().to_string();
        assert!(error.contains(&format!("{link} is a symbolic link")), "{error}");
    }
}
