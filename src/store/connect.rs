//! Connections: settings that notice a dead peer, TLS as libpq has it, poolers, and a bound on every
//! wait.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::poll_fn;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::config::SslMode as DriverMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, Client, Connection, Notification, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::StoreError;
use super::pooler::{Pooler, Pooling};
use super::runner::Runner;
use crate::config::{DatabaseTarget, PoolerSetting, SslMode};
use crate::tls::{Tls, TlsError, handshake_failed};

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

type TlsStream = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;

/// Reads the certificate files at each connection.
#[derive(Clone)]
struct FreshTls(Arc<Tls>);

impl MakeTlsConnect<Socket> for FreshTls {
    type Stream = TlsStream;
    type TlsConnect = <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect;
    type Error = TlsError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Self::TlsConnect, TlsError> {
        let mut connect = MakeRustlsConnect::new(self.0.client_config()?);
        let Ok(connect) = MakeTlsConnect::<Socket>::make_tls_connect(&mut connect, host);
        Ok(connect)
    }
}

/// Opens connections to the outbox's database.
#[derive(Clone)]
pub struct Connector {
    config: tokio_postgres::Config,
    mode: SslMode,
    tls: FreshTls,
    session_sql: Arc<str>,
    pooler: Arc<Pooler>,
}

impl Connector {
    pub(super) fn new(
        target: DatabaseTarget,
        application_name: &str,
        session_sql: &str,
        pooler: PoolerSetting,
    ) -> Self {
        let mut config = target.driver;
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
        Self {
            config,
            mode: target.mode,
            tls: FreshTls(Arc::new(target.tls)),
            session_sql: session_sql.into(),
            pooler: Arc::new(Pooler::new(pooler)),
        }
    }

    /// Does a connection keep its server session? Finds out by the first call, unless configured.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn pooling(&self) -> Result<Pooling, StoreError> {
        self.pooler.find(self).await
    }

    /// How statements run on connections from here; `more` are settings beside the usual ones.
    pub(crate) async fn runner(&self, more: &str) -> Result<Runner, StoreError> {
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

    /// Asks the server to end what this client's session is at, in the background: for sessions that
    /// are given up.
    pub(crate) fn cancel(&self, client: &Client) {
        let (token, tls) = (client.cancel_token(), self.tls.clone());
        tokio::spawn(async move {
            // Without it the statement ends by its own timeout.
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, token.cancel_query(tls)).await;
        });
    }

    /// With or without TLS, as libpq's modes have it. If neither way leads in, the error is that of
    /// the way with TLS, which says more.
    async fn dial(&self) -> Result<(Client, Connection<Socket, TlsStream>), tokio_postgres::Error> {
        let (first, second) = match self.mode {
            SslMode::Disable => (DriverMode::Disable, None),
            SslMode::Allow => (DriverMode::Disable, Some(DriverMode::Prefer)),
            SslMode::Prefer => (DriverMode::Prefer, Some(DriverMode::Disable)),
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => {
                (DriverMode::Require, None)
            }
        };
        let error = match self.dial_by(first).await {
            Ok(connected) => return Ok(connected),
            Err(error) => error,
        };
        match second.filter(|_| is_about_the_way(&error)) {
            None => Err(error),
            Some(other) => match self.dial_by(other).await {
                Err(_) if first == DriverMode::Prefer => Err(error),
                connected => connected,
            },
        }
    }

    async fn dial_by(
        &self,
        mode: DriverMode,
    ) -> Result<(Client, Connection<Socket, TlsStream>), tokio_postgres::Error> {
        let mut config = self.config.clone();
        config.ssl_mode(mode).connect(self.tls.clone()).await
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
        let (client, mut connection) = in_time(self.dial()).await?;
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

/// May the server take us with TLS where it refused us without, or the other way round?
///
/// libpq also tries again after a wrong password; we send none a second time, on a way that is open
/// to others perhaps.
fn is_about_the_way(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION) || handshake_failed(error)
}

/// For the pool.
impl deadpool_postgres::Connect for Connector {
    fn connect(&self, _: &tokio_postgres::Config) -> Dialled<'_> {
        Box::pin(async move {
            let (client, connection) = self.dial().await?;
            let task = tokio::spawn(async move {
                // Whoever uses the client gets the error too.
                let _ = connection.await;
            });
            Ok((client, task))
        })
    }
}

type Dialled<'a> = Pin<
    Box<dyn Future<Output = Result<(Client, JoinHandle<()>), tokio_postgres::Error>> + Send + 'a>,
>;
