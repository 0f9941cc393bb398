-- Takes the oldest open dead letters in hand: no other replay takes them for ten minutes. Those that somebody holds
-- locked are passed over.
-- $1 sources   $2 parked ones too?   $3 rows at most   $4 these ids only   $5 of this reason only   $6 execution
WITH found AS MATERIALIZED (
    SELECT d.source, d.event_id FROM {{outbox_dead_letter}} d
    WHERE (d.status = 'retryable' OR (d.status = 'parked' AND $2::bool))
      AND (d.claimed_by IS NULL OR d.claimed_at < now() - interval '10 minutes')
      AND d.source = ANY ($1::text[])
      AND ($4::text[] IS NULL OR d.event_id = ANY ($4))
      AND ($5::text IS NULL OR d.reason_class = $5)
    ORDER BY d.first_failed_at, d.source, d.event_id
    LIMIT $3::int
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox_dead_letter}} d SET claimed_by = $6, claimed_at = now()
FROM found
WHERE d.source = found.source AND d.event_id = found.event_id
RETURNING d.source, d.event_id, d.first_failed_at::text AS since, extract(epoch FROM d.first_failed_at)::float8 AS age
