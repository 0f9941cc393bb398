//! The relays' places: each has proxies of its own to both servers, and a process that is started again.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::clock::Clock;
use crate::support::{Proxy, Relay, World, amqp_url, database_url};

/// Hosts of a fleet are not all set up alike.
const ZONES: [&str; 4] = [
    "Asia/Kathmandu",
    "America/St_Johns",
    "Pacific/Apia",
    "UTC-13:45",
];

pub struct Place {
    pub number: usize,
    pub relay: Relay,
    pub database: Proxy,
    pub broker: Proxy,
    pub clock: Clock,
    environment: Vec<(String, String)>,
    log: PathBuf,
}

impl Place {
    pub async fn new(world: &World, number: usize, ordering: &str, logs: &Path) -> Self {
        let database = Proxy::new(&database_url()).await;
        let broker = Proxy::new(&amqp_url()).await;
        let clock = Clock::new(logs, number);
        let mut environment = world.environment();
        let own = [
            ("DATABASE_URL", database.through(&database_url())),
            ("AMQP_URL", broker.through(&amqp_url())),
            ("TZ", ZONES[number % ZONES.len()].to_owned()),
            // Tells whose message it is.
            ("BELLWIRE_RABBITMQ__SOURCE", number.to_string()),
            ("BELLWIRE_RELAY__ORDERING", ordering.to_owned()),
            ("BELLWIRE_RELAY__GRACE", "5s".to_owned()),
            ("BELLWIRE_RETRY__BACKOFF", "500ms".to_owned()),
            ("BELLWIRE_RETRY__MAX_ATTEMPTS", "3".to_owned()),
        ];
        environment.extend(own.map(|(key, value)| (key.to_owned(), value)));
        environment.extend(clock.environment());
        Self {
            number,
            relay: start(&environment),
            database,
            broker,
            clock,
            environment,
            log: logs.join(format!("relay-{number}.log")),
        }
    }

    /// Another process, once the one before has ended.
    pub fn restart(&mut self) {
        self.keep_log();
        self.relay = start(&self.environment);
    }

    /// Appends what the relay has said to the log of its place.
    pub fn keep_log(&self) {
        let mut log = std::fs::read_to_string(&self.log).unwrap_or_default();
        writeln!(log, "==== {}\n{}", self.relay.name, self.relay.log()).unwrap();
        std::fs::write(&self.log, log).unwrap();
    }
}

/// Its lease is 5 s, as [`Relay::start`] has it.
fn start(environment: &[(String, String)]) -> Relay {
    Relay::start(environment, &[], &["run"])
}
