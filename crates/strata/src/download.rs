//! Progress bars of downloads from the hub.

use std::cell::RefCell;

use indicatif::{ProgressBar, ProgressStyle};
use strata_model::checkpoint::{DownloadEvent, DownloadProgress};

/// One bar at a time, for the file that is on its way.
#[derive(Default)]
pub struct DownloadBars {
    current: RefCell<Option<(String, ProgressBar)>>,
}

impl DownloadProgress for DownloadBars {
    fn on_event(&self, event: DownloadEvent<'_>) {
        let mut current = self.current.borrow_mut();
        match event {
            DownloadEvent::Asking { endpoint } => tracing::info!("asking {endpoint} for the model"),
            DownloadEvent::Started { .. } => {}
            DownloadEvent::File { name, bytes_done, bytes_total } => {
                if current.as_ref().is_none_or(|(present, _)| present != name) {
                    finish(&mut current);
                    *current = Some((name.into(), bar(name, bytes_total)));
                }
                if let Some((_, bar)) = current.as_ref() {
                    bar.set_position(bytes_done);
                }
            }
            DownloadEvent::Finished => finish(&mut current),
        }
    }
}

fn finish(current: &mut Option<(String, ProgressBar)>) {
    if let Some((_, bar)) = current.take() {
        bar.finish();
    }
}

fn bar(name: &str, bytes: u64) -> ProgressBar {
    let template = "{msg:32!} {wide_bar} {bytes:>10} of {total_bytes:>10}  {bytes_per_sec:>12}  {eta:>4}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes).with_style(style).with_message(name.to_string())
}
