-- How many dead letters there are of this kind.
-- $1 source   $2 ids   $3 reason class   $4 event type   $5 statuses
SELECT count(*) FROM {{outbox_dead_letter}} d
WHERE ($1::text IS NULL OR d.source = $1)
  AND ($2::text[] IS NULL OR d.event_id = ANY ($2))
  AND ($3::text IS NULL OR d.reason_class = $3)
  AND ($4::text IS NULL OR d.event_type = $4)
  AND d.status = ANY ($5::text[])
