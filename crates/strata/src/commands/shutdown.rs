//! How a server ends: it takes no more requests, and stays until the checkpoints that were asked for are written. And how a command ends that was to write a directory.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use strata_engine::EngineHandle;
use strata_model::checkpoint::{abandon_files, abandon_writes};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep};

use crate::output::say_aside;

/// How often it is looked whether all is written. The engine need not know that someone waits.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How often it is said that there is still something to wait for.
const REMINDER_INTERVAL: Duration = Duration::from_secs(10);

/// The signals that ask a process to end: SIGTERM, SIGINT as Ctrl-C sends it, and SIGHUP as a terminal does that is closed. The last two are left ignored where whoever started the process has them so, as
/// `nohup` has one, and a shell the other for what it runs in the background.
pub struct Signals {
    terminate: Signal,
    interrupt: Option<Signal>,
    hang_up: Option<Signal>,
}

impl Signals {
    /// Listens from now on; the process does not end by itself any more.
    ///
    /// # Errors
    /// If signals cannot be listened for.
    pub fn listen() -> anyhow::Result<Self> {
        let unless_ignored = |kind: SignalKind| match is_ignored(kind) {
            true => Ok(None),
            false => signal(kind).map(Some).with_context(|| format!("listening for signal {}", kind.as_raw_value())),
        };
        Ok(Signals {
            terminate: signal(SignalKind::terminate()).context("listening for SIGTERM")?,
            interrupt: unless_ignored(SignalKind::interrupt())?,
            hang_up: unless_ignored(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal, and answers which it is. Those that came in between count.
    pub async fn next(&mut self) -> SignalKind {
        async fn of(signal: &mut Option<Signal>) {
            match signal {
                Some(signal) => drop(signal.recv().await),
                None => std::future::pending().await,
            }
        }
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            () = of(&mut self.interrupt) => SignalKind::interrupt(),
            () = of(&mut self.hang_up) => SignalKind::hangup(),
        }
    }
}

/// Whether a signal does nothing to this process, as it was started. Where that cannot be seen, SIGHUP is left as it is, and the others are taken.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    match ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()) {
        Some(mask) => mask >> (kind.as_raw_value() - 1) & 1 != 0,
        None => kind == SignalKind::hangup(),
    }
}

/// Does work that writes directories and files, which a signal ends: what is not written to its end is gone then. A second signal does not wait for a disk that hangs.
///
/// # Errors
/// Those of the work, or if signals cannot be listened for.
pub fn interruptible<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let give_up = || {
        abandon_files();
        abandon_writes();
    };
    interruptible_with(give_up, work)
}

/// As [`interruptible`], with what is to be done when a signal comes.
///
/// # Errors
/// As [`interruptible`].
pub fn interruptible_with<T>(
    give_up: impl FnOnce() + Send + 'static,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("listening for signals")?;
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    // Whoever comes first says how it ended.
    let is_decided = Arc::new(AtomicBool::new(false));
    let by_signal = is_decided.clone();
    std::thread::spawn(move || {
        let kind = runtime.block_on(signals.next());
        if by_signal.swap(true, Ordering::SeqCst) {
            return;
        }
        runtime.block_on(async {
            let abandoned = tokio::task::spawn_blocking(give_up);
            tokio::select! {
                _ = abandoned => {}
                _ = signals.next() => {}
            }
        });
        say_aside!("error: interrupted");
        // As a shell has it of a program that a signal has ended.
        std::process::exit(128 + kind.as_raw_value());
    });
    let done = work();
    while is_decided.swap(true, Ordering::SeqCst) {
        std::thread::park();
    }
    done
}

/// What is waited for.
pub trait Saves {
    /// Saves that were acknowledged and are not answered.
    fn in_work(&self) -> usize;
    /// Saves that failed so far.
    fn failed(&self) -> usize;
    /// Whether anyone is at work.
    fn is_alive(&self) -> bool;
    /// Gives up all work that no save waits for.
    fn drain(&self);
}

impl Saves for Vec<EngineHandle> {
    fn in_work(&self) -> usize {
        self.iter().map(EngineHandle::saves_in_work).sum()
    }

    fn failed(&self) -> usize {
        self.iter().map(EngineHandle::saves_failed).sum()
    }

    fn is_alive(&self) -> bool {
        self.iter().any(EngineHandle::is_alive)
    }

    fn drain(&self) {
        self.iter().for_each(EngineHandle::drain);
    }
}

/// Waits for `stop`, after which no more is asked for, and until all saves are written, both together for at most `timeout`, or until
/// `hurry` is over. Other work is given up.
///
/// # Errors
/// If checkpoints were not written. The text says how many.
pub async fn end(
    stop: impl Future<Output = ()>,
    saves: &impl Saves,
    timeout: Duration,
    hurry: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tracing::info!("stopping: no more requests are taken");
    let failed_before = saves.failed();
    let written = async {
        // What there is to wait for is said at once, and what came in while the server stopped is waited for too.
        tokio::join!(stop, wait_until_written(saves, timeout));
        saves.drain();
        wait_until_written(saves, timeout).await;
    };
    let cut = tokio::select! {
        biased;
        () = written => None,
        () = hurry => Some("before a second signal"),
        () = sleep(timeout) => Some("in time"),
    };
    let (unwritten, failed) = (saves.in_work(), saves.failed() - failed_before);
    match cut {
        Some(why) if unwritten > 0 => bail!("{} not written {why}", checkpoints_were(unwritten)),
        _ if failed > 0 => bail!("{} not written; the log says why", checkpoints_were(failed)),
        _ if !saves.is_alive() => bail!("the engine had stopped before; the log says why"),
        _ => Ok(()),
    }
}

async fn wait_until_written(saves: &impl Saves, timeout: Duration) {
    let mut said: Option<Instant> = None;
    loop {
        let in_work = saves.in_work();
        if in_work == 0 || !saves.is_alive() {
            return;
        }
        if said.is_none_or(|at| at.elapsed() >= REMINDER_INTERVAL) {
            said = Some(Instant::now());
            let are = if in_work == 1 { "checkpoint is" } else { "checkpoints are" };
            let seconds = timeout.as_secs_f32();
            tracing::info!(
                "stopping: {in_work} {are} still being written (waiting at most {seconds} s; a second signal ends at once)"
            );
        }
        sleep(LOOK_INTERVAL).await;
    }
}

fn checkpoints_were(count: usize) -> String {
    if count == 1 { "1 checkpoint was".into() } else { format!("{count} checkpoints were") }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// One save is written each time somebody looks, until `sticks_at` are left.
    struct Scripted {
        left: AtomicUsize,
        sticks_at: usize,
        failed: AtomicUsize,
        fails: bool,
        is_alive: AtomicBool,
    }

    fn saves(left: usize, sticks_at: usize) -> Scripted {
        let (left, failed, is_alive) = (left.into(), 0.into(), true.into());
        Scripted { left, sticks_at, failed, fails: false, is_alive }
    }

    impl Saves for Scripted {
        fn in_work(&self) -> usize {
            let left = self.left.load(Ordering::Relaxed);
            if left > self.sticks_at {
                self.left.store(left - 1, Ordering::Relaxed);
                self.failed.fetch_add(usize::from(self.fails), Ordering::Relaxed);
            }
            left
        }

        fn failed(&self) -> usize {
            self.failed.load(Ordering::Relaxed)
        }

        fn is_alive(&self) -> bool {
            self.is_alive.load(Ordering::Relaxed)
        }

        fn drain(&self) {}
    }

    #[tokio::test]
    async fn the_end_comes_once_everything_is_written() {
        let saves = saves(5, 0);
        end(ready(()), &saves, LONG, pending()).await.unwrap();
        assert_eq!(saves.in_work(), 0);
    }

    #[tokio::test]
    async fn what_is_not_written_in_time_is_counted_and_an_error() {
        let error = end(ready(()), &saves(5, 3), Duration::from_millis(200), pending()).await.unwrap_err().to_string();
        assert_eq!(error, "3 checkpoints were not written in time");
    }

    #[tokio::test]
    async fn a_second_signal_ends_at_once_also_while_requests_are_being_answered() {
        let second = || sleep(Duration::from_millis(50));
        let error = end(ready(()), &saves(1, 1), LONG, second()).await.unwrap_err().to_string();
        assert_eq!(error, "1 checkpoint was not written before a second signal");
        end(pending(), &saves(0, 0), LONG, second()).await.unwrap();
    }

    #[tokio::test]
    async fn saves_that_fail_at_the_end_and_a_dead_engine_are_errors() {
        let failing = Scripted { fails: true, ..saves(2, 0) };
        let error = end(ready(()), &failing, LONG, pending()).await.unwrap_err().to_string();
        assert_eq!(error, "2 checkpoints were not written; the log says why");
        let dead = saves(2, 2);
        dead.is_alive.store(false, Ordering::Relaxed);
        assert!(end(ready(()), &dead, LONG, pending()).await.is_err());
    }
}
