use std::time::Duration;

use super::*;

fn event(aggregate_type: &str, event_type: &str) -> OutboxEvent {
    OutboxEvent::sample(1, (aggregate_type, "7"), event_type)
}

fn token() -> Arc<ClaimToken> {
    let token = ClaimToken::new(1, "t".into());
    token.renewed(ClaimToken::now(), Duration::from_secs(60));
    Arc::new(token)
}

fn route(aggregate_type: &str, event_type: &str, destination: &str) -> RouteConfig {
    RouteConfig {
        aggregate_type: aggregate_type.into(),
        event_type: event_type.into(),
        destination: Some(destination.into()),
        ..RouteConfig::default()
    }
}

fn goes_to(router: &Router, aggregate_type: &str, event_type: &str) -> String {
    let delivery = router.deliver(event(aggregate_type, event_type), &token());
    delivery.address.destination.to_string()
}

#[test]
fn the_first_route_that_matches_decides_and_the_rest_takes_the_default() {
    let routes = [
        route("order", "Cancelled", "cancellations"),
        route("order", "*", "orders"),
        route("in*e", "*Paid*", "billing"),
    ];
    let router = Router::new(&routes, "events").unwrap();
    assert_eq!(goes_to(&router, "order", "Cancelled"), "cancellations");
    assert_eq!(goes_to(&router, "order", "Placed"), "orders");
    assert_eq!(goes_to(&router, "invoice", "WasPaidLate"), "billing");
    assert_eq!(goes_to(&router, "invoice", "Sent"), "events");
    assert_eq!(goes_to(&router, "orders", "Cancelled"), "events");
    assert!(!router.is_sole());
    assert_eq!(
        router
            .destinations()
            .0
            .iter()
            .map(AsRef::as_ref)
            .collect::<Vec<&str>>(),
        ["billing", "cancellations", "events", "orders"]
    );
}

#[test]
fn names_are_filled_in_from_the_event() {
    let routes = [RouteConfig {
        destination: Some("{aggregate_type}-events".into()),
        routing_key: Some("v1.{event_type}.{aggregate_id}".into()),
        publish_to: Some("dead-{aggregate_type}".into()),
        on_dead: OnDead::Skip,
        ..RouteConfig::default()
    }];
    let router = Router::new(&routes, "events").unwrap();
    let delivery = router.deliver(event("order", "Placed"), &token());
    assert_eq!(&*delivery.address.destination, "order-events");
    assert_eq!(delivery.address.key.as_deref(), Some("v1.Placed.7"));
    let filled = delivery
        .route
        .filled_into_key(&delivery.address, &delivery.event);
    assert_eq!(filled, [("event_type", "Placed"), ("aggregate_id", "7")]);
    let letter = delivery.route.letter_address(&delivery.event).unwrap();
    assert_eq!(&*letter.destination, "dead-order");
    assert!(!delivery.route.holds());
    assert!(!router.is_fixed());
}

#[test]
fn a_route_for_everything_replaces_the_default() {
    let router = Router::new(&[route("*", "*", "orders")], "events").unwrap();
    assert!(router.is_sole());
    assert_eq!(router.destinations().0, ["orders".into()]);
    assert!(Router::new(&[], "{odd} but literal").unwrap().is_sole());
}

#[test]
fn a_template_that_is_wrong_names_its_key() {
    for (text, said) in [("{tenant}", "{tenant}"), ("a{b", "without"), ("", "empty")] {
        let error = Router::new(&[route("*", "*", text)], "events").unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("routes[0].destination: "), "{error}");
        assert!(error.contains(said), "{error}");
    }
}

fn also(sink: Option<SinkSetting>, destination: Option<&str>) -> AlsoConfig {
    AlsoConfig {
        sink,
        destination: destination.map(Into::into),
        ..AlsoConfig::default()
    }
}

fn of_several(routes: &[RouteConfig]) -> Result<Router, ConfigError> {
    Router::of(routes, SinkSetting::Rabbitmq, |sink| {
        Ok(match sink {
            SinkSetting::Kafka => Unless::ByAggregateType("events"),
            SinkSetting::Jetstream => Unless::Named("EVENTS"),
            SinkSetting::Rabbitmq | SinkSetting::Null => Unless::Named("events"),
        })
    })
}

fn places(router: &Router, aggregate_type: &str) -> Vec<String> {
    let delivery = router.deliver(event(aggregate_type, "Placed"), &token());
    delivery
        .addresses()
        .map(|address| {
            let sink = address.sink.as_deref().unwrap_or_default();
            assert_eq!(*address.destination, format!("{sink}:{}", address.name()));
            address.destination.to_string()
        })
        .collect()
}

#[test]
fn routes_choose_among_sinks_and_each_has_its_own_defaults() {
    let mut orders = route("order", "*", "orders");
    orders.also = vec![
        also(Some(SinkSetting::Kafka), None),
        also(None, Some("audit:{aggregate_type}")),
        also(Some(SinkSetting::Jetstream), None),
    ];
    orders.also[1].routing_key = Some("all.{aggregate_id}".into());
    orders.publish_to = Some("dead".into());
    let invoices = RouteConfig {
        sink: Some(SinkSetting::Kafka),
        ..route("invoice", "*", "billing")
    };
    let router = of_several(&[orders, invoices]).unwrap();
    let all = [
        "rabbitmq:orders",
        "kafka:events.order",
        "rabbitmq:audit:order",
        "jetstream:EVENTS",
    ];
    assert_eq!(places(&router, "order"), all);
    assert_eq!(places(&router, "invoice"), ["kafka:billing"]);
    assert_eq!(places(&router, "parcel"), ["rabbitmq:events"]);
    let delivery = router.deliver(event("order", "Placed"), &token());
    let audit = &delivery.also[1];
    assert_eq!(audit.key.as_deref(), Some("all.7"));
    let filled = delivery.route.filled_into_key(audit, &delivery.event);
    assert_eq!(filled, [("aggregate_id", "7")]);
    let own = &delivery.address;
    assert!(
        delivery
            .route
            .filled_into_key(own, &delivery.event)
            .is_empty()
    );
    let letter = delivery.route.letter_address(&delivery.event).unwrap();
    assert_eq!(
        (&*letter.destination, letter.name()),
        ("rabbitmq:dead", "dead")
    );
    let (primary, letters) = router.destinations();
    let known = [
        "jetstream:EVENTS",
        "kafka:billing",
        "rabbitmq:events",
        "rabbitmq:orders",
    ];
    assert_eq!(primary, known.map(Arc::from));
    assert_eq!(letters, ["rabbitmq:dead".into()]);
    assert!(!router.is_fixed() && !router.is_sole());
    assert!(router.has_keys(SinkSetting::Rabbitmq));
    assert!(!router.has_keys(SinkSetting::Kafka));
}

#[test]
fn names_of_destinations_stay_as_they_are_while_there_is_one_sink_and_one_place() {
    let kafka = RouteConfig {
        sink: Some(SinkSetting::Kafka),
        ..route("*", "*", "all:events")
    };
    let router = of_several(&[kafka]).unwrap();
    let delivery = router.deliver(event("order", "Placed"), &token());
    let address = &delivery.address;
    assert_eq!(
        (&*address.destination, address.name()),
        ("all:events", "all:events")
    );
    assert!(address.sink.is_none() && delivery.also.is_empty());
}

#[test]
fn a_place_that_a_route_has_already_is_refused_and_named() {
    let nats = Some(SinkSetting::Jetstream);
    for (mut places, wrong) in [
        (vec![also(None, Some("orders"))], Some((0, "has already"))),
        (
            vec![also(None, Some("audit")), also(None, Some("audit"))],
            Some((1, "has already")),
        ),
        (vec![also(None, Some("audit")), also(None, None)], None),
        (
            vec![also(nats, None), also(nats, Some("EVENTS"))],
            Some((1, "has already")),
        ),
        (
            vec![also(nats, None), also(nats, Some("{event_type}"))],
            Some((1, "as a repeat")),
        ),
        (vec![also(nats, None), also(nats, Some("AUDIT"))], None),
    ] {
        let mut orders = route("order", "*", "orders");
        orders.also.append(&mut places);
        let refused = of_several(&[orders]).err().map(|error| error.to_string());
        match (refused, wrong) {
            (None, None) => {}
            (Some(error), Some((number, said))) => {
                let key = format!("routes[0].also[{number}]: ");
                assert!(error.starts_with(&key) && error.contains(said), "{error}");
            }
            (refused, wrong) => panic!("{refused:?}, but {wrong:?} is right"),
        }
    }
    // Two subjects of one stream are one message, too.
    let mut orders = route("order", "*", "EVENTS");
    orders.sink = nats;
    orders.also = vec![also(nats, None)];
    orders.also[0].routing_key = Some("copy".into());
    let error = of_several(&[orders]).unwrap_err().to_string();
    assert!(error.contains("as a repeat"), "{error}");
}

#[test]
fn a_template_of_a_further_place_that_is_wrong_names_its_key() {
    let mut orders = route("order", "*", "orders");
    orders.also = vec![also(None, Some("audit")), also(None, Some("{tenant}"))];
    let error = of_several(&[orders.clone()]).unwrap_err().to_string();
    assert!(
        error.starts_with("routes[0].also[1].destination: "),
        "{error}"
    );
    orders.also[1] = also(None, Some("other"));
    orders.also[1].routing_key = Some("a{b".into());
    let error = of_several(&[orders]).unwrap_err().to_string();
    assert!(
        error.starts_with("routes[0].also[1].routing_key: "),
        "{error}"
    );
}
