//! Turns at work of which only so much is done at the same time, such as decoding large bodies.
//!
//! Owners share them: whoever has fewest turns is next, and of those, whoever had one longest ago. No owner has more than half of them, so that there is one to be had
//! for whoever comes while another has much to do.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;

/// So many turns; cheap to clone.
#[derive(Clone)]
pub struct Turns {
    shared: Arc<Shared>,
}

struct Shared {
    max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    taken: usize,
    given: u64,
    /// Those that have turns or wait for them.
    owners: HashMap<Arc<str>, OfOwner>,
}

#[derive(Default)]
struct OfOwner {
    taken: usize,
    waiting: VecDeque<oneshot::Sender<Turn>>,
    /// When it was given its last turn, counted in turns.
    last: u64,
}

/// A turn, until it is dropped.
pub struct Turn {
    shared: Arc<Shared>,
    /// `None` once it is given back.
    owner: Option<Arc<str>>,
}

impl Turns {
    /// So many at the same time.
    pub fn new(max: usize) -> Self {
        Turns { shared: Arc::new(Shared { max, state: Mutex::default() }) }
    }

    /// Waits for a turn. Whoever waits no longer gets none.
    pub async fn take(&self, owner: &str) -> Turn {
        let (sender, turn) = oneshot::channel();
        {
            let mut state = self.shared.lock();
            state.owners.entry(owner.into()).or_default().waiting.push_back(sender);
            self.shared.deal(&mut state);
        }
        turn.await.expect("those who wait are dealt turns until there are none who wait")
    }

    /// A turn, if there is one now.
    pub fn try_take(&self, owner: &str) -> Option<Turn> {
        let mut state = self.shared.lock();
        let has_room = state.owners.get(owner).is_none_or(|of_owner| of_owner.taken < self.shared.owner_max());
        if state.taken >= self.shared.max || !has_room {
            return None;
        }
        let owner: Arc<str> = owner.into();
        state.give(&owner);
        Some(Turn { shared: self.shared.clone(), owner: Some(owner) })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Turns of one owner, at most.
    fn owner_max(&self) -> usize {
        self.max.div_ceil(2)
    }

    /// Gives all turns that are there to those who wait.
    fn deal(self: &Arc<Self>, state: &mut State) {
        while state.taken < self.max {
            let waiting = state.owners.iter().filter(|(_, of)| !of.waiting.is_empty() && of.taken < self.owner_max());
            let next = waiting.min_by_key(|(_, of)| (of.taken, of.last)).map(|(owner, _)| owner.clone());
            let Some(owner) = next else { return };
            let Some(sender) = state.owners.get_mut(&owner).and_then(|of_owner| of_owner.waiting.pop_front()) else { return };
            state.give(&owner);
            let turn = Turn { shared: self.clone(), owner: Some(owner) };
            if let Err(mut turn) = sender.send(turn) {
                // It waits no longer. Dropped, the turn would ask for the lock.
                turn.owner.take().into_iter().for_each(|owner| state.take_back(&owner));
            }
        }
    }
}

impl State {
    fn give(&mut self, owner: &Arc<str>) {
        self.taken += 1;
        self.given += 1;
        let of_owner = self.owners.entry(owner.clone()).or_default();
        of_owner.taken += 1;
        of_owner.last = self.given;
    }

    fn take_back(&mut self, owner: &str) {
        self.taken -= 1;
        let Some(of_owner) = self.owners.get_mut(owner) else { return };
        of_owner.taken -= 1;
        if of_owner.taken == 0 && of_owner.waiting.is_empty() {
            self.owners.remove(owner);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        let mut state = self.shared.lock();
        state.take_back(&owner);
        self.shared.deal(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};

    use super::*;

    /// Whether a turn is there now.
    async fn is_there(turn: Pin<&mut impl Future<Output = Turn>>) -> Option<Turn> {
        tokio::select! {
            biased;
            turn = turn => Some(turn),
            () = std::future::ready(()) => None,
        }
    }

    #[tokio::test]
    async fn an_owner_leaves_turns_for_others_and_waits_for_its_own() {
        let turns = Turns::new(4);
        let (first, _second) = (turns.take("a").await, turns.take("a").await);
        let mut third = pin!(turns.take("a"));
        assert!(is_there(third.as_mut()).await.is_none() && turns.try_take("a").is_none());
        let _others = [turns.take("b").await, turns.take("c").await];
        assert!(turns.try_take("d").is_none(), "four at the same time");
        drop(first);
        assert!(is_there(third.as_mut()).await.is_some());
    }

    #[tokio::test]
    async fn those_who_have_fewest_are_next_however_many_others_wait() {
        let turns = Turns::new(2);
        let [a, b] = [turns.take("a").await, turns.take("b").await];
        let mut of_a: Vec<_> = (0..10).map(|_| Box::pin(turns.take("a"))).collect();
        for turn in &mut of_a {
            assert!(is_there(turn.as_mut()).await.is_none());
        }
        let mut of_c = pin!(turns.take("c"));
        assert!(is_there(of_c.as_mut()).await.is_none());
        drop(a);
        // Neither has one now, and a had its last when c was not there yet.
        let c = is_there(of_c.as_mut()).await.expect("c is next");
        drop((b, c));
        assert!(is_there(of_a[0].as_mut()).await.is_some());
    }

    #[tokio::test]
    async fn those_who_wait_no_longer_get_none_and_nobody_is_left_behind() {
        let turns = Turns::new(1);
        let held = turns.take("a").await;
        let mut gone = Box::pin(turns.take("b"));
        assert!(is_there(gone.as_mut()).await.is_none());
        let mut next = pin!(turns.take("c"));
        assert!(is_there(next.as_mut()).await.is_none());
        drop(gone);
        drop(held);
        let turn = is_there(next.as_mut()).await.expect("what nobody waits for goes on");
        // Given, and not looked at.
        let mut unseen = Box::pin(turns.take("d"));
        assert!(is_there(unseen.as_mut()).await.is_none());
        drop(turn);
        drop(unseen);
        let last = turns.try_take("e").expect("what was given to one who left is there again");
        drop(last);
        assert!(turns.shared.lock().owners.is_empty());
    }
}
