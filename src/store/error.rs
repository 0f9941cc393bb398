//! What can go wrong with the database.

use std::error::Error as _;

/// An error of the outbox's database. Texts carry no password and no payload.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No `database.url`.
    #[error("database.url is not set: give it in the configuration file or as DATABASE_URL")]
    NoUrl,
    /// Cannot connect, or the connection was lost.
    #[error("database unavailable: {0}")]
    Unavailable(String),
    /// No answer in time.
    #[error("database did not answer in time")]
    TimedOut,
    /// The server refused a statement.
    #[error("database error {code}: {message}")]
    Refused {
        /// SQLSTATE.
        code: String,
        /// The server's text.
        message: String,
    },
    /// The claim token is no longer ours.
    #[error("claim token lost: {0}")]
    TokenLost(&'static str),
    /// The outbox is not what this version works with. Says what differs and what to do.
    #[error("{0}")]
    Shape(String),
}

impl StoreError {
    /// Nothing but the table itself or an operator can change this: stop rather than try again.
    pub fn is_fatal_at_start(&self) -> bool {
        match self {
            Self::NoUrl | Self::Shape(_) => true,
            // 28: wrong user or password, 3D000: no such database, 42: no such table or no right.
            Self::Refused { code, .. } => {
                code.starts_with("28") || code == "3D000" || code.starts_with("42")
            }
            _ => false,
        }
    }

    /// Does the server say that a lock was not to be had in time?
    pub fn is_lock_timeout(&self) -> bool {
        matches!(self, Self::Refused { code, .. } if code == "55P03")
    }

    /// Did the statement take longer than it may?
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::TimedOut => true,
            Self::Refused { code, .. } => code == "57014",
            _ => false,
        }
    }

    /// Is it about what one row holds, rather than about the server or the connection?
    pub fn is_about_data(&self) -> bool {
        // 22: data exception, 54: a limit exceeded, for example a text over 1 GB.
        matches!(self, Self::Refused { code, .. } if code.starts_with("22") || code.starts_with("54"))
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(refused) = error.as_db_error() {
            return Self::Refused {
                code: refused.code().code().to_owned(),
                message: refused.message().to_owned(),
            };
        }
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        Self::Unavailable(text)
    }
}

impl From<deadpool_postgres::PoolError> for StoreError {
    fn from(error: deadpool_postgres::PoolError) -> Self {
        match error {
            deadpool_postgres::PoolError::Backend(error) => error.into(),
            deadpool_postgres::PoolError::Timeout(_) => Self::TimedOut,
            other => Self::Unavailable(other.to_string()),
        }
    }
}
