//! Writers ring only while every relay sleeps, and no wake-up is lost by it: with a tick of an hour
//! every event leaves within a second or so of its commit, whatever the writers do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::support::{Ledger, Relay, SOON, World, database_url};

const NO_TICK: (&str, &str) = ("relay.tick", "1h");
/// "Within a second", on a machine that runs all of this on two cores.
const AT_ONCE: Duration = Duration::from_secs(3);

const INSERT: &str = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
     SELECT 'order', (random() * 1000)::int::text, 'Placed', '{}' FROM generate_series(1, 1 + (random() * 2)::int)";

/// One transaction of some kind.
async fn write(client: &Client, kind: u32) {
    let pause = Duration::from_millis(u64::from(rand::random::<u32>() % 30));
    let isolation = match kind % 3 {
        0 => "READ COMMITTED",
        1 => "REPEATABLE READ",
        _ => "SERIALIZABLE",
    };
    let run = async |sql: &str| {
        client
            .batch_execute(sql)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    };
    match kind % 7 {
        0 | 1 => run(INSERT).await,
        2 => {
            run(&format!("BEGIN ISOLATION LEVEL {isolation}; {INSERT}")).await;
            tokio::time::sleep(pause).await;
            run("COMMIT").await;
        }
        3 => {
            // The snapshot is taken before anything is written.
            run(&format!("BEGIN ISOLATION LEVEL {isolation}; SELECT 1")).await;
            tokio::time::sleep(pause).await;
            run(INSERT).await;
            tokio::time::sleep(pause).await;
            run("COMMIT").await;
        }
        4 => {
            run(&format!(
                "BEGIN; {INSERT}; SAVEPOINT a; {INSERT}; ROLLBACK TO a; {INSERT}"
            ))
            .await;
            tokio::time::sleep(pause).await;
            run("COMMIT").await;
        }
        5 => {
            run(&format!("BEGIN; {INSERT}")).await;
            tokio::time::sleep(pause).await;
            run("ROLLBACK").await;
        }
        _ => {
            let sink = client
                .copy_in::<_, bytes::Bytes>(
                    "COPY outbox (aggregate_type, aggregate_id, event_type, payload) FROM STDIN",
                )
                .await
                .unwrap();
            let mut sink = std::pin::pin!(sink);
            let rows = bytes::Bytes::from_static(b"order\t7\tPlaced\t{}\norder\t8\tPlaced\t{}\n");
            futures_util::SinkExt::send(&mut sink, rows).await.unwrap();
            sink.finish().await.unwrap();
        }
    }
}

/// Writers that go on until told to stop.
struct Writers {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Writers {
    async fn start(world: &World, writers: u32, pause: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = Vec::new();
        for number in 0..writers {
            let (client, stop) = (world.client().await, stop.clone());
            tasks.push(tokio::spawn(async move {
                let mut kind = number;
                while !stop.load(Ordering::Relaxed) {
                    write(&client, kind).await;
                    kind = kind.wrapping_add(1);
                    tokio::time::sleep(pause).await;
                }
            }));
        }
        Self { stop, tasks }
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

/// Counts writers' rings.
async fn rings(world: &World) -> Arc<AtomicU64> {
    let (client, mut connection) = tokio_postgres::connect(&database_url(), NoTls)
        .await
        .unwrap();
    let counter = Arc::new(AtomicU64::new(0));
    let counted = counter.clone();
    let channel = world.store.names().channel().to_owned();
    let mut listen = Box::pin(async move {
        client
            .batch_execute(&format!("LISTEN \"{channel}\""))
            .await
            .unwrap();
        std::future::pending::<()>().await;
    });
    tokio::spawn(async move {
        loop {
            let message = std::future::poll_fn(|context| {
                let _ = listen.as_mut().poll(context);
                connection.poll_message(context)
            });
            match message.await {
                Some(Ok(AsyncMessage::Notification(ring))) if ring.payload().is_empty() => {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                Some(Ok(_)) => {}
                _ => return,
            }
        }
    });
    counter
}

impl World {
    async fn ready_relays(&self, settings: &[(&str, &str)], count: usize) -> Vec<Relay> {
        let relays: Vec<_> = (0..count).map(|_| self.relay(settings)).collect();
        for relay in &relays {
            self.until_owned(relay).await;
        }
        relays
    }

    async fn assert_nothing_was_missed(&mut self) {
        self.until_published(SOON).await;
        let committed = self.committed().await;
        let arrivals = self.arrivals(committed.len(), SOON).await;
        // Overlapping writers of one aggregate may be seen in either order.
        let (lost, foreign) = Ledger::of(&arrivals).difference(&committed);
        assert_eq!((lost, foreign), (Vec::new(), Vec::new()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_lost_whatever_the_writers_do() {
    let mut world = World::new().await;
    let relays = world.ready_relays(&[NO_TICK], 2).await;
    // Its breaker is open: it may not keep anybody from ringing.
    let _useless = world.relay(&[NO_TICK, ("AMQP_URL", "amqp://u:p@127.0.0.1:1/%2f")]);
    for round in 0..4 {
        // Written while the relays look by themselves, so perhaps without a ring; committed long after.
        let late = world.client().await;
        let busy = Writers::start(&world, 40, Duration::ZERO).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        late.batch_execute(&format!("BEGIN; {INSERT}"))
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        busy.stop().await;
        if round % 2 == 0 {
            // Few enough events that the relays fall asleep between them all the time.
            let sparse = Writers::start(&world, 5, Duration::from_millis(40)).await;
            tokio::time::sleep(Duration::from_millis(700)).await;
            sparse.stop().await;
        }
        // The backlog of the busy time, however slow the machine.
        world.until_published(SOON).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        late.batch_execute("COMMIT").await.unwrap();
        world.until_published(AT_ONCE).await;
    }
    world.assert_nothing_was_missed().await;
    drop(relays);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_killed_while_it_keeps_writers_from_ringing_strands_nothing() {
    let mut world = World::new().await;
    let mut relays = world.ready_relays(&[NO_TICK], 2).await;
    let writers = Writers::start(&world, 20, Duration::ZERO).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    relays.pop().unwrap().kill().await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    writers.stop().await;
    world.until_published(SOON).await;
    // And one that comes to an end in order.
    relays.extend(world.ready_relays(&[NO_TICK], 1).await);
    let writers = Writers::start(&world, 20, Duration::ZERO).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    relays.pop().unwrap().terminate(SOON).await;
    writers.stop().await;
    world.assert_nothing_was_missed().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_do_not_ring_while_the_relay_looks_anyway_and_do_when_it_sleeps() {
    let mut world = World::new().await;
    let relay = world.ready_relays(&[NO_TICK], 1).await;
    let rings = rings(&world).await;
    let (transactions, stop) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut tasks = Vec::new();
    // Enough to keep it busy also on a slow machine.
    let many = INSERT.replace("1 + (random() * 2)::int", "15");
    for _ in 0..8 {
        let (client, transactions) = (world.client().await, transactions.clone());
        let (many, stop) = (many.clone(), stop.clone());
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                client.batch_execute(&many).await.unwrap();
                transactions.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    // From when it has found that it is busy.
    let awake = "SELECT last_value > 0 FROM outbox_awake_until";
    world.until(awake, SOON).await;
    let count = || {
        (
            transactions.load(Ordering::Relaxed),
            rings.load(Ordering::Relaxed),
        )
    };
    let before = count();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let after = count();
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let (written, rung) = (after.0 - before.0, after.1 - before.1);
    assert!(
        rung * 4 < written,
        "{rung} rings for {written} transactions"
    );
    world.until_published(SOON).await;
    // Asleep again: each one rings.
    let asleep = "SELECT last_value = 0 FROM outbox_awake_until";
    world.until(asleep, AT_ONCE).await;
    let before = rings.load(Ordering::Relaxed);
    for _ in 0..5 {
        world.insert(("order", "1"), "Placed", "{}").await;
        world.until_published(AT_ONCE).await;
    }
    assert_eq!(rings.load(Ordering::Relaxed) - before, 5);
    drop(relay);
    world.assert_nothing_was_missed().await;
    world.clean().await;
}
