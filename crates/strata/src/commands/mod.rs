//! The commands of the binary. Each module has its flags (`Args`) and what it does with them (`run`).

pub mod serve;
