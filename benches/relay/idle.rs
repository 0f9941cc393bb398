//! What a relay does to a database and a processor while there is nothing to do.

use std::time::{Duration, Instant};

use crate::options::{Options, Sink};
use crate::process::Relay;
use crate::proxy::Proxy;
use crate::report::{Report, Target};
use crate::world::{World, variable};

/// What is measured.
const SPAN: Duration = Duration::from_secs(60);
const QUICK_SPAN: Duration = Duration::from_secs(6);
/// What a relay does at its start is over when it has said nothing for so long: shorter than its tick.
const SETTLED: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let span = options.sized(SPAN, QUICK_SPAN);
    println!("idle: {} s", span.as_secs());
    let world = World::new("idle").await;
    let proxy = Proxy::new(&variable("DATABASE_URL"), Duration::ZERO).await;
    let mut url = proxy.url();
    // Within TLS nothing can be counted; of two values of a parameter the last one is taken.
    url.query_pairs_mut().append_pair("sslmode", "disable");
    let relay = Relay::of(&world, options, Sink::Classic)
        .set("DATABASE_URL", url.as_str())
        .start();
    relay.until_ready(&world).await;
    settle(&proxy).await;
    let (statements, processor) = (proxy.statements(), relay.processor_time());
    let began = Instant::now();
    tokio::time::sleep(span).await;
    let took = began.elapsed().as_secs_f64();
    let statements = u32::try_from(proxy.statements() - statements).expect("a relay is idle");
    let processor = relay.processor_time().saturating_sub(processor);
    relay.stop().await;
    world.clean().await;
    report.absolute(
        "idle_statements_per_minute",
        "statements",
        Target::AtMost(15.0),
        vec![f64::from(statements) / took * 60.0],
    );
    report.absolute(
        "idle_cpu_percent",
        "% of one processor",
        Target::AtMost(0.5),
        vec![processor.as_secs_f64() / took * 100.0],
    );
}

async fn settle(proxy: &Proxy) {
    let began = Instant::now();
    let mut before = 0;
    while proxy.statements() != before && began.elapsed() < PATIENCE {
        before = proxy.statements();
        tokio::time::sleep(SETTLED).await;
    }
    assert!(before > 0, "the relay talks through the proxy");
}
