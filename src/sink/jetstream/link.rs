//! One connection, from handshake to end.
//!
//! Invariants:
//! - A link that was lost or killed stays so; [`super::connection`] builds a new one.
//! - **Nothing is sent after the end.** The library would reconnect by itself and then send what it
//!   had buffered, when the claims may long be over. So every pause before a second connection is
//!   endless, and each link has a runtime of its own on a thread of its own: when that is dropped,
//!   the library's tasks, its buffers and the socket go with it, whatever state they are in.
//! - The first reason for the end is the one that helps.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{
    Client, ConnectOptions, Event, HeaderMap, Request, RequestErrorKind, ServerError, Subscriber,
};
use bytes::Bytes;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::time::timeout;

use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::{SinkError, Transport};

/// Commands between us and the connection, publishes among them: enough to keep it busy, and little
/// to be lost with it.
const BUFFERED: usize = 256;
/// Notices a dead peer while idle. While events flow the ack timeout is faster.
const PING_EVERY: Duration = Duration::from_secs(15);
/// What the server begins its refusal of a subject with; the subject follows in quotes.
const DENIED: &str = "permissions violation for publish to ";
/// Refusals that nobody has looked at yet, at most.
const DENIALS: usize = 256;

/// What the callbacks of the library and the users of a link share.
#[derive(Debug)]
pub(super) struct Ending {
    place: String,
    number: u64,
    board: Arc<Board>,
    down: watch::Sender<Option<Arc<str>>>,
    denied: broadcast::Sender<Arc<str>>,
    /// The server's last word, which says why it closes.
    last_word: Mutex<Option<String>>,
    stop: Mutex<Option<oneshot::Sender<()>>>,
}

impl Ending {
    /// Over: with this reason, unless there was one before.
    fn end(&self, reason: &str) {
        let first = self.down.send_if_modified(|down| {
            let first = down.is_none();
            if first {
                *down = Some(reason.into());
            }
            first
        });
        if first {
            self.board
                .set(self.number, Transport::Down(reason.to_owned()));
        }
        // The thread ends, and everything of the library's with it.
        drop(lock(&self.stop).take());
    }

    fn lost(&self) {
        let word = lock(&self.last_word).take();
        let word = word.map(|word| format!(" ({word})")).unwrap_or_default();
        self.end(&format!("connection to NATS at {} lost{word}", self.place));
    }

    fn happened(&self, event: Event) {
        match event {
            Event::Disconnected | Event::Closed => self.lost(),
            Event::ServerError(ServerError::Other(text)) => match denied_subject(&text) {
                // Nobody listens: nobody has anything unacknowledged.
                Some(subject) => drop(self.denied.send(subject.into())),
                None => *lock(&self.last_word) = Some(text),
            },
            Event::ServerError(error) => *lock(&self.last_word) = Some(error.to_string()),
            _ => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing can panic while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn denied_subject(text: &str) -> Option<&str> {
    let rest = text.get(DENIED.len()..)?;
    text.to_ascii_lowercase()
        .starts_with(DENIED)
        .then(|| rest.trim_matches('"'))
}

/// What came of a question.
#[derive(Debug)]
pub(super) enum Answer {
    /// This.
    Reply(Bytes),
    /// Nobody is there to answer.
    Nobody,
    /// We may not ask.
    Denied,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    client: Client,
    ending: Arc<Ending>,
    /// Puts what the lanes hand over in order: a message whose count before is above another's count
    /// after was handed over later, and goes out later.
    counter: AtomicU64,
    /// By stream: the highest count before, of the messages that it has replied to.
    replied: Mutex<HashMap<Arc<str>, u64>>,
}

impl Link {
    /// Connects to one server, by options that say who we are and how it is encrypted.
    pub(super) async fn open(
        options: ConnectOptions,
        server: async_nats::ServerAddr,
        (place, number, board): (String, u64, Arc<Board>),
        within: Duration,
    ) -> Result<Self, async_nats::ConnectError> {
        let (handle, stop) = engine()?;
        let ending = Arc::new(Ending {
            place,
            number,
            board,
            down: watch::Sender::new(None),
            denied: broadcast::Sender::new(DENIALS),
            last_word: Mutex::default(),
            stop: Mutex::new(Some(stop)),
        });
        let listener = ending.clone();
        let connected_before = AtomicBool::new(false);
        let options = options
            .connection_timeout(within)
            .ping_interval(PING_EVERY)
            .client_capacity(BUFFERED)
            .ignore_discovered_servers()
            // Asked before each attempt, the first too.
            .reconnect_delay_callback(move |_| {
                if connected_before.swap(true, Ordering::AcqRel) {
                    Duration::MAX
                } else {
                    Duration::ZERO
                }
            })
            .event_callback(move |event| {
                listener.happened(event);
                std::future::ready(())
            });
        let client = handle.spawn(options.connect(server));
        match client.await {
            Ok(client) => Ok(Self {
                client: client?,
                ending,
                counter: AtomicU64::new(0),
                replied: Mutex::default(),
            }),
            Err(error) => Err(std::io::Error::other(error).into()),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.ending.down.borrow().is_none() && self.client.connection_state() == State::Connected
    }

    /// The next number of its counter.
    pub(super) fn count(&self) -> u64 {
        self.counter.fetch_add(1, Ordering::AcqRel)
    }

    /// The stream has replied to a message of this count before.
    pub(super) fn replied(&self, stream: Arc<str>, begun: u64) {
        let mut replied = lock(&self.replied);
        let last = replied.entry(stream).or_default();
        *last = begun.max(*last);
    }

    /// Has the stream replied to a message that was handed over later than one of this count after? It
    /// takes what comes over one connection in order: it has had that one then, or never will.
    pub(super) fn is_behind(&self, stream: &str, handed_over: u64) -> bool {
        let replied = lock(&self.replied);
        replied.get(stream).is_some_and(|last| *last > handed_over)
    }

    /// Says that the transport is up.
    pub(super) fn announce(&self) {
        self.ending.board.set(self.ending.number, Transport::Up);
    }

    /// Ends it, whatever its state.
    pub(super) fn kill(&self, why: &str) {
        self.ending.end(why);
    }

    /// Why it is over.
    pub(super) fn lost_error(&self) -> SinkError {
        let why = self.ending.down.borrow().clone();
        let why =
            why.unwrap_or_else(|| format!("connection to NATS at {} lost", self.place()).into());
        SinkError::new(Cause::Unreachable, &*why)
    }

    pub(super) fn place(&self) -> &str {
        &self.ending.place
    }

    /// Over as soon as it holds a reason.
    pub(super) fn ended(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.ending.down.subscribe()
    }

    /// The subjects that the server refuses from now on.
    pub(super) fn denials(&self) -> broadcast::Receiver<Arc<str>> {
        self.ending.denied.subscribe()
    }

    /// What the server takes, headers included; told by it at the handshake.
    pub(super) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// An inbox of its own, whose every subject below `inbox` is heard.
    pub(super) async fn inbox(&self) -> Result<(String, Subscriber), SinkError> {
        let inbox = self.client.new_inbox();
        let subscribed = self.client.subscribe(format!("{inbox}.*")).await;
        match subscribed {
            Ok(subscriber) => Ok((inbox, subscriber)),
            Err(_) => Err(self.lost_error()),
        }
    }

    /// Hands a message to the connection. One that has not even taken it in this time is dead.
    pub(super) async fn publish(
        &self,
        subject: String,
        reply: String,
        headers: HeaderMap,
        payload: Bytes,
        within: Duration,
    ) -> Result<(), SinkError> {
        let publish = self
            .client
            .publish_with_reply_and_headers(subject, reply, headers, payload);
        match timeout(within, publish).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                // Everything that it could refuse was looked at before.
                self.kill(&format!("the NATS client does not publish: {error}"));
                Err(self.lost_error())
            }
            Err(_) => {
                self.kill(&format!(
                    "NATS at {} has read nothing for {within:?}",
                    self.place()
                ));
                Err(SinkError {
                    cause: Cause::ConfirmTimeout,
                    ..self.lost_error()
                })
            }
        }
    }

    /// Asks JetStream's API. A server that does not answer in time is not waited for any longer.
    pub(super) async fn ask(&self, subject: &str, within: Duration) -> Result<Answer, SinkError> {
        let (mut ended, mut denials) = (self.ended(), self.denials());
        let denied = async {
            while let Ok(denied) = denials.recv().await {
                if *denied == *subject {
                    return;
                }
            }
            std::future::pending().await
        };
        let request = Request::new().timeout(None);
        let request = self.client.send_request(subject.to_owned(), request);
        tokio::select! {
            biased;
            _ = ended.wait_for(Option::is_some) => Err(self.lost_error()),
            () = denied => Ok(Answer::Denied),
            answer = timeout(within, request) => match answer {
                Ok(Ok(message)) => Ok(Answer::Reply(message.payload)),
                Ok(Err(error)) if error.kind() == RequestErrorKind::NoResponders => Ok(Answer::Nobody),
                Ok(Err(_)) => Err(self.lost_error()),
                Err(_) => {
                    let why = format!("NATS at {} does not answer {subject}", self.place());
                    self.kill(&why);
                    Err(SinkError::new(Cause::ConfirmTimeout, why))
                }
            },
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.kill("closed");
    }
}

/// A runtime on a thread of its own, that ends when the sender is dropped.
fn engine() -> std::io::Result<(Handle, oneshot::Sender<()>)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    std::thread::Builder::new()
        .name("bellwire-nats".into())
        .spawn(move || {
            let _ = runtime.block_on(stopped);
            // A look-up of a name may hang, and holds nothing of ours.
            runtime.shutdown_background();
        })?;
    Ok((handle, stop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refused_subject_is_found_in_what_the_server_says() {
        let text = r#"Permissions Violation for Publish to "events.order.Placed""#;
        assert_eq!(denied_subject(text), Some("events.order.Placed"));
        assert_eq!(denied_subject("Stale Connection"), None);
        assert_eq!(
            denied_subject("Permissions Violation for Subscription to \"a\""),
            None
        );
    }
}
