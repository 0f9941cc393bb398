//! A web service that writes an order and its event in one transaction.
//!
//! ```sh
//! export DATABASE_URL=postgres://localhost/shop
//! bellwire migrate
//! cargo run --example order_service
//! curl -i -X POST http://127.0.0.1:8080/orders -H 'content-type: application/json' \
//!     -d '{"id": "ORD-10492", "total_cents": 14950}'
//! ```
//!
//! A relay (`bellwire run`, or `cargo run --example embedded_relay`) carries the events from there.

use actix_web::error::{ErrorConflict, ErrorInternalServerError, ErrorUnprocessableEntity};
use actix_web::{App, HttpResponse, HttpServer, web};
use bellwire::outbox::{NewEvent, Outbox, OutboxError, OutboxSettings};
use deadpool_postgres::{Manager, Pool};
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;
use tokio_postgres::error::SqlState;

const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, total_cents bigint NOT NULL)";

/// What the handlers work with.
pub struct Service {
    pool: Pool,
    outbox: Outbox,
}

impl Service {
    /// Finds the outbox, and makes the table of orders.
    pub async fn new(pool: Pool, settings: OutboxSettings) -> anyhow::Result<Self> {
        let client = pool.get().await?;
        client.batch_execute(TABLE).await?;
        let outbox = Outbox::open(&client, settings).await?;
        Ok(Self { pool, outbox })
    }
}

#[derive(Deserialize)]
struct Order {
    id: String,
    total_cents: i64,
}

#[derive(Serialize)]
struct OrderPlaced<'a> {
    order_id: &'a str,
    total_cents: i64,
}

#[derive(Serialize)]
struct Placed {
    event_id: i64,
}

/// State and event: both are committed, or neither is.
async fn place(
    service: web::Data<Service>,
    order: web::Json<Order>,
) -> actix_web::Result<HttpResponse> {
    let mut client = service.pool.get().await.map_err(ErrorInternalServerError)?;
    let transaction = client
        .transaction()
        .await
        .map_err(ErrorInternalServerError)?;
    transaction
        .execute(
            "INSERT INTO orders (id, total_cents) VALUES ($1, $2)",
            &[&order.id, &order.total_cents],
        )
        .await
        .map_err(|error| match error.code() {
            Some(&SqlState::UNIQUE_VIOLATION) => ErrorConflict("there is an order of this id"),
            _ => ErrorInternalServerError(error),
        })?;
    let body = OrderPlaced {
        order_id: &order.id,
        total_cents: order.total_cents,
    };
    let event =
        NewEvent::of("order", &order.id, "OrderPlaced", &body).map_err(ErrorInternalServerError)?;
    let published = service.outbox.publish(&transaction, &event).await;
    // Returning early drops the transaction, which rolls back the order.
    let id = published.map_err(|error| match error {
        OutboxError::Event(_) | OutboxError::TooLarge(_) => ErrorUnprocessableEntity(error),
        error => ErrorInternalServerError(error),
    })?;
    transaction
        .commit()
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Created().json(Placed { event_id: id.0 }))
}

/// The service's routes.
pub fn routes(config: &mut web::ServiceConfig) {
    config.route("/orders", web::post().to(place));
}

#[actix_web::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL")?;
    let manager = Manager::new(url.parse()?, NoTls);
    let pool = Pool::builder(manager).build()?;
    let service = web::Data::new(Service::new(pool, OutboxSettings::default()).await?);
    HttpServer::new(move || App::new().app_data(service.clone()).configure(routes))
        .bind(("127.0.0.1", 8080))?
        .run()
        .await?;
    Ok(())
}
