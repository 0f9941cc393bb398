-- Look through aggregates that have parked rows for those that nothing holds any more, and put the first row of each
-- back into the walk; the rest follows it claim by claim. One that is not due yet is to wait for its time instead.
-- Rows that somebody holds locked are passed over.
--
-- $1 token   $2 buckets to look through, with $3 the hash to start from in each   $4 aggregates per bucket
--
-- Answers three kinds of rows:
--   'visit'   per bucket the hash of the last aggregate visited and how many were ($4 of them: there are more)
--   'missed'  a bucket in which a row was locked
--   'freed'   how many rows were put back
WITH RECURSIVE owned AS MATERIALIZED (
    SELECT c.bucket, c.start
    FROM unnest($2::int[], $3::bigint[]) AS c (bucket, start)
    JOIN {{outbox_bucket}} b ON b.bucket = c.bucket AND b.token = $1
), walk AS (
    SELECT o.bucket, 1 AS step, n.hash, n.id
    FROM owned o CROSS JOIN LATERAL (
        SELECT {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) AS hash, x.id
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) >= o.start
        ORDER BY {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id), x.id
        LIMIT 1
    ) n
    UNION ALL
    SELECT w.bucket, w.step + 1, n.hash, n.id
    FROM walk w CROSS JOIN LATERAL (
        SELECT {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) AS hash, x.id
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = w.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) > w.hash
        ORDER BY {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id), x.id
        LIMIT 1
    ) n
    WHERE w.step < $4::int
), unheld AS MATERIALIZED (
    -- Most are held by a dead one still; of the others nothing more is asked here.
    SELECT w.bucket, w.hash, w.id
    FROM walk w
    WHERE (SELECT d.id FROM {{outbox}} d
           WHERE d.status = 'dead' AND d.holds IS NOT FALSE
             AND {{outbox_hash_of}}(d.aggregate_type, d.aggregate_id) = w.hash
             AND d.id < w.id
           ORDER BY d.id LIMIT 1) IS NULL
), free AS MATERIALIZED (
    -- Behind one that waits for its time they wait for its promotion. And an aggregate that has a row in the walk is
    -- met there.
    SELECT u.bucket, u.id
    FROM unheld u
    WHERE (SELECT x.id FROM {{outbox}} x
           WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = u.bucket
             AND x.status = 'pending' AND x.claimed_by IS NULL
             AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
             AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = u.hash
             AND x.id < u.id
           ORDER BY x.id LIMIT 1) IS NULL
      AND (SELECT x.id FROM {{outbox}} x
           WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = u.bucket
             AND x.status = 'pending' AND x.claimed_by IS NULL
             AND {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
             AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = u.hash
           ORDER BY x.id LIMIT 1) IS NULL
), locked AS MATERIALIZED (
    -- The status is kept from the planner's sight: it would be tempted by a partial index.
    SELECT o.id
    FROM {{outbox}} o
    WHERE o.id = ANY (ARRAY(SELECT f.id FROM free f)) AND o.status || '' = 'pending' AND o.claimed_by IS NULL
    ORDER BY o.id
    FOR UPDATE SKIP LOCKED
), freed AS (
    UPDATE {{outbox}} o SET parked = CASE WHEN o.next_attempt_at <= now() THEN false END
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked l))
    RETURNING o.id
)
SELECT 'visit' AS kind, w.bucket, w.hash, w.step::bigint AS number
FROM (SELECT DISTINCT ON (bucket) bucket, step, hash FROM walk ORDER BY bucket, step DESC) w
UNION ALL
SELECT DISTINCT 'missed', f.bucket, NULL::bigint, 0::bigint
FROM free f
WHERE NOT f.id = ANY (ARRAY(SELECT l.id FROM locked l))
UNION ALL
SELECT 'freed', NULL, NULL, (SELECT count(*) FROM freed)
