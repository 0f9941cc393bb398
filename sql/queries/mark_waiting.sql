-- Record that these events wait for their destination, no attempt counted, and hand back the later rows of
-- their aggregates, in one statement. Waits for no row lock: what is missing from the answer is to be tried
-- again.
-- $1 ids   $2 ids of later rows in hand   $3 name of the token   $4 seconds to wait   $5 error
WITH locked AS MATERIALIZED (
    SELECT id FROM {{outbox}}
    WHERE id = ANY ($1::bigint[] || $2::bigint[]) AND claimed_by = $3 AND status || '' = 'pending'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}} o
SET claimed_by = NULL, claimed_until = NULL,
    last_error = CASE WHEN o.id = ANY ($1::bigint[]) THEN $5 ELSE o.last_error END,
    next_attempt_at = CASE WHEN o.id = ANY ($1::bigint[]) THEN now() + make_interval(secs => $4::float8)
                           ELSE o.next_attempt_at END,
    parked = CASE WHEN NOT o.id = ANY ($1::bigint[]) THEN o.parked END
WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked l))
RETURNING o.id
