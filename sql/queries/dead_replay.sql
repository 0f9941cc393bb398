-- Revive dead events, the oldest first; the trigger rings. Those that somebody holds locked, for example
-- another replay, are passed over. `holds` is kept: one that held nothing back comes late and says so.
-- $1..$8 see dead_filter.sql   $9 rows at most
WITH found AS MATERIALIZED (
    SELECT o.id FROM {{outbox}} o
    WHERE {{dead_filter}}
    ORDER BY o.id
    LIMIT $9::int
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}}
SET status = 'pending', attempts = 0, next_attempt_at = now(), last_error = NULL,
    claimed_by = NULL, claimed_until = NULL
WHERE id = ANY (ARRAY(SELECT id FROM found))
RETURNING id
