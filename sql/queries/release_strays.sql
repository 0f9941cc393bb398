-- Release rows whose claim nobody stands for and is over. A claim of ours always has its replica's row:
-- that is registered before the first claim and goes only when nothing is claimed under its name.
WITH locked AS MATERIALIZED (
    SELECT o.id FROM {{outbox}} o
    WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL
      AND (o.claimed_until IS NULL OR o.claimed_until <= clock_timestamp())
      AND NOT EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.name = o.claimed_by)
    ORDER BY o.id
    FOR UPDATE OF o SKIP LOCKED
)
UPDATE {{outbox}} SET claimed_by = NULL, claimed_until = NULL
WHERE id = ANY (ARRAY(SELECT id FROM locked))
