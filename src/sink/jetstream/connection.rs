//! Makes the one connection of a sink, shared by its lanes.
//!
//! Invariants:
//! - Lanes wait for the same attempt (see `shared`).
//! - A new connection counts only once JetStream has answered on it: a server that takes
//!   connections and acknowledges nothing must not be given events.
//! - Servers are tried in the order given, each by a client of its own (see `link`).

use std::path::Path;
use std::sync::Arc;

use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions, ServerAddr};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::timeout;
use url::Url;

use super::link::{Answer, Link};
use crate::config::JetstreamConfig;
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::shared::Shared;
use crate::sink::{SinkError, Transport};
use crate::tls::{self, Tls};

/// Answered by the account's JetStream, if it has one.
const ACCOUNT: &str = "$JS.API.INFO";

/// Makes the connection when it is needed.
pub(super) struct Connector {
    servers: Vec<Url>,
    /// None for a connection in the clear.
    tls: Option<Tls>,
    config: JetstreamConfig,
    board: Arc<Board>,
    shared: Shared<Link>,
}

impl Connector {
    pub(super) fn new(servers: Vec<Url>, tls: Option<Tls>, config: JetstreamConfig) -> Self {
        Self {
            servers,
            tls,
            config,
            board: Arc::default(),
            shared: Shared::default(),
        }
    }

    pub(super) fn transport(&self) -> watch::Receiver<Transport> {
        self.board.state.subscribe()
    }

    /// The connection, made if needed.
    pub(super) async fn link(&self) -> Result<Arc<Link>, SinkError> {
        let mut turn = self.shared.turn().await;
        if let Some(answer) = turn.answer(Link::is_up) {
            return answer;
        }
        // What it had buffered must be gone before anything is sent again.
        if let Some(old) = turn.take() {
            old.kill(&old.lost_error().message);
        }
        let number = self.board.next_link();
        let attempt = self.connect(number).await;
        match &attempt {
            Ok(link) => link.announce(),
            Err(error) => self.board.set_down(number, error),
        }
        turn.keep(attempt)
    }

    async fn connect(&self, number: u64) -> Result<Arc<Link>, SinkError> {
        let mut first = None;
        for server in &self.servers {
            match self.attempt(server, number).await {
                Ok(link) => return Ok(link),
                Err(error) => {
                    first.get_or_insert(error);
                }
            }
        }
        Err(first.unwrap_or_else(no_url))
    }

    async fn attempt(&self, server: &Url, number: u64) -> Result<Arc<Link>, SinkError> {
        let place = place(server);
        let within = self.config.connect_timeout;
        let (address, options) = self.options(server)?;
        let about = (place.clone(), number, self.board.clone());
        let link = match timeout(within, Link::open(options, address, about, within)).await {
            Ok(Ok(link)) => Arc::new(link),
            Ok(Err(error)) => return Err(connect_failed(&place, &error)),
            Err(_) => {
                return Err(SinkError::new(
                    Cause::Unreachable,
                    format!("cannot connect to NATS at {place}: no answer within {within:?}"),
                ));
            }
        };
        self.find_jetstream(&link).await?;
        Ok(link)
    }

    /// A client of the first server that takes us.
    pub(super) async fn plain_client(&self) -> Result<Client, SinkError> {
        let mut first = None;
        for server in &self.servers {
            let (address, options) = self.options(server)?;
            let options = options.connection_timeout(self.config.connect_timeout);
            match options.connect(address).await {
                Ok(client) => return Ok(client),
                Err(error) => {
                    first.get_or_insert(connect_failed(&place(server), &error));
                }
            }
        }
        Err(first.unwrap_or_else(no_url))
    }

    /// Does the account have JetStream, and does it answer?
    pub(super) async fn find_jetstream(&self, link: &Link) -> Result<(), SinkError> {
        match link.ask(ACCOUNT, self.config.connect_timeout).await? {
            // Who may not ask learns it from the first acknowledgement.
            Answer::Denied => Ok(()),
            Answer::Nobody => Err(SinkError::new(
                Cause::Unreachable,
                format!(
                    "NATS at {} has no JetStream for this account: enable it (jetstream {{ … }} in \
                     the server's configuration, or the account's limits)",
                    link.place()
                ),
            )),
            Answer::Reply(reply) => match refusal(&reply) {
                None => Ok(()),
                Some(reason) => Err(SinkError::new(
                    Cause::Unreachable,
                    format!("JetStream at {} is not available: {reason}", link.place()),
                )),
            },
        }
    }

    /// Who we are, and how it is encrypted. Files are read again for each connection.
    fn options(&self, server: &Url) -> Result<(ServerAddr, ConnectOptions), SinkError> {
        let failed = |reason: String| SinkError::new(Cause::Unreachable, reason);
        let mut options = ConnectOptions::new().name(format!("bellwire {}", self.config.source));
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        options = match (server.username(), server.password()) {
            ("", None) => options,
            (token, None) => options.token(decoded(token)),
            (user, Some(password)) => options.user_and_password(decoded(user), decoded(password)),
        };
        if let Some(path) = &self.config.credentials_file {
            let text = read("jetstream.credentials_file", path)?;
            options = options.credentials(&text).map_err(|_| {
                failed(format!(
                    "jetstream.credentials_file: {} holds no NATS credentials (a JWT and a seed)",
                    path.display()
                ))
            })?;
        }
        if let Some(path) = &self.config.nkey_file {
            let text = read("jetstream.nkey_file", path)?;
            options = options.nkey(text.trim().to_owned());
        }
        if let Some(tls) = &self.tls {
            let config = tls.client_config();
            let config = config.map_err(|error| failed(error.to_string()))?;
            options = options.tls_client_config(config).require_tls(true);
        }
        // The library would show it in its logs, and takes user and password as they are encoded.
        let mut bare = server.clone();
        let _ = bare.set_username("");
        let _ = bare.set_password(None);
        let address = ServerAddr::from_url(bare).map_err(|error| failed(error.to_string()))?;
        Ok((address, options))
    }

    pub(super) async fn close(&self) {
        if let Some(link) = self.shared.turn().await.take() {
            link.kill("closed");
        }
    }
}

fn read(option: &str, path: &Path) -> Result<String, SinkError> {
    std::fs::read_to_string(path).map_err(|error| {
        SinkError::new(
            Cause::Unreachable,
            format!("{option}: {} cannot be read: {error}", path.display()),
        )
    })
}

fn no_url() -> SinkError {
    SinkError::new(Cause::Unreachable, "jetstream.url is not set (NATS_URL)")
}

fn place(server: &Url) -> String {
    format!(
        "{}:{}",
        server.host_str().unwrap_or_default(),
        server.port().unwrap_or(4222)
    )
}

fn connect_failed(place: &str, error: &ConnectError) -> SinkError {
    let reason = match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            "it refuses who we are: look at user and password in jetstream.url, or at \
             jetstream.credentials_file or jetstream.nkey_file"
                .to_owned()
        }
        _ => tls::explain(error, "jetstream").unwrap_or_else(|| {
            use std::error::Error as _;
            error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string)
        }),
    };
    SinkError::new(
        Cause::Unreachable,
        format!("cannot connect to NATS at {place}: {reason}"),
    )
}

/// The reason in a reply of the API that is a refusal.
fn refusal(reply: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Reply {
        error: Option<Refusal>,
    }
    #[derive(Deserialize)]
    struct Refusal {
        #[serde(default)]
        description: String,
    }
    let reply: Reply = serde_json::from_slice(reply).ok()?;
    Some(reply.error?.description)
}
