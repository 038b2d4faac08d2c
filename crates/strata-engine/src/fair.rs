//! Whose turn it is: shares of the device by time, among owners, among the sessions of an owner, and in a session between its training and its
//! sampling.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1996) at each level: whoever has had least goes next, idleness earns no credit,
//! and whoever comes has waited for nobody's backlog. This only orders work; no result depends on it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::api::Client;

/// The two kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Work {
    Training,
    Sampling,
}

/// Where someone stands: the virtual times of its owner, its session and its kind of work. Less goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Standing(Duration, Duration, Duration);

/// Time used and time begun at, on the way down from the root.
#[derive(Default)]
struct Level {
    /// Virtual time: where whoever was served last began.
    now: Duration,
}

impl Level {
    fn start(&self, used: Duration) -> Duration {
        used.max(self.now)
    }
}

#[derive(Default)]
struct OwnerShare {
    used: Duration,
    level: Level,
    sessions: HashMap<Arc<str>, SessionShare>,
}

#[derive(Default)]
struct SessionShare {
    used: Duration,
    level: Level,
    kinds: [Duration; 2],
}

/// The shares of everyone who was ever served and has not been forgotten.
#[derive(Default)]
pub(crate) struct Fair {
    level: Level,
    owners: HashMap<Arc<str>, OwnerShare>,
}

impl Fair {
    /// Where a client's work of a kind stands.
    pub(crate) fn standing(&self, client: &Client, work: Work) -> Standing {
        let Some(owner) = self.owners.get(&client.owner) else {
            return Standing(self.level.now, Duration::ZERO, Duration::ZERO);
        };
        let first = self.level.start(owner.used);
        let Some(session) = owner.sessions.get(&client.session) else {
            return Standing(first, owner.level.now, Duration::ZERO);
        };
        Standing(first, owner.level.start(session.used), session.level.start(session.kinds[work as usize]))
    }

    /// Notes that a client is served now: those who come later begin here.
    pub(crate) fn serve(&mut self, client: &Client, work: Work) {
        let Standing(first, second, third) = self.standing(client, work);
        self.level.now = self.level.now.max(first);
        let owner = self.owners.entry(client.owner.clone()).or_default();
        owner.level.now = owner.level.now.max(second);
        let session = owner.sessions.entry(client.session.clone()).or_default();
        session.level.now = session.level.now.max(third);
    }

    /// Charges a client for the time its work took.
    pub(crate) fn charge(&mut self, client: &Client, work: Work, time: Duration) {
        let Standing(first, second, third) = self.standing(client, work);
        let owner = self.owners.entry(client.owner.clone()).or_default();
        owner.used = first + time;
        let session = owner.sessions.entry(client.session.clone()).or_default();
        session.used = second + time;
        session.kinds[work as usize] = third + time;
    }

    /// Forgets a session that is over, and every owner without one who would begin where a newcomer does.
    pub(crate) fn forget(&mut self, client: &Client) {
        if let Some(owner) = self.owners.get_mut(&client.owner) {
            owner.sessions.remove(&client.session);
        }
        self.owners.retain(|_, owner| !owner.sessions.is_empty() || owner.used > self.level.now);
    }
}

/// Tokens that a joint piece of work may have, if whoever wants least of it is to wait no longer than if all took turns: as many turns as there
/// are owners, or of one owner its sessions, each of `base_tokens` (what a piece of work costs whatever its length) and the least. `None` if
/// one wants all there is.
pub(crate) fn company_limit<'a>(wants: impl Iterator<Item = (&'a Client, usize)>, base_tokens: usize) -> Option<usize> {
    let (mut owners, mut sessions) = (HashMap::<&str, usize>::new(), HashMap::<&str, usize>::new());
    for (client, tokens) in wants.filter(|(_, tokens)| *tokens > 0) {
        *owners.entry(&client.owner).or_default() += tokens;
        *sessions.entry(&client.session).or_default() += tokens;
    }
    let peers = if owners.len() > 1 { owners } else { sessions };
    let smallest = *peers.values().min()?;
    (peers.len() > 1).then(|| (peers.len() * (base_tokens + smallest)).saturating_sub(base_tokens))
}

#[cfg(any(test, feature = "simulation"))]
impl Fair {
    /// Time that the owner of a client was charged for.
    #[cfg(test)]
    pub(crate) fn used(&self, client: &Client) -> Duration {
        self.owners.get(&client.owner).map_or(Duration::ZERO, |owner| owner.used)
    }

    /// Sessions that are remembered.
    pub(crate) fn sessions(&self) -> usize {
        self.owners.values().map(|owner| owner.sessions.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(owner: &str, session: &str) -> Client {
        Client { owner: owner.into(), session: session.into() }
    }

    /// Serves whoever is next of `clients` until `rounds` are over; answers the time each has had.
    fn run(fair: &mut Fair, clients: &[(Client, Work, u64)], rounds: usize) -> Vec<u64> {
        let mut had = vec![0; clients.len()];
        for _ in 0..rounds {
            let next = (0..clients.len()).min_by_key(|&i| fair.standing(&clients[i].0, clients[i].1)).unwrap();
            let (client, work, cost) = &clients[next];
            fair.serve(client, *work);
            fair.charge(client, *work, Duration::from_millis(*cost));
            had[next] += cost;
        }
        had
    }

    #[test]
    fn owners_share_first_then_their_sessions_then_kinds_of_work() {
        let clients = [
            (client("a", "1"), Work::Training, 100),
            (client("a", "1"), Work::Sampling, 1),
            (client("a", "2"), Work::Sampling, 3),
            (client("b", "3"), Work::Sampling, 7),
        ];
        let had = run(&mut Fair::default(), &clients, 20_000);
        let (a, b) = (had[0] + had[1] + had[2], had[3]);
        assert!(a.abs_diff(b) < 250, "{had:?}");
        assert!((had[0] + had[1]).abs_diff(had[2]) < 250, "{had:?}");
        assert!(had[0].abs_diff(had[1]) < 250, "{had:?}");
    }

    #[test]
    fn idleness_earns_no_credit_and_a_newcomer_waits_for_no_backlog() {
        let (a, b) = (client("a", "1"), client("b", "1"));
        let mut fair = Fair::default();
        run(&mut fair, &[(a.clone(), Work::Training, 1000)], 1000);
        assert!(fair.standing(&b, Work::Sampling) < fair.standing(&a, Work::Training), "the newcomer is next");
        let had = run(&mut fair, &[(a, Work::Training, 10), (b, Work::Sampling, 10)], 400);
        assert!(had[0].abs_diff(had[1]) <= 1100, "the newcomer may not catch up on a thousand seconds: {had:?}");
    }

    #[test]
    fn work_together_is_as_long_as_a_turn_of_each_owner_however_many_sessions_it_has() {
        let (a, b, c) = (client("a", "1"), client("a", "2"), client("b", "3"));
        assert_eq!(company_limit([(&a, 500)].into_iter(), 10), None);
        assert_eq!(company_limit([(&a, 500), (&b, 20)].into_iter(), 10), Some(2 * 30 - 10));
        let crowd: Vec<Client> = (0..100).map(|n| client("a", &n.to_string())).collect();
        let wants = crowd.iter().map(|client| (client, 50)).chain([(&c, 5)]);
        assert_eq!(company_limit(wants, 10), Some(2 * 15 - 10));
        assert_eq!(company_limit([(&a, 500), (&b, 0)].into_iter(), 10), None, "who wants nothing is no company");
    }

    #[test]
    fn a_session_that_is_over_is_forgotten() {
        let mut fair = Fair::default();
        let a = client("a", "1");
        run(&mut fair, &[(a.clone(), Work::Training, 10), (client("b", "1"), Work::Training, 10)], 10);
        fair.forget(&a);
        assert!(fair.owners.get("a").is_none_or(|o| o.sessions.is_empty()));
        // Those who were served last when they ended are ahead of others, until others are served.
        for i in 0..100 {
            let passing = client(&format!("key {i}"), "1");
            run(&mut fair, &[(passing.clone(), Work::Training, 10), (client("b", "1"), Work::Training, 10)], 3);
            fair.forget(&passing);
        }
        assert!(fair.owners.len() <= 3, "{} owners", fair.owners.len());
    }
}
