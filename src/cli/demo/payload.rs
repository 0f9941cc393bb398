//! Events of a shop: payloads of the size and shape that applications write.

#![expect(
    clippy::indexing_slicing,
    reason = "below the length of lists that are not empty"
)]

use std::time::SystemTime;

use serde::Serialize;
use serde_json::value::RawValue;

/// In the body of an event that must never be delivered, as `jsonb` prints it.
pub(super) const ROLLED_BACK: &str = "\"rolled_back\": true";

/// Aggregate types, the prefix of their ids, and what happens to them.
const TYPES: [(&str, &str, &[&str]); 4] = [
    (
        "order",
        "ORD",
        &["OrderPlaced", "OrderPaid", "OrderAmended", "OrderCancelled"],
    ),
    (
        "payment",
        "PAY",
        &["PaymentAuthorised", "PaymentCaptured", "PaymentRefunded"],
    ),
    (
        "customer",
        "CUS",
        &["CustomerRegistered", "AddressChanged", "ConsentWithdrawn"],
    ),
    (
        "shipment",
        "SHP",
        &["ShipmentPacked", "ShipmentDispatched", "ShipmentDelivered"],
    ),
];
const CUSTOMERS: [&str; 6] = [
    "Zoë Lindqvist",
    "Jürgen Müller",
    "Nguyễn Thị Hà",
    "山田 太郎",
    "Łukasz Wójcik",
    "Siobhán O’Connor",
];
const STREETS: [&str; 4] = [
    "Königsallee 12",
    "Rue de l’Église 7 bis",
    "Åsögatan 101",
    "ул. Пушкина, д. 4",
];
const CITIES: [&str; 4] = ["Düsseldorf", "Besançon", "Göteborg", "Kraków"];
const PRODUCTS: [&str; 5] = [
    "Espresso cups, set of 6 ☕",
    "Desk lamp “Föhr”",
    "Crème brûlée torch",
    "木製まな板",
    "Notebook A5\tdotted",
];

/// All of them.
pub(super) fn aggregate_types() -> impl Iterator<Item = &'static str> {
    TYPES.iter().map(|(aggregate_type, ..)| *aggregate_type)
}

/// What a writer inserts.
#[derive(Clone, Debug)]
pub(super) struct NewEvent {
    pub(super) aggregate_type: &'static str,
    pub(super) aggregate_id: String,
    pub(super) event_type: &'static str,
    pub(super) payload: String,
}

#[derive(Serialize)]
struct Payload<'a> {
    #[serde(flatten)]
    body: Body<'a>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    rolled_back: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Order {
        order_id: &'a str,
        placed_at: String,
        customer: Customer,
        shipping_address: Address,
        lines: Vec<Line>,
        total: Box<RawValue>,
        currency: &'static str,
        note: Option<&'static str>,
    },
    Payment {
        payment_id: &'a str,
        order_id: String,
        amount: Box<RawValue>,
        fee: Box<RawValue>,
        currency: &'static str,
        exchange_rate: f64,
        card: Card,
        captured_at: String,
    },
    Customer {
        customer_id: &'a str,
        #[serde(flatten)]
        customer: Customer,
        addresses: Vec<Address>,
        balance: Box<RawValue>,
        consents: [&'static str; 2],
        changed_at: String,
    },
    Shipment {
        shipment_id: &'a str,
        order_id: String,
        carrier: &'static str,
        tracking: Option<String>,
        weight_kg: Box<RawValue>,
        address: Address,
        items: Vec<Line>,
        dispatched_at: String,
    },
}

#[derive(Serialize)]
struct Customer {
    name: &'static str,
    email: String,
    vip: bool,
}

#[derive(Serialize)]
struct Address {
    street: &'static str,
    city: &'static str,
    postcode: String,
    country: &'static str,
}

#[derive(Serialize)]
struct Line {
    sku: String,
    name: &'static str,
    quantity: u32,
    unit_price: Box<RawValue>,
}

#[derive(Serialize)]
struct Card {
    brand: &'static str,
    last4: String,
}

/// An event of the aggregate with this number.
pub(super) fn event(aggregate: u32, rolled_back: bool) -> NewEvent {
    let (aggregate_type, prefix, event_types) = TYPES[aggregate as usize % TYPES.len()];
    let aggregate_id = format!("{prefix}-{}", 10_000 + aggregate);
    let body = body(aggregate_type, &aggregate_id);
    let payload = serde_json::to_string(&Payload { body, rolled_back });
    NewEvent {
        aggregate_type,
        event_type: pick(event_types),
        payload: payload.expect("strings, numbers and lists are JSON"),
        aggregate_id,
    }
}

fn body<'a>(aggregate_type: &str, id: &'a str) -> Body<'a> {
    let now = || humantime::format_rfc3339_micros(SystemTime::now()).to_string();
    let order_id = || format!("ORD-{}", number(10_000..99_999));
    match aggregate_type {
        "order" => order(id, now()),
        "payment" => Body::Payment {
            payment_id: id,
            order_id: order_id(),
            amount: money(number(100..500_000)),
            fee: money(number(1..900)),
            currency: "EUR",
            exchange_rate: 1.083_417,
            card: Card {
                brand: "Visa",
                last4: format!("{:04}", number(0..10_000)),
            },
            captured_at: now(),
        },
        "customer" => Body::Customer {
            customer_id: id,
            customer: customer(),
            addresses: vec![address(), address()],
            balance: money(number(0..100_000)),
            consents: ["newsletter", "analytics"],
            changed_at: now(),
        },
        _ => Body::Shipment {
            shipment_id: id,
            order_id: order_id(),
            carrier: "PostNord",
            tracking: rand::random_bool(0.8).then(|| format!("{:020}", rand::random::<u64>())),
            weight_kg: money(number(5..3_000)),
            address: address(),
            items: lines(),
            dispatched_at: now(),
        },
    }
}

fn order(order_id: &str, placed_at: String) -> Body<'_> {
    Body::Order {
        order_id,
        placed_at,
        customer: customer(),
        shipping_address: address(),
        lines: lines(),
        total: money(number(500..900_000)),
        currency: "EUR",
        note: rand::random_bool(0.3)
            .then_some("Please ring twice – \"the bell\" is broken\nMerci ! 🎁"),
    }
}

fn customer() -> Customer {
    let name = pick(&CUSTOMERS);
    let email = format!("customer{}@example.org", number(1..100_000));
    Customer {
        name,
        email,
        vip: rand::random_bool(0.1),
    }
}

fn address() -> Address {
    let postcode = format!("{:05}", number(0..100_000));
    Address {
        street: pick(&STREETS),
        city: pick(&CITIES),
        postcode,
        country: "DE",
    }
}

fn lines() -> Vec<Line> {
    let line = |_| Line {
        sku: format!("SKU-{:06}", number(0..1_000_000)),
        name: pick(&PRODUCTS),
        quantity: number(1..12),
        unit_price: money(number(99..50_000)),
    };
    (0..number(1..5)).map(line).collect()
}

fn number(range: std::ops::Range<u32>) -> u32 {
    rand::random_range(range)
}

fn pick<T: Copy>(list: &[T]) -> T {
    list[rand::random_range(0..list.len())]
}

/// A number with both its decimals: `129.90`, which `jsonb` keeps and a float would not.
fn money(cents: u32) -> Box<RawValue> {
    let text = format!("{}.{:02}", cents / 100, cents % 100);
    RawValue::from_string(text).expect("digits around a point are JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_payload_is_an_object_and_says_whether_it_was_rolled_back() {
        for aggregate in 0..40 {
            for rolled_back in [false, true] {
                let event = event(aggregate, rolled_back);
                let body: serde_json::Value = serde_json::from_str(&event.payload).unwrap();
                let mark = body.get("rolled_back").and_then(serde_json::Value::as_bool);
                assert_eq!(mark, rolled_back.then_some(true));
            }
        }
    }

    #[test]
    fn money_keeps_its_decimals() {
        assert_eq!(money(12_990).get(), "129.90");
        assert_eq!(money(5).get(), "0.05");
    }
}
