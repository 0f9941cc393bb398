-- Forgets what was done longer ago than any id is remembered.
-- $1 seconds   $2 rows at most
WITH old AS MATERIALIZED (
    SELECT id FROM {{outbox_intake_audit}}
    WHERE finished_at < now() - make_interval(secs => $1::float8)
    ORDER BY finished_at
    LIMIT $2::int
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {{outbox_intake_audit}} a USING old WHERE a.id = old.id
RETURNING 1
