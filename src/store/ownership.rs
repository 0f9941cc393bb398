//! Ownership: tokens, leases, buckets, takeover. The protocol is in [`super`].

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use super::connect::in_time;
use super::{Queries, Store, StoreError, TOKEN_LOCK_CLASS};
use crate::event::ClaimToken;

/// More would mean that every number is taken.
const TOKEN_DRAWS: usize = 100;

/// The prepared statements of a session.
pub(super) struct Statements {
    pub(super) claim_buckets: Statement,
    /// Replaced when its plan has become stale.
    pub(super) claim: RefCell<Statement>,
    tend: Statement,
    takeover_begin: Statement,
    takeover_buckets: Statement,
    takeover_rows: Statement,
    takeover_end: Statement,
    acquire: Statement,
    give_up: Statement,
    leave: Statement,
    ring: Statement,
    release_strays: Statement,
}

impl Statements {
    async fn prepare(client: &Client, queries: &Queries) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            claim_buckets: client.prepare(&queries.claim_buckets).await?,
            claim: RefCell::new(client.prepare(&queries.claim).await?),
            tend: client.prepare(&queries.replica_tend).await?,
            takeover_begin: client.prepare(&queries.takeover_begin).await?,
            takeover_buckets: client.prepare(&queries.takeover_buckets).await?,
            takeover_rows: client.prepare(&queries.takeover_rows).await?,
            takeover_end: client.prepare(&queries.takeover_end).await?,
            acquire: client.prepare(&queries.bucket_acquire).await?,
            give_up: client.prepare(&queries.bucket_give_up).await?,
            leave: client.prepare(&queries.replica_leave).await?,
            ring: client.prepare(&queries.ring).await?,
            release_strays: client.prepare(&queries.release_strays).await?,
        })
    }
}

/// The one connection that holds a token's advisory lock, and on which everything is done that
/// needs the token: so with the connection the right ends, and a claim cannot outlive the lock.
pub struct Session {
    pub(super) client: Client,
    pub(super) statements: Statements,
    pub(super) token: Arc<ClaimToken>,
    pub(super) lease: Duration,
    queries: Arc<Queries>,
}

/// What a heartbeat found.
#[derive(Clone, Debug, PartialEq)]
pub struct Tended {
    /// Buckets that carry our token.
    pub owned: Vec<u8>,
    /// Buckets that carry none.
    pub free: usize,
    /// Live replicas but us.
    pub peers: usize,
    /// Those of them that can publish.
    pub ready_peers: usize,
    /// Tokens to take over.
    pub dead_peers: Vec<i32>,
    /// A peer has rows in hand.
    pub peers_busy: bool,
    /// Rows are claimed that nobody stands for.
    pub strays: bool,
    /// An unclaimed row is due, in whosever bucket.
    pub due: bool,
    /// When the next row falls due.
    pub next_due: Option<Duration>,
}

/// What a takeover did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// It lives, or a peer is at it.
    NotDead,
    /// Buckets freed and rows released; whether some are left for later (locked by somebody).
    Done {
        /// Name of the dead token.
        name: String,
        /// Buckets that are free now.
        buckets: u64,
        /// Rows that are claimable now.
        rows: u64,
        /// All of its rows are released and its row is gone.
        complete: bool,
    },
}

impl Session {
    /// Connects, draws a token, takes its lock, registers it.
    ///
    /// `lost` is called when the connection has ended, for whatever reason; the token is void then.
    ///
    /// # Errors
    /// When the database cannot be reached or refuses.
    pub async fn open(
        store: &Store,
        replica: &str,
        lease: Duration,
        lost: impl FnOnce(i32, String) + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (on_lost, mut is_lost) = tokio::sync::oneshot::channel();
        let (client, _) = store
            .connector
            .open(|reason| drop(on_lost.send(reason)))
            .await?;
        in_time(client.batch_execute("SET synchronous_commit = off")).await?;
        let statements = in_time(Statements::prepare(&client, &store.queries)).await?;
        let number = draw_token(&client, &store.queries).await?;
        let name = format!("{replica}#{number}");
        let token = Arc::new(ClaimToken::new(number, name));
        let start = ClaimToken::now();
        in_time(client.execute(
            &store.queries.replica_register,
            &[&number, &token.name(), &lease.as_secs_f64()],
        ))
        .await?;
        token.renewed(start, lease);
        if is_lost.try_recv().is_ok() {
            return Err(StoreError::Unavailable("closed".into()));
        }
        let watched = token.clone();
        tokio::spawn(async move {
            let reason = is_lost.await.unwrap_or_else(|_| "closed".into());
            watched.void();
            lost(number, reason);
        });
        Ok(Self {
            client,
            statements,
            token,
            lease,
            queries: store.queries.clone(),
        })
    }

    /// The token.
    pub fn token(&self) -> &Arc<ClaimToken> {
        &self.token
    }

    /// The heartbeat: renews the lease and looks around.
    ///
    /// # Errors
    /// [`StoreError::TokenLost`] when the lease could not be renewed: the token is void.
    pub async fn tend(&self, ready: bool) -> Result<Tended, StoreError> {
        let start = ClaimToken::now();
        let row = in_time(self.client.query_one(
            &self.statements.tend,
            &[
                &self.token.number(),
                &self.token.name(),
                &self.lease.as_secs_f64(),
                &TOKEN_LOCK_CLASS,
                &ready,
            ],
        ))
        .await?;
        if !row.get::<_, bool>("renewed") {
            self.token.void();
            return Err(StoreError::TokenLost("its lease was over or taken over"));
        }
        self.token.renewed(start, self.lease);
        let count = |column: &str| usize::try_from(row.get::<_, i32>(column)).unwrap_or(0);
        Ok(Tended {
            owned: buckets(&row.get::<_, Vec<i32>>("owned")),
            free: count("free"),
            peers: count("peers"),
            ready_peers: count("ready_peers"),
            dead_peers: row.get("dead_peers"),
            peers_busy: row.get("peers_busy"),
            strays: row.get("strays"),
            due: row.get("due"),
            next_due: row
                .get::<_, Option<f64>>("next_due_seconds")
                .map(|seconds| {
                    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
                }),
        })
    }

    /// Takes over a dead token, or our own `old` one that we know to be void.
    ///
    /// # Errors
    /// A lock timeout while the dead client's last claim still runs: try again later.
    pub async fn takeover(&self, dead: i32, own: bool) -> Result<Takeover, StoreError> {
        let begin: [&(dyn ToSql + Sync); 3] = [&dead, &TOKEN_LOCK_CLASS, &own];
        let whose: [&(dyn ToSql + Sync); 1] = [&dead];
        in_time(async {
            // As in a claim: sent in this order in one go; a failure makes COMMIT a rollback.
            let (begun, name, freed, released, ended, committed) = futures_util::join!(
                self.client
                    .batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED"),
                self.client
                    .query_opt(&self.statements.takeover_begin, &begin),
                self.client
                    .execute(&self.statements.takeover_buckets, &whose),
                self.client.execute(&self.statements.takeover_rows, &whose),
                self.client.execute(&self.statements.takeover_end, &whose),
                self.client.batch_execute("COMMIT"),
            );
            begun?;
            let Some(name) = name? else {
                return Ok(Takeover::NotDead);
            };
            let done = Takeover::Done {
                name: name.get(0),
                buckets: freed?,
                rows: released?,
                complete: ended? == 1,
            };
            committed?;
            Ok(done)
        })
        .await
    }

    /// Takes up to `most` free buckets; answers which.
    ///
    /// # Errors
    /// When the token was taken over meanwhile, or the database does not answer.
    pub async fn acquire(&self, most: usize) -> Result<Vec<u8>, StoreError> {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let rows = in_time(
            self.client
                .query(&self.statements.acquire, &[&self.token.number(), &most]),
        )
        .await?;
        Ok(buckets(
            &rows.iter().map(|row| row.get(0)).collect::<Vec<i32>>(),
        ))
    }

    /// Gives up buckets of which nothing is in hand, and rings.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn give_up(&self, given: &[u8]) -> Result<(), StoreError> {
        let given: Vec<i32> = given.iter().map(|bucket| i32::from(*bucket)).collect();
        in_time(
            self.client
                .execute(&self.statements.give_up, &[&self.token.number(), &given]),
        )
        .await?;
        self.ring().await
    }

    /// Tells the peers that shares may have changed.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn ring(&self) -> Result<(), StoreError> {
        in_time(self.client.execute(&self.statements.ring, &[&"peer"]))
            .await
            .map(drop)
    }

    /// Releases rows whose claim nobody stands for and is over; answers how many.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn release_strays(&self) -> Result<u64, StoreError> {
        in_time(self.client.execute(&self.statements.release_strays, &[])).await
    }

    /// Has the claim planned anew. Its plan is made once, by the size that the table has then; a plan
    /// from a small table may be a bad one for a large table.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn replan_claim(&self) -> Result<(), StoreError> {
        let statement = in_time(self.client.prepare(&self.queries.claim)).await?;
        self.statements.claim.replace(statement);
        Ok(())
    }

    /// The clean way out: frees the buckets, ends the token, rings.
    ///
    /// # Errors
    /// When the database does not answer; a peer takes over then.
    pub async fn leave(&self) -> Result<(), StoreError> {
        in_time(
            self.client
                .query_one(&self.statements.leave, &[&self.token.number()]),
        )
        .await?;
        self.ring().await
    }
}

async fn draw_token(client: &Client, queries: &Queries) -> Result<i32, StoreError> {
    for _ in 0..TOKEN_DRAWS {
        let row = in_time(client.query_one(&queries.replica_token, &[&TOKEN_LOCK_CLASS])).await?;
        if row.get("locked") {
            return Ok(row.get("token"));
        }
    }
    Err(StoreError::TokenLost(
        "every number drawn is locked by another session",
    ))
}

fn buckets(numbers: &[i32]) -> Vec<u8> {
    numbers
        .iter()
        .filter_map(|number| u8::try_from(*number).ok())
        .collect()
}
