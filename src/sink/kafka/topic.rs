//! Topics: what may be the name of one, and what the brokers say of it.

use std::time::Duration;

use rdkafka::metadata::MetadataTopic;
use rdkafka::types::{RDKafkaErrorCode, RDKafkaRespErr};

use super::link::Link;
use crate::event::OneLine;
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// Kafka's own limit.
pub(super) const LONGEST_TOPIC: usize = 249;
/// In errors, of a name that may be of any length.
const SHOWN: usize = 60;

/// May a topic have this name? An illegal one stays in librdkafka's list of topics to ask for, and
/// every later answer would complain of it.
pub(super) fn check_name(topic: &str) -> Result<(), SinkError> {
    let illegal = |reason: String| {
        Err(SinkError::new(
            Cause::IllegalName,
            format!("topic '{}' {reason}", shown(topic)),
        ))
    };
    let odd = |letter: &char| !(letter.is_ascii_alphanumeric() || ".-_".contains(*letter));
    if let Some(letter) = topic.chars().find(odd) {
        return illegal(format!(
            "has the character {letter:?}: names of topics have ASCII letters, digits, dots, dashes \
             and underscores; give these events a route with a destination of its own"
        ));
    }
    match topic {
        "" | "." | ".." => illegal("is no name that Kafka takes".to_owned()),
        long if long.len() > LONGEST_TOPIC => illegal(format!(
            "has {} letters, Kafka takes {LONGEST_TOPIC}",
            long.len()
        )),
        _ => Ok(()),
    }
}

fn shown(text: &str) -> String {
    OneLine(text).cut(SHOWN)
}

/// What there is of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) partitions: usize,
    /// Of these nothing can be written to at present.
    pub(super) leaderless: usize,
}

/// Asks the brokers for a topic.
pub(super) async fn look(link: &Link, topic: &str, within: Duration) -> Result<Found, SinkError> {
    let named = topic.to_owned();
    let look = move |metadata: &rdkafka::metadata::Metadata| {
        let mut topics = metadata.topics().iter();
        let answer = topics.find(|answer| answer.name() == named);
        answer.map_or_else(|| Err(missing(&named)), found)
    };
    link.ask(Some(topic.to_owned()), within, look).await?
}

fn found(topic: &MetadataTopic) -> Result<Found, SinkError> {
    if let Some(error) = topic.error() {
        return Err(error_of(topic.name(), error));
    }
    let partitions = topic.partitions();
    let found = Found {
        partitions: partitions.len(),
        leaderless: partitions.iter().filter(|one| one.leader() < 0).count(),
    };
    if found.leaderless == found.partitions {
        return Err(leaderless(topic.name()));
    }
    Ok(found)
}

fn error_of(topic: &str, error: RDKafkaRespErr) -> SinkError {
    match RDKafkaErrorCode::from(error) {
        RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic => {
            missing(topic)
        }
        RDKafkaErrorCode::TopicAuthorizationFailed => {
            SinkError::new(Cause::Forbidden, forbidden(topic))
        }
        RDKafkaErrorCode::LeaderNotAvailable => leaderless(topic),
        RDKafkaErrorCode::InvalidTopic => refused_name(topic),
        other => SinkError::new(
            Cause::Nacked,
            format!("the brokers say of topic '{topic}': {other}"),
        ),
    }
}

/// The topic does not exist.
pub(super) fn missing(topic: &str) -> SinkError {
    SinkError::new(
        Cause::DestinationMissing,
        format!(
            "topic '{topic}' does not exist: create it (kafka-topics --create), or set \
             kafka.auto_create_topics"
        ),
    )
}

/// Nobody takes records for it at present.
pub(super) fn leaderless(topic: &str) -> SinkError {
    SinkError::new(
        Cause::DestinationMissing,
        format!("topic '{topic}' has no leader: it was just created, or its brokers are down"),
    )
}

/// The brokers take no topic of this name.
pub(super) fn refused_name(topic: &str) -> SinkError {
    SinkError::new(
        Cause::IllegalName,
        format!("the brokers refuse '{topic}' as the name of a topic"),
    )
}

/// We may not write there.
pub(super) fn forbidden(topic: &str) -> String {
    format!("no permission to write to topic '{topic}': grant it (kafka-acls --add --producer)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_kafka_takes_and_nothing_else() {
        for name in ["events.order", "a", "A-1_b.c", "...", &"a".repeat(249)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "events.order line",
            "events.a/b",
            "events.ü",
            "a:b",
            "a\0b",
            "a\r\nb",
            &"a".repeat(250),
        ] {
            let error = check_name(name).unwrap_err();
            assert_eq!(error.cause, Cause::IllegalName, "{name}");
            assert!(
                error.message.len() < 300 && !error.message.contains(['\r', '\n', '\0']),
                "{error}"
            );
        }
    }
}
