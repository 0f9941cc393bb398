//! What becomes of an event when not all of its places took it: **one** function decides.
//!
//! Pure: no I/O, no clock.

use crate::relay::failure::{Outcome, decide};
use crate::sink::SinkError;

/// Among the errors of one event, the one that says what happens to it:
/// 1. Void ends everything: the row is no longer ours, and nothing may be written of it.
/// 2. What kills the event comes first, at once or after its attempts: what one place can never take must not be
///    sent to the others again and again.
/// 3. Then what finds out whether it is such an event.
/// 4. Then what waits at no cost, before what is charged: the outage of one place costs no attempt because another
///    one is full.
fn rank(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Drop => 0,
        Outcome::Dead => 1,
        Outcome::RetryOrDead => 2,
        Outcome::Isolate => 3,
        Outcome::Wait => 4,
        Outcome::HandBack => 5,
        Outcome::Retry => 6,
    }
}

/// The result for an event, from those of all its copies: only if every place confirmed it is it confirmed. Of
/// errors that rank alike the first one speaks.
pub(super) fn of_all(
    results: impl IntoIterator<Item = Result<(), SinkError>>,
) -> Result<(), SinkError> {
    let mut worst: Option<SinkError> = None;
    let mut maybe_sent = false;
    for result in results {
        let Err(error) = result else {
            maybe_sent = true;
            continue;
        };
        maybe_sent |= error.maybe_sent;
        let ranks = |error: &SinkError| rank(decide(error.cause).0);
        if worst
            .as_ref()
            .is_none_or(|worst| ranks(&error) < ranks(worst))
        {
            worst = Some(error);
        }
    }
    match worst {
        None => Ok(()),
        Some(worst) => Err(SinkError {
            maybe_sent,
            ..worst
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::failure::Cause;

    fn error(cause: Cause) -> Result<(), SinkError> {
        Err(SinkError::new(cause, cause.class()))
    }

    fn decided(results: &[Result<(), SinkError>]) -> Option<Cause> {
        of_all(results.iter().cloned())
            .err()
            .map(|error| error.cause)
    }

    #[test]
    fn an_event_is_confirmed_only_by_all_of_its_places() {
        assert_eq!(decided(&[Ok(()), Ok(())]), None);
        for cause in Cause::ALL {
            assert_eq!(decided(&[Ok(()), error(cause)]), Some(cause));
            assert_eq!(decided(&[error(cause), Ok(())]), Some(cause));
        }
    }

    #[test]
    fn void_ends_everything() {
        for cause in Cause::ALL {
            assert_eq!(
                decided(&[error(cause), error(Cause::Void)]),
                Some(Cause::Void)
            );
        }
    }

    #[test]
    fn what_one_place_can_never_take_waits_for_no_other() {
        for cause in Cause::ALL.into_iter().filter(|cause| *cause != Cause::Void) {
            for deadly in [Cause::TooLarge, Cause::Unroutable] {
                let both = [error(cause), error(deadly)];
                let outcome = decide(decided(&both).unwrap()).0;
                assert!(
                    matches!(outcome, Outcome::Dead | Outcome::RetryOrDead),
                    "{cause:?}"
                );
            }
        }
        let both = [error(Cause::Unroutable), error(Cause::TooLarge)];
        assert_eq!(decided(&both), Some(Cause::TooLarge));
        let maybe = [error(Cause::Nacked), error(Cause::Suspect)];
        assert_eq!(decided(&maybe), Some(Cause::Suspect));
    }

    #[test]
    fn an_outage_of_one_place_is_not_charged_for_another_that_is_full() {
        for away in [Cause::SinkDown, Cause::DestinationMissing] {
            let both = [error(Cause::Nacked), error(away)];
            assert_eq!(decided(&both), Some(away));
        }
    }

    #[test]
    fn of_equals_the_first_speaks_and_what_any_place_may_have_is_said() {
        let first = Err(SinkError::new(Cause::SinkDown, "first"));
        let second = Err(SinkError::new(Cause::SinkDown, "second"));
        let told = of_all([first.clone(), second.clone()]).unwrap_err();
        assert_eq!((&*told.message, told.maybe_sent), ("first", false));
        assert!(of_all([first.clone(), Ok(())]).unwrap_err().maybe_sent);
        let sent = second.map_err(SinkError::after_sending);
        assert!(of_all([first, sent]).unwrap_err().maybe_sent);
    }
}
