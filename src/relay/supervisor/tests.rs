//! Whichever actor dies, the relay goes on or ends in order.

use super::*;
use crate::config::DatabaseConfig;
use crate::relay::claimer::Claimer;
use crate::relay::listener::Listener;
use crate::relay::marker::Marker;
use crate::relay::publisher::Publisher;
use crate::sink::null::NullSink;
use tokio::time::timeout;

/// Makes one actor of the present generation panic.
#[derive(Message)]
#[rtype(result = "()")]
struct Crash(Child);

#[derive(Message)]
#[rtype(result = "()")]
struct Panic;

macro_rules! panics {
    ($($actor:ty),+) => {$(
        impl Handler<Panic> for $actor {
            type Result = ();

            fn handle(&mut self, _: Panic, _: &mut Self::Context) {
                panic!("on purpose");
            }
        }
    )+};
}
panics!(Listener, Claimer, Publisher, Marker);

impl Handler<Crash> for Supervisor {
    type Result = ();

    fn handle(&mut self, Crash(child): Crash, _: &mut Self::Context) {
        let Some(generation) = &self.generation else {
            return;
        };
        match child {
            Child::Listener => generation.listener.try_send(Panic).unwrap(),
            Child::Claimer => generation.claimer.try_send(Panic).unwrap(),
            Child::Publisher(partition) => {
                generation.publishers[partition].try_send(Panic).unwrap();
            }
            Child::Marker => generation.marker.try_send(Panic).unwrap(),
        }
    }
}

/// Nobody listens there: the actors keep trying to connect, which is all they need to do here.
fn supervisor() -> (Addr<Supervisor>, oneshot::Receiver<Ending>) {
    let database = DatabaseConfig {
        url: Some("postgres://nobody@127.0.0.1:1/none".into()),
        ..DatabaseConfig::default()
    };
    let config = Config {
        database,
        ..Config::default()
    };
    let store = Store::new(&config.database, "test").unwrap();
    let (ended, end) = oneshot::channel();
    let sink = Arc::new(NullSink::new());
    let alerter = Alerter::start(&config.alerts, "test", "outbox");
    let supervisor = Supervisor::new(
        store,
        Arc::new(config),
        "test".into(),
        false,
        (sink, alerter),
        ended,
    )
    .unwrap();
    (supervisor.start(), end)
}

async fn restarts(supervisor: &Addr<Supervisor>) -> u64 {
    supervisor.send(Observe).await.unwrap().restarts
}

async fn crash(supervisor: &Addr<Supervisor>, child: Child) {
    let before = restarts(supervisor).await;
    let rebuilt = async {
        while restarts(supervisor).await == before {
            supervisor.send(Crash(child)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(10), rebuilt)
        .await
        .expect("rebuilt");
}

#[actix_rt::test]
async fn whichever_actor_dies_is_rebuilt_and_the_end_is_still_orderly() {
    let (supervisor, end) = supervisor();
    for child in [
        Child::Marker,
        Child::Publisher(3),
        Child::Claimer,
        Child::Listener,
    ] {
        crash(&supervisor, child).await;
    }
    supervisor.send(Drain).await.unwrap();
    let ending = timeout(Duration::from_secs(30), end)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ending.error, None);
}

#[actix_rt::test]
async fn actors_that_die_again_and_again_end_the_relay_with_an_error() {
    let (supervisor, mut end) = supervisor();
    let ending = async {
        loop {
            if let Ok(ending) = end.try_recv() {
                return ending;
            }
            let _ = supervisor.send(Crash(Child::Marker)).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let ending = timeout(Duration::from_secs(30), ending).await.unwrap();
    assert!(ending.error.is_some());
}
