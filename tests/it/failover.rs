//! When the database is to be found elsewhere, the relay finds it.

use std::time::Duration;

use crate::support::{Ledger, Proxy, SOON, World, database_url};

/// `host:port` of this URL.
fn host(url: &str) -> String {
    let url = url::Url::parse(url).unwrap();
    format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_url_with_several_hosts_leads_to_the_one_that_takes_writes() {
    let mut world = World::new().await;
    let first = Proxy::new(&database_url()).await;
    let second = Proxy::new(&database_url()).await;
    second.refuse(true);
    let through = first.through(&database_url());
    let hosts = format!("{},{}", host(&through), host(&second.through(&through)));
    let mut url = url::Url::parse(&through).unwrap();
    url.query_pairs_mut()
        .append_pair("target_session_attrs", "read-write");
    let url = url.as_str().replace(&host(&through), &hosts);
    let relay = world.ready_relay(&[("DATABASE_URL", &url)]).await;
    world.fill("order", 10, 5).await;
    let mut arrivals = world.arrivals(50, SOON).await;
    world.until_published(SOON).await;
    for (gone, instead) in [(&first, &second), (&second, &first)] {
        instead.refuse(false);
        gone.refuse(true);
        gone.cut();
        world.fill("order", 10, 5).await;
        // Far below the lease of a token that nobody gave up: its session's lock is gone at once.
        arrivals.extend(world.arrivals(50, Duration::from_secs(8)).await);
        world.until_published(SOON).await;
    }
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0, "{}", relay.log());
    world.clean().await;
}
