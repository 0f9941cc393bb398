//! Makes the one connection of a sink, shared by its lanes.
//!
//! Invariants:
//! - lapin's own recovery is off: it would keep unconfirmed publishes of which nobody knows any
//!   more. A lost connection is replaced by a new one.
//! - Lanes wait for the same attempt (see `shared`).
//! - lapin's tasks run where the sink was made, not where the lane lives that happened to connect.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};
use rustls_connector::RustlsConnector;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use super::fault::Place;
use super::link::{Link, Socket};
use crate::config::RabbitmqConfig;
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::shared::Shared;
use crate::sink::{SinkError, Transport};
use crate::tls::Tls;

/// Unless the URL says otherwise: notices a dead peer while idle, twice as fast as RabbitMQ's
/// default. While events flow the confirm timeout is faster.
const HEARTBEAT_SECONDS: u16 = 30;
/// RabbitMQ's default. Must be set: should the broker offer no limit, lapin would allocate
/// buffers for frames of 4 GiB.
const FRAME_MAX: u32 = 131_072;

/// Shuts the socket down unless the handshake ends well: lapin's thread would wait on.
struct ShutDownOnDrop(Option<Socket>);

impl Drop for ShutDownOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            socket.shut_down();
        }
    }
}

/// Makes the connection when it is needed.
pub(super) struct Connector {
    uri: AMQPUri,
    /// None for a connection in the clear.
    tls: Option<Tls>,
    pub(super) place: Place,
    name: String,
    connect_timeout: Duration,
    confirm_timeout: Duration,
    board: Arc<Board>,
    runtime: OnceLock<Handle>,
    shared: Shared<Link>,
    /// A confirm did not come: the next connection is tried with a canary before it is used.
    wary: AtomicBool,
}

impl Connector {
    pub(super) fn new(
        uri: AMQPUri,
        tls: Option<Tls>,
        place: Place,
        config: &RabbitmqConfig,
    ) -> Self {
        let mut uri = uri;
        uri.query.heartbeat.get_or_insert(HEARTBEAT_SECONDS);
        uri.query.frame_max.get_or_insert(FRAME_MAX);
        let runtime = OnceLock::new();
        if let Ok(handle) = Handle::try_current() {
            let _ = runtime.set(handle);
        }
        Self {
            uri,
            tls,
            place,
            name: format!("bellwire {}", config.source),
            connect_timeout: config.connect_timeout,
            confirm_timeout: config.confirm_timeout,
            board: Arc::default(),
            runtime,
            shared: Shared::default(),
            wary: AtomicBool::new(false),
        }
    }

    pub(super) fn transport(&self) -> watch::Receiver<Transport> {
        self.board.state.subscribe()
    }

    /// A confirm did not come in time: the next connection must prove itself.
    pub(super) fn be_wary(&self) {
        self.wary.store(true, Ordering::Release);
    }

    /// The connection, made if needed.
    pub(super) async fn link(&self) -> Result<Arc<Link>, SinkError> {
        let mut turn = self.shared.turn().await;
        if let Some(answer) = turn.answer(|link| link.is_up() && !link.is_worn_out()) {
            return answer;
        }
        // Lanes may still use a worn-out one; the last of them drops it.
        turn.take();
        let attempt = self.connect().await;
        turn.keep(attempt)
    }

    async fn connect(&self) -> Result<Arc<Link>, SinkError> {
        let number = self.board.next_link();
        let connected = self.attempt(number).await;
        let link = connected.inspect_err(|error| self.board.set_down(number, error))?;
        if self.wary.load(Ordering::Acquire) {
            let channel = link.open_channel().await?;
            match link.try_canary(&channel).await {
                Ok(()) => {
                    link.close_channel(&channel).await;
                    self.wary.store(false, Ordering::Release);
                }
                // Kept: RabbitMQ will say on it when the alarm is over.
                Err(error) if error.cause == Cause::Blocked => {}
                Err(error) => return Err(error),
            }
        }
        Ok(link)
    }

    async fn attempt(&self, number: u64) -> Result<Arc<Link>, SinkError> {
        let socket = Socket::default();
        let mut guard = ShutDownOnDrop(Some(socket.clone()));
        let properties =
            ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        let handshake = handshake(
            self.uri.clone(),
            self.tls.clone(),
            properties,
            socket.clone(),
            self.connect_timeout,
        );
        let runtime = self.runtime.get_or_init(Handle::current);
        let attempt = runtime.spawn(timeout(self.connect_timeout, handshake));
        let connection = match attempt.await {
            Ok(Ok(Ok(connection))) => connection,
            Ok(Ok(Err(error))) => return Err(self.place.connect_failed(&error)),
            Ok(Err(_)) => return Err(self.timed_out(&socket)),
            // The runtime is shutting down.
            Err(error) => return Err(self.place.connection_lost(&error.to_string())),
        };
        // From here on the link answers for the socket.
        guard.0 = None;
        Ok(Link::new(
            connection,
            socket,
            self.place.clone(),
            (number, self.board.clone()),
            self.connect_timeout.min(self.confirm_timeout),
            runtime,
        ))
    }

    fn timed_out(&self, socket: &Socket) -> SinkError {
        let what = if socket.is_set() {
            "AMQP handshake"
        } else {
            "TCP connection"
        };
        let message = format!(
            "cannot connect to RabbitMQ at {}: no {what} within {:?}",
            self.place.address, self.connect_timeout
        );
        SinkError::new(Cause::Unreachable, message)
    }

    pub(super) async fn close(&self) {
        if let Some(link) = self.shared.turn().await.take() {
            link.close().await;
        }
    }
}

/// TCP, TLS and AMQP handshakes.
pub(super) async fn handshake(
    uri: AMQPUri,
    tls: Option<Tls>,
    properties: ConnectionProperties,
    socket: Socket,
    connect_timeout: Duration,
) -> lapin::Result<Connection> {
    let runtime = lapin::runtime::default_runtime()?;
    let connect = Connection::connector(
        uri,
        runtime,
        // The compiler learns the stream's type from the runtime's.
        async move |uri, runtime| {
            let open = async {
                let host = uri.authority.host.as_str();
                let addresses: Vec<_> = tokio::net::lookup_host((host, uri.authority.port))
                    .await?
                    .collect();
                let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    let handle = plain.get_ref().as_fd().try_clone_to_owned()?;
                    socket.set(handle.into());
                }
                let Some(tls) = &tls else {
                    return Ok(stream);
                };
                let connector: RustlsConnector =
                    tls.client_config().map_err(std::io::Error::other)?.into();
                stream.into_rustls(&connector, host).await
            };
            // Bounded here too: this runs on a thread that lapin does not give up.
            match timeout(connect_timeout, open).await {
                Ok(stream) => Ok(stream?),
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }
        },
        properties,
    );
    connect.await
}
