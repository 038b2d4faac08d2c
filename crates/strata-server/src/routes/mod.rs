//! The endpoints, one file for each part of the API.

mod account;
mod adapters;
mod checkpoints;
mod config;
mod downloads;
mod futures;
mod listing;
mod runs;
mod sampling;
mod sessions;
mod training;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use serde_json::json;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::trace::TraceLayer;
use tracing::Span;

use crate::app::App;
use crate::auth;
use crate::edge;
use crate::error::ApiError;
use crate::limits;
use crate::names::{cut, shown};
use crate::payload::{refuse, refuse_operation};

#[cfg(test)]
pub use downloads::tar_header;
pub use training::take_place;

/// All endpoints over one server's state.
pub fn router(app: Arc<App>) -> Router {
    let open = Router::new()
        .route("/healthz", get(config::healthz))
        .route("/api/v1/healthz", get(config::healthz))
        // Whoever holds such an address may have the file.
        .route("/api/v1/downloads/{run}/{kind}/{name}/{file}", get(downloads::file));
    let api = Router::new()
        .route("/client/config", post(config::client_config))
        .route("/client/dynamic_config", post(config::client_dynamic_config))
        .route("/get_server_capabilities", get(config::capabilities))
        .route("/telemetry", post(config::telemetry))
        .route("/create_session", post(sessions::create))
        .route("/session_heartbeat", post(sessions::heartbeat))
        .route("/sessions", get(sessions::list))
        .route("/sessions/{session_id}", get(sessions::get))
        .route("/sessions/{session_id}/finish", post(sessions::finish))
        .route("/sessions/search", post(sessions::search))
        .route("/sessions/{session_id}/project", put(sessions::assign_project))
        .route("/sessions/{session_id}/trace_export", get(account::trace))
        .route("/auth/apikey/me", get(account::key).delete(account::delete_key))
        .route("/auth/token", post(account::token))
        .route("/billing/usage/events", get(account::usage))
        .route("/billing/usage/checkpoints/current", get(account::checkpoint_usage))
        .route("/audit", get(account::audit))
        .route("/create_custom_loss", post(account::custom_loss))
        .route("/create_model", post(training::create_model))
        .route("/unload_model", post(training::unload_model))
        .route("/get_info", post(training::get_info))
        .route("/forward_backward", post(training::forward_backward))
        .route("/forward", post(training::forward))
        .route("/optim_step", post(training::optim_step))
        .route("/save_weights", post(checkpoints::save_weights))
        .route("/save_weights_external", post(checkpoints::save_weights_external))
        .route("/save_weights_for_sampler", post(checkpoints::save_weights_for_sampler))
        .route("/load_weights", post(checkpoints::load_weights))
        .route("/weights/import", post(adapters::import))
        .route("/create_sampling_session", post(sampling::create_session))
        .route("/join_sampling_session", post(sampling::join))
        .route("/samplers/{sampler_id}", get(sampling::get))
        .route("/asample", post(sampling::sample))
        .route("/retrieve_future", post(futures::retrieve))
        .route("/retrieve_futures", post(futures::retrieve_many))
        .route("/copy_weights", post(checkpoints::copy_weights))
        .route("/cancel_future", post(futures::cancel))
        .route("/weights_info", post(runs::weights_info))
        .route("/checkpoints", get(runs::all_checkpoints))
        .route("/training_runs", get(runs::list))
        .route("/training_runs/{run}", get(runs::get))
        .route("/training_runs/{run}/checkpoints", get(runs::checkpoints))
        .route("/training_runs/{run}/checkpoints/{kind}/{name}", delete(checkpoints::delete))
        .route(
            "/training_runs/{run}/checkpoints/{kind}/{name}/publish",
            post(checkpoints::publish).delete(checkpoints::unpublish),
        )
        .route("/training_runs/{run}/checkpoints/{kind}/{name}/ttl", put(checkpoints::set_ttl))
        .route("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls", get(downloads::urls))
        .route("/training_runs/{run}/checkpoints/{kind}/{name}/archive", get(downloads::archive))
        .route_layer(middleware::from_fn_with_state(app.clone(), auth::require_key));
    let trace = TraceLayer::new_for_http()
        .make_span_with(|request: &Request| {
            let sdk_method = request.headers().get("x-sdk-method").and_then(|value| value.to_str().ok()).unwrap_or("");
            tracing::debug_span!("http", method = %request.method(), path = request.uri().path(), sdk_method)
        })
        .on_request(())
        .on_response(|response: &Response, latency: Duration, _: &Span| {
            let latency_ms = latency.as_secs_f64() * 1e3;
            tracing::debug!(status = response.status().as_u16(), latency_ms, "answered");
        });
    open.nest("/api/v1", api)
        .fallback(no_endpoint)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(app.clone(), edge::check))
        .layer(middleware::map_response(with_detail))
        .layer(CatchPanicLayer::custom(|_| {
            ApiError::Internal("this request hit a bug in the server; its log says where".into()).into_response()
        }))
        .layer(trace)
        .with_state(app)
}

/// Refusals of the framework, such as of a path that is no UTF-8, come as plain text; clients look for a `detail`.
async fn with_detail(response: Response) -> Response {
    let is_json = response.headers().get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if !response.status().is_client_error() || is_json {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = axum::body::to_bytes(body, limits::TEXT_BYTES_MAX).await.unwrap_or_default();
    let detail = String::from_utf8_lossy(&text);
    (parts.status, Json(json!({ "detail": cut(&detail, limits::ERROR_CHARS_MAX) }))).into_response()
}

async fn no_endpoint(State(app): State<Arc<App>>, request: Request) -> Response {
    let refusal = format!("there is no endpoint {} {} on this server", method_of(&request), shown(request.uri().path()));
    refuse_unknown(&app, request, ApiError::NotFound(refusal)).await
}

async fn no_method(State(app): State<Arc<App>>, request: Request) -> Response {
    let refusal = format!("{} does not answer to {}", shown(request.uri().path()), method_of(&request));
    refuse_unknown(&app, request, ApiError::MethodNotAllowed(refusal)).await
}

/// A client may send an operation that this server does not know, and waits for those that it sends after it.
async fn refuse_unknown(app: &Arc<App>, request: Request, refusal: ApiError) -> Response {
    match auth::check_key(app, request.headers()) {
        Ok(()) => refuse_operation(app, request, refusal).await,
        Err(_) => refuse(request, refusal).await,
    }
}

fn method_of(request: &Request) -> String {
    shown(request.method().as_str()).into_owned()
}
