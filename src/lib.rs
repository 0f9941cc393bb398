//! Bellwire carries a PostgreSQL transactional outbox to message brokers, in order and without loss.

pub mod cli;
pub mod config;
pub mod event;
pub mod store;
pub mod relay;
pub mod sink;
pub mod admin;
pub mod metrics;
