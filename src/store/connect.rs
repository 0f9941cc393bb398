//! Connections: settings that notice a dead peer, TLS, poolers, and a bound on every wait.

use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::poll_fn;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, Notification};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::StoreError;
use super::pooler::{Pooler, Pooling};
use super::runner::Runner;
use crate::config::{PoolerSetting, Secret};

/// A wrong address or a host that swallows packets should show soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For all hosts of a URL together: the last of them may be the one that answers.
const CONNECT_TIMEOUT_OF_ALL: Duration = Duration::from_secs(9);
/// Idle time before the kernel asks whether the peer is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// Between those questions; three unanswered ones end the connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Sent data that nobody acknowledges for this long ends the connection.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);
/// Longer than the server's own statement_timeout: only a silent server meets it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(12);

/// Notifications of one connection, until it is lost.
pub type Notifications = mpsc::UnboundedReceiver<Notification>;

/// Bounds the wait for an answer.
pub(super) async fn in_time<T>(
    answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
        Ok(answer) => answer.map_err(StoreError::from),
        Err(_) => Err(StoreError::TimedOut),
    }
}

/// Opens connections to the outbox's database.
#[derive(Clone)]
pub struct Connector {
    config: tokio_postgres::Config,
    tls: MakeRustlsConnect,
    session_sql: Arc<str>,
    pooler: Arc<Pooler>,
}

impl Connector {
    /// `key` names the option that the URL is from.
    pub(super) fn new(
        key: &str,
        url: &Secret,
        application_name: &str,
        session_sql: &str,
        pooler: PoolerSetting,
    ) -> Result<Self, StoreError> {
        let (url, verify) = split_ssl_mode(url.expose());
        let mut config = tokio_postgres::Config::from_str(&url)
            .map_err(|_| StoreError::Shape(format!("{key} is no PostgreSQL connection string")))?;
        if config.get_application_name().is_none() {
            config.application_name(application_name);
        }
        if config.get_connect_timeout().is_none() {
            let hosts = u32::try_from(config.get_hosts().len()).unwrap_or(u32::MAX);
            config.connect_timeout(CONNECT_TIMEOUT.min(CONNECT_TIMEOUT_OF_ALL / hosts.max(1)));
        }
        config
            .keepalives(true)
            .keepalives_idle(KEEPALIVE_IDLE)
            .keepalives_interval(KEEPALIVE_INTERVAL)
            .keepalives_retries(3)
            .tcp_user_timeout(TCP_USER_TIMEOUT);
        Ok(Self {
            config,
            tls: MakeRustlsConnect::new(tls_client(verify)),
            session_sql: session_sql.into(),
            pooler: Arc::new(Pooler::new(pooler)),
        })
    }

    /// Does a connection keep its server session? Finds out by the first call, unless configured.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn pooling(&self) -> Result<Pooling, StoreError> {
        self.pooler.find(self).await
    }

    /// How statements run on connections from here; `more` are settings beside the usual ones.
    pub(super) async fn runner(&self, more: &str) -> Result<Runner, StoreError> {
        Ok(match self.pooling().await? {
            Pooling::Session => Runner::Direct,
            Pooling::Transaction => Runner::pooled(&format!("{}\n{more}", self.session_sql)),
        })
    }

    pub(super) fn pooler(&self) -> &Arc<Pooler> {
        &self.pooler
    }

    pub(super) fn config(&self) -> &tokio_postgres::Config {
        &self.config
    }

    pub(super) fn tls(&self) -> MakeRustlsConnect {
        self.tls.clone()
    }

    /// A connection of one's own, with our session settings; without them through a pooler in
    /// transaction mode, where they would become somebody else's.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn connect(&self) -> Result<Client, StoreError> {
        self.open(|_| {}).await.map(|(client, _)| client)
    }

    /// A connection whose notifications are wanted. `lost` is called once, when it has ended.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn open(
        &self,
        lost: impl FnOnce(String) + Send + 'static,
    ) -> Result<(Client, Notifications), StoreError> {
        let keeps_session = self.pooling().await? == Pooling::Session;
        let (client, notifications) = self.bare(lost).await?;
        if keeps_session {
            in_time(client.batch_execute(&self.session_sql)).await?;
        }
        Ok((client, notifications))
    }

    /// A connection without any settings.
    pub(super) async fn bare(
        &self,
        lost: impl FnOnce(String) + Send + 'static,
    ) -> Result<(Client, Notifications), StoreError> {
        let (client, mut connection) = in_time(self.config.connect(self.tls.clone())).await?;
        let (heard, notifications) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let end = poll_fn(|context| {
                loop {
                    match connection.poll_message(context) {
                        Poll::Ready(Some(Ok(AsyncMessage::Notification(notification)))) => {
                            let _ = heard.send(notification);
                        }
                        Poll::Ready(Some(Ok(_))) => {}
                        Poll::Ready(Some(Err(error))) => {
                            return Poll::Ready(StoreError::from(error).to_string());
                        }
                        Poll::Ready(None) => return Poll::Ready("closed".to_owned()),
                        Poll::Pending => return Poll::Pending,
                    }
                }
            })
            .await;
            lost(end);
        });
        Ok((client, notifications))
    }
}

/// What the URL asks of TLS, in libpq's words: `verify-ca` and `verify-full` verify the server's
/// certificate (both also its name) against the system's roots or `SSL_CERT_FILE`; `require` and
/// `prefer` encrypt without verifying. The driver does not know the first two, so they are taken out
/// of the URL here.
fn split_ssl_mode(url: &str) -> (String, bool) {
    for mode in ["verify-full", "verify-ca"] {
        let asked = format!("sslmode={mode}");
        if url.contains(&asked) {
            return (url.replace(&asked, "sslmode=require"), true);
        }
    }
    (url.to_owned(), false)
}

fn tls_client(verify: bool) -> rustls::ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions");
    if !verify {
        return builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unverified(provider)))
            .with_no_client_auth();
    }
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls_native_certs::load_native_certs().certs {
        // An odd certificate in the system's store is no reason not to start.
        let _ = roots.add(certificate);
    }
    builder.with_root_certificates(roots).with_no_client_auth()
}

/// Takes any certificate, as libpq does under `prefer` and `require`; the handshake's signature is
/// still checked.
#[derive(Debug)]
struct Unverified(Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_verifying_modes_verify() {
        let with = |mode: &str| split_ssl_mode(&format!("postgres://u@h/d?sslmode={mode}"));
        assert_eq!(
            with("verify-full"),
            ("postgres://u@h/d?sslmode=require".to_owned(), true)
        );
        assert_eq!(
            with("verify-ca"),
            ("postgres://u@h/d?sslmode=require".to_owned(), true)
        );
        assert_eq!(
            with("require"),
            ("postgres://u@h/d?sslmode=require".to_owned(), false)
        );
        assert!(!split_ssl_mode("host=h user=u").1);
    }
}
