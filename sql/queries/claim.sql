-- Second statement of the claim's transaction: take the unbroken prefix of some aggregates.
--
-- Walks aggregates, not rows: from a cursor in each bucket to the next distinct aggregate that has a row in the
-- walk, so that the backlog is not visited again and again, and a hot aggregate takes no more of a claim than
-- any other. What is found to stand behind another row that holds it is parked, so that it is not visited again
-- and again either; what follows the rows taken is put back into the walk. Why nothing is forgotten by that
-- is written in src/store/mod.rs.
--
-- $1 token   $2 its name   $3 lease in seconds
-- $4 buckets to walk, with $5 the hash to start from in each
-- $6 aggregates to visit per bucket   $7 rows per aggregate   $8 rows at most
-- $9 partitions   $10 rows at most per partition, by number
-- $11 greatest id that may be taken: under strict order one below it can still appear
-- $12 rows to park, at most   $13 of one aggregate   $14 seconds: behind a row that is due sooner nothing is parked
--
-- Answers six kinds of rows:
--   'row'    a claimed row
--   'cut'    per bucket the hash (as id) of the first aggregate that a limit left something of
--   'visit'  per bucket the hash (as id) of the last aggregate visited and how many were ($6 of them:
--            there are more)
--   'stuck'  a bucket in which a row could not be put into the walk that is to be there: somebody holds it locked
--   'due'    milliseconds (as id) until the next row that was met, or that waits for its time in these buckets,
--            falls due; not positive: one is to be promoted
--   'rest'   flags of why more may be had later: bit 0 an aggregate has rows in hand or more than
--            $7; bit 1 a limit cut it short; bit 2 a row was locked by somebody; bit 3 an id was too great
WITH RECURSIVE owned AS MATERIALIZED (
    SELECT c.bucket, c.start
    FROM unnest($4::int[], $5::bigint[]) AS c (bucket, start)
    JOIN {{outbox_bucket}} b ON b.bucket = c.bucket AND b.token = $1
), aside AS MATERIALIZED (
    -- Is anything set aside at all? Mostly not, and then nothing is looked for there.
    SELECT (SELECT x.id FROM {{outbox}} x
            WHERE x.status = 'pending' AND x.claimed_by IS NULL
              AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
            ORDER BY {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id),
                     {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id), x.id
            LIMIT 1) IS NOT NULL AS some
), walk AS (
    SELECT o.bucket, 1 AS step, n.hash
    FROM owned o CROSS JOIN LATERAL (
        SELECT {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) AS hash
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL
          AND {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
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
          AND {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
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
), reach AS MATERIALIZED (
    -- Up to which id its rows may go; the least id there is has none before it.
    SELECT a.bucket, a.step, a.hash, a.in_hand,
           CASE WHEN a.held_from > -9223372036854775808 THEN a.held_from - 1
                ELSE coalesce(a.held_from, 9223372036854775807) END AS up_to
    FROM aggregate a
), candidate AS MATERIALIZED (
    -- Of both classes, in their one order; what a dead row holds back is not even looked at.
    SELECT a.bucket, a.step, a.hash, r.id, r.next_attempt_at, r.walked, r.parked,
           row_number() OVER aggregate_order AS nth,
           bool_and(r.next_attempt_at <= now() AND r.id <= $11::bigint) OVER aggregate_order AS free
    FROM reach a CROSS JOIN LATERAL (
        SELECT u.id, u.next_attempt_at, u.walked, u.parked
        FROM (
            (SELECT x.id, x.next_attempt_at, true AS walked, x.parked
             FROM {{outbox}} x
             WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = a.bucket
               AND x.status = 'pending' AND x.claimed_by IS NULL
               AND {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
               AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = a.hash
               AND x.id <= a.up_to
             ORDER BY x.id
             LIMIT $7::int + 1)
            UNION ALL
            (SELECT x.id, x.next_attempt_at, false, x.parked
             FROM {{outbox}} x
             WHERE (SELECT s.some FROM aside s)
               AND {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = a.bucket
               AND x.status = 'pending' AND x.claimed_by IS NULL
               AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
               AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = a.hash
               AND x.id <= a.up_to
             ORDER BY x.id
             LIMIT $7::int + 1)
        ) u
        ORDER BY u.id
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
    -- In hand every row is of the walk, so that it is back there if it is handed back.
    UPDATE {{outbox}} o
    SET claimed_by = $2, claimed_until = now() + make_interval(secs => $3::float8),
        parked = CASE WHEN {{outbox_walked}}(o.parked, o.next_attempt_at, o.created_at) THEN o.parked ELSE false END
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM taken t WHERE t.whole))
    RETURNING o.id, {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id) AS bucket,
              o.aggregate_type, o.aggregate_id, pg_column_size(o.payload) AS bytes
), next AS MATERIALIZED (
    -- The first row that was left of each aggregate that something was taken of, if it is set aside.
    SELECT f.id, f.bucket
    FROM (SELECT g.id, g.bucket, g.whole, g.aside,
                 bool_or(g.whole) OVER (PARTITION BY g.bucket, g.step) AS began,
                 row_number() OVER (PARTITION BY g.bucket, g.step, g.whole ORDER BY g.id) AS nth
          FROM (SELECT u.id, max(u.bucket) AS bucket, max(u.step) AS step, bool_or(u.whole) AS whole, bool_or(u.aside) AS aside
                FROM (SELECT c.id, c.bucket, c.step, false AS whole, NOT c.walked AS aside FROM candidate c
                      UNION ALL
                      SELECT t.id, NULL, NULL, true, NULL FROM taken t WHERE t.whole) u
                WHERE (SELECT s.some FROM aside s)
                GROUP BY u.id) g) f
    WHERE f.began AND NOT f.whole AND f.nth = 1 AND f.aside
), late AS MATERIALIZED (
    -- Aggregates whose first row is not due for long.
    SELECT c.bucket, c.step, c.hash, c.id, c.walked AND c.parked IS NOT NULL AS misplaced
    FROM candidate c
    WHERE c.nth = 1 AND c.next_attempt_at > now() + make_interval(secs => $14::float8)
), behind AS MATERIALIZED (
    SELECT p.id
    FROM (SELECT a.bucket, a.hash, a.held_from AS since FROM aggregate a WHERE a.held_from IS NOT NULL
          UNION ALL
          SELECT l.bucket, l.hash, l.id FROM late l) h
    CROSS JOIN LATERAL (
        SELECT x.id
        FROM {{outbox}} x
        WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = h.bucket
          AND x.status = 'pending' AND x.claimed_by IS NULL
          AND {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
          AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = h.hash
          AND x.id > h.since
        ORDER BY x.id
        LIMIT $13::int
    ) p
    LIMIT $12::int
), parked AS (
    UPDATE {{outbox}} o SET parked = true
    WHERE o.id = ANY (ARRAY(
        SELECT l.id FROM {{outbox}} l
        WHERE l.id = ANY (ARRAY(SELECT b.id FROM behind b)) AND l.status || '' = 'pending' AND l.claimed_by IS NULL
        FOR UPDATE SKIP LOCKED))
    RETURNING o.id
), moved AS (
    -- Into the walk, or to wait for their time.
    UPDATE {{outbox}} o SET parked = CASE WHEN o.next_attempt_at <= now() THEN false END
    WHERE o.id = ANY (ARRAY(
        SELECT l.id FROM {{outbox}} l
        WHERE l.id = ANY (ARRAY(SELECT n.id FROM next n UNION ALL SELECT l.id FROM late l WHERE l.misplaced))
          AND l.status || '' = 'pending' AND l.claimed_by IS NULL
        FOR UPDATE SKIP LOCKED))
    RETURNING o.id
), waits AS MATERIALIZED (
    SELECT least(
        (SELECT min(c.next_attempt_at) FROM candidate c WHERE c.next_attempt_at > now()),
        (SELECT min(n.next_attempt_at)
         FROM owned o CROSS JOIN LATERAL (
             SELECT x.next_attempt_at
             FROM {{outbox}} x
             WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = o.bucket
               AND x.status = 'pending' AND x.claimed_by IS NULL AND x.parked IS NULL
               AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
             ORDER BY x.next_attempt_at
             LIMIT 1
         ) n
         WHERE (SELECT s.some FROM aside s))) AS until
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
SELECT DISTINCT 'stuck', NULL::bigint, n.bucket, NULL, NULL, 0
FROM next n
WHERE NOT n.id = ANY (ARRAY(SELECT m.id FROM moved m))
UNION ALL
-- Rounded up: what is not due yet is not said to be.
SELECT 'due', ceil(extract(epoch FROM w.until - now()) * 1000)::bigint, NULL, NULL, NULL, 0
FROM waits w
WHERE isfinite(w.until)
UNION ALL
SELECT 'rest', NULL, NULL, NULL, NULL,
       (EXISTS (SELECT FROM aggregate a WHERE a.in_hand)
        OR EXISTS (SELECT FROM candidate c WHERE c.free AND c.nth > $7::int))::int
       + EXISTS (SELECT FROM ranked r WHERE NOT r.fits)::int * 2
       + EXISTS (SELECT FROM taken t WHERE NOT t.whole)::int * 4
       + EXISTS (SELECT FROM candidate c WHERE c.id > $11::bigint)::int * 8
