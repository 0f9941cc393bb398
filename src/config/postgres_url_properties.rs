//! What holds of connection strings, whatever the password is.

use std::str::FromStr as _;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::prelude::*;

use super::*;
use crate::properties;

const MODES: [(&str, SslMode); 6] = [
    ("disable", SslMode::Disable),
    ("allow", SslMode::Allow),
    ("prefer", SslMode::Prefer),
    ("require", SslMode::Require),
    ("verify-ca", SslMode::VerifyCa),
    ("verify-full", SslMode::VerifyFull),
];

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// In libpq's quotes.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'"))
}

fn assert_driver(driver: &str, user: &str, password: &str, name: &str) {
    let driver = tokio_postgres::Config::from_str(driver).unwrap();
    assert_eq!(driver.get_user(), Some(user), "user");
    assert_eq!(driver.get_password(), Some(password.as_bytes()), "password");
    assert_eq!(
        driver.get_application_name(),
        Some(name),
        "application_name"
    );
    assert_eq!(driver.get_dbname(), Some("d"));
}

/// Of a password, the name of an application, and a path.
fn values() -> impl Strategy<Value = [String; 3]> {
    [
        properties::texts(),
        properties::texts(),
        properties::texts(),
    ]
}

#[test]
fn a_url_gives_the_driver_the_password_as_it_was_and_us_what_is_said_of_tls() {
    let places = (proptest::sample::select(MODES.to_vec()), 0..4_usize);
    properties::hold(
        &(values(), places),
        |([password, name, path], ((word, mode), place))| {
            let mut parameters = vec![
                format!("application_name={}", encoded(&name)),
                format!("sslrootcert={}", encoded(&path)),
                "connect_timeout=3".to_owned(),
            ];
            parameters.insert(place, format!("sslmode={word}"));
            let password_encoded = encoded(&password);
            let text = format!(
                "postgres://u:{password_encoded}@h:1/d?{}",
                parameters.join("&")
            );
            let parted = PostgresUrl::parse(&text).unwrap();
            assert_eq!(parted.mode, Some(mode));
            assert_eq!(parted.root_certificate.as_deref().unwrap_or_default(), path);
            assert_driver(&parted.driver, "u", &password, &name);
        },
    );
}

#[test]
fn pairs_give_the_driver_the_password_as_it_was_and_us_what_is_said_of_tls() {
    let spaces = proptest::sample::select(vec!["", " ", "\t"]);
    let places = (proptest::sample::select(MODES.to_vec()), 0..4_usize, spaces);
    properties::hold(
        &(values(), places),
        |([password, name, path], ((word, mode), place, space))| {
            let mut pairs = vec![
                format!(
                    "host=h user=u dbname=d password{space}={space}{}",
                    quoted(&password)
                ),
                format!("application_name={}", quoted(&name)),
                format!("sslrootcert={}", quoted(&path)),
            ];
            pairs.insert(place, format!("sslmode{space}={space}{word}"));
            let parted = PostgresUrl::parse(&pairs.join(" ")).unwrap();
            assert_eq!(parted.mode, Some(mode));
            assert_eq!(parted.root_certificate.as_deref().unwrap_or_default(), path);
            assert_driver(&parted.driver, "u", &password, &name);
        },
    );
}
