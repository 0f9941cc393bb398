-- A replayed event went well: its dead letter, if it had one, is resolved.
-- $1 source   $2 event id   $3 event type   $4 execution
WITH event AS (
    UPDATE {{outbox_webhook_events}} e
    SET status = 'processed', event_type = $3, last_error = NULL, processed_at = now(), last_execution_id = $4
    WHERE e.source = $1 AND e.event_id = $2
    RETURNING e.status
),
letter AS (
    UPDATE {{outbox_dead_letter}} d
    SET status = 'resolved', resolved_at = now(), claimed_by = NULL, claimed_at = NULL
    WHERE d.source = $1 AND d.event_id = $2
    RETURNING d.attempts
),
audit AS (
    INSERT INTO {{outbox_intake_audit}} (execution_id, mode, outcome, source, event_id)
    SELECT $4, 'replay', event.status, $1, $2 FROM event
)
SELECT event.status, coalesce((SELECT attempts FROM letter), 0) AS attempts FROM event
