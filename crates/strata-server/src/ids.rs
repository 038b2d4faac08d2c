//! Names that the server gives. In tests they are the same every time.

#[cfg(not(test))]
pub use random::{owner, session};
#[cfg(test)]
pub use repeatable::{owner, session, start_over};

#[cfg(not(test))]
mod random {
    use std::hash::{BuildHasher, RandomState};
    use std::sync::OnceLock;

    /// A name for a session, which nobody can guess.
    pub fn session() -> String {
        uuid::Uuid::new_v4().to_string()
    }

    /// A name for whoever sends `key`. Keys are kept nowhere, so that they cannot get out; their hashes differ from process to process.
    pub fn owner(key: &str) -> String {
        static HASHER: OnceLock<RandomState> = OnceLock::new();
        format!("{:016x}", HASHER.get_or_init(RandomState::new).hash_one(key))
    }
}

#[cfg(test)]
mod repeatable {
    use std::cell::Cell;

    thread_local! {
        static LAST: Cell<u64> = const { Cell::new(0) };
    }

    pub fn session() -> String {
        LAST.set(LAST.get() + 1);
        format!("session-{:06}", LAST.get())
    }

    pub fn owner(key: &str) -> String {
        format!("owner of {key}")
    }

    /// Begins to count anew, on this thread.
    pub fn start_over() {
        LAST.set(0);
    }
}
