-- What to publish of claimed rows. Read after the claim's commit, in bounded pieces.
-- Payload as text: it never passes through a JSON value. Infinite timestamps have no epoch.
-- $1 ids
SELECT id, event_type, payload::text, headers::text, correlation_id, event_id::text, attempts,
       CASE WHEN isfinite(created_at) THEN extract(epoch FROM created_at)::float8 END,
       CASE WHEN isfinite(created_at) THEN extract(epoch FROM clock_timestamp() - created_at)::float8 END,
       -- Kept from the time when it was dead and held nothing back.
       holds IS FALSE
FROM {{outbox}}
WHERE id = ANY ($1)
