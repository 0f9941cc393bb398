//! Each party can do its part with the rights of `sql/roles.sql`, and nothing else. That a relay can,
//! the tests of replicas show: they run it so.

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::support::{SOON, World};

async fn connect(world: &World, url: &str) -> Client {
    let (client, driver) = tokio_postgres::connect(url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(driver);
    let path = format!("SET search_path = {}", world.schema);
    client.batch_execute(&path).await.unwrap();
    client
}

async fn assert_refused(client: &Client, statements: &[&str]) {
    for statement in statements {
        let error = client.batch_execute(statement).await.unwrap_err();
        let code = error.code();
        assert_eq!(
            code,
            Some(&SqlState::INSUFFICIENT_PRIVILEGE),
            "{statement}: {error:?}"
        );
    }
}

const INSERT: &str = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                      VALUES ('order', '1', 'Placed', '{}')";
const OF_NOBODY: &[&str] = &[
    "TRUNCATE outbox",
    "UPDATE outbox SET payload = '{}' WHERE false",
    "DELETE FROM outbox_bucket",
    "UPDATE outbox_migrations SET version = version",
    "CREATE TABLE other ()",
    "ALTER TABLE outbox DISABLE TRIGGER ALL",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_can_insert_and_nothing_else() {
    let world = World::new().await;
    let writer = connect(&world, &world.login("writer", &[]).await).await;
    writer.batch_execute(INSERT).await.unwrap();
    assert_eq!(world.count("pending").await, 1);
    assert_refused(&writer, OF_NOBODY).await;
    assert_refused(
        &writer,
        &[
            "SELECT FROM outbox",
            "UPDATE outbox SET status = 'published'",
            "DELETE FROM outbox",
            "SELECT FROM outbox_replica",
            "SELECT nextval('outbox_token')",
        ],
    )
    .await;
    drop(writer);
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_can_look_replay_and_discard_and_nothing_else() {
    let mut world = World::new().await;
    world.fill("order", 2, 2).await;
    world
        .sql("UPDATE outbox SET status = 'dead', attempts = 5, last_error = 'unroutable' WHERE id <= 2")
        .await;
    let url = world.login("operator", &[]).await;
    let operator = connect(&world, &url).await;
    for arguments in [["status"].as_slice(), &["check"]] {
        let run = world.command(&[("DATABASE_URL", &url)], arguments).await;
        assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    }
    for arguments in [
        ["dead", "list"].as_slice(),
        &["dead", "show", "--id", "1"],
        &["dead", "replay", "--id", "1", "--dry-run"],
    ] {
        let run = world.command(&[("DATABASE_URL", &url)], arguments).await;
        assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    }
    let relay = world.ready_relay(&[]).await;
    // As the README has it.
    operator
        .batch_execute(
            "UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now() WHERE id = 1;
             UPDATE outbox SET status = 'discarded' WHERE id = 2;",
        )
        .await
        .unwrap();
    let arrivals = world.arrivals(3, SOON).await;
    let mut ids: Vec<_> = arrivals.iter().map(|arrival| arrival.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 3, 4]);
    assert_refused(&operator, OF_NOBODY).await;
    assert_refused(
        &operator,
        &[
            INSERT,
            "UPDATE outbox SET aggregate_id = '2' WHERE false",
            "DELETE FROM outbox",
            "UPDATE outbox_bucket SET token = NULL",
            "UPDATE outbox_replica SET ready = false",
            "SELECT nextval('outbox_token')",
        ],
    )
    .await;
    drop((relay, operator));
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_can_write_no_events_of_its_own() {
    let world = World::new().await;
    let relay = connect(&world, &world.login("relay", &[]).await).await;
    assert_refused(
        &relay,
        &[
            INSERT,
            "TRUNCATE outbox",
            "DELETE FROM outbox_bucket",
            "UPDATE outbox_migrations SET version = version",
            "CREATE TABLE other ()",
            "ALTER TABLE outbox DISABLE TRIGGER ALL",
        ],
    )
    .await;
    drop(relay);
    world.drop_roles().await;
    world.clean().await;
}
