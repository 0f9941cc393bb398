//! What a report says of a record. Pure: no I/O.
//!
//! The brokers judge batches. What they say of a batch's content is said of a record only if it was
//! alone in it.

use rdkafka::error::RDKafkaErrorCode as Code;

use super::settings::Batching;
use super::topic;
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// What a failure means.
#[derive(Debug)]
pub(super) enum Verdict {
    /// This, for sure.
    Refused(SinkError),
    /// We may not write to the topic.
    Denied,
    /// Something is wrong with a batch that it may have shared: sent again in one of its own.
    Shared,
    /// No answer came in time.
    Overdue,
    /// The producer is of no more use.
    Broken,
    /// The connection was lost once too often, or the producer ended.
    Lost,
}

/// What this failure means for a record of this topic.
pub(super) fn verdict(code: Code, topic: &str, batching: Batching) -> Verdict {
    let refused = |cause, message: String| Verdict::Refused(SinkError::new(cause, message));
    match code {
        Code::MessageTimedOut
        | Code::OperationTimedOut
        | Code::TimedOutQueue
        | Code::RequestTimedOut => Verdict::Overdue,
        Code::PurgeQueue
        | Code::PurgeInflight
        | Code::BrokerTransportFailure
        | Code::BrokerDestroy
        | Code::DestroyBroker
        | Code::NetworkException => Verdict::Lost,
        Code::Fatal
        | Code::State
        | Code::GaplessGuarantee
        | Code::Fenced
        | Code::ProducerFenced
        | Code::OutOfOrderSequenceNumber
        | Code::DuplicateSequenceNumber
        | Code::UnknownProducerId
        | Code::InvalidProducerEpoch
        | Code::InvalidProducerIdMapping
        | Code::ClusterAuthorizationFailed => Verdict::Broken,
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownTopicId
        | Code::UnknownPartition => Verdict::Refused(topic::missing(topic)),
        Code::NotLeaderForPartition | Code::LeaderNotAvailable | Code::ReplicaNotAvailable => {
            Verdict::Refused(topic::leaderless(topic))
        }
        Code::TopicAuthorizationFailed => Verdict::Denied,
        Code::InvalidTopic => Verdict::Refused(topic::refused_name(topic)),
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => {
            match batching {
                Batching::Many => Verdict::Shared,
                Batching::Alone => refused(
                    Cause::TooLarge,
                    format!(
                        "too large for topic '{topic}': the brokers refuse it (max.message.bytes of \
                         the topic, message.max.bytes of the brokers)"
                    ),
                ),
            }
        }
        Code::InvalidRecord
        | Code::InvalidTimestamp
        | Code::InvalidMessage
        | Code::UnsupportedForMessageFormat
        | Code::PolicyViolation => match batching {
            Batching::Many => Verdict::Shared,
            Batching::Alone => refused(
                Cause::Rejected,
                format!("the brokers refuse this record for topic '{topic}': {code}"),
            ),
        },
        other => refused(
            Cause::Nacked,
            format!("the brokers did not take a record for topic '{topic}': {other}"),
        ),
    }
}

/// The record by itself is larger than we send.
pub(super) fn larger_than_ours(topic: &str, most: u64) -> SinkError {
    SinkError::new(
        Cause::TooLarge,
        format!(
            "too large for topic '{topic}': with key and headers above {most} bytes \
             (kafka.max_message_bytes)"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::failure::{Outcome, decide};

    fn of(code: Code, batching: Batching) -> Option<Cause> {
        match verdict(code, "events.order", batching) {
            Verdict::Refused(error) => {
                assert!(error.message.contains("'events.order'"), "{error}");
                Some(error.cause)
            }
            _ => None,
        }
    }

    #[test]
    fn what_is_said_of_a_batch_is_said_of_a_record_only_alone() {
        for (code, alone) in [
            (Code::MessageSizeTooLarge, Cause::TooLarge),
            (Code::MessageBatchTooLarge, Cause::TooLarge),
            (Code::InvalidRecord, Cause::Rejected),
        ] {
            assert!(matches!(
                verdict(code, "t", Batching::Many),
                Verdict::Shared
            ));
            assert_eq!(of(code, Batching::Alone), Some(alone));
        }
    }

    #[test]
    fn trouble_with_brokers_and_topics_kills_nobody() {
        for code in [
            Code::UnknownTopic,
            Code::UnknownTopicOrPartition,
            Code::NotLeaderForPartition,
            Code::LeaderNotAvailable,
            Code::NotEnoughReplicas,
            Code::NotEnoughReplicasAfterAppend,
            Code::KafkaStorageError,
            Code::ThrottlingQuotaExceeded,
            Code::Unknown,
        ] {
            for batching in [Batching::Many, Batching::Alone] {
                let cause = of(code, batching).unwrap();
                let outcome = decide(cause).0;
                assert!(
                    matches!(outcome, Outcome::Wait | Outcome::Retry),
                    "{code:?}"
                );
            }
        }
    }

    #[test]
    fn a_state_that_the_producer_cannot_leave_says_nothing_of_the_record() {
        for code in [
            Code::Fatal,
            Code::OutOfOrderSequenceNumber,
            Code::UnknownProducerId,
        ] {
            let verdict = verdict(code, "t", Batching::Many);
            assert!(matches!(verdict, Verdict::Broken), "{code:?}");
        }
    }
}
