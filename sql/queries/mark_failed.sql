-- Record one failed attempt and hand back the later rows of its aggregate, in one statement.
-- Waits for no row lock: what is missing from the answer is to be tried again.
-- $1 id   $2 name of the token   $3 ids of later rows in hand
-- $4 dead at once   $5 attempts after which it is dead (NULL: never)
-- $6 backoff in seconds   $7 error   $8 does it hold its aggregate once dead?
WITH locked AS MATERIALIZED (
    SELECT id FROM {{outbox}}
    WHERE id = ANY ($3::bigint[] || $1::bigint) AND claimed_by = $2 AND status || '' = 'pending'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
), before AS MATERIALIZED (
    -- Whoever has set attempts to the greatest number there is does not stop the relay by it.
    SELECT o.id, least(o.attempts, 2147483646) + 1 AS attempts
    FROM {{outbox}} o
    WHERE o.id = (SELECT l.id FROM locked l WHERE l.id = $1)
), failed AS (
    UPDATE {{outbox}} o
    SET attempts = b.attempts,
        last_error = $7,
        failed_in = $2,
        status = CASE WHEN $4 OR b.attempts >= $5::int THEN 'dead' ELSE 'pending' END,
        -- Of a pending row it is kept: a replayed one that comes late still does.
        holds = CASE WHEN $4 OR b.attempts >= $5::int THEN $8::boolean ELSE o.holds END,
        -- Doubles up to an hour; the exponent is bounded before power() could overflow.
        next_attempt_at = now() + make_interval(
            secs => least($6::float8 * power(2, least(greatest(b.attempts - 1, 0), 30)), 3600)),
        -- It waits for that time; as in the other rows, what is handed back is in the walk.
        parked = NULL,
        claimed_by = NULL, claimed_until = NULL
    FROM before b
    WHERE o.id = b.id
    RETURNING o.id, o.status, o.attempts,
              extract(epoch FROM o.next_attempt_at - now())::float8 AS wait_seconds
), released AS (
    UPDATE {{outbox}} o
    SET claimed_by = NULL, claimed_until = NULL
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked l WHERE l.id <> $1))
    RETURNING o.id
)
SELECT f.id, f.status, f.attempts, f.wait_seconds FROM failed f
UNION ALL
SELECT r.id, NULL, NULL, NULL FROM released r
