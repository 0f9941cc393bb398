//! One connection, from handshake to end.
//!
//! Invariants:
//! - A link that was lost or killed stays so; [`super::connection`] builds a new one.
//! - [`Link::kill`] ends it whatever its state. lapin writes nothing while it is blocked, not even
//!   `connection.close`, and waits for ever for a broker that does not answer: so the socket
//!   itself is shut down, by a handle of our own.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Connection, Event};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::fault::{Place, reason};
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::{SinkError, Transport};

/// A broker that does not answer a close in this time is not waited for.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
/// lapin never forgets which channel numbers the broker closed, and refuses to use them again:
/// long before all 2047 are spent the connection is replaced.
const CHANNELS_PER_LINK: usize = 1000;
/// No queue has this name: the message sent to it is dropped by the broker.
const CANARY_QUEUE: &str = "bellwire.canary.no-such-queue";

/// Our own handle on the socket under lapin.
#[derive(Clone, Debug, Default)]
pub(super) struct Socket(Arc<OnceLock<TcpStream>>);

impl Socket {
    /// To be called once, with a duplicate of the socket.
    pub(super) fn set(&self, socket: TcpStream) {
        let _ = self.0.set(socket);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    pub(super) fn shut_down(&self) {
        if let Some(socket) = self.0.get() {
            // Already disconnected is just as well.
            let _ = socket.shutdown(Shutdown::Both);
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
    /// Why it was ended from our side.
    killed: OnceLock<String>,
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
    /// Takes over a connection; its monitor runs on `runtime`.
    pub(super) fn new(
        connection: Connection,
        socket: Socket,
        place: Place,
        (number, board): (u64, Arc<Board>),
        answer_within: Duration,
        runtime: &Handle,
    ) -> Arc<Self> {
        let why = Arc::new(OnceLock::new());
        let monitor = monitor(
            connection.events_listener(),
            number,
            board.clone(),
            why.clone(),
            place.clone(),
        );
        board.set(number, Transport::Up);
        Arc::new(Self {
            monitor: runtime.spawn(monitor),
            connection,
            place,
            number,
            board,
            socket,
            killed: OnceLock::new(),
            channels: AtomicUsize::new(0),
            unconfirmed: AtomicUsize::new(0),
            why,
            answer_within,
        })
    }

    /// So many channels were opened on it that another connection should take its place.
    pub(super) fn is_worn_out(&self) -> bool {
        self.channels.load(Ordering::Relaxed) >= CHANNELS_PER_LINK
    }

    /// Usable, as far as known.
    pub(super) fn is_up(&self) -> bool {
        self.killed.get().is_none() && self.connection.status().connected()
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
            format!(
                "RabbitMQ at {} blocks publishers{reason}",
                self.place.address
            ),
        )
    }

    /// Largest frame, negotiated.
    pub(super) fn frame_max(&self) -> usize {
        usize::try_from(self.connection.configuration().frame_max()).unwrap_or(usize::MAX)
    }

    /// Why it was ended from our side, if it was.
    pub(super) fn killed(&self) -> Option<&str> {
        self.killed.get().map(String::as_str)
    }

    /// Why it was ended from the other side or by lapin, as far as known.
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
        let _ = self.killed.set(why.to_owned());
        self.socket.shut_down();
        self.board.set(self.number, Transport::Down(why.to_owned()));
    }

    /// A new channel in confirm mode.
    pub(super) async fn open_channel(&self) -> Result<Channel, SinkError> {
        self.channels.fetch_add(1, Ordering::Relaxed);
        let open = async {
            let channel = self.connection.create_channel().await?;
            channel
                .confirm_select(ConfirmSelectOptions::default())
                .await?;
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
        if self.is_blocked() {
            self.kill("given up while RabbitMQ blocked publishers, since a confirm did not come");
            return;
        }
        let close = channel.close(200, "OK".into());
        if timeout(CLOSE_PATIENCE, close).await.is_err() {
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

    /// Ends the connection politely, if that does not take long.
    pub(super) async fn close(&self) {
        let close = self.connection.close(200, "OK".into());
        if self.is_blocked() || timeout(CLOSE_PATIENCE, close).await.is_err() {
            self.socket.shut_down();
        }
        let _ = self.killed.set("closed".into());
        self.board
            .set(self.number, Transport::Down("closed".into()));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.monitor.abort();
        // Nobody is left to close it politely, or to notice that the broker does not answer.
        self.socket.shut_down();
    }
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
