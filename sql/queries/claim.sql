-- Second statement of the claim's transaction: take the unbroken prefix of some aggregates.
--
-- Walks aggregates, not rows: from a cursor in each bucket to the next distinct aggregate, so that
-- neither the backlog nor rows that cannot go are visited again and again, and a hot aggregate
-- takes no more of a claim than any other.
--
-- $1 token   $2 its name   $3 lease in seconds
-- $4 buckets to walk, with $5 the hash to start from in each
-- $6 aggregates to visit per bucket   $7 rows per aggregate   $8 rows at most
-- $9 partitions   $10 rows at most per partition, by number
-- $11 greatest id that may be taken: under strict order one below it can still appear
--
-- Answers four kinds of rows:
--   'row'    a claimed row
--   'cut'    per bucket the hash (as id) of the first aggregate that a limit left something of
--   'visit'  per bucket the hash (as id) of the last aggregate visited and how many were ($6 of them:
--            there are more)
--   'rest'   flags of why more may be had later: bit 0 an aggregate has rows in hand or more than
--            $7; bit 1 a limit cut it short; bit 2 a row was locked by somebody; bit 3 an id was too great
WITH RECURSIVE owned AS MATERIALIZED (
    SELECT c.bucket, c.start
    FROM unnest($4::int[], $5::bigint[]) AS c (bucket, start)
    JOIN {{outbox_bucket}} b ON b.bucket = c.bucket AND b.token = $1
), walk AS (
    SELECT o.bucket, 1 AS step, n.hash
    FROM owned o CROSS JOIN LATERAL (
        SELECT {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) AS hash
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) >= o.start
        ORDER BY {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id)
        LIMIT 1
    ) n
    UNION ALL
    SELECT w.bucket, w.step + 1, n.hash
    FROM walk w CROSS JOIN LATERAL (
        SELECT {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) AS hash
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = w.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) > w.hash
        ORDER BY {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id)
        LIMIT 1
    ) n
    WHERE w.step < $6::int
), aggregate AS MATERIALIZED (
    SELECT w.bucket, w.step, w.hash,
           -- Nothing more of an aggregate while any of it is in hand, of whichever replica: the
           -- failure of a row in hand and the hand-back of what follows must come first.
           (SELECT c.id FROM {{outbox}} c
            WHERE c.status = 'pending' AND c.claimed_by IS NOT NULL
              AND {{outbox_hash_of}}(c.aggregate_type, c.aggregate_id) = w.hash
            LIMIT 1) IS NOT NULL AS in_hand,
           (SELECT d.id FROM {{outbox}} d
            WHERE d.status = 'dead' AND d.holds IS NOT FALSE
              AND {{outbox_hash_of}}(d.aggregate_type, d.aggregate_id) = w.hash
            ORDER BY d.id LIMIT 1) AS held_from
    FROM walk w
), candidate AS (
    SELECT a.bucket, a.step, a.hash, r.id,
           row_number() OVER aggregate_order AS nth,
           bool_and(r.due AND (a.held_from IS NULL OR r.id < a.held_from)) OVER aggregate_order AS free
    FROM aggregate a CROSS JOIN LATERAL (
        SELECT x.id, x.next_attempt_at <= now() AND x.id <= $11::bigint AS due
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = a.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = a.hash
        ORDER BY x.id
        LIMIT $7::int + 1
    ) r
    WHERE NOT a.in_hand
    WINDOW aggregate_order AS (PARTITION BY a.bucket, a.step ORDER BY r.id)
), placed AS MATERIALIZED (
    SELECT c.bucket, c.step, c.hash, c.id, c.nth,
           row_number() OVER (PARTITION BY c.bucket % $9::int ORDER BY c.step, c.bucket, c.id) AS place
    FROM candidate c
    WHERE c.free AND c.nth <= $7::int
), ranked AS MATERIALIZED (
    -- Both cuts go along (step, bucket, id), so they leave a prefix of each aggregate.
    SELECT p.bucket, p.step, p.hash, p.id,
           p.place <= ($10::int[])[p.bucket % $9::int + 1]
           AND count(*) FILTER (WHERE p.place <= ($10::int[])[p.bucket % $9::int + 1])
                   OVER (ORDER BY p.step, p.bucket, p.id ROWS UNBOUNDED PRECEDING) <= $8::int AS fits
    FROM placed p
), chosen AS MATERIALIZED (
    SELECT r.bucket, r.step, r.id FROM ranked r WHERE r.fits
), locked AS MATERIALIZED (
    -- The status is kept from the planner's sight: it would be tempted by a partial index.
    SELECT o.id
    FROM {{outbox}} o
    WHERE o.id = ANY (ARRAY(SELECT c.id FROM chosen c))
      AND o.status || '' = 'pending' AND o.claimed_by IS NULL AND o.next_attempt_at <= now()
    ORDER BY o.id
    FOR UPDATE SKIP LOCKED
), taken AS MATERIALIZED (
    -- A row that could not be locked ends its aggregate's prefix. Grouped, not joined: a generic
    -- plan would join these by nested loops.
    SELECT g.id, bool_and(g.was_locked) OVER (PARTITION BY g.bucket, g.step ORDER BY g.id) AS whole
    FROM (SELECT u.id, max(u.bucket) AS bucket, max(u.step) AS step, bool_or(u.was_locked) AS was_locked
          FROM (SELECT c.id, c.bucket, c.step, false AS was_locked FROM chosen c
                UNION ALL
                SELECT l.id, NULL, NULL, true FROM locked l) u
          GROUP BY u.id) g
), claimed AS (
    UPDATE {{outbox}} o
    SET claimed_by = $2, claimed_until = now() + make_interval(secs => $3::float8)
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM taken t WHERE t.whole))
    RETURNING o.id, {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id) AS bucket,
              o.aggregate_type, o.aggregate_id, pg_column_size(o.payload) AS bytes
)
SELECT 'row' AS kind, c.id, c.bucket, c.aggregate_type, c.aggregate_id, c.bytes AS number
FROM claimed c
UNION ALL
SELECT 'visit', w.hash, w.bucket, NULL, NULL, w.step
FROM (SELECT DISTINCT ON (bucket) bucket, step, hash FROM walk ORDER BY bucket, step DESC) w
UNION ALL
-- Where a limit cut the walk short: from there it goes on, so that nobody is passed over.
SELECT 'cut', k.hash, k.bucket, NULL, NULL, 0
FROM (SELECT DISTINCT ON (bucket) bucket, hash FROM ranked WHERE NOT fits ORDER BY bucket, step) k
UNION ALL
SELECT 'rest', NULL, NULL, NULL, NULL,
       (EXISTS (SELECT FROM aggregate a WHERE a.in_hand)
        OR EXISTS (SELECT FROM candidate c WHERE c.free AND c.nth > $7::int))::int
       + EXISTS (SELECT FROM ranked r WHERE NOT r.fits)::int * 2
       + EXISTS (SELECT FROM taken t WHERE NOT t.whole)::int * 4
       + EXISTS (SELECT FROM candidate c WHERE c.id > $11::bigint)::int * 8
