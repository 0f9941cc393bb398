//! Names of metrics. Labels come from fixed sets only: never from ids, keys or error texts.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Events marked as published.
pub const PUBLISHED: &str = "bellwire_published_total";
/// Attempts that failed. Label `cause`.
pub const FAILED: &str = "bellwire_failed_attempts_total";
/// Events given up. Label `cause`.
pub const DEAD_LETTERED: &str = "bellwire_dead_lettered_total";
/// Events handed back unpublished, no attempt counted.
pub const HANDED_BACK: &str = "bellwire_handed_back_total";
/// Events confirmed whose claim was lost before the mark: a duplicate is possible.
pub const LEASE_LOST: &str = "bellwire_lease_lost_total";
/// Events that the broker had already, as it says, when they were sent for the first time.
pub const DUPLICATES: &str = "bellwire_duplicates_total";
/// Events that wait for their destination, no attempt counted.
pub const WAITED: &str = "bellwire_waited_total";
/// Claims or marks that the database refused or did not answer. Label `step`.
pub const FAILED_PASSES: &str = "bellwire_failed_passes_total";
/// Published events deleted after their time.
pub const PRUNED: &str = "bellwire_pruned_total";
/// Claims that took rows.
pub const CLAIMED: &str = "bellwire_claimed_total";
/// Duration of a claim.
pub const CLAIM_SECONDS: &str = "bellwire_claim_seconds";
/// Duration of a mark.
pub const MARK_SECONDS: &str = "bellwire_mark_seconds";
/// From insert (start of its transaction) to the broker's confirm.
pub const CREATED_TO_CONFIRM_SECONDS: &str = "bellwire_created_to_confirm_seconds";
/// Events claimed and not yet marked or handed back.
pub const IN_HAND: &str = "bellwire_in_hand";
/// Buckets owned, of 64.
pub const BUCKETS_OWNED: &str = "bellwire_buckets_owned";
/// 0 closed, 1 half-open, 2 open.
pub const BREAKER_STATE: &str = "bellwire_breaker_state";
/// Destinations whose breaker is open.
pub const DESTINATIONS_DOWN: &str = "bellwire_destinations_down";
/// 1 while notifications arrive, 0 while only the tick wakes.
pub const LISTENING: &str = "bellwire_listening";
/// For how long the oldest unpublished event has been due.
pub const OLDEST_PENDING_SECONDS: &str = "bellwire_oldest_pending_seconds";
/// Unpublished events; counting stops at 10,000.
pub const PENDING: &str = "bellwire_pending";
/// Dead events; counting stops at 10,000.
pub const DEAD: &str = "bellwire_dead";
/// Generations of actors rebuilt after one of them died.
pub const RESTARTS: &str = "bellwire_restarts_total";
/// Tokens of dead replicas taken over.
pub const TAKEOVERS: &str = "bellwire_takeovers_total";
/// Alerts delivered. Label `endpoint`.
pub const ALERTS_SENT: &str = "bellwire_alerts_sent_total";
/// Alerts given up or refused. Label `endpoint`.
pub const ALERTS_FAILED: &str = "bellwire_alerts_failed_total";

/// Webhooks answered. Labels `source` and `outcome`.
pub const INTAKE_REQUESTS: &str = "bellwire_intake_requests_total";
/// From a webhook's first byte to its answer.
pub const INTAKE_SECONDS: &str = "bellwire_intake_seconds";
/// Dead letters of the intake. Labels `source` and `status`.
pub const INTAKE_DEAD_LETTERS: &str = "bellwire_intake_dead_letters";
/// Verified webhooks that wait for their turn.
pub const INTAKE_WAITING: &str = "bellwire_intake_waiting";
/// Webhooks forgotten after their time.
pub const INTAKE_PRUNED: &str = "bellwire_intake_pruned_total";

/// Every metric, for what has to name only these: dashboards and alert rules.
pub const ALL: &[&str] = &[
    PUBLISHED,
    FAILED,
    DEAD_LETTERED,
    HANDED_BACK,
    LEASE_LOST,
    CLAIMED,
    CLAIM_SECONDS,
    MARK_SECONDS,
    CREATED_TO_CONFIRM_SECONDS,
    IN_HAND,
    BUCKETS_OWNED,
    BREAKER_STATE,
    LISTENING,
    OLDEST_PENDING_SECONDS,
    PENDING,
    DEAD,
    RESTARTS,
    TAKEOVERS,
    DESTINATIONS_DOWN,
    PRUNED,
    FAILED_PASSES,
    WAITED,
    DUPLICATES,
    ALERTS_SENT,
    ALERTS_FAILED,
    INTAKE_REQUESTS,
    INTAKE_SECONDS,
    INTAKE_DEAD_LETTERS,
    INTAKE_WAITING,
    INTAKE_PRUNED,
];

/// From a fraction of a millisecond, which a local relay reaches, to an outage.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

/// Installs the process's recorder and describes every metric.
///
/// # Errors
/// When a recorder is installed already.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?
        .install_recorder()?;
    describe_counter!(
        PUBLISHED,
        "Events confirmed by the broker and marked as published"
    );
    describe_counter!(FAILED, "Failed attempts, by cause");
    describe_counter!(DEAD_LETTERED, "Events dead-lettered, by cause");
    describe_counter!(
        HANDED_BACK,
        "Events handed back unpublished without counting an attempt"
    );
    describe_counter!(
        LEASE_LOST,
        "Events published whose claim was lost before the mark: a duplicate is possible"
    );
    describe_counter!(
        WAITED,
        "Events handed back to wait for their destination, no attempt counted"
    );
    describe_counter!(
        DUPLICATES,
        "Events that the broker had already (by their message id) when first sent: after a crash, or \
         two sources of one name"
    );
    describe_counter!(
        FAILED_PASSES,
        "Claims or marks that the database refused or did not answer, by step"
    );
    describe_counter!(PRUNED, "Published events deleted after their time");
    describe_counter!(CLAIMED, "Events claimed");
    describe_histogram!(CLAIM_SECONDS, Unit::Seconds, "Duration of a claim");
    describe_histogram!(MARK_SECONDS, Unit::Seconds, "Duration of a mark");
    describe_histogram!(
        CREATED_TO_CONFIRM_SECONDS,
        Unit::Seconds,
        "From the start of the inserting transaction to the broker's confirm"
    );
    describe_gauge!(IN_HAND, "Events claimed and not yet marked or handed back");
    describe_gauge!(BUCKETS_OWNED, "Buckets owned by this replica, of 64");
    describe_gauge!(BREAKER_STATE, "0 closed, 1 half-open, 2 open");
    describe_gauge!(
        DESTINATIONS_DOWN,
        "Destinations whose own breaker is open or half-open"
    );
    describe_gauge!(
        LISTENING,
        "1 while notifications arrive, 0 while only the tick wakes"
    );
    describe_gauge!(
        OLDEST_PENDING_SECONDS,
        Unit::Seconds,
        "For how long the oldest unpublished event has been due"
    );
    describe_gauge!(PENDING, "Unpublished events; counting stops at 10,000");
    describe_gauge!(DEAD, "Dead events; counting stops at 10,000");
    describe_counter!(RESTARTS, "Actor systems rebuilt after an actor died");
    describe_counter!(TAKEOVERS, "Tokens of dead replicas taken over");
    describe_counter!(ALERTS_SENT, "Alerts delivered, by endpoint");
    describe_counter!(ALERTS_FAILED, "Alerts given up or refused, by endpoint");
    describe_counter!(INTAKE_REQUESTS, "Webhooks answered, by source and outcome");
    describe_histogram!(
        INTAKE_SECONDS,
        Unit::Seconds,
        "From a webhook's first byte to its answer"
    );
    describe_gauge!(
        INTAKE_DEAD_LETTERS,
        "Dead letters of the intake, by source and status"
    );
    describe_gauge!(INTAKE_WAITING, "Verified webhooks that wait for their turn");
    describe_counter!(INTAKE_PRUNED, "Webhooks forgotten after their time");
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::ALL;

    #[test]
    fn every_name_declared_here_is_in_the_list_once() {
        let source = include_str!("metrics.rs");
        let mut declared: Vec<_> = source
            .lines()
            .filter(|line| line.starts_with("pub const "))
            .filter_map(|line| line.split('"').nth(1))
            .collect();
        let mut listed = ALL.to_vec();
        declared.sort_unstable();
        listed.sort_unstable();
        assert_eq!(declared, listed);
    }
}
