//! Integration tests over real servers, one module per guarantee.
//!
//! They need DATABASE_URL and AMQP_URL: `make test` provides both. Tests that stop or kill the shared
//! servers are in `exclusive`, which runs alone.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod support;

mod delivery;
mod library;
mod embedded;
mod examples;
mod ordering;
mod parking;
mod parking_hammer;
mod crash;
mod shutdown;
mod replicas;
mod plans;
mod roles;
mod wakeup;
mod doorbell;
mod strict;
mod broker;
mod outage;
mod routes;
mod fan_out;
mod guard;
mod pooler;
mod failover;
mod exclusive;
mod configuration;
mod fidelity;
mod migration;
mod adoption;
mod admin;
mod alerts;
mod lag;
mod backoff;
mod told;
mod dead;
mod prune;
mod tail;
mod monitoring;
mod conformance;
mod jetstream;
mod jetstream_access;
mod kafka;
mod kafka_faults;
mod jetstream_faults;
mod tls;
mod secrets;
mod secrets_nowhere;
mod intake;
mod intake_edge;
mod intake_replay;
mod intake_start;
mod intake_vectors;
// What `make chaos` is judged by is tested here, since that target is no test harness.
#[expect(dead_code, reason = "what only the run itself needs")]
#[path = "../chaos/judge.rs"]
mod chaos_judge;
#[expect(dead_code, reason = "what only the run itself needs")]
#[path = "../chaos/schedule.rs"]
mod chaos_schedule;
