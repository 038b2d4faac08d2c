//! Every bound on what comes from outside, in one place. Beyond a bound a request is refused with a reason, never truncated.

use std::time::Duration;

/// Bytes of a request body, as sent and after inflation.
pub const BODY_BYTES_MAX: usize = 256 << 20;
/// Bodies from here on are decoded on a blocking thread, so that no async thread is held for longer than about 500 µs.
pub const BODY_INLINE_BYTES_MAX: usize = 128 << 10;
/// Bytes that are read of a body that nobody wants, such as one without the right key.
pub const DRAINED_BYTES_MAX: usize = 1 << 20;
/// How long such a body may take to arrive.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);
/// Length of every identifier and checkpoint name from outside.
pub const NAME_BYTES_MAX: usize = 200;
/// Length of a URL-like `tinker://` path.
pub const PATH_BYTES_MAX: usize = 512;
/// Bytes of the metadata that a user may attach to a session, a model or a checkpoint, as JSON.
pub const METADATA_BYTES_MAX: usize = 64 << 10;

/// Examples of one `forward_backward`.
pub const DATUMS_MAX: usize = 65_536;
/// Nested messages of one protobuf body; each costs far more memory than the two bytes it may take on the wire.
pub const PROTO_MESSAGES_MAX: usize = 1 << 20;
/// Elements of all loss inputs of one request after sparse ones are filled in.
pub const LOSS_ELEMENTS_MAX: usize = 1 << 26;

/// Sequences of one sampling request.
pub const NUM_SAMPLES_MAX: usize = 4096;
/// Tokens of one prompt; the engine holds prompts to its context length as well.
pub const PROMPT_TOKENS_MAX: usize = 1 << 22;
/// Sequences of all sampling requests that wait or run; beyond it clients are asked to slow down.
pub const QUEUED_SEQUENCES_MAX: usize = 65_536;
/// Most probable tokens returned for a position.
pub const TOPK_MAX: usize = 128;
/// Stop tokens or strings of a sampling request.
pub const STOPS_MAX: usize = 256;

/// Sessions that are alive.
pub const SESSIONS_MAX: usize = 4096;
/// Sessions that ended but can still be listed.
pub const ENDED_SESSIONS_MAX: usize = 4096;
/// Models of one session, over its whole life.
pub const MODELS_PER_SESSION_MAX: usize = 256;
/// Sampling sessions of one session that are not freed.
pub const SAMPLERS_PER_SESSION_MAX: usize = 4096;
/// Unnamed snapshots that one session keeps in memory; a new one frees the least recently used that has no sample running.
pub const SNAPSHOTS_PER_SESSION_MAX: usize = 16;
/// How far an operation of a model may run ahead of the first that is missing.
pub const SEQUENCE_AHEAD_MAX: u64 = 16_384;

/// Requests whose outcome is still open.
pub const PENDING_FUTURES_MAX: usize = 131_072;
/// Body bytes of requests whose outcome is still open.
pub const PENDING_BYTES_MAX: usize = 4 << 30;
/// Bytes of finished results that are kept for their readers.
pub const RESULT_BYTES_MAX: usize = 1 << 30;
/// How long a result waits for its first reader.
pub const RESULT_UNREAD_RETENTION: Duration = Duration::from_secs(3600);
/// How long a result can be read again, as a client does when the answer was lost on the way.
pub const RESULT_READ_RETENTION: Duration = Duration::from_secs(300);
/// Ids of results that are gone and still answered as such, rather than as unknown.
pub const GONE_FUTURES_MAX: usize = 262_144;

/// How long a poll for a result is held; the SDK gives up on a poll after 45 s.
pub const POLL_HOLD: Duration = Duration::from_secs(25);
/// How often expired sessions, results and checkpoints are looked for.
pub const REAP_INTERVAL: Duration = Duration::from_secs(5);
/// How long a shutdown waits for requests that are being answered.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Shortest and longest life of a checkpoint in seconds, where it has one: an hour and ten years.
pub const CHECKPOINT_TTL_SECONDS: std::ops::RangeInclusive<i64> = 3600..=10 * 365 * 24 * 3600;
/// Bytes that the catalogue of checkpoints takes in memory; beyond it saves are refused until some are deleted. With short metadata that
/// is some 200,000 checkpoints.
pub const CATALOGUE_BYTES_MAX: usize = 128 << 20;
/// Entries of one page of a listing.
pub const PAGE_MAX: usize = 1000;
