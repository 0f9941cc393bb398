//! What RabbitMQ's management API says of an exchange: its type, and whether it leads anywhere.
//!
//! AMQP itself tells no more than that an exchange exists. Exchanges, bindings and policies are read
//! live by the API, unlike its statistics. It is asked directly, never through a proxy, and with a
//! client of its own each time: seldom, and certificates may have been renewed.

use std::error::Error as _;
use std::fmt;
use std::time::Duration;

use lapin::uri::AMQPUri;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::time::timeout;
use url::Url;

use crate::config::{ConfigError, RabbitmqConfig};
use crate::event::OneLine;
use crate::tls::{self, Tls};

/// Where messages that no binding takes go instead.
const ALTERNATE: &str = "alternate-exchange";
/// Half a million bindings. What answers more than that is no management API.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// Asks the management API.
pub(super) struct Management {
    /// With user and password: never shown.
    base: Url,
    /// `host:port`, for messages.
    address: String,
    /// They are those of `rabbitmq.url`.
    borrowed: bool,
    tls: Option<Tls>,
    patience: Duration,
    vhost: String,
    /// The configured exchange and what type it must be of.
    wanted: Option<(String, String)>,
}

/// An exchange that may be published to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    kind: String,
    bindings: usize,
    /// Looked up only if nothing is bound.
    alternate: Option<String>,
}

/// Why an exchange cannot be said to be one.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// It leads nowhere, or takes nothing: so says the broker.
    Unfit(String),
    /// The API itself is in trouble, which says nothing of the exchange.
    Silent(String),
}

/// What is read of an exchange.
#[derive(Debug, Default, Deserialize)]
struct Description {
    #[serde(rename = "type")]
    kind: String,
    internal: bool,
    /// A table, which some versions show as an empty list if it is empty.
    #[serde(default)]
    arguments: serde_json::Value,
    /// Only the name; absent or empty if none applies.
    #[serde(default)]
    policy: String,
}

/// What is read of a policy.
#[derive(Deserialize)]
struct PolicyDescription {
    definition: serde_json::Value,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "type {}, ", OneLine(&self.kind))?;
        match (self.bindings, &self.alternate) {
            (0, Some(name)) => write!(f, "no binding, {ALTERNATE} '{}'", OneLine(name)),
            (1, _) => f.write_str("1 binding"),
            (bindings, _) => write!(f, "{bindings} bindings"),
        }
    }
}

impl Management {
    /// None unless it is configured. Does no I/O.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(super) fn new(config: &RabbitmqConfig, uri: &AMQPUri) -> Result<Option<Self>, ConfigError> {
        let Some(url) = &config.management_url else {
            return Ok(None);
        };
        let Ok(mut base) = Url::parse(url.expose()) else {
            return Ok(None);
        };
        let borrowed = base.username().is_empty() && base.password().is_none();
        if borrowed {
            let user = &uri.authority.userinfo;
            // They fail for URLs without a host only.
            let _ = base.set_username(&user.username);
            let _ = base.set_password(Some(&user.password));
        }
        let wanted = config.exchange_type.clone();
        Ok(Some(Self {
            address: address(&base),
            base,
            borrowed,
            tls: config.management_tls()?,
            patience: config.connect_timeout,
            vhost: uri.vhost.clone(),
            wanted: wanted.map(|kind| (config.exchange.clone(), kind)),
        }))
    }

    /// Does this exchange take messages, and does it lead anywhere?
    pub(super) async fn examine(&self, exchange: &str) -> Result<Found, Problem> {
        match timeout(self.patience, self.ask(exchange)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.unreachable(&format!("no answer within {:?}", self.patience))),
        }
    }

    async fn ask(&self, exchange: &str) -> Result<Found, Problem> {
        let client = self.client()?;
        let url = self.url(&["exchanges", &self.vhost, exchange]);
        let response = self.get(&client, url).await?;
        if response.status() == StatusCode::NOT_FOUND {
            return Err(self.unknown(exchange));
        }
        let description: Description = self.read(response, exchange).await?;
        self.suits(exchange, &description)?;
        let mut url = self.url(&["exchanges", &self.vhost, exchange, "bindings", "source"]);
        // They are only counted.
        url.set_query(Some("columns=destination_type"));
        let response = self.get(&client, url).await?;
        let bindings: Vec<IgnoredAny> = self.read(response, exchange).await?;
        let alternate = if bindings.is_empty() {
            Some(self.alternate(&client, exchange, &description).await?)
        } else {
            None
        };
        Ok(Found {
            kind: description.kind,
            bindings: bindings.len(),
            alternate,
        })
    }

    /// Does it take what is published to it, and is it what it should be?
    fn suits(&self, exchange: &str, found: &Description) -> Result<(), Problem> {
        let vhost = &self.vhost;
        if found.internal {
            return Err(Problem::Unfit(format!(
                "Exchange '{exchange}' in vhost '{vhost}' is internal: RabbitMQ refuses whatever is \
                 published to it. Declare it anew, not internal, or publish to another."
            )));
        }
        match &self.wanted {
            Some((name, wanted)) if name == exchange && *wanted != found.kind => {
                let kind = OneLine(&found.kind);
                Err(Problem::Unfit(format!(
                    "Exchange '{exchange}' in vhost '{vhost}' is of type '{kind}', and \
                     rabbitmq.exchange_type wants '{wanted}': delete it and declare it as \
                     '{wanted}', or set rabbitmq.exchange_type to '{kind}'."
                )))
            }
            _ => Ok(()),
        }
    }

    /// Where messages go if nothing is bound: by its own argument, else by policy.
    async fn alternate(
        &self,
        client: &Client,
        exchange: &str,
        found: &Description,
    ) -> Result<String, Problem> {
        if let Some(name) = alternate_in(&found.arguments) {
            return Ok(name);
        }
        let nowhere = || {
            Problem::Unfit(format!(
                "Exchange '{exchange}' has no bound queue and no {ALTERNATE}: every message would \
                 be returned as unroutable. Bind a queue first."
            ))
        };
        if found.policy.is_empty() {
            return Err(nowhere());
        }
        let url = self.url(&["policies", &self.vhost, &found.policy]);
        let response = self.get(client, url).await?;
        match response.status() {
            // Removed meanwhile.
            StatusCode::NOT_FOUND => Err(nowhere()),
            StatusCode::OK => {
                let policy: PolicyDescription = self.read(response, exchange).await?;
                alternate_in(&policy.definition).ok_or_else(nowhere)
            }
            status => Err(Problem::Silent(format!(
                "Exchange '{exchange}' has no bound queue, and whether its policy '{}' gives it an \
                 {ALTERNATE} cannot be read (HTTP {}): bind a queue, or give the management user \
                 the tag policymaker.",
                OneLine(&found.policy),
                status.as_u16()
            ))),
        }
    }

    fn client(&self) -> Result<Client, Problem> {
        // An error means that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = Client::builder()
            // The password is not for whomever the answer names, nor for a proxy.
            .redirect(Policy::none())
            .no_proxy()
            .user_agent(concat!("bellwire/", env!("CARGO_PKG_VERSION")));
        let builder = match &self.tls {
            Some(tls) => {
                let tls = tls.client_config();
                let tls = tls.map_err(|error| Problem::Silent(error.to_string()))?;
                builder.tls_backend_preconfigured(tls)
            }
            // In the clear nobody needs to be trusted.
            None => builder.tls_certs_only([]),
        };
        builder
            .build()
            .map_err(|error| self.unreachable(&chain(error)))
    }

    /// Below the API's root.
    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("api").extend(path);
        }
        url
    }

    async fn get(&self, client: &Client, url: Url) -> Result<Response, Problem> {
        let answer = client.get(url).send().await;
        answer.map_err(|error| self.unreachable(&chain(error)))
    }

    /// The body, if all is well.
    async fn read<T: DeserializeOwned>(
        &self,
        mut response: Response,
        exchange: &str,
    ) -> Result<T, Problem> {
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED => return Err(self.rejected()),
            status => {
                let status = status.as_u16();
                return Err(Problem::Silent(format!(
                    "RabbitMQ management API returned HTTP {status} for exchange '{exchange}'. The \
                     broker's log says more; or rabbitmq.management_url leads elsewhere."
                )));
            }
        }
        let mut body = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(piece)) if body.len() + piece.len() <= MOST_BYTES => {
                    body.extend_from_slice(&piece);
                }
                Ok(Some(_)) => return Err(self.garbage("the answer is too long")),
                Ok(None) => break,
                Err(error) => return Err(self.unreachable(&chain(error))),
            }
        }
        // The parser's own text may quote what was answered.
        serde_json::from_slice(&body).map_err(|_| self.garbage("the answer is another"))
    }

    fn rejected(&self) -> Problem {
        let vhost = &self.vhost;
        let mend = if self.borrowed {
            format!(
                "They are those of rabbitmq.url: give that user the tag management, or name another \
                 user, with permissions in vhost '{vhost}', in rabbitmq.management_url."
            )
        } else {
            format!(
                "Mend them in rabbitmq.management_url; the user needs the tag management, and \
                 permissions in vhost '{vhost}'."
            )
        };
        Problem::Silent(format!(
            "RabbitMQ rejected the management user or password (HTTP 401). {mend}"
        ))
    }

    /// Of an exchange that AMQP has just found.
    fn unknown(&self, exchange: &str) -> Problem {
        Problem::Silent(format!(
            "Exchange '{exchange}' does not exist in vhost '{}': declare it and bind the consumer \
             queues. So says the management API at {}; as AMQP found it, does \
             rabbitmq.management_url lead to the same broker?",
            self.vhost, self.address
        ))
    }

    fn unreachable(&self, why: &str) -> Problem {
        Problem::Silent(format!(
            "cannot ask the RabbitMQ management API at {}: {why}. Mend rabbitmq.management_url, or \
             leave it out to go without a look at the bindings.",
            self.address
        ))
    }

    fn garbage(&self, what: &str) -> Problem {
        Problem::Silent(format!(
            "what answers at {} is no RabbitMQ management API: {what}. Mend rabbitmq.management_url.",
            self.address
        ))
    }
}

/// Any bytes as the answer to each question.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any(bytes: &[u8]) {
    if let Ok(found) = serde_json::from_slice::<Description>(bytes) {
        let alternate = alternate_in(&found.arguments);
        let found = Found {
            kind: found.kind,
            bindings: 0,
            alternate,
        };
        assert!(!found.to_string().contains(char::is_control), "one line");
    }
    if let Ok(policy) = serde_json::from_slice::<PolicyDescription>(bytes) {
        let _ = alternate_in(&policy.definition);
    }
    let _ = serde_json::from_slice::<Vec<IgnoredAny>>(bytes);
}

fn address(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or_default();
    format!("{host}:{port}")
}

fn alternate_in(table: &serde_json::Value) -> Option<String> {
    table.get(ALTERNATE)?.as_str().map(str::to_owned)
}

/// The error with its causes, without the URL.
fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    if let Some(explained) = tls::explain(&error, "rabbitmq") {
        return explained.replace("rabbitmq.url", "rabbitmq.management_url");
    }
    let mut cause = error.source();
    let mut text = error.to_string();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn management(url: &str) -> Management {
        let config = RabbitmqConfig {
            management_url: Some(url.into()),
            exchange_type: Some("topic".into()),
            ..RabbitmqConfig::default()
        };
        let uri = "amqp://u%40:p%2F@h/shop".parse().unwrap();
        Management::new(&config, &uri).unwrap().unwrap()
    }

    fn described(text: &str) -> Description {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn user_and_password_are_those_of_amqp_unless_it_has_its_own() {
        for (url, whole, borrowed) in [
            ("http://m:1/", "http://u%40:p%2F@m:1/", true),
            ("http://a:b@m:1/", "http://a:b@m:1/", false),
            ("https://a@m", "https://a@m/", false),
        ] {
            let management = management(url);
            assert_eq!(management.base.as_str(), whole);
            assert_eq!(management.borrowed, borrowed, "{url}");
        }
        assert_eq!(management("https://a:b@[::1]/x").address, "[::1]:443");
    }

    #[test]
    fn an_alternate_exchange_is_found_in_every_form_of_arguments() {
        for (arguments, alternate) in [
            (r#"{"alternate-exchange":"a"}"#, Some("a")),
            ("{}", None),
            ("[]", None),
            (r#"{"alternate-exchange":1}"#, None),
        ] {
            let text = format!(r#"{{"type":"topic","internal":false,"arguments":{arguments}}}"#);
            let found = described(&text);
            assert_eq!(alternate_in(&found.arguments).as_deref(), alternate);
            assert_eq!(found.policy, "");
        }
    }

    #[test]
    fn only_the_configured_exchange_must_be_of_the_type() {
        let management = management("http://m");
        let fanout = described(r#"{"type":"fanout","internal":false}"#);
        assert!(management.suits("billing", &fanout).is_ok());
        let refused = management.suits("domain-events", &fanout);
        assert!(matches!(refused, Err(Problem::Unfit(text)) if text.contains("vhost 'shop'")));
    }
}
