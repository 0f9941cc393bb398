//! What a PostgreSQL connection string says of TLS, in libpq's words. The driver knows only half of
//! them, so they are taken out of what it gets.

use url::form_urlencoded;

/// `sslmode`, with libpq's meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SslMode {
    /// Never TLS.
    Disable,
    /// TLS where the server insists on it.
    Allow,
    /// TLS where the server has it.
    Prefer,
    /// TLS; the server's certificate is verified, but for its name, if there is a CA to do it by.
    Require,
    /// TLS, signed by a CA that we trust.
    VerifyCa,
    /// TLS, signed by a CA that we trust for the name we connect to.
    VerifyFull,
}

impl SslMode {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "disable" => Self::Disable,
            "allow" => Self::Allow,
            "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => return None,
        })
    }
}

/// A connection string, taken apart.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PostgresUrl {
    /// What is left, for the driver.
    pub(super) driver: String,
    pub(super) mode: Option<SslMode>,
    pub(super) root_certificate: Option<String>,
    pub(super) certificate: Option<String>,
    pub(super) key: Option<String>,
}

/// Parameters of libpq's on TLS that neither we nor the driver know. To drop them silently would be
/// less security than was asked for.
const UNSUPPORTED: &[&str] = &[
    "sslcertmode",
    "sslcompression",
    "sslcrl",
    "sslcrldir",
    "sslpassword",
    "sslsni",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "requiressl",
    "gssencmode",
];

impl PostgresUrl {
    /// Takes a URL or a `key=value` string apart. What is no connection string is the driver's to
    /// refuse.
    ///
    /// # Errors
    /// Says what is wrong with a parameter on TLS; shows no value.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            Self::parse_url(text)
        } else {
            Self::parse_pairs(text)
        }
    }

    fn parse_url(text: &str) -> Result<Self, String> {
        // As the driver reads it: a question mark in the password begins no parameters.
        let after_credentials = text.find('@').map_or(0, |at| at + 1);
        let (credentials, place) = text.split_at(after_credentials);
        let Some((place, parameters)) = place.split_once('?') else {
            return Ok(Self {
                driver: text.to_owned(),
                ..Self::default()
            });
        };
        let front = format!("{credentials}{place}");
        let mut parted = Self::default();
        let mut kept = Vec::new();
        for parameter in parameters.split('&') {
            // Not a form: a plus sign is one.
            let plain = parameter.replace('+', "%2B");
            let taken = match form_urlencoded::parse(plain.as_bytes()).next() {
                Some((key, value)) => parted.take(&key, &value)?,
                None => false,
            };
            if !taken {
                kept.push(parameter);
            }
        }
        parted.driver = if kept.is_empty() {
            front
        } else {
            format!("{front}?{}", kept.join("&"))
        };
        Ok(parted)
    }

    fn parse_pairs(text: &str) -> Result<Self, String> {
        let mut parted = Self::default();
        let mut kept = Vec::new();
        let mut rest = text;
        while let Some((pair, key, value, after)) = next_pair(rest) {
            if !parted.take(key, &value)? {
                kept.push(pair);
            }
            rest = after;
        }
        kept.push(rest);
        parted.driver = kept.join(" ").trim().to_owned();
        Ok(parted)
    }

    /// Is it a parameter of ours?
    fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key {
            "sslmode" => {
                self.mode = Some(SslMode::parse(value).ok_or(
                    "sslmode must be disable, allow, prefer, require, verify-ca or verify-full",
                )?);
            }
            "sslrootcert" => self.root_certificate = given(value),
            "sslcert" => self.certificate = given(value),
            "sslkey" => self.key = given(value),
            key if UNSUPPORTED.contains(&key) => {
                return Err(format!("{key} is not supported: leave it out"));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// libpq takes an empty value for none.
fn given(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_owned())
}

/// The first `key = value` of a connection string: as written, key, value without its quotes, and
/// what comes after.
fn next_pair(text: &str) -> Option<(&str, &str, String, &str)> {
    let text = text.trim_start();
    let (key, after) = text.split_once('=')?;
    let start = after.trim_start();
    let (quoted, body) = match start.strip_prefix('\'') {
        Some(body) => (true, body),
        None => (false, start),
    };
    let mut value = String::new();
    let mut characters = body.char_indices();
    let mut end = body.len();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => {
                end = at + 1;
                break;
            }
            space if !quoted && space.is_whitespace() => {
                end = at;
                break;
            }
            other => value.push(other),
        }
    }
    let (_, after) = body.split_at(end);
    let (pair, _) = text.split_at(text.len() - after.len());
    Some((pair, key.trim_end(), value, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> PostgresUrl {
        PostgresUrl::parse(text).unwrap()
    }

    #[test]
    fn what_is_said_of_tls_is_taken_out_and_all_else_is_kept_as_written() {
        let parted = parse(
            "postgres://u:p%40?ss@h:1/d?sslmode=verify-ca&connect_timeout=3&sslrootcert=%2Fa%20b+c\
             &application_name=x%26y&sslcert=c.pem&sslkey=k.pem",
        );
        assert_eq!(
            parted,
            PostgresUrl {
                driver: "postgres://u:p%40?ss@h:1/d?connect_timeout=3&application_name=x%26y"
                    .into(),
                mode: Some(SslMode::VerifyCa),
                root_certificate: Some("/a b+c".into()),
                certificate: Some("c.pem".into()),
                key: Some("k.pem".into()),
            }
        );
        assert_eq!(
            parse("postgresql://h/d?sslmode=disable").driver,
            "postgresql://h/d"
        );
        for plain in ["postgres://u:sslmode=x@h/d", "postgres://h", "nonsense", ""] {
            assert_eq!(parse(plain).driver, plain);
            assert_eq!(parse(plain).mode, None);
        }
    }

    #[test]
    fn key_value_strings_are_read_with_their_quotes() {
        let parted = parse(
            r"host=h sslmode = 'require' password='a \' sslmode=disable' sslrootcert='/a b\\c' user=u",
        );
        assert_eq!(
            parted.driver,
            r"host=h password='a \' sslmode=disable' user=u"
        );
        assert_eq!(parted.mode, Some(SslMode::Require));
        assert_eq!(parted.root_certificate.as_deref(), Some(r"/a b\c"));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_without_its_value() {
        let refused = |text: &str| PostgresUrl::parse(text).unwrap_err();
        assert!(refused("postgres://h/d?sslmode=S3cret").contains("verify-full"));
        assert!(!refused("postgres://h/d?sslmode=S3cret").contains("S3cret"));
        assert!(refused("postgres://h/d?sslcrl=S3cret").contains("sslcrl is not supported"));
        assert!(!refused("host=h sslpassword=S3cret").contains("S3cret"));
    }
}

#[cfg(test)]
#[path = "postgres_url_properties.rs"]
mod properties;
