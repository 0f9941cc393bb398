//! The database's side of a drain alone: claims, loads and marks, driven by a bare loop.

use bellwire::relay::rounds::Rounds;
use bellwire::store::Session;

use crate::claim::owning_session;
use crate::drain::events_a_second;
use crate::options::Options;
use crate::world::World;

/// Events a second, all of them claimed by one session with their payloads read, and marked in claim-sized
/// batches on another connection, while the next ones are claimed.
pub(crate) async fn drain(world: &World, rows: u32, options: &Options) -> f64 {
    world.load(rows, options.payload_bytes).await;
    let (session, owned) = owning_session(&world.store).await;
    let mut rounds = Rounds::new(options.partitions, options.batch, options.most_in_hand());
    rounds.set_owned(&owned);
    let mut left = rows as usize;
    let mut in_hand = Batch::default();
    while left > 0 {
        // On the heap: a claim is a large future.
        let (claimed, marked) = futures_util::join!(
            Box::pin(claim(world, &session, &mut rounds)),
            mark(world, &session, &in_hand)
        );
        rounds.returned(&in_hand.buckets);
        left -= marked;
        in_hand = claimed;
    }
    session.leave().await.expect("the session ends");
    events_a_second(world, rows).await
}

#[derive(Default)]
struct Batch {
    ids: Vec<i64>,
    buckets: Vec<u8>,
}

async fn claim(world: &World, session: &Session, rounds: &mut Rounds) -> Batch {
    rounds.wake();
    let Some(request) = rounds.next_claim() else {
        return Batch::default();
    };
    let answer = session.claim(&request).await.expect("the claim");
    rounds.claimed(&request, &answer);
    let loaded = world.store.load(&answer.rows).await.expect("the payloads");
    assert_eq!(loaded.len(), answer.rows.len(), "all can be read");
    Batch {
        ids: answer.rows.iter().map(|row| row.id.0).collect(),
        buckets: answer.rows.iter().map(|row| row.bucket).collect(),
    }
}

async fn mark(world: &World, session: &Session, batch: &Batch) -> usize {
    if batch.ids.is_empty() {
        return 0;
    }
    let marked = world
        .store
        .mark_published(&batch.ids, session.token().name())
        .await;
    marked.expect("the mark").len()
}
