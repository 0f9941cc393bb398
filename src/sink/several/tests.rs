//! Copies, settlements and probes, by sinks that do what the test says.

use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::config::{AlsoConfig, RouteConfig, SinkSetting};
use crate::event::{ClaimToken, EventId, OutboxEvent};
use crate::route::{Router, Unless};
use crate::sink::Settlement;

const SOON: Duration = Duration::from_secs(5);
const WINDOW: usize = 4;
/// A lane panics on it.
const DEADLY: EventId = EventId(666);

/// A delivery as an inner sink has it, to be settled by the test.
struct Taken {
    delivery: Delivery,
    settled: mpsc::UnboundedSender<Vec<Settlement>>,
}

impl Taken {
    fn destination(&self) -> &str {
        &self.delivery.address.destination
    }

    fn settle(self, result: Result<(), SinkError>) {
        let id = self.delivery.event.id;
        self.settled.send(vec![Settlement { id, result }]).unwrap();
    }
}

struct Puppet {
    taken: mpsc::UnboundedSender<Taken>,
    answer: Mutex<Result<(), SinkError>>,
    transport: watch::Sender<Transport>,
}

impl Puppet {
    fn answer(&self) -> Result<(), SinkError> {
        self.answer.lock().unwrap().clone()
    }
}

#[async_trait]
impl Sink for Puppet {
    fn name(&self) -> &'static str {
        "puppet"
    }

    async fn probe(&self) -> Result<(), SinkError> {
        self.answer()
    }

    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError> {
        self.answer().map(|()| format!("found {destination}"))
    }

    async fn run_lane(&self, mut lane: Lane) {
        while let Some(delivery) = lane.deliveries.recv().await {
            assert_ne!(delivery.event.id, DEADLY);
            let settled = lane.settled.clone();
            self.taken.send(Taken { delivery, settled }).unwrap();
        }
    }

    fn transport(&self) -> watch::Receiver<Transport> {
        self.transport.subscribe()
    }

    async fn close(&self) {}
}

/// RabbitMQ and JetStream, both puppets, with a lane over them.
struct World {
    puppets: [Arc<Puppet>; 2],
    taken: [mpsc::UnboundedReceiver<Taken>; 2],
    sink: Arc<SeveralSinks>,
    router: Router,
    deliver: Option<mpsc::Sender<Delivery>>,
    settlements: mpsc::UnboundedReceiver<Vec<Settlement>>,
    /// Of the last batch, not looked at yet.
    batch: Vec<Settlement>,
    task: JoinHandle<()>,
}

const RABBITMQ: usize = 0;
const JETSTREAM: usize = 1;

impl World {
    fn new() -> Self {
        let puppet = || {
            let (taken, takes) = mpsc::unbounded_channel();
            let puppet = Puppet {
                taken,
                answer: Mutex::new(Ok(())),
                transport: watch::Sender::default(),
            };
            (Arc::new(puppet), takes)
        };
        let ((rabbitmq, by_rabbitmq), (jetstream, by_jetstream)) = (puppet(), puppet());
        let sink = Arc::new(SeveralSinks::new(vec![
            ("rabbitmq".into(), rabbitmq.clone() as Arc<dyn Sink>),
            ("jetstream".into(), jetstream.clone() as Arc<dyn Sink>),
        ]));
        let (deliver, deliveries) = mpsc::channel(WINDOW);
        let (settled, settlements) = mpsc::unbounded_channel();
        let lane = Lane {
            partition: 0,
            window: WINDOW,
            deliveries,
            settled,
        };
        let running = sink.clone();
        Self {
            puppets: [rabbitmq, jetstream],
            taken: [by_rabbitmq, by_jetstream],
            sink,
            router: three_places(),
            deliver: Some(deliver),
            settlements,
            batch: Vec::new(),
            task: tokio::spawn(async move { running.run_lane(lane).await }),
        }
    }

    async fn deliver(&self, id: i64) {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let event = OutboxEvent::sample(id, ("order", &id.to_string()), "Placed");
        let delivery = self.router.deliver(event, &token);
        self.deliver.as_ref().unwrap().send(delivery).await.unwrap();
    }

    async fn take(&mut self, part: usize) -> Taken {
        let taken = timeout(SOON, self.taken[part].recv()).await;
        taken.expect("a copy comes").unwrap()
    }

    fn nothing(&mut self, part: usize) -> bool {
        self.taken[part].try_recv().is_err()
    }

    async fn settled(&mut self) -> Settlement {
        if self.batch.is_empty() {
            let settled = timeout(SOON, self.settlements.recv()).await;
            self.batch = settled.expect("settled in time").expect("still open");
        }
        self.batch.remove(0)
    }

    /// It ends once its deliveries are closed, and settles nothing more.
    async fn end(mut self) {
        self.deliver = None;
        timeout(SOON, self.task).await.expect("it ends").unwrap();
        assert!(self.batch.is_empty());
        assert!(self.settlements.recv().await.is_none());
    }
}

/// Two exchanges of RabbitMQ, and a stream.
fn three_places() -> Router {
    let route = RouteConfig {
        also: vec![
            AlsoConfig {
                sink: Some(SinkSetting::Jetstream),
                ..AlsoConfig::default()
            },
            AlsoConfig {
                destination: Some("audit:{aggregate_type}".into()),
                routing_key: Some("all".into()),
                ..AlsoConfig::default()
            },
        ],
        ..RouteConfig::default()
    };
    let router = Router::of(&[route], SinkSetting::Rabbitmq, |sink| {
        Ok(Unless::Named(match sink {
            SinkSetting::Jetstream => "EVENTS",
            _ => "events",
        }))
    });
    router.unwrap()
}

fn away() -> SinkError {
    SinkError::new(Cause::Unreachable, "connection lost")
}

#[tokio::test]
async fn copies_go_to_all_sinks_at_once_and_to_one_sink_one_after_the_other() {
    let mut world = World::new();
    world.deliver(1).await;
    let stream = world.take(JETSTREAM).await;
    let first = world.take(RABBITMQ).await;
    assert_eq!(
        (stream.destination(), first.destination()),
        ("EVENTS", "events")
    );
    stream.settle(Ok(()));
    assert!(world.nothing(RABBITMQ), "only after the first");
    first.settle(Ok(()));
    let second = world.take(RABBITMQ).await;
    assert_eq!(second.destination(), "audit:order");
    assert_eq!(second.delivery.address.key.as_deref(), Some("all"));
    assert!(second.delivery.also.is_empty());
    assert!(world.settlements.try_recv().is_err(), "not all have it yet");
    second.settle(Ok(()));
    let settled = world.settled().await;
    assert_eq!(settled.id, EventId(1));
    assert!(settled.result.is_ok());
    world.end().await;
}

#[tokio::test]
async fn a_sink_that_refused_one_copy_gets_no_other_and_the_place_is_named() {
    let mut world = World::new();
    world.deliver(1).await;
    let refusal = SinkError::new(Cause::TooLarge, "too large");
    world.take(RABBITMQ).await.settle(Err(refusal));
    assert!(world.settlements.try_recv().is_err(), "one is still out");
    world.take(JETSTREAM).await.settle(Ok(()));
    let error = world.settled().await.result.unwrap_err();
    assert_eq!(error.cause, Cause::TooLarge);
    assert_eq!(error.message, "rabbitmq:events: too large");
    assert_eq!(error.destination.as_deref(), Some("rabbitmq:events"));
    assert!(error.maybe_sent, "another place has it");
    assert!(world.nothing(RABBITMQ));
    // A second place of the same sink is named as itself.
    world.deliver(2).await;
    world.take(JETSTREAM).await.settle(Ok(()));
    world.take(RABBITMQ).await.settle(Ok(()));
    let missing = SinkError::new(Cause::DestinationMissing, "missing");
    world.take(RABBITMQ).await.settle(Err(missing));
    let error = world.settled().await.result.unwrap_err();
    assert_eq!(error.destination.as_deref(), Some("rabbitmq:audit:order"));
    world.end().await;
}

#[tokio::test]
async fn trouble_of_one_sinks_connection_is_told_as_that_sinks() {
    for cause in [Cause::Unreachable, Cause::Blocked, Cause::ConfirmTimeout] {
        let mut world = World::new();
        world.deliver(1).await;
        world.take(RABBITMQ).await.settle(Ok(()));
        world.take(RABBITMQ).await.settle(Ok(()));
        let error = SinkError::new(cause, "away");
        world.take(JETSTREAM).await.settle(Err(error));
        let error = world.settled().await.result.unwrap_err();
        assert_eq!(
            (error.cause, &*error.message),
            (Cause::SinkDown, "jetstream: away")
        );
        assert_eq!(error.destination.as_deref(), Some("jetstream"));
        world.end().await;
    }
}

#[tokio::test]
async fn an_inner_lane_that_panics_loses_no_settlement_and_is_replaced() {
    let mut world = World::new();
    world.deliver(1).await;
    let lost = world.take(JETSTREAM).await;
    for _ in 0..2 {
        world.take(RABBITMQ).await.settle(Ok(()));
    }
    world.deliver(DEADLY.0).await;
    drop(lost);
    for _ in 0..2 {
        let error = world.settled().await.result;
        let error = error.expect_err("its lane is no more");
        assert_eq!(error.cause, Cause::SinkDown, "{error}");
        assert!(error.maybe_sent);
    }
    world.deliver(3).await;
    world.take(JETSTREAM).await.settle(Ok(()));
    for _ in 0..2 {
        world.take(RABBITMQ).await.settle(Ok(()));
    }
    assert!(world.settled().await.result.is_ok());
    world.end().await;
}

#[tokio::test]
async fn what_is_out_when_deliveries_are_closed_is_settled_before_the_end() {
    let mut world = World::new();
    for id in 1..=3 {
        world.deliver(id).await;
    }
    world.deliver = None;
    for _ in 0..3 {
        world.take(JETSTREAM).await.settle(Ok(()));
    }
    for _ in 0..6 {
        world.take(RABBITMQ).await.settle(Ok(()));
    }
    let mut ids: Vec<i64> = Vec::new();
    while let Some(settled) = timeout(SOON, world.settlements.recv()).await.unwrap() {
        ids.extend(settled.iter().map(|settlement| settlement.id.0));
    }
    assert_eq!(ids, [1, 2, 3]);
    world.end().await;
}

#[tokio::test]
async fn dropping_the_lane_drops_those_of_the_sinks() {
    let mut world = World::new();
    world.deliver(1).await;
    let taken = world.take(JETSTREAM).await;
    world.task.abort();
    // Its receiver of settlements goes with the lane.
    timeout(SOON, taken.settled.closed()).await.unwrap();
    let closed = async {
        while Arc::strong_count(&world.puppets[JETSTREAM]) > 2 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, closed).await.unwrap();
}

#[tokio::test]
async fn a_probe_succeeds_if_any_does_and_says_all_reasons_if_none_does() {
    let world = World::new();
    *world.puppets[RABBITMQ].answer.lock().unwrap() = Err(away());
    world.sink.probe().await.unwrap();
    let blocked = SinkError::new(Cause::Blocked, "memory alarm");
    *world.puppets[JETSTREAM].answer.lock().unwrap() = Err(blocked);
    let error = world.sink.probe().await.unwrap_err();
    assert_eq!(error.cause, Cause::Unreachable);
    assert_eq!(
        error.message,
        "jetstream: memory alarm; rabbitmq: connection lost"
    );
}

#[tokio::test]
async fn destinations_and_sinks_as_a_whole_are_probed_by_their_names() {
    let world = World::new();
    let ask = |name: &'static str| world.sink.probe_destination(name);
    assert_eq!(ask("rabbitmq:a:b").await.unwrap(), "found a:b");
    assert_eq!(ask("jetstream").await.unwrap(), "connected");
    assert_eq!(
        ask("kafka:a").await.unwrap_err().cause,
        Cause::DestinationMissing
    );
    *world.puppets[RABBITMQ].answer.lock().unwrap() = Err(away());
    for name in ["rabbitmq:a", "rabbitmq"] {
        let error = ask(name).await.unwrap_err();
        assert_eq!(error.cause, Cause::SinkDown);
        assert_eq!(error.message, "rabbitmq: connection lost");
    }
    let missing = SinkError::new(Cause::DestinationMissing, "missing");
    *world.puppets[RABBITMQ].answer.lock().unwrap() = Err(missing);
    let error = ask("rabbitmq:a").await.unwrap_err();
    assert_eq!(error.cause, Cause::DestinationMissing);
    assert_eq!(error.destination.as_deref(), Some("rabbitmq:a"));
}

#[tokio::test]
async fn the_transport_is_down_only_when_that_of_each_sink_is() {
    let world = World::new();
    let mut transport = world.sink.transport();
    assert_eq!(*transport.borrow(), Transport::Unknown);
    let [rabbitmq, jetstream] = &world.puppets;
    let mut until = async |state: Transport| {
        let found = transport.wait_for(|now| *now == state);
        timeout(SOON, found).await.expect("it is told").unwrap();
    };
    jetstream.transport.send_replace(Transport::Up);
    until(Transport::Up).await;
    rabbitmq
        .transport
        .send_replace(Transport::Down("lost".into()));
    jetstream
        .transport
        .send_replace(Transport::Blocked("alarm".into()));
    until(Transport::Blocked(
        "rabbitmq: lost; jetstream: alarm".into(),
    ))
    .await;
    jetstream
        .transport
        .send_replace(Transport::Down("gone".into()));
    until(Transport::Down("rabbitmq: lost; jetstream: gone".into())).await;
    rabbitmq.transport.send_replace(Transport::Up);
    until(Transport::Up).await;
    let names: Vec<_> = world
        .sink
        .parts()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, ["rabbitmq".into(), "jetstream".into()]);
}
