//! `bellwire migrate`

use clap::Args;

use super::{Failure, open_store};
use crate::config::Config;

/// Create the outbox, or adopt and update an existing one.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Leave out the trigger that notifies at each INSERT, for relays with relay.wake = "poll"
    #[arg(long)]
    no_trigger: bool,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let store = open_store(config, "migrate")?;
    let migrated = if arguments.no_trigger {
        store.migrate_without_trigger().await?
    } else {
        store.migrate().await?
    };
    let table = store.names().display();
    if migrated.from == migrated.to && migrated.indexes.is_empty() && migrated.trigger.is_none() {
        println!("{table} is up to date (schema version {})", migrated.to);
        return Ok(0);
    }
    println!(
        "{table} is at schema version {} now (was {})",
        migrated.to, migrated.from
    );
    if !migrated.indexes.is_empty() {
        println!("indexes built: {}", migrated.indexes.join(", "));
    }
    if let Some(done) = migrated.trigger {
        println!("insert trigger {done}");
    }
    if migrated.event_ids > 0 {
        println!("event ids given to {} unpublished rows", migrated.event_ids);
    }
    Ok(0)
}
