//! What decoding one request may take in memory, counted before it is taken.

use std::cell::{Cell, RefCell};

use crate::error::ApiError;
use crate::limits;
use crate::transit::Charge;

/// Bytes that one request may become when it is decoded. They are charged to the server's transit budget as well, at their highest.
///
/// It is passed by shared reference, because serde's visitors hold it at every level at once.
pub struct Budget {
    bytes_max: usize,
    used: Cell<usize>,
    charged: Cell<usize>,
    charge: RefCell<Charge>,
    refusal: RefCell<Option<ApiError>>,
}

impl Budget {
    /// A budget of `bytes_max`, on top of what `charge` holds already.
    pub fn new(bytes_max: usize, charge: Charge) -> Self {
        Budget {
            bytes_max,
            used: Cell::new(0),
            charged: Cell::new(0),
            charge: RefCell::new(charge),
            refusal: RefCell::default(),
        }
    }

    /// A budget of `bytes_max`, of which what `charge` holds has been taken.
    pub fn resumed(bytes_max: usize, charge: Charge) -> Self {
        let taken = charge.bytes();
        Budget { used: Cell::new(taken), charged: Cell::new(taken), ..Budget::new(bytes_max, charge) }
    }

    /// Takes bytes that are about to be allocated.
    ///
    /// # Errors
    /// If the request goes beyond what one may have, or the server has no room; [`Budget::refusal`] says which.
    pub fn take(&self, bytes: usize) -> Result<(), String> {
        let used = self.used.get().saturating_add(bytes);
        let taken = if used > self.bytes_max {
            Err(ApiError::TooLarge(format!(
                "this request would take more than {} decoded, which is the limit for one request",
                limits::shown_bytes(self.bytes_max)
            )))
        } else {
            self.charge.borrow_mut().try_grow(used.saturating_sub(self.charged.get()))
        };
        match taken {
            Ok(()) => {
                self.used.set(used);
                self.charged.set(used.max(self.charged.get()));
                Ok(())
            }
            Err(refusal) => {
                let reason = refusal.to_string();
                self.refusal.replace(Some(refusal));
                Err(reason)
            }
        }
    }

    /// Takes the bytes of `count` values of type `T`.
    ///
    /// # Errors
    /// Those of [`Budget::take`].
    pub fn take_values<T>(&self, count: usize) -> Result<(), String> {
        self.take(count.saturating_mul(size_of::<T>()))
    }

    /// Gives back bytes that were only needed in between.
    pub fn give_back(&self, bytes: usize) {
        self.used.set(self.used.get().saturating_sub(bytes));
    }

    /// What was charged, the request's body and what it became.
    pub fn into_charge(self) -> Charge {
        self.charge.into_inner()
    }

    /// Why something could not be taken, if that happened.
    pub fn refusal(&self) -> Option<ApiError> {
        self.refusal.take()
    }
}

/// Bytes of a `BTreeMap` of so many entries, without what they point to. Its nodes have room for eleven entries, and all but the root hold
/// at least five.
pub fn map_bytes<K, V>(entries: usize) -> usize {
    const NODE_ENTRIES: usize = 11;
    /// Parent, indices, and the edges that inner nodes have on top.
    const NODE_OVERHEAD_BYTES: usize = 112;
    let nodes = if entries == 0 { 0 } else { 1 + entries / 5 };
    nodes.saturating_mul(NODE_ENTRIES * (size_of::<K>() + size_of::<V>()) + NODE_OVERHEAD_BYTES)
}
