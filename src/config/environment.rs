//! Options from the environment, and from the files that it names: `DATABASE_URL_FILE` holds what
//! `DATABASE_URL` would say, and so for every option, as container platforms hand out secrets.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::{ConfigError, Secret};

/// The options that everybody knows under other names.
const WELL_KNOWN: [(&str, &str); 4] = [
    ("DATABASE_URL", "database.url"),
    ("AMQP_URL", "rabbitmq.url"),
    ("NATS_URL", "jetstream.url"),
    ("KAFKA_BOOTSTRAP_SERVERS", "kafka.bootstrap_servers"),
];
/// Options whose own names end like that of a variable that names a file.
const ENDING_LIKE_A_FILE: [&str; 5] = [
    "ca_file",
    "cert_file",
    "key_file",
    "credentials_file",
    "nkey_file",
];
const SUFFIX: &str = "_FILE";

/// What the environment says.
#[derive(Debug, Default)]
pub(super) struct Environment {
    /// By name, without the suffix; the well-known ones are not among them.
    pub(super) variables: HashMap<String, String>,
    /// By key: the well-known ones, which win.
    pub(super) well_known: Vec<(&'static str, String)>,
    /// By key: the variable that named the file.
    from_files: BTreeMap<String, String>,
}

impl Environment {
    /// Reads the variables that are options (the rest belong to the command line or to tests), and
    /// the files that they name.
    ///
    /// # Errors
    /// Names the variable, never shows a value.
    pub(super) fn read(
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let given: BTreeMap<String, OsString> = variables
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .collect();
        let mut environment = Self::default();
        let own = given.iter().filter(|(name, value)| {
            // An empty variable counts as none.
            name.starts_with("BELLWIRE_") && name.contains("__") && !value.is_empty()
        });
        for (name, value) in own {
            match names_a_file(name) {
                Some(plain) => {
                    if given.get(plain).is_some_and(|value| !value.is_empty()) {
                        return Err(both(plain, name));
                    }
                    let content = content(name, value)?;
                    environment.from_files.insert(key(plain), name.clone());
                    environment.variables.insert(plain.to_owned(), content);
                }
                None => {
                    let text = text(name, value)?;
                    environment.variables.insert(name.clone(), text);
                }
            }
        }
        for (name, key) in WELL_KNOWN {
            let file = format!("{name}{SUFFIX}");
            let value = match (given.get(name), given.get(&file)) {
                (Some(_), Some(_)) => return Err(both(name, &file)),
                (Some(value), None) => {
                    environment.from_files.remove(key);
                    text(name, value)?
                }
                (None, Some(path)) => {
                    environment.from_files.insert(key.to_owned(), file.clone());
                    content(&file, path)?
                }
                (None, None) => continue,
            };
            environment.well_known.push((key, value));
        }
        Ok(environment)
    }

    /// Does it give this option?
    pub(super) fn gives(&self, wanted: &str) -> bool {
        self.well_known.iter().any(|(key, _)| *key == wanted)
            || self.variables.keys().any(|name| key(name) == wanted)
    }

    /// What came from a file may be secret, and reasons like to quote: says where it came from
    /// instead.
    pub(super) fn hide(&self, error: ConfigError) -> ConfigError {
        let ConfigError::Key { key, reason } = error else {
            return error;
        };
        let Some(variable) = self.from_files.get(&key) else {
            return ConfigError::Key { key, reason };
        };
        // These never quote a value.
        let quotes_nothing = reason.starts_with("unknown field")
            || WELL_KNOWN.iter().any(|(_, known)| *known == key);
        let reason = if quotes_nothing {
            format!("{reason} (given by {variable})")
        } else {
            format!("the file that {variable} names holds no right value for it")
        };
        ConfigError::Key { key, reason }
    }
}

/// The content of a file that holds an option's value, without the newline that editors put there.
///
/// # Errors
/// Names the option or variable, and the file.
pub(super) fn content(option: &str, path: &OsStr) -> Result<String, ConfigError> {
    let path = Path::new(path);
    let wrong = |what: String| {
        let reason = format!("the file '{}' {what}", path.display());
        ConfigError::key(option, reason)
    };
    let bytes = std::fs::read(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("is no UTF-8 text".into()))?;
    let trimmed = text.strip_suffix('\n').unwrap_or(&text);
    let trimmed = trimmed.strip_suffix('\r').unwrap_or(trimmed);
    if trimmed.is_empty() {
        return Err(wrong("is empty".into()));
    }
    Ok(trimmed.to_owned())
}

/// The secret (a URL, a password) that a section gives, in the file or as the name of another one.
///
/// # Errors
/// Both are given, or the file cannot be used.
pub(super) fn url_of(
    option: &'static str,
    url: Option<Secret>,
    file: Option<&Path>,
) -> Result<Option<Secret>, ConfigError> {
    match (url, file) {
        (Some(_), Some(_)) => Err(ConfigError::key(
            format!("{option}_file"),
            format!("{option} is given too: leave one out"),
        )),
        (None, Some(path)) => {
            let text = content(&format!("{option}_file"), path.as_os_str())?;
            Ok(Some(text.as_str().into()))
        }
        (url, None) => Ok(url),
    }
}

/// `BELLWIRE_RELAY__NAME` for `BELLWIRE_RELAY__NAME_FILE`.
fn names_a_file(name: &str) -> Option<&str> {
    let key = key(name);
    let option = key.rsplit('.').next().unwrap_or(&key);
    if ENDING_LIKE_A_FILE.contains(&option) || !option.ends_with("_file") {
        return None;
    }
    name.get(..name.len() - SUFFIX.len())
}

/// `relay.name` for `BELLWIRE_RELAY__NAME`.
fn key(name: &str) -> String {
    let name = name.strip_prefix("BELLWIRE_").unwrap_or(name);
    name.to_lowercase().replace("__", ".")
}

fn text(name: &str, value: &OsStr) -> Result<String, ConfigError> {
    match value.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(ConfigError::key(name, "is no UTF-8 text")),
    }
}

fn both(plain: &str, file: &str) -> ConfigError {
    ConfigError::key(file, format!("{plain} is given too: leave one out"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &OsStr)]) -> Result<Environment, String> {
        let variables = variables
            .iter()
            .map(|(name, value)| (OsString::from(name), value.to_os_string()));
        Environment::read(variables).map_err(|error| error.to_string())
    }

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    #[test]
    fn one_newline_at_the_end_of_a_file_is_not_part_of_the_value() {
        for (content, value) in [
            ("x", "x"),
            ("x\n", "x"),
            ("x\r\n", "x"),
            ("x\n\n", "x\n"),
            (" x \n", " x "),
        ] {
            let file = file(content.as_bytes());
            let path = file.path().as_os_str();
            let read =
                read(&[("AMQP_URL_FILE", path), ("BELLWIRE_RELAY__NAME_FILE", path)]).unwrap();
            assert_eq!(read.well_known, [("rabbitmq.url", value.to_owned())]);
            assert_eq!(read.variables["BELLWIRE_RELAY__NAME"], value);
            assert!(read.gives("relay.name") && read.gives("rabbitmq.url"));
            assert!(!read.gives("database.url"));
        }
    }

    #[test]
    fn a_variable_and_its_file_are_refused_together() {
        let file = file(b"x");
        let path = file.path().as_os_str();
        for plain in ["DATABASE_URL", "AMQP_URL", "BELLWIRE_RELAY__NAME"] {
            let name = format!("{plain}_FILE");
            let error = read(&[(plain, OsStr::new("S3cret")), (&name, path)]).unwrap_err();
            assert!(
                error.starts_with(&format!("{name}: {plain} is given")),
                "{error}"
            );
            assert!(!error.contains("S3cret"));
        }
    }

    #[test]
    fn a_file_that_says_nothing_is_refused_by_the_name_of_its_variable() {
        let directory = tempfile::tempdir().unwrap();
        let (empty, newline, binary) = (file(b""), file(b"\n"), file(b"S3cret\xff"));
        for path in [
            directory.path().join("missing").as_path(),
            directory.path(),
            empty.path(),
            newline.path(),
            binary.path(),
            Path::new(""),
        ] {
            let error = read(&[("DATABASE_URL_FILE", path.as_os_str())]).unwrap_err();
            assert!(
                error.starts_with("DATABASE_URL_FILE: the file '"),
                "{error}"
            );
            assert!(!error.contains("S3cret"));
        }
        let ignored = read(&[("BELLWIRE_RELAY__NAME_FILE", OsStr::new(""))]).unwrap();
        assert!(ignored.variables.is_empty());
    }

    #[test]
    fn options_that_name_files_are_not_taken_for_files_that_hold_them() {
        let read = read(&[("BELLWIRE_DATABASE__CA_FILE", OsStr::new("/no/such"))]).unwrap();
        assert_eq!(read.variables["BELLWIRE_DATABASE__CA_FILE"], "/no/such");
        // `url_file` and `password_file` are meant to be both.
        let shown = format!("{:#?}", crate::config::Config::default());
        let of_their_own = shown
            .lines()
            .filter_map(|line| line.trim().split_once(':'))
            .map(|(option, _)| option)
            .filter(|option| option.ends_with("_file"))
            .filter(|option| !["url_file", "password_file"].contains(option));
        for option in of_their_own {
            assert!(ENDING_LIKE_A_FILE.contains(&option), "{option}");
        }
    }

    #[test]
    fn what_came_from_a_file_is_not_quoted() {
        let file = file(b"S3cret");
        let environment = read(&[("BELLWIRE_RELAY__TICK_FILE", file.path().as_os_str())]).unwrap();
        let hidden = environment.hide(ConfigError::key("relay.tick", "S3cret is no duration"));
        let hidden = hidden.to_string();
        assert!(
            hidden.contains("BELLWIRE_RELAY__TICK_FILE") && !hidden.contains("S3cret"),
            "{hidden}"
        );
        let kept = environment.hide(ConfigError::key("relay.lease", "1 is no duration"));
        assert_eq!(kept.to_string(), "relay.lease: 1 is no duration");
    }
}
