//! Signed webhooks a second through HTTP, over the rate at which pgbench runs the same transaction.
//!
//! Senders, intake and database share the machine, and so do pgbench and the database: what HTTP,
//! signature, JSON and schema cost is in the ratio.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bellwire::intake::signature::Keys;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::options::Options;
use crate::process::BINARY;
use crate::report::{Report, Target, quantile};
use crate::world::{World, variable};
use crate::writers::load::find_pgbench;

const CONNECTIONS: [u32; 2] = [16, 64];
const SPAN: Duration = Duration::from_secs(5);
const QUICK_SPAN: Duration = Duration::from_secs(1);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Threads of pgbench: one would bound what many connections can do.
const THREADS: u32 = 2;

const CONFIG: &str = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "bench"
schema = '''{"type": "object", "required": ["type", "data"], "properties": {
    "type": {"const": "order.created"}, "timestamp": {"type": "string", "format": "date-time"},
    "data": {"type": "object", "required": ["order_id", "amount_cents"], "additionalProperties": false, "properties": {
        "order_id": {"type": "string", "pattern": "^ord_[A-Za-z0-9_]{3,60}$"},
        "customer_email": {"type": "string", "maxLength": 254},
        "amount_cents": {"type": "integer", "minimum": 1}, "currency": {"enum": ["EUR", "USD"]}}}}}'''
[[intake.source.route]]
event_type = "order.created"
sql = """INSERT INTO bench_orders (order_id, customer_email, amount_cents, currency, last_event_id)
VALUES (:order_id, :customer_email, :amount_cents::bigint, :currency, :event_id) ON CONFLICT DO NOTHING"""
[intake.source.route.parameters]
order_id = "/data/order_id"
customer_email = "/data/customer_email"
amount_cents = "/data/amount_cents"
currency = "/data/currency"
"#;

fn body(id: &str) -> String {
    format!(
        r#"{{"type":"order.created","timestamp":"2026-01-31T10:00:00Z","data":{{"order_id":"ord_{id}","customer_email":"ada@example.com","amount_cents":14950,"currency":"EUR"}}}}"#
    )
}

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let Some(pgbench) = find_pgbench() else {
        println!("intake: left out, there is no pgbench");
        return;
    };
    let world = World::new("intake").await;
    world
        .sql(
            "CREATE TABLE bench_orders (order_id TEXT PRIMARY KEY, customer_email TEXT, amount_cents BIGINT NOT NULL,
                                        currency TEXT NOT NULL, last_event_id TEXT)",
        )
        .await;
    let span = options.sized(SPAN, QUICK_SPAN);
    println!(
        "intake: {} rounds of {CONNECTIONS:?} connections",
        options.rounds
    );
    for connections in CONNECTIONS {
        let mut turns = Vec::new();
        let mut slowest = Vec::new();
        for round in 0..options.rounds {
            let mut rates = [0.0; 2];
            let mut order = [0, 1];
            if round % 2 == 1 {
                order.reverse();
            }
            for arm in order {
                world
                    .sql("TRUNCATE outbox_webhook_events, outbox_dead_letter, outbox_intake_audit, bench_orders")
                    .await;
                if arm == 0 {
                    let (rate, p99) = by_http(&world, connections, span).await;
                    rates[0] = rate;
                    slowest.push(p99);
                } else {
                    rates[1] = by_pgbench(&pgbench, &world, connections, span).await;
                }
            }
            println!(
                "  {connections} connections: {:.0} webhooks/s, {:.0} transactions/s",
                rates[0], rates[1]
            );
            turns.push((rates[0], rates[1]));
        }
        report.ratio(
            format!("intake_vs_sql.{connections}"),
            "webhooks/s",
            Target::AtLeast(0.5),
            turns,
        );
        report.absolute(
            format!("intake_p99_ms.{connections}"),
            "ms",
            Target::None,
            slowest,
        );
    }
    world.clean().await;
}

/// Webhooks a second, and the 99th percentile of their answers in milliseconds.
async fn by_http(world: &World, connections: u32, span: Duration) -> (f64, f64) {
    let (process, address) = start(world).await;
    let until = Instant::now() + span;
    let done = Arc::new(AtomicU64::new(0));
    let senders: Vec<_> = (0..connections)
        .map(|sender| tokio::spawn(send(address.clone(), sender, until, done.clone())))
        .collect();
    let began = Instant::now();
    let mut took = Vec::new();
    for sender in senders {
        took.extend(sender.await.expect("a sender ends"));
    }
    let seconds = began.elapsed().as_secs_f64();
    drop(process);
    #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
    let rate = done.load(Ordering::Relaxed) as f64 / seconds;
    (rate, quantile(&took, 0.99))
}

async fn start(world: &World) -> (Child, String) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), CONFIG).expect("the configuration can be written");
    let url = variable("DATABASE_URL");
    let sign = if url.contains('?') { '&' } else { '?' };
    let foreign =
        std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("BELLWIRE_"));
    let mut child = Command::new(BINARY)
        .args(["--config".as_ref(), file.path().as_os_str(), "run".as_ref()])
        .env_clear()
        .envs(foreign)
        .env(
            "DATABASE_URL",
            format!("{url}{sign}options=-csearch_path%3D{}", world.name),
        )
        .env("BELLWIRE_DATABASE__SCHEMA", &world.name)
        .env("BELLWIRE_INTAKE__SECRETS__BENCH", SECRET)
        .env("BELLWIRE_RELAY__ENABLED", "false")
        .env("BELLWIRE_ADMIN__LISTEN", "off")
        .env("BELLWIRE_LOG__LEVEL", "info")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the binary starts");
    let mut log = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    while let Some(line) = log.next_line().await.expect("its log can be read") {
        if let Some((_, rest)) = line.split_once("address=127.0.0.1:")
            && line.contains("intake port open")
        {
            let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
            tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
            return (child, format!("127.0.0.1:{port}"));
        }
        println!("  {line}");
    }
    panic!("the intake ended");
}

/// One webhook after the other on one connection; answers how long each took, in milliseconds.
async fn send(address: String, sender: u32, until: Instant, done: Arc<AtomicU64>) -> Vec<f64> {
    let mut keys = Keys::default();
    keys.add(SECRET).expect("a secret");
    let mut stream = TcpStream::connect(&address).await.expect("it listens");
    stream.set_nodelay(true).expect("a socket");
    let mut took = Vec::new();
    let mut buffer = vec![0; 16 * 1024];
    for number in 0_u64.. {
        if Instant::now() >= until {
            break;
        }
        let id = format!("s{sender}_{number}");
        let body = body(&id);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let stamp = now.unwrap_or_default().as_secs().to_string();
        let signature = keys.sign(&id, &stamp, body.as_bytes()).expect("a key");
        let request = format!(
            "POST /webhooks/bench HTTP/1.1\r\nhost: bench\r\nwebhook-id: {id}\r\nwebhook-timestamp: {stamp}\r\n\
             webhook-signature: {signature}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let began = Instant::now();
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it is read");
        // Answers are short, and come in one piece.
        let read = stream.read(&mut buffer).await.expect("an answer");
        let answer = &buffer[..read];
        assert!(
            answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"}"),
            "{}",
            String::from_utf8_lossy(answer)
        );
        took.push(began.elapsed().as_secs_f64() * 1000.0);
        done.fetch_add(1, Ordering::Relaxed);
    }
    took
}

/// The transaction as the intake runs it, each statement by itself.
fn script(schema: &str) -> String {
    let body = body("' || :n::bigint || '");
    format!(
        "\\set n random(1, 1000000000000000)
BEGIN ISOLATION LEVEL READ COMMITTED;
INSERT INTO {schema}.outbox_webhook_events AS e (source, event_id, event_type, payload, payload_sha256, status, processed_at, execution_id, last_execution_id) VALUES ('bench', 's' || :n::bigint, 'order.created', convert_to('{body}', 'UTF8'), sha256('x'), 'processed', now(), md5(''), md5('')) ON CONFLICT (source, event_id) DO NOTHING RETURNING execution_id;
SAVEPOINT handler;
INSERT INTO {schema}.bench_orders (order_id, customer_email, amount_cents, currency, last_event_id) VALUES ('ord_' || :n::bigint, 'ada@example.com', 14950, 'EUR', 's' || :n::bigint) ON CONFLICT DO NOTHING;
SET CONSTRAINTS ALL IMMEDIATE;
INSERT INTO {schema}.outbox_intake_audit (execution_id, mode, outcome, source, event_id) VALUES (md5(''), 'intake', 'processed', 'bench', 's' || :n::bigint);
COMMIT;
"
    )
}

async fn by_pgbench(
    pgbench: &std::path::Path,
    world: &World,
    connections: u32,
    span: Duration,
) -> f64 {
    let script_file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(script_file.path(), script(&world.name)).expect("the script can be written");
    let output = Command::new(pgbench)
        .args(["--no-vacuum", "--protocol=prepared", "--file"])
        .arg(script_file.path())
        .arg(format!("--client={connections}"))
        .arg(format!("--jobs={}", THREADS.min(connections)))
        .arg(format!("--time={}", span.as_secs()))
        .arg(variable("DATABASE_URL"))
        .output()
        .await
        .expect("pgbench runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let rate = text
        .lines()
        .find_map(|line| line.strip_prefix("tps = ")?.split_whitespace().next())
        .and_then(|rate| rate.parse().ok());
    rate.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}
