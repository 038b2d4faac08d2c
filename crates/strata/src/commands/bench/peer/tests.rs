//! The peer with a shell script in Python's place.

use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, PoisonError};

use super::*;

/// An interpreter that runs this instead of the script it is given.
fn interpreter(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("python");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A file that is being written does not run, and a process that another test starts meanwhile inherits the writing for a moment.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn start(script: &str) -> anyhow::Result<Peer> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup { modules: &MODEL_MODULES, config: Value::Null, dtype: "bf16".into(), threads: 1, ranks: &[32] };
    Peer::start(&interpreter(dir.path(), script), &setup)
}

const READY: &str = r#"read -r setup; echo '{"ok": {"torch": "2.0"}}'"#;
const TRAIN: Request = Request::Train { batch: 1, seq_len: 2, checkpointing: true };

#[test]
fn answers_are_read_one_for_each_request() {
    let trained = r#"read -r request; echo '{"ok": {"seconds": 1.5, "optimizer_seconds": 0.5, "peak_memory_bytes": 7}}'"#;
    let mut peer = start(&format!("{READY}\n{trained}\n{trained}")).unwrap();
    assert_eq!(peer.versions()["torch"], "2.0");
    for _ in 0..2 {
        let answer: Trained = peer.call(&TRAIN).unwrap();
        assert_eq!((answer.seconds, answer.optimizer_seconds, answer.peak_memory_bytes), (1.5, 0.5, 7));
    }
}

#[test]
fn the_peer_is_asked_in_the_words_of_its_script() {
    let echo = r#"read -r request; printf '{"ok": %s}\n' "$request""#;
    let mut peer = start(&format!("{READY}\n{echo}")).unwrap();
    let request: Value = peer.call(&TRAIN).unwrap();
    assert_eq!(request, serde_json::json!({ "op": "train", "batch": 1, "seq_len": 2, "checkpointing": true }));
    for method in ["def train(self, batch, seq_len, checkpointing)", "def sample(self, batch, prompt, new)"] {
        assert!(SCRIPT.contains(method), "{method}");
    }
    assert!(SCRIPT.contains("def matmul(self, matrices, tokens, in_features, out_features, seconds)"));
    assert!(SCRIPT.contains("def delta(self, tokens, k_heads, v_heads, k_dim, v_dim, kernel, seconds)"));
}

#[test]
fn an_interpreter_that_is_not_there_is_named() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let setup = Setup { modules: &[], config: Value::Null, dtype: "bf16".into(), threads: 1, ranks: &[] };
    let error = Peer::start(Path::new("/nowhere/python"), &setup).unwrap_err().to_string();
    assert_eq!(error, "there is no Python interpreter at /nowhere/python: --compare takes the path of one");
}

#[test]
fn missing_modules_are_named_with_the_command_that_installs_them() {
    let error = start(r#"read -r setup; echo '{"missing": ["torch", "peft"]}'"#).unwrap_err().to_string();
    assert!(error.contains("lacks modules: torch peft."), "{error}");
    assert!(error.ends_with("/python -m pip install torch peft"), "{error}");
}

#[test]
fn a_peer_that_crashes_is_quoted() {
    let error = start("read -r setup; echo 'MemoryError: no room' >&2; exit 3").unwrap_err().to_string();
    assert_eq!(error, "the peer ended (exit status: 3); its last messages:\nMemoryError: no room");
    let mut peer = start(&format!("{READY}; echo gone >&2; kill -9 $$")).unwrap();
    let error = peer.call::<Trained>(&TRAIN).unwrap_err().to_string();
    assert_eq!(error, "the peer ended (signal: 9 (SIGKILL)); its last messages:\ngone");
    let error = start("exit 1").unwrap_err().to_string();
    assert_eq!(error, "the peer ended (exit status: 1); it said nothing");
}

#[test]
fn an_answer_that_is_not_understood_is_quoted() {
    let error = start("read -r setup; echo hello").unwrap_err().to_string();
    assert!(error.starts_with(r#"the peer answered "hello", which is not understood"#), "{error}");
}
