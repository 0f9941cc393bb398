-- Hand rows back unpublished, without counting an attempt. Waits for no row lock.
-- $1 ids   $2 name of the token
WITH locked AS MATERIALIZED (
    SELECT id FROM {{outbox}}
    WHERE id = ANY ($1) AND claimed_by = $2 AND status || '' = 'pending'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}}
SET claimed_by = NULL, claimed_until = NULL
WHERE id = ANY (ARRAY(SELECT id FROM locked))
RETURNING id
