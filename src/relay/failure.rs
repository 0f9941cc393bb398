//! The failure policy: **one** function maps the cause of a failure to what happens to the event.
//!
//! Pure: no I/O, no clock, no actix.

/// Why an event was not published, as far as the policy cares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The claim is void (lease over, session lost): the event was not sent.
    Void,
    /// Cannot connect, or the connection was lost with the confirm outstanding.
    Unreachable,
    /// The broker asks to wait (memory or disk alarm).
    Blocked,
    /// The confirm did not come in time.
    ConfirmTimeout,
    /// The broker closed the channel or connection with a reason while this event was unconfirmed
    /// together with others: nobody knows yet whose fault it was.
    Suspect,
    /// The broker closed the channel or connection while this event was the only one unconfirmed.
    ClosedOn,
    /// The exchange, stream or topic does not exist.
    DestinationMissing,
    /// No permission on the destination.
    Forbidden,
    /// The broker refused to take responsibility (nack, reject-publish, queue full).
    Nacked,
    /// Nothing is bound for this routing key.
    Unroutable,
    /// Larger than the transport or broker takes.
    TooLarge,
    /// The row cannot be turned into a message.
    Undecodable,
    /// A routing key, header or name that the transport cannot carry.
    IllegalName,
}

impl Cause {
    /// Short class for `last_error` and metrics labels; a fixed set.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Void => "void",
            Self::Unreachable => "unreachable",
            Self::Blocked => "blocked",
            Self::ConfirmTimeout => "confirm_timeout",
            Self::Suspect => "suspect",
            Self::ClosedOn => "closed_by_broker",
            Self::DestinationMissing => "destination_missing",
            Self::Forbidden => "forbidden",
            Self::Nacked => "nacked",
            Self::Unroutable => "unroutable",
            Self::TooLarge => "too_large",
            Self::Undecodable => "undecodable",
            Self::IllegalName => "illegal_name",
        }
    }
}

/// What happens to an event that was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is written: the row is no longer ours.
    Drop,
    /// The row and the later ones of its aggregate go back unclaimed, no attempt counted.
    HandBack,
    /// Sent again alone, before anything else of this partition.
    Isolate,
    /// An attempt is counted; backoff; never dead.
    Retry,
    /// An attempt is counted; backoff; dead after `max_attempts`.
    RetryOrDead,
    /// Dead at once.
    Dead,
}

/// Whose breaker a failure speaks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// Nobody's: it says something of the event only.
    Event,
    /// The connection's.
    Connection,
    /// The destination's (exchange).
    Destination,
}

/// The policy table.
pub fn decide(cause: &Cause) -> (Outcome, Blame) {
    match cause {
        Cause::Void => (Outcome::Drop, Blame::Event),
        Cause::Unreachable | Cause::Blocked | Cause::ConfirmTimeout => {
            (Outcome::HandBack, Blame::Connection)
        }
        Cause::Suspect => (Outcome::Isolate, Blame::Event),
        Cause::ClosedOn | Cause::Unroutable => (Outcome::RetryOrDead, Blame::Event),
        Cause::DestinationMissing | Cause::Forbidden => (Outcome::HandBack, Blame::Destination),
        Cause::Nacked => (Outcome::Retry, Blame::Destination),
        Cause::TooLarge | Cause::Undecodable | Cause::IllegalName => (Outcome::Dead, Blame::Event),
    }
}
