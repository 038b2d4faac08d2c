//! Answers that grow with what is kept here: pages of checkpoints, runs and sessions.
//!
//! They are written from where their entries are, one after another, and charged as a request is, as they are written and for as long as their clients have not read them.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::{Serialize, Serializer};

use crate::app::App;
use crate::blocking::in_turn;
use crate::error::{ApiError, ApiResult};
use crate::limits;
use crate::payload::ChargedText;

/// Where the answer is written.
pub struct Page {
    text: ChargedText,
}

impl Page {
    /// One that is still empty.
    pub fn new(app: &App) -> Self {
        Page { text: ChargedText::new(app.transit.charge()) }
    }

    /// Writes the answer.
    ///
    /// # Errors
    /// If there is no room for it, now or ever.
    pub fn write(&mut self, answer: &impl Serialize) -> ApiResult<()> {
        serde_json::to_writer(&mut self.text, answer).map_err(|error| match self.text.refusal.take() {
            Some(ApiError::TooLarge(_)) => ApiError::TooLarge(format!(
                "this list takes more than the {} that this server has for one answer; ask for fewer entries (limit)",
                limits::shown_bytes(self.text.bytes_max())
            )),
            Some(refusal) => refusal,
            None => ApiError::Internal(format!("writing an answer: {error}")),
        })
    }

    /// What was written, charged until it is sent.
    pub fn into_response(self) -> Response {
        ([(CONTENT_TYPE, "application/json")], Bytes::from_owner(self.text)).into_response()
    }
}

/// Answers with what `write` writes, in its owner's turn and off the threads that serve.
///
/// # Errors
/// Those of `write`.
pub async fn listed(
    app: &Arc<App>,
    owner: &str,
    write: impl FnOnce(&App, &mut Page) -> ApiResult<()> + Send + 'static,
) -> ApiResult<Response> {
    let listing = app.clone();
    let work = move || {
        let mut page = Page::new(&listing);
        write(&listing, &mut page).map(|()| page)
    };
    in_turn((&app.decodes, owner), work).await.map(Page::into_response)
}

/// Entries that are made one by one, as they are written.
pub struct Entries<I>(pub I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Entries<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}
