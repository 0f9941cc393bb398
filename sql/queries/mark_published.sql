-- Record confirmed events as published. By id, claim and status: a row that somebody discarded or
-- took over meanwhile stays as it is. Waits for no row lock.
-- $1 ids   $2 name of the token
WITH locked AS MATERIALIZED (
    SELECT id FROM {{outbox}}
    WHERE id = ANY ($1) AND claimed_by = $2 AND status || '' = 'pending'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}}
SET status = 'published', published_at = now(), claimed_until = NULL
WHERE id = ANY (ARRAY(SELECT id FROM locked))
RETURNING id
