//! What can go wrong with the database.

use std::error::Error as _;

/// What PgBouncer says of parameters that it does not know; PostgreSQL has other words.
const UNSUPPORTED_PARAMETER: &str = "unsupported startup parameter";
use tokio_postgres::error::SqlState;

use crate::tls;

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

    /// Is the connection of no more use, or the server behind it? Another one may do.
    pub fn ends_connection(&self) -> bool {
        match self {
            Self::Unavailable(_) | Self::TimedOut => true,
            // 25006: a server that became read-only, for example a demoted primary. 57P: it shuts down,
            // starts up, or ended the session. 08: of the connection; a pooler uses it as well.
            Self::Refused { code, .. } => {
                code == "25006" || code.starts_with("57P") || code.starts_with("08")
            }
            _ => false,
        }
    }

    /// Can only a pooler that exchanges the server sessions under us be the reason?
    pub(super) fn is_of_pooler(&self) -> bool {
        // No such prepared statement; there is one of that name already.
        matches!(self, Self::Refused { code, .. } if code == "26000" || code == "42P05")
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

    /// Would the same statement perhaps go well at another time? By SQLSTATE: what is wrong with the
    /// server, with locks or with room on its disk is not wrong with the statement.
    pub(crate) fn passes(code: &str) -> bool {
        // 40: deadlock, serialization. 55P03, 57014: a lock or the answer took too long. 53, 58: no room,
        // no memory, trouble with files. 25: a read-only server, a transaction that was ended.
        ["08", "25", "40", "53", "57", "58", "55P03"]
            .iter()
            .any(|class| code.starts_with(class))
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
            if refused.message().contains(UNSUPPORTED_PARAMETER) {
                return Self::Shape(format!(
                    "the connection pooler refuses the connection string ({}): take the parameter out \
                     of it, or add it to the pooler's ignore_startup_parameters",
                    refused.message()
                ));
            }
            let mut refused = Self::Refused {
                code: refused.code().code().to_owned(),
                message: match *refused.code() {
                    SqlState::INVALID_AUTHORIZATION_SPECIFICATION => with_remedy(refused.message()),
                    _ => refused.message().to_owned(),
                },
            };
            if refused.is_of_pooler()
                && let Self::Refused { message, .. } = &mut refused
            {
                message.push_str(
                    " (is there a connection pooler in transaction mode? Set database.pooler to it)",
                );
            }
            return refused;
        }
        if let Some(text) = tls::explain(&error, "database") {
            return Self::Unavailable(text);
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
        Self::Unavailable(with_remedy(&text))
    }
}

/// Which option mends it, where PostgreSQL or the driver refuse for want, or for too much, of TLS.
fn with_remedy(text: &str) -> String {
    let remedies = [
        (
            "valid client certificate",
            "give one that the server takes for this role in database.cert_file, with \
             database.key_file",
        ),
        (
            "certificate authentication failed",
            "give one that the server takes for this role in database.cert_file: its common name \
             must be the role's",
        ),
        (
            "no encryption",
            "it may want TLS: give sslmode=require, or one that verifies, in database.url",
        ),
        (
            "server does not support TLS",
            "turn on ssl at the server, or give sslmode=prefer in database.url if it need not be",
        ),
    ];
    match remedies.iter().find(|(words, _)| text.contains(words)) {
        Some((_, remedy)) => format!("{text}; {remedy}"),
        None => text.to_owned(),
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
