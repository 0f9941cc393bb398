#![doc = include_str!("../README.md")]
// What comes from outside must not be able to end the process. Tests may.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::panic,
        clippy::string_slice,
        clippy::unreachable
    )
)]

pub mod cli;
pub mod config;
mod tls;
#[cfg(feature = "failpoints")]
mod failpoint;
pub mod event;
pub mod outbox;
pub mod route;
pub mod store;
pub mod relay;
pub mod sink;
pub mod intake;
pub mod alert;
pub mod admin;
pub mod metrics;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(test)]
mod properties;
