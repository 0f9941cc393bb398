-- Give up on dead events for good; the trigger rings for those that they held back. Those that somebody
-- holds locked are passed over.
-- $1..$8 see dead_filter.sql   $9 rows at most
WITH found AS MATERIALIZED (
    SELECT o.id FROM {{outbox}} o
    WHERE {{dead_filter}}
    ORDER BY o.id
    LIMIT $9::int
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}} SET status = 'discarded'
WHERE id = ANY (ARRAY(SELECT id FROM found))
RETURNING id
