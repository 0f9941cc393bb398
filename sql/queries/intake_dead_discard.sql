-- Gives up on open dead letters for good. Those that a replay has in hand are passed over.
-- $1 source   $2 ids   $3 reason class   $4 event type   $5 statuses   $6 rows at most   $7 execution
WITH found AS MATERIALIZED (
    SELECT d.source, d.event_id FROM {{outbox_dead_letter}} d
    WHERE ($1::text IS NULL OR d.source = $1)
      AND ($2::text[] IS NULL OR d.event_id = ANY ($2))
      AND ($3::text IS NULL OR d.reason_class = $3)
      AND ($4::text IS NULL OR d.event_type = $4)
      AND d.status = ANY ($5::text[]) AND d.status IN ('retryable', 'parked')
      AND (d.claimed_by IS NULL OR d.claimed_at < now() - interval '10 minutes')
    ORDER BY d.first_failed_at, d.source, d.event_id
    LIMIT $6::int
    FOR UPDATE SKIP LOCKED
),
letter AS (
    UPDATE {{outbox_dead_letter}} d SET status = 'discarded', resolved_at = now(), claimed_by = NULL, claimed_at = NULL
    FROM found
    WHERE d.source = found.source AND d.event_id = found.event_id
    RETURNING d.source, d.event_id
),
event AS (
    UPDATE {{outbox_webhook_events}} e SET status = 'discarded'
    FROM letter
    WHERE e.source = letter.source AND e.event_id = letter.event_id
),
audit AS (
    INSERT INTO {{outbox_intake_audit}} (execution_id, mode, outcome, source, event_id)
    SELECT $7, 'discard', 'discarded', letter.source, letter.event_id FROM letter
)
SELECT source, event_id FROM letter
