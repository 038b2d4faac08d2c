//! Projects: what is listed of one, while its sessions are known and after.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::{TestServer, create_model_body};

impl TestServer {
    /// A model in a session of a project, with a checkpoint if it has a name.
    async fn new_model_in(&self, project: Option<&str>, checkpoint: Option<&str>) -> (String, String) {
        let created = self.ok("create_session", json!({ "project_id": project })).await;
        let session_id = created["session_id"].as_str().unwrap().to_owned();
        let created = self.outcome("create_model", create_model_body(&session_id, 0)).await;
        let model_id = created["model_id"].as_str().unwrap().to_owned();
        if let Some(name) = checkpoint {
            let saved = self.outcome("save_weights", json!({ "model_id": model_id, "seq_id": 1, "path": name })).await;
            assert!(saved["path"].is_string(), "{saved}");
        }
        (session_id, model_id)
    }

    /// The runs of a project, in order of their names.
    async fn runs_in(&self, project: &str) -> Vec<String> {
        let listed = self.get(&format!("training_runs?limit=20&offset=0&access_scope=owned&project_id={project}")).await.json();
        let runs = listed["training_runs"].as_array().unwrap().iter();
        let mut runs: Vec<String> = runs.map(|run| run["training_run_id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(listed["cursor"]["total_count"], json!(runs.len()));
        runs.sort();
        runs
    }

    /// The checkpoints that are counted for a project; `None`: for each.
    async fn usage_of(&self, project: Option<&str>) -> Vec<(String, u64)> {
        let query = project.map_or_else(String::new, |project| format!("?project_id={project}"));
        let usage = self.get(&format!("billing/usage/checkpoints/current{query}")).await.json();
        let items = usage["data"].as_array().unwrap().iter();
        let of = |item: &Value| (item["project_id"].as_str().unwrap().into(), item["checkpoint_count"].as_u64().unwrap());
        items.map(of).collect()
    }
}

#[tokio::test]
async fn runs_of_a_project_are_listed_alone_also_when_their_sessions_are_over_or_forgotten() {
    let server = TestServer::new();
    let (first, a) = server.new_model_in(Some("p1"), Some("x")).await;
    let (_, b) = server.new_model_in(Some("p2"), Some("x")).await;
    let (_, unsaved) = server.new_model_in(Some("p2"), None).await;
    let (_, c) = server.new_model_in(None, Some("x")).await;
    let sorted = |mut runs: Vec<String>| {
        runs.sort();
        runs
    };
    assert_eq!(server.get("training_runs").await.json()["cursor"]["total_count"], json!(4));
    assert_eq!(server.runs_in("p1").await, std::slice::from_ref(&a));
    assert_eq!(server.runs_in("p2").await, sorted(vec![b.clone(), unsaved]));
    assert_eq!(server.runs_in("local").await, std::slice::from_ref(&c), "as the session of which no project was named says");
    assert_eq!(server.runs_in("p3").await, [""; 0]);
    server.ok(&format!("sessions/{first}/finish"), json!({})).await;
    assert_eq!(server.runs_in("p1").await, std::slice::from_ref(&a));
    let server = server.restart();
    for (project, run) in [("p1", a), ("p2", b), ("local", c)] {
        assert_eq!(server.runs_in(project).await, [run], "{project}");
    }
    let refused = server.get(&format!("training_runs?project_id={}", "x".repeat(513))).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_session_that_is_moved_takes_its_runs_and_checkpoints_along() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model_in(Some("p1"), Some("x")).await;
    let copied =
        json!({ "source_path": format!("tinker://{model_id}/weights/x"), "session_id": session_id, "model_seq_id": 7 });
    server.ok("copy_weights", copied).await;
    server.new_model_in(Some("p1"), Some("x")).await;
    let runs = [model_id, format!("{session_id}:train:7")];
    let moved =
        server.request("PUT", &format!("sessions/{session_id}/project"), json!({ "project_id": "p2" }).to_string()).await;
    assert_eq!(moved.status, StatusCode::OK);
    assert_eq!((server.runs_in("p1").await.len(), server.runs_in("p2").await), (1, runs.to_vec()));
    let server = server.restart();
    assert_eq!((server.runs_in("p1").await.len(), server.runs_in("p2").await), (1, runs.to_vec()));
}

#[tokio::test]
async fn a_copy_is_in_the_project_that_was_named_or_in_that_of_its_session() {
    let server = TestServer::new();
    let (session_id, model_id) = server.new_model_in(Some("p1"), Some("x")).await;
    let source = format!("tinker://{model_id}/weights/x");
    let run_of =
        |copied: Value| copied["tinker_path"].as_str().unwrap()["tinker://".len()..].split('/').next().unwrap().to_owned();
    let copied = server.ok("copy_weights", json!({ "source_path": source, "destination_project_id": "p9" })).await;
    let alone = run_of(copied);
    let into_session = json!({ "source_path": source, "session_id": session_id, "model_seq_id": 4 });
    let beside = run_of(server.ok("copy_weights", into_session.clone()).await);
    let mut both = into_session;
    (both["model_seq_id"], both["destination_project_id"]) = (json!(5), json!("p9"));
    let refused = server.post("copy_weights", both).await;
    assert!(refused.status == StatusCode::BAD_REQUEST && refused.detail().contains("destination_project_id"));
    let server = server.restart();
    assert_eq!(server.runs_in("p9").await, [alone]);
    assert_eq!(server.runs_in("p1").await, [model_id, beside]);
}

#[tokio::test]
async fn storage_is_counted_for_each_project_or_for_one() {
    let server = TestServer::new();
    assert_eq!(server.usage_of(None).await, []);
    for (project, name) in [(Some("p1"), "x"), (Some("p1"), "y"), (None, "x")] {
        server.new_model_in(project, Some(name)).await;
    }
    let (local, p1) = (("local".to_owned(), 1), ("p1".to_owned(), 2));
    assert_eq!(server.usage_of(None).await, [local.clone(), p1.clone()]);
    assert_eq!(server.usage_of(Some("p1")).await, std::slice::from_ref(&p1));
    assert_eq!(server.usage_of(Some("p2")).await, []);
    assert_eq!(server.restart().usage_of(None).await, [local, p1]);
}
