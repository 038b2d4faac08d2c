//! The commands of the binary. Each module has its flags (`Args`) and what it does with them (`run`).

pub mod bench;
pub mod demo;
pub mod export;
pub mod import;
pub mod init_model;
pub mod inspect;
pub mod serve;
pub mod shutdown;
pub mod trace;
