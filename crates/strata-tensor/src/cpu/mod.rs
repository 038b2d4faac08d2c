//! The processor: the reference for every other device, and fast in its own right.
//!
//! Map: [`isa`] chooses instructions at run time; [`rows`] holds the operations on rows of elements.

#[cfg_attr(not(test), expect(dead_code, reason = "operations take these up as they land"))]
pub(crate) mod isa;
#[cfg_attr(not(test), expect(dead_code, reason = "operations take these up as they land"))]
pub(crate) mod rows;
