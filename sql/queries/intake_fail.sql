-- The only place that writes dead letters: one failure more, and parked once it is one too many.
-- $1 source   $2 event id   $3 event type   $4 reason class   $5 last error   $6 attempts at most   $7 execution   $8 mode
WITH letter AS (
    INSERT INTO {{outbox_dead_letter}} AS d
        (source, event_id, event_type, reason_class, last_error, attempts, status, first_failed_at, last_failed_at)
    VALUES ($1, $2, $3, $4, $5, 1, CASE WHEN 1 >= $6::int THEN 'parked' ELSE 'retryable' END, now(), now())
    ON CONFLICT (source, event_id) DO UPDATE
    SET attempts = d.attempts + 1, event_type = excluded.event_type, reason_class = excluded.reason_class,
        last_error = excluded.last_error, last_failed_at = now(), resolved_at = NULL, claimed_by = NULL, claimed_at = NULL,
        status = CASE WHEN d.attempts + 1 >= $6::int THEN 'parked' ELSE 'retryable' END
    RETURNING d.attempts, d.status
),
event AS (
    UPDATE {{outbox_webhook_events}} e
    SET status = CASE letter.status WHEN 'parked' THEN 'parked' ELSE 'dead_lettered' END, event_type = $3,
        last_error = $5, processed_at = NULL, last_execution_id = $7
    FROM letter
    WHERE e.source = $1 AND e.event_id = $2
    RETURNING e.status
),
audit AS (
    INSERT INTO {{outbox_intake_audit}} (execution_id, mode, outcome, source, event_id)
    SELECT $7, $8, event.status, $1, $2 FROM event
)
SELECT event.status, letter.attempts FROM letter, event
