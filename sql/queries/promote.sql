-- Put rows whose time has come into the walk, those that are due for longest first. Rows that somebody holds locked
-- are passed over.
--
-- Answers how many were, whether more of them are due (beyond $2, or locked), and the milliseconds until the next one is.
-- $1 token   $2 rows per bucket at most
WITH owned AS MATERIALIZED (
    SELECT b.bucket FROM {{outbox_bucket}} b WHERE b.token = $1
), due AS MATERIALIZED (
    SELECT n.id
    FROM owned o CROSS JOIN LATERAL (
        SELECT x.id
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked IS NULL
          AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
          AND x.next_attempt_at <= now()
        ORDER BY x.next_attempt_at
        LIMIT $2::int
        FOR UPDATE SKIP LOCKED
    ) n
), promoted AS (
    UPDATE {{outbox}} SET parked = false WHERE id = ANY (ARRAY(SELECT d.id FROM due d)) RETURNING id
), met AS MATERIALIZED (
    SELECT count(*) AS rows
    FROM owned o CROSS JOIN LATERAL (
        SELECT
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked IS NULL
          AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
          AND x.next_attempt_at <= now()
        ORDER BY x.next_attempt_at
        LIMIT $2::int + 1
    ) n
), later AS MATERIALIZED (
    SELECT min(n.next_attempt_at) AS until
    FROM owned o CROSS JOIN LATERAL (
        SELECT x.next_attempt_at
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked IS NULL
          AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
          AND x.next_attempt_at > now()
        ORDER BY x.next_attempt_at
        LIMIT 1
    ) n
)
SELECT (SELECT count(*) FROM promoted) AS promoted,
       (SELECT m.rows FROM met m) > (SELECT count(*) FROM promoted) AS more,
       (SELECT CASE WHEN isfinite(l.until) THEN ceil(extract(epoch FROM l.until - now()) * 1000)::bigint END
        FROM later l) AS due_ms
