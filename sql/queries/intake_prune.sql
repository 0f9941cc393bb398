-- Forgets events whose time is over, with their resolved dead letters. Open ones are never forgotten.
-- $1 sources   $2 seconds, in pairs with them   $3 rows of each at most
WITH old AS MATERIALIZED (
    SELECT o.source, o.event_id
    FROM unnest($1::text[], $2::float8[]) AS w (source, seconds)
    CROSS JOIN LATERAL (
        SELECT e.source, e.event_id FROM {{outbox_webhook_events}} e
        WHERE e.source = w.source AND e.status IN ('processed', 'discarded')
          AND e.received_at < now() - make_interval(secs => w.seconds)
        ORDER BY e.received_at
        LIMIT $3::int
        FOR UPDATE SKIP LOCKED
    ) o
)
DELETE FROM {{outbox_webhook_events}} e USING old WHERE e.source = old.source AND e.event_id = old.event_id
RETURNING 1
