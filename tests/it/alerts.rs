//! Alerts arrive, in order and once, whatever the receivers do; and never in the way of anything.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bellwire::alert::{Alert, Alerter, DeadLetter};
use bellwire::config::AlertsConfig;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::support::{Receiver, Reply, SOON, World};

/// The part of Slack's URL and the token that must be seen nowhere.
const SECRET: &str = "S3cr3t";
const FAILED: Reply = Reply::Refused("500 Internal Server Error", "", "oh no");
const GONE: Reply = Reply::Refused("404 Not Found", "", "no_service");

fn config(slack: Option<&Receiver>, webhook: Option<&Receiver>) -> AlertsConfig {
    let secret = |url: String| Some(url.as_str().into());
    AlertsConfig {
        slack_url: slack.and_then(|receiver| secret(receiver.url("/services/T1/S3cr3t"))),
        webhook_url: webhook.and_then(|receiver| secret(receiver.url("/hook?key=S3cr3t"))),
        webhook_token: webhook.map(|_| "token-S3cr3t".into()),
        ..AlertsConfig::default()
    }
}

fn start(config: &AlertsConfig) -> Alerter {
    Alerter::start(config, "relay-1", "public.outbox")
}

fn failed(reason: impl ToString) -> Alert {
    Alert::RelayFailed {
        reason: reason.to_string(),
    }
}

fn dead(id: i64) -> Alert {
    Alert::DeadLettered(DeadLetter {
        id,
        aggregate_type: "order".into(),
        aggregate_id: format!("ORD-{id}"),
        event_type: "OrderPlaced".into(),
        attempts: 5,
        last_error: "unroutable: no queue is bound".into(),
        cause: "unroutable",
        payload_bytes: Some(72),
        held_back: Some(3),
        held_back_capped: false,
        holds: true,
        copied_to: None,
        table: "public.outbox".into(),
    })
}

fn reasons(bodies: &[serde_json::Value]) -> Vec<&str> {
    let reasons = bodies.iter().map(|body| body["reason"].as_str().unwrap());
    reasons.collect()
}

/// Counts of this thread's tasks only: other tests may run beside this one.
struct Counts {
    handle: PrometheusHandle,
    _guard: metrics::LocalRecorderGuard<'static>,
}

impl Counts {
    fn new() -> Self {
        // Lives as long as the process: a test.
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        Self {
            handle: recorder.handle(),
            _guard: metrics::set_default_local_recorder(recorder),
        }
    }

    /// Waits, since a request is seen before its answer is counted.
    async fn until(&self, endpoint: &str, sent: u64, failed: u64) {
        let line = |name, count| {
            format!("bellwire_alerts_{name}_total{{endpoint=\"{endpoint}\"}} {count}\n")
        };
        let began = Instant::now();
        loop {
            let text = self.handle.render();
            if text.contains(&line("sent", sent)) && text.contains(&line("failed", failed)) {
                return;
            }
            assert!(
                began.elapsed() < SOON,
                "not {sent} sent and {failed} failed to {endpoint}: {text}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Everything that this thread logs, at every level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn new() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_alert_arrives_once_after_all_that_can_go_wrong() {
    let counts = Counts::new();
    let late = Reply::Refused(
        "429 Too Many Requests",
        "Retry-After: 3\r\n",
        "rate_limited",
    );
    let receiver = Receiver::new([Reply::Hang, late, Reply::Close, FAILED]).await;
    let alerter = start(&AlertsConfig {
        timeout: Duration::from_millis(200),
        ..config(None, Some(&receiver))
    });
    alerter.send(failed("disk full"));
    receiver.until_requests(3, SOON).await;
    // From here on without its growing pauses, which are a matter of seconds else.
    alerter.flush(SOON).await;
    assert_eq!(reasons(&receiver.taken()), ["disk full"]);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 5);
    for request in &requests {
        assert!(
            request.head.starts_with("POST /hook?key="),
            "{}",
            request.head
        );
        let head = request.head.to_lowercase();
        assert!(
            head.contains("authorization: bearer token-s3cr3t"),
            "{head}"
        );
        assert!(head.contains("content-type: application/json"), "{head}");
        // The same object each time, so that a receiver can drop repeats.
        assert_eq!(request.body, requests[0].body);
    }
    assert!(
        requests[2].at - requests[1].at >= Duration::from_secs(3),
        "Retry-After"
    );
    assert_eq!(requests[0].body["replica"], "relay-1");
    assert_eq!(requests[0].body["table"], "public.outbox");
    counts.until("webhook", 1, 0).await;
}

#[tokio::test]
async fn alerts_keep_their_order_when_one_of_them_has_to_be_tried_again() {
    let receiver = Receiver::new([Reply::Taken, FAILED, Reply::Close]).await;
    let alerter = start(&config(None, Some(&receiver)));
    for number in 0..10 {
        alerter.send(failed(number));
    }
    alerter.flush(SOON).await;
    let expected: Vec<_> = (0..10).map(|number| number.to_string()).collect();
    assert_eq!(reasons(&receiver.taken()), expected);
}

#[tokio::test]
async fn a_hung_endpoint_delays_neither_the_sender_nor_the_other_endpoint() {
    let counts = Counts::new();
    let slack = Receiver::new([Reply::Hang]).await;
    let webhook = Receiver::new([]).await;
    let alerter = start(&config(Some(&slack), Some(&webhook)));
    alerter.send(failed("first"));
    slack.until_requests(1, SOON).await;
    webhook.until_requests(1, SOON).await;
    let began = Instant::now();
    for id in 0..10_000 {
        alerter.send(dead(id));
    }
    for number in 0..150 {
        alerter.send(failed(number));
    }
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    // Nothing ran meanwhile, so both mailboxes took the same; only the other one gets rid of it.
    webhook.until_requests(101, SOON).await;
    assert_eq!(slack.requests().len(), 1);
    assert_eq!(reasons(&webhook.taken()[100..]), ["149"]);
    // The dead letters and the first fifty were the oldest.
    counts.until("slack", 0, 10_050).await;
    counts.until("webhook", 101, 10_050).await;
}

#[tokio::test]
async fn dead_letters_that_wait_together_are_one_message() {
    let counts = Counts::new();
    let slack = Receiver::new([Reply::Hold]).await;
    let webhook = Receiver::new([Reply::Hold]).await;
    let alerter = start(&config(Some(&slack), Some(&webhook)));
    alerter.send(dead(1));
    slack.until_requests(1, SOON).await;
    webhook.until_requests(1, SOON).await;
    for id in 2..=9 {
        alerter.send(dead(id));
    }
    slack.release();
    webhook.release();
    alerter.flush(SOON).await;
    let taken = webhook.taken();
    assert_eq!(taken.len(), 2);
    assert_eq!(taken[0]["events"].as_array().unwrap().len(), 1);
    assert_eq!(taken[0]["more"], 0);
    let ids: Vec<_> = taken[1]["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["id"].as_i64().unwrap())
        .collect();
    assert_eq!(ids, [2, 3, 4, 5, 6]);
    assert_eq!(taken[1]["more"], 3);
    let taken = slack.taken();
    assert_eq!(taken.len(), 2);
    let text = taken[1]["text"].as_str().unwrap();
    for id in 2..=6 {
        assert!(
            text.contains(&format!("Outbox event {id} (order ORD-{id}, ")),
            "{text}"
        );
    }
    assert!(
        text.contains("and 3 more events were dead-lettered: bellwire dead list"),
        "{text}"
    );
    counts.until("slack", 9, 0).await;
    counts.until("webhook", 9, 0).await;
}

#[tokio::test]
async fn what_is_refused_for_good_is_given_up_and_does_not_stop_the_next() {
    let counts = Counts::new();
    let (log, _guard) = Log::new();
    let elsewhere = Receiver::new([]).await;
    let location: &'static str =
        Box::leak(format!("Location: {}\r\n", elsewhere.url("/S3cr3t")).into_boxed_str());
    let moved = Reply::Refused("302 Found", location, "");
    let receiver = Receiver::new([GONE, moved]).await;
    let alerter = start(&config(Some(&receiver), None));
    for number in 0..3 {
        alerter.send(failed(number));
    }
    alerter.flush(SOON).await;
    assert_eq!(receiver.requests().len(), 3);
    assert_eq!(receiver.taken().len(), 1);
    assert!(elsewhere.requests().is_empty(), "a redirect was followed");
    counts.until("slack", 1, 2).await;
    let log = log.text();
    assert!(log.contains("404 Not Found (no_service)"), "{log}");
    assert!(log.contains("redirects are not followed"), "{log}");
}

#[tokio::test]
async fn an_alert_too_old_is_given_up_and_the_next_is_tried() {
    let counts = Counts::new();
    let receiver = Receiver::new([FAILED, FAILED]).await;
    let alerter = start(&AlertsConfig {
        // Longer than the first pause, shorter than that and the second.
        give_up_after: Duration::from_secs(2),
        ..config(None, Some(&receiver))
    });
    alerter.send(failed("old"));
    alerter.send(failed("new"));
    receiver.until_requests(3, SOON).await;
    alerter.flush(SOON).await;
    assert_eq!(reasons(&receiver.taken()), ["new"]);
    assert_eq!(receiver.requests().len(), 3);
    counts.until("webhook", 1, 1).await;
}

#[tokio::test]
async fn no_secret_is_logged_whatever_goes_wrong() {
    let (log, _guard) = Log::new();
    let echo = Reply::Refused(
        "403 Forbidden",
        "",
        "token-S3cr3t is not allowed on /T1/S3cr3t",
    );
    let script = [Reply::Hang, Reply::Close, FAILED, echo];
    let slack = Receiver::new(script.clone()).await;
    let webhook = Receiver::new(script).await;
    let short = AlertsConfig {
        timeout: Duration::from_millis(200),
        ..config(Some(&slack), Some(&webhook))
    };
    let alerter = start(&short);
    alerter.send(failed("disk full"));
    alerter.flush(SOON).await;
    // A name that does not resolve, a port that refuses, a server that speaks no TLS.
    let nowhere = |url: String| AlertsConfig {
        timeout: Duration::from_secs(2),
        slack_url: Some(url.as_str().into()),
        give_up_after: Duration::ZERO,
        ..AlertsConfig::default()
    };
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let refusing = closed.local_addr().unwrap();
    drop(closed);
    for url in [
        "https://no-such-host.invalid/S3cr3t".to_owned(),
        format!("http://{refusing}/S3cr3t"),
        format!("https://user:S3cr3t@127.0.0.1:{}/S3cr3t", slack.port),
    ] {
        let alerter = start(&nowhere(url));
        alerter.send(failed("disk full"));
        alerter.flush(SOON).await;
    }
    let log = log.text();
    assert_eq!(log.matches("alert not delivered").count(), 5, "{log}");
    assert!(log.contains("403 Forbidden"), "{log}");
    assert!(log.contains("refused"), "{log}");
    assert!(!log.contains(SECRET), "{log}");
    assert!(!format!("{short:?}").contains(SECRET), "{short:?}");
}

#[tokio::test]
async fn flush_waits_for_what_can_be_delivered_and_no_longer_than_told() {
    let (log, _guard) = Log::new();
    let slack = Receiver::new([Reply::Hang]).await;
    let webhook = Receiver::new([FAILED, FAILED, FAILED]).await;
    let alerter = start(&config(Some(&slack), Some(&webhook)));
    alerter.send(failed("first"));
    alerter.send(failed("second"));
    let began = Instant::now();
    alerter.flush(Duration::from_secs(6)).await;
    assert!(began.elapsed() >= Duration::from_secs(6));
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}",
        began.elapsed()
    );
    // Its own pauses would have taken seven seconds.
    assert_eq!(reasons(&webhook.taken()), ["first", "second"]);
    assert!(
        log.text().contains("endpoint=\"slack\" messages=2"),
        "{}",
        log.text()
    );

    let began = Instant::now();
    start(&AlertsConfig::default()).flush(SOON).await;
    start(&config(Some(&slack), None)).flush(SOON).await;
    assert!(began.elapsed() < Duration::from_secs(5), "nothing waits");
}

#[tokio::test]
async fn alerts_without_an_endpoint_go_nowhere() {
    let counts = Counts::new();
    let alerter = start(&AlertsConfig::default());
    for id in 0..1_000 {
        alerter.send(dead(id));
    }
    alerter.flush(SOON).await;
    assert!(!counts.handle.render().contains("alerts"));
}

#[test]
fn https_can_be_set_up() {
    let config = AlertsConfig {
        slack_url: Some("https://hooks.slack.com/services/T1/S3cr3t".into()),
        webhook_url: Some("https://alerts.example/".into()),
        ..AlertsConfig::default()
    };
    assert_eq!(
        bellwire::alert::endpoints(&config).unwrap(),
        ["slack", "webhook"]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_the_endpoints_and_sends_nothing() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let settings = [
        ("alerts.slack_url", receiver.url("/services/T1/S3cr3t")),
        ("alerts.webhook_url", receiver.url("/hook")),
        ("alerts.webhook_token", "token-S3cr3t".to_owned()),
    ];
    let settings: Vec<_> = settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    let run = world.command(&settings, &["check"]).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    assert!(
        run.stdout
            .contains("ok   alerts         would go to slack and webhook;"),
        "{}",
        run.stdout
    );
    assert!(!run.stdout.contains(SECRET) && !run.stderr.contains(SECRET));
    assert!(receiver.requests().is_empty());
    world.clean().await;
}
