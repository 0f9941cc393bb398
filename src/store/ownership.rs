//! Ownership: tokens, leases, buckets, takeover. The protocol is in [`super`].

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use super::connect::in_time;
use super::pooler::Pooler;
use super::runner::{Prepared, Runner, Values};
use super::{Queries, Store, StoreError, TOKEN_LOCK_CLASS};
use crate::event::ClaimToken;

/// More would mean that every number is taken.
const TOKEN_DRAWS: usize = 100;

/// What a session sets beside what all do. A claim or lease that a crash of the server undoes was not
/// acted upon by anybody who survives it; marks, which are made elsewhere, are waited for.
const MORE_SETTINGS: &str = "SET synchronous_commit = off;";

/// The statements of a session.
pub(super) struct Statements {
    pub(super) claim_buckets: Prepared,
    /// Replaced when its plan has become stale.
    pub(super) claim: RefCell<Prepared>,
    pub(super) promote: Prepared,
    pub(super) sweep: Prepared,
    tend: Prepared,
    takeover_begin: Prepared,
    takeover_buckets: Prepared,
    takeover_rows: Prepared,
    takeover_end: Prepared,
    acquire: Prepared,
    give_up: Prepared,
    leave: Prepared,
    ring: Prepared,
    release_strays: Prepared,
    stay_awake: Prepared,
    go_quiet: Prepared,
    awake: Prepared,
    writers: Prepared,
    /// Of the sequence that ids are drawn from; known once it is asked for.
    last_id: RefCell<Option<Prepared>>,
}

impl Statements {
    async fn prepare(
        runner: &Runner,
        client: &Client,
        queries: &Queries,
    ) -> Result<Self, tokio_postgres::Error> {
        let prepare = |sql| runner.prepare(client, sql);
        Ok(Self {
            claim_buckets: prepare(&queries.claim_buckets).await?,
            claim: RefCell::new(prepare(&queries.claim).await?),
            promote: prepare(&queries.promote).await?,
            sweep: prepare(&queries.sweep).await?,
            tend: prepare(&queries.replica_tend).await?,
            takeover_begin: prepare(&queries.takeover_begin).await?,
            takeover_buckets: prepare(&queries.takeover_buckets).await?,
            takeover_rows: prepare(&queries.takeover_rows).await?,
            takeover_end: prepare(&queries.takeover_end).await?,
            acquire: prepare(&queries.bucket_acquire).await?,
            give_up: prepare(&queries.bucket_give_up).await?,
            leave: prepare(&queries.replica_leave).await?,
            ring: prepare(&queries.ring).await?,
            release_strays: prepare(&queries.release_strays).await?,
            stay_awake: prepare(&queries.stay_awake).await?,
            go_quiet: prepare(&queries.go_quiet).await?,
            awake: prepare(&queries.awake).await?,
            writers: prepare(&queries.writers).await?,
            last_id: RefCell::new(None),
        })
    }
}

/// The one connection that holds a token's advisory lock, and on which everything is done that
/// needs the token: so with the connection the right ends, and a claim cannot outlive the lock.
/// Through a pooler in transaction mode there is no such lock, and the lease alone is the right.
pub struct Session {
    pub(super) runner: Runner,
    pub(super) client: Client,
    pub(super) statements: Statements,
    pub(super) token: Arc<ClaimToken>,
    pub(super) lease: Duration,
    queries: Arc<Queries>,
    pub(super) pooler: Arc<Pooler>,
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
    /// An unclaimed row may be due that is not parked, in whosever bucket.
    pub due: bool,
    /// When the next row falls due.
    pub next_due: Option<Duration>,
    /// Rows are parked, in whosever bucket.
    pub parked: bool,
    /// For how long writers are still kept from ringing, by whomever.
    pub kept_awake: Option<Duration>,
}

/// What is still to come of ids drawn so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// The id drawn last.
    pub last: i64,
    /// Transactions that were under way a moment after that was read.
    pub writers: Vec<String>,
}

/// What is still to come from writers that may not have rung.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quiet {
    /// For how long a peer still keeps writers from ringing.
    pub kept_awake: Option<Duration>,
    /// Transactions that were under way a moment after that was read.
    pub writers: Vec<String>,
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
    /// Connects, draws a token, takes its lock if there can be one, registers it.
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
        let runner = store.connector.runner(MORE_SETTINGS).await?;
        if runner.has_session() {
            in_time(client.batch_execute(MORE_SETTINGS)).await?;
        }
        let queries = &store.queries;
        let statements = in_time(Statements::prepare(&runner, &client, queries)).await?;
        let number = draw_token(&runner, &client, queries).await?;
        let name = format!("{replica}#{number}");
        let token = Arc::new(ClaimToken::new(number, name));
        let start = ClaimToken::now();
        let register = in_time(runner.prepare(&client, &queries.replica_register)).await?;
        let values: [&(dyn ToSql + Sync); 4] = [
            &number,
            &token.name(),
            &lease.as_secs_f64(),
            &runner.has_session(),
        ];
        in_time(runner.execute(&client, &register, &values)).await?;
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
            runner,
            client,
            statements,
            token,
            lease,
            queries: store.queries.clone(),
            pooler: store.connector.pooler().clone(),
        })
    }

    pub(super) async fn query(
        &self,
        statement: &Prepared,
        values: &Values<'_>,
    ) -> Result<Vec<Row>, StoreError> {
        let rows = in_time(self.runner.query(&self.client, statement, values)).await;
        rows.inspect_err(|error| self.pooler.learn(error))
    }

    async fn execute(&self, statement: &Prepared, values: &Values<'_>) -> Result<u64, StoreError> {
        let changed = in_time(self.runner.execute(&self.client, statement, values)).await;
        changed.inspect_err(|error| self.pooler.learn(error))
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
        let values: [&(dyn ToSql + Sync); 5] = [
            &self.token.number(),
            &self.token.name(),
            &self.lease.as_secs_f64(),
            &TOKEN_LOCK_CLASS,
            &ready,
        ];
        let row = one(self.query(&self.statements.tend, &values).await?)?;
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
            parked: row.get("parked"),
            kept_awake: milliseconds(row.get("awake_ms")),
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
            let (client, statements) = (&self.client, &self.statements);
            let (begun, name, freed, released, ended, committed) = futures_util::join!(
                client.batch_execute(self.runner.begin()),
                statements.takeover_begin.query(client, &begin),
                statements.takeover_buckets.execute(client, &whose),
                statements.takeover_rows.execute(client, &whose),
                statements.takeover_end.execute(client, &whose),
                client.batch_execute("COMMIT"),
            );
            begun?;
            let name = name?;
            let Some(name) = name.first() else {
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
        .inspect_err(|error| self.pooler.learn(error))
    }

    /// Takes up to `most` free buckets; answers which.
    ///
    /// # Errors
    /// When the token was taken over meanwhile, or the database does not answer.
    pub async fn acquire(&self, most: usize) -> Result<Vec<u8>, StoreError> {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let rows = self
            .query(&self.statements.acquire, &[&self.token.number(), &most])
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
        self.execute(&self.statements.give_up, &[&self.token.number(), &given])
            .await?;
        self.ring().await
    }

    /// Tells the peers that shares may have changed.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn ring(&self) -> Result<(), StoreError> {
        self.execute(&self.statements.ring, &[&"peer"])
            .await
            .map(drop)
    }

    /// Keeps writers from ringing for so long: we look by ourselves. Peers are told.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn stay_awake(&self, wait: Duration) -> Result<(), StoreError> {
        let ms = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
        self.query(&self.statements.stay_awake, &[&ms])
            .await
            .map(drop)
    }

    /// Has writers ring again.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn go_quiet(&self) -> Result<(), StoreError> {
        self.query(&self.statements.go_quiet, &[]).await.map(drop)
    }

    /// Has writers ring again if `ours`, and lists those that may not have rung. Three statements in
    /// this order, each with a snapshot of its own: whoever read the old value, and so did not ring, is
    /// in the list, or has ended before it was read.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quiet(&self, ours: bool) -> Result<Quiet, StoreError> {
        if ours {
            self.go_quiet().await?;
        }
        let rows = self.query(&self.statements.awake, &[]).await?;
        let kept_awake = rows.first().and_then(|row| milliseconds(row.get(0)));
        Ok(Quiet {
            kept_awake,
            writers: self.writers(None).await?,
        })
    }

    /// The id drawn last, and who may still write up to it. Two statements in this order: whoever
    /// drew an id up to that one is in the list, or has ended.
    ///
    /// # Errors
    /// When the database does not answer, or ids are drawn from no sequence.
    pub async fn drawn(&self) -> Result<Drawn, StoreError> {
        let known = self.statements.last_id.borrow().clone();
        let statement = match known {
            Some(statement) => statement,
            None => self.prepare_last_id().await?,
        };
        let last = one(self.query(&statement, &[]).await?)?.get(0);
        Ok(Drawn {
            last,
            writers: self.writers(None).await?,
        })
    }

    async fn prepare_last_id(&self) -> Result<Prepared, StoreError> {
        let prepare = async |sql: &str| in_time(self.runner.prepare(&self.client, sql)).await;
        let find = prepare(&self.queries.id_sequence).await?;
        let name: String = one(self.query(&find, &[]).await?)?.get("name");
        let statement = prepare(&format!("SELECT last_value FROM {name}")).await?;
        self.statements.last_id.replace(Some(statement.clone()));
        Ok(statement)
    }

    /// Which of these transactions, or which at all, may still write events.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn writers(&self, among: Option<&[String]>) -> Result<Vec<String>, StoreError> {
        let rows = self.query(&self.statements.writers, &[&among]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Releases rows whose claim nobody stands for and is over; answers how many.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn release_strays(&self) -> Result<u64, StoreError> {
        self.execute(&self.statements.release_strays, &[]).await
    }

    /// Has the claim planned anew. Its plan is made once, by the size that the table has then; a plan
    /// from a small table may be a bad one for a large table.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn replan_claim(&self) -> Result<(), StoreError> {
        let prepared = self.runner.prepare(&self.client, &self.queries.claim);
        let statement = in_time(prepared).await?;
        self.statements.claim.replace(statement);
        Ok(())
    }

    /// The clean way out: frees the buckets, ends the token, rings.
    ///
    /// # Errors
    /// When the database does not answer; a peer takes over then.
    pub async fn leave(&self) -> Result<(), StoreError> {
        self.query(&self.statements.leave, &[&self.token.number()])
            .await?;
        self.ring().await
    }
}

pub(super) fn one(rows: Vec<Row>) -> Result<Row, StoreError> {
    rows.into_iter()
        .next()
        .ok_or_else(|| StoreError::Unavailable("the server answered no row".into()))
}

async fn draw_token(
    runner: &Runner,
    client: &Client,
    queries: &Queries,
) -> Result<i32, StoreError> {
    let draw = in_time(runner.prepare(client, &queries.replica_token)).await?;
    let values: [&(dyn ToSql + Sync); 2] = [&TOKEN_LOCK_CLASS, &runner.has_session()];
    for _ in 0..TOKEN_DRAWS {
        let row = one(in_time(runner.query(client, &draw, &values)).await?)?;
        if row.get("locked") {
            return Ok(row.get("token"));
        }
    }
    Err(StoreError::TokenLost(
        "every number drawn is locked by another session",
    ))
}

/// None for a time that is over.
fn milliseconds(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

fn buckets(numbers: &[i32]) -> Vec<u8> {
    numbers
        .iter()
        .filter_map(|number| u8::try_from(*number).ok())
        .collect()
}
