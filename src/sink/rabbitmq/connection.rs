//! The one connection of a sink, shared by its lanes.
//!
//! Invariants:
//! - A [`Link`] that was lost or killed stays so; the [`Connector`] builds a new one. lapin's own
//!   recovery is off: it would keep unconfirmed publishes of which nobody knows any more.
//! - **Single flight:** the mutex is held through an attempt, so lanes wait for the same one, and a
//!   failure is everybody's answer for [`RETRY_PAUSE`].
//! - [`Link::kill`] ends a connection whatever its state. lapin writes nothing while it is
//!   blocked, not even `connection.close`, and waits for ever for a broker that does not answer:
//!   so the socket itself is shut down, by a handle of our own.
//! - lapin's tasks run where the sink was made, not where the lane lives that happened to connect.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, BasicProperties, Channel, Connection, ConnectionProperties, Event};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::fault::{Place, reason};
use crate::relay::failure::Cause;
use crate::sink::{SinkError, Transport};

/// A failed attempt to connect is not repeated sooner.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// A broker that does not answer a close in this time is not waited for.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
/// Unless the URL says otherwise: notices a dead peer while idle, twice as fast as RabbitMQ's
/// default. While events flow the confirm timeout is faster.
const HEARTBEAT_SECONDS: u16 = 30;
/// RabbitMQ's default. Must be set: should the broker offer no limit, lapin would allocate
/// buffers for frames of 4 GiB.
const FRAME_MAX: u32 = 131_072;
/// lapin never forgets which channel numbers the broker closed, and refuses to use them again:
/// long before all 2047 are spent the connection is replaced.
const CHANNELS_PER_LINK: usize = 1000;
/// No queue has this name: the message sent to it is dropped by the broker.
const CANARY_QUEUE: &str = "bellwire.canary.no-such-queue";

/// What [`Transport`] watchers see. Only the latest link may speak.
#[derive(Debug, Default)]
struct Board {
    state: watch::Sender<Transport>,
    latest: Mutex<u64>,
}

impl Board {
    fn next_link(&self) -> u64 {
        let mut latest = self.latest.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *latest += 1;
        *latest
    }

    fn set(&self, link: u64, state: Transport) {
        let latest = self.latest.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if *latest == link {
            self.state.send_if_modified(|old| {
                let changed = *old != state;
                *old = state;
                changed
            });
        }
    }
}

/// Our own handle on the socket under lapin.
#[derive(Clone, Debug, Default)]
struct Socket(Arc<OnceLock<std::net::TcpStream>>);

impl Socket {
    fn shut_down(&self) {
        if let Some(socket) = self.0.get() {
            // Already disconnected is just as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Shuts the socket down unless the handshake ends well: lapin's thread would wait on.
struct ShutDownOnDrop(Option<Socket>);

impl Drop for ShutDownOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            socket.shut_down();
        }
    }
}

/// A connection.
pub(super) struct Link {
    connection: Connection,
    place: Place,
    number: u64,
    board: Arc<Board>,
    socket: Socket,
    killed: AtomicBool,
    channels: AtomicUsize,
    /// Messages sent on any channel and not confirmed. Not taken back when the connection ends:
    /// then it tells how many may be to blame.
    unconfirmed: AtomicUsize,
    /// The first reason for the end of the connection; later errors only say that it ended.
    why: Arc<OnceLock<lapin::Error>>,
    answer_within: Duration,
    monitor: JoinHandle<()>,
}

impl Link {
    /// Usable, as far as known.
    pub(super) fn is_up(&self) -> bool {
        !self.killed.load(Ordering::Acquire) && self.connection.status().connected()
    }

    /// RabbitMQ asked not to publish.
    pub(super) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// The error of a blocked connection.
    pub(super) fn blocked_error(&self) -> SinkError {
        let reason = match &*self.board.state.borrow() {
            Transport::Blocked(reason) if !reason.is_empty() => format!(": {reason}"),
            _ => String::new(),
        };
        SinkError::new(
            Cause::Blocked,
            format!("RabbitMQ at {} blocks publishers{reason}", self.place.address),
        )
    }

    /// Largest frame, negotiated.
    pub(super) fn frame_max(&self) -> usize {
        usize::try_from(self.connection.configuration().frame_max()).unwrap_or(usize::MAX)
    }

    pub(super) fn why(&self) -> Option<&lapin::Error> {
        self.why.get()
    }

    pub(super) fn sent(&self) {
        self.unconfirmed.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn settled(&self, messages: usize) {
        self.unconfirmed.fetch_sub(messages, Ordering::AcqRel);
    }

    pub(super) fn unconfirmed(&self) -> usize {
        self.unconfirmed.load(Ordering::Acquire)
    }

    /// Ends the connection now, without the broker's help.
    pub(super) fn kill(&self, why: &str) {
        self.killed.store(true, Ordering::Release);
        self.socket.shut_down();
        self.board.set(self.number, Transport::Down(why.to_owned()));
    }

    /// A new channel in confirm mode.
    pub(super) async fn open_channel(&self) -> Result<Channel, SinkError> {
        self.channels.fetch_add(1, Ordering::Relaxed);
        let open = async {
            let channel = self.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(channel)
        };
        match timeout(self.answer_within, open).await {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(error)) => {
                let error: lapin::Error = error;
                let error = self.why().unwrap_or(&error);
                let error = self.place.connection_lost(&reason(error));
                // Whatever hinders a channel from opening hinders the next one too.
                self.kill(&error.message);
                Err(error)
            }
            Err(_) if self.is_blocked() => Err(self.blocked_error()),
            Err(_) => {
                let error = self.place.connection_lost("no answer to channel.open");
                self.kill(&error.message);
                Err(error)
            }
        }
    }

    /// Closes a channel, with the whole connection if that is what it takes.
    pub(super) async fn close_channel(&self, channel: &Channel) {
        if !channel.status().connected() || !self.is_up() {
            return;
        }
        let closed = if self.is_blocked() {
            false
        } else {
            let close = channel.close(200, "OK".into());
            timeout(CLOSE_PATIENCE, close).await.is_ok()
        };
        if !closed {
            self.kill("no answer to channel.close");
        }
    }

    /// Asks whether RabbitMQ takes messages at all: under a memory or disk alarm it tells a
    /// connection so only once that has published, and what was published then waits unconfirmed
    /// for the end of the alarm. So a message that nobody gets is risked first.
    pub(super) async fn try_canary(&self, channel: &Channel) -> Result<(), SinkError> {
        let canary = async {
            let confirm = channel.basic_publish(
                "".into(),
                CANARY_QUEUE.into(),
                BasicPublishOptions::default(),
                &[],
                BasicProperties::default(),
            );
            confirm.await?.await
        };
        let mut state = self.board.state.subscribe();
        let blocked = state.wait_for(|state| matches!(state, Transport::Blocked(_)));
        let answer = tokio::select! {
            answer = timeout(self.answer_within, canary) => answer,
            _ = blocked => return Err(self.blocked_error()),
        };
        match answer {
            Ok(Ok(_)) => Ok(()),
            // No permission to publish to the default exchange: then nothing is learnt.
            Ok(Err(error)) if error.is_amqp_soft_error() => Ok(()),
            Ok(Err(error)) => {
                let error = self.why().unwrap_or(&error);
                Err(self.place.connection_lost(&reason(error)))
            }
            Err(_) => {
                let error = SinkError::new(
                    Cause::ConfirmTimeout,
                    format!("RabbitMQ at {} confirms nothing", self.place.address),
                );
                self.kill(&error.message);
                Err(error)
            }
        }
    }

    async fn close(&self) {
        let close = self.connection.close(200, "OK".into());
        if self.is_blocked() || timeout(CLOSE_PATIENCE, close).await.is_err() {
            self.socket.shut_down();
        }
        self.killed.store(true, Ordering::Release);
        self.board.set(self.number, Transport::Down("closed".into()));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.monitor.abort();
        // Nobody is left to close it politely, or to notice that the broker does not answer.
        self.socket.shut_down();
    }
}

/// Makes the connection when it is needed.
pub(super) struct Connector {
    uri: AMQPUri,
    pub(super) place: Place,
    name: String,
    connect_timeout: Duration,
    confirm_timeout: Duration,
    board: Arc<Board>,
    runtime: OnceLock<Handle>,
    state: tokio::sync::Mutex<State>,
    /// A confirm did not come: the next connection is tried with a canary before it is used.
    wary: AtomicBool,
}

#[derive(Default)]
struct State {
    link: Option<Arc<Link>>,
    failed: Option<(Instant, SinkError)>,
}

impl Connector {
    pub(super) fn new(
        uri: AMQPUri,
        place: Place,
        source: &str,
        connect_timeout: Duration,
        confirm_timeout: Duration,
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
            place,
            name: format!("bellwire {source}"),
            connect_timeout,
            confirm_timeout,
            board: Arc::default(),
            runtime,
            state: tokio::sync::Mutex::default(),
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
        let mut state = self.state.lock().await;
        if let Some(link) = &state.link
            && link.is_up()
            && link.channels.load(Ordering::Relaxed) < CHANNELS_PER_LINK
        {
            return Ok(link.clone());
        }
        if let Some((at, error)) = &state.failed
            && at.elapsed() < RETRY_PAUSE
        {
            return Err(error.clone());
        }
        // Lanes may still use a worn-out one; the last of them drops it.
        state.link = None;
        match self.connect().await {
            Ok(link) => {
                state.failed = None;
                state.link = Some(link.clone());
                Ok(link)
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    async fn connect(&self) -> Result<Arc<Link>, SinkError> {
        let number = self.board.next_link();
        let connected = self.attempt(number).await;
        let link = connected.inspect_err(|error| {
            self.board.set(number, Transport::Down(error.message.clone()));
        })?;
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
        Ok(self.new_link(number, connection, socket))
    }

    fn timed_out(&self, socket: &Socket) -> SinkError {
        let what = if socket.0.get().is_some() {
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

    fn new_link(&self, number: u64, connection: Connection, socket: Socket) -> Arc<Link> {
        let why = Arc::new(OnceLock::new());
        let board = self.board.clone();
        let monitor = monitor(
            connection.events_listener(),
            number,
            board.clone(),
            why.clone(),
            self.place.clone(),
        );
        let runtime = self.runtime.get_or_init(Handle::current);
        board.set(number, Transport::Up);
        Arc::new(Link {
            monitor: runtime.spawn(monitor),
            connection,
            place: self.place.clone(),
            number,
            board,
            socket,
            killed: AtomicBool::new(false),
            channels: AtomicUsize::new(0),
            unconfirmed: AtomicUsize::new(0),
            why,
            answer_within: self.connect_timeout.min(self.confirm_timeout),
        })
    }

    pub(super) async fn close(&self) {
        if let Some(link) = self.state.lock().await.link.take() {
            link.close().await;
        }
    }
}

/// TCP, TLS and AMQP handshakes.
async fn handshake(
    uri: AMQPUri,
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
                    let _ = socket.0.set(handle.into());
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => {
                        let config = OwnedTLSConfig::default();
                        stream.into_tls(host, config.as_ref()).await
                    }
                }
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

/// Follows what lapin says of one connection until it ends.
async fn monitor(
    events: impl Stream<Item = Event>,
    number: u64,
    board: Arc<Board>,
    why: Arc<OnceLock<lapin::Error>>,
    place: Place,
) {
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Event::ConnectionBlocked(reason) => board.set(number, Transport::Blocked(reason)),
            Event::ConnectionUnblocked => board.set(number, Transport::Up),
            // The end of one channel; its lane hears of it itself.
            Event::Error(error) if error.is_amqp_soft_error() => {}
            Event::Error(error) => {
                let down = place.connection_lost(&reason(&error)).message;
                let _ = why.set(error);
                board.set(number, Transport::Down(down));
            }
            _ => {}
        }
    }
}
