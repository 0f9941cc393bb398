//! The user's SQL: split into statements, named parameters made into numbered ones.
//!
//! # Invariants
//! - A statement runs within the transaction of its event, and cannot end it: only statements that read
//!   and write are taken, and PostgreSQL lets no function end a transaction that it is called in. What a
//!   function does to the session (`set_config`) is its author's matter.
//! - Every parameter is text. A cast behind it makes it anything else, and PostgreSQL says which one is
//!   missing when the statement is prepared, before anything was received.
//!
//! Pure.

#![expect(
    clippy::string_slice,
    clippy::indexing_slicing,
    reason = "at places that were found in this very text"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::pointer::Pointer;

/// What a statement may begin with.
const TAKEN: [&str; 10] = [
    "call", "delete", "insert", "lock", "merge", "notify", "select", "update", "values", "with",
];

/// A value that a statement gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// `webhook-id`.
    EventId,
    /// The type, as it was found.
    EventType,
    /// The source's name.
    Source,
    /// The request or replay that runs it.
    ExecutionId,
    /// The whole body.
    Payload,
    /// What a pointer leads to, as text; NULL where there is nothing.
    At(Pointer),
}

/// One statement, ready to be prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// With `$1` and so on, each cast from text.
    pub sql: String,
    /// In the order of their numbers.
    pub parameters: Vec<Parameter>,
}

/// Splits a text into its statements.
///
/// # Errors
/// Says what is wrong, and in which statement.
pub fn parse(text: &str, pointers: &BTreeMap<String, Pointer>) -> Result<Vec<Statement>, String> {
    for name in pointers.keys() {
        if !is_name(name) || built_in(name).is_some() {
            return Err(format!(
                "parameter `{name}`: a name has letters, digits and `_`, and is none of id, event_id, \
                 event_type, type, source, exec, execution_id, payload, now"
            ));
        }
    }
    let mut statements = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut reader = Reader {
            rest,
            pointers,
            sql: String::new(),
            parameters: Vec::new(),
            words: String::new(),
        };
        let number = statements.len() + 1;
        reader
            .read()
            .map_err(|reason| format!("statement {number}: {reason}"))?;
        rest = reader.rest;
        if reader.words.trim().is_empty() {
            continue;
        }
        check_first_word(&reader.words)
            .map_err(|reason| format!("statement {number}: {reason}"))?;
        statements.push(Statement {
            sql: reader.sql.trim().to_owned(),
            parameters: reader.parameters,
        });
    }
    if statements.is_empty() {
        return Err("holds no statement".into());
    }
    Ok(statements)
}

fn check_first_word(words: &str) -> Result<(), String> {
    let first: String = words
        .trim_start()
        .trim_start_matches('(')
        .chars()
        .take_while(char::is_ascii_alphabetic)
        .collect::<String>()
        .to_ascii_lowercase();
    if TAKEN.contains(&first.as_str()) {
        return Ok(());
    }
    Err(format!(
        "begins with `{first}`: a handler runs within the event's transaction and may only read and \
         write ({})",
        TAKEN.join(", ")
    ))
}

fn is_name(name: &str) -> bool {
    let mut letters = name.chars();
    letters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

fn built_in(name: &str) -> Option<Option<Parameter>> {
    Some(match name {
        "id" | "event_id" => Some(Parameter::EventId),
        "type" | "event_type" => Some(Parameter::EventType),
        "source" => Some(Parameter::Source),
        "exec" | "execution_id" => Some(Parameter::ExecutionId),
        "payload" => Some(Parameter::Payload),
        // The transaction's time, of which PostgreSQL knows best.
        "now" => None,
        _ => return None,
    })
}

/// Reads one statement.
struct Reader<'a> {
    rest: &'a str,
    pointers: &'a BTreeMap<String, Pointer>,
    sql: String,
    parameters: Vec<Parameter>,
    /// The statement without its comments.
    words: String,
}

impl<'a> Reader<'a> {
    /// Up to the next semicolon or the end.
    fn read(&mut self) -> Result<(), String> {
        while let Some(letter) = self.rest.chars().next() {
            match letter {
                ';' => {
                    self.rest = &self.rest[1..];
                    return Ok(());
                }
                '\'' => {
                    // E'…' knows backslashes.
                    let escapes = self.ends_with_word_e();
                    self.quoted('\'', escapes)?;
                }
                '"' => self.quoted('"', false)?,
                '-' if self.rest.starts_with("--") => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.skip(end);
                }
                '/' if self.rest.starts_with("/*") => {
                    let end = comment_end(self.rest).ok_or("a comment is not closed")?;
                    self.skip(end);
                }
                '$' => self.dollar()?,
                ':' => self.colon()?,
                other => self.keep(other.len_utf8()),
            }
        }
        Ok(())
    }

    fn keep(&mut self, length: usize) {
        let (kept, rest) = self.rest.split_at(length);
        self.sql.push_str(kept);
        self.words.push_str(kept);
        self.rest = rest;
    }

    /// A comment is worth a space.
    fn skip(&mut self, length: usize) {
        self.rest = &self.rest[length..];
        self.sql.push(' ');
        self.words.push(' ');
    }

    fn ends_with_word_e(&self) -> bool {
        let mut before = self.sql.chars().rev();
        matches!(before.next(), Some('e' | 'E'))
            && !before
                .next()
                .is_some_and(|letter| letter.is_alphanumeric() || letter == '_')
    }

    fn quoted(&mut self, quote: char, escapes: bool) -> Result<(), String> {
        let mut letters = self.rest.char_indices().skip(1);
        while let Some((at, letter)) = letters.next() {
            if letter == '\\' && escapes {
                letters.next();
            } else if letter == quote {
                // A doubled quote begins the next piece at once.
                self.keep(at + 1);
                return Ok(());
            }
        }
        Err(format!("a {quote} is not closed"))
    }

    fn dollar(&mut self) -> Result<(), String> {
        // Within a name a dollar is a letter.
        let in_name = self
            .sql
            .chars()
            .next_back()
            .is_some_and(|letter| letter.is_alphanumeric() || letter == '_' || letter == '$');
        let tag_end = self.rest[1..].find('$').map(|end| end + 2);
        if let Some(tag_end) = tag_end.filter(|_| !in_name) {
            let tag = &self.rest[..tag_end];
            let inner = &tag[1..tag.len() - 1];
            if inner.is_empty() || is_name(inner) {
                let end = self.rest[tag_end..]
                    .find(tag)
                    .ok_or_else(|| format!("{tag} is not closed"))?;
                self.keep(tag_end + end + tag.len());
                return Ok(());
            }
        }
        let numbered = self.rest[1..].starts_with(|next: char| next.is_ascii_digit());
        if numbered && !in_name {
            return Err("parameters have names here, like :event_id, not numbers".into());
        }
        self.keep(1);
        Ok(())
    }

    fn colon(&mut self) -> Result<(), String> {
        if self.rest.starts_with("::") || self.rest.starts_with(":=") {
            self.keep(2);
            return Ok(());
        }
        let after = &self.rest[1..];
        let length = after
            .find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
            .unwrap_or(after.len());
        let name = &after[..length];
        if !is_name(name) {
            self.keep(1);
            return Ok(());
        }
        let parameter = match (built_in(name), self.pointers.get(name)) {
            (Some(parameter), _) => parameter,
            (None, Some(pointer)) => Some(Parameter::At(pointer.clone())),
            (None, None) => {
                return Err(format!(
                    "there is no parameter :{name}; add it to the route's `parameters`, as {name} = \
                     \"/json/pointer\""
                ));
            }
        };
        match parameter {
            None => self.sql.push_str("now()"),
            Some(parameter) => self.number(parameter),
        }
        self.words.push('?');
        self.rest = &after[length..];
        Ok(())
    }

    fn number(&mut self, parameter: Parameter) {
        let known = self.parameters.iter().position(|known| *known == parameter);
        let is_payload = parameter == Parameter::Payload;
        let number = known.unwrap_or_else(|| {
            self.parameters.push(parameter);
            self.parameters.len() - 1
        }) + 1;
        let _ = if is_payload {
            write!(self.sql, "((${number}::text)::jsonb)")
        } else {
            write!(self.sql, "(${number}::text)")
        };
    }
}

/// Comments nest.
fn comment_end(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let here = &text.as_bytes()[at..];
        if here.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += 1;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, usize)>, String> {
        let pointers = [("amount", "/data/amount"), ("n", "/n")]
            .map(|(name, pointer)| (name.to_owned(), Pointer::parse(pointer).unwrap()))
            .into();
        let statements = parse(text, &pointers)?;
        Ok(statements
            .into_iter()
            .map(|statement| (statement.sql, statement.parameters.len()))
            .collect())
    }

    fn one(text: &str) -> (String, usize) {
        let mut statements = parsed(text).unwrap();
        assert_eq!(statements.len(), 1, "{statements:?}");
        statements.remove(0)
    }

    #[test]
    fn names_become_numbers_and_every_value_is_text() {
        let (sql, count) =
            one("INSERT INTO a VALUES (:id, :amount::bigint, :now, :amount, :payload -> 'x')");
        assert_eq!(
            sql,
            "INSERT INTO a VALUES (($1::text), ($2::text)::bigint, now(), ($2::text), \
             (($3::text)::jsonb) -> 'x')"
        );
        assert_eq!(count, 3);
    }

    #[test]
    fn what_only_looks_like_a_parameter_or_an_end_is_left_alone() {
        for text in [
            "SELECT ':id; ''x'",
            "SELECT E'a\\';:id'",
            "SELECT \":id;\"\"\"",
            "SELECT $$ :id; $$",
            "SELECT $a_1$ :id; $$ $a_1$",
            "SELECT a$b$c, 1::int, x[1:2]",
            "SELECT f(a := 1)",
        ] {
            let (sql, count) = one(text);
            assert_eq!((sql.as_str(), count), (text, 0));
        }
        assert_eq!(one("SELECT 1 -- ;:id\n, 2").0, "SELECT 1  \n, 2");
        assert_eq!(one("/* a /* ; */ :id */ SELECT 1").0, "SELECT 1");
    }

    #[test]
    fn statements_end_at_semicolons_and_empty_ones_do_not_count() {
        let found = parsed("; INSERT INTO a VALUES (1);; -- done\nDELETE FROM b;\n").unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].0, "DELETE FROM b");
    }

    #[test]
    fn what_would_leave_the_transaction_or_the_text_is_refused() {
        for (text, word) in [
            ("", "no statement"),
            ("-- nothing", "no statement"),
            ("COMMIT", "commit"),
            ("SELECT 1; ROLLBACK", "statement 2"),
            ("SET search_path = x", "set"),
            ("BEGIN", "begin"),
            ("DO $$ BEGIN COMMIT; END $$", "do"),
            ("SELECT :missing", ":missing"),
            ("SELECT $1", "not numbers"),
            ("SELECT 'a", "not closed"),
            ("SELECT $$ a", "not closed"),
            ("SELECT /* a", "not closed"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        let taken = [("payload".to_owned(), Pointer::parse("/a").unwrap())].into();
        assert!(parse("SELECT 1", &taken).is_err());
    }
}
