//! One producer of librdkafka, from its first answer to its end.
//!
//! Invariants:
//! - A link that was lost or killed stays so; [`super::connection`] builds a new one. So a producer that
//!   librdkafka declares fatal is replaced, and nothing is left that could send what it had queued.
//! - **Exactly one report per record**, also after the end: what has none then gets it by the purge of
//!   all queues.
//! - The producer lives and dies on the thread that serves it. Its destruction may block, and whoever
//!   else uses it holds it for the moment only.
//! - The first reason for the end is the one that helps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::Metadata;
use rdkafka::producer::{
    BaseProducer, BaseRecord, DeliveryResult, Producer as _, ProducerContext, PurgeConfig,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::message::Message;
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::{SinkError, Transport};

/// How late the thread may notice the end. Reports are handled as they come.
const POLL: Duration = Duration::from_millis(50);
/// When all connections are lost: one of them may be back at once, as after a broker's restart.
const DOUBT: Duration = Duration::from_secs(1);
/// After the end, for the reports of what was out.
const LAST_REPORTS: Duration = Duration::from_secs(2);
/// Until nobody else uses the producer.
const RELEASE_PAUSE: Duration = Duration::from_millis(10);

type Producer = BaseProducer<Context>;

/// What became of one record.
#[derive(Debug)]
pub(super) struct Report {
    /// As given to [`Link::send`].
    pub(super) number: u64,
    pub(super) result: Result<(), RDKafkaErrorCode>,
}

/// Where the report of a record goes.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) number: u64,
    pub(super) reports: mpsc::UnboundedSender<Report>,
}

/// Why a record was not taken.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Too much is queued; later.
    Full,
    /// The link is over.
    Over,
    /// This.
    Code(RDKafkaErrorCode),
}

/// What librdkafka's callbacks and the users of a link share.
#[derive(Debug)]
struct Ending {
    number: u64,
    board: Arc<Board>,
    over: watch::Sender<Option<(SinkError, Instant)>>,
    /// It has answered once.
    opened: AtomicBool,
    /// All connections are lost.
    suspected: AtomicBool,
    /// What was last said of a connection.
    last_word: Mutex<Option<String>>,
}

impl Ending {
    /// Over: with this error, unless there was one before.
    fn end(&self, error: SinkError) {
        let message = error.message.clone();
        let first = self.over.send_if_modified(|over| {
            let first = over.is_none();
            if first {
                *over = Some((error, Instant::now()));
            }
            first
        });
        if first {
            self.board.set(self.number, Transport::Down(message));
        }
    }

    fn lost(&self) {
        let word = lock(&self.last_word).take();
        let word = word.map(|word| format!(": {word}")).unwrap_or_default();
        let what = if self.opened.load(Ordering::Acquire) {
            "all connections to Kafka are lost"
        } else {
            "cannot connect to Kafka"
        };
        self.end(SinkError::new(Cause::Unreachable, format!("{what}{word}")));
    }

    fn is_over(&self) -> bool {
        self.over.borrow().is_some()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing can panic while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// librdkafka's callbacks.
pub(super) struct Context(Arc<Ending>);

impl ClientContext for Context {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        // What matters of it comes as an error too.
        tracing::debug!(facility, "librdkafka: {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let ending = &self.0;
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::Fatal | RDKafkaErrorCode::ClusterAuthorizationFailed) => {
                ending.end(fatal(reason));
            }
            Some(RDKafkaErrorCode::AllBrokersDown) if ending.opened.load(Ordering::Acquire) => {
                ending.suspected.store(true, Ordering::Release);
            }
            Some(RDKafkaErrorCode::AllBrokersDown) => ending.lost(),
            _ => *lock(&ending.last_word) = Some(reason.to_owned()),
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let result = match result {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(code_of(error)),
        };
        let number = ticket.number;
        // A lane that is gone wants no reports.
        let _ = ticket.reports.send(Report { number, result });
    }
}

fn code_of(error: &KafkaError) -> RDKafkaErrorCode {
    error
        .rdkafka_error_code()
        .unwrap_or(RDKafkaErrorCode::Unknown)
}

fn fatal(reason: &str) -> SinkError {
    SinkError::new(
        Cause::Unreachable,
        format!("the Kafka producer cannot go on, a new one is made: {reason}"),
    )
}

/// A producer.
#[derive(Debug)]
pub(super) struct Link {
    producer: Weak<Producer>,
    ending: Arc<Ending>,
    /// Asked for to see whether anybody answers.
    sign_of_life: Option<String>,
}

impl Link {
    /// Makes a producer, and waits for the brokers' first answer.
    pub(super) async fn open(
        options: &ClientConfig,
        (number, board): (u64, Arc<Board>),
        sign_of_life: Option<String>,
        within: Duration,
    ) -> Result<Self, SinkError> {
        let ending = Arc::new(Ending {
            number,
            board,
            over: watch::Sender::new(None),
            opened: AtomicBool::new(false),
            suspected: AtomicBool::new(false),
            last_word: Mutex::default(),
        });
        let context = Context(ending.clone());
        let producer: Producer = options.create_with_context(context).map_err(not_made)?;
        let producer = Arc::new(producer);
        let link = Self {
            producer: Arc::downgrade(&producer),
            ending: ending.clone(),
            sign_of_life: sign_of_life.clone(),
        };
        thread::Builder::new()
            .name("kafka".into())
            .spawn(move || serve(producer, &ending, sign_of_life.as_deref()))
            .map_err(|error| {
                SinkError::new(
                    Cause::Unreachable,
                    format!("cannot start a thread: {error}"),
                )
            })?;
        match link.is_alive(within).await {
            Ok(()) => {
                link.ending.opened.store(true, Ordering::Release);
                Ok(link)
            }
            Err(error) => {
                link.ending.end(error.clone());
                Err(error)
            }
        }
    }

    /// Does anybody answer?
    pub(super) async fn is_alive(&self, within: Duration) -> Result<(), SinkError> {
        self.ask(self.sign_of_life.clone(), within, |_| ()).await
    }

    /// Asks the brokers for a topic, or (none) for all.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        topic: Option<String>,
        within: Duration,
        read: impl FnOnce(&Metadata) -> T + Send + 'static,
    ) -> Result<T, SinkError> {
        let producer = self.producer.upgrade().ok_or_else(|| self.lost_error())?;
        let (answer, heard) = oneshot::channel();
        // The call blocks. Not on the runtime's threads: those would be waited for at the end of the
        // process.
        let asked = thread::Builder::new()
            .name("kafka-ask".into())
            .spawn(move || {
                let metadata = producer.client().fetch_metadata(topic.as_deref(), within);
                drop(producer);
                // Whoever asked may have left.
                let _ = answer.send(metadata.map(|metadata| read(&metadata)));
            });
        if let Err(error) = asked {
            let reason = format!("cannot start a thread: {error}");
            return Err(SinkError::new(Cause::Unreachable, reason));
        }
        let mut over = self.ended();
        tokio::select! {
            biased;
            answer = heard => match answer {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(error)) => Err(self.silent(&error, within)),
                Err(_) => Err(self.lost_error()),
            },
            _ = over.wait_for(Option::is_some) => Err(self.lost_error()),
        }
    }

    fn silent(&self, error: &KafkaError, within: Duration) -> SinkError {
        let reason = match code_of(error) {
            RDKafkaErrorCode::OperationTimedOut | RDKafkaErrorCode::BrokerTransportFailure => {
                format!("no answer within {within:?}")
            }
            other => other.to_string(),
        };
        let word = lock(&self.ending.last_word).clone();
        let word = word.map(|word| format!(" ({word})")).unwrap_or_default();
        SinkError::new(
            Cause::Unreachable,
            format!("Kafka does not answer: {reason}{word}"),
        )
    }

    /// Hands a record over; its report comes exactly if it was taken.
    pub(super) fn send(
        &self,
        topic: &str,
        message: Message,
        payload: &[u8],
        ticket: Ticket,
    ) -> Result<(), Refusal> {
        if !self.is_up() {
            return Err(Refusal::Over);
        }
        let producer = self.producer.upgrade().ok_or(Refusal::Over)?;
        let record = BaseRecord::with_opaque_to(topic, Box::new(ticket))
            .key(message.key.as_bytes())
            // Always there: a record without a value is a deletion to a compacted topic.
            .payload(payload)
            .headers(message.headers);
        match producer.send(record) {
            Ok(()) => Ok(()),
            Err((error, _)) => Err(match code_of(&error) {
                RDKafkaErrorCode::QueueFull => Refusal::Full,
                code => Refusal::Code(code),
            }),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        !self.ending.is_over()
    }

    /// Says that the transport is up.
    pub(super) fn announce(&self) {
        self.ending.board.set(self.ending.number, Transport::Up);
    }

    /// Ends it. What is out gets its reports.
    pub(super) fn kill(&self, error: SinkError) {
        self.ending.end(error);
    }

    /// Ends it because of what librdkafka says of its state.
    pub(super) fn kill_fatal(&self, reason: &str) {
        self.ending.end(fatal(reason));
    }

    pub(super) fn ended(&self) -> watch::Receiver<Option<(SinkError, Instant)>> {
        self.ending.over.subscribe()
    }

    /// Why it is over.
    pub(super) fn lost_error(&self) -> SinkError {
        let over = self.ending.over.borrow().clone();
        over.map_or_else(
            || SinkError::new(Cause::Unreachable, "the Kafka producer is gone"),
            |(error, _)| error,
        )
    }

    /// From when on reports are not to be expected any more.
    pub(super) fn silent_from(&self) -> Option<Instant> {
        let over = self.ending.over.borrow();
        over.as_ref().map(|(_, at)| *at + LAST_REPORTS + POLL)
    }
}

fn not_made(error: KafkaError) -> SinkError {
    let reason = match error {
        // Its own text quotes the value.
        KafkaError::ClientConfig(_, _, name, _) => {
            format!(
                "kafka.properties.\"{name}\": librdkafka does not take this property or its value"
            )
        }
        other => format!("cannot make a Kafka producer: {other}"),
    };
    SinkError::new(Cause::Unreachable, reason)
}

/// Serves the producer until its link is over, then ends it.
fn serve(producer: Arc<Producer>, ending: &Arc<Ending>, sign_of_life: Option<&str>) {
    while !ending.is_over() {
        producer.poll(POLL);
        if ending.suspected.swap(false, Ordering::AcqRel) {
            verify(&producer, ending, sign_of_life);
        }
    }
    producer.purge(PurgeConfig::default().queue().inflight());
    let until = Instant::now() + LAST_REPORTS;
    while producer.in_flight_count() > 0 && Instant::now() < until {
        producer.poll(RELEASE_PAUSE);
    }
    let mut producer = producer;
    loop {
        match Arc::try_unwrap(producer) {
            Ok(last) => return drop(last),
            Err(shared) => producer = shared,
        }
        thread::sleep(RELEASE_PAUSE);
    }
}

/// All connections are lost: is one of them back in a moment?
fn verify(producer: &Arc<Producer>, ending: &Arc<Ending>, sign_of_life: Option<&str>) {
    let (producer, asked) = (producer.clone(), ending.clone());
    let sign_of_life = sign_of_life.map(str::to_owned);
    let started = thread::Builder::new()
        .name("kafka-ask".into())
        .spawn(move || {
            let answer = producer
                .client()
                .fetch_metadata(sign_of_life.as_deref(), DOUBT);
            drop(producer);
            if answer.is_err() {
                asked.lost();
            }
        });
    if started.is_err() {
        ending.lost();
    }
}
