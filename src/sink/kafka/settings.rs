//! From our options to librdkafka's. Pure: no I/O.
//!
//! Invariants: what the promises rest on is set here, after what the user adds: acknowledged by all
//! in-sync replicas, idempotent, the partitions of Java's default, nothing kept for longer than the
//! confirm timeout.

use std::time::Duration;

use rdkafka::ClientConfig;

use crate::config::{ConfigError, KafkaConfig};

/// Before the first retry within librdkafka, growing up to [`LONGEST_RETRY_PAUSE_MS`].
const RETRY_PAUSE_MS: u64 = 50;
/// The later ones wait no longer.
const LONGEST_RETRY_PAUSE_MS: u64 = 500;
/// Between attempts to reach a broker again.
const RECONNECT_PAUSE_MS: u64 = 50;
/// The later ones wait no longer: the relay's breaker has pauses of its own.
const LONGEST_RECONNECT_PAUSE_MS: u64 = 1_000;
/// Notices a peer that is gone while nothing is sent. librdkafka has no other sign of it.
const KEEPALIVE: &str = "true";
/// Far more than the windows of all lanes, so that librdkafka's queue is full only by bytes.
const MOST_QUEUED: u32 = 1_000_000;

/// What tells one producer from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batching {
    /// As they come.
    Many,
    /// Each record in a batch of its own: what the brokers say of a batch, they say of it.
    Alone,
}

/// The options of any client: where the brokers are, and who we are.
///
/// # Errors
/// Names the option of ours that is wrong.
pub(super) fn client(config: &KafkaConfig) -> Result<ClientConfig, ConfigError> {
    let mut client = ClientConfig::new();
    client
        .set("bootstrap.servers", config.servers()?)
        .set("client.id", &config.source);
    security(config, &mut client)?;
    Ok(client)
}

/// The options of a producer.
///
/// # Errors
/// Names the option of ours that is wrong.
pub(super) fn producer(
    config: &KafkaConfig,
    batching: Batching,
) -> Result<ClientConfig, ConfigError> {
    let mut client = client(config)?;
    let millis = |duration: Duration| duration.as_millis().to_string();
    // None that is set above or below is among them.
    for (name, value) in &config.properties {
        client.set(name, value.expose());
    }
    let set_unless_given = [
        ("queue.buffering.max.messages", MOST_QUEUED.to_string()),
        ("socket.keepalive.enable", KEEPALIVE.to_owned()),
        ("retry.backoff.ms", RETRY_PAUSE_MS.to_string()),
        ("retry.backoff.max.ms", LONGEST_RETRY_PAUSE_MS.to_string()),
        ("reconnect.backoff.ms", RECONNECT_PAUSE_MS.to_string()),
        (
            "reconnect.backoff.max.ms",
            LONGEST_RECONNECT_PAUSE_MS.to_string(),
        ),
    ];
    for (name, value) in set_unless_given {
        if !config.properties.contains_key(name) {
            client.set(name, value);
        }
    }
    client
        .set("acks", "all")
        .set("enable.idempotence", "true")
        // Java's, so that an aggregate is in the partition where others look for it.
        .set("partitioner", "murmur2_random")
        .set("compression.type", config.compression.name())
        .set("message.max.bytes", config.max_message_bytes.to_string())
        .set("message.timeout.ms", millis(config.confirm_timeout))
        .set("request.timeout.ms", millis(config.confirm_timeout))
        // A refusal that stays is heard as itself before the time is up.
        .set("message.send.max.retries", retries(config).to_string())
        .set(
            "allow.auto.create.topics",
            config.auto_create_topics.to_string(),
        )
        // A topic that is there may not be known everywhere yet; one that nobody makes need not be
        // waited for here.
        .set(
            "topic.metadata.propagation.max.ms",
            if config.auto_create_topics {
                millis(config.confirm_timeout / 2)
            } else {
                "0".to_owned()
            },
        );
    match batching {
        Batching::Many => client.set("linger.ms", millis(config.linger)),
        Batching::Alone => client.set("linger.ms", "0").set("batch.num.messages", "1"),
    };
    Ok(client)
}

fn security(config: &KafkaConfig, client: &mut ClientConfig) -> Result<(), ConfigError> {
    let protocol = match (config.tls, config.sasl_mechanism) {
        (false, None) => "plaintext",
        (true, None) => "ssl",
        (false, Some(_)) => "sasl_plaintext",
        (true, Some(_)) => "sasl_ssl",
    };
    client.set("security.protocol", protocol);
    if let Some(mechanism) = config.sasl_mechanism {
        client.set("sasl.mechanisms", mechanism.name());
        if let Some(username) = &config.username {
            client.set("sasl.username", username);
        }
        if let Some(password) = &config.password {
            client.set("sasl.password", password.expose());
        }
    }
    let Some(tls) = config.tls()? else {
        return Ok(());
    };
    // Our own reading of the files finds what is wrong in words that name the option.
    tls.client_config()?;
    let path = |file: &crate::tls::PemFile| file.path.to_string_lossy().into_owned();
    match &tls.ca {
        Some(ca) => client.set("ssl.ca.location", path(ca)),
        // The OpenSSL that is built in knows no place of its own: all usual ones are looked at.
        None => client.set("ssl.ca.location", "probe"),
    };
    if let Some((certificate, key)) = &tls.identity {
        client
            .set("ssl.certificate.location", path(certificate))
            .set("ssl.key.location", path(key));
    }
    Ok(())
}

/// So many that the pauses before them take about half of the confirm timeout.
fn retries(config: &KafkaConfig) -> u64 {
    let half = u64::try_from(config.confirm_timeout.as_millis() / 2).unwrap_or(u64::MAX);
    let (mut taken, mut pause, mut count) = (0_u64, RETRY_PAUSE_MS, 0);
    while taken.saturating_add(pause) <= half {
        taken += pause;
        pause = (pause * 2).min(LONGEST_RETRY_PAUSE_MS);
        count += 1;
        if pause == LONGEST_RETRY_PAUSE_MS {
            return count + (half - taken) / pause;
        }
    }
    count.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> KafkaConfig {
        KafkaConfig {
            bootstrap_servers: Some("h:9092".into()),
            ..KafkaConfig::default()
        }
    }

    #[test]
    fn what_is_confirmed_is_with_all_replicas_and_in_javas_partition() {
        for batching in [Batching::Many, Batching::Alone] {
            let client = producer(&config(), batching).unwrap();
            for (name, value) in [
                ("acks", "all"),
                ("enable.idempotence", "true"),
                ("partitioner", "murmur2_random"),
                ("allow.auto.create.topics", "false"),
                ("message.timeout.ms", "10000"),
                ("security.protocol", "plaintext"),
            ] {
                assert_eq!(client.get(name), Some(value), "{name}");
            }
        }
        let alone = producer(&config(), Batching::Alone).unwrap();
        assert_eq!(alone.get("batch.num.messages"), Some("1"));
    }

    #[test]
    fn librdkafka_takes_these_options() {
        let mut config = config();
        config.sasl_mechanism = Some(crate::config::SaslMechanism::ScramSha512);
        config.username = Some("u".into());
        config.password = Some("p".into());
        config.tls = true;
        for batching in [Batching::Many, Batching::Alone] {
            let client = producer(&config, batching).unwrap();
            client.create_native_config().unwrap();
            assert_eq!(client.get("security.protocol"), Some("sasl_ssl"));
        }
    }

    #[test]
    fn retries_take_about_half_of_the_confirm_timeout() {
        let with = |seconds| {
            retries(&KafkaConfig {
                confirm_timeout: Duration::from_secs(seconds),
                ..KafkaConfig::default()
            })
        };
        // 50 + 100 + 200 = 350; + 400 = 750; then 500 each.
        assert_eq!(with(1), 3);
        assert_eq!(with(2), 4);
        assert_eq!(with(10), 4 + (5000 - 750) / 500);
    }

    #[test]
    fn properties_of_the_users_own_are_passed_on_and_never_win() {
        let mut config = config();
        for (name, value) in [
            ("queue.buffering.max.messages", "5"),
            ("socket.nagle.disable", "true"),
        ] {
            config.properties.insert(name.into(), value.into());
        }
        let client = producer(&config, Batching::Many).unwrap();
        assert_eq!(client.get("queue.buffering.max.messages"), Some("5"));
        assert_eq!(client.get("socket.nagle.disable"), Some("true"));
    }
}
