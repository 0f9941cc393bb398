//! Several sinks as one: an event goes to its places by the sinks that its route names, and is confirmed once it is in
//! all of them.
//!
//! Names of destinations have their sink's before them, as in `kafka:orders`; `kafka` alone is the sink as a whole,
//! which can be probed like a destination.
//!
//! Invariants, and where they are kept:
//! - exactly one settlement for a delivery, when all of its copies are settled: `lane`;
//! - what becomes of an event that not all places took: `verdict`;
//! - trouble of one sink is no trouble of the connection, which would stop the others: `Part::told`;
//! - a destination's name within an inner sink is the one that this sink knows: `Delivery::copy_for`.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::future::{join_all, select_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;

use super::{Delivery, Lane, Sink, SinkError, Transport};
use crate::relay::failure::{Blame, Cause, decide};
use crate::route::Address;

mod lane;
mod verdict;

/// One of the sinks.
struct Part {
    name: Arc<str>,
    sink: Arc<dyn Sink>,
}

impl Part {
    /// What an error means for the whole, and of which destination it speaks.
    fn told(&self, destination: &Arc<str>, error: SinkError) -> SinkError {
        let (cause, about) = if decide(error.cause).1 == Blame::Connection {
            (Cause::SinkDown, &self.name)
        } else {
            (error.cause, destination)
        };
        SinkError {
            cause,
            message: format!("{about}: {}", error.message),
            destination: Some(about.clone()),
            ..error
        }
    }
}

/// Carries events by several sinks.
pub struct SeveralSinks {
    parts: Vec<Part>,
}

impl SeveralSinks {
    /// Of these sinks, each by the name that addresses know it by.
    pub fn new(sinks: Vec<(Arc<str>, Arc<dyn Sink>)>) -> Self {
        let part = |(name, sink)| Part { name, sink };
        Self {
            parts: sinks.into_iter().map(part).collect(),
        }
    }

    /// The sink of this name, by its number.
    fn part(&self, name: &str) -> Option<(usize, &Part)> {
        let mut parts = self.parts.iter().enumerate();
        parts.find(|(_, part)| *part.name == *name)
    }
}

#[async_trait]
impl Sink for SeveralSinks {
    fn name(&self) -> &'static str {
        "several"
    }

    /// Something can be delivered as soon as one of them takes events: whether the others do is asked of each as of
    /// a destination.
    async fn probe(&self) -> Result<(), SinkError> {
        let mut asked: FuturesUnordered<_> = self
            .parts
            .iter()
            .map(async |part| {
                let answer = part.sink.probe().await;
                answer.map_err(|error| part.told(&part.name, error).message)
            })
            .collect();
        let mut reasons = Vec::with_capacity(self.parts.len());
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push(reason),
            }
        }
        // The same text, whoever answered first.
        reasons.sort_unstable();
        Err(SinkError::new(Cause::Unreachable, reasons.join("; ")))
    }

    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError> {
        let (sink, name) = match destination.split_once(':') {
            Some((sink, name)) => (sink, Some(name)),
            None => (destination, None),
        };
        let Some((_, part)) = self.part(sink) else {
            return Err(unknown(destination));
        };
        let answer = match name {
            Some(name) => part.sink.probe_destination(name).await,
            None => part.sink.probe().await.map(|()| "connected".to_owned()),
        };
        answer.map_err(|error| part.told(&destination.into(), error))
    }

    async fn run_lane(&self, lane: Lane) {
        lane::Run::new(self, &lane).serve(lane).await;
    }

    /// A new receiver is fed by a task that ends with it.
    fn transport(&self) -> watch::Receiver<Transport> {
        let parts = self.parts();
        let told = watch::Sender::new(together(&parts));
        let receiver = told.subscribe();
        tokio::spawn(follow(parts, told));
        receiver
    }

    fn parts(&self) -> Vec<(Arc<str>, watch::Receiver<Transport>)> {
        self.parts
            .iter()
            .map(|part| (part.name.clone(), part.sink.transport()))
            .collect()
    }

    async fn close(&self) {
        join_all(self.parts.iter().map(|part| part.sink.close())).await;
    }
}

fn unknown(destination: &str) -> SinkError {
    let message = format!("{destination}: no sink of this name is in use");
    SinkError {
        destination: Some(destination.into()),
        ..SinkError::new(Cause::DestinationMissing, message)
    }
}

/// Tells how all stand together, until nobody listens or a sink is no more.
async fn follow(
    mut parts: Vec<(Arc<str>, watch::Receiver<Transport>)>,
    told: watch::Sender<Transport>,
) {
    loop {
        let changes = parts.iter_mut().map(|(_, part)| Box::pin(part.changed()));
        tokio::select! {
            (change, _, _) = select_all(changes) => if change.is_err() {
                return;
            },
            () = told.closed() => return,
        }
        let now = together(&parts);
        told.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }
}

/// Down (or blocked) only when each of them is: something can be sent as long as one is up.
fn together(parts: &[(Arc<str>, watch::Receiver<Transport>)]) -> Transport {
    let mut reasons = Vec::new();
    let (mut unknown, mut blocked) = (false, false);
    for (name, part) in parts {
        match &*part.borrow() {
            Transport::Up => return Transport::Up,
            Transport::Unknown => unknown = true,
            Transport::Blocked(reason) => {
                blocked = true;
                reasons.push(format!("{name}: {reason}"));
            }
            Transport::Down(reason) => reasons.push(format!("{name}: {reason}")),
        }
    }
    let reason = reasons.join("; ");
    match (unknown, blocked) {
        (true, _) => Transport::Unknown,
        (false, true) => Transport::Blocked(reason),
        (false, false) => Transport::Down(reason),
    }
}

#[cfg(test)]
mod tests;
