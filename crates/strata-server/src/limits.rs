//! Every bound on what comes from outside, in one place. Beyond a bound a request is refused with a reason, never truncated.

use std::time::Duration;

pub use strata_engine::limits::{DATUMS_MAX, NUM_SAMPLES_MAX, PROMPT_ALT_TOKENS_MAX, STOP_BYTES_MAX, STOPS_MAX, TOPK_MAX};

/// Bytes of a request body, as sent and after inflation; less where the transit budget is small.
pub const BODY_BYTES_MAX: usize = 256 << 20;
/// Bytes of all requests on their way in, unless settings say otherwise.
pub const TRANSIT_BYTES: usize = 512 << 20;
/// How long a body waits for room in the transit budget before its client is asked to come back.
pub const TRANSIT_WAIT: Duration = Duration::from_secs(2);
/// Bodies above this, and all compressed ones, are decoded on a blocking thread, so that no async thread is held for longer than about 500 µs.
pub const BODY_INLINE_BYTES_MAX: usize = 16 << 10;
/// Requests that are charged for more have their results encoded on a blocking thread.
pub const RESULT_INLINE_BYTES_MAX: u64 = 1 << 20;
/// Bodies that are decoded at the same time on blocking threads.
pub const DECODES_MAX: usize = 4;
/// Time in which a body arrives, unless settings say otherwise.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(60);
/// How long a body may pause between two parts.
pub const BODY_STALL_MAX: Duration = Duration::from_secs(10);
/// Log2 of the largest zstd window in bytes; less where the transit budget is small. Level 19, the highest that is not `--ultra`, uses it.
pub const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// Bytes that are read of a body that nobody wants, such as one without the right key.
pub const DRAINED_BYTES_MAX: usize = 1 << 20;
/// Bytes of a body that is refused in which the model and the place of its operation are looked for.
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// How long the start of a body is waited for whose rest will not be read.
pub const HEAD_TIME_MAX: Duration = Duration::from_millis(500);
/// Log2 of the largest zstd window in bytes that is taken to look there.
pub const ZSTD_START_WINDOW_LOG_MAX: u32 = 21;
/// How long such a body may take to arrive.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);

/// Connections that are open at the same time, unless settings say otherwise.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Bytes of the headers of a request.
pub const HEADER_BYTES_MAX: usize = 16 << 10;
/// Headers of a request.
pub const HEADERS_MAX: usize = 100;
/// Bytes that a connection buffers of what it reads.
pub const CONNECTION_BUFFER_BYTES: usize = 64 << 10;
/// Time in which the headers of a request arrive, unless settings say otherwise.
pub const HEADER_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a connection may be open with nothing to do, unless settings say otherwise.
pub const IDLE_TIME_MAX: Duration = Duration::from_secs(120);
/// How long a connection that the server ends goes on reading: one that is closed with bytes unread takes its last answer with it.
pub const LINGER_TIME_MAX: Duration = Duration::from_secs(1);

/// Length of every text in a JSON body; most have a lower limit of their own.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Length of ids in JSON bodies.
pub const ID_BYTES_MAX: usize = 512;
/// Characters of an outside text that are shown in an error.
pub const SHOWN_CHARS_MAX: usize = 128;
/// Characters of an error that quotes a body.
pub const ERROR_CHARS_MAX: usize = 1000;
/// Characters of any refusal, whatever it quotes: nobody may read it, and then it is held as long as its connection.
pub const REFUSAL_CHARS_MAX: usize = 4096;
/// Length of every identifier and checkpoint name from outside.
pub const NAME_BYTES_MAX: usize = 200;
/// Length of a URL-like `tinker://` path.
pub const PATH_BYTES_MAX: usize = 512;
/// Bytes of the metadata that a user may attach to a session, a model or a checkpoint, as JSON.
pub const METADATA_BYTES_MAX: usize = 64 << 10;
/// Entries of such metadata.
pub const METADATA_ENTRIES_MAX: usize = 1024;

/// Nested messages of one protobuf body; each costs far more memory than the two bytes it may take on the wire.
pub const PROTO_MESSAGES_MAX: usize = 1 << 20;
/// Chunks of one input or prompt.
pub const CHUNKS_MAX: usize = 16_384;
/// Pictures of one input or prompt.
pub const IMAGES_MAX: usize = strata_engine::limits::IMAGES_MAX;
/// Bytes of the file of a picture: what is decoded.
pub const IMAGE_BYTES_MAX: usize = strata_model::vision::IMAGE_BYTES_MAX;
/// Length of where the picture of an `image_asset_pointer` is said to be.
pub const LOCATION_BYTES_MAX: usize = 4096;
/// Requests whose pictures are read from directories at the same time.
pub const ASSET_READS_MAX: usize = 4;
/// Requests whose pictures are decoded, to know that they can be, at the same time.
pub const PICTURE_CHECKS_MAX: usize = 4;
/// Requests whose pictures are fetched from stores at the same time, each one after another.
pub const ASSET_FETCHES_MAX: usize = 16;
/// Time in which a store is connected to.
pub const ASSET_CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// Time in which all pictures of a request are fetched from stores; the SDK gives up on an answer after 60 s.
pub const ASSET_FETCH_TIME_MAX: Duration = Duration::from_secs(30);
/// Tensors of one example.
pub const LOSS_INPUTS_MAX: usize = 64;
/// Settings of a loss.
pub const LOSS_SETTINGS_MAX: usize = 256;

/// Tokens of one prompt; the engine holds prompts to its context length as well.
pub const PROMPT_TOKENS_MAX: usize = 1 << 22;

/// Sessions that ended but can still be listed.
pub const ENDED_SESSIONS_MAX: usize = 4096;
/// Models of one session, over its whole life.
pub const MODELS_PER_SESSION_MAX: usize = 256;
/// Sampling sessions of one session that are not freed.
pub const SAMPLERS_PER_SESSION_MAX: usize = 4096;
/// Unnamed snapshots that one session keeps in memory; a new one frees the least recently used that has no sample running.
pub const SNAPSHOTS_PER_SESSION_MAX: usize = 16;

/// How long a result waits for its first reader.
pub const RESULT_UNREAD_RETENTION: Duration = Duration::from_secs(3600);
/// How long a result can be read again, as a client does when the answer was lost on the way.
pub const RESULT_READ_RETENTION: Duration = Duration::from_secs(300);
/// Ids of results that are gone and still answered as such, rather than as unknown: some 4 MB of hashes.
pub const GONE_FUTURES_MAX: usize = 65_536;
/// What a result takes of memory besides its own bytes: its entries in tables.
pub const FUTURE_BYTES: u64 = 512;
/// Of the memory for requests, the part that records of samples may take; an owner may have half of it.
pub const RECORDS_FRACTION: u64 = 4;
/// How long what is recorded of a sample is kept after its last use.
pub const RECORD_LIFE: Duration = Duration::from_secs(24 * 3600);
/// What a record takes of memory besides its values: its entries in tables.
pub const RECORD_BYTES: u64 = 512;
/// What the allocator adds to what is allocated, twice for two lists.
pub const ALLOCATION_BYTES: usize = 32;
/// What a session takes of memory besides its metadata; a model or a sampling session in it takes as much again.
pub const SESSION_BYTES: u64 = 1024;
/// How long a session that has neither models nor samplers may be silent before it makes room for others.
pub const EMPTY_SESSION_PATIENCE: Duration = Duration::from_secs(30);

/// Ids of read results that one poll may report: a client keeps those of a poll that failed for the next.
pub const RETRIEVED_IDS_MAX: usize = 65_536;
/// Completions that one poll is told of at most; the next gets the rest.
pub const COMPLETIONS_MAX: usize = 4096;
/// Requests of one client of a sampling session: the next client's begin there.
pub const REQUESTS_PER_CLONE: u64 = 1_000_000_000;
/// Sessions of one page of a search.
pub const SESSIONS_FOUND_MAX: usize = 200;
/// Owners that a search may name.
pub const OWNERS_SOUGHT_MAX: usize = 10;
/// How long a poll for a result is held; the SDK gives up on a poll after 45 s.
pub const POLL_HOLD: Duration = Duration::from_secs(25);
/// How often expired sessions, results and checkpoints are looked for.
pub const REAP_INTERVAL: Duration = Duration::from_secs(5);
/// How long a shutdown waits for requests that are being answered.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Shortest and longest life of a checkpoint in seconds, where it has one: an hour and ten years.
pub const CHECKPOINT_TTL_SECONDS: std::ops::RangeInclusive<i64> = 3600..=10 * 365 * 24 * 3600;
/// Bytes that the catalogue of checkpoints takes in memory, less where a server has little; beyond it saves are refused until some are deleted. With
/// short metadata that is some 200,000 checkpoints.
pub const CATALOGUE_BYTES_MAX: usize = 128 << 20;
/// How long the address of a file of a checkpoint holds; the SDK asks for new ones when less than five minutes are left.
pub const DOWNLOAD_URL_LIFE: Duration = Duration::from_secs(2 * 3600);
/// Bytes of a file that are read at a time, as they are sent.
pub const DOWNLOAD_CHUNK_BYTES: usize = 64 << 10;
/// Adapters that are uploaded at the same time.
pub const UPLOADS_MAX: usize = 4;
/// Bytes in a second that an upload brings at least, beyond the time that every body has.
pub const UPLOAD_BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// Bytes of an uploaded `adapter_config.json`.
pub const ADAPTER_CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Bytes of what an archive says of a file that is not in its header, or of a file that is passed over.
pub const ARCHIVE_EXTRA_BYTES_MAX: u64 = 1 << 20;
/// Entries of an uploaded archive.
pub const ARCHIVE_ENTRIES_MAX: usize = 16;
/// Adapters that are read and written in another form at the same time.
pub const CONVERSIONS_MAX: usize = 2;
/// Part of the transit budget that one of them may take.
pub const CONVERSION_PART: usize = 2;
/// Entries of one page of a listing.
pub const PAGE_MAX: usize = 1000;

/// An amount of memory for people.
pub fn shown_bytes(bytes: usize) -> String {
    match bytes {
        mib if mib >= 1 << 20 && mib.is_multiple_of(1 << 20) => format!("{} MiB", mib >> 20),
        kib if kib >= 1 << 10 && kib.is_multiple_of(1 << 10) => format!("{} KiB", kib >> 10),
        bytes => format!("{bytes} bytes"),
    }
}
