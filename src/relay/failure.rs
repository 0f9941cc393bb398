//! The failure policy: **one** function maps the cause of a failure to what happens to the event.
//!
//! Pure: no I/O, no clock, no actix.

/// Why an event was not published, as far as the policy cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The claim is void (lease over, session lost): the event was not sent.
    Void,
    /// Cannot connect, or the connection was lost with the confirm outstanding.
    Unreachable,
    /// The broker asks to wait (memory or disk alarm).
    Blocked,
    /// The confirm did not come in time.
    ConfirmTimeout,
    /// One of several sinks cannot be reached, asks to wait, or confirms nothing: the others go on.
    SinkDown,
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
    /// The broker looked at the event and refused it, not for its size.
    Rejected,
    /// Larger than the transport or broker takes.
    TooLarge,
    /// The row cannot be turned into a message.
    Undecodable,
    /// A routing key, header or name that the transport cannot carry.
    IllegalName,
}

impl Cause {
    /// All of them, in the order of the policy table.
    pub const ALL: [Self; 15] = [
        Self::Void,
        Self::Unreachable,
        Self::Blocked,
        Self::ConfirmTimeout,
        Self::SinkDown,
        Self::Suspect,
        Self::ClosedOn,
        Self::DestinationMissing,
        Self::Forbidden,
        Self::Nacked,
        Self::Unroutable,
        Self::Rejected,
        Self::TooLarge,
        Self::Undecodable,
        Self::IllegalName,
    ];

    /// Short class for `last_error` and metrics labels; a fixed set.
    pub fn class(self) -> &'static str {
        match self {
            Self::Void => "void",
            Self::Unreachable => "unreachable",
            Self::Blocked => "blocked",
            Self::ConfirmTimeout => "confirm_timeout",
            Self::SinkDown => "sink_down",
            Self::Suspect => "suspect",
            Self::ClosedOn => "closed_by_broker",
            Self::DestinationMissing => "destination_missing",
            Self::Forbidden => "forbidden",
            Self::Nacked => "nacked",
            Self::Unroutable => "unroutable",
            Self::Rejected => "rejected",
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
    /// Handed back with its reason, no attempt counted, and not due before its destination is asked
    /// again.
    Wait,
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
    /// The connection's; several in a row open it.
    Connection,
    /// The destination's (exchange, or one sink of several); several in a row open it.
    Destination,
    /// The destination's, and leaves no doubt: one opens it.
    DestinationForSure,
}

/// The policy table.
pub fn decide(cause: Cause) -> (Outcome, Blame) {
    match cause {
        Cause::Void => (Outcome::Drop, Blame::Event),
        Cause::Unreachable | Cause::Blocked | Cause::ConfirmTimeout => {
            (Outcome::HandBack, Blame::Connection)
        }
        Cause::SinkDown => (Outcome::Wait, Blame::Destination),
        Cause::Suspect => (Outcome::Isolate, Blame::Event),
        Cause::ClosedOn | Cause::Unroutable | Cause::Rejected => {
            (Outcome::RetryOrDead, Blame::Event)
        }
        Cause::DestinationMissing | Cause::Forbidden => (Outcome::Wait, Blame::DestinationForSure),
        Cause::Nacked => (Outcome::Retry, Blame::Destination),
        Cause::TooLarge | Cause::Undecodable | Cause::IllegalName => (Outcome::Dead, Blame::Event),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_policy(causes: &[Cause], outcome: Outcome, blame: Blame) {
        for cause in causes {
            assert_eq!(decide(*cause), (outcome, blame), "{cause:?}");
        }
    }

    #[test]
    fn a_void_claim_writes_nothing() {
        assert_policy(&[Cause::Void], Outcome::Drop, Blame::Event);
    }

    #[test]
    fn trouble_with_the_connection_costs_no_attempt_and_counts_for_its_breaker() {
        let causes = [Cause::Unreachable, Cause::Blocked, Cause::ConfirmTimeout];
        assert_policy(&causes, Outcome::HandBack, Blame::Connection);
    }

    #[test]
    fn one_of_several_sinks_is_waited_for_at_no_cost_to_the_others() {
        assert_policy(&[Cause::SinkDown], Outcome::Wait, Blame::Destination);
    }

    #[test]
    fn suspects_are_sent_again_alone_and_only_who_was_alone_is_charged() {
        assert_policy(&[Cause::Suspect], Outcome::Isolate, Blame::Event);
        assert_policy(&[Cause::ClosedOn], Outcome::RetryOrDead, Blame::Event);
    }

    #[test]
    fn a_destination_that_is_missing_or_forbidden_is_waited_for_at_no_cost() {
        let causes = [Cause::DestinationMissing, Cause::Forbidden];
        assert_policy(&causes, Outcome::Wait, Blame::DestinationForSure);
    }

    #[test]
    fn a_refusal_by_the_queue_is_counted_and_never_kills() {
        assert_policy(&[Cause::Nacked], Outcome::Retry, Blame::Destination);
    }

    #[test]
    fn an_unroutable_or_rejected_event_dies_after_its_attempts() {
        let causes = [Cause::Unroutable, Cause::Rejected];
        assert_policy(&causes, Outcome::RetryOrDead, Blame::Event);
    }

    #[test]
    fn what_can_never_be_carried_is_dead_at_once() {
        let causes = [Cause::TooLarge, Cause::Undecodable, Cause::IllegalName];
        assert_policy(&causes, Outcome::Dead, Blame::Event);
    }

    #[test]
    fn only_what_the_event_is_to_blame_for_can_kill_it() {
        for cause in Cause::ALL {
            let (outcome, blame) = decide(cause);
            if matches!(outcome, Outcome::Dead | Outcome::RetryOrDead) {
                assert_eq!(blame, Blame::Event, "{cause:?}");
            }
        }
    }

    #[test]
    fn classes_are_distinct() {
        let classes: std::collections::BTreeSet<_> =
            Cause::ALL.into_iter().map(Cause::class).collect();
        assert_eq!(classes.len(), Cause::ALL.len());
    }
}
