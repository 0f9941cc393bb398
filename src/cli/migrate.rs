//! `bellwire migrate`

use clap::Args;

use super::{Failure, open_store};
use crate::config::Config;
use crate::store::MigrateOptions;

/// Create the outbox, or adopt and update an existing one.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Leave out the trigger that notifies at each INSERT, for relays with relay.wake = "poll"
    #[arg(long)]
    no_trigger: bool,
    /// Refuse INSERTs of larger payloads from now on, by a trigger (bytes of payload::text); `off` takes any again
    #[arg(long, value_name = "N", value_parser = limit)]
    max_payload_bytes: Option<Limit>,
}

/// None: any size is taken.
#[derive(Clone, Copy, Debug)]
struct Limit(Option<u32>);

fn limit(text: &str) -> Result<Limit, String> {
    if text == "off" {
        return Ok(Limit(None));
    }
    match text.parse() {
        Ok(bytes @ 1..) => Ok(Limit(Some(bytes))),
        _ => Err("must be a number of bytes from 1 on, or `off`".to_owned()),
    }
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let store = open_store(config, "migrate")?;
    let options = MigrateOptions {
        trigger: !arguments.no_trigger,
        max_payload_bytes: arguments.max_payload_bytes.map(|limit| limit.0),
    };
    let migrated = store.migrate_with(options).await?;
    let table = store.names().display();
    let untouched =
        migrated.indexes.is_empty() && migrated.trigger.is_none() && migrated.limit.is_none();
    if migrated.from == migrated.to && untouched {
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
    if let Some(done) = migrated.limit {
        println!("limit of payloads {done}");
    }
    if migrated.event_ids > 0 {
        println!("event ids given to {} unpublished rows", migrated.event_ids);
    }
    Ok(0)
}
