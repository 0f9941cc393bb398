-- The clean way out: everything in hand is marked or released, so the buckets go free with the row
-- (ON DELETE SET NULL). A name that still stands on a row keeps the row, ended, for a peer to finish.
-- $1 token
WITH ended AS (
    UPDATE {{outbox_bucket}} SET token = NULL WHERE token = $1 RETURNING bucket
), gone AS (
    DELETE FROM {{outbox_replica}} r
    WHERE r.token = $1
      AND NOT EXISTS (SELECT FROM {{outbox}} o
                      WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL AND o.claimed_by = r.name)
    RETURNING r.token
)
SELECT (SELECT count(*) FROM ended)::int, EXISTS (SELECT FROM gone)
