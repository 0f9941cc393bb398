//! What can go wrong for who publishes, or runs a relay.

use tokio_postgres::error::SqlState;

use crate::config::ConfigError;
use crate::sink::SinkError;
use crate::store::{Names, StoreError};

/// Why an event was not written, or a relay could not do its work. Texts carry no payload and no
/// password.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// A part of the event is wrong. If found here, nothing was sent; if by the database, the transaction
    /// is aborted.
    #[error("{0}")]
    Event(String),
    /// The payload is over [`max_payload_bytes`](super::OutboxSettings::max_payload_bytes), or over the
    /// table's own limit (`bellwire migrate --max-payload-bytes`).
    #[error("{0}")]
    TooLarge(String),
    /// The database: not reachable, refuses, or the outbox is not what this version works with.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The configuration of the relay, or of the sink's rules.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The broker: not reachable, or its settings cannot be used.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The relay came to an untimely end, or a pass could deliver nothing.
    #[error("{0}")]
    Relay(String),
    /// The database or the relay answered otherwise than it can.
    #[error("unexpected answer: {0}")]
    NoAnswer(&'static str),
}

impl OutboxError {
    /// The sink could never carry this event.
    pub(super) fn of_sink(error: SinkError) -> Self {
        Self::Event(format!("{}: {}", error.cause.class(), error.message))
    }

    /// What the server said of an insert. Only its message is told: details quote what was sent.
    pub(super) fn of_insert(error: tokio_postgres::Error, names: &Names) -> Self {
        let Some(refused) = error.as_db_error() else {
            return Self::Store(error.into());
        };
        let (code, message) = (refused.code(), refused.message());
        if *code == SqlState::INVALID_PARAMETER_VALUE {
            return Self::Event(message.to_owned());
        }
        if *code == SqlState::PROGRAM_LIMIT_EXCEEDED {
            return Self::TooLarge(message.to_owned());
        }
        // Names, headers and ids were looked at before: only the payload is left.
        if *code == SqlState::INVALID_TEXT_REPRESENTATION
            || *code == SqlState::UNTRANSLATABLE_CHARACTER
        {
            return Self::Event(format!("payload: {message}"));
        }
        if *code == SqlState::INSUFFICIENT_PRIVILEGE {
            return Self::Store(StoreError::Refused {
                code: code.code().to_owned(),
                message: format!("{message}: GRANT INSERT ON {} TO the role", names.display()),
            });
        }
        Self::Store(error.into())
    }
}
