//! Writers of one row at a time, as fast as they can: pgbench where there is one, otherwise tasks.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::process::Command;
use tokio::sync::Barrier;

use crate::options::Options;
use crate::world::{AGGREGATE_TYPE, EVENT_TYPE, World, body, variable};

/// Of each turn.
const SPAN: Duration = Duration::from_secs(4);
const QUICK_SPAN: Duration = Duration::from_secs(1);
const AGGREGATES: u32 = 10_000;
/// Threads of pgbench: one would bound what many connections can do.
const THREADS: u32 = 2;

pub(super) struct Load {
    pgbench: Option<PathBuf>,
    schema: String,
    body: String,
    span: Duration,
}

impl Load {
    pub(super) fn new(world: &World, options: &Options) -> Self {
        Self {
            pgbench: find_pgbench(),
            schema: world.name.clone(),
            body: body(options.payload_bytes),
            span: options.sized(SPAN, QUICK_SPAN),
        }
    }

    /// What writes.
    pub(super) fn driver(&self) -> &'static str {
        match self.pgbench {
            Some(_) => "pgbench",
            None => "tokio tasks",
        }
    }

    /// Commits a second of so many connections.
    pub(super) async fn commits_a_second(&self, writers: u32) -> f64 {
        match &self.pgbench {
            Some(pgbench) => self.by_pgbench(pgbench, writers).await,
            None => self.by_tasks(writers).await,
        }
    }

    fn insert(&self, number: &str) -> String {
        format!(
            "INSERT INTO {}.outbox (aggregate_type, aggregate_id, event_type, payload)
             VALUES ('{AGGREGATE_TYPE}', 'aggregate-' || {number}::int, '{EVENT_TYPE}', '{}')",
            self.schema, self.body
        )
    }

    async fn by_pgbench(&self, pgbench: &PathBuf, writers: u32) -> f64 {
        let script = tempfile::NamedTempFile::new().expect("a temporary file");
        // A script's statement goes on over lines up to its semicolon.
        let text = format!(
            "\\set number random(1, {AGGREGATES})\n{};\n",
            self.insert(":number")
        );
        std::fs::write(script.path(), text).expect("the script can be written");
        let output = Command::new(pgbench)
            .args(["--no-vacuum", "--protocol=prepared", "--file"])
            .arg(script.path())
            .arg(format!("--client={writers}"))
            .arg(format!("--jobs={}", THREADS.min(writers)))
            .arg(format!("--time={}", self.span.as_secs()))
            .arg(variable("DATABASE_URL"))
            .output()
            .await
            .expect("pgbench starts");
        let said = String::from_utf8_lossy(&output.stdout);
        let rate = said.lines().find_map(|line| {
            let (rate, _) = line.strip_prefix("tps = ")?.split_once(' ')?;
            rate.parse().ok()
        });
        rate.unwrap_or_else(|| {
            let complaint = String::from_utf8_lossy(&output.stderr);
            panic!("pgbench told no rate: {complaint}")
        })
    }

    async fn by_tasks(&self, writers: u32) -> f64 {
        let commits = Arc::new(AtomicU64::new(0));
        // Connecting is not measured.
        let start = Arc::new(Barrier::new(writers as usize + 1));
        let mut tasks = Vec::new();
        for writer in 0..writers {
            let (client, driver) =
                tokio_postgres::connect(&variable("DATABASE_URL"), tokio_postgres::NoTls)
                    .await
                    .expect("the database answers");
            tokio::spawn(driver);
            let (insert, span) = (self.insert("$1"), self.span);
            let (start, commits) = (start.clone(), commits.clone());
            tasks.push(tokio::spawn(async move {
                let insert = client.prepare(&insert).await.expect("the insert");
                start.wait().await;
                let began = Instant::now();
                let mut number = i32::try_from(writer).unwrap_or(0);
                while began.elapsed() < span {
                    number = (number + 97) % i32::try_from(AGGREGATES).unwrap_or(i32::MAX);
                    let inserted = client.execute(&insert, &[&number]).await;
                    commits.fetch_add(inserted.expect("the insert"), Ordering::Relaxed);
                }
            }));
        }
        start.wait().await;
        let began = Instant::now();
        for task in tasks {
            task.await.expect("a writer");
        }
        #[expect(clippy::cast_precision_loss, reason = "a few hundred thousand")]
        let commits = commits.load(Ordering::Relaxed) as f64;
        commits / began.elapsed().as_secs_f64()
    }
}

/// Beside the servers that scripts/services finds, newest first; it talks to older servers, too.
pub(crate) fn find_pgbench() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok();
    let mut beside_servers: Vec<PathBuf> = versions
        .into_iter()
        .flatten()
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .collect();
    beside_servers.sort();
    let named = std::env::var_os("BELLWIRE_TEST_PG_BINDIR").map(PathBuf::from);
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    named
        .into_iter()
        .chain(beside_servers.into_iter().rev())
        .chain(std::env::split_paths(&in_path))
        .map(|directory| directory.join("pgbench"))
        .find(|program| program.is_file())
}
