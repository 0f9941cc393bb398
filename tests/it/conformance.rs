//! The contract of `Sink`, clause by clause, for every sink.
//!
//! A sink is added by a constructor in [`sinks`] and its name in the list at the end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bellwire::event::{AggregateKey, ClaimToken, EventId, OutboxEvent};
use bellwire::relay::failure::{Cause, Outcome, decide};
use bellwire::route::{Address, Router};
use bellwire::sink::{Delivery, Lane, Settlement, Sink, Transport};
use bytes::Bytes;
use lapin::ExchangeKind;
use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::FieldTable;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::{Cluster, Kept, Proxy, Record, SOON, Stream, Topic, World};

const WINDOW: usize = 32;
/// As configured for every sink here.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// In every payload and password: never in an error.
const MARKER: &str = "S3cr";

/// A sink with what is around it.
struct Subject {
    sink: Arc<dyn Sink>,
    /// Between the sink and its broker, if it has one.
    network: Option<Proxy>,
    /// Where events arrive, if they are kept.
    place: Place,
    /// What an outage means for an event, and what a confirm that does not come is told as.
    outage: (Outcome, Cause),
    /// By which of several sinks they go there, and where each goes after that.
    fan: Option<(Arc<str>, Arc<str>)>,
}

/// Of a sink by itself.
const ALONE: (Outcome, Cause) = (Outcome::HandBack, Cause::ConfirmTimeout);
/// Of one of several.
const OF_SEVERAL: (Outcome, Cause) = (Outcome::Wait, Cause::SinkDown);

/// Where events arrive.
enum Place {
    Queue(Box<World>),
    Stream(Stream),
    Topic {
        topic: Topic,
        /// The mock is there as long as this is.
        _cluster: Cluster,
    },
    /// Nobody keeps them.
    Nowhere,
}

impl Place {
    fn destination(&self) -> &str {
        match self {
            Self::Queue(world) => &world.exchange,
            Self::Stream(stream) => &stream.name,
            Self::Topic { topic, .. } => &topic.name,
            Self::Nowhere => "events",
        }
    }
}

mod sinks {
    use std::sync::Arc;

    use bellwire::config::{
        Config, JetstreamConfig, KafkaConfig, RabbitmqConfig, RelayConfig, SinkSetting,
    };
    use bellwire::sink::jetstream::JetstreamSink;
    use bellwire::sink::kafka::KafkaSink;
    use bellwire::sink::null::NullSink;
    use bellwire::sink::rabbitmq::RabbitmqSink;
    use bellwire::sink::several::SeveralSinks;

    use super::{ALONE, CONFIRM_TIMEOUT, OF_SEVERAL, Place, Subject};
    use crate::support::{Cluster, Proxy, Stream, World, amqp_url, nats_url};

    pub async fn rabbitmq() -> Option<Subject> {
        let world = World::new().await;
        let network = Proxy::new(&amqp_url()).await;
        let config = RabbitmqConfig {
            url: Some(network.through(&amqp_url()).as_str().into()),
            exchange: world.exchange.clone(),
            confirm_timeout: CONFIRM_TIMEOUT,
            connect_timeout: CONFIRM_TIMEOUT,
            ..RabbitmqConfig::default()
        };
        let sink = RabbitmqSink::new(config).unwrap();
        Some(Subject {
            sink,
            network: Some(network),
            place: Place::Queue(Box::new(world)),
            outage: ALONE,
            fan: None,
        })
    }

    /// Each event goes to two exchanges, of which one is looked at.
    pub async fn several() -> Option<Subject> {
        let alone = rabbitmq().await?;
        let Place::Queue(world) = &alone.place else {
            unreachable!()
        };
        let second = format!("{}_second", world.exchange);
        world.declare_second(&second).await;
        let sinks = vec![("rabbitmq".into(), alone.sink)];
        Some(Subject {
            sink: Arc::new(SeveralSinks::new(sinks)),
            outage: OF_SEVERAL,
            fan: Some(("rabbitmq".into(), second.into())),
            ..alone
        })
    }

    pub async fn jetstream() -> Option<Subject> {
        // What the sink repeats is to be seen, so the stream forgets message ids as soon as it can.
        let window = serde_json::json!({ "duplicate_window": 100_000_000 });
        let stream = Stream::new(window).await?;
        let url = nats_url()?;
        let network = Proxy::new(&url).await;
        let config = Config {
            relay: RelayConfig {
                sink: SinkSetting::Jetstream,
                ..RelayConfig::default()
            },
            jetstream: JetstreamConfig {
                url: Some(network.through(&url).as_str().into()),
                stream: Some(stream.name.clone()),
                prefix: stream.name.clone(),
                ack_timeout: CONFIRM_TIMEOUT,
                connect_timeout: CONFIRM_TIMEOUT,
                ..JetstreamConfig::default()
            },
            ..Config::default()
        };
        Some(Subject {
            sink: JetstreamSink::new(&config).unwrap(),
            network: Some(network),
            place: Place::Stream(stream),
            outage: ALONE,
            fan: None,
        })
    }

    pub async fn kafka() -> Option<Subject> {
        let cluster = Cluster::new();
        // One partition: only within one is the order of arrival to be seen.
        let topic = cluster.create("order", 1).await;
        let url = format!("kafka://{}", cluster.servers);
        let network = Proxy::new(&url).await;
        let through = network.through(&url);
        let servers = through.trim_start_matches("kafka://").trim_end_matches('/');
        let config = Config {
            kafka: KafkaConfig {
                bootstrap_servers: Some(servers.to_owned()),
                confirm_timeout: CONFIRM_TIMEOUT,
                connect_timeout: CONFIRM_TIMEOUT,
                ..KafkaConfig::default()
            },
            ..Config::default()
        };
        Some(Subject {
            sink: KafkaSink::new(&config).unwrap(),
            network: Some(network),
            place: Place::Topic {
                topic,
                _cluster: cluster,
            },
            outage: ALONE,
            fan: None,
        })
    }

    pub async fn null() -> Option<Subject> {
        Some(Subject {
            sink: Arc::new(NullSink::new()),
            network: None,
            place: Place::Nowhere,
            outage: ALONE,
            fan: None,
        })
    }
}

impl Subject {
    fn lane(&self) -> OpenLane {
        let (deliver, deliveries) = mpsc::channel(WINDOW);
        let (settled, settlements) = mpsc::unbounded_channel();
        let lane = Lane {
            partition: 0,
            window: WINDOW,
            deliveries,
            settled,
        };
        let sink = self.sink.clone();
        let task = tokio::spawn(async move { sink.run_lane(lane).await });
        OpenLane {
            deliver: Some(deliver),
            settlements,
            task,
            places: self.places(),
            out: HashSet::new(),
        }
    }

    /// Where deliveries go.
    fn places(&self) -> Vec<Address> {
        let place = |sink: Option<&Arc<str>>, name: &str| Address {
            destination: match sink {
                Some(sink) => format!("{sink}:{name}").into(),
                None => name.into(),
            },
            key: None,
            sink: sink.cloned(),
            place: 0,
        };
        let own = self.place.destination();
        match &self.fan {
            None => vec![place(None, own)],
            Some((sink, second)) => vec![place(Some(sink), own), place(Some(sink), second)],
        }
    }

    /// Nobody's fault but the network's.
    fn assert_handed_back(&self, settled: &[Settlement]) {
        for settlement in settled {
            let error = settlement
                .result
                .as_ref()
                .expect_err("it cannot have been confirmed");
            assert_eq!(decide(error.cause).0, self.outage.0, "{error}");
        }
    }

    /// The events that have arrived, in order; none when nobody keeps them.
    async fn arrived(&mut self, count: usize) -> Option<Vec<i64>> {
        match &mut self.place {
            Place::Queue(world) => {
                let arrivals = world.arrivals(count, SOON).await;
                Some(arrivals.iter().map(|arrival| arrival.id).collect())
            }
            Place::Stream(stream) => {
                let mut messages = stream.messages(count, SOON).await;
                // Whatever still comes, as with a queue.
                tokio::time::sleep(Duration::from_millis(200)).await;
                messages.extend(stream.messages(0, SOON).await);
                Some(messages.iter().map(Kept::id).collect())
            }
            Place::Topic { topic, .. } => {
                let records = topic.records(count, SOON).await;
                Some(records.iter().map(Record::id).collect())
            }
            Place::Nowhere => None,
        }
    }

    /// Waits until the broker is there again, as the breaker does.
    async fn until_probed(&self) {
        let began = Instant::now();
        while let Err(error) = self.sink.probe().await {
            assert!(began.elapsed() < SOON, "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn close(self) {
        timeout(SOON, self.sink.close()).await.unwrap();
        match self.place {
            Place::Queue(world) => {
                if let Some((_, second)) = &self.fan {
                    world.delete_second(second).await;
                }
                world.clean().await;
            }
            Place::Stream(stream) => stream.delete().await,
            Place::Topic { .. } | Place::Nowhere => {}
        }
    }
}

impl World {
    /// An exchange of this name, whose messages are kept where nobody looks.
    async fn declare_second(&self, name: &str) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let (kind, none) = (ExchangeKind::Fanout, FieldTable::default());
        let declared = self
            .channel
            .exchange_declare(name.into(), kind, durable, none.clone());
        declared.await.unwrap();
        let durable = QueueDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let declared = self
            .channel
            .queue_declare(name.into(), durable, none.clone());
        declared.await.unwrap();
        let options = QueueBindOptions::default();
        let bound = self
            .channel
            .queue_bind(name.into(), name.into(), "".into(), options, none);
        bound.await.unwrap();
    }

    async fn delete_second(&self, name: &str) {
        let deleted = self
            .channel
            .queue_delete(name.into(), QueueDeleteOptions::default());
        deleted.await.unwrap();
        let deleted = self
            .channel
            .exchange_delete(name.into(), ExchangeDeleteOptions::default());
        deleted.await.unwrap();
    }
}

/// A lane as a publisher holds it.
struct OpenLane {
    deliver: Option<mpsc::Sender<Delivery>>,
    settlements: mpsc::UnboundedReceiver<Vec<Settlement>>,
    task: JoinHandle<()>,
    /// Where its deliveries go.
    places: Vec<Address>,
    /// Delivered and not settled.
    out: HashSet<i64>,
}

impl OpenLane {
    /// Hands over events, never more than the window, and answers all settlements.
    async fn publish(
        &mut self,
        ids: impl IntoIterator<Item = i64>,
        token: &Arc<ClaimToken>,
    ) -> Vec<Settlement> {
        let mut settled = Vec::new();
        for id in ids {
            while self.out.len() == WINDOW {
                settled.extend(self.next_settlements().await);
            }
            self.send(delivery(id, token)).await;
        }
        settled.extend(self.settle_all().await);
        settled
    }

    async fn send(&mut self, mut delivery: Delivery) {
        let (own, also) = self.places.split_first().unwrap();
        delivery.address = own.clone();
        delivery.also = also.to_vec();
        assert!(self.out.insert(delivery.event.id.0));
        self.deliver
            .as_ref()
            .unwrap()
            .send(delivery)
            .await
            .expect("the lane takes deliveries until they are closed");
    }

    async fn next_settlements(&mut self) -> Vec<Settlement> {
        let settled = timeout(SOON, self.settlements.recv())
            .await
            .expect("settled in time")
            .expect("still open");
        for settlement in &settled {
            let id = settlement.id.0;
            assert!(
                self.out.remove(&id),
                "{id} was settled twice, or never sent"
            );
            if let Err(error) = &settlement.result {
                assert!(
                    !error.message.is_empty() && !error.message.contains(MARKER),
                    "{}",
                    error.message
                );
            }
        }
        settled
    }

    async fn settle_all(&mut self) -> Vec<Settlement> {
        let mut settled = Vec::new();
        while !self.out.is_empty() {
            settled.extend(self.next_settlements().await);
        }
        settled
    }

    /// Closes the deliveries: everything is settled, and the lane ends by itself.
    async fn end(mut self) {
        self.deliver = None;
        self.settle_all().await;
        timeout(SOON, self.task)
            .await
            .expect("the lane ends")
            .expect("in order");
        assert!(
            self.settlements.recv().await.is_none(),
            "settled more than was delivered"
        );
    }
}

fn token() -> Arc<ClaimToken> {
    let token = Arc::new(ClaimToken::new(1, "test#1".into()));
    token.renewed(ClaimToken::now(), Duration::from_secs(600));
    token
}

fn event(id: i64) -> OutboxEvent {
    OutboxEvent {
        id: EventId(id),
        // Of an aggregate of its own, so all may be out at once.
        key: AggregateKey::new("order", &id.to_string()),
        bucket: 0,
        event_type: "Placed".into(),
        payload: Bytes::from(format!("{{\"n\": {id}, \"secret\": \"{MARKER}\"}}")),
        headers: None,
        correlation_id: None,
        event_id: Some(format!("00000000-0000-4000-8000-{id:012x}")),
        created_at: None,
        age: None,
        loaded: Instant::now(),
        attempts: 0,
        replayed: false,
    }
}

fn delivery(id: i64, token: &Arc<ClaimToken>) -> Delivery {
    Router::new(&[], "events")
        .unwrap()
        .deliver(event(id), token)
}

fn assert_published(settled: &[Settlement], count: usize) {
    let failed: Vec<_> = settled
        .iter()
        .filter(|settlement| settlement.result.is_err())
        .collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(settled.len(), count);
}

// ---- the clauses ---------------------------------------------------------------------------------

async fn each_delivery_is_settled_once_and_arrives_in_order(mut subject: Subject) {
    subject.sink.probe().await.unwrap();
    let mut lane = subject.lane();
    let settled = lane.publish(1..=500, &token()).await;
    assert_published(&settled, 500);
    lane.end().await;
    if let Some(arrived) = subject.arrived(500).await {
        assert_eq!(arrived, (1..=500).collect::<Vec<_>>());
    }
    subject.close().await;
}

async fn a_void_claim_is_not_sent(mut subject: Subject) {
    let mut lane = subject.lane();
    let sound = token();
    assert_published(&lane.publish(1..=10, &sound).await, 10);
    let over = Arc::new(ClaimToken::new(2, "test#2".into()));
    sound.void();
    for void in [sound, over] {
        for settlement in lane.publish(11..=20, &void).await {
            assert_eq!(settlement.result.unwrap_err().cause, Cause::Void);
        }
    }
    assert_published(&lane.publish(21..=25, &token()).await, 5);
    lane.end().await;
    if let Some(arrived) = subject.arrived(15).await {
        assert_eq!(arrived, (1..=10).chain(21..=25).collect::<Vec<_>>());
    }
    subject.close().await;
}

async fn a_lane_ends_when_its_deliveries_are_closed(mut subject: Subject) {
    subject.lane().end().await;
    let mut lane = subject.lane();
    for id in 1..=20 {
        lane.send(delivery(id, &token())).await;
    }
    // With all of them still out.
    lane.end().await;
    if let Some(mut arrived) = subject.arrived(20).await {
        arrived.dedup();
        assert_eq!(arrived, (1..=20).collect::<Vec<_>>());
    }
    subject.close().await;
}

async fn a_dropped_lane_is_replaced_by_a_new_one(subject: Subject) {
    let mut lane = subject.lane();
    for id in 1..=20 {
        lane.send(delivery(id, &token())).await;
    }
    lane.task.abort();
    let mut lane = subject.lane();
    assert_published(&lane.publish(1..=20, &token()).await, 20);
    lane.end().await;
    subject.close().await;
}

async fn lanes_are_independent(mut subject: Subject) {
    let mut lanes: Vec<_> = (0..8).map(|_| subject.lane()).collect();
    let token = token();
    let publishing = lanes
        .iter_mut()
        .zip(0..)
        .map(|(lane, number)| lane.publish(number * 100..number * 100 + 50, &token));
    for settled in futures_util::future::join_all(publishing).await {
        assert_published(&settled, 50);
    }
    for lane in lanes {
        lane.end().await;
    }
    if let Some(arrived) = subject.arrived(400).await {
        for number in 0..8 {
            let of_lane: Vec<_> = arrived
                .iter()
                .copied()
                .filter(|id| id / 100 == number)
                .collect();
            assert_eq!(
                of_lane,
                (number * 100..number * 100 + 50).collect::<Vec<_>>()
            );
        }
    }
    subject.close().await;
}

async fn an_event_that_cannot_be_sent_harms_no_other(mut subject: Subject) {
    let mut lane = subject.lane();
    let token = token();
    let mut illegal = event(10);
    illegal.event_type = "x".repeat(300).into();
    // To Kafka that is a header like any other, and this is none.
    illegal.headers = matches!(subject.place, Place::Topic { .. }).then(|| r#"{"": 1}"#.into());
    let mut undecodable = event(20);
    undecodable.headers = Some(format!("[\"{MARKER}\"]"));
    let mut odd = vec![illegal, undecodable];
    for id in 1..=30 {
        match odd.iter().position(|event| event.id.0 == id) {
            Some(place) => {
                let router = Router::new(&[], "events").unwrap();
                lane.send(router.deliver(odd.remove(place), &token)).await;
            }
            None => lane.send(delivery(id, &token)).await,
        }
    }
    let mut good = 0;
    for settlement in lane.settle_all().await {
        match settlement.result {
            Ok(()) => good += 1,
            Err(error) => {
                assert!([10, 20].contains(&settlement.id.0), "{error}");
                assert_eq!(decide(error.cause).0, Outcome::Dead, "{error}");
            }
        }
    }
    lane.end().await;
    if let Some(arrived) = subject.arrived(good).await {
        assert_eq!((good, arrived.len()), (28, 28));
    }
    subject.close().await;
}

async fn the_transport_says_how_it_stands(subject: Subject) {
    let mut transport = subject.sink.transport();
    subject.sink.probe().await.unwrap();
    timeout(SOON, transport.wait_for(|state| *state == Transport::Up))
        .await
        .unwrap()
        .unwrap();
    if let Some(network) = &subject.network {
        for _ in 0..2 {
            network.refuse(true);
            network.cut();
            let down = timeout(
                SOON,
                transport.wait_for(|state| matches!(state, Transport::Down(_))),
            )
            .await;
            let Transport::Down(reason) = down.unwrap().unwrap().clone() else {
                unreachable!()
            };
            assert!(!reason.is_empty() && !reason.contains(MARKER), "{reason}");
            let error = subject.sink.probe().await.unwrap_err();
            assert_eq!(error.cause, Cause::Unreachable);
            network.refuse(false);
            subject.until_probed().await;
            timeout(SOON, transport.wait_for(|state| *state == Transport::Up))
                .await
                .unwrap()
                .unwrap();
        }
    }
    subject.close().await;
}

async fn nothing_is_queued_through_an_outage(mut subject: Subject) {
    if let Some(network) = &subject.network {
        let mut lane = subject.lane();
        assert_published(&lane.publish(1..=5, &token()).await, 5);
        network.refuse(true);
        network.cut();
        let mut transport = subject.sink.transport();
        timeout(
            SOON,
            transport.wait_for(|state| matches!(state, Transport::Down(_))),
        )
        .await
        .unwrap()
        .unwrap();
        let settled = lane.publish(6..=80, &token()).await;
        assert_eq!(settled.len(), 75);
        subject.assert_handed_back(&settled);
        network.refuse(false);
        subject.until_probed().await;
        assert_published(&lane.publish(81..=90, &token()).await, 10);
        lane.end().await;
        if let Some(arrived) = subject.arrived(15).await {
            assert_eq!(arrived, (1..=5).chain(81..=90).collect::<Vec<_>>());
        }
    }
    subject.close().await;
}

async fn what_was_out_when_the_connection_is_cut_settles_and_can_be_sent_again(
    mut subject: Subject,
) {
    if let Some(network) = subject.network.take() {
        let mut lane = subject.lane();
        assert_published(&lane.publish(1..=5, &token()).await, 5);
        network.mute(true);
        for id in 6..=25 {
            lane.send(delivery(id, &token())).await;
        }
        // They are at the broker, and their confirms on the way.
        assert_eq!(subject.arrived(25).await.unwrap().len(), 25);
        network.cut();
        let settled = lane.settle_all().await;
        assert_eq!(settled.len(), 20);
        subject.assert_handed_back(&settled);
        network.mute(false);
        subject.until_probed().await;
        assert_published(&lane.publish(6..=25, &token()).await, 20);
        lane.end().await;
        assert_eq!(
            subject.arrived(20).await.unwrap(),
            (6..=25).collect::<Vec<_>>()
        );
    }
    subject.close().await;
}

async fn a_confirm_that_does_not_come_ends_its_channel(mut subject: Subject) {
    if let Some(network) = subject.network.take() {
        let mut lane = subject.lane();
        assert_published(&lane.publish(1..=5, &token()).await, 5);
        network.mute(true);
        let began = Instant::now();
        let settled = lane.publish(6..=10, &token()).await;
        assert!(began.elapsed() >= CONFIRM_TIMEOUT);
        for settlement in &settled {
            assert_eq!(
                settlement.result.as_ref().unwrap_err().cause,
                subject.outage.1
            );
        }
        network.mute(false);
        subject.until_probed().await;
        assert_published(&lane.publish(6..=10, &token()).await, 5);
        lane.end().await;
        let mut arrived = subject.arrived(10).await.unwrap();
        // Repeats of those whose confirm was lost, after all of the first copies.
        assert_eq!(arrived.split_off(10), (6..=10).collect::<Vec<_>>());
        assert_eq!(arrived, (1..=10).collect::<Vec<_>>());
    }
    subject.close().await;
}

async fn what_the_broker_did_not_hear_is_sent_again(mut subject: Subject) {
    if let Some(network) = subject.network.take() {
        let mut lane = subject.lane();
        assert_published(&lane.publish(1..=5, &token()).await, 5);
        network.deafen(true);
        subject.assert_handed_back(&lane.publish(6..=10, &token()).await);
        network.deafen(false);
        subject.until_probed().await;
        assert_published(&lane.publish(6..=10, &token()).await, 5);
        lane.end().await;
        // The copies of before may come late, but they are the same.
        let arrived = subject.arrived(10).await.unwrap();
        assert_eq!(arrived[..5], [1, 2, 3, 4, 5]);
        assert_eq!(arrived.iter().collect::<HashSet<_>>().len(), 10);
    }
    subject.close().await;
}

/// A test for each clause and sink.
macro_rules! conformance {
    ($($sink:ident)+) => { $(conformance!(@ $sink
        each_delivery_is_settled_once_and_arrives_in_order
        a_void_claim_is_not_sent
        a_lane_ends_when_its_deliveries_are_closed
        a_dropped_lane_is_replaced_by_a_new_one
        lanes_are_independent
        an_event_that_cannot_be_sent_harms_no_other
        the_transport_says_how_it_stands
        nothing_is_queued_through_an_outage
        what_was_out_when_the_connection_is_cut_settles_and_can_be_sent_again
        a_confirm_that_does_not_come_ends_its_channel
        what_the_broker_did_not_hear_is_sent_again
    );)+ };
    (@ $sink:ident $($clause:ident)+) => {
        mod $sink { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $clause() {
                // None was said to be skipped.
                if let Some(subject) = super::sinks::$sink().await {
                    super::$clause(subject).await;
                }
            }
        )+ }
    };
}

conformance!(rabbitmq jetstream kafka null several);
