//! Who may have how much of the room for adapters: the last of it is for those who have none.

use crate::api::{Client, Refusal};

/// Of the room for adapters, the part kept for sessions that have none.
const NEW_SESSIONS_FRACTION: u64 = 8;
/// Of the room for adapters, the part kept for owners that have none.
const NEW_OWNERS_FRACTION: u64 = 16;

/// Room for the adapters of a client.
pub(super) struct AdapterRoom {
    total: u64,
    /// Of `total`, what this client cannot have.
    kept_for_others: u64,
    used: u64,
    /// Of `used`, what is its owner's.
    owned: u64,
}

impl AdapterRoom {
    /// What `client` may have of `total` bytes, of which `used` are taken, by `holders` or by what outlives its name.
    pub(super) fn of<'a>(client: &Client, holders: impl Iterator<Item = (&'a Client, u64)>, used: u64, total: u64) -> Self {
        let (mut owned, mut of_session) = (0, 0);
        for (holder, bytes) in holders.filter(|(holder, _)| holder.owner == client.owner) {
            owned += bytes;
            of_session += if holder.session == client.session { bytes } else { 0 };
        }
        let kept_for_others = match (owned, of_session) {
            (0, _) => 0,
            (_, 0) => total / NEW_OWNERS_FRACTION,
            _ => total / NEW_SESSIONS_FRACTION,
        };
        AdapterRoom { total, kept_for_others, used, owned }
    }

    /// Bytes that are missing for `bytes` more.
    pub(super) fn shortage(&self, bytes: u64) -> u64 {
        self.used.saturating_add(bytes).saturating_sub(self.total - self.kept_for_others)
    }

    /// Whether there is room for `bytes` more.
    ///
    /// # Errors
    /// If there is none now, or if there is none unless the owner gives something up.
    pub(super) fn check(&self, what: &str, bytes: u64) -> Result<(), Refusal> {
        let AdapterRoom { total, kept_for_others, used, owned } = self;
        let bytes_max = total - kept_for_others;
        if self.shortage(bytes) == 0 {
            return Ok(());
        }
        let kept = match kept_for_others {
            0 => String::new(),
            kept => format!(" ({kept} are kept for clients that have none)"),
        };
        let has = format!(
            "{what} needs {bytes} bytes, but models and samplers take {used} of the {total} bytes set aside for adapters{kept}, \
             {owned} of them yours"
        );
        Err(match owned.saturating_add(bytes) <= bytes_max {
            true => Refusal::Busy(format!("{has}; ask again when others have freed some")),
            false => Refusal::User(format!(
                "{has}; free some, or start the server with more memory or more of it for adapters (--adapter-memory)"
            )),
        })
    }
}
