//! What a search for sessions finds: every filter holds, or is refused.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::TestServer;

impl TestServer {
    /// The sessions that a search finds, newest first.
    async fn found(&self, query: Value) -> Vec<String> {
        names_of(&self.ok("sessions/search", query).await)
    }

    async fn new_session_named(&self, display_name: &str) -> String {
        let created = self.ok("create_session", json!({ "display_name": display_name })).await;
        created["session_id"].as_str().unwrap().to_owned()
    }
}

fn names_of(page: &Value) -> Vec<String> {
    page["sessions"].as_array().unwrap().iter().map(|s| s["display_name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn sessions_are_found_by_why_their_clients_finished_them() {
    let server = TestServer::new();
    for how in ["success", "interrupted", "errored", "active"] {
        let session_id = server.new_session_named(how).await;
        if how != "active" {
            server.ok(&format!("sessions/{session_id}/finish"), json!({ "reason": { "type": how } })).await;
        }
    }
    let finished = |reasons: Value| json!({ "type": "client_finished", "reasons": reasons });
    for (statuses, expected) in [
        (json!([finished(Value::Null)]), &["errored", "interrupted", "success"][..]),
        (json!([finished(json!(["interrupted"]))]), &["interrupted"]),
        (json!([finished(json!(["success", "errored"]))]), &["errored", "success"]),
        (json!([finished(json!(["errored"])), { "type": "active" }]), &["active", "errored"]),
        (json!([{ "type": "failed" }, { "type": "cancelled" }]), &[]),
    ] {
        assert_eq!(server.found(json!({ "statuses": statuses })).await, expected, "{statuses}");
    }
}

#[tokio::test]
async fn sessions_are_found_by_whose_they_are() {
    let server = TestServer::new();
    server.new_session_named("mine").await;
    let user = |urns: Value| json!({ "type": "user", "owner_urns": urns });
    for (owner, expected) in [
        (json!({ "type": "own" }), &["mine"][..]),
        (json!({ "type": "accessible" }), &["mine"]),
        (user(json!(["tml:organization_user:nobody", "tml:organization_user:local"])), &["mine"]),
        (user(json!(["tml:organization_user:nobody"])), &[]),
    ] {
        assert_eq!(server.found(json!({ "owner": owner })).await, expected, "{owner}");
    }
}

#[tokio::test]
async fn a_filter_that_could_only_be_ignored_is_refused() {
    let server = TestServer::new();
    for (query, word) in [
        (json!({ "statuses": [] }), "statuses"),
        (json!({ "statuses": [{ "type": "asleep" }] }), "asleep"),
        (json!({ "statuses": [{ "type": "active", "reasons": ["success"] }] }), "not to active"),
        (json!({ "statuses": [{ "type": "client_finished", "reasons": [] }] }), "reasons is empty"),
        (json!({ "statuses": [{ "type": "client_finished", "reasons": ["bored"] }] }), "bored"),
        (json!({ "owner": { "type": "everyone" } }), "everyone"),
        (json!({ "owner": { "type": "user" } }), "owner_urns"),
        (json!({ "owner": { "type": "user", "owner_urns": [] } }), "owner_urns"),
        (json!({ "owner": { "type": "user", "owner_urns": vec!["x"; 11] } }), "10"),
        (json!({ "owner": { "type": "own", "owner_urns": ["x"] } }), "not own"),
        (json!({ "display_name": " " }), "display_name"),
    ] {
        let refused = server.post("sessions/search", query.clone()).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{query}");
        assert!(refused.detail().contains(word), "{query}: {}", refused.detail());
    }
}

#[tokio::test]
async fn pages_of_sessions_go_on_behind_the_last_one_also_if_it_is_forgotten() {
    let server = TestServer::new();
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d"] {
        ids.push(server.new_session_named(name).await);
        // Clients keep times to the microsecond.
        tokio::time::sleep(std::time::Duration::from_micros(10)).await;
    }
    let page = server.ok("sessions/search", json!({ "limit": 2 })).await;
    assert_eq!(names_of(&page), ["d", "c"]);
    let mut cursor = page["next_cursor"].clone();
    assert_eq!(server.found(json!({ "cursor": cursor })).await, ["b", "a"]);
    server.ok(&format!("sessions/{}/finish", ids[2]), json!({})).await;
    assert_eq!(server.app.registry.forget_ended(), Some(ids[2].clone()));
    assert_eq!(server.found(json!({ "cursor": cursor })).await, ["b", "a"]);
    let whole = cursor["last_created_at"].as_str().unwrap().to_owned();
    let (seconds, fraction) = whole.trim_end_matches('Z').split_once('.').unwrap();
    cursor["last_created_at"] = json!(format!("{seconds}.{:.6}Z", fraction));
    assert_eq!(server.found(json!({ "cursor": cursor })).await, ["b", "a"], "{cursor}");
    // Of another server's sessions, all of which are older.
    let other = json!({ "last_session_id": "0000", "last_created_at": "2026-01-01T00:00:00+00:00" });
    assert_eq!(server.found(json!({ "cursor": other })).await, [""; 0]);
}
