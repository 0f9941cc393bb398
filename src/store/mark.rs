//! Mark: record what became of claimed events.

use std::time::Duration;

use super::{Store, StoreError};
use crate::event::EventId;

/// A failed attempt to record.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The event that failed.
    pub id: EventId,
    /// Later events of its aggregate in hand; they go back unclaimed in the same statement.
    pub later: Vec<i64>,
    /// Dead without another try.
    pub dead_now: bool,
    /// Attempts after which it is dead; none: never.
    pub max_attempts: Option<u32>,
    /// Wait after the first failed attempt.
    pub backoff: Duration,
    /// Class and reason; cleaned and shortened to 1,000 characters.
    pub error: String,
    /// Does it hold back its aggregate once dead?
    pub holds: bool,
}

/// What a failed attempt came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Failed {
    /// Failed attempts by now.
    pub attempts: i32,
    /// Given up?
    pub dead: bool,
    /// Until the next attempt, if there is one.
    pub wait: Duration,
}

/// Longest `last_error`.
const MOST_ERROR_CHARACTERS: usize = 1000;

/// A broker's text as one line that PostgreSQL's text and every terminal take.
fn clean(error: &str) -> String {
    error
        .chars()
        .take(MOST_ERROR_CHARACTERS)
        .map(|character| {
            if character.is_control() {
                ' '
            } else {
                character
            }
        })
        .collect()
}

impl Store {
    /// Records confirmed events as published; answers which rows it reached.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is known, try again.
    pub async fn mark_published(&self, ids: &[i64], token: &str) -> Result<Vec<i64>, StoreError> {
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("mark:before", ids.iter().copied());
        let rows = self
            .query(&self.queries.mark_published, &[&ids, &token])
            .await?;
        let marked: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("mark:after", marked.iter().copied());
        Ok(marked)
    }

    /// Records a failed attempt and hands back the later rows of its aggregate. Answers what it came
    /// to (none if the row was not reached) and the rows handed back.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is known, try again.
    pub async fn mark_failed(
        &self,
        failure: &Failure,
        token: &str,
    ) -> Result<(Option<Failed>, Vec<i64>), StoreError> {
        let max_attempts = failure
            .max_attempts
            .map(|most| i32::try_from(most).unwrap_or(i32::MAX));
        let error = clean(&failure.error);
        let rows = self
            .query(
                &self.queries.mark_failed,
                &[
                    &failure.id.0,
                    &token,
                    &failure.later,
                    &failure.dead_now,
                    &max_attempts,
                    &failure.backoff.as_secs_f64(),
                    &error,
                    &failure.holds,
                ],
            )
            .await?;
        let mut failed = None;
        let mut released = Vec::new();
        for row in &rows {
            let Some(status) = row.get::<_, Option<&str>>(1) else {
                released.push(row.get(0));
                continue;
            };
            failed = Some(Failed {
                attempts: row.get(2),
                dead: status == "dead",
                wait: Duration::try_from_secs_f64(row.get::<_, f64>(3).max(0.0))
                    .unwrap_or_default(),
            });
        }
        Ok((failed, released))
    }

    /// Records that the events `ids` wait for their destination, no attempt counted, and hands back the
    /// `later` rows of their aggregates; answers which rows it reached.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is known, try again.
    pub async fn mark_waiting(
        &self,
        (ids, later): (&[i64], &[i64]),
        token: &str,
        wait: Duration,
        error: &str,
    ) -> Result<Vec<i64>, StoreError> {
        let rows = self
            .query(
                &self.queries.mark_waiting,
                &[&ids, &later, &token, &wait.as_secs_f64(), &clean(error)],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Hands rows back unpublished, no attempt counted; answers which rows it reached.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is known, try again.
    pub async fn release(&self, ids: &[i64], token: &str) -> Result<Vec<i64>, StoreError> {
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("release:before", ids.iter().copied());
        let rows = self.query(&self.queries.release, &[&ids, &token]).await?;
        let released: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("release:after", released.iter().copied());
        Ok(released)
    }

    /// Which of these rows are still claimed under this token.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn still_claimed(&self, ids: &[i64], token: &str) -> Result<Vec<i64>, StoreError> {
        let rows = self
            .query(&self.queries.still_claimed, &[&ids, &token])
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_cut_at_a_character() {
        assert_eq!(clean("a\0b\nc\u{1b}[31md"), "a b c [31md");
        let long = clean(&"ü".repeat(2000));
        assert_eq!(long, "ü".repeat(MOST_ERROR_CHARACTERS));
    }
}
