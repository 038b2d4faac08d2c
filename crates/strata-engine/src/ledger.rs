//! One account of the memory that requests hold: what waits, what runs, and results that nobody has fetched.
//!
//! A request is charged for what it holds decoded and for the largest result it can have, before it is accepted; the charge shrinks to
//! the result when that is there, and is given back with it. So what was accepted always has room for its answer, and what has no room is
//! refused at the door with nothing lost.
//!
//! Shares follow dynamic thresholds (Choudhury and Hahne, 1998): a session may hold no more than what is free, an owner no more than twice
//! that. One busy session so gets half of the total and leaves the other half to those who come; the busier the server, the smaller
//! everyone's share. A small part of what is free is open to every session also of an owner that has more than its share, until the owner has
//! a quarter of the total more: however many sessions it opens, others find room.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::api::Client;

/// Of what is free, to its owner too, the part that any session may hold whatever others of its owner hold.
const FLOOR_FRACTION: u64 = 16;
/// Of the total, what an owner may hold beyond its share in that way.
const OWNER_FLOOR_FRACTION: u64 = 4;
/// Of the total, the part that is kept for operations that others wait for.
const RESERVE_FRACTION: u64 = 4;

/// Why a charge was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// There is no room now; later there may be.
    Now {
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// There will never be room for this much.
    Ever {
        /// Bytes that were asked for.
        bytes: u64,
        /// The most that one request may hold.
        bytes_max: u64,
    },
}

type Reclaim = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// The account. Cheap to clone.
#[derive(Clone)]
pub struct Ledger {
    shared: Arc<Shared>,
}

struct Shared {
    total: AtomicU64,
    book: Mutex<Book>,
    reclaim: Mutex<Option<Arc<Reclaim>>>,
}

#[derive(Default)]
struct Book {
    used: u64,
    reserve_used: u64,
    owners: HashMap<Arc<str>, Account>,
}

#[derive(Default)]
struct Account {
    held: u64,
    sessions: HashMap<Arc<str>, u64>,
}

impl Ledger {
    /// An account of `total` bytes, of which a part is kept for operations that others wait for.
    pub fn new(total: u64) -> Self {
        Ledger { shared: Arc::new(Shared { total: AtomicU64::new(total), book: Mutex::default(), reclaim: Mutex::new(None) }) }
    }

    /// What one request may hold at most.
    pub fn request_bytes_max(&self) -> u64 {
        self.total() / RESERVE_FRACTION
    }

    /// Bytes held now.
    pub fn used(&self) -> u64 {
        let book = self.shared.lock();
        book.used + book.reserve_used
    }

    /// All bytes of the account.
    pub fn total(&self) -> u64 {
        self.shared.total.load(Ordering::Relaxed)
    }

    /// Adds to the account what a further engine has for requests.
    pub(crate) fn grow(&self, bytes: u64) {
        self.shared.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Asks `reclaim` for room when there is too little: it gives up what can be had again or will not be missed, and says whether it did.
    /// It is called with no lock of the ledger held.
    pub fn on_shortage(&self, reclaim: impl Fn(u64) -> bool + Send + Sync + 'static) {
        *self.shared.reclaim.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Arc::new(Box::new(reclaim)));
    }

    /// Charges a client.
    ///
    /// # Errors
    /// If its share, or the account, has no room.
    pub fn charge(&self, client: &Client, bytes: u64) -> Result<Charge, Shortage> {
        if bytes > self.request_bytes_max() {
            return Err(Shortage::Ever { bytes, bytes_max: self.request_bytes_max() });
        }
        loop {
            if self.shared.lock().try_add(self.ordinary_bytes(), client, bytes) {
                return Ok(Charge { ledger: self.clone(), client: client.clone(), bytes, reserved: false });
            }
            let reclaim = self.shared.reclaim.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
            if !reclaim.is_some_and(|reclaim| reclaim(bytes)) {
                return Err(Shortage::Now { bytes });
            }
        }
    }

    /// As [`Ledger::charge`], but nobody is asked for room: for what is kept where there is some.
    pub fn charge_if_free(&self, client: &Client, bytes: u64) -> Option<Charge> {
        let is_added = bytes <= self.request_bytes_max() && self.shared.lock().try_add(self.ordinary_bytes(), client, bytes);
        is_added.then(|| Charge { ledger: self.clone(), client: client.clone(), bytes, reserved: false })
    }

    /// Charges the part that is kept for operations that others wait for, as far as results that came out of it have left it.
    pub(crate) fn charge_reserve(&self, client: &Client, bytes: u64) -> Result<Charge, Shortage> {
        let mut book = self.shared.lock();
        let reserve = self.total() / RESERVE_FRACTION;
        if book.reserve_used + bytes > reserve || book.used + book.reserve_used + bytes > self.total() {
            return Err(Shortage::Now { bytes });
        }
        book.reserve_used += bytes;
        Ok(Charge { ledger: self.clone(), client: client.clone(), bytes, reserved: true })
    }

    fn ordinary_bytes(&self) -> u64 {
        self.total() - self.total() / RESERVE_FRACTION
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Book {
    fn try_add(&mut self, total: u64, client: &Client, bytes: u64) -> bool {
        let Some(free) = total.checked_sub(self.used).filter(|&free| bytes <= free) else { return false };
        let account = self.owners.get(&client.owner);
        let owner_held = account.map_or(0, |a| a.held);
        let held = account.and_then(|a| a.sessions.get(&client.session)).copied().unwrap_or(0);
        let within_share = held + bytes <= free && owner_held + bytes <= free.saturating_mul(2);
        let beyond = (total / OWNER_FLOOR_FRACTION + free.saturating_mul(2)).saturating_sub(owner_held);
        if !within_share && (bytes > beyond || held + bytes > free.min(beyond / 3) / FLOOR_FRACTION) {
            return false;
        }
        self.used += bytes;
        let account = self.owners.entry(client.owner.clone()).or_default();
        account.held += bytes;
        *account.sessions.entry(client.session.clone()).or_default() += bytes;
        true
    }

    fn subtract(&mut self, client: &Client, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
        let Some(account) = self.owners.get_mut(&client.owner) else { return };
        account.held = account.held.saturating_sub(bytes);
        if let Some(held) = account.sessions.get_mut(&client.session) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                account.sessions.remove(&client.session);
            }
        }
        if account.sessions.is_empty() {
            self.owners.remove(&client.owner);
        }
    }
}

/// Bytes of a [`Ledger`], given back when this is dropped.
pub struct Charge {
    ledger: Ledger,
    client: Client,
    bytes: u64,
    reserved: bool,
}

impl Charge {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back all but `bytes`. What came out of the reserve moves to the ordinary part, so that a result nobody fetches does not block it.
    pub fn shrink_to(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        let mut book = self.ledger.shared.lock();
        if self.reserved {
            book.reserve_used = book.reserve_used.saturating_sub(self.bytes);
            book.used += bytes;
            let account = book.owners.entry(self.client.owner.clone()).or_default();
            account.held += bytes;
            *account.sessions.entry(self.client.session.clone()).or_default() += bytes;
            self.reserved = false;
        } else {
            book.subtract(&self.client, self.bytes - bytes);
        }
        self.bytes = bytes;
    }
}

impl std::fmt::Debug for Charge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Charge({} bytes)", self.bytes)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut book = self.ledger.shared.lock();
        if self.reserved {
            book.reserve_used = book.reserve_used.saturating_sub(self.bytes);
        } else {
            book.subtract(&self.client, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(owner: &str, session: &str) -> Client {
        Client { owner: owner.into(), session: session.into() }
    }

    /// Charges until it is refused; answers the charges.
    fn fill(ledger: &Ledger, client: &Client) -> Vec<Charge> {
        std::iter::from_fn(|| ledger.charge(client, 10).ok()).collect()
    }

    #[test]
    fn results_that_came_out_of_the_reserve_never_take_more_than_there_is() {
        let ledger = Ledger::new(1000);
        let client = |n: u64| Client { owner: format!("o{n}").into(), session: "s".into() };
        let mut held: Vec<Charge> = (0..100).filter_map(|n| ledger.charge(&client(n), 30).ok()).collect();
        for n in 0..20 {
            if let Ok(mut charge) = ledger.charge_reserve(&client(n), 100) {
                charge.shrink_to(90);
                held.push(charge);
            }
        }
        assert!(ledger.used() <= ledger.total() && ledger.used() > 900, "{} bytes", ledger.used());
        drop(held);
        assert_eq!(ledger.used(), 0);
        assert!(ledger.charge_reserve(&client(0), 100).is_ok());
    }

    #[test]
    fn a_busy_session_leaves_room_for_others() {
        let ledger = Ledger::new(4000);
        let first = fill(&ledger, &client("a", "1"));
        assert_eq!(first.len(), 150, "half of the ordinary part");
        assert_eq!(fill(&ledger, &client("b", "2")).len(), 75, "half of what is left");
        assert!(fill(&ledger, &client("a", "3")).len() >= 40, "an owner has less the more it has");
        assert!(ledger.used() <= 3000);
        drop(first);
    }

    #[test]
    fn an_owner_with_many_sessions_leaves_room_for_another_and_for_a_newcomer_of_its_own() {
        let ledger = Ledger::new(64_000);
        let held: Vec<Vec<Charge>> = (0..30).map(|s| fill(&ledger, &client("a", &s.to_string()))).collect();
        assert!(!fill(&ledger, &client("a", "new")).is_empty());
        let more: Vec<Vec<Charge>> = (30..5000).map(|s| fill(&ledger, &client("a", &s.to_string()))).collect();
        let others = fill(&ledger, &client("b", "1"));
        assert!(others.len() >= 600, "half of a quarter: {}", others.len());
        drop(more);
        drop(held);
    }

    #[test]
    fn what_is_given_back_can_be_had_again_and_books_are_forgotten() {
        let ledger = Ledger::new(1000);
        let c = client("a", "1");
        let mut charge = ledger.charge(&c, 200).unwrap();
        charge.shrink_to(50);
        assert_eq!((charge.bytes(), ledger.used()), (50, 50));
        drop(charge);
        assert_eq!(ledger.used(), 0);
        assert!(ledger.shared.lock().owners.is_empty());
        assert_eq!(ledger.charge(&c, 251).unwrap_err(), Shortage::Ever { bytes: 251, bytes_max: 250 });
    }

    #[test]
    fn the_reserve_is_for_those_that_others_wait_for() {
        let ledger = Ledger::new(1000);
        let c = client("a", "1");
        let full = fill(&ledger, &c);
        let mut urgent = ledger.charge_reserve(&c, 250).unwrap();
        assert!(ledger.charge_reserve(&c, 1).is_err(), "it is bounded too");
        drop(full);
        urgent.shrink_to(20);
        assert!(ledger.charge_reserve(&c, 250).is_ok(), "its result does not block the next");
        assert_eq!(ledger.used(), 20);
        drop(urgent);
        assert_eq!(ledger.used(), 0);
    }

    #[test]
    fn a_shortage_asks_for_what_can_be_given_up() {
        let ledger = Ledger::new(1000);
        let c = client("a", "1");
        let kept = Arc::new(Mutex::new(fill(&ledger, &c)));
        let cache = kept.clone();
        ledger.on_shortage(move |_| cache.lock().unwrap().pop().is_some());
        let before = kept.lock().unwrap().len();
        ledger.charge(&c, 100).unwrap();
        assert!(kept.lock().unwrap().len() < before);
        let before = kept.lock().unwrap().len();
        assert!(ledger.charge_if_free(&c, 200).is_none());
        assert_eq!(kept.lock().unwrap().len(), before, "nobody is asked");
    }
}
