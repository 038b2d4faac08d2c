//! Connections: accepted up to a number, served one task each, and ended when they are slow or have nothing to do.
//!
//! A connection is idle, or it sends the headers of a request, or a request is being answered, or its answer is sent. The first may take long and counts from the
//! last byte in either direction, the second counts from the first byte on, so that a client that drips gains nothing, the third is the
//! business of whoever reads the body or holds the poll, and the last counts from the last byte that the system has taken for the client. When all places are taken, a new connection takes that of the
//! one that has been idle for longest; where none is idle, it waits.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, Sleep};

use crate::app::ServerConfig;
use crate::limits;

/// How long accepting pauses after an error that is not the client's, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// How long a connection has been idle that gives its place to another; and how often one that found no place looks for it.
const PLACE_PAUSE: Duration = Duration::from_millis(100);

/// How long connections may take over what.
#[derive(Clone, Copy)]
pub struct Times {
    header: Duration,
    idle: Duration,
}

impl Times {
    /// Those of a server.
    pub fn of(config: &ServerConfig) -> Self {
        Times { header: config.header_timeout, idle: config.idle_timeout }
    }
}

/// Serves until `stopped`, then lets the requests at hand be answered.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    times: Times,
    connections_max: usize,
    stopped: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    let (graceful, open) = (GracefulShutdown::new(), Arc::new(Open::default()));
    let mut stopped = std::pin::pin!(stopped);
    loop {
        let accepted = async {
            let (stream, _) = listener.accept().await?;
            // While this one waits, others wait in the system's queue.
            let place = loop {
                if let Ok(place) = places.clone().try_acquire_owned() {
                    break place;
                }
                open.end_longest_idle();
                if let Ok(Ok(place)) = tokio::time::timeout(PLACE_PAUSE, places.clone().acquire_owned()).await {
                    break place;
                }
            };
            Ok((stream, place))
        };
        let accepted: io::Result<_> = tokio::select! {
            () = &mut stopped => break,
            accepted = accepted => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let clock = open.add(times);
                let connection = serve_connection(stream, router.clone(), clock.clone(), graceful.watcher());
                let open = open.clone();
                tokio::spawn(async move {
                    connection.await;
                    open.remove(&clock);
                    drop(place);
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::error!("accepting a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// The connections that are open.
#[derive(Default)]
struct Open {
    clocks: Mutex<HashMap<u64, Arc<Clock>>>,
    count: AtomicU64,
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Clock>>> {
        self.clocks.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn add(&self, times: Times) -> Arc<Clock> {
        let id = self.count.fetch_add(1, Ordering::Relaxed);
        let clock = Arc::new(Clock::new(id, times));
        self.lock().insert(id, clock.clone());
        clock
    }

    fn remove(&self, clock: &Clock) {
        self.lock().remove(&clock.id);
    }

    fn end_longest_idle(&self) {
        let (clocks, now) = (self.lock(), Instant::now());
        let idle = clocks.values().filter_map(|clock| match *clock.lock() {
            // A request may be here of which nothing has been read yet.
            (Phase::Idle, since) if now.duration_since(since) >= PLACE_PAUSE => Some((since, clock)),
            _ => None,
        });
        if let Some((_, clock)) = idle.min_by_key(|(since, _)| *since) {
            clock.enter(Phase::Ended);
        }
    }
}

async fn serve_connection(stream: TcpStream, router: Router, clock: Arc<Clock>, watcher: Watcher) {
    // Answers are small and awaited: waiting to fill a packet would cost up to 40 ms each.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Timed { stream, clock: clock.clone(), lingering: None });
    let router = TowerToHyperService::new(router);
    let service = {
        let clock = clock.clone();
        service_fn(move |request: Request<Incoming>| {
            let answering = Answering::begin(clock.clone());
            let response = router.call(request);
            async move {
                let response = response.await?;
                answering.0.enter(Phase::Sending);
                Ok::<_, Infallible>(response.map(|body| Body::new(Answer { body, answering: Some(answering) })))
            }
        })
    };
    let connection = http1::Builder::new()
        // The clock does this: hyper's takes a connection that has nothing to do for one whose headers are late.
        .header_read_timeout(None)
        .max_headers(limits::HEADERS_MAX)
        .max_header_size(limits::HEADER_BYTES_MAX)
        .max_buf_size(limits::CONNECTION_BUFFER_BYTES)
        .serve_connection(io, service);
    tokio::select! {
        served = watcher.watch(connection) => if let Err(error) = served {
            tracing::debug!("a connection ended: {error}");
        },
        late = clock.overdue() => tracing::debug!("a connection was closed: {late}"),
    }
}

/// What a connection is doing.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Idle,
    Headers,
    Answering,
    /// The answer is there, and its body not at its end.
    Sending,
    /// The answer is at its end, and not with the system yet.
    Sent,
    /// Its place is wanted by another.
    Ended,
}

/// Since when a connection has been doing what.
struct Clock {
    id: u64,
    times: Times,
    state: Mutex<(Phase, Instant)>,
    changed: Notify,
}

impl Clock {
    fn new(id: u64, times: Times) -> Self {
        Clock { id, times, state: Mutex::new((Phase::Idle, Instant::now())), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, (Phase, Instant)> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn enter(&self, phase: Phase) {
        *self.lock() = (phase, Instant::now());
        self.changed.notify_one();
    }

    fn read_something(&self) {
        let mut state = self.lock();
        if state.0 == Phase::Idle {
            *state = (Phase::Headers, Instant::now());
            self.changed.notify_one();
        }
    }

    fn wrote_something(&self) {
        let mut state = self.lock();
        if matches!(state.0, Phase::Idle | Phase::Sending | Phase::Sent) {
            state.1 = Instant::now();
        }
    }

    fn flushed(&self) {
        let mut state = self.lock();
        if state.0 == Phase::Sent {
            *state = (Phase::Idle, Instant::now());
            self.changed.notify_one();
        }
    }

    /// Waits until the connection takes too long, and says over what.
    async fn overdue(&self) -> &'static str {
        loop {
            let (phase, since) = *self.lock();
            let (time, late) = match phase {
                Phase::Idle => (self.times.idle, "it was idle"),
                Phase::Headers => (self.times.header, "the headers of its request did not arrive in time"),
                Phase::Sending | Phase::Sent => (self.times.idle, "its client did not take the answer"),
                Phase::Ended => return "its place was wanted",
                Phase::Answering => {
                    self.changed.notified().await;
                    continue;
                }
            };
            let deadline = since + time;
            if Instant::now() >= deadline {
                return late;
            }
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => {}
                () = self.changed.notified() => {}
            }
        }
    }
}

/// A request is being answered, or its answer handed on, while this is there.
struct Answering(Arc<Clock>);

impl Answering {
    fn begin(clock: Arc<Clock>) -> Self {
        clock.enter(Phase::Answering);
        Answering(clock)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.enter(Phase::Sent);
    }
}

/// The body of an answer, which is being sent until its end.
struct Answer {
    body: Body,
    answering: Option<Answering>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() {
            self.answering = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that tells the clock what it moves, and that reads on for a moment when it is shut down: the system resets a connection that is
/// closed with bytes unread, and the answer that was just sent is lost with it.
struct Timed {
    stream: TcpStream,
    clock: Arc<Clock>,
    lingering: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Timed {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if buffer.filled().len() > before {
            self.clock.read_something();
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.clock.wrote_something();
        Poll::Ready(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, parts));
        self.clock.wrote_something();
        Poll::Ready(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(context));
        // Asked for where all has been written.
        self.clock.flushed();
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            self.lingering = Some(Box::pin(tokio::time::sleep(limits::LINGER_TIME_MAX)));
        }
        let mut dropped = [0; 8192];
        loop {
            if let Some(time) = &mut self.lingering
                && time.as_mut().poll(context).is_ready()
            {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut dropped);
            match ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                // The client has closed too, in whichever way.
                Ok(()) | Err(_) => return Poll::Ready(Ok(())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LARGE: usize = 32 << 20;

    /// A server of two connections whose answers are small, large, or never there.
    async fn started(idle: Duration) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/small", get(async || "small"))
            .route("/large", get(async || vec![7; LARGE]))
            .route("/parts", get(async || Body::new(Parts(LARGE))))
            .route("/never", get(std::future::pending::<()>));
        tokio::spawn(serve(listener, router, Times { header: Duration::from_secs(60), idle }, 2, std::future::pending()));
        address
    }

    /// A body of so many bytes, of which each part is asked for.
    struct Parts(usize);

    impl HttpBody for Parts {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let part = self.0.min(64 << 10);
            self.0 -= part;
            Poll::Ready((part > 0).then(|| Ok(Frame::data(vec![7; part].into()))))
        }
    }

    async fn ask(address: std::net::SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn a_connection_whose_answer_is_being_sent_is_not_idle() {
        let address = started(Duration::from_secs(60)).await;
        let (mut large, _never) = (ask(address, "/large").await, ask(address, "/never").await);
        assert_eq!(large.read(&mut [0]).await.unwrap(), 1);
        let mut small = ask(address, "/small").await;
        // Time enough to take a place that is to be had.
        assert!(tokio::time::timeout(5 * PLACE_PAUSE, small.read(&mut [0])).await.is_err(), "there is no place yet");
        let mut taken = 1;
        let mut buffer = vec![0; 1 << 20];
        while taken < LARGE {
            let count = large.read(&mut buffer).await.unwrap();
            assert!(count > 0, "cut at {taken} bytes");
            taken += count;
        }
        let answered = tokio::time::timeout(Duration::from_secs(30), small.read(&mut [0])).await;
        assert_eq!(answered.expect("what has been sent gives its place").unwrap(), 1);
    }

    #[tokio::test]
    async fn a_connection_that_has_just_come_is_not_taken_for_idle() {
        let address = started(Duration::from_secs(60)).await;
        let clients = (0..6).map(|_| {
            tokio::spawn(async move {
                for _ in 0..100 {
                    let mut small = ask(address, "/small").await;
                    assert_eq!(small.read(&mut [0]).await.unwrap(), 1, "closed before it was answered");
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_take_its_answer_loses_it() {
        let address = started(Duration::from_millis(200)).await;
        for path in ["/large", "/parts"] {
            let mut large = ask(address, path).await;
            assert_eq!(large.read(&mut [0]).await.unwrap(), 1);
            tokio::time::sleep(Duration::from_millis(600)).await;
            let mut rest = Vec::new();
            // An end or a reset, as the system has it.
            let _ = large.read_to_end(&mut rest).await;
            assert!(rest.len() < LARGE, "{path}: {}", rest.len());
        }
        // One that takes it, part by part, has it all.
        let mut large = ask(address, "/large").await;
        let (mut taken, mut buffer) = (0, vec![0; 8 << 20]);
        while taken < LARGE {
            tokio::time::sleep(Duration::from_millis(50)).await;
            taken += large.read(&mut buffer).await.unwrap();
        }
    }
}
