//! Memory that a backend owns.

use std::any::Any;
use std::fmt;

/// Memory of one tensor, stack of weights or cache: whatever type the backend that allocated it keeps there. Only who can name that type can look
/// inside, and backends keep their types to themselves: this is the wall between the host and a device.
pub(crate) struct Storage(Box<dyn Any + Send + Sync>);

impl Storage {
    /// Memory of a backend.
    pub(crate) fn new(memory: impl Any + Send + Sync) -> Self {
        Storage(Box::new(memory))
    }

    /// The memory, if it is a backend's that has this type of it.
    pub(crate) fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// The memory, to be written.
    pub(crate) fn get_mut<T: Any>(&mut self) -> Option<&mut T> {
        self.0.downcast_mut()
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storage")
    }
}
