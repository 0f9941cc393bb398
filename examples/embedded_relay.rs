//! A program that publishes events and carries them, too: the relay as a task of its own.
//!
//! ```sh
//! export DATABASE_URL=postgres://localhost/shop AMQP_URL=amqp://localhost
//! bellwire migrate
//! cargo run --example embedded_relay
//! ```
//!
//! `BELLWIRE_RELAY__SINK=null` tries it without a broker: events go nowhere then.

use std::time::{Duration, Instant};

use bellwire::config::Config;
use bellwire::outbox::{NewEvent, Outbox, OutboxRelay, OutboxSettings};
use tokio_postgres::{Client, NoTls};

const EVENTS: usize = 1_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .init();
    let config = Config::load(None)?;
    let (mut client, connection) =
        tokio_postgres::connect(&std::env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection);
    // What this sink cannot carry is refused where it is written.
    let outbox = Outbox::open(&client, OutboxSettings::of(&config)?).await?;

    let mut relay = OutboxRelay::new(config)?.start()?;
    let work = write_and_wait(&mut client, &outbox);
    tokio::select! {
        done = work => done?,
        ended = relay.ended() => {
            ended?;
        }
        _ = tokio::signal::ctrl_c() => {}
    }
    let ending = relay.stop().await?;
    println!("{} events published", ending.published);
    Ok(())
}

async fn write_and_wait(client: &mut Client, outbox: &Outbox) -> anyhow::Result<()> {
    let events: Vec<_> = (0..EVENTS)
        .map(|n| {
            NewEvent::raw(
                "greeting",
                (n % 10).to_string(),
                "Said",
                format!("{{\"n\": {n}}}"),
            )
        })
        .collect();
    let began = Instant::now();
    let transaction = client.transaction().await?;
    outbox.publish_many(&transaction, &events).await?;
    transaction.commit().await?;
    while outbox.lag(&*client).await?.pending > 0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("nothing waits any more after {:?}", began.elapsed());
    Ok(())
}
