-- Dead letters, the oldest first.
-- $1 source   $2 ids   $3 reason class   $4 event type   $5 statuses   $6 rows at most
SELECT d.source, d.event_id, coalesce(d.event_type, '') AS event_type, d.status, d.reason_class, d.last_error, d.attempts,
       d.first_failed_at::text AS first_failed_at, d.last_failed_at::text AS last_failed_at,
       extract(epoch FROM now() - d.first_failed_at)::float8 AS age_seconds
FROM {{outbox_dead_letter}} d
WHERE ($1::text IS NULL OR d.source = $1)
  AND ($2::text[] IS NULL OR d.event_id = ANY ($2))
  AND ($3::text IS NULL OR d.reason_class = $3)
  AND ($4::text IS NULL OR d.event_type = $4)
  AND d.status = ANY ($5::text[])
ORDER BY d.first_failed_at, d.source, d.event_id
LIMIT $6::int
