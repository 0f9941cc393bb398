-- What a replay would take, oldest first: open dead letters that no other replay has in hand, and events that a
-- version without this intake's transaction left behind in mid-work.
-- $1 sources   $2 parked ones too?   $3 rows at most   $4 these ids only   $5 of this reason only   $6 stranded ones only?
SELECT c.source, c.event_id, c.event_type, c.dlq_status, c.attempts, c.last_error, c.received_at::text AS received_at,
       c.claimed
FROM (
    SELECT d.source, d.event_id, coalesce(d.event_type, '') AS event_type, d.status AS dlq_status, d.attempts, d.last_error,
           d.reason_class, e.received_at, d.first_failed_at AS since,
           d.claimed_by IS NOT NULL AND d.claimed_at >= now() - interval '10 minutes' AS claimed
    FROM {{outbox_dead_letter}} d JOIN {{outbox_webhook_events}} e USING (source, event_id)
    WHERE NOT $6::bool AND (d.status = 'retryable' OR (d.status = 'parked' AND $2::bool))
    UNION ALL
    SELECT e.source, e.event_id, coalesce(e.event_type, ''), 'stranded', 0, coalesce(e.last_error, e.status), 'stranded',
           e.received_at, e.received_at, false
    FROM {{outbox_webhook_events}} e
    WHERE e.status IN ('received', 'failed') AND e.received_at < now() - interval '10 minutes'
      AND NOT EXISTS (SELECT FROM {{outbox_dead_letter}} d WHERE d.source = e.source AND d.event_id = e.event_id)
) c
WHERE c.source = ANY ($1::text[])
  AND ($4::text[] IS NULL OR c.event_id = ANY ($4))
  AND ($5::text IS NULL OR c.reason_class = $5)
ORDER BY c.since, c.source, c.event_id
LIMIT $3::int
