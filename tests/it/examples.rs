//! The examples do what they say.

use actix_web::{App, test, web};
use bellwire::outbox::OutboxSettings;
use deadpool_postgres::{Manager, Pool};
use serde_json::{Value, json};
use tokio_postgres::NoTls;

use crate::support::{SOON, World, database_url};

#[path = "../../examples/order_service.rs"]
mod order_service;

use order_service::{Service, routes};

#[actix_web::test]
async fn the_order_service_commits_an_order_and_its_event_or_neither() {
    let mut world = World::new().await;
    let mut driver: tokio_postgres::Config = database_url().parse().unwrap();
    driver.options(format!("-c search_path={}", world.schema));
    let pool = Pool::builder(Manager::new(driver, NoTls)).build().unwrap();
    let settings = OutboxSettings {
        schema: world.schema.clone(),
        max_payload_bytes: Some(200),
        ..OutboxSettings::default()
    };
    let service = web::Data::new(Service::new(pool, settings).await.unwrap());
    let app = test::init_service(App::new().app_data(service).configure(routes)).await;
    let long = "x".repeat(300);
    for (id, status) in [
        ("ORD-1", 201),
        ("ORD-1", 409),
        (&long, 422),
        ("", 422),
        ("ORD-2", 201),
    ] {
        let request = test::TestRequest::post()
            .uri("/orders")
            .set_json(json!({ "id": id, "total_cents": 14_950 }))
            .to_request();
        let response = test::call_service(&app, request).await;
        assert_eq!(response.status(), status, "{id}");
    }
    let orders: String = world
        .one("SELECT string_agg(id, ',' ORDER BY id) FROM orders")
        .await;
    assert_eq!(orders, "ORD-1,ORD-2");
    let _relay = world.ready_relay(&[]).await;
    let mut arrivals = world.arrivals(2, SOON).await;
    arrivals.sort_by_key(|arrival| arrival.id);
    for (arrival, id) in arrivals.iter().zip(["ORD-1", "ORD-2"]) {
        assert_eq!(arrival.aggregate, ("order".into(), id.into()));
        let body: Value = serde_json::from_slice(&arrival.body).unwrap();
        assert_eq!(body, json!({ "order_id": id, "total_cents": 14_950 }));
    }
    world.clean().await;
}
